"""SIGINT and SIGTERM: the first one ends the command politely, the second at once.

The first raises `Stopped` in the main thread, so that `with` blocks say goodbye and close; Atoll's waits are
short or interruptible. It also restores the default actions: the second one needs no help from Python.
"""

from __future__ import annotations

import signal
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

from atoll.signals import SIGNALS


class Stopped(KeyboardInterrupt):
    """A signal asked this process to end."""

    def __init__(self, signum: signal.Signals) -> None:
        super().__init__(f"stopped by {signum.name}")
        self.signum = signum
        self.exit_code = 128 + signum


@contextmanager
def stopped_by_signals() -> Generator[None]:
    """While inside (main thread only), the first SIGINT or SIGTERM raises `Stopped`."""
    before = {signum: signal.getsignal(signum) for signum in SIGNALS}
    for signum in SIGNALS:
        signal.signal(signum, _stop)
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _stop(signum: int, frame: FrameType | None) -> None:
    del frame
    for each in SIGNALS:
        signal.signal(each, signal.SIG_DFL)
    raise Stopped(signal.Signals(signum))
