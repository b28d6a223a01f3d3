"""Processes that the kernel kills with the test that started them, also if they are frozen: nobody else would.

Run as a script it ties itself to its parent and becomes the command: `tied.py PARENT COMMAND...`. So nothing runs
between fork and exec in a test that has threads, and pid and pipes are those of the command.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def tie(parent: int) -> None:
    """Die with `parent`, whose child this process is: with its main thread, since the kernel goes by threads."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def tied(command: Sequence[str]) -> list[str]:
    """That command as a child of this process which dies with it; to be started on the main thread."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


if __name__ == "__main__":
    tie(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
