"""The journal in a real etcd: what was appended comes back, only the leader writes, and nobody writes twice."""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from atoll.clock import ManualClock
from atoll.errors import LocalError
from atoll.membership import etcd_journal
from atoll.membership.etcd_client import Etcd, delete_range, put
from atoll.membership.etcd_journal import Contender, EtcdJournal
from atoll.membership.etcd_place import EtcdPlace
from atoll.membership.journal import LeadLost
from atoll.membership.messages import Verdict
from atoll.membership.steps import JournalRecord, PlanMade, RunDefined, StateDigest, TermRaised, VerdictMade
from atoll.values import Contribution, OpId
from support.etcd import EtcdProcess
from support.slack import SLACK_S

LEASE_S = 2.0  # etcd's least
OP = OpId(1, 2, 0, 3)
RECORDS: tuple[JournalRecord, ...] = (
    TermRaised(1, b"k" * 32),
    RunDefined((("w", (2, 3), "float32"),), {"outer.lr": 0.7, "model.tie": None}, "d0", ("a", "b")),
    PlanMade(OP, ("a", "b"), ("a",)),
    VerdictMade(
        Verdict(OP, "committed", 1, "d1", (Contribution("a", 1),), ("a", "b"), {"b": "no steps"}, "all"),
        (0.5,),
    ),
    StateDigest(1, "d2"),
)

Contend = Callable[..., Contender]
_prefixes = itertools.count()


@pytest.fixture
def place(etcd: EtcdProcess) -> EtcdPlace:
    return EtcdPlace((etcd.endpoint,), f"test/{next(_prefixes)}")


@pytest.fixture
def contend(place: EtcdPlace) -> Iterator[Contend]:
    """Makes coordinators that share the place: by name, with a clock of their own if one is given."""
    made: list[Contender] = []

    def one(name: str = "a", run: str = "run", **more: Any) -> Contender:
        made.append(Contender(place, run, f"{name}:7070", LEASE_S, **more))
        return made[-1]

    yield one
    for each in made:
        each.close()


@pytest.fixture
def client(etcd: EtcdProcess) -> Iterator[Etcd]:
    """Etcd itself, to look at and to damage what is in it."""
    made = Etcd((etcd.endpoint,), 5.0)
    yield made
    made.close()


def leading(contender: Contender, within_s: float = 0.0) -> EtcdJournal:
    """The journal of a contender that takes the lead, waiting for it if it has to."""
    deadline_s = time.monotonic() + within_s
    while (journal := contender.take_lead()) is None:
        assert time.monotonic() < deadline_s, f"{contender.leader()} leads"
        time.sleep(0.02)
    return journal


def write_all(journal: EtcdJournal, records: tuple[JournalRecord, ...] = RECORDS) -> None:
    for record in records:
        journal.append(record)


def keys(client: Etcd, place: EtcdPlace) -> list[str]:
    found = client.read(f"{place.prefix}/records/", f"{place.prefix}/records0", 1000, 5.0)
    return [each.key.decode().rpartition("/")[2] for each in found.kvs]


def numbered(*numbers: int) -> list[str]:
    return [f"{number:016d}" for number in numbers]


# ---- records -----------------------------------------------------------------------------------------------------


def test_records_come_back_in_order_without_a_gap(contend: Contend, client: Etcd, place: EtcdPlace) -> None:
    first = contend("a")
    journal = leading(first)
    assert journal.records == ()
    write_all(journal)
    assert keys(client, place) == numbered(1, 2, 3, 4, 5)
    journal.close()
    second = leading(contend("b"))
    assert second.records == RECORDS
    second.append(TermRaised(2, b"k" * 32))
    assert keys(client, place) == numbered(1, 2, 3, 4, 5, 6)
    assert contend("c").records() == (*RECORDS, TermRaised(2, b"k" * 32))


