"""The curves of `quality.py` as SVG: validation loss against inner steps, one line a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from atoll.dashboard.svg import Point, Scale, document, element, polyline, ticks

WIDTH, HEIGHT = 900, 460
COLOURS = ("#222222", "#0072b2", "#56b4e9", "#d55e00", "#e69f00", "#009e73", "#66c2a5")
DASHES = ("", "", "5 3", "", "5 3", "", "5 3")
FROM_STEP = 300  # before that all fall from 5.5 together, and the differences could not be seen


def curve_plot(rows: Sequence[dict[str, Any]], title: str) -> str:
    """`rows` are finished runs with a `name` and a `curve` of (step, nats per byte)."""
    lines = {row["name"]: [(s, v) for s, v in row["curve"] if s >= FROM_STEP] for row in rows}
    points = [point for line in lines.values() for point in line]
    across = Scale(FROM_STEP, max(step for step, _ in points), 60, WIDTH - 190)
    up = Scale(min(v for _, v in points) - 0.02, max(v for _, v in points) + 0.02, HEIGHT - 50, 50)
    body = [element("text", title, x=60, y=28, font_size=16, font_weight="bold")]
    for value in ticks(up.low, up.high, 6):
        body.append(element("line", x1=60, x2=WIDTH - 190, y1=up(value), y2=up(value), stroke="#e5e5e5"))
        body.append(element("text", f"{value:g}", x=52, y=up(value) + 4, text_anchor="end"))
    for value in ticks(across.low, across.high, 6):
        body.append(element("text", f"{value:g}", x=across(value), y=HEIGHT - 30, text_anchor="middle"))
    body.append(element("text", "inner step", x=(60 + WIDTH - 190) / 2, y=HEIGHT - 10, text_anchor="middle"))
    body.append(element("text", "validation loss of the anchor, nats per byte", x=60, y=44, fill="#555555"))
    for index, (name, line) in enumerate(lines.items()):
        style: dict[str, str | float] = {"stroke": COLOURS[index % len(COLOURS)], "stroke_width": 1.8}
        if DASHES[index % len(DASHES)]:
            style["stroke_dasharray"] = DASHES[index % len(DASHES)]
        body.append(polyline([scaled(point, across, up) for point in line], **style))
        y = 60 + 22 * index
        body.append(element("line", x1=WIDTH - 175, x2=WIDTH - 145, y1=y, y2=y, **style))
        body.append(element("text", name, x=WIDTH - 138, y=y + 4))
    return document(WIDTH, HEIGHT, body, title)


def scaled(point: Point, across: Scale, up: Scale) -> Point:
    return across(point[0]), up(point[1])
