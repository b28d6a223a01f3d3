"""A donor and its sidecar, a process of its own: what it tells and gives, at which pace, and how it is kept alive."""

from __future__ import annotations

import http.client
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest

from atoll.errors import LocalError
from atoll.recovery.donor import Donor
from atoll.recovery.folder import RAM
from atoll.recovery.priority import NICENESS
from atoll.recovery.sidecar.server import FLOOR_BYTES_PER_S, QUIET_BYTES_PER_S
from atoll.recovery.update import decode_head
from atoll.state import manifest as manifests
from support.asking import Asker
from support.donating import KEEP_BYTES, KEY, RUN, commit_to, new_donor, stage_at, within
from support.history import History
from support.slack import SLACK_S

NUMEL = 50_000


@pytest.fixture
def donor(tmp_path: Path) -> Iterator[Donor]:
    with new_donor(tmp_path) as donor:
        yield donor


@pytest.fixture
def history() -> History:
    return History(NUMEL)


def test_it_tells_what_is_held_and_gives_it(donor: Donor, history: History) -> None:
    commit_to(history, [donor], 2)
    stage_at(history.state, [donor])
    commit_to(history, [donor], 2)
    with Asker(donor.port) as asker:
        held = asker.held()
        assert [each.version for each in held.snapshots] == [2]
        assert [each.version for each in held.updates] == [1, 2, 3, 4]
        assert [each.version for each in asker.held(after=3).updates] == [4]
        folder = f"/v1/{held.snapshots[0].folder}"
        manifest = manifests.decode(asker.ask(f"{folder}/manifest.json").body)
        assert manifest.digest == history.digests[2]
        state = history.at(2)
        (span,) = manifest.spans("velocity", 100, 20_000)
        last = span.offset + span.size_bytes - 1
        answer = asker.ask(f"{folder}/{span.file}", f"bytes={span.offset}-{last}")
        assert answer.status == 206
        assert (
            answer.headers["content-range"] == f"bytes {span.offset}-{last}/{manifest.shards[0].size_bytes}"
        )
        assert np.array_equal(np.frombuffer(answer.body, dtype="<f4"), state.velocity[100:20_000])
        assert len(asker.ask(f"{folder}/{span.file}").body) == manifest.shards[0].size_bytes
        for each in held.updates:
            update, data = history.updates[each.version]
            assert decode_head(asker.ask(f"/v1/{each.head}").body).update == update
            assert asker.ask(f"/v1/{each.data}").body == data.tobytes()
        assert (
            asker.ask(f"/v1/{held.updates[0].data}", "bytes=5-9").body
            == history.updates[1][1].tobytes()[5:10]
        )


def test_it_serves_before_anything_is_staged(donor: Donor, history: History) -> None:
    donor.start_serving()
    with Asker(donor.port) as asker:
        assert asker.held().updates == ()
        assert asker.ask("/v1/snapshots/1-1/manifest.json").status == 404
        assert donor.stage(history.state)
        within(SLACK_S, lambda: asker.held().snapshots, "the sidecar heard of the folder")


def test_who_connects_before_it_runs_is_served_when_it_does(donor: Donor, history: History) -> None:
    assert donor.pid is None
    got: list[int] = []

    def ask() -> None:
        with Asker(donor.port) as asker:
            got.append(len(asker.held().snapshots))

    early = threading.Thread(target=ask)
    early.start()
    stage_at(history.state, [donor])
    early.join(20.0)
    assert got in ([0], [1])


@pytest.mark.parametrize(
    ("target", "byte_range", "status"),
    [
        ("/", "", 404),
        ("/v1/held/", "", 404),
        ("/v1/held/-2", "", 404),
        ("/v1/held/1?x=1", "", 404),
        ("/v1/lock", "", 404),
        ("/v1/snapshots/0-1/", "", 404),
        ("/v1/snapshots/0-1/../../lock", "", 404),
        ("/v1/snapshots/0-1/%2e%2e/%2e%2e/lock", "", 404),
        ("/v1/snapshots/0-1/shard-00001.safetensors", "", 404),
        ("/v1/snapshots/.slot-1/shard-00000.safetensors", "", 404),
        ("/v1/snapshots/0-2/manifest.json", "", 404),
        ("/v1/updates/../lock", "", 404),
        ("/v1/updates/9-9.bin", "", 404),
        ("/v1/snapshots/0-1/shard-00000.safetensors", "bytes=0-", 416),
        ("/v1/snapshots/0-1/shard-00000.safetensors", "bytes=-5", 416),
        ("/v1/snapshots/0-1/shard-00000.safetensors", "bytes=9-8", 416),
        ("/v1/snapshots/0-1/shard-00000.safetensors", "bytes=0-1,5-6", 416),
        ("/v1/snapshots/0-1/shard-00000.safetensors", f"bytes=0-{10**17}", 416),
        ("/v1/snapshots/0-1/shard-00000.safetensors", f"bytes=0-{10**40}", 416),
        ("/v1/snapshots/0-1/shard-00000.safetensors", "lines=0-1", 416),
    ],
)
def test_what_it_does_not_give_even_to_peers(
    serving: Donor, target: str, byte_range: str, status: int
) -> None:
    with Asker(serving.port) as asker:
        answer = asker.ask(target, byte_range)
        assert (answer.status, answer.body) == (status, b"")
        assert asker.held().snapshots, "the connection is of use still"


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Donor]:
    """One that only is looked at."""
    with new_donor(tmp_path_factory.mktemp("serving")) as donor:
        stage_at(History(NUMEL).state, [donor])
        yield donor


