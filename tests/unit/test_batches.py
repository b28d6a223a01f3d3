"""A peer's batches from leased slots: enough for a round, more if it runs dry, from where work was lost."""

from __future__ import annotations

import numpy as np
import pytest

from atoll.data.corpus import Corpus
from atoll.data.slots import Slots
from atoll.events import DataRanDry, Event
from atoll.membership import leases
from atoll.train.batches import Batches
from atoll.train.leases_here import LeasesHere, OwnSlots

SEQ_LEN, ROWS = 4, 2


def text(num_documents: int, num_slots: int, length: int = 10) -> Slots:
    starts = np.arange(1, num_documents * length + 2, length)
    tokens = np.arange(starts[-1], dtype=np.uint32)
    return Slots.cut(Corpus(tokens=tokens, starts=starts), num_slots, seed=3)


class Crowd:
    """Peers that share a text in this process."""

    def __init__(self, slots: Slots, names: str) -> None:
        self.events: list[Event] = []
        self.here = LeasesHere(slots.count, seed=3)
        self.peers = {
            name: Batches(slots, SEQ_LEN, ROWS, peer=name, leaser=self.here.of(name), emit=self.events.append)
            for name in names
        }

    def begin(self, steps: int) -> None:
        self.here.begin({name: peer.wish(steps) for name, peer in self.peers.items()})
        for peer in self.peers.values():
            peer.begin()

    def conclude(self, steps: int) -> None:
        reads = {name: peer.reads() for name, peer in self.peers.items()}
        self.here.conclude(reads, {name: peer.wish(steps) for name, peer in self.peers.items()})
        for peer in self.peers.values():
            peer.begin()


@pytest.mark.parametrize("steps", [1, 3, 10])
def test_what_a_peer_wishes_for_is_enough_for_its_round(steps: int) -> None:
    crowd = Crowd(text(400, 200), "ab")
    crowd.begin(steps)
    seen: list[int] = []
    for _ in range(6):
        for peer in crowd.peers.values():
            for _ in range(steps):
                batch = peer.take()
                assert batch is not None
                seen += batch.targets.ravel().tolist()
        crowd.conclude(steps)
    assert not crowd.events
    assert len(set(seen)) == len(seen) == 6 * 2 * steps * SEQ_LEN * ROWS


def test_who_runs_dry_asks_and_then_reads_what_it_holds_once_more() -> None:
    crowd = Crowd(text(4, 4), "ab")
    crowd.begin(1)
    a, b = crowd.peers.values()
    first = [a.take() for _ in range(4)]
    assert all(batch is not None for batch in first)
    (told,) = crowd.events
    assert told == DataRanDry(slots=2, before=2)
    assert all(read.end > (0, 0) for read in a.reads())
    assert b.take() is not None, "nobody took what b holds"


def test_with_more_peers_than_slots_some_take_no_step_until_the_next_round() -> None:
    crowd = Crowd(text(2, 2), "abc")
    crowd.begin(1)
    a, b, c = crowd.peers.values()
    assert a.take() is not None
    assert b.take() is not None
    assert c.take() is None
    assert c.reads() == ()
    assert crowd.events[-1] == DataRanDry(slots=0, before=0)


def test_lost_work_is_read_again_and_skipped_rounds_go_on() -> None:
    crowd = Crowd(text(40, 8), "a")
    crowd.begin(3)
    (a,) = crowd.peers.values()
    first = a.take()
    second = a.take()
    reads = a.reads()
    a.go_on()
    assert a.reads() == reads
    assert a.is_unbroken()
    a.begin()
    assert a.reads() == ()
    again = [a.take(), a.take()]
    for one, other in zip((first, second), again, strict=True):
        assert one is not None
        assert other is not None
        assert one.targets.equal(other.targets)


def test_work_is_broken_once_another_one_holds_what_it_read() -> None:
    crowd = Crowd(text(4, 4), "ab")
    crowd.begin(1)
    a, _ = crowd.peers.values()
    a.take()
    crowd.here.restore(leases.give_back(crowd.here.slots(), ["a"]))
    assert not a.is_unbroken()
    crowd.here.restore(leases.top_up(crowd.here.slots(), {"b": 4}))
    assert not a.is_unbroken()


def test_who_asks_for_more_still_tells_what_it_read_in_slots_that_it_lost() -> None:
    """Else its work would count, with what another one reads as well in it."""
    crowd = Crowd(text(8, 8), "ab")
    crowd.begin(1)
    a, _ = crowd.peers.values()
    assert a.take() is not None
    crowd.here.restore(leases.top_up(leases.give_back(crowd.here.slots(), ["a"]), {"b": 8}))
    reads = a.reads()
    while a.take() is not None:
        reads = a.reads()
    assert crowd.events == [DataRanDry(slots=0, before=4)], "it asked, and heard of the leases as they are"
    assert a.reads() == reads
    assert leases.broken(crowd.here.slots(), {"a": a.reads()})
    assert not a.is_unbroken()
    a.begin()
    assert a.reads() == ()


def test_own_slots_go_on_from_their_state_to_the_bit() -> None:
    slots = text(30, 8)
    own = OwnSlots(slots.count, 3, "a", "digest")
    reader = Batches(slots, SEQ_LEN, ROWS, peer="a", leaser=own, own_data="digest")
    reader.begin()
    assert reader.num_slots == 0
    assert reader.reads() == (), "a round has nothing to say of it"
    for _ in range(5):
        reader.take()
    reader.settle()
    saved = own.state_dict()
    other = OwnSlots(slots.count, 3, "a", "digest")
    other.load_state_dict(saved)
    resumed = Batches(slots, SEQ_LEN, ROWS, peer="a", leaser=other, own_data="digest")
    resumed.begin()
    for _ in range(20):
        one, two = reader.take(), resumed.take()
        assert one is not None
        assert two is not None
        assert one.targets.equal(two.targets)
    with pytest.raises(ValueError, match="it counts 8 slots, the text has 7"):
        OwnSlots(7, 3, "a", "digest").load_state_dict(saved)
    with pytest.raises(ValueError, match="how far another text was read"):
        OwnSlots(slots.count, 3, "a", "another digest").load_state_dict(saved)
