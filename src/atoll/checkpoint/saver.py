"""A trainer's side of saving: one copy into staging, an order to the writer, and what it answers.

`Saver` owns the writer, a process (docs/threads.md), whose answers are picked up at safe points. While the writer is at
work nothing else is staged for it, so a save that comes then is skipped. Nothing that goes wrong here ends training: it
is told as an event, counted, and warned of once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from atoll import log
from atoll.checkpoint.description import Adapters
from atoll.checkpoint.writer.orders import Answer, Failed, Save, Saved, Uploaded
from atoll.checkpoint.writer.process import LostError, WriterProcess
from atoll.errors import LocalError
from atoll.events import (
    CheckpointFailed,
    CheckpointSaved,
    CheckpointsCounted,
    CheckpointSkipped,
    CheckpointUploaded,
    Event,
)
from atoll.kernels import Table
from atoll.state.elsewhere import OwnBytes, Put
from atoll.state.snapshot import SharedState

_SAY_S: Final = 1.0

_log = log.get(__name__)


@dataclass(frozen=True, slots=True)
class Keeping:
    """Where a peer's checkpoints go and which are kept. `remote` is an object store's address, "" for none. The rest
    describes the model to who reads them later (`checkpoint.description`)."""

    path: Path
    keep_last: int = 3
    keep_every: int = 0
    remote: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: str = ""
    names: Mapping[str, str] = field(default_factory=dict)
    adapters: Adapters | None = None


class Staging(Protocol):
    """Where a save is copied to (`recovery.donor.Donor`)."""

    def reserve(self, state: SharedState) -> None: ...

    def stage_save(
        self,
        state: SharedState,
        tables: Sequence[Table] | None,
        own: Sequence[OwnBytes],
        put: Put | None = None,
    ) -> tuple[Path, Path]: ...

    def release(self) -> None: ...


@dataclass(slots=True)
class _UnderWay:
    version: int
    term: int
    still_s: float


class Saver:
    """Used on the training thread."""

    def __init__(
        self, keeping: Keeping, *, run: str, peer: str, staging: Staging, emit: Callable[[Event], None]
    ) -> None:
        self._keeping, self._run, self._peer, self._staging, self._emit = keeping, run, peer, staging, emit
        self._writer = WriterProcess()
        self._under_way: _UnderWay | None = None
        self._uploads = False  # the last save is done here, and is on its way to the remote place
        self._saved = self._skipped = self._failed = 0
        self._newest, self._newest_term = -1, 0

    @property
    def pid(self) -> int | None:
        """The writer's, while it runs."""
        return self._writer.pid

    def start(self, state: SharedState) -> None:
        """Have room and the writer ready before the first save of a state like this; what is missing then, that save
        says."""
        self._staging.reserve(state)
        self._writer.start()

    def has(self, version: int, term: int) -> bool:
        """Whether the version that was committed under this term is saved, or on its way. After a roll-back the same
        number is made again, under a higher term."""
        coming = self._under_way
        return (self._newest_term, self._newest) >= (term, version) or (
            coming is not None and (coming.term, coming.version) == (term, version)
        )

    def is_free(self, version: int) -> bool:
        """Whether `save` would save. If the writer is behind, the version is skipped, and that is said."""
        self.look()
        if self._under_way is not None:
            self.skip(version, f"version {self._under_way.version} is still being written")
        return self._under_way is None

    def save(
        self,
        state: SharedState,
        tables: Sequence[Table] | None,
        own: Sequence[OwnBytes],
        own_state: bytes,
        *,
        digest: str,
        term: int,
        uploads: bool,
        put: Put | None = None,
    ) -> None:
        """Copy the state, and let the writer have it. `own` are the bytes of the own part's safetensors file, and
        `own_state` its JSON; b"": the shared part alone. `put` has a state written that lies on
        several ranks. Only while `is_free`. Blocks for the copy."""
        assert self._under_way is None, "one save at a time"
        began_s = time.monotonic()
        try:
            snapshot, path = self._staging.stage_save(state, tables, [*own, memoryview(own_state)], put)
        except (OSError, LocalError) as error:
            self.fail(state.version, f"it cannot be staged: {error}")
            return
        order = Save(
            version=state.version,
            term=term,
            run=self._run,
            peer=self._peer,
            digest=digest,
            snapshot=str(snapshot),
            own=str(path),
            own_bytes=sum(part.nbytes for part in own),
            state_bytes=len(own_state),
            place=str(self._keeping.path),
            keep_last=self._keeping.keep_last,
            keep_every=self._keeping.keep_every,
            remote=self._keeping.remote,
            uploads=uploads,
        )
        self._under_way = _UnderWay(state.version, term, time.monotonic() - began_s)
        try:
            self._writer.send(order)
        except LostError as error:
            self._lost(str(error))

    def skip(self, version: int, reason: str) -> None:
        """A version that is due is not saved."""
        self._skipped += 1
        self._emit(CheckpointSkipped(version=version, reason=reason))

    def fail(self, version: int, reason: str) -> None:
        """A save came to nothing."""
        self._failed += 1
        if self._failed == 1:
            _log.warning(
                "version %d is not saved: %s; training goes on, later failures are counted", version, reason
            )
        self._emit(CheckpointFailed(version=version, reason=reason, number=self._failed))

    def look(self) -> None:
        """Take what the writer has said meanwhile. Does not wait."""
        self._listen(0.0)

    def wait(self, patience_s: float) -> None:
        """Wait for the save under way, for at most `patience_s`, and say so if it takes a while."""
        deadline_s, told = time.monotonic() + patience_s, False
        say_s = time.monotonic() + _SAY_S
        while (self._under_way or self._uploads) and (now_s := time.monotonic()) < deadline_s:
            if now_s >= say_s and not told:
                told = True
                version = self._under_way.version if self._under_way else self._newest
                what = "save" if self._under_way else "upload"
                _log.warning(
                    "waiting for the %s of version %d, for at most %.0f s", what, version, patience_s
                )
            self._listen(min(0.2, deadline_s - now_s))

    def close(self, patience_s: float) -> None:
        """Wait for the last save, and let the writer end. If it takes longer it goes on by itself. Idempotent."""
        self.wait(patience_s)
        if self._under_way is not None:
            _log.warning(
                "version %d is still being written by process %s, which ends when it is done",
                self._under_way.version,
                self.pid,
            )
        if self._uploads:
            _log.warning(
                "version %d is still on its way to %s: process %s goes on",
                self._newest,
                self._keeping.remote,
                self.pid,
            )
        self._writer.end(busy=self._under_way is not None)
        if self._saved or self._skipped or self._failed:
            self._emit(
                CheckpointsCounted(
                    saved=self._saved, skipped=self._skipped, failed=self._failed, newest=self._newest
                )
            )
            self._saved = self._skipped = self._failed = 0
        self._under_way = None

    # ---- what the writer says -----------------------------------------------------------------------------------

    def _listen(self, timeout_s: float) -> None:
        if not (self._under_way or self._uploads):
            return
        try:
            answers = self._writer.answers(timeout_s)
        except LostError as error:
            self._lost(str(error))
            return
        for answer in answers:
            self._hear(answer)

    def _hear(self, answer: Answer) -> None:
        under_way = self._under_way
        match answer:
            case Uploaded():
                self._uploads = False
                self._tell_uploaded(answer)
                return
            case Saved() if under_way is not None:
                self._saved += 1
                self._newest, self._newest_term = answer.version, under_way.term
                self._uploads = bool(self._keeping.remote)
                self._emit(
                    CheckpointSaved(
                        version=answer.version,
                        path=str(self._keeping.path),
                        shared_bytes=answer.shared_bytes,
                        own_bytes=answer.own_bytes,
                        still_s=under_way.still_s,
                        write_s=answer.write_s,
                        verify_s=answer.verify_s,
                        removed=answer.removed,
                    )
                )
            case Failed():
                self.fail(answer.version, answer.reason)
        self._under_way = None
        self._staging.release()

    def _tell_uploaded(self, answer: Uploaded) -> None:
        if answer.reason:
            self._failed += 1
            if self._failed == 1:
                _log.warning("version %d is saved here, but not remotely: %s", answer.version, answer.reason)
            reason = f"it is saved here, but not in {self._keeping.remote}: {answer.reason}"
            self._emit(CheckpointFailed(version=answer.version, reason=reason, number=self._failed))
        else:
            self._emit(
                CheckpointUploaded(
                    version=answer.version,
                    address=self._keeping.remote,
                    shared=answer.shared,
                    seconds=answer.seconds,
                    removed=answer.removed,
                )
            )

    def _lost(self, why: str) -> None:
        """The save under way, or the upload, came to nothing; the next one has another writer."""
        if self._under_way is not None:
            version, self._under_way = self._under_way.version, None
            self._staging.release()
            self.fail(version, f"the writer process is lost: {why}")
        elif self._uploads:
            self._uploads = False
            self.fail(
                self._newest, f"it is saved here, but the writer process that uploads it is lost: {why}"
            )
