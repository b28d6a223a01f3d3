"""`atoll plan`: what it prints is what the settings, the planner and the rates say; each mistake is one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atoll.cli.link_rates import read_rates
from atoll.cli.main import run
from atoll.plan.grid import Grid
from atoll.plan.planner import choose
from atoll.values import LinkRate, PlanRequest

ROOT = Path(__file__).parents[2]
TINY = str(ROOT / "recipes" / "tiny-stdlib.toml")
CLOUDS = str(ROOT / "recipes" / "three-clouds.toml")

RATES = """
rtt_ms = 80
[peers.bern]
up = "200 Mbit/s"
down = "1 Gbit/s"
[peers.oslo]
up = "100 Mbit/s"
[[links]]
source = "bern"
target = "oslo"
rate = "50 Mbit/s"
rtt_ms = 120
loss = 0.01
"""


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def asked(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run(["plan", *arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def test_the_table_says_memory_bytes_and_seconds(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    assert run(["plan", CLOUDS, "--up", "200 Mbit/s", "--rtt", "80"]) == 0
    out = capsys.readouterr().out
    assert "run three-clouds: 113,268,480 parameters; 1 rank a peer" in out
    for part in (
        "on the device (cuda)",
        "in RAM, by rounds",
        "staged by the peer",
        "~ ",
        "a round of 3 peers",
    ):
        assert part in out
    assert "sync: direct: about " in out
    assert "assumed" not in out
    assert list(folder.iterdir()) == [], "nothing has started"


def test_without_rates_it_says_what_it_assumes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", TINY]) == 0
    out = capsys.readouterr().out
    assert "100 Mbit/s assumed); give --up, --down and --rtt for your own" in out
    assert "in RAM, by training (device cpu)" in out


def test_json_holds_what_the_planner_predicts(capsys: pytest.CaptureFixture[str]) -> None:
    found = asked(capsys, TINY, "--peers", "4", "--up", "20 Mbit/s", "--down", "80 Mbit/s", "--rtt", "100")
    members = [f"peer-{n}" for n in range(4)]
    lines = [(LinkRate(m, "", 2.5e6), LinkRate("", m, 1e7)) for m in members]
    pairs = [LinkRate(a, b, 2.5e6, 0.1) for a in members for b in members if a != b]
    request = PlanRequest(
        members=tuple(members),
        contributors=tuple(members),
        wire_bytes=found["vector_bytes"],
        codec="int8",
        links=(*(link for line in lines for link in line), *pairs),
    )
    assert found["predicted_s"] == pytest.approx(choose(request).predicted_s)
    assert sorted(found["moved"]) == members
    vector = found["vector_bytes"]
    for each in found["moved"].values():
        assert 1.5 * vector <= each["sent_bytes"] < 1.52 * vector
    assert (
        Grid.of([found["parameters"]]).wire_bytes("int8") <= vector < 1.01 * found["parameters"] * 260 / 256
    )
    for place in ("device", "host", "staging"):
        bill = found[f"memory_{place}"]
        assert bill["total_bytes"] == sum(bill["items"].values())
    assert found["memory_device"]["estimated"] == ["activations"]


def test_more_ranks_need_less_each(capsys: pytest.CaptureFixture[str]) -> None:
    one, eight = asked(capsys, CLOUDS), asked(capsys, CLOUDS, "--ranks", "8")
    assert eight["parameters"] == one["parameters"]
    assert eight["parameters"] / 8 <= eight["elements"] < 1.01 * eight["parameters"] / 8
    (by_rounds, of_eight) = (
        sum(each["memory_host"]["items"].values())
        - each["memory_host"]["items"]["pinned buffers, to and from the GPU"]
        for each in (one, eight)
    )
    assert of_eight < 0.13 * by_rounds
    assert eight["vector_bytes"] == pytest.approx(one["vector_bytes"], rel=0.01)


def test_one_peer_moves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    found = asked(capsys, TINY, "--peers", "1")
    assert found["moved"] == {"peer-0": {"sent_bytes": 0, "received_bytes": 0}}
    assert found["memory_host"]["items"]["others' updates"] == 0
    assert run(["plan", TINY, "--peers", "1"]) == 0
    assert "sync:" not in capsys.readouterr().out


def test_many_peers_are_told_in_two_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", TINY, "--peers", "100"]) == 0
    out = capsys.readouterr().out
    assert "the least" in out
    assert "peer-57" not in out


def test_rates_of_a_file(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    (folder / "rates.toml").write_text(RATES)
    members, links = read_rates(folder / "rates.toml")
    assert members == ("bern", "oslo")
    assert set(links) == {
        LinkRate("bern", "", 25e6),
        LinkRate("", "bern", 125e6),
        LinkRate("oslo", "", 12.5e6),
        LinkRate("", "oslo", 12.5e6),
        LinkRate("bern", "oslo", 6.25e6, 0.12, 0.01),
        LinkRate("oslo", "bern", 12.5e6, 0.12),  # a round trip is that of both ways
    }
    found = asked(capsys, CLOUDS, "--rates", "rates.toml")
    assert sorted(found["moved"]) == ["bern", "oslo"]
    assert "the link of bern to oslo, which loses 1 % of its packets" in found["reason"]
    assert found["predicted_s"] > 113.2 / 6.25, "what bern sends to oslo crosses that link at 6.25 MB/s"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--ranks", "0"], "--ranks 0: a peer has 1 to 1024"),
        (["--ranks", "1000"], "--ranks 1000: rank 352 of 1000 would hold nothing"),
        (["--peers", "0"], "--peers 0: a run has 1 to 1000"),
        (["--up", "fast"], "--up 'fast' is no rate"),
        (["--rtt", "-1"], "--rtt -1: milliseconds"),
        (["--rates", "no.toml"], "--rates no.toml: no such file"),
        (["--rates", "rates.toml", "--peers", "3"], "leave out --peers"),
        (["--rates", "broken.toml"], "it is no TOML"),
        (["--rates", "unknown.toml"], "unknown.toml: peers.bern.upp"),
        (["--rates", "stranger.toml"], "there is no [peers.rome]"),
        (["--rates", "lost.toml"], "lost.toml: links.0.loss"),
        (["--set", "outer.codec=zip"], "outer.codec"),
    ],
)
def test_mistakes_are_one_line(
    capsys: pytest.CaptureFixture[str], folder: Path, arguments: list[str], complaint: str
) -> None:
    (folder / "rates.toml").write_text(RATES)
    (folder / "broken.toml").write_text("[peers")
    (folder / "unknown.toml").write_text('[peers.bern]\nupp = "1 Gbit/s"\n')
    (folder / "stranger.toml").write_text(RATES.replace('target = "oslo"', 'target = "rome"'))
    (folder / "lost.toml").write_text(RATES.replace("loss = 0.01", "loss = 1"))
    assert run(["plan", TINY, *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert complaint in captured.err
    assert len(captured.err.splitlines()) == 1


def test_adapters_and_a_model_that_is_not_known_beforehand(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    adapted = asked(capsys, TINY, "--set", "model.lora_rank=4", "--set", "model.init_from=somewhere")
    assert adapted["elements"] == adapted["trained"] < adapted["parameters"] / 10
    assert adapted["memory_device"]["items"]["frozen weights"] == 4 * (
        adapted["parameters"] - adapted["trained"]
    )
    (folder / "hub.toml").write_text('[model]\nhf = "a/config.json"\n[data]\nsources = ["python-stdlib"]\n')
    assert run(["plan", "hub.toml"]) == 2
    assert "model.hf = 'a/config.json': what that model takes is not known before" in capsys.readouterr().err
