"""A hub for two peers that cannot send each other anything: WireGuard's packets, passed on as they are.

The hub holds no key of theirs: what it passes on stays sealed between the two, and its machine forwards nothing. It
goes by what is in the open in WireGuard's packets (https://www.wireguard.com/protocol/):

* a *first message* (type 1) names its sender's index and proves (`mac1`) that the sender knows the public key of the
  one it is for: so a stranger's is dropped. It goes to that one's address if that is known, and to all addresses from
  which first messages came lately and whose owners are not known: only the right one can answer.
* an *answer* (type 2) names both indices. From then on the two are a *session*: each index leads to an address.
* *data* (type 4) and cookies (type 3) name the receiver's index, and go where it leads.

A sender whose NAT gives it another address is followed: the index that it sends to tells who it is.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

Address = tuple[str, int]

FIRST, ANSWER, COOKIE, DATA = 1, 2, 3, 4
FIRST_BYTES, ANSWER_BYTES, COOKIE_BYTES, LEAST_DATA_BYTES = 148, 92, 64, 32
HEARD_FOR_S = 120.0
SESSION_S = 240.0  # WireGuard gives up a session's keys after 180
REFRESH_S = 5.0
MAX_HEARD = 1024
MAX_ENDS = 8192
MAX_COPIES = 64


@dataclass(slots=True)
class _End:
    """One end of a session, under the index that it chose. `other`: the other end's index, once it answered."""

    address: Address
    used_s: float
    target: bytes = b""
    """For a first message: the key that it was for."""
    other: int | None = None


@dataclass(slots=True)
class _Heard:
    """An address from which a first message came; `owner` is its public key, once that is known."""

    heard_s: float
    owner: bytes = b""


class Relay:
    """Which packet goes where. No sockets; `now_s` is any monotonic clock."""

    def __init__(self) -> None:
        self._mac1_keys: dict[bytes, bytes] = {}
        self._heard: OrderedDict[Address, _Heard] = OrderedDict()
        self._ends: OrderedDict[int, _End] = OrderedDict()
        self.passed_bytes = 0

    def members(self, public_keys: Iterable[bytes]) -> None:
        """Whom packets may be for. What others had is forgotten."""
        keep = set(public_keys)
        if keep == set(self._mac1_keys):
            return
        self._mac1_keys = {key: _mac1_key(key) for key in keep}
        for address in [a for a, each in self._heard.items() if each.owner and each.owner not in keep]:
            del self._heard[address]

    def receive(self, packet: bytes, source: Address, now_s: float) -> list[Address]:
        """Where this packet is to be sent on to; nowhere, if it is nothing for us."""
        if len(packet) < LEAST_DATA_BYTES or packet[1:4] != b"\0\0\0":
            return []
        kind, size = packet[0], len(packet)
        if kind == DATA:
            to = self._along(packet, source, now_s)
        elif kind == FIRST and size == FIRST_BYTES:
            to = self._first(packet, source, now_s)
        elif kind == ANSWER and size == ANSWER_BYTES:
            to = self._answer(packet, source, now_s)
        elif kind == COOKIE and size == COOKIE_BYTES:
            end = self._ends.get(_index(packet, 4))
            to = [end.address] if end is not None else []
        else:
            to = []
        self.passed_bytes += size * len(to)
        return to

    def _first(self, packet: bytes, source: Address, now_s: float) -> list[Address]:
        target = self._target(packet)
        if target is None:
            return []
        heard = self._heard.setdefault(source, _Heard(now_s))
        heard.heard_s = now_s
        self._heard.move_to_end(source)
        self._forget(now_s)
        if heard.owner == target:  # whoever knows a peer's address by now is another one
            heard.owner = b""
        self._put(_index(packet, 4), _End(source, now_s, target))
        known = [a for a, each in self._heard.items() if each.owner == target]
        unknown = [a for a, each in self._heard.items() if not each.owner and a != source]
        return (known + unknown[::-1])[:MAX_COPIES]

    def _answer(self, packet: bytes, source: Address, now_s: float) -> list[Address]:
        index, others = _index(packet, 4), _index(packet, 8)
        first = self._ends.get(others)
        if first is None or not first.target or not self._proves(packet, ANSWER_BYTES - 32):
            return []
        for each in self._heard.values():
            if each.owner == first.target:
                each.owner = b""
        self._heard.setdefault(source, _Heard(now_s)).owner = first.target
        first.other, first.used_s = index, now_s
        self._put(index, _End(source, now_s, other=others))
        return [first.address]

    def _along(self, packet: bytes, source: Address, now_s: float) -> list[Address]:
        end = self._ends.get(_index(packet, 4))
        if end is None or end.other is None:
            return []
        sender = self._ends.get(end.other)
        if sender is None:
            return []
        if sender.address != source:
            old = self._heard.pop(sender.address, None)
            if old is not None:
                self._heard[source] = _Heard(now_s, old.owner)
            sender.address = source
        if now_s - sender.used_s > REFRESH_S:  # a session in use keeps its ends known
            sender.used_s = now_s
            if source in self._heard:
                self._heard[source].heard_s = now_s
                self._heard.move_to_end(source)
        return [end.address]

    def _target(self, packet: bytes) -> bytes | None:
        """Whose public key the sender of a first message knows."""
        said, proved = packet[116:132], packet[:116]
        for public, key in self._mac1_keys.items():
            if hmac.compare_digest(hashlib.blake2s(proved, key=key, digest_size=16).digest(), said):
                return public
        return None

    def _proves(self, packet: bytes, size: int) -> bool:
        """Whether an answer's mac1 fits any member."""
        said, proved = packet[size : size + 16], packet[:size]
        return any(
            hmac.compare_digest(hashlib.blake2s(proved, key=key, digest_size=16).digest(), said)
            for key in self._mac1_keys.values()
        )

    def _put(self, index: int, end: _End) -> None:
        self._ends.pop(index, None)
        self._ends[index] = end
        while len(self._ends) > MAX_ENDS or (
            (oldest := next(iter(self._ends.values()))).used_s < end.used_s - SESSION_S and oldest is not end
        ):
            self._ends.popitem(last=False)

    def _forget(self, now_s: float) -> None:
        while self._heard and (
            len(self._heard) > MAX_HEARD or next(iter(self._heard.values())).heard_s < now_s - HEARD_FOR_S
        ):
            self._heard.popitem(last=False)


def _mac1_key(public: bytes) -> bytes:
    return hashlib.blake2s(b"mac1----" + public).digest()


def _index(packet: bytes, at: int) -> int:
    return int(struct.unpack_from("<I", packet, at)[0])
