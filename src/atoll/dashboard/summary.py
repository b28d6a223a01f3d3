"""The numbers at the end of a run: pure functions of its events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from atoll import events
from atoll.dashboard.view import Seen

BYTES_PER_GRADIENT = 4  # plain data-parallel training averages fp32 gradients


@dataclass(frozen=True, slots=True)
class Loss:
    """A peer that did not see the end: when (seconds after the first inner step), and why."""

    peer: str
    after_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Saves:
    """What all peers' saves came to, counted peer by peer. An upload that came to nothing counts as failed. `newest` is
    the newest version that is safe in some peer's place, -1 for none."""

    done: int = 0
    skipped: int = 0
    failed: int = 0
    newest: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Losses are nats per token of the anchor on held-out text; None where nothing was measured.

    `bytes_sent_per_peer` is the mean over the peers that applied the last version, counted at their sockets.
    `bytes_data_parallel` is what each would have sent with an fp32 ring all-reduce in each of the same steps.
    `compute_utilisation` is the share of the rounds' time, over all peers, that was spent on inner steps.
    """

    val_loss_before: float | None
    val_loss_after: float | None
    tokens: int
    rounds: int
    lost: tuple[Loss, ...]
    bytes_sent_per_peer: int
    bytes_data_parallel: int
    compute_utilisation: float | None
    digests_equal: bool
    saves: Saves


def summarise(seen: Sequence[Seen], num_parameters: int) -> Summary:
    """Summarise the merged events of all processes of a run."""
    applied = [(each.source, each.event) for each in seen if isinstance(each.event, events.RoundApplied)]
    validations = sorted(
        (each.event.version, each.event.val_loss)
        for each in seen
        if isinstance(each.event, events.AnchorEvaluated)
    )
    last_version = max((event.version for _, event in applied), default=0)
    finishers = {source for source, event in applied if event.version == last_version}
    to_the_end = [(source, event) for source, event in applied if source in finishers]
    return Summary(
        val_loss_before=validations[0][1] if validations else None,
        val_loss_after=validations[-1][1] if validations else None,
        tokens=sum(event.tokens for _, event in applied),
        rounds=len({event.version for _, event in applied}),
        lost=losses(seen),
        bytes_sent_per_peer=_mean(to_the_end, sum(event.sent_bytes for _, event in to_the_end)),
        bytes_data_parallel=_mean(
            to_the_end, sum(data_parallel_bytes(event, num_parameters) for _, event in to_the_end)
        ),
        compute_utilisation=compute_utilisation(event for _, event in applied),
        digests_equal=digests_equal(event for _, event in applied),
        saves=saves(seen),
    )


def data_parallel_bytes(event: events.RoundApplied, num_parameters: int) -> int:
    """What one peer of a ring all-reduce sends in this round's steps: 2 (N-1)/N of the gradient, each."""
    num_peers = len(event.members)
    return event.inner_steps * 2 * BYTES_PER_GRADIENT * num_parameters * (num_peers - 1) // num_peers


def compute_utilisation(applied: Iterable[events.RoundApplied]) -> float | None:
    """Inner steps' share of all seconds that rounds took."""
    compute_s = total_s = 0.0
    for event in applied:
        compute_s += event.compute_s
        total_s += (
            event.compute_s + event.wait_s + event.encode_s + event.wire_s + event.vote_s + event.apply_s
        )
    return compute_s / total_s if total_s > 0 else None


def digests_equal(applied: Iterable[events.RoundApplied]) -> bool:
    """Whether all peers held the same bits after every round; False if no round was committed."""
    by_version: dict[int, set[str]] = {}
    for event in applied:
        by_version.setdefault(event.version, set()).add(event.digest)
    return bool(by_version) and all(len(digests) == 1 for digests in by_version.values())


def saves(seen: Iterable[Seen]) -> Saves:
    """Counted from each save's own event: a peer that was killed has no sum to tell."""
    found = Saves()
    for each in seen:
        match each.event:
            case events.CheckpointSaved(version=version):
                found = replace(found, done=found.done + 1, newest=max(found.newest, version))
            case events.CheckpointSkipped():
                found = replace(found, skipped=found.skipped + 1)
            case events.CheckpointFailed():
                found = replace(found, failed=found.failed + 1)
    return found


def saves_text(saves: Saves) -> str:
    """One line for people; "" where nothing was to be saved."""
    if saves == Saves():
        return ""
    counts = f"{saves.done} done, {saves.skipped} skipped, {saves.failed} failed"
    return f"{counts}; the newest is version {saves.newest}" if saves.newest >= 0 else counts


def losses(seen: Sequence[Seen]) -> tuple[Loss, ...]:
    """Peers that were killed or lost, in order; a kill on purpose explains the loss that follows it."""
    first_s = next((each.wall_time_s for each in seen if isinstance(each.event, events.TrainingStep)), 0.0)
    found: dict[str, Loss] = {}
    for each in seen:
        match each.event:
            case events.PeerKilled(peer=peer, signal=signal):
                found.setdefault(
                    peer, Loss(peer, each.wall_time_s - first_s, f"killed with {signal}, on purpose")
                )
            case events.PeerLost(peer=peer, reason=reason):
                found.setdefault(peer, Loss(peer, each.wall_time_s - first_s, reason))
    return tuple(found.values())


def _mean(rows: Sequence[tuple[str, events.RoundApplied]], total: int) -> int:
    num_peers = len({source for source, _ in rows})
    return total // num_peers if num_peers else 0
