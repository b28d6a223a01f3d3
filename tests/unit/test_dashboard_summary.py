"""The numbers at the end of a run, checked by hand on events that never happened."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from atoll import events
from atoll.cli.demo_report import json_report, text_report
from atoll.dashboard.summary import (
    Saves,
    compute_utilisation,
    data_parallel_bytes,
    digests_equal,
    losses,
    saves,
    saves_text,
    summarise,
)
from atoll.dashboard.view import Seen
from support.made_up_run import BEGAN_S, applied, loss_at, made_up_run

PARAMETERS = 354_000
KEYS = {
    "val_loss_before",
    "val_loss_after",
    "tokens",
    "rounds",
    "peers_lost",
    "bytes_sent_per_peer",
    "bytes_data_parallel",
    "compute_utilisation",
    "digests_equal",
    "saves_done",
    "saves_skipped",
    "saves_failed",
    "saved_version",
    "run_dir",
}


def test_a_run_with_a_kill() -> None:
    summary = summarise(made_up_run(), PARAMETERS)
    assert summary.val_loss_before == 5.6
    assert summary.val_loss_after == pytest.approx(loss_at(240) - 0.1)
    assert summary.rounds == 24
    assert summary.tokens == (12 * 3 + 12 * 2) * 5120
    assert [loss.peer for loss in summary.lost] == ["peer-2"]
    assert summary.bytes_sent_per_peer == 24 * 480_000  # of those who saw the end
    assert summary.bytes_data_parallel == 120 * 8 * PARAMETERS * 2 // 3 + 120 * 8 * PARAMETERS // 2
    assert summary.compute_utilisation == pytest.approx(2.5 / 2.8)
    assert summary.digests_equal


def test_data_parallel_bytes_are_those_of_a_ring() -> None:
    assert data_parallel_bytes(applied(0, ("a", "b")), 1000) == 10 * 2 * 4 * 1000 // 2
    assert data_parallel_bytes(applied(0, ("a",)), 1000) == 0


def test_one_differing_digest_is_seen() -> None:
    members = ("a", "b")
    assert digests_equal([applied(0, members), applied(0, members), applied(1, members)])
    assert not digests_equal([applied(0, members), applied(1, members), applied(1, members, digest="other")])
    assert not digests_equal([])


def test_utilisation_counts_every_phase() -> None:
    event = msgspec.structs.replace(
        applied(0, ("a",)), compute_s=3.0, wait_s=1.0, encode_s=0, wire_s=0, vote_s=0, apply_s=0
    )
    assert compute_utilisation([event]) == 0.75
    assert compute_utilisation([]) is None


def test_a_kill_explains_the_loss_that_follows() -> None:
    (killed,) = losses(made_up_run())
    assert killed.reason == "killed with SIGKILL, on purpose"
    assert killed.after_s == pytest.approx(33.25)
    unexplained = [each for each in made_up_run() if not isinstance(each.event, events.PeerKilled)]
    assert [loss.reason for loss in losses(unexplained)] == ["no heartbeat for 3.0 s"]


def test_saves_are_counted_over_all_peers() -> None:
    def saved(version: int) -> events.CheckpointSaved:
        return events.CheckpointSaved(
            version=version,
            path="x",
            shared_bytes=1,
            own_bytes=1,
            still_s=0.1,
            write_s=1,
            verify_s=1,
            removed=(),
        )

    told: list[tuple[str, events.Event]] = [
        ("a", saved(3)),
        ("b", saved(3)),
        ("a", events.CheckpointSkipped(version=6, reason="version 3 is still being written")),
        ("b", events.CheckpointFailed(version=6, reason="no space left on device", number=1)),
        ("a", saved(9)),
        ("a", events.CheckpointsCounted(saved=2, skipped=1, failed=0, newest=9)),
    ]
    found = saves(Seen(BEGAN_S, source, event) for source, event in told)
    assert found == Saves(done=3, skipped=1, failed=1, newest=9)
    assert saves_text(found) == "3 done, 1 skipped, 1 failed; the newest is version 9"
    assert saves_text(saves([])) == ""
    seen = [*made_up_run(), *(Seen(BEGAN_S, source, event) for source, event in told)]
    assert json_report(summarise(seen, PARAMETERS), Path("x"))["saved_version"] == 9
    assert "3 done, 1 skipped, 1 failed" in text_report(summarise(seen, PARAMETERS), Path("x"), "")


def test_nothing_happened() -> None:
    summary = summarise([], PARAMETERS)
    assert (summary.rounds, summary.tokens, summary.val_loss_before, summary.digests_equal) == (
        0,
        0,
        None,
        False,
    )
    assert "was not measured" in text_report(summary, Path("runs/x"), "")


def test_the_json_report_has_exactly_the_documented_keys() -> None:
    report = json_report(summarise(made_up_run(), PARAMETERS), Path("runs/x"))
    assert set(report) == KEYS
    assert report["peers_lost"] == ["peer-2"]
    assert report["run_dir"] == "runs/x"


def test_the_report_for_people() -> None:
    summary = summarise(made_up_run(), PARAMETERS)
    text = text_report(summary, Path("runs/x"), "def f():\n    return 1")
    assert "5.600 -> 1.868 nats per byte" in text
    assert "peer-2 after 0:33: killed with SIGKILL, on purpose" in text
    assert "11.5 MB; plain data-parallel training of the same steps sends 396 MB, 34 times as much" in text
    assert "        return 1" in text
    assert "yes, on every peer" in text
    assert "NO" in text_report(replace(summary, digests_equal=False), Path("runs/x"), "")


def test_one_peer_sends_nothing() -> None:
    seen = [Seen(BEGAN_S, "a", applied(0, ("a",), sent_bytes=0))]
    assert "nothing: there was one peer" in text_report(summarise(seen, PARAMETERS), Path("x"), "")