@pytest.mark.parametrize("method", ["HEAD", "POST", "PUT", "DELETE", "OPTIONS"])
def test_it_is_read_only(serving: Donor, method: str) -> None:
    with Asker(serving.port) as asker:
        assert asker.ask("/v1/snapshots/0-1/manifest.json", method=method).status == 405


def test_it_keeps_to_its_cap(tmp_path: Path, history: History) -> None:
    with new_donor(tmp_path, max_bytes_per_s=400_000) as donor:
        stage_at(history.state, [donor])
        with Asker(donor.port) as asker:
            asker.held()
            start_s = time.monotonic()
            assert len(asker.ask("/v1/snapshots/0-1/shard-00000.safetensors").body) > NUMEL * 8
            assert time.monotonic() - start_s >= (NUMEL * 8 - 40_000) / 400_000


def test_it_yields_to_a_round_and_no_longer(tmp_path: Path, history: History) -> None:
    """A round holds the rate at a twentieth; when it is over a reader that is half through goes on at once."""
    with new_donor(tmp_path, max_bytes_per_s=4e6) as donor:
        donor.yield_to_round(True)  # before there is a folder to say it in
        stage_at(history.state, [donor])
        with Asker(donor.port) as asker:
            asker.held()
            start_s = time.monotonic()
            asker.ask("/v1/snapshots/0-1/shard-00000.safetensors", "bytes=0-99999")
            assert time.monotonic() - start_s >= (100_000 - 30_000) / (4e6 / 20)
            over = threading.Timer(0.5, donor.yield_to_round, [False])
            over.start()
            start_s = time.monotonic()
            asker.ask("/v1/snapshots/0-1/shard-00000.safetensors")
            seconds = time.monotonic() - start_s
            over.join()
            assert 0.4 <= seconds < 0.5 + NUMEL * 8 / 4e6 + SLACK_S
            assert 0.4 <= seconds < NUMEL * 8 / (4e6 / 20), "it kept to the floor rate after the round"


def test_a_short_round_has_the_line_to_itself(donor: Donor, history: History) -> None:
    stage_at(history.state, [donor])
    with Asker(donor.port) as asker:
        asker.held()
        donor.yield_to_round(True)
        start_s = time.monotonic()
        asker.ask("/v1/snapshots/0-1/shard-00000.safetensors", "bytes=0-65535")
        assert time.monotonic() - start_s >= (65_536 - 30_000) / QUIET_BYTES_PER_S
        assert QUIET_BYTES_PER_S < FLOOR_BYTES_PER_S / 4


def test_another_session_key_counts_from_the_next_request(donor: Donor, history: History) -> None:
    stage_at(history.state, [donor])
    with Asker(donor.port) as before, Asker(donor.port, key=b"n" * 32) as after:
        assert before.ask("/v1/held/-1").status == 200
        donor.set_session_key(b"n" * 32)
        within(SLACK_S, lambda: after.ask("/v1/held/-1").status == 200 or after.connection.close(), "the key")
        with pytest.raises(http.client.RemoteDisconnected):  # what the old key had opened is closed
            before.ask("/v1/held/-1")
    with Asker(donor.port) as before:
        assert before.ask("/v1/held/-1").status == 401


