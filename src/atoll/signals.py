"""SIGINT and SIGTERM to a process that takes part in a run: it says goodbye, and is gone in time.

The first signal raises in the main thread, so that `with` blocks say goodbye and close; it also restores the
default actions, so that the second one ends the process without help from Python. But Python runs handlers only
between two steps of the main thread, and that may be inside one long call: a backward pass, a device that is waited
for. So a thread of our own, "atoll-signals", hears of every signal at once, through the descriptor that Python's C
handler writes to. If the main thread did not begin to leave within GOODBYE_S, it says goodbye in its place; at GONE_S
it ends the process.

A command ends so whatever it does (`ended_in_time`). In a program of the user's own (`leave_politely`) only our part is
bounded: once the exception is raised, what the program makes of it is its own affair.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
GOODBYE_S = 1.0
GONE_S = 4.0

Goodbye = Callable[[str], None]


class Terminated(SystemExit):
    """SIGTERM to a program of the user's own: it ends with exit code 143, silently, if nobody catches it."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)
        self.exit_code = 128 + signal.SIGTERM

    def __str__(self) -> str:
        return "stopped by SIGTERM"


class Watch:
    """Hears of signals on a thread of its own. Make and close it in the main thread."""

    def __init__(self) -> None:
        _forget_in_children()
        self._changed = threading.RLock()  # a signal's handler may come while its thread holds it
        self._goodbyes: list[Goodbye] = []
        self._signal: signal.Signals | None = None
        self._taken = False
        self._goodbye_at_s = self._gone_at_s = float("inf")
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._run, name="atoll-signals", daemon=True)
        self._thread.start()

    def add(self, goodbye: Goodbye) -> None:
        with self._changed:
            self._goodbyes.append(goodbye)

    def remove(self, goodbye: Goodbye) -> None:
        with self._changed:
            self._goodbyes.remove(goodbye)

    def take(self, number: signal.Signals) -> None:
        """The main thread has the signal, and time to do with it what it likes."""
        with self._changed:
            self._signal, self._taken = number, True
            self._goodbye_at_s = self._gone_at_s = float("inf")

    def rearm(self) -> None:
        """What begins now, because of a signal, has to end in time too."""
        with self._changed:
            if self._signal is not None:
                self._gone_at_s = time.monotonic() + GONE_S
        self._wake()

    def close(self) -> None:
        """Hear no more. A signal that came is forgotten."""
        ours = signal.set_wakeup_fd(self._before)
        if ours != self._writer:  # somebody else took our place meanwhile
            signal.set_wakeup_fd(ours)
        os.write(self._writer, b"\xff")
        self._thread.join()
        os.close(self._reader)
        os.close(self._writer)

    # ---- the thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        written = select.poll()
        written.register(self._reader, select.POLLIN)
        while True:
            due_s = min(self._goodbye_at_s, self._gone_at_s)
            pause_ms = None if due_s == float("inf") else max(0.0, due_s - time.monotonic()) * 1000
            if written.poll(pause_ms):
                for number in os.read(self._reader, 64):
                    if number == 0xFF:
                        return
                    if number in SIGNALS:
                        self._hear(signal.Signals(number))
            self._keep_time()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._writer, b"\0")

    def _hear(self, number: signal.Signals) -> None:
        """A second one comes here only if the first one's handler had no turn yet."""
        with self._changed:
            if self._taken:
                return
            if self._signal is None:
                self._signal = number
                self._goodbye_at_s, self._gone_at_s = time.monotonic() + GOODBYE_S, time.monotonic() + GONE_S
                return
        _end(number, f"asked twice to end: {number.name}")

    def _keep_time(self) -> None:
        now_s = time.monotonic()
        with self._changed:
            number, goodbyes = self._signal, list(self._goodbyes)
            say, gone = now_s >= self._goodbye_at_s, now_s >= self._gone_at_s
            if say:
                self._goodbye_at_s = float("inf")
        if number is not None and say:
            for goodbye in goodbyes:
                goodbye(f"stopped by {number.name}")
        if number is not None and gone:
            _end(number, f"still busy {GONE_S:g} s after {number.name}: ended at once")


