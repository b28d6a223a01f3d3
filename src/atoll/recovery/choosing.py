"""How to catch up: replay updates, take a snapshot, have one made, or wait. Decides and does nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Offer:
    """What one source gives: versions of snapshots, and the bytes of updates by the version they made."""

    snapshots: frozenset[int]
    updates: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Choice:
    """`replay` updates up to `version`, take the `snapshot` of `version`, `ask` for one to be made, or `wait`."""

    kind: Literal["replay", "snapshot", "ask", "wait"]
    version: int
    reason: str


def choose(
    *,
    version: int | None,
    target: int,
    known: Collection[int],
    offers: Sequence[Offer],
    snapshot_bytes: int,
    patient: bool = True,
    asked_in_vain: bool = False,
) -> Choice:
    """What to do for a peer at `version` (None: what it has is no use) to come to `target`.

    `known` are the versions whose digest is known: no other snapshot can be trusted. A `patient` peer believes that an
    update which nobody holds yet is still to come: donors write it down just after the commit that they report. Who
    `asked_in_vain` for a snapshot replays what there is, though that be more bytes.
    """
    if version is not None and version > target:
        return Choice("wait", target, f"the run is told to be at {target}, this peer is at {version}")
    if not offers:
        return Choice("wait", target, "no source answers")
    updates: dict[int, int] = {}
    for offer in offers:
        updates.update(offer.updates)
    newest = min(target, max(updates, default=-1))
    staged = {each for offer in offers for each in offer.snapshots if each in known and each <= target}
    snapshot = _best_snapshot(staged, version, newest, updates)
    replay_bytes = None if version is None else _bytes_to(version, newest, updates)
    if version is not None and replay_bytes is not None:
        worth_it = replay_bytes < snapshot_bytes or (asked_in_vain and snapshot is None)
        if newest > version and worth_it:
            sizes = f"{replay_bytes} bytes, a snapshot has {snapshot_bytes}"
            return Choice("replay", newest, f"replaying updates {version + 1} to {newest}: {sizes}")
        if newest <= version and patient and snapshot is None:
            return Choice("wait", target, f"update {version + 1} is not held yet")
    if snapshot is not None:
        own = "what this peer has is no use" if version is None else f"this peer is at version {version}"
        return Choice("snapshot", snapshot, f"taking the snapshot of version {snapshot}: {own}")
    return Choice("ask", target, f"no snapshot leads from version {version} to {target}: one is to be made")


def _best_snapshot(
    staged: Collection[int], version: int | None, newest: int, updates: Mapping[int, int]
) -> int | None:
    """The newest one that is newer than what this peer has, and from which updates lead on to all that is known."""
    for each in sorted(staged, reverse=True):
        if (version is None or each > version) and _bytes_to(each, newest, updates) is not None:
            return each
    return None


def _bytes_to(version: int, newest: int, updates: Mapping[int, int]) -> int | None:
    """Bytes of all updates from `version` to `newest`; None if one is missing."""
    steps = range(version + 1, newest + 1)
    if all(step in updates for step in steps):
        return sum(updates[step] for step in steps)
    return None