def test_a_sidecar_that_died_is_started_again_with_a_warning(
    donor: Donor, history: History, caplog: pytest.LogCaptureFixture
) -> None:
    stage_at(history.state, [donor])
    first, port = donor.pid, donor.port
    assert first is not None
    os.kill(first, signal.SIGKILL)
    within(SLACK_S, lambda: donor.pid is None, "the death")
    commit_to(history, [donor])
    with caplog.at_level(logging.WARNING):
        assert donor.stage(history.state)
    assert caplog.messages == ["the sidecar ended by itself (exit code -9); starting another one"]
    assert donor.pid not in (None, first)
    with Asker(port) as asker:
        assert [each.version for each in asker.held().snapshots] == [0, 1]


def test_starting_twice_is_starting_once(donor: Donor) -> None:
    donor.start_serving()
    pid = donor.pid
    starters = [threading.Thread(target=donor.start_serving) for _ in range(8)]
    for each in starters:
        each.start()
    for each in starters:
        each.join()
    assert donor.pid == pid


def test_a_peer_that_nobody_asks_pays_for_nothing_but_a_socket(donor: Donor) -> None:
    donor.yield_to_round(True)
    donor.set_session_key(b"n" * 32)
    assert donor.pid is None
    assert donor.folder is None


def test_it_is_up_unasked_when_its_peer_has_been_in_the_run_for_a_while(
    donor: Donor, history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit_to(history, [donor])
    assert donor.pid is None
    monkeypatch.setattr("atoll.recovery.donor._EARLY_S", 0.0)
    commit_to(history, [donor])
    assert donor.pid is not None


def test_it_goes_last_where_processors_are_short(serving: Donor) -> None:
    assert serving.pid is not None
    niceness = min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)
    assert os.getpriority(os.PRIO_PROCESS, serving.pid) == niceness


def test_closing_ends_the_sidecar_and_removes_the_folder(tmp_path: Path, history: History) -> None:
    donor = new_donor(tmp_path)
    commit_to(history, [donor])
    stage_at(history.state, [donor])
    pid, folder = donor.pid, donor.folder
    assert pid is not None
    assert folder is not None
    assert folder.parent == RAM
    donor.close()
    donor.close()
    assert not psutil.pid_exists(pid)
    assert not folder.exists()
    donor.start_serving()
    assert not donor.stage(history.state)
    commit_to(history, [donor])
    donor.yield_to_round(True)
    donor.set_session_key(KEY)
    assert donor.pid is None
    assert donor.folder is None


def test_its_command_line_and_environment_hold_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATOLL_TOKEN", "a-token-that-nobody-may-see")
    with new_donor(tmp_path) as donor:
        donor.start_serving()
        with Asker(donor.port) as asker:
            asker.held()
        process = psutil.Process(donor.pid)
        assert KEY.hex() not in " ".join(process.cmdline())
        assert not [name for name in process.environ() if name.startswith("ATOLL_")]


def test_what_finds_no_room_in_ram_is_staged_elsewhere(
    tmp_path: Path, history: History, caplog: pytest.LogCaptureFixture
) -> None:
    with Donor(
        run=RUN,
        peer="p0",
        session_key=KEY,
        bind_host="127.0.0.1",
        fallback=tmp_path / "out",
        keep_bytes=KEEP_BYTES,
        pin_bytes=0,
        ram=tmp_path / "no such",
    ) as donor:
        with caplog.at_level(logging.WARNING):
            stage_at(history.state, [donor])
            commit_to(history, [donor], 2)
        assert len(caplog.messages) == 1
        with Asker(donor.port) as asker:
            assert asker.held().snapshots
            assert len(asker.held().updates) == 2


def test_without_any_room_a_peer_gives_nothing_and_trains_on(
    tmp_path: Path, history: History, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with Donor(
        run=RUN,
        peer="p0",
        session_key=KEY,
        bind_host="127.0.0.1",
        fallback=tmp_path / "file" / "out",
        keep_bytes=KEEP_BYTES,
        pin_bytes=0,
        ram=tmp_path / "no such",
    ) as donor:
        assert not donor.stage(history.state)
        commit_to(history, [donor])
        assert "no place to stage snapshots" in caplog.text


def test_a_port_that_is_taken_is_named(serving: Donor, tmp_path: Path) -> None:
    with pytest.raises(LocalError, match=f"cannot listen on 127.0.0.1:{serving.port}: the port is in use"):
        Donor(
            run=RUN,
            peer="p1",
            session_key=KEY,
            bind_host="127.0.0.1",
            port=serving.port,
            fallback=tmp_path,
            keep_bytes=0,
            pin_bytes=0,
        )


def test_a_manifest_is_valid_json_for_other_tools(serving: Donor) -> None:
    with Asker(serving.port) as asker:
        body = asker.ask("/v1/snapshots/0-1/manifest.json").body
    assert msgspec.json.decode(body)["numel"] == NUMEL
