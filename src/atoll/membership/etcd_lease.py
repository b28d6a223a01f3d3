"""The leader lease: of the coordinators that share a journal in etcd, the one that holds it decides.

The key `PREFIX/leader` lives as long as its lease does, and the lease as long as it is renewed. Two things keep
an old leader from acting. Everything it writes is a transaction on the condition that the key is still the one it
made (`Lease.condition`), so what etcd does not know to be ours is never written. And it counts the lease's time
itself, from before each renewal was sent: once that is over it stops, whether or not etcd can be asked.
"""

from __future__ import annotations

import math
import secrets

import msgspec

from atoll import log
from atoll.clock import Clock
from atoll.membership.etcd_client import (
    NOT_FOUND,
    Etcd,
    EtcdGone,
    EtcdRefused,
    get,
    is_absent,
    put,
    was_created_at,
)
from atoll.membership.journal import LeadLost

RENEWALS = 3  # in the time of one lease
GIVE_UP_S = 1.0

_log = log.get(__name__)


class Leader(msgspec.Struct, frozen=True):
    """The value of the key: a leadership's own random name, and where peers reach its coordinator."""

    id: str
    address: str


_decoder = msgspec.json.Decoder(Leader)


class _Granted(msgspec.Struct, frozen=True):
    ID: int
    TTL: int


class _Remaining(msgspec.Struct, frozen=True):
    TTL: int = 0


class _Renewed(msgspec.Struct, frozen=True):
    result: _Remaining


class _Revoked(msgspec.Struct, frozen=True):
    pass


class Lease:
    """A lease that is held, with the key that it keeps. Made by `take_lead`."""

    def __init__(
        self, etcd: Etcd, key: str, lease: int, revision: int, *, ttl_s: float, sent_s: float, clock: Clock
    ) -> None:
        self.key = key
        self.lease = lease
        self._etcd = etcd
        self._revision = revision
        self._clock = clock
        self._note_renewal(ttl_s, sent_s)

    def condition(self) -> dict[str, object]:
        """Of a transaction that only the leader may do."""
        return was_created_at(self.key, self._revision)

    def is_of(self, revision: int) -> bool:
        """Whether the key that was made at this revision is this lease's."""
        return revision == self._revision

    def left_s(self) -> float:
        """For how long this process may take itself for the leader. Raises LeadLost if no longer."""
        left_s = self._ends_s - self._clock.now_s()
        if left_s <= 0:
            raise LeadLost(f"its lease ended {-left_s:.1f} s ago and was not renewed{self._trouble}")
        return left_s

    def hold(self) -> None:
        """Renew the lease if it is time to. Raises LeadLost if it is over."""
        left_s = self.left_s()
        now_s = self._clock.now_s()
        if now_s < self._renew_s:
            return
        try:
            within_s = min(left_s, self._etcd.try_s)
            request = {"ID": str(self.lease)}
            answer = self._etcd.call("/v3/lease/keepalive", request, _Renewed, within_s, again=False)
        except EtcdGone as error:
            if not self._trouble:
                _log.warning("cannot renew the leader lease, which lasts %.1f s more: %s", left_s, error)
            self._trouble = f" ({error})"
            self._renew_s = self._clock.now_s() + (self._clock.now_s() - now_s)  # half the time is for peers
        except EtcdRefused as error:
            raise LeadLost(f"etcd does not renew its lease ({error})") from None
        else:
            if answer.result.TTL <= 0:
                raise LeadLost("its lease ended in etcd")
            self._note_renewal(answer.result.TTL, now_s)
        self.left_s()  # this process may have been frozen while it asked

    def give_up(self) -> bool:
        """Let the next coordinator lead at once. Returns whether etcd knows; else the lease ends by itself."""
        return revoke(self._etcd, self.lease)

    def _note_renewal(self, ttl_s: float, sent_s: float) -> None:
        self._ends_s = sent_s + ttl_s
        self._renew_s = sent_s + ttl_s / RENEWALS
        self._trouble = ""


def leader_of(value: bytes) -> Leader | None:
    """Who leads, from the key's value; None if it is none of ours."""
    try:
        return _decoder.decode(value)
    except msgspec.MsgspecError:
        return None


def take_lead(
    etcd: Etcd, key: str, address: str, *, lease_s: float, within_s: float, clock: Clock
) -> Lease | None:
    """Become the leader if there is none. Raises EtcdGone and EtcdRefused."""
    sent_s = clock.now_s()
    granted = etcd.call("/v3/lease/grant", {"TTL": str(math.ceil(lease_s))}, _Granted, within_s)
    value = msgspec.json.encode(Leader(secrets.token_hex(8), address))
    revision = 0
    try:
        settled = etcd.transact([is_absent(key)], [put(key, value, granted.ID)], [get(key)], within_s)
        if settled.succeeded:
            revision = settled.header.revision
        elif (found := settled.found(0)) is not None and found.value == value:
            revision = found.create_revision  # an earlier try was carried out, only its answer got lost
    finally:
        if not revision:
            revoke(etcd, granted.ID)
    if not revision:
        return None
    return Lease(etcd, key, granted.ID, revision, ttl_s=granted.TTL, sent_s=sent_s, clock=clock)


def revoke(etcd: Etcd, lease: int) -> bool:
    """End a lease of our own, with all that it keeps. Returns whether it is known to be over."""
    try:
        etcd.call("/v3/lease/revoke", {"ID": str(lease)}, _Revoked, GIVE_UP_S, again=False)
    except EtcdRefused as error:
        return error.code == NOT_FOUND
    except EtcdGone:
        return False
    return True
