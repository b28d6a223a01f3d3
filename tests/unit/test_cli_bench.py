"""`atoll bench`: rows that a program can read, figures that can be checked, one line for each mistake."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from atoll.cli.bench import rivals
from atoll.cli.bench.bounds import even_links, lower_bound_s, payload_rate, sent_bytes
from atoll.cli.bench.joining import Listener
from atoll.cli.bench.measure import Row
from atoll.cli.bench.plans import Recipe, choice_for, members_of, plan_for
from atoll.cli.bench.values import PERIOD, fill, relative_error
from atoll.cli.main import run
from atoll.plan.grid import Grid
from atoll.values import CODECS, Lane

TOKEN = "a token for tests only"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ATOLL_TOKEN", TOKEN)
    monkeypatch.chdir(tmp_path)


@contextlib.contextmanager
def killed_at_the_end(process: subprocess.Popen[str]) -> Iterator[None]:
    """So that a test that fails does not wait for it."""
    try:
        yield
    finally:
        process.kill()


def bench(arguments: str) -> int:
    return run(["bench", *arguments.split()])


def test_all_reduce_rows_hold_what_is_promised(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("allreduce --world 3 --numel 300k --codec int8,fp32 --turns 2 --json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["codec"] for row in rows] == ["int8", "fp32"]
    for row in rows:
        assert set(row) == set(Row.__struct_fields__)
        assert (row["world"], row["numel"], row["turns"], row["equal"]) == (3, 300_000, 2, True)
        assert row["seconds_min"] <= row["seconds"] <= row["seconds_max"]
        # The last acknowledgements may leave when the op is over here already: a hundredth at most.
        assert 0.99 * row["bytes_formula"] <= row["bytes_sent"] < 1.02 * row["bytes_formula"] + 10_000
        assert row["lower_bound_s"] > 0
        assert row["cpu_s"] > 0
        assert row["speedup"] == {}
    assert 1e-3 < rows[0]["rel_error"] < 2e-2
    assert rows[1]["rel_error"] < 1e-6


@pytest.mark.parametrize("world", [2, 4])
def test_an_all_reduce_takes_little_memory_beside_its_buffers(
    capsys: pytest.CaptureFixture[str], world: int
) -> None:
    """At most twice the encoded vector, and 64 MiB: what a root keeps of the others for a retry is one such."""
    assert bench(f"allreduce --world {world} --numel 12M --codec int8,fp32 --turns 1 --json") == 0
    for row in json.loads(capsys.readouterr().out):
        if row["extra_bytes"] is None:
            pytest.skip("this system does not tell how much memory a process had at the most")
        print(
            f"{row['codec']}: {row['extra_bytes'] / row['wire_bytes']:.2f} of {row['wire_bytes'] / 1e6:.1f} MB"
        )
        assert 0 < row["extra_bytes"] <= 2 * row["wire_bytes"] + (64 << 20)


def test_gloo_takes_turns_with_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("allreduce --numel 50k --turns 1 --compare gloo --json") == 0
    (row,) = json.loads(capsys.readouterr().out)
    gloo = row["compared"]["gloo"]
    assert row["speedup"]["gloo"] == pytest.approx(gloo["seconds"] / row["seconds"])
    assert gloo["rel_error"] < 1e-6


def test_the_table_names_its_bound(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("allreduce --numel 50k --turns 1 --mbit 1000 --rtt-ms 10") == 0
    text = capsys.readouterr().out
    assert "for the rate and round trip that were given" in text
    assert "int8" in text


def test_a_world_of_one_needs_no_network(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("allreduce --world 1 --numel 10k --turns 1 --json") == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["bytes_sent"], row["bytes_formula"], row["ratio"]) == (0, 0, 0.0)


def test_codec_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("codec --numel 4096,10k --turns 1 --json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["codec"], row["numel"]) for row in rows] == [
        (name, size) for size in (4096, 10_000) for name in CODECS
    ]
    assert all(row["encode_elements_per_s"] > 0 and row["decode_of_memcpy"] > 0 for row in rows)


def test_link_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("link --mb 1 --connections 1 --connections 3 --turns 1 --json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["connections"] for row in rows] == [1, 3]
    assert all(0 < row["rtt_s"] < 1 and row["bytes_per_s"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("allreduce --codec int9", f"--codec int9: unknown; there are: {', '.join(CODECS)}"),
        ("codec --codec x", "--codec x: unknown; there are: fp32"),
        ("allreduce --topology star", "--topology star: unknown; there are: auto, direct, ring, two-level"),
        ("allreduce --world 0", "--world 0: at least 1 member"),
        ("allreduce --world 65", "64 members are the most"),
        ("allreduce --world 60 --connections 1000", "descriptors"),
        ("allreduce --numel many", "--numel many: a count of elements"),
        ("allreduce --turns 0", "--turns is at least 1"),
        ("allreduce --compare mpi", "--compare mpi: unknown; there are: gloo, hivemind"),
        ("allreduce --join nowhere", "--join nowhere: write it as host:port"),
        ("allreduce --tls nowhere", "--tls nowhere: nowhere/node.pem: no such file or directory"),
        ("allreduce --tls . --listen 127.0.0.1:0", "--tls is for members on this machine"),
        ("link --connections 0", "--connections is from 1 to 64"),
    ],
)
def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], arguments: str, complaint: str) -> None:
    assert bench(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert complaint in line


def test_a_rival_that_is_not_installed_is_named_with_its_install_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(rivals._NEEDS, "hivemind", ("a_module_that_is_not_there", "pip install it"))
    assert bench("allreduce --compare hivemind") == 2
    assert "--compare hivemind: a_module_that_is_not_there is not installed; pip install it" in (
        capsys.readouterr().err
    )


def test_members_join_from_elsewhere_with_the_token_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "atoll", "bench", "allreduce"]
    conductor = subprocess.Popen(
        [*command, "--listen", address, "--numel", "20k", "--turns", "1", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with conductor, killed_at_the_end(conductor):
        assert conductor.stderr is not None
        assert "waiting for 1 more" in conductor.stderr.readline()
        with socket.create_connection(tuple(address.rsplit(":", 1)), timeout=5.0) as stranger:  # type: ignore[arg-type]
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            join = [*command, "--join", address]
            wrong = subprocess.run(
                join,
                env={**os.environ, "ATOLL_TOKEN": "another token, also long"},
                capture_output=True,
                timeout=60,
                check=False,
            )
            assert wrong.returncode == 5
            assert b"has another token" in wrong.stderr
            right = subprocess.run(join, capture_output=True, timeout=60, check=False)
        out, _ = conductor.communicate(timeout=60)
    assert right.returncode == 0, right.stderr
    assert conductor.returncode == 0
    assert json.loads(out)[0]["world"] == 2


def test_nobody_listening_is_said_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with Listener("127.0.0.1", 0, TOKEN.encode()) as listener:
        port = listener.port
    assert bench(f"link --join 127.0.0.1:{port}") == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert "is `atoll bench ... --listen` running there?" in line


def test_a_sample_tells_the_error_of_all() -> None:
    numel, world = 3 * PERIOD + 17, 3
    vectors = np.empty((world, numel), dtype=np.float32)
    for index, vector in enumerate(vectors):
        fill(vector, index, seed=4)
    mean = vectors.astype(np.float64).mean(axis=0).astype(np.float32)
    assert relative_error(mean, world, 4) < 1e-6
    assert relative_error(mean * np.float32(1.01), world, 4) == pytest.approx(0.01, rel=1e-3)
    assert relative_error(mean, world, 5) > 0.5


def test_bytes_by_the_plan() -> None:
    """Direct, equal: everybody sends 2V(N-1)/N; a chain: the ends send once, and what is between twice."""
    engines, numel = [("h", 1)] * 4, 1024 * 1024
    choice = choice_for(Recipe("fp32", "equal", chunk_bytes=1 << 20), 4, numel, ())
    plan = plan_for(choice, "fp32", engines, numel, 1)
    grid, vector = Grid.of([numel]), 4 * numel
    frames = 3 + 3  # a chunk to or from each of the others, and as many acknowledgements
    assert set(sent_bytes(plan, grid).values()) == {2 * vector * 3 // 4 + 2 * 64 * frames}
    chain = Lane(plan.members[3], 1, up=(1, 2, 3, 3), down=(1, 2, 3, 3))
    sent = sent_bytes(replace(plan, lanes=(chain,)), grid)
    chunks = vector >> 20
    payload = [sent[member] - 64 * chunks * n for member, n in zip(plan.members, (2, 4, 4, 2), strict=True)]
    assert payload == [vector, 2 * vector, 2 * vector, vector]


def test_bounds() -> None:
    """Of equal sites the formula, plus a round trip; a lone member needs no time."""
    rate = payload_rate(200.0)
    assert rate == pytest.approx(24_125_000.0)
    for world in (2, 4, 8):
        members = members_of(world)
        links = even_links(members, rate, 0.08)
        expected = 2 * 40e6 * (world - 1) / (world * rate) + 0.08
        assert lower_bound_s(links, members, 40_000_000) == pytest.approx(expected, rel=1e-3)
    assert lower_bound_s((), members_of(1), 100) == 0.0
