"""How much memory this process has, and the most it had since asked to watch (Linux; elsewhere None)."""

from __future__ import annotations

import re
from pathlib import Path

_SELF = Path("/proc/self")


class MemoryWatch:
    """From its making on, the kernel keeps the peak."""

    def __init__(self) -> None:
        self._before = None
        try:
            (_SELF / "clear_refs").write_text("5")  # the peak begins anew
            self._before = _kilobytes("VmRSS")
        except OSError:
            pass

    def extra_bytes(self) -> int | None:
        """The peak above what there was at the beginning."""
        if self._before is None:
            return None
        return max(0, _kilobytes("VmHWM") - self._before) * 1024


def _kilobytes(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", (_SELF / "status").read_text(), re.MULTILINE)
    return int(found[1]) if found else 0
