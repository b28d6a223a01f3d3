"""What a peer does to catch up: a table of situations, and the choice with its reason."""

from __future__ import annotations

import pytest

from atoll.recovery.choosing import Offer, choose

NOTHING = Offer(frozenset(), {})
ALL = range(100)


def offer(snapshots: list[int], updates: range, size: int = 10) -> Offer:
    return Offer(frozenset(snapshots), dict.fromkeys(updates, size))


@pytest.mark.parametrize(
    ("version", "target", "offers", "kind", "to"),
    [
        pytest.param(5, 8, [], "wait", 8, id="nobody answers"),
        pytest.param(5, 8, [offer([], range(3, 9))], "replay", 8, id="all updates are held"),
        pytest.param(5, 8, [offer([], range(3, 8))], "replay", 7, id="the newest is still to come"),
        pytest.param(
            5, 8, [offer([], range(6, 7)), offer([], range(7, 9))], "replay", 8, id="of two sources"
        ),
        pytest.param(5, 8, [offer([], range(6, 20))], "replay", 8, id="not beyond the target"),
        pytest.param(5, 8, [offer([], range(7, 9))], "ask", 8, id="one is gone"),
        pytest.param(5, 8, [offer([7], range(8, 9))], "snapshot", 7, id="one is gone, a snapshot is there"),
        pytest.param(5, 8, [offer([8], range(0))], "snapshot", 8, id="no log at all"),
        pytest.param(5, 8, [offer([7], range(6, 9))], "replay", 8, id="updates are fewer bytes"),
        pytest.param(5, 20, [offer([7], range(6, 21))], "snapshot", 7, id="updates are more bytes"),
        pytest.param(5, 20, [offer([6, 12], range(6, 21))], "snapshot", 12, id="the newest snapshot"),
        pytest.param(5, 20, [offer([12], range(14, 21))], "ask", 20, id="a snapshot that leads nowhere"),
        pytest.param(
            5, 20, [offer([10, 12], range(11, 13)), NOTHING], "snapshot", 12, id="nothing newer held"
        ),
        pytest.param(5, 20, [offer([5, 4], range(18, 21))], "ask", 20, id="a snapshot of what it has"),
        pytest.param(5, 6, [NOTHING], "wait", 6, id="donors are about to write it down"),
        pytest.param(None, 6, [offer([6], range(3, 7))], "snapshot", 6, id="no use, of the same version"),
        pytest.param(None, 6, [offer([2], range(3, 7))], "snapshot", 2, id="no use, an older one will do"),
        pytest.param(None, 6, [offer([], range(3, 7))], "ask", 6, id="no use, updates do not help"),
        pytest.param(5, 8, [offer([9], range(0))], "wait", 8, id="not beyond the target, a snapshot"),
        pytest.param(9, 8, [offer([8], range(0))], "wait", 8, id="a target that lags behind"),
    ],
)
def test_what_is_done(version: int | None, target: int, offers: list[Offer], kind: str, to: int) -> None:
    choice = choose(version=version, target=target, known=ALL, offers=offers, snapshot_bytes=100)
    assert (choice.kind, choice.version) == (kind, to), choice.reason
    assert choice.reason


def test_a_snapshot_without_a_known_digest_is_not_taken() -> None:
    choice = choose(version=0, target=9, known={8}, offers=[offer([7, 8, 9], range(0))], snapshot_bytes=1)
    assert (choice.kind, choice.version) == ("snapshot", 8)


def test_patience_for_an_update_ends() -> None:
    choice = choose(version=5, target=6, known=ALL, offers=[NOTHING], snapshot_bytes=1, patient=False)
    assert choice.kind == "ask"


def test_who_asked_in_vain_takes_the_longer_way() -> None:
    offers = [offer([], range(1, 30))]
    choice = choose(version=0, target=29, known=ALL, offers=offers, snapshot_bytes=100)
    assert choice.kind == "ask"
    choice = choose(version=0, target=29, known=ALL, offers=offers, snapshot_bytes=100, asked_in_vain=True)
    assert (choice.kind, choice.version) == ("replay", 29)
    assert choice.reason == "replaying updates 1 to 29: 290 bytes, a snapshot has 100"
