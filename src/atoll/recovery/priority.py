"""Where processors are short, training goes first: the sidecar's priority."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

NICENESS: Final = 2
"""Above that of the process that starts it. No more: at 10 it starved on a busy machine, and did not end in time."""


def go_last(pid: int) -> None:
    """Let another process of this user, which leads a session of its own, yield processors to all others.

    Linux shares processors out by sessions first, where it is set so, and by niceness only within one: both are told.
    A process that is gone, or a system that knows neither, is no matter.
    """
    niceness = min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, niceness)
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text(str(niceness))
