"""The coordinator's journal in etcd: it survives the coordinator's machine, and only the leader can write it.

    PREFIX/leader       who leads, for as long as its lease lasts (`etcd_lease`)
    PREFIX/head         which format and run this is
    PREFIX/records/N    one record, or a part of one; N counts from 1 in 16 digits, without a gap

A key's value is one byte (0: the record ends here, 1: it goes on in the next key) and bytes of msgpack. etcd takes
at most 1.5 MiB a request, so a record (a model's layout) may need several. Every key is written by a transaction
on two conditions: the key is not there, and the leader's key is still ours. A leader that is lost between two
parts leaves a torn record, of which nothing was ever sent: the next leader removes it.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from atoll import log
from atoll.clock import Clock, WakingClock
from atoll.errors import LocalError
from atoll.membership.etcd_client import (
    Etcd,
    EtcdGone,
    EtcdRefused,
    KeyValue,
    delete_range,
    get,
    is_absent,
    put,
)
from atoll.membership.etcd_lease import Leader, Lease, leader_of, revoke, take_lead
from atoll.membership.etcd_place import EtcdPlace
from atoll.membership.journal import FORMAT, JournalHead, LeadLost
from atoll.membership.steps import JournalRecord

PART_BYTES = 256 << 10
PAGE_BYTES = 2 << 20  # about what one answer may hold when the journal is read
MOST_KEYS = 512
TRIES = 4  # in the time of one lease

_LAST, _MORE = b"\0", b"\1"

_log = log.get(__name__)
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(JournalRecord)


class EtcdJournal:
    """The journal of the coordinator that leads. `records` is what it held when the lead was taken.

    Made by `Contender.take_lead`. Raises LeadLost, EtcdGone, and LocalError, naming the place, if it is damaged or
    belongs to another run.
    """

    def __init__(
        self, etcd: Etcd, place: EtcdPlace, run: str, lease: Lease, give_up: Callable[[], None]
    ) -> None:
        self._etcd, self._place, self._lease, self._give_up = etcd, place, lease, give_up
        try:
            self._write_head(run)
            self.records, self._next, torn = _read(etcd, place, self._time_left_s)
            if torn:
                self._remove_torn(torn)
        except EtcdRefused as error:
            raise _refused(place, error) from error

    def hold(self) -> None:
        """Renew the lease if it is time to. Raises LeadLost if it is over, or may be."""
        self._lease.hold()

    def append(self, record: JournalRecord) -> None:
        """Write one record. Tries for as long as the lease lasts, then raises LeadLost."""
        payload = _encoder.encode(record)
        starts = range(0, len(payload), PART_BYTES)
        for start in starts:
            mark = _LAST if start == starts[-1] else _MORE
            self._write_part(mark + payload[start : start + PART_BYTES])

    def close(self) -> None:
        """Give up the lead, so that another may take it at once. Idempotent; never raises."""
        self._give_up()

    def _time_left_s(self) -> float:
        self._lease.hold()
        return self._lease.left_s()

    def _write_part(self, value: bytes) -> None:
        key = _record_key(self._place, self._next)
        conditions = [is_absent(key), self._lease.condition()]
        otherwise = [get(key), get(self._lease.key)]
        try:
            settled = self._etcd.transact(conditions, [put(key, value)], otherwise, self._time_left_s())
        except EtcdGone as error:
            raise LeadLost(f"its lease ended before a record was written: {error}") from error
        except EtcdRefused as error:
            raise _refused(self._place, error) from error
        if not settled.succeeded:
            self._check_lead(settled.found(1))
            found = settled.found(0)
            if (
                found is None or found.value != value
            ):  # else an earlier try got through, only its answer did not
                raise _damaged(self._place, f"{key} was written by someone else")
        self._next += 1

    def _write_head(self, run: str) -> None:
        key = f"{self._place.prefix}/head"
        value = msgspec.json.encode(JournalHead(FORMAT, run))
        conditions = [is_absent(key), self._lease.condition()]
        otherwise = [get(key), get(self._lease.key)]
        settled = self._etcd.transact(conditions, [put(key, value)], otherwise, self._lease.left_s())
        if not settled.succeeded:
            self._check_lead(settled.found(1))
            _check_head(self._place, settled.found(0), run)

    def _remove_torn(self, count: int) -> None:
        first = self._next
        _log.warning(
            "journal %s: removed a torn record, keys %d to %d", self._place, first, first + count - 1
        )
        keys = delete_range(_record_key(self._place, first), _record_key(self._place, first + count))
        found = [get(self._lease.key)]
        settled = self._etcd.transact([self._lease.condition()], [keys], found, self._lease.left_s())
        if not settled.succeeded:
            self._check_lead(settled.found(0))

    def _check_lead(self, leader: KeyValue | None) -> None:
        """Raises LeadLost unless the leader's key, as just read, is ours."""
        if leader is None:
            raise LeadLost("its lease ended in etcd")
        if not self._lease.is_of(leader.create_revision):
            other = leader_of(leader.value)
            raise LeadLost(f"{other.address if other else 'another coordinator'} leads by now")


