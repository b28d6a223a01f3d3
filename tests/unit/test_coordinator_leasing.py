"""Leases where no scenario looks: restarts, lost journals, roll backs, and what is told when positions are not
known."""

from __future__ import annotations

from msgspec.structs import replace

from atoll import events
from atoll.membership import leases
from atoll.membership.leases import Read, SlotTable
from atoll.membership.messages import Declare, Leases, Ready, Refused, SlotsWanted
from atoll.membership.steps import PeerArrived, Send
from support.desk import LAYOUT, SETTINGS, Desk, emitted, sent

SLOTS = 9


def reading(*names: str, **settings: float) -> Desk:
    """A run of these peers, each with three slots."""
    desk = Desk(start_peers=len(names), **settings)
    desk.slots, desk.wish = SLOTS, 3
    desk.join(*names)
    return desk


def table(desk: Desk) -> SlotTable:
    assert desk.state.slots is not None
    return desk.state.slots


def read_a_bit(desk: Desk, peer: str, tokens: int = 4, *, finite: bool = True) -> Ready:
    """A ready of a peer that has read so many tokens in the first slot that it holds."""
    lease = table(desk).held(peer)[0]
    read = Read(lease.slot, (lease.epoch, lease.at), (lease.epoch, lease.at + tokens))
    state = desk.state
    return Ready(state.round.number, state.version, state.digest, 100, 10, 1.0, finite, reads=(read,), wish=3)


def commit(desk: Desk, *peers: str) -> None:
    for peer in peers:
        desk.said(peer, read_a_bit(desk, peer))
    for peer in peers:
        desk.vote(peer, "r")


def positions(found: SlotTable) -> list[leases.Position]:
    return [leases.position(found, slot) for slot in range(found.count)]


def declare(desk: Desk, peer: str, incarnation: str = "1", **told: object) -> tuple[object, ...]:
    desk.hear(PeerArrived(peer, incarnation, "host"))
    declared = Declare(LAYOUT, SETTINGS, (), 0, 0, "d0", 0, num_slots=SLOTS, wish=3)
    return desk.said(peer, replace(declared, **told), incarnation)


def test_a_restarted_coordinator_goes_on_with_the_same_table() -> None:
    desk = reading("a", "b")
    commit(desk, "a", "b")
    desk.said("a", SlotsWanted(1, 2))
    before = table(desk)
    again = Desk(tuple(desk.journal), start_peers=2)
    assert table(again) == before
    effects = declare(again, "a", version=1, round=1)
    assert sent(effects, Leases) == ["a"]
    assert table(again).leases == before.leases


def test_who_does_not_come_back_to_a_restarted_coordinator_holds_nothing() -> None:
    desk = reading("a", "b")
    again = Desk(tuple(desk.journal), start_peers=2, connect_s=2.0, dead_s=3.0)
    declare(again, "a")
    assert set(table(again).leases) == {"a", "b"}
    effects = again.wait(4, "a")
    assert set(table(again).leases) == {"a"}
    assert [event.peer for event in emitted(effects, events.SlotsReturned)] == ["b"]


def test_another_text_is_refused() -> None:
    desk = reading("a", "b")
    effects = declare(desk, "c", num_slots=SLOTS + 1)
    (refused,) = [each.message for each in effects if isinstance(each, Send)]
    assert isinstance(refused, Refused)
    assert "its text has 10 data slots, the run's has 9" in refused.reason


def test_what_is_not_finite_is_dropped_and_nothing_else() -> None:
    desk = reading("a", "b")
    slot = table(desk).held("b")[0].slot
    desk.said("a", replace(read_a_bit(desk, "a"), reads=()))
    desk.said("b", read_a_bit(desk, "b", 5, finite=False))
    desk.vote("a", "r")
    effects = desk.vote("b", "r")
    (told,) = emitted(effects, events.SlotsRead)
    assert (told.committed, told.dropped) == ({}, {"b": ((slot, 0, 0, 0, 5),)})
    assert leases.position(table(desk), slot) == (0, 5)


def test_a_round_that_is_skipped_keeps_what_was_read_with_who_read_it() -> None:
    desk = reading("a", max_attempts=1)
    held = table(desk).held("a")
    desk.said("a", read_a_bit(desk, "a"))
    desk.vote("a", "")
    assert desk.state.round.number == 2
    assert table(desk).held("a")[:3] == held, "its work goes on, in what it holds"


