"""Child processes that cannot outlive us: started in their own session, killed by the kernel when we die."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

PROGRAM = (sys.executable, "-m", "atoll")
_PR_SET_PDEATHSIG = 1


def start(arguments: Sequence[str], *, environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Run `atoll ARGUMENTS` by this interpreter, all its output in `log`.

    Its own session keeps the terminal's Ctrl-C from it: whoever started it decides how it ends. Call it
    from the main thread: to the kernel, "the parent died" means the thread that forked.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        return subprocess.Popen(
            [*PROGRAM, *arguments],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=dies_with_parent(),
        )


def stop_all(processes: Collection[subprocess.Popen[bytes]], signum: signal.Signals, grace_s: float) -> None:
    """Ask all to end, wait up to `grace_s`, then kill what is left. All are gone afterwards."""
    running = [process for process in processes if process.poll() is None]
    for process in running:
        process.send_signal(signum)
    deadline_s = time.monotonic() + grace_s
    for process in running:
        try:
            process.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def exit_code(process: subprocess.Popen[bytes]) -> int | None:
    """As a shell would show it: 137 for SIGKILL. None while it runs."""
    code = process.poll()
    return 128 - code if code is not None and code < 0 else code


def last_words(log: Path, lines: int = 3) -> list[str]:
    """What a process said about its end: its `atoll: error:` lines, else its last lines."""
    text = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    errors = [line.removeprefix("atoll: error: ") for line in text if line.startswith("atoll: error: ")]
    return errors or text[-lines:]


def dies_with_parent() -> Callable[[], None]:
    """What the child runs before exec (Linux): SIGKILL when its parent ends, however that happens."""
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def before_exec() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(128 + signal.SIGKILL)

    return before_exec
