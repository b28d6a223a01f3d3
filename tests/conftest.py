"""What holds for all tests: one thread a process (two cores are shared by swarms), and a line that says on what."""

from __future__ import annotations

import os
import signal

# A shell that runs this in the background has SIGINT ignored, and children inherit that; but Ctrl-C is tested here.
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_report_header() -> str:
    from atoll import kernels

    return f"atoll kernels: {kernels.kernel_target()}"
