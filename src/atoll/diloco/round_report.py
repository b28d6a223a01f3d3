"""How a round ended, as one value, from the round to those who asked for it: outer loop, optimizer, observer."""

from __future__ import annotations

from dataclasses import dataclass, field

from atoll.diloco.schedule import RoundShape
from atoll.values import LinkRate


@dataclass(slots=True)
class Phases:
    """Seconds of one round: waiting for others, encoding, on the wire, for the verdict, applying."""

    wait_s: float = 0.0
    encode_s: float = 0.0
    wire_s: float = 0.0
    vote_s: float = 0.0
    apply_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RoundReport:
    """How a round ended. If not `committed`, the anchor is unchanged and the next update covers this round too; unless
    the run went on without this peer (`missed`): then its state has to be fetched. `saves` if its version is to be a
    checkpoint, which `uploader` brings to the remote place; `term` is the verdict's."""

    committed: bool
    round: int
    shape: RoundShape
    version: int
    members: tuple[str, ...]
    contributors: tuple[str, ...]
    left_out: str
    reason: str
    ends: bool
    end_reason: str
    digest: str
    delta_norm: float
    sent_bytes: int
    received_bytes: int
    attempts: int
    phases: Phases = field(default_factory=Phases)
    missed: bool = False
    weights: dict[str, int] = field(default_factory=dict)
    links: tuple[LinkRate, ...] = ()
    next_steps: int = 0
    """This peer's inner steps in the next round; 0: the schedule's."""
    saves: bool = False
    uploader: str = ""
    term: int = 0
