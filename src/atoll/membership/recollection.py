"""What the coordinator remembers only to explain itself: bounded, not journaled, and nothing is decided by it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from atoll import events
from atoll.membership.steps import Effect, Emit, Journal

if TYPE_CHECKING:  # it is a part of the state
    from atoll.membership.coordinator_draft import Draft
    from atoll.membership.coordinator_state import CoordinatorState

KEPT = 16
KEPT_COMMITS = 8


class Said(msgspec.Struct, frozen=True):
    """A sentence, and when it was said."""

    at_s: float
    text: str


class Commit(msgspec.Struct, frozen=True):
    """A committed version, when it was, and the tokens of each contributor."""

    version: int
    at_s: float
    tokens: dict[str, int]


class Recollection(msgspec.Struct, frozen=True):
    """`waiting` is what is waited for now; the newest `reasons`, `failures` and `commits` come last."""

    waiting: str = ""
    reasons: tuple[Said, ...] = ()
    failures: tuple[Said, ...] = ()
    commits: tuple[Commit, ...] = ()


def recollect(before: CoordinatorState, draft: Draft, waiting: str | None) -> Recollection:
    """What is remembered after the step that `draft` made of `before`. `waiting` None: nothing was decided."""
    known = before.recollection
    if waiting is not None and waiting != known.waiting:
        known = replace(known, waiting=waiting)
    if not any(isinstance(effect, Journal | Emit) for effect in draft.effects):
        return known
    failures = [Said(draft.now_s, text) for text in _failures(draft.effects)]
    reasons = [Said(draft.now_s, "; ".join(draft.reasons))] if draft.reasons else []
    commits = [_commit(before, draft.now_s, event) for event in _committed(draft.effects)]
    return replace(
        known,
        reasons=(*known.reasons, *reasons)[-KEPT:],
        failures=(*known.failures, *failures)[-KEPT:],
        commits=(*known.commits, *commits)[-KEPT_COMMITS:],
    )


def _committed(effects: Sequence[Effect]) -> list[events.RoundCommitted]:
    found = [effect.event for effect in effects if isinstance(effect, Emit)]
    return [event for event in found if isinstance(event, events.RoundCommitted)]


def _commit(before: CoordinatorState, now_s: float, event: events.RoundCommitted) -> Commit:
    """What they were ready with is still in the state before the step."""
    ready = {peer: before.peers[peer].ready for peer in event.contributors if peer in before.peers}
    tokens = {peer: message.tokens for peer, message in ready.items() if message is not None}
    return Commit(event.version, now_s, tokens)


def _failures(effects: Sequence[Effect]) -> list[str]:
    told = [_failure(effect.event) for effect in effects if isinstance(effect, Emit)]
    return [text for text in told if text]


def _failure(event: events.Event) -> str:
    match event:
        case events.PeerLost(peer=peer, reason=reason):
            return f"lost {peer}: {reason}"
        case events.PeerRefused(peer=peer, reason=reason):
            return f"refused {peer}: {reason}"
        case events.PeerEvicted(peer=peer, reason=reason):
            return f"evicted {peer}: {reason}"
        case events.PeerLeftOut(peer=peer, round=number, reason=reason):
            return f"{peer} was left out of round {number}: {reason}"
        case events.AttemptFailed(op=op, reason=reason):
            return f"attempt {op} failed: {reason}"
        case events.RoundSkipped(reason=reason):
            return reason
        case events.DigestMismatch(peer=peer, version=version):
            return f"{peer} holds other bits than the run at version {version}"
    return ""
