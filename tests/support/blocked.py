"""A main thread in one native call that never returns and that no signal interrupts, as a device that is waited for.

Python's lock is free meanwhile, but no handler of Python's runs.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path


def block(when_blocked: Callable[[], None]) -> None:
    """Never returns. `when_blocked` is called on another thread, once the kernel says that this one waits."""
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    watcher = threading.Thread(
        target=_watch, args=(threading.get_native_id(), ctypes.addressof(mutex), when_blocked), daemon=True
    )
    watcher.start()
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


def _watch(thread: int, mutex: int, when_blocked: Callable[[], None]) -> None:
    """The thread's system call is to wait for that address."""
    call = Path(f"/proc/{os.getpid()}/task/{thread}/syscall")
    while f" {mutex:#x} " not in call.read_text():
        time.sleep(0.005)
    when_blocked()
