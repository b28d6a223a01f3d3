"""K15: a peer of `atoll train` that is asked to end says goodbye, quickly; the other does not wait for a timeout."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.swarm import Swarm, environment

pytestmark = [pytest.mark.e2e, pytest.mark.fault, pytest.mark.timeout(240)]

RUN = """
[run]
name = "leaving"
steps = 400

[model]
dim = 32
num_layers = 1
num_heads = 2
num_kv_heads = 1
ffn_dim = 64
max_seq_len = 32

[data]
sources = ["{text}"]
seq_len = 32
val_fraction = 0.2

[inner]
batch_size = 4

[outer]
inner_steps = 10

[local]
out = "{out}"
threads = 1
"""


def start(tmp_path: Path, swarm: Swarm, peer: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "atoll", "train", str(tmp_path / "run.toml")]
    command += ["--set", f"local.coordinator={swarm.address}", "--set", f"local.peer={peer}"]
    with (tmp_path / f"{peer}.log").open("wb") as log:
        return subprocess.Popen(command, env=environment(), stdout=log, stderr=log, stdin=subprocess.DEVNULL)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_is_a_goodbye(tmp_path: Path, number: signal.Signals, code: int) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for index in range(20):
        (text / f"{index}.txt").write_text(f"document {index} " * 200)
    (tmp_path / "run.toml").write_text(RUN.format(text=text, out=tmp_path))
    # dead_s is long on purpose: only a goodbye lets the other go on at once.
    with Swarm(tmp_path, start_peers=2, run="leaving", dead_s=60.0, coordinator_lost_s=90.0) as swarm:
        goes, stays = start(tmp_path, swarm, "goes"), start(tmp_path, swarm, "stays")
        try:
            swarm.wait(lambda: len(swarm.events("RoundCommitted")) >= 2, within_s=150, what="two rounds")
            goes.send_signal(number)
            asked_s = time.monotonic()
            assert goes.wait(timeout=60) == code, (tmp_path / "goes.log").read_text()
            assert time.monotonic() - asked_s < 5 + 5, "gone within 5 s, and slack for a busy machine"
            assert stays.wait(timeout=120) == 0, (tmp_path / "stays.log").read_text()
        finally:
            for process in (goes, stays):
                process.kill()
                process.wait()
        left = [event["peer"] for event in swarm.events("PeerLeft")]
        assert left == ["goes", "stays"]
        assert not swarm.events("PeerLost")
        committed = swarm.events("RoundCommitted")
        assert committed[-1]["version"] == 40
        assert committed[-1]["members"] == ["stays"]
        assert "Traceback" not in (tmp_path / "goes.log").read_text()
