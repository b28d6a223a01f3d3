"""Events as sentences, and numbers as people read them: `1.2 MB`, `3.4k`, `0:42`."""

from __future__ import annotations

from atoll import events


def sentence(source: str, event: events.Event) -> str | None:
    """What a person wants to read about an event; None for those that only fill tables."""
    match event:
        case events.CoordinatorListening(address=address, term=term, restarted=restarted):
            again = f" again, term {term}" if restarted else ""
            return f"coordinator listens on {address}{again}"
        case events.CoordinatorStoodBy(address=address, leader=leader):
            return f"coordinator {address} stands by: {leader} leads"
        case events.CoordinatorSteppedDown(reason=reason):
            return f"coordinator leads no more: {reason}"
        case events.PeerJoined(peer=peer, members=members):
            return f"{peer} joined ({counted(len(members), 'peer')})"
        case events.PeerCatchingUp(reason=reason):
            return reason
        case events.CaughtUp(version=version, received_bytes=received_bytes, seconds=seconds):
            return (
                f"{source} caught up with version {version}: {bytes_text(received_bytes)} in {seconds:.1f} s"
            )
        case events.InnerStateTaken(donor=donor, size_bytes=size_bytes):
            return f"{source} begins with {donor}'s inner optimizer state: {bytes_text(size_bytes)}"
        case events.InnerStateMissed(reason=reason):
            return f"{source} begins with a fresh inner optimizer: {reason}"
        case events.StartWeightsMissed(path=path):
            return f"{source} has no start weights ({path} is not here): it takes the state from other peers"
        case events.VersionLearned(reason=reason):
            return reason
        case events.PeerRefused(peer=peer, reason=reason):
            return f"{peer} was refused: {reason}"
        case events.PeerKilled(peer=peer, signal=signal):
            return f"{peer} was killed ({signal}), on purpose"
        case events.FaultPlayed(kind="stop", peer=peer, seconds=seconds):
            return f"{peer} was stopped for {seconds:.1f} s, on purpose"
        case events.FaultPlayed(kind="leave", peer=peer):
            return f"{peer} was asked to leave, on purpose"
        case events.FaultPlayed(kind="join", peer=peer):
            return f"{peer} was started, on purpose"
        case events.PeerLost(peer=peer, reason=reason, members=members):
            return f"lost {peer}: {reason} ({counted(len(members), 'peer')} left)"
        case events.PeerLeft(peer=peer, reason=reason):
            return f"{peer} left: {reason}"
        case events.PeerAskedToLeave(peer=peer, reason=reason):
            return f"{peer}: {reason}"
        case events.PeerEvicted(peer=peer, reason=reason, for_s=for_s):
            return f"{peer} was evicted {duration_text(for_s)}: {reason}"
        case events.RunStopped(reason=reason):
            return reason
        case events.PeerLeftOut(peer=peer, round=number, reason=reason):
            return f"{peer} was left out of round {number}: {reason}"
        case events.AttemptFailed(op=op, reason=reason):
            return f"attempt {op} failed: {reason}"
        case events.RoundSkipped(reason=reason):
            return reason
        case events.SlotsReturned(peer=peer, slots=slots):
            return f"{counted(slots, 'data slot')} of {peer} are free again"
        case events.SlotsRead(round=number, dropped=dropped) if dropped:
            return f"what {', '.join(sorted(dropped))} read in round {number} is dropped, and not read again"
        case events.OldPositionsUsed(reason=reason) | events.SameDataRead(reason=reason):
            return reason
        case events.AddressDoubted(reason=reason):
            return f"{source}: {reason}"
        case events.ReachChanged(none=none) if none:
            pairs = ", ".join(f"{edge.source} and {edge.target}" for edge in none[:4]) + ", ..." * (
                len(none) > 4
            )
            return f"rounds go round pairs that cannot reach each other: {pairs}"
        case events.DataRanDry(slots=0):
            return f"{source} holds no data slot, and none is left: it takes no step until the next round"
        case events.DataRanDry(slots=slots):
            return f"{source} has read its {counted(slots, 'data slot')}, and none is left: it reads them once more"
        case events.DigestMismatch(peer=peer, version=version):
            return f"{peer} holds other bits than the run at version {version}"
        case events.RowsSkipped(path=path, count=count, example=example, empty=False):
            return f"{source} skipped {counted(count, 'row')} of {path}, e.g. {example}"
        case events.ModelSaved(path=path):
            return f"{source} saved the model: {path}"
        case events.CheckpointSaved(version=version, path=path, still_s=still_s):
            return (
                f"{source} saved version {version} (training stood still for {1000 * still_s:.0f} ms): {path}"
            )
        case events.CheckpointUploaded(version=version, address=address, shared=True, seconds=seconds):
            return f"{source} brought version {version} to {address} in {seconds:.1f} s"
        case events.CheckpointFetched(version=version, address=address, seconds=seconds):
            return f"{source} fetched version {version} from {address} in {seconds:.1f} s"
        case events.CheckpointSkipped(version=version, reason=reason):
            return f"{source} does not save version {version}: {reason}"
        case events.CheckpointFailed(version=version, reason=reason, number=1):
            return f"{source} could not save version {version}, and trains on: {reason}"
        case events.CheckpointsCounted(saved=saved, skipped=skipped, failed=failed) if skipped or failed:
            return f"{source}: {counted(saved, 'checkpoint')} saved, {skipped} skipped, {failed} failed"
        case events.CheckpointDamaged(version=version, reason=reason):
            return f"{source} does not use the checkpoint of version {version}: {reason}"
        case events.Resumed(version=version, step=step, path=path, remarks=remarks):
            return "; ".join((f"{source} goes on from version {version}, step {step}: {path}", *remarks))
        case events.RunEnded(reason=reason, exit_code=code):
            return f"{source} ended: {reason}" + (f" (exit {code})" if code else "")
        case events.RoundApplied():
            return _round(event)
        case events.AnchorEvaluated(step=step, val_loss=loss):
            return f"validation loss {loss:.3f} at step {step}"
    return None


def _round(event: events.RoundApplied) -> str:
    loss = "no loss" if event.mean_loss is None else f"loss {event.mean_loss:.3f}"
    return (
        f"round {event.round} committed by {counted(len(event.members), 'peer')} at step {event.step}: "
        f"{loss}, computed {event.compute_s:.2f} s, waited {event.wait_s:.2f} s, "
        f"wire {event.encode_s + event.wire_s:.2f} s, apply {event.vote_s + event.apply_s:.2f} s, "
        f"sent {bytes_text(event.sent_bytes)}"
    )


def step_line(event: events.TrainingStep) -> str:
    """One logged inner step."""
    return (
        f"step {event.step}: loss {event.loss:.3f}, {number_text(event.tokens_per_s)} tokens/s, "
        f"lr {event.lr:.2e}, gradient norm {event.grad_norm:.2f}" + (" (skipped)" if event.skipped else "")
    )


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def bytes_text(count: float) -> str:
    """Decimal units, as network links are sold: `831 kB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def duration_text(seconds: float) -> str:
    """How long an id is refused: `for 600 s`; 0: `until the run ends`."""
    return f"for {seconds:g} s" if seconds else "until the run ends"


def number_text(count: float) -> str:
    """`950`, `12.3k`, `4.56M`."""
    if count < 10_000:
        return f"{count:.0f}"
    if count < 1_000_000:
        return f"{count / 1000:.1f}k"
    return f"{count / 1_000_000:.2f}M"


def clock_text(seconds: float) -> str:
    """`0:42`, `1:02:03`."""
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
