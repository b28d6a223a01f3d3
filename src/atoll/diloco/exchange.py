"""What a peer gives to those who catch up, and how it catches up itself: the sidecar's side of a session.

All calls are on the training thread, except `serve` and `renew_key`, which the membership thread calls.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from atoll.diloco.outer import OuterState
from atoll.errors import QuorumLost, Unreachable
from atoll.events import CaughtUp as CaughtUpEvent
from atoll.events import Event, InnerStateMissed, InnerStateTaken, SnapshotStaged
from atoll.kernels import Bytes
from atoll.membership.client import Admission, Member
from atoll.membership.messages import CaughtUp, View
from atoll.network.line import Line
from atoll.recovery.catching_up import Target, catch_up
from atoll.recovery.donor import Donor
from atoll.recovery.folder import RAM
from atoll.recovery.pursuit import UNUSABLE
from atoll.recovery.targets import InnerTaken
from atoll.recovery.update import Update
from atoll.state.inner_state import InnerState

LONGEST_CATCH_UP_S = 24 * 3600.0
"""No single wait is this long: progress is what bounds it. A joiner that is too slow is told so much earlier."""


@dataclass(frozen=True, slots=True)
class Shelf:
    """How much a peer keeps for those who catch up: updates up to `keep_bytes`, those after a staged snapshot up to
    `pin_bytes`; in `ram`, or under `fallback` where that has no room."""

    keep_bytes: int = 256 << 20
    pin_bytes: int = 2 << 30
    fallback: Path = field(default_factory=lambda: Path(tempfile.gettempdir()))
    ram: Path = RAM


class _Patience:
    """How long a peer that holds nothing of the run waits where nobody is who could give it something."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s, self._alone_since_s = longest_s, time.monotonic()

    def look(self, somebody_gives: bool) -> None:
        now_s = time.monotonic()
        if somebody_gives:
            self._alone_since_s = now_s
        elif now_s - self._alone_since_s > self._longest_s:
            raise Unreachable(
                "the start weights that model.init_from names are not on this machine, and no peer of the run was "
                f"there to give its state for {self._longest_s:g} s; join when others train, or copy the folder "
                "and name it with --set model.init_from=FOLDER"
            )


class Exchange:
    """One peer's donor, made when its session opens, and its way back to the newest version."""

    def __init__(
        self,
        *,
        run: str,
        peer: str,
        member: Member,
        admission: Admission,
        bind_host: str,
        shelf: Shelf,
        line: Line,
        emit: Callable[[Event], None],
        inner: InnerState | None = None,
        own_bytes: int = 0,
    ) -> None:
        """Listens at once; raises LocalError if the address can not be had. `inner` is staged with snapshots, and
        taken over when this peer joins late; None: joiners begin with a fresh one."""
        self._run, self._peer, self._member, self._line, self._emit = run, peer, member, line, emit
        self._inner = inner
        self.took_inner = False
        # A coordinator that sees nobody but this peer for `relearn_s` would have the run go back to what it holds.
        self._longest_alone_s = admission.timeouts.relearn_s / 2
        self._progress_timeout_s = admission.timeouts.progress_timeout_s
        self._donor = Donor(
            run=run,
            peer=peer,
            session_key=admission.session_key,
            bind_host=bind_host,
            fallback=shelf.fallback,
            keep_bytes=shelf.keep_bytes,
            pin_bytes=shelf.pin_bytes,
            max_bytes_per_s=line.max_up,
            ram=shelf.ram,
            own_bytes=own_bytes,
        )

    @property
    def port(self) -> int:
        """Where the sidecar listens."""
        return self._donor.port

    @property
    def staging(self) -> Donor:
        """Where saves are copied to."""
        return self._donor

    # ---- giving ------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Somebody catches up: the sidecar is needed. Any thread."""
        self._donor.start_serving()

    def renew_key(self, session_key: bytes) -> None:
        self._donor.set_session_key(session_key)

    def stage_if_due(self, state: OuterState) -> None:
        """At a safe point: copy the state for others, if the coordinator asked for a snapshot."""
        if self._member.snapshot_due() is None:
            return
        if self._donor.stage(state, self._inner.pack() if self._inner is not None else b""):
            self._emit(SnapshotStaged(version=state.version))

    def keep(self, update: Update, data: Bytes) -> None:
        """A commit, for those who come after it."""
        self._donor.keep(update, data)

    def yield_to_round(self, moving: bool) -> None:
        """While an op is in flight the sidecar keeps out of its way."""
        self._donor.yield_to_round(moving)

    def close(self) -> None:
        self._donor.close()

    # ---- catching up -------------------------------------------------------------------------------------------

    def join(self, state: OuterState) -> View:
        """`catch_up` of a peer that is new in the run: it may begin with a donor's inner state."""
        if state.version == UNUSABLE:
            return self.catch_up(state, self._inner is not None, _Patience(self._longest_alone_s))
        return self.catch_up(state, with_inner=self._inner is not None)

    def catch_up(
        self, state: OuterState, with_inner: bool = False, patience: _Patience | None = None
    ) -> View:
        """Fetch and replay until this peer is a member again. Blocks; the run does not wait.

        Raises what ends membership, and Unreachable if this peer's rate is too low to ever get there, or nobody gives
        it anything for longer than `patience` has.
        """

        def check() -> None:
            self._member.check()
            if patience is not None:
                order = self._member.to_catch_up()
                patience.look(bool(order and any(each.peer != self._peer for each in order.sources)))

        while True:
            report = catch_up(
                state,
                run=self._run,
                peer=self._peer,
                session_key=lambda: self._member.session_key,
                target=self._target,
                want_snapshot=lambda: self._member.want_snapshot(state.version),
                check=check,
                progress_timeout_s=self._progress_timeout_s,
                deadline_s=LONGEST_CATCH_UP_S,
                max_bytes_per_s=self._line.max_down,
                note=lambda sentence: self._member.progress(state.step, "catching up"),
                replayed=self._donor.keep,
                with_inner=with_inner,
            )
            patience = None  # it holds something by now, which the run may go back to
            if report.inner is not None:
                self._take_inner(report.inner)
                with_inner = False
            self._emit(
                CaughtUpEvent(
                    version=report.version,
                    from_version=report.from_version,
                    snapshot_version=report.snapshot_version,
                    updates=report.updates,
                    received_bytes=report.fetched_bytes,
                    bytes_by_source=report.bytes_by_source,
                    seconds=report.seconds,
                )
            )
            answer = self._member.caught_up(
                CaughtUp(version=state.version, round=state.round, digest=state.digest(), step=state.step)
            )
            if isinstance(answer, View):
                return answer

    def _take_inner(self, found: InnerTaken) -> None:
        assert self._inner is not None
        why = found.why
        if found.data:
            try:
                self._inner.take(found.data)
            except ValueError as error:
                why = f"what {found.donor} gave does not fit: {error}"
        self.took_inner = not why
        if why:
            self._emit(InnerStateMissed(reason=why))
        else:
            self._emit(InnerStateTaken(donor=found.donor, version=found.version, size_bytes=len(found.data)))

    def _target(self) -> Target:
        order = self._member.to_catch_up()
        if order is None:
            # Parts of the newer state may lie in this peer's memory already: it can not go on with what it declared.
            raise QuorumLost(
                f"the run was rolled back while {self._peer} fetched a newer version; start this peer again, and it "
                "fetches what the run stands at"
            )
        return Target(
            version=order.version, digests=order.digests, sources=order.sources, trusted=order.trusted
        )
