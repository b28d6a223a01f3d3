"""What a run looks like right now: a pure fold over its events. Drawing it is done elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from atoll import events
from atoll.dashboard.words import sentence

NEWS_KEPT = 6
GONE = frozenset({"killed", "lost", "left", "evicted", "done", "failed"})


@dataclass(frozen=True, slots=True)
class Seen:
    """An event with who wrote it and when (Unix seconds)."""

    wall_time_s: float
    source: str
    event: events.Event


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerView:
    """One peer. `loss` is nats per token at its newest logged step; None before the first."""

    name: str
    state: str = "starting"
    step: int = 0
    loss: float | None = None
    tokens_per_s: float = 0.0
    sent_bytes: int = 0

    @property
    def is_gone(self) -> bool:
        return self.state in GONE


@dataclass(frozen=True, slots=True)
class PlanView:
    """Which way a round's sums go, and the seconds predicted for it."""

    round: int
    topology: str
    predicted_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundView:
    """The newest committed round; seconds are the slowest member's so far heard of, bytes are one peer's.

    `plan` is None where the coordinator's events are not seen.
    """

    number: int
    version: int
    members: tuple[str, ...]
    compute_s: float
    wait_s: float
    wire_s: float
    apply_s: float
    sent_bytes: int
    plan: PlanView | None = None


@dataclass(frozen=True, slots=True)
class Validation:
    step: int
    version: int
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """`started_at_s` is the Unix time of the first inner step, None before; `peers` are sorted by name. `plan` is
    that of the newest attempt.
    """

    run: str = ""
    started_at_s: float | None = None
    peers: tuple[PeerView, ...] = ()
    rounds: int = 0
    last_round: RoundView | None = None
    plan: PlanView | None = None
    validations: tuple[Validation, ...] = ()
    news: tuple[tuple[float, str], ...] = ()

    def peer(self, name: str) -> PeerView:
        return next((peer for peer in self.peers if peer.name == name), PeerView(name=name))

    @property
    def living(self) -> tuple[PeerView, ...]:
        return tuple(peer for peer in self.peers if not peer.is_gone)


def fold(view: View, seen: Seen) -> View:
    """The view after one more event. Events may come from several files, roughly in order."""
    view = _folded(view, seen.wall_time_s, seen.source, seen.event)
    news = sentence(seen.source, seen.event)
    if news is None or isinstance(seen.event, events.RoundApplied | events.AnchorEvaluated):
        return view
    return replace(view, news=(*view.news, (seen.wall_time_s, news))[-NEWS_KEPT:])


def fold_all(seen: Iterable[Seen], view: View | None = None) -> View:
    view = view or View()
    for each in seen:
        view = fold(view, each)
    return view


def _folded(view: View, wall_time_s: float, source: str, event: events.Event) -> View:
    match event:
        case events.RunStarted(role=role, run=run):
            view = _with_peer(view, source, state="starting") if role == "peer" else view
            return replace(view, run=run)
        case events.PeerConnected(peer=peer):
            return _with_peer(view, peer, state="connected")
        case events.PeerCatchingUp(peer=peer):
            return _with_peer(view, peer, state="catching up")
        case events.PeerJoined(peer=peer):
            return _with_peer(view, peer, state="joined")
        case events.TrainingStep():
            return _after_step(view, wall_time_s, source, event)
        case events.AttemptStarted(members=members, topology=topology, predicted_s=predicted_s):
            plan = PlanView(_round_of(event.op), topology, predicted_s)
            return replace(_with_states(view, members, "syncing"), plan=plan)
        case events.RoundApplied():
            return _after_round(view, source, event)
        case events.AnchorEvaluated(step=step, version=version, val_loss=loss):
            return _after_evaluation(view, Validation(step, version, loss))
        case events.PeerKilled(peer=peer):
            return _with_peer(view, peer, state="killed")
        case events.PeerLost(peer=peer):
            return _with_peer(view, peer, state="killed" if view.peer(peer).state == "killed" else "lost")
        case events.PeerEvicted(peer=peer):
            return _with_peer(view, peer, state="evicted")
        case events.PeerLeft(peer=peer):
            return _with_peer(view, peer, state="done" if view.peer(peer).state == "done" else "left")
        case events.RunEnded(exit_code=code) if source in {peer.name for peer in view.peers}:
            evicted = view.peer(source).state == "evicted"
            return view if evicted else _with_peer(view, source, state="failed" if code else "done")
    return view


def _round_of(op: str) -> int:
    """Of an op id as events spell it: `t1/r7/f0/a0`."""
    return int(op.split("/")[1][1:]) if op.count("/") > 1 else 0


def _after_step(view: View, wall_time_s: float, source: str, event: events.TrainingStep) -> View:
    started_at_s = wall_time_s if view.started_at_s is None else min(view.started_at_s, wall_time_s)
    view = replace(view, started_at_s=started_at_s)
    return _with_peer(
        view, source, state="training", step=event.step, loss=event.loss, tokens_per_s=event.tokens_per_s
    )


def _after_round(view: View, source: str, event: events.RoundApplied) -> View:
    sent_bytes = view.peer(source).sent_bytes + event.sent_bytes
    view = _with_peer(view, source, state="training", step=event.step, sent_bytes=sent_bytes)
    newest = view.last_round
    if newest is not None and event.version < newest.version:
        return view
    same = newest if newest is not None and event.version == newest.version else None
    last_round = RoundView(
        number=event.round,
        version=event.version,
        members=event.members,
        compute_s=max(event.compute_s, same.compute_s if same else 0.0),
        wait_s=max(event.wait_s, same.wait_s if same else 0.0),
        wire_s=max(event.encode_s + event.wire_s, same.wire_s if same else 0.0),
        apply_s=max(event.vote_s + event.apply_s, same.apply_s if same else 0.0),
        sent_bytes=event.sent_bytes,
        plan=view.plan if view.plan is not None and view.plan.round == event.round else None,
    )
    return replace(view, last_round=last_round, rounds=view.rounds + (same is None))


def _after_evaluation(view: View, validation: Validation) -> View:
    """Every member evaluates the same anchor; one value a version is enough."""
    if any(known.version == validation.version for known in view.validations):
        return view
    return replace(view, validations=(*view.validations, validation))


def _with_peer(view: View, name: str, **changes: Any) -> View:
    known = view.peer(name)
    if known.state == "killed" and changes.get("state") not in {"starting", "connected"}:
        changes = {**changes, "state": "killed"}
    others = [peer for peer in view.peers if peer.name != name]
    changed = replace(known, **changes)
    return replace(view, peers=tuple(sorted([*others, changed], key=lambda peer: peer.name)))


def _with_states(view: View, names: Iterable[str], state: str) -> View:
    for name in names:
        view = _with_peer(view, name, state=state)
    return view
