"""K14: three documents for three peers. One is held out, two are slots: who gets none takes part without an update."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from atoll.dashboard.tail import EventTail
from atoll.events import DataRanDry, RoundApplied, RoundCommitted, SlotsRead
from support.swarm import environment

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

RUN = """
[run]
name = "scarce"
steps = 6

[model]
dim = 16
num_layers = 1
num_heads = 2
num_kv_heads = 1
ffn_dim = 32
max_seq_len = 16

[data]
sources = ["{text}"]
seq_len = 16
val_fraction = 0.2

[inner]
batch_size = 2

[outer]
inner_steps = 3

[membership]
start_peers = 3

[local]
out = "{out}"
threads = 1
"""


def test_more_peers_than_slots(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for number in range(3):
        (text / f"{number}.txt").write_text(f"document {number} is short")
    run_toml = tmp_path / "run.toml"
    run_toml.write_text(RUN.format(text=text, out=tmp_path / "runs"))
    command = [sys.executable, "-m", "atoll", "launch", str(run_toml), "--peers", "3"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    seen = EventTail(folder).read()
    committed = [each.event for each in seen if isinstance(each.event, RoundCommitted)]
    assert [(len(each.members), len(each.contributors)) for each in committed] == [(3, 2), (3, 2)]
    digests = {each.source: each.event.digest for each in seen if isinstance(each.event, RoundApplied)}
    assert len(digests) == 3
    assert len(set(digests.values())) == 1
    idle = [each.source for each in seen if each.event == DataRanDry(slots=0, before=0)]
    assert len(idle) == 2, "once a round, whoever it is"
    again = [each.event for each in seen if isinstance(each.event, DataRanDry) and each.event.slots]
    assert again, "the others read theirs once more"
    read = [each.event for each in seen if isinstance(each.event, SlotsRead)]
    assert sorted(slot for reads in read[0].committed.values() for slot, *_ in reads) == [0, 1]
