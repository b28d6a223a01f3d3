"""What a peer gives to those who catch up, and how it catches up itself: the sidecar's side of a session.

All calls are on the training thread, except `serve` and `renew_key`, which the membership thread calls.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from atoll import log
from atoll.diloco.outer import OuterState
from atoll.diloco.ranked_member import AnyMember, RankedMember
from atoll.diloco.scribe import Page, Scribe, read_state, whole_of, write_bytes, write_state
from atoll.errors import AtollError, LocalError, QuorumLost, Unreachable
from atoll.events import CaughtUp as CaughtUpEvent
from atoll.events import Event, InnerStateMissed, InnerStateTaken, SnapshotStaged
from atoll.kernels import Bytes
from atoll.membership.client import Admission
from atoll.membership.messages import CatchUp, CaughtUp, View
from atoll.mesh.crew import LONG_S, Crew
from atoll.network.authority import Identity
from atoll.network.line import Line
from atoll.recovery.catching_up import CaughtUp as Report
from atoll.recovery.catching_up import Target, catch_up
from atoll.recovery.donor import Donor
from atoll.recovery.folder import RAM
from atoll.recovery.pursuit import UNUSABLE
from atoll.recovery.targets import InnerTaken
from atoll.recovery.update import Update
from atoll.state.inner_state import InnerState
from atoll.state.manifest import VALUE_BYTES, VECTORS
from atoll.state.snapshot import SharedState

_WHOLE: Final = "whole"
_WIRE: Final = "wire"
"""Files in the staging folder: the state while it is caught up with, and the bytes of the last update."""

_log = log.get(__name__)


class _Position(msgspec.Struct, frozen=True):
    """Where rank 0 caught up to, and the file that has the state of all ranks."""

    path: str
    version: int
    round: int
    step: int


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
    """One peer's donor, made when its session opens, and its way back to the newest version. With several ranks rank 0
    has the donor, and `stage_if_due`, `keep`, `join` and `catch_up` are called by all of them at the same line."""

    def __init__(
        self,
        *,
        run: str,
        peer: str,
        member: AnyMember,
        admission: Admission,
        bind_host: str,
        port: int = 0,
        shelf: Shelf,
        line: Line,
        emit: Callable[[Event], None],
        inner: InnerState | None = None,
        own_bytes: int = 0,
        crew: Crew | None = None,
        identity: Identity | None = None,
    ) -> None:
        """Listens at once (port 0: any free one); raises LocalError if the address can not be had. `inner` is staged
        with snapshots, and taken over when this peer joins late; None: joiners begin with a fresh one. With `identity`
        state moves inside TLS only."""
        self._run, self._peer, self._member, self._line, self._emit = run, peer, member, line, emit
        self._inner, self._identity = inner, identity
        self.took_inner = False
        # A coordinator that sees nobody but this peer for `relearn_s` would have the run go back to what it holds.
        self._longest_alone_s = admission.timeouts.relearn_s / 2
        self._progress_timeout_s = admission.timeouts.progress_timeout_s
        self._crew = crew or Crew.alone()
        self.scribe = Scribe(self._crew)
        self.staging: Donor | None = None
        if self._crew.is_lead:
            self.staging = Donor(
                run=run,
                peer=peer,
                session_key=admission.session_key,
                bind_host=bind_host,
                port=port,
                fallback=shelf.fallback,
                keep_bytes=shelf.keep_bytes,
                pin_bytes=shelf.pin_bytes,
                max_bytes_per_s=line.max_up,
                ram=shelf.ram,
                own_bytes=own_bytes,
                identity=identity,
            )

    @property
    def port(self) -> int:
        """Where the sidecar listens; 0 where another rank has it."""
        return self.staging.port if self.staging is not None else 0

    # ---- giving ------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Somebody catches up: the sidecar is needed. Any thread."""
        if self.staging is not None:
            self.staging.start_serving()

    def renew_key(self, session_key: bytes) -> None:
        if self.staging is not None:
            self.staging.set_session_key(session_key)

    def stage_if_due(self, state: OuterState) -> None:
        """At a safe point: copy the state for others, if the coordinator asked for a snapshot."""
        if self._member.snapshot_due() is None:
            return
        if self._crew.num_ranks == 1:
            staged = self._donor.stage(state, self._inner.pack() if self._inner is not None else b"")
        else:
            if state.tables is None:
                state.digest()
            staged = self.scribe.together(
                {"state": lambda page: write_state(page, state)},
                lambda: self._donor.stage(state, tables=state.tables, put=self.put_state),
            )
        if staged:
            self._emit(SnapshotStaged(version=state.version))

    def put_state(self, path: Path, anchor_at: int, velocity_at: int) -> None:
        """On rank 0, while something is staged: all ranks write their ranges."""
        self.scribe.put("state", path, anchor_at, velocity_at)

    def keep(self, update: Update, data: Bytes, places: Sequence[slice] = ()) -> None:
        """A commit, for those who come after it. `data` are this rank's finished bytes; they lie, one after the other,
        at these `places` of the update's."""
        if self._crew.num_ranks == 1:
            self._donor.keep(update, data)
            return

        def work() -> None:
            try:
                path = self._donor.scratch(
                    _WIRE, update.wire_bytes, update.boundaries[-1], f"update {update.version}"
                )
                self.scribe.put("wire", path)
            except (OSError, LocalError) as error:
                _log.warning("update %d is not kept: %s", update.version, error)
                return
            self._donor.keep(update, np.fromfile(path, dtype=np.uint8))

        self.scribe.together({"wire": lambda page: write_bytes(page, data, places)}, work)

    def yield_to_round(self, moving: bool) -> None:
        """While an op is in flight the sidecar keeps out of its way."""
        if self.staging is not None:
            self.staging.yield_to_round(moving)

    def close(self) -> None:
        if self.staging is not None:
            self.staging.close()

    @property
    def _donor(self) -> Donor:
        assert self.staging is not None, "rank 0 has the donor"
        return self.staging

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
        while True:
            if self._crew.num_ranks == 1:
                report = self._pursue(state, with_inner, patience)
            else:
                report = self._pursue_together(state, patience)
            if self._crew.decide(bool, lambda: self._order() is None):
                # the run went back to what this peer held all the time: it is a member already
                member = self._member
                return member.newest_view() if isinstance(member, RankedMember) else member.view()
            patience = None  # it holds something by now, which the run may go back to
            if report is not None and report.inner is not None:
                self._take_inner(report.inner)
                with_inner = False
            answer = self._member.caught_up(
                CaughtUp(version=state.version, round=state.round, digest=state.digest(), step=state.step)
            )
            if isinstance(answer, View):
                return answer

    def _pursue(
        self, state: SharedState, with_inner: bool = False, patience: _Patience | None = None
    ) -> Report:
        first = self._order()
        held = state.version if first is not None and first.trusted and not with_inner else UNUSABLE

        def target() -> Target:
            order = self._order()
            if order is None and state.version == held != UNUSABLE:
                return Target(version=held, digests={}, sources=())
            return self._target(order)

        def check() -> None:
            self._member.lead.check()
            if patience is not None:
                order = self._order()
                patience.look(bool(order and any(each.peer != self._peer for each in order.sources)))

        report = catch_up(
            state,
            run=self._run,
            peer=self._peer,
            session_key=lambda: self._member.session_key,
            target=target,
            want_snapshot=lambda: self._member.want_snapshot(state.version),
            check=check,
            progress_timeout_s=self._progress_timeout_s,
            deadline_s=LONG_S,  # progress bounds it; a joiner that is too slow is told so much earlier
            max_bytes_per_s=self._line.max_down,
            note=lambda sentence: self._member.progress(state.step, "catching up"),
            replayed=self._donor.keep,
            with_inner=with_inner,
            identity=self._identity,
        )
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
        return report

    def _pursue_together(self, state: OuterState, patience: _Patience | None) -> None:
        """Rank 0 catches up with the state of all ranks, in a file that they share; then each takes its ranges."""

        def work() -> _Position | AtollError:
            try:
                size_bytes = state.numel * len(VECTORS) * VALUE_BYTES
                path = self._donor.scratch(_WHOLE, size_bytes, state.numel, "the state to catch up with")
                self.put_state(path, 0, state.numel * VALUE_BYTES)
                whole = whole_of(path, state, mapped=self._donor.is_in_ram)
                self._pursue(whole, patience=patience)
                if not self._donor.is_in_ram:
                    write_state(Page("state", str(path), (0, state.numel * VALUE_BYTES)), whole)
            except OSError as error:
                return LocalError(
                    f"no room to catch up in: {error.strerror or error}; make room in checkpoint.staging"
                )
            except AtollError as error:
                return error
            return _Position(str(path), whole.version, whole.round, whole.step)

        found = self.scribe.together({"state": lambda page: write_state(page, state)}, work)

        def tell() -> _Position:
            if isinstance(found, AtollError):
                raise found
            assert found is not None
            return found

        position = self._crew.decide(_Position, tell, within_s=LONG_S)
        self._crew.agree(bool, lambda: _taken(Path(position.path), state))
        state.version, state.round, state.step = position.version, position.round, position.step
        if self._crew.is_lead:
            Path(position.path).unlink()

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

    def _target(self, order: CatchUp | None) -> Target:
        if order is None:
            # Parts of the newer state may lie in this peer's memory already: it can not go on with what it declared.
            raise QuorumLost(
                f"the run was rolled back while {self._peer} fetched a newer version; start this peer again, and it "
                "fetches what the run stands at"
            )
        return Target(
            version=order.version, digests=order.digests, sources=order.sources, trusted=order.trusted
        )

    def _order(self) -> CatchUp | None:
        return self._member.lead.to_catch_up()


def _taken(path: Path, state: OuterState) -> bool:
    """This rank's ranges of what rank 0 caught up with. Raises LocalError."""
    try:
        read_state(path, state)
    except OSError as error:
        raise LocalError(
            f"{path} cannot be read: {error.strerror or error}; all ranks of a peer must see checkpoint.staging"
        ) from None
    return True
