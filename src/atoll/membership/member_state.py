"""What the member machine knows, as one frozen value, and the phases a peer goes through."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from atoll.membership.leases import SlotTable
from atoll.membership.messages import Declare, Ready, SlotsWanted, Verdict, Vote
from atoll.membership.settings import Timeouts
from atoll.values import OpId


class Phase(StrEnum):
    """Where a peer stands. Only in LOCAL does it train."""

    CONNECTING = "connecting"
    DECLARING = "declaring"
    CATCHING_UP = "catching up"
    LOCAL = "local"
    READY = "ready"
    REDUCING = "reducing"
    VOTED = "voted"
    APPLYING = "applying"
    OVER = "over"


WAITING = frozenset({Phase.DECLARING, Phase.CATCHING_UP, Phase.READY, Phase.REDUCING, Phase.VOTED})
IN_ROUND = frozenset({Phase.READY, Phase.REDUCING, Phase.VOTED})


class MemberState(msgspec.Struct, frozen=True):
    """Everything the member machine knows.

    `round` is the last round whose verdict is known, `op` the newest attempt heard of. `pending` is the
    `ready` that waits for a verdict, `vote` what was said of `op`, `applying` the verdict being obeyed. `term` is the
    highest heard of, `version_term` the one under which `version` was made or fetched. `slots` is the table of data
    slots as of `version`, as far as it is known, `told` the newest heard of; `wanted` waits for an answer.
    """

    peer: str
    timeouts: Timeouts
    last_s: float
    heard_s: float
    phase: Phase = Phase.CONNECTING
    connected: bool = False
    term: int = 0
    version: int = 0
    version_term: int = 0
    round: int = 0
    digest: str = ""
    op: OpId = OpId(term=0, round=0)
    declare: Declare | None = None
    pending: Ready | None = None
    vote: Vote | None = None
    applying: Verdict | None = None
    slots: SlotTable | None = None
    told: SlotTable | None = None
    wanted: SlotsWanted | None = None