_watch: Watch | None = None
"""The one of this process: there is one descriptor that signals are written to."""


@contextlib.contextmanager
def ended_in_time() -> Generator[None]:
    """While inside, a first SIGINT or SIGTERM ends the process within GONE_S, however busy. Main thread only.

    The signal's handler is the caller's affair.
    """
    global _watch
    _watch = Watch()
    try:
        yield
    finally:
        _watch.close()
        _watch = None


class Manners:
    """How a program of the user's own behaves at a signal, while it has a seat in a run. See `leave_politely`."""

    def __init__(self, goodbye: Goodbye) -> None:
        self._goodbye = goodbye
        self._watch = _watch
        self._own: Watch | None = None

    def install(self) -> None:
        global _watch
        if self._watch is None and _are_default() and _is_descriptor_free():
            _watch = self._watch = self._own = Watch()
            for number, handler in _HANDLERS.items():
                signal.signal(number, handler)
        if self._watch is not None:
            self._watch.add(self._goodbye)

    def leaving(self) -> None:
        """Goodbye is said, and what is open is closed: if that is because of a signal, in time."""
        if self._own is not None:
            self._own.rearm()

    def close(self) -> None:
        """Put back what was there before. Idempotent; a program that lives on may be interrupted again."""
        global _watch
        if self._watch is None:
            return
        self._watch.remove(self._goodbye)
        self._watch = None
        if self._own is None or threading.current_thread() is not threading.main_thread():
            return
        _watch = None
        self._own.close()
        for number, default in _DEFAULTS.items():
            if signal.getsignal(number) in (_HANDLERS[number], signal.SIG_DFL):
                signal.signal(number, default)


def leave_politely(goodbye: Goodbye) -> Manners:
    """From now on SIGTERM raises `Terminated` in the main thread, and SIGINT KeyboardInterrupt as ever; the second one
    of either ends the process at once. `goodbye(reason)` is called from another thread if the main thread is too busy.

    Where the program has handlers of its own, or an event loop that watches signals, or is interactive, or where this
    is not the main thread, nothing is touched.
    """
    manners = Manners(goodbye)
    manners.install()
    return manners


_DEFAULTS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


def _are_default() -> bool:
    if threading.current_thread() is not threading.main_thread():
        return False
    if hasattr(sys, "ps1") or sys.flags.interactive:  # Ctrl-C ends a command there, not the process
        return False
    return all(signal.getsignal(number) == default for number, default in _DEFAULTS.items())


def _is_descriptor_free() -> bool:
    taken = signal.set_wakeup_fd(-1)
    if taken != -1:
        signal.set_wakeup_fd(taken)
    return taken == -1


def _interrupt(signum: int, frame: FrameType | None) -> None:
    del frame
    _begin_to_leave(signal.Signals(signum))
    raise KeyboardInterrupt("stopped by SIGINT")


def _terminate(signum: int, frame: FrameType | None) -> None:
    del frame
    _begin_to_leave(signal.Signals(signum))
    raise Terminated


_HANDLERS = {signal.SIGINT: _interrupt, signal.SIGTERM: _terminate}


def _begin_to_leave(number: signal.Signals) -> None:
    for each in SIGNALS:
        signal.signal(each, signal.SIG_DFL)
    if _watch is not None:
        _watch.take(number)


def _end(number: signal.Signals, why: str) -> None:
    os.write(2, f"atoll: {why}\n".encode())
    os._exit(128 + number)


@functools.cache
def _forget_in_children() -> None:
    os.register_at_fork(after_in_child=_forget)


def _forget() -> None:
    """A forked child's signals are not its parent's."""
    global _watch
    if _watch is None:
        return
    _watch = None
    signal.set_wakeup_fd(-1)
    for number, default in _DEFAULTS.items():
        if signal.getsignal(number) in (_interrupt, _terminate):
            signal.signal(number, default)
