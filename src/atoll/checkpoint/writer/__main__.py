"""`python -m atoll.checkpoint.writer`, started by `checkpoint.saver`: orders on stdin, answers on stdout.

One order at a time. Ends when its trainer ends, however that happens; a save that it has begun it brings to its end,
as the bytes are there: nothing else may have them any more.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import msgspec

from atoll import log
from atoll.checkpoint.writer.orders import Answer, Save, Saved
from atoll.checkpoint.writer.upload import upload
from atoll.checkpoint.writer.work import save

_NICE = 18
"""Training goes first: on cores that are all busy the writer gets a fiftieth of each, and what is idle elsewhere."""


def main() -> None:
    log.to_stderr("WARNING")
    _give_way()
    while line := sys.stdin.buffer.readline():
        if not line.endswith(b"\n"):
            return  # the trainer died in the middle of a word
        order = msgspec.json.decode(line, type=Save)
        answer = save(order)
        _say(answer)
        if order.remote and isinstance(answer, Saved):
            _say(upload(order))


def _give_way() -> None:
    """A niceness counts among the processes of one session, where the kernel groups them so; the group has its own."""
    os.nice(_NICE)
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(_NICE))


def _say(answer: Answer) -> None:
    try:
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        # Nobody is there to hear it. What is ordered is still done: an upload comes after the save.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
