"""Leases: whatever peers do, no slot is two peers' at once, positions never go back, and each epoch is read once."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from atoll.membership import leases
from atoll.membership.leases import Lease, Read, SlotTable

LENGTHS = (3, 5, 1, 4, 2, 6, 3)


def positions(table: SlotTable) -> dict[int, leases.Position]:
    return {slot: leases.position(table, slot) for slot in range(table.count)}


def check(table: SlotTable) -> None:
    named = [each.slot for held in table.leases.values() for each in held] + [x.slot for x in table.pool]
    assert max(Counter(named).values(), default=1) == 1, "a slot is in two places"
    assert all(table.leases.values())


def read_some(table: SlotTable, peer: str, rng: random.Random) -> tuple[Read, ...]:
    """Read on in some of the leases, to the end of their epoch or beyond."""
    found = []
    for lease in table.held(peer):
        tokens = lease.at + rng.choice((0, 1, 2, LENGTHS[lease.slot] - lease.at, 9))
        end = (lease.epoch + tokens // LENGTHS[lease.slot], tokens % LENGTHS[lease.slot])
        if end != (lease.epoch, lease.at):
            found.append(Read(lease.slot, (lease.epoch, lease.at), end))
    return tuple(found)


@pytest.mark.parametrize("seed", range(60))
def test_any_history_reads_every_slot_from_where_it_stands(seed: int) -> None:
    rng = random.Random(seed)
    table = SlotTable(count=len(LENGTHS), seed=seed)
    truth = dict.fromkeys(range(table.count), (0, 0))
    peers: dict[str, tuple[Read, ...]] = {}
    for step in range(80):
        match rng.randrange(6):
            case 0 if len(peers) < 4:
                name = f"p{step}"
                peers[name] = ()
                table = leases.top_up(table, {name: rng.randint(0, 4)})
            case 1 if peers:
                gone = rng.choice(sorted(peers))
                del peers[gone]
                table = leases.give_back(table, [gone])
            case 2 if peers:
                peer = rng.choice(sorted(peers))
                table = leases.top_up(table, {peer: len(table.held(peer)) + 1})
            case 3 | 4:
                reads = {peer: each or read_some(table, peer, rng) for peer, each in peers.items()}
                assert not leases.broken(table, reads)
                for each in reads.values():
                    for read in each:
                        assert truth[read.slot] == read.start
                        truth[read.slot] = read.end
                living = {peer: rng.randint(0, 5) for peer in peers if rng.random() < 0.9}
                table = leases.settle(table, reads, living)
                peers = dict.fromkeys(living, ())
            case 5 if peers:
                for peer in peers:
                    peers[peer] = peers[peer] or read_some(table, peer, rng)
                dropped = rng.choice(sorted(peers))
                for read in peers[dropped]:
                    truth[read.slot] = read.end
                table = leases.drop(table, {dropped: peers[dropped]}, dict.fromkeys(peers, 3))
                peers[dropped] = ()
        check(table)
        assert positions(table) == truth
        assert set(table.leases) <= set(peers)


def test_an_epoch_is_leased_in_its_order_and_then_the_next() -> None:
    table = SlotTable(count=5, seed=3)
    order, following = leases.order(5, 3, 0), leases.order(5, 3, 1)
    assert sorted(order) == list(range(5))
    assert order != following
    table = leases.top_up(table, {"b": 2, "a": 2})
    assert [x.slot for x in table.held("a")] == [order[0], order[2]]
    assert [x.slot for x in table.held("b")] == [order[1], order[3]]
    table = leases.settle(table, {"a": whole(table, "a"), "b": ()}, {"a": 2, "b": 2})
    # b's were shared out anew; of the next epoch only a slot that is read in this one
    in_first = {x.slot for held in table.leases.values() for x in held if x.epoch == 0}
    in_second = {x.slot for held in table.leases.values() for x in held if x.epoch == 1}
    assert in_first == {order[1], order[3], order[4]}
    assert len(in_second) == 1
    assert in_second <= {order[0], order[2]}


def whole(table: SlotTable, peer: str) -> tuple[Read, ...]:
    return tuple(Read(x.slot, (x.epoch, x.at), (x.epoch + 1, 0)) for x in table.held(peer))


def test_who_reads_in_the_middle_of_a_slot_keeps_it_within_its_part() -> None:
    table = leases.top_up(SlotTable(count=4, seed=0), {"a": 4})
    first, second, *_ = [x.slot for x in table.held("a")]
    reads = tuple(Read(slot, (0, 0), (0, 2)) for slot in (first, second))
    kept = leases.settle(table, {"a": reads, "b": ()}, {"a": 4, "b": 4})
    assert [x for x in kept.held("a") if x.at] == [Lease(first, 0, 2), Lease(second, 0, 2)]
    assert len(kept.held("b")) == 2
    alone = leases.settle(table, {"a": reads, "b": (), "c": (), "d": ()}, dict.fromkeys("abcd", 4))
    assert alone.held("a") == (Lease(first, 0, 2),)
    assert sorted(len(held) for held in alone.leases.values()) == [1, 1, 1, 1]
    assert Lease(second, 0, 2) in alone.held("b"), "what came back partly read goes first"


def test_nothing_is_left_while_others_hold_all() -> None:
    table = leases.top_up(SlotTable(count=2, seed=0), {"a": 9})
    assert len(table.held("a")) == 2
    assert leases.top_up(table, {"b": 1}).held("b") == ()
    assert leases.unread(table) == 0


def test_lost_and_back_a_peer_goes_on_with_what_nobody_touched() -> None:
    table = leases.top_up(SlotTable(count=6, seed=0), {"a": 3})
    mine = table.held("a")
    table = leases.give_back(table, ["a"])
    table = leases.top_up(table, {"b": 1})
    assert table.held("b") == mine[:1]
    table = leases.reclaim(table, "a", mine)
    assert table.held("a") == mine[1:]
    reads = {"a": tuple(Read(x.slot, (0, 0), (0, 1)) for x in mine)}
    assert leases.broken(table, reads) == {
        "a": f"it read data slot {mine[0].slot}, which is not leased to it any more"
    }
    assert not leases.broken(table, {"a": reads["a"][1:]})
    moved = {"a": (Read(mine[1].slot, (0, 1), (0, 2)),)}
    assert "from epoch 0 token 1, which stands at epoch 0 token 0" in leases.broken(table, moved)["a"]


def test_unheard_of_slots_are_not_leased() -> None:
    table = SlotTable(count=3, seed=0)
    assert leases.reclaim(table, "a", [Lease(3), Lease(-1), Lease(0, 1, 0)]).leases == {}
