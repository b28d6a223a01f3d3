"""stdout and stderr of a command: a courtesy to whoever reads them, never a reason to stop.

A run is watched through `head`, through an ssh connection that drops, into a log on a full disk. None of these
may end training, and none may turn the exit code that scripts go by into another.
"""

from __future__ import annotations

import io
import sys
from typing import TextIO

from atoll.errors import LocalError


class LastingFile(io.FileIO):
    """A file descriptor that takes everything; once it cannot be written, what it takes is dropped."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd, "wb", closefd=False)
        self.lost: OSError | None = None

    def write(self, data: object, /) -> int | None:  # type: ignore[override]
        view = memoryview(data)  # type: ignore[arg-type]
        if self.lost is None:
            try:
                return super().write(view)
            except OSError as error:
                self.lost = error
        return view.nbytes


def outlive_readers() -> None:
    """Make this process's stdout and stderr last. For programs, at their start; what was printed before is flushed."""
    sys.stdout, sys.stderr = _lasting(sys.stdout), _lasting(sys.stderr)


def deliver(text: str) -> None:
    """Print what a command is for. Raises LocalError if it could not be kept; a reader who left wanted no more."""
    sys.stdout.write(text)
    sys.stdout.flush()
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    lost = raw.lost if isinstance(raw, LastingFile) else None
    if lost is not None and not isinstance(lost, BrokenPipeError):
        reason = (lost.strerror or str(lost)).lower()
        raise LocalError(f"cannot write to stdout: {reason}; make room, or choose another file")


def _lasting(stream: TextIO) -> TextIO:
    if not isinstance(stream, io.TextIOWrapper):  # closed from the start, or somebody's own
        return stream
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(LastingFile(stream.fileno())),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
