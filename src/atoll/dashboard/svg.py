"""Just enough SVG for line plots: nice ticks, scales, and escaped elements. No dependency."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps values `[low, high]` to pixels `[start, stop]`."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low or 1.0
        return self.start + (value - self.low) / span * (self.stop - self.start)


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) that cover `[low, high]` from inside."""
    if not (math.isfinite(low) and math.isfinite(high) and high > low):
        return [low]
    rough = (high - low) / max(about, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(step * index, 12) for index in range(first, last + 1)]


def element(tag: str, text: str | None = None, /, **attributes: str | float) -> str:
    """One element; underscores in attribute names become hyphens."""
    parts = [tag]
    for name, value in attributes.items():
        shown = value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")
        parts.append(f"{name.rstrip('_').replace('_', '-')}={quoteattr(shown)}")
    head = " ".join(parts)
    return f"<{head}/>" if text is None else f"<{head}>{escape(text)}</{tag}>"


def polyline(points: Sequence[Point], **attributes: str | float) -> str:
    return element(
        "polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points), fill="none", **attributes
    )


def document(width: int, height: int, body: Sequence[str], title: str) -> str:
    """A whole file with a white ground and a system font."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" font-family="system-ui, -apple-system, Segoe UI, Arial, sans-serif" '
            'font-size="12">',
            element("title", title),
            element("rect", width=width, height=height, fill="#ffffff"),
            *body,
            "</svg>\n",
        ]
    )