def test_a_record_of_megabytes_is_cut_in_parts_that_etcd_takes(
    contend: Contend, client: Etcd, place: EtcdPlace
) -> None:
    layout = tuple((f"model.layers.{index}.weight", (index, 4096), "float32") for index in range(60_000))
    large = RunDefined(layout, {}, "d0", ("a",))
    journal = leading(contend("a"))
    write_all(journal, (RECORDS[0], large, *RECORDS[2:]))
    count = len(keys(client, place))
    assert count > 4 + 2_000_000 // etcd_journal.PART_BYTES, "it is not as large as it should be"
    assert keys(client, place) == numbered(*range(1, count + 1))
    journal.close()
    assert leading(contend("b")).records == (RECORDS[0], large, *RECORDS[2:])


@pytest.mark.parametrize("over", [-1, 0, 1], ids=["just below", "exactly", "just above"])
def test_a_record_at_the_size_of_a_part_comes_back_whole(contend: Contend, over: int) -> None:
    empty = len(etcd_journal._encoder.encode(StateDigest(1, "x" * 70_000))) - 70_000
    record = StateDigest(1, "x" * (etcd_journal.PART_BYTES - empty + over))
    journal = leading(contend("a"))
    write_all(journal, (record, RECORDS[0]))
    journal.close()
    assert leading(contend("b")).records == (record, RECORDS[0])


def test_a_long_journal_is_read_in_pages(contend: Contend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_journal, "MOST_KEYS", 16)
    records = tuple(StateDigest(version, "d") for version in range(150))
    journal = leading(contend("a"))
    write_all(journal, records)
    journal.close()
    assert leading(contend("b")).records == records


def test_a_record_whose_writer_was_lost_between_two_parts_is_removed(
    contend: Contend, client: Etcd, place: EtcdPlace, caplog: pytest.LogCaptureFixture
) -> None:
    journal = leading(contend("a"))
    write_all(journal)
    journal._write_part(b"\1" + b"x" * 10)  # as far as the lost leader got
    journal._write_part(b"\1" + b"x" * 10)
    journal.close()
    assert contend("c").records() == RECORDS
    with caplog.at_level(logging.WARNING):
        second = leading(contend("b"))
    assert caplog.messages == [f"journal {place}: removed a torn record, keys 6 to 7"]
    assert second.records == RECORDS
    assert keys(client, place) == numbered(1, 2, 3, 4, 5)
    second.append(StateDigest(2, "d3"))
    second.close()
    assert leading(contend("d")).records == (*RECORDS, StateDigest(2, "d3"))


# ---- damage ------------------------------------------------------------------------------------------------------


def test_a_missing_record_is_damage(contend: Contend, client: Etcd, place: EtcdPlace) -> None:
    journal = leading(contend("a"))
    write_all(journal)
    journal.close()
    third = f"{place.prefix}/records/{3:016d}"
    client.transact([], [delete_range(third, third + "\0")], [], 5.0)
    for use in (contend("b").records, contend("c").take_lead):
        with pytest.raises(LocalError, match=f"journal {place} is damaged .*{third} is missing") as caught:
            use()
        assert caught.value.exit_code == 3


@pytest.mark.parametrize("value", [b"\0\x81\xa1x\x01", b"", b"\2abc", b"\0"])
def test_what_is_no_record_is_damage(contend: Contend, client: Etcd, place: EtcdPlace, value: bytes) -> None:
    leading(contend("a")).close()
    client.transact([], [put(f"{place.prefix}/records/{1:016d}", value)], [], 5.0)
    with pytest.raises(LocalError, match=f"journal {place} is damaged"):
        contend("b").take_lead()


def test_the_journal_of_another_run_is_refused_and_nobody_is_kept_waiting(contend: Contend) -> None:
    journal = leading(contend("a"))
    write_all(journal)
    journal.close()
    other = contend("b", run="other")
    for use in (other.records, other.take_lead):
        with pytest.raises(LocalError, match="belongs to run 'run', not 'other'"):
            use()
    assert leading(contend("c")).records == RECORDS, "the refused one kept the lead"


