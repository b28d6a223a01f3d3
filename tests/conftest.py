"""What holds for all tests: one thread a process (two cores are shared by swarms), and a line that says on what."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_report_header() -> str:
    from atoll import kernels

    return f"atoll kernels: {kernels.kernel_target()}"