def test_with_a_lost_journal_positions_are_learned_from_the_peers() -> None:
    desk = reading("a", "b")
    commit(desk, "a", "b")
    known = table(desk)
    lost = Desk(start_peers=2)
    effects = declare(lost, "a", version=1, round=1, digest="d1", term=1, version_term=1, slots=known)
    assert positions(table(lost)) == positions(known)
    assert not emitted(effects, events.OldPositionsUsed)
    declare(lost, "b", version=1, round=1, digest="d1", term=1, version_term=1, slots=known)
    assert table(lost).leases == known.leases, "a run that is resumed goes on to the bit"
    again = Desk(tuple(lost.journal), start_peers=2)
    assert table(again) == table(lost)


def test_old_positions_are_told_and_given_up_for_better_ones() -> None:
    desk = reading("a", "b")
    old = table(desk)
    commit(desk, "a", "b")
    lost = Desk(start_peers=2)
    first = declare(lost, "a", version=1, round=1, digest="d1", term=1, version_term=1, slots=old)
    (told,) = emitted(first, events.OldPositionsUsed)
    assert (told.version, told.positions_of) == (1, 0)
    second = declare(lost, "b", version=1, round=1, digest="d1", term=1, version_term=1, slots=table(desk))
    assert not emitted(second, events.OldPositionsUsed)
    assert positions(table(lost)) == positions(table(desk))


def test_who_reads_by_the_old_positions_meanwhile_reads_nothing_twice() -> None:
    """Others are not told when a table is learned: their work of this round does not count, unless it may."""
    desk = reading("a", "b")
    old = table(desk)
    commit(desk, "a", "b")
    exact = table(desk)
    lost = Desk(start_peers=2, relearn_s=3.0)
    declare(
        lost, "a", version=1, round=1, digest="d1", term=1, version_term=1, slots=old, leases=old.held("a")
    )
    lost.wait(5, "a")
    assert lost.state.started, "it goes on alone"
    by_old = read_a_bit(lost, "a")
    told = declare(lost, "b", version=1, round=1, digest="d1", term=1, version_term=1, slots=exact)
    assert "a" not in sent(told, Leases)
    assert positions(table(lost)) == positions(exact)
    by_exact = read_a_bit(lost, "b")
    lost.said("a", by_old)
    lost.said("b", by_exact)
    assert [each.peer for each in lost.plan().contributions] == ["b"]
    effects = [*lost.vote("a", "r"), *lost.vote("b", "r")]
    (read,) = emitted(effects, events.SlotsRead)
    assert set(read.committed) == {"b"}
    assert read.dropped == {}
    moved = [
        slot for slot in range(SLOTS) if leases.position(table(lost), slot) != leases.position(exact, slot)
    ]
    assert moved == [by_exact.reads[0].slot]


def test_a_run_whose_positions_nobody_knows_says_so_and_reads_from_the_start() -> None:
    lost = Desk(start_peers=1)
    effects = declare(lost, "a", version=7, round=7, digest="d7", term=1, version_term=1)
    (told,) = emitted(effects, events.OldPositionsUsed)
    assert (told.version, told.positions_of) == (7, 0)
    assert positions(table(lost)) == [(0, 0)] * SLOTS


def test_a_run_that_is_rolled_back_reads_again_what_was_read_since() -> None:
    desk = reading("a", relearn_s=3.0)
    commit(desk, "a")
    desk.said("a", replace(read_a_bit(desk, "a"), digest="d1"))
    first = table(desk)
    desk.vote("a", "r")
    assert desk.state.version == 2
    assert positions(table(desk)) != positions(first)
    again = Desk(tuple(desk.journal), start_peers=1, relearn_s=3.0)
    told = declare(again, "a", version=1, round=1, digest="d1", version_term=1, slots=first)
    assert not emitted(told, events.OldPositionsUsed)
    again.wait(5)
    assert again.state.version == 1
    assert positions(table(again)) == positions(first)


def test_peers_that_read_the_same_by_mistake_are_told() -> None:
    desk = Desk(start_peers=3)
    for peer, digest in (("a", "x"), ("b", "y")):
        assert not emitted(declare(desk, peer, num_slots=0, own_data=digest), events.SameDataRead)
    effects = declare(desk, "c", num_slots=0, own_data="x")
    (told,) = emitted(effects, events.SameDataRead)
    assert told.peers == ("a", "c")
    assert "data.scope is own" in told.reason
