"""A peer as a donor: what it stages and keeps for others, and the sidecar process that gives it to them.

`Donor` owns the listening socket, the staging folder, the slots, the update log and the sidecar. A peer that nobody
asks pays for a socket and for the updates it keeps: folder and slots come when they are first needed, the process then
or a few seconds into the run. The sidecar ends with the trainer, however that happens (docs/threads.md).
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, TypeVar

import msgspec

from atoll import log
from atoll.config import environment
from atoll.errors import LocalError
from atoll.kernels import Bytes, Table
from atoll.membership.listening import listen_on
from atoll.network.authority import Identity
from atoll.recovery.folder import RAM, StagingFolder, make_folder
from atoll.recovery.priority import go_last
from atoll.recovery.sidecar.orders import Order, Settings
from atoll.recovery.staging import SLACK_BYTES, OwnSlot, Slots, staged_bytes
from atoll.recovery.update import Update
from atoll.recovery.update_log import UpdateLog
from atoll.state.elsewhere import OwnBytes, Put
from atoll.state.snapshot import SharedState

_COMMAND: Final = (sys.executable, "-m", "atoll.recovery.sidecar")
_END_S: Final = 2.0
_EARLY_S: Final = 10.0
"""A peer that has been in its run for so long starts its sidecar unasked: who joins then waits for no process to start,
and finds all donors up at once."""
LOG_ROOM_BYTES: Final = 64 << 20
"""What staging must have room for besides its slots; a log that finds less keeps less."""

_log = log.get(__name__)
T = TypeVar("T")


class Donor:
    """What this peer gives. `stage` and `keep` are for the training thread, the rest for any."""

    def __init__(
        self,
        *,
        run: str,
        peer: str,
        session_key: bytes,
        bind_host: str,
        port: int = 0,
        fallback: Path,
        keep_bytes: int,
        pin_bytes: int,
        max_bytes_per_s: float = 0.0,
        ram: Path = RAM,
        own_bytes: int = 0,
        identity: Identity | None = None,
    ) -> None:
        """Listens at once (port 0: any free one), so that the address can be told; raises LocalError.

        Updates are kept up to `keep_bytes`, those that a staged snapshot needs up to `pin_bytes`. Under `fallback` is
        staged what finds no room in `ram`. `max_bytes_per_s` is the sidecar's cap, 0: none. `own_bytes` is about what a
        save stages of this peer's own. With `identity` the sidecar speaks TLS only, to holders of a certificate.
        """
        self._run, self._peer, self._key, self._identity = run, peer, session_key, identity
        self._ram, self._fallback = ram, fallback
        self._keep_bytes, self._pin_bytes, self._max_bytes_per_s = keep_bytes, pin_bytes, max_bytes_per_s
        self._listeners = listen_on(bind_host, port)
        self._port: int = self._listeners[0].getsockname()[1]
        self._lock = threading.RLock()  # process, pipe and folder; never the state's memory
        self._process: subprocess.Popen[bytes] | None = None
        self._serving = False
        self._opened_s = time.monotonic()
        self._closed = False
        self._moving = False
        self._folder: StagingFolder | None = None
        self._slots: Slots | None = None
        self._updates: UpdateLog | None = None
        self._own: OwnSlot | None = None
        self._own_bytes = own_bytes

    @property
    def port(self) -> int:
        return self._port

    @property
    def pid(self) -> int | None:
        """The sidecar's, while it runs."""
        with self._lock:
            running = self._process is not None and self._process.poll() is None
            return self._process.pid if self._process is not None and running else None

    @property
    def folder(self) -> Path | None:
        """Where things are staged, once anything was."""
        with self._lock:
            return self._folder.path if self._folder else None

    @property
    def is_in_ram(self) -> bool:
        """Whether what is staged lies in RAM, as far as anything is."""
        with self._lock:
            return self._folder is not None and self._folder.path.parent == self._ram

    def start_serving(self) -> None:
        """See to it that the sidecar runs. Does not wait for it: who connects meanwhile is served when it is up."""
        with self._lock:
            if self._closed:
                return
            self._serving = True
            if self._process is not None and (code := self._process.poll()) is not None:
                _log.warning("the sidecar ended by itself (exit code %d); starting another one", code)
                self._forget_process()
            if self._process is None:
                self._spawn()

    def reserve(self, state: SharedState) -> None:
        """Take the room of saves before they come: pages that are already there make the first as short as the others.
        Without room it warns; each save then says so itself."""

        def reserve(slots: Slots, own: OwnSlot) -> None:
            slots.reserve(state.numel)
            own.reserve(self._own_bytes + SLACK_BYTES)

        try:
            self._where_there_is_room(f"version {state.version}", state.numel, reserve)
        except (OSError, LocalError) as error:
            _log.warning("no room is kept for saves: %s", error)

    def stage(
        self,
        state: SharedState,
        inner: bytes = b"",
        tables: Sequence[Table] | None = None,
        put: Put | None = None,
    ) -> bool:
        """Copy the state, and this peer's `inner` state if there is any, into a slot and publish it as the snapshot of
        its version; a state of several ranks by `put`, with its digest `tables`. False, with a warning, if there is no
        room for it anywhere: then this peer has nothing to give, and trains on."""
        with self._lock:
            if self._closed:
                return False
            if self._serving:
                self.start_serving()
        try:
            self._where_there_is_room(
                f"version {state.version}",
                state.numel,
                lambda slots, own: slots.stage(state, tables, inner, put),
                len(inner),
            )
        except (OSError, LocalError) as error:
            _log.warning("version %d is not staged: %s", state.version, error)
            return False
        return True

    def stage_save(
        self,
        state: SharedState,
        tables: Sequence[Table] | None,
        own: Sequence[OwnBytes],
        put: Put | None = None,
    ) -> tuple[Path, Path]:
        """Stage a version that is to be saved, and this peer's own part, which `own` are the bytes of: the snapshot's
        folder and the own part's file. Both stay as they are until `release`. Raises OSError or LocalError."""

        def fill(slots: Slots, own_slot: OwnSlot) -> tuple[Path, Path]:
            path = own_slot.fill(own)
            return slots.pin(slots.stage(state, tables, put=put)), path

        return self._where_there_is_room(f"version {state.version}", state.numel, fill)

    def release(self) -> None:
        """What was staged to be saved is saved, or will not be."""
        if self._slots is not None:
            self._slots.unpin()

    def _where_there_is_room(
        self, what: str, numel: int, fill: Callable[[Slots, OwnSlot], T], more_bytes: int = 0
    ) -> T:
        """`fill` the slots; if their room was taken by others, once more where there is some. `what` needs it."""
        filled = ""
        for again in (False, True):
            try:
                self._make_folder(self._needed_bytes(numel, more_bytes), filled)
                assert self._slots is not None
                assert self._own is not None
                return fill(self._slots, self._own)
            except (OSError, LocalError) as error:
                if again or self._folder is None or self._folder.path.is_relative_to(self._fallback):
                    raise
                why = error.strerror.lower() if isinstance(error, OSError) and error.strerror else error
                filled = f"{what} cannot be staged ({why})"
                self._drop_folder()
        raise AssertionError("one of two tries returned or raised")

    def keep(self, update: Update, data: Bytes) -> None:
        """Write a commit down in the update log. What goes wrong costs the log, never the training."""
        if not self._serving and time.monotonic() - self._opened_s > _EARLY_S:
            self.start_serving()
        if self._keep_bytes <= 0 and self._pin_bytes <= 0:
            return
        with self._lock:
            if self._closed:
                return
        try:
            self._make_folder(self._needed_bytes(update.boundaries[-1]))
            assert self._updates is not None
            assert self._slots is not None
            self._updates.keep(update, data, self._slots.versions)
        except (OSError, LocalError) as error:
            _log.warning("update %d is not kept: %s", update.version, error)

    def scratch(self, name: str, size_bytes: int, numel: int, what: str) -> Path:
        """A file of so many bytes in the staging folder, which other ranks of this peer write into, with a state of
        `numel` elements. What it held before is still in it. Raises OSError or LocalError if there is no room."""

        def fill(slots: Slots, own_slot: OwnSlot) -> Path:
            assert self._folder is not None
            path = self._folder.path / name
            fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                if os.fstat(fd).st_size != size_bytes:
                    os.ftruncate(fd, 0)
                    os.posix_fallocate(fd, 0, size_bytes)
            finally:
                os.close(fd)
            return path

        return self._where_there_is_room(what, numel, fill, size_bytes)

    def yield_to_round(self, moving: bool) -> None:
        """While `moving`, the sidecar keeps to its floor rate."""
        with self._lock:
            self._moving = moving
            if self._folder is not None:
                self._folder.yield_to_round(moving)

    def set_session_key(self, session_key: bytes) -> None:
        """For requests to come."""
        with self._lock:
            self._key = session_key
            self._order(Order(session_key=session_key.hex()))

    def close(self) -> None:
        """End the sidecar and remove what was staged. Idempotent."""
        with self._lock:
            self._closed = True
            process = self._process
            self._forget_process()
            for listener in self._listeners:
                listener.close()
            if process is not None:
                try:
                    process.wait(_END_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            self._drop_folder()

    def __enter__(self) -> Donor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _needed_bytes(self, numel: int, more_bytes: int = 0) -> int:
        return staged_bytes(numel, more_bytes) + self._own_bytes + min(self._keep_bytes, LOG_ROOM_BYTES)

    def _make_folder(self, needed_bytes: int, filled: str = "") -> None:
        with self._lock:
            if self._folder is not None:
                return
            self._folder = make_folder(
                self._run, self._peer, needed_bytes, self._fallback, self._ram, filled=filled
            )
            self._folder.yield_to_round(self._moving)
            mapped = self._folder.path.parent == self._ram
            self._slots = Slots(self._folder.path, self._run, mapped)
            self._own = OwnSlot(self._folder.path, mapped)
            self._updates = UpdateLog(self._folder.path, self._keep_bytes, self._pin_bytes)
            self._order(Order(folder=str(self._folder.path)))

    def _drop_folder(self) -> None:
        with self._lock:
            if self._folder is not None:
                self._folder.remove()
            self._folder = self._slots = self._updates = self._own = None

    def _spawn(self) -> None:
        settings = Settings(
            run=self._run,
            peer=self._peer,
            trainer_pid=os.getpid(),
            session_key=self._key.hex(),
            listeners=tuple(listener.fileno() for listener in self._listeners),
            folder=str(self._folder.path) if self._folder else "",
            max_bytes_per_s=self._max_bytes_per_s,
            certificate=self._identity.certificate if self._identity else "",
            key=self._identity.key if self._identity else "",
            authority=self._identity.authority if self._identity else "",
        )
        try:
            self._process = subprocess.Popen(
                _COMMAND,
                env=environment.for_sidecar(),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=settings.listeners,
                start_new_session=True,  # a terminal's Ctrl-C and Ctrl-Z are the trainer's
            )
        except OSError as error:
            _log.warning("cannot start the sidecar: %s; joiners take snapshots from other peers", error)
            return
        go_last(self._process.pid)
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        self._order(settings)

    def _order(self, order: Order | Settings) -> None:
        """One line to the sidecar, if it runs. One that has not read its lines for long is no use: it ends."""
        if self._process is None or self._process.stdin is None:
            return
        line = msgspec.json.encode(order) + b"\n"
        try:
            whole = os.write(self._process.stdin.fileno(), line) == len(line)
        except BlockingIOError:
            whole = False
        except BrokenPipeError:
            return  # it ended: start_serving will see
        if not whole:
            self._process.kill()

    def _forget_process(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        self._process = None