# ---- the lead ----------------------------------------------------------------------------------------------------


def test_one_leads_and_the_other_sees_who(contend: Contend) -> None:
    a, b = contend("a"), contend("b")
    assert a.leader() is None
    leading(a)
    assert b.take_lead() is None
    leader = b.leader()
    assert leader is not None
    assert leader.address == "a:7070"


def test_a_lead_that_is_given_up_is_free_at_once(contend: Contend) -> None:
    a, b = contend("a"), contend("b")
    journal = leading(a)
    journal.close()
    journal.close()
    assert leading(b)
    with pytest.raises(LeadLost, match="b:7070 leads by now"):
        journal.append(RECORDS[0])


def test_a_lease_that_is_held_outlives_its_time(contend: Contend) -> None:
    a, b = contend("a"), contend("b")
    journal = leading(a)
    deadline_s = time.monotonic() + 2 * LEASE_S
    while time.monotonic() < deadline_s:
        journal.hold()
        assert b.take_lead() is None
        time.sleep(0.1)
    journal.append(RECORDS[0])


def test_a_lease_that_is_not_held_ends(contend: Contend, client: Etcd, place: EtcdPlace) -> None:
    journal = leading(contend("a"))
    begun_s = time.monotonic()
    second = leading(contend("b"), within_s=LEASE_S + SLACK_S)
    assert time.monotonic() - begun_s > LEASE_S / 2
    with pytest.raises(LeadLost, match=r"its lease ended \d\.\d s ago and was not renewed"):
        journal.hold()
    with pytest.raises(LeadLost, match=r"its lease ended \d\.\d s ago"):
        journal.append(RECORDS[0])
    second.append(RECORDS[0])
    assert keys(client, place) == numbered(1)


def test_a_leader_whose_clock_stands_still_cannot_write_either(
    contend: Contend, client: Etcd, place: EtcdPlace
) -> None:
    """What a paused machine believes does not count: the transaction asks for the lease itself."""
    journal = leading(contend("a", clock=ManualClock()))
    second = leading(contend("b"), within_s=LEASE_S + SLACK_S)
    journal.hold()  # by its own clock it leads
    with pytest.raises(LeadLost, match="b:7070 leads by now"):
        journal.append(StateDigest(1, "stale"))
    assert second.records == ()
    assert keys(client, place) == []


def test_a_lease_that_ended_with_nobody_after_it_is_lost_too(
    contend: Contend, client: Etcd, place: EtcdPlace
) -> None:
    clock = ManualClock()
    journal = leading(contend("a", clock=clock))
    deadline_s = time.monotonic() + LEASE_S + SLACK_S
    while client.read_one(f"{place.prefix}/leader") is not None:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    with pytest.raises(LeadLost, match="its lease ended in etcd"):
        journal.append(RECORDS[0])
    clock.advance(LEASE_S / 2)
    with pytest.raises(LeadLost, match="its lease ended in etcd"):
        journal.hold()
    assert keys(client, place) == []