class Contender:
    """One coordinator among those that share a journal in etcd: sees who leads, and leads when nobody does.

    `address` is where peers reach it. One at a time holds the lead; `close` gives it up.
    """

    def __init__(
        self, place: EtcdPlace, run: str, address: str, lease_s: float, clock: Clock | None = None
    ) -> None:
        self.place, self.address = place, address
        self._run = run
        self._lease_s = lease_s
        self._clock = clock or WakingClock()
        self._etcd = Etcd(place.endpoints, lease_s / TRIES)
        self._held: Lease | None = None
        self._owed: list[int] = []  # leases of our own that etcd could not be asked to end

    def records(self) -> tuple[JournalRecord, ...]:
        """What the journal holds now, whoever leads. Raises EtcdGone, and LocalError as EtcdJournal does."""
        try:
            head = self._etcd.read_one(f"{self.place.prefix}/head")
            if head is None:
                return ()
            _check_head(self.place, head, self._run)
            return _read(self._etcd, self.place, lambda: self._lease_s)[0]
        except EtcdRefused as error:
            raise _refused(self.place, error) from error

    def leader(self) -> Leader | None:
        """Who leads now. Raises EtcdGone."""
        try:
            self._owed = [lease for lease in self._owed if not revoke(self._etcd, lease)]
            found = self._etcd.read_one(f"{self.place.prefix}/leader")
        except EtcdRefused as error:
            raise _refused(self.place, error) from error
        if found is None:
            return None
        return leader_of(found.value) or Leader("", "another coordinator")

    def take_lead(self) -> EtcdJournal | None:
        """Lead, if nobody does; returns the journal. None if another was faster.

        Raises EtcdGone, LeadLost, and LocalError as EtcdJournal does.
        """
        assert self._held is None, "it leads already"
        key = f"{self.place.prefix}/leader"
        try:
            self._held = take_lead(
                self._etcd,
                key,
                self.address,
                lease_s=self._lease_s,
                within_s=self._lease_s / 2,
                clock=self._clock,
            )
        except EtcdRefused as error:
            raise _refused(self.place, error) from error
        if self._held is None:
            return None
        try:
            return EtcdJournal(self._etcd, self.place, self._run, self._held, self.give_up)
        except BaseException:
            self.give_up()
            raise

    def give_up(self) -> None:
        """End the lease that is held, so that another leads at once. Never raises."""
        held, self._held = self._held, None
        if held is not None and not held.give_up():
            self._owed.append(held.lease)

    def close(self) -> None:
        self.give_up()
        self._etcd.close()


def _record_key(place: EtcdPlace, number: int) -> str:
    return f"{place.prefix}/records/{number:016d}"


def _read(
    etcd: Etcd, place: EtcdPlace, time_left_s: Callable[[], float]
) -> tuple[tuple[JournalRecord, ...], int, int]:
    """All whole records, the number of the key after them, and how many keys a torn last record has."""
    records: list[JournalRecord] = []
    payload, parts, number, limit = b"", 0, 1, MOST_KEYS // 8
    end = _record_key(place, 10**16 - 1)
    while True:
        page = etcd.read(_record_key(place, number), end, limit, time_left_s())
        for each in page.kvs:
            key = _record_key(place, number)
            if each.key != key.encode():
                raise _damaged(place, f"{key} is missing")
            payload, parts, number = payload + each.value[1:], parts + 1, number + 1
            if each.value[:1] not in (_LAST, _MORE):
                raise _damaged(place, f"{key} does not begin as a record does")
            if each.value[:1] == _LAST:
                records.append(_decode(place, key, payload))
                payload, parts = b"", 0
        if not page.more:
            return tuple(records), number - parts, parts
        page_bytes = sum(len(each.value) for each in page.kvs)
        limit = max(1, limit // 2) if page_bytes > PAGE_BYTES else min(MOST_KEYS, 2 * limit)


def _decode(place: EtcdPlace, key: str, payload: bytes) -> JournalRecord:
    try:
        return _decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise _damaged(place, f"{key}: {error}") from None


def _check_head(place: EtcdPlace, found: KeyValue | None, run: str) -> None:
    try:
        head = msgspec.json.decode(found.value if found else b"", type=JournalHead)
    except msgspec.MsgspecError:
        raise _damaged(place, "its head names no run") from None
    if head.format != FORMAT:
        raise LocalError(
            f"journal {place} has format {head.format}, this version reads {FORMAT}; "
            "use the version of Atoll that wrote it, or name another prefix with --journal"
        )
    if head.run != run:
        raise LocalError(
            f"journal {place} belongs to run {head.run!r}, not {run!r}; name another prefix with --journal"
        )


def _damaged(place: EtcdPlace, why: str) -> LocalError:
    return LocalError(
        f"journal {place} is damaged ({why}); restore etcd from a copy, or name another prefix with "
        "--journal to begin a new run"
    )


def _refused(place: EtcdPlace, error: EtcdRefused) -> LocalError:
    return LocalError(
        f"etcd does not let journal {place} be used ({error}); look at its space, quota and permissions, "
        "then start the coordinator again"
    )
