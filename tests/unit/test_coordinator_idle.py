"""Peers that took no step, for want of data, hurry nobody; and what peers tell of data is checked before it is used."""

from __future__ import annotations

import msgspec
import pytest

from atoll.events import PeerLost, PeerRefused
from atoll.membership.leases import Lease, SlotTable
from atoll.membership.messages import Declare, Freeze, Ready
from atoll.membership.steps import PeerArrived, PeerDropped
from support.desk import Desk, emitted, sent


def idle(desk: Desk, peer: str) -> None:
    round_, version = desk.state.round.number, desk.state.version
    desk.said(peer, Ready(round_, version, "d0", 0, 0, 0.0, True, update_digest=f"update of {peer}"))


def test_who_took_no_step_does_not_start_the_wait_for_those_who_train() -> None:
    desk = Desk(start_peers=3, ready_wait_s=20.0)
    desk.join("a", "b", "c")
    idle(desk, "c")
    effects = desk.wait(60.0, "a", "b", "c")
    assert not emitted(effects, PeerLost)
    desk.ready("a")
    effects = desk.wait(21.0, "a", "b", "c")
    assert [event.peer for event in emitted(effects, PeerLost)] == ["b"]
    assert set(desk.plan().members) == {"a", "c"}


def test_who_took_no_step_does_not_start_the_grace_time() -> None:
    desk = Desk(start_peers=4, policy="deadline", ready_wait_s=600.0, grace_s=1.0, freeze_s=5.0)
    desk.join("a", "b", "c", "d")
    idle(desk, "c")
    idle(desk, "d")
    assert not sent(desk.wait(30.0, "a", "b", "c", "d"), Freeze)
    desk.ready("a")  # half of those who train
    assert sent(desk.wait(2.0, "a", "b", "c", "d"), Freeze) == ["b"]


def test_all_may_have_taken_no_step() -> None:
    desk = Desk(start_peers=2)
    desk.join("a", "b")
    idle(desk, "a")
    idle(desk, "b")
    assert "no member has an update" in desk.last.reason


def test_a_run_is_not_rolled_back_to_somebody_who_holds_nothing() -> None:
    desk = Desk(start_peers=1, relearn_s=5.0)
    desk.join("a")
    desk.hear(PeerArrived("b", "1", "host"))
    desk.said("b", Declare(desk.layout, desk.run_settings, (), -1, 0, "nothing", 0))
    desk.hear(PeerDropped("a", "1"))
    effects = desk.wait(20.0, "b")
    assert [event.peer for event in emitted(effects, PeerLost)] == ["a"]
    assert desk.state.version == 0


@pytest.mark.parametrize(
    ("num_slots", "table", "said"),
    [
        (1 << 40, None, "0 to 1048576 can be leased"),
        (4, SlotTable(count=8, seed=1), "it counts 8 slots, the text has 4"),
        (4, SlotTable(count=4, seed=1, pool=(Lease(4),)), "it names a slot that is none of the 4"),
        (4, SlotTable(count=4, seed=1, pool=(Lease(1),), leases={"x": (Lease(1),)}), "it names a slot twice"),
        (4, SlotTable(count=4, seed=1, pool=(Lease(1, 0, -5),)), "it counts below zero"),
        (4, SlotTable(count=4, seed=1, dealt=5), "it dealt 5 of 4 slots"),
    ],
)
def test_what_is_told_of_data_must_make_sense(num_slots: int, table: SlotTable | None, said: str) -> None:
    desk = Desk(start_peers=1)
    desk.hear(PeerArrived("a", "1", "host"))
    declared = Declare(desk.layout, desk.run_settings, (), 0, 0, "d0", 0)
    effects = desk.said("a", msgspec.structs.replace(declared, num_slots=num_slots, wish=1, slots=table))
    (refused,) = emitted(effects, PeerRefused)
    assert said in refused.reason
    assert desk.state.slots is None
