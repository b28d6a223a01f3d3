"""What a round needs of those around it: membership, and who serves those that catch up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from atoll.diloco.outer import OuterState
from atoll.kernels import Bytes
from atoll.membership.messages import Applied, CatchUp, Ready, Verdict, Vote
from atoll.recovery.update import Update
from atoll.values import Plan


class Onlooker(Protocol):
    """Who has to know what a round does (`diloco.exchange.Exchange`): it serves those who catch up."""

    def yield_to_round(self, moving: bool) -> None: ...
    def keep(self, update: Update, data: Bytes, places: Sequence[slice] = ()) -> None: ...
    def stage_if_due(self, state: OuterState) -> None: ...


class Nobody:
    """An onlooker for runs in one process."""

    def yield_to_round(self, moving: bool) -> None: ...
    def keep(self, update: Update, data: Bytes, places: Sequence[slice] = ()) -> None: ...
    def stage_if_due(self, state: OuterState) -> None: ...


class MemberPort(Protocol):
    """What a round needs of membership (`membership.client.Member`, or a stand-in in tests)."""

    def ready(self, message: Ready) -> None: ...
    def next_order(self, timeout_s: float) -> Plan | Verdict | CatchUp | None: ...
    def vote(self, message: Vote) -> None: ...
    def applied(self, message: Applied) -> None: ...
