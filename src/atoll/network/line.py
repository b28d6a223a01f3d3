"""How a peer's engine uses its own line."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Line:
    """Caps over all links together, in bytes per second (0: none), and TCP's congestion control ("": the system's)."""

    max_up: int = 0
    max_down: int = 0
    congestion: str = ""