def test_two_writers_at_random_make_one_history(contend: Contend) -> None:
    """Both believe to lead, by clocks that stand still; the lead goes to and fro. Each record is written once."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    contenders = {name: contend(name, clock=ManualClock()) for name in "ab"}
    journals: dict[str, EtcdJournal] = {}
    written: list[JournalRecord] = []
    for number in range(200):
        name = rng.choice("ab")
        if rng.random() < 0.1 and name in journals:
            contenders[name].give_up()  # the lease only: what it holds of the journal it uses on
        if rng.random() < 0.2 and name not in journals:
            journal = contenders[name].take_lead()
            if journal is not None:
                assert journal.records == tuple(written)
                journals[name] = journal
        if name in journals:
            record = StateDigest(number, name)
            try:
                journals[name].append(record)
            except LeadLost:
                del journals[name]
            else:
                written.append(record)
    assert contend("c").records() == tuple(written)
    assert {record.digest for record in written if isinstance(record, StateDigest)} == {"a", "b"}


# ---- answers that get lost ---------------------------------------------------------------------------------------


class Lossy:
    """Loses the answers of chosen requests: they are carried out, and nobody hears of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lose: Callable[[str], bool] = lambda path: False
        self.lost = 0
        real = Etcd._try

        def lossy(etcd: Etcd, endpoint: str, path: str, body: bytes, within_s: float) -> bytes:
            data = real(etcd, endpoint, path, body, within_s)
            if self.lose(path):
                self.lost += 1
                raise ConnectionResetError("planted")
            return data

        monkeypatch.setattr(Etcd, "_try", lossy)

    def once(self, path: str) -> Callable[[str], bool]:
        before = self.lost
        return lambda asked: asked == path and self.lost == before


def test_a_write_whose_answer_was_lost_is_written_once(
    contend: Contend, monkeypatch: pytest.MonkeyPatch
) -> None:
    lossy = Lossy(monkeypatch)
    a, b = contend("a"), contend("b")
    journal = leading(a)
    for record in RECORDS:
        lossy.lose = lossy.once("/v3/kv/txn")
        journal.append(record)
    assert lossy.lost == len(RECORDS)
    assert b.records() == RECORDS


@pytest.mark.parametrize("path", ["/v3/lease/grant", "/v3/kv/txn"])
def test_a_lead_whose_answer_was_lost_is_taken(
    contend: Contend, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    lossy = Lossy(monkeypatch)
    a = contend("a")
    lossy.lose = lossy.once(path)
    journal = leading(a)
    assert lossy.lost == 1
    write_all(journal)
    assert a.records() == RECORDS


def test_a_write_whose_answers_are_lost_until_the_lease_ends_is_given_up(
    contend: Contend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be written or not; who leads next reads it, and the one that lost it must not go on."""
    lossy = Lossy(monkeypatch)
    journal = leading(contend("a"))
    lossy.lose = lambda path: path == "/v3/kv/txn"
    begun_s = time.monotonic()
    # The last answer is the planted loss, or none that came before the lease ended.
    with pytest.raises(LeadLost, match=r"before a record was written: no etcd answers"):
        journal.append(RECORDS[0])
    assert lossy.lost > 0
    assert time.monotonic() - begun_s < LEASE_S + SLACK_S
    lossy.lose = lambda path: False
    assert leading(contend("b"), within_s=LEASE_S + SLACK_S).records == RECORDS[:1]


def test_a_key_that_someone_else_wrote_is_damage(contend: Contend, client: Etcd, place: EtcdPlace) -> None:
    journal = leading(contend("a"))
    client.transact([], [put(f"{place.prefix}/records/{1:016d}", b"\0other")], [], 5.0)
    with pytest.raises(LocalError, match="was written by someone else"):
        journal.append(RECORDS[0])


# ---- etcd comes and goes -----------------------------------------------------------------------------------------


def test_an_outage_shorter_than_the_lease_is_waited_for(etcd: EtcdProcess, place: EtcdPlace) -> None:
    contender = Contender(place, "run", "a:7070", lease_s=20.0)
    journal = leading(contender)
    journal.append(RECORDS[0])
    etcd.kill()
    etcd.start()
    journal.append(RECORDS[1])
    assert contender.records() == RECORDS[:2]
    contender.close()


def test_a_lease_that_could_not_be_given_back_is_given_back_later(
    etcd: EtcdProcess, contend: Contend
) -> None:
    """A restarted etcd gives leases their whole time anew; who held one does not have to wait for its end."""
    a = contend("a")
    journal = leading(a)
    etcd.kill()
    journal.close()
    etcd.start()
    assert a.leader() is None
    assert leading(a)
