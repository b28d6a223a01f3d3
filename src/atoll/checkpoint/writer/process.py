"""The trainer's end of the writer process: starting it, orders to it, its answers, its end.

There is no thread: answers are read when somebody asks for them. A writer that is busy when let go finishes alone.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from typing import Final

import msgspec

from atoll.checkpoint.writer.orders import Answer, Save
from atoll.config import environment

_COMMAND: Final = (sys.executable, "-m", "atoll.checkpoint.writer")
_END_S: Final = 2.0

_left: Final[list[subprocess.Popen[bytes]]] = []
"""Writers of this process that finish without it."""


class LostError(Exception):
    """The writer is no use any more; the text says why. The next order has another one."""


class WriterProcess:
    """Used on the training thread. A process that ended is replaced by the next order."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._heard = b""

    @property
    def pid(self) -> int | None:
        """The writer's, while it runs."""
        running = self._process is not None and self._process.poll() is None
        return self._process.pid if self._process is not None and running else None

    def start(self) -> None:
        """Have it ready before it is needed; if it cannot be started, the first order says so."""
        with contextlib.suppress(OSError):
            if self._process is None:
                self._spawn()

    def send(self, order: Save) -> None:
        """A line fits into the pipe: the writer has nothing else to read. Raises LostError."""
        line = msgspec.json.encode(order) + b"\n"
        for again in (False, True):
            try:
                if self._process is None:
                    self._spawn()
                assert self._process is not None
                assert self._process.stdin is not None
                if os.write(self._process.stdin.fileno(), line) == len(line):
                    return
                self.end(busy=True)
                raise LostError("it does not read its orders")
            except OSError as error:
                self.end(busy=True)
                if again:
                    reason = (error.strerror or str(error)).lower()
                    raise LostError(f"it cannot be started: {reason}") from None

    def answers(self, timeout_s: float) -> list[Answer]:
        """What it has said meanwhile; waits for at most `timeout_s`. Raises LostError if it ended."""
        process = self._process
        if process is None or process.stdout is None:
            return []
        if timeout_s:
            select.select([process.stdout], [], [], timeout_s)
        try:
            data = os.read(process.stdout.fileno(), 65536)
        except BlockingIOError:
            return []
        if not data:
            code = _code_of(process)
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            self.end(busy=False)
            raise LostError(f"it ended in the middle of it ({how})")
        *lines, self._heard = (self._heard + data).split(b"\n")
        return [msgspec.json.decode(line, type=Answer) for line in lines]

    def end(self, *, busy: bool) -> None:
        """Let it end: at once if it has nothing to do, else when it is done."""
        process, self._process = self._process, None
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        if not busy:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
        # One that is not done goes on alone. Somebody has to know it, for the kernel to forget it.
        _left.append(process)
        _left[:] = [each for each in _left if each.poll() is None]

    def _spawn(self) -> None:
        self._heard = b""
        self._process = subprocess.Popen(
            _COMMAND,
            env=environment.for_writer(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a terminal's Ctrl-C is the trainer's
        )
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)


def _code_of(process: subprocess.Popen[bytes]) -> int:
    """Of one that says nothing any more."""
    try:
        return process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
