"""Catching up: from whatever this peer holds to the newest version of the run, while the run goes on.

Blocks the training thread, which decides, replays and looks up at least twice a second (`recovery.pursuit`); a thread
of its own fetches (`recovery.fetching`). What is fetched is checked against digests that the coordinator tells, so a
source need not be trusted. A snapshot is read over the state, in place: that takes no second copy of the model.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from atoll.kernels import Bytes
from atoll.network.authority import Identity
from atoll.recovery.fetching import Fetcher
from atoll.recovery.lookout import Callers
from atoll.recovery.pursuit import Pursuit
from atoll.recovery.targets import CaughtUp, Source, Target
from atoll.recovery.update import Update
from atoll.state.snapshot import SharedState

__all__ = ["CaughtUp", "Source", "Target", "catch_up"]


def catch_up(
    state: SharedState,
    *,
    run: str,
    peer: str,
    session_key: Callable[[], bytes],
    target: Callable[[], Target],
    want_snapshot: Callable[[], None],
    check: Callable[[], None],
    progress_timeout_s: float,
    deadline_s: float,
    max_bytes_per_s: float = 0.0,
    note: Callable[[str], None] = lambda sentence: None,
    replayed: Callable[[Update, Bytes], None] = lambda update, data: None,
    with_inner: bool = False,
    identity: Identity | None = None,
) -> CaughtUp:
    """Blocks until `state.version` is `target().version`, and then says how it came there.

    `target` is asked again and again; `want_snapshot` tells that no staged snapshot is of use; `check` raises what
    ended membership. They, `note` (what happens, in sentences) and `replayed` (every update that was taken) are called
    on this thread, `session_key` on the fetch thread. A source that is silent for `progress_timeout_s` rests. The whole
    may take `deadline_s`. `with_inner`: take a snapshot in any case, and the inner optimizer state that one of its
    donors staged with it, if there is any. With `identity` only donors are asked that prove by TLS who they are.

    Raises DeadlineExceeded; Unreachable, if updates are made faster than this peer can fetch them; and what `check`
    raises. Then the state is at the version it says, or, if a snapshot is in it in part only, at `pursuit.UNUSABLE`.
    """
    started_s, from_version = time.monotonic(), state.version
    first = target()
    if first.trusted and first.version == state.version:
        return CaughtUp(state.version, from_version, None, 0, {}, 0, 0.0)
    callers = Callers(target=target, want_snapshot=want_snapshot, check=check, note=note, replayed=replayed)
    with contextlib.closing(
        Fetcher(
            run=run,
            session_key=session_key,
            progress_timeout_s=progress_timeout_s,
            max_bytes_per_s=max_bytes_per_s,
            identity=identity,
        )
    ) as fetcher:
        pursuit = Pursuit(
            state, fetcher, callers, run=run, peer=peer, deadline_s=deadline_s, with_inner=with_inner
        )
        pursuit.go(first)
    received = fetcher.ledger.received()
    return CaughtUp(
        version=state.version,
        from_version=from_version,
        snapshot_version=pursuit.snapshot_version,
        fetched_bytes=sum(received.values()),
        bytes_by_source=received,
        updates=pursuit.num_updates,
        seconds=time.monotonic() - started_s,
        inner=pursuit.inner if with_inner else None,
    )
