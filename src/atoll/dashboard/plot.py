"""The loss plot of a run: a line per peer, validation of the shared weights, rounds, and who was lost."""

from __future__ import annotations

import math
from collections.abc import Sequence

from atoll import events
from atoll.dashboard.summary import Loss, losses
from atoll.dashboard.svg import Point, Scale, document, element, polyline, ticks
from atoll.dashboard.view import Seen, fold_all

WIDTH, HEIGHT = 900, 500
LEFT, RIGHT, TOP, BOTTOM = 62, 24, 92, 58
INK, FAINT, ALARM = "#222222", "#8a8f98", "#c0392b"
# Okabe and Ito's colours, apart for colour-blind readers too; dashes keep lines apart in print.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
DASHES = ("none", "8 3", "2.5 2.5", "10 3 2 3", "5 5", "1 3")
WINDOW = 4  # points on either side of a smoothed one


def loss_plot(seen: Sequence[Seen], title: str, unit: str = "nats per byte") -> str:
    """An SVG file of the merged events of a run; with few or no events an empty frame that says so."""
    curves = _curves(seen)
    validations = [(float(v.step), v.loss) for v in fold_all(seen).validations if math.isfinite(v.loss)]
    everything = [*validations, *(point for points in curves.values() for point in points)]
    across = Scale(0.0, max((x for x, _ in everything), default=1.0) or 1.0, LEFT, WIDTH - RIGHT)
    low, high = _y_range([y for _, y in everything])
    up = Scale(low, high, HEIGHT - BOTTOM, TOP)
    body = [
        element("text", title, x=LEFT, y=30, font_size=17, font_weight="600", fill=INK),
        *_axes(across, up, unit),
        *_rounds(seen, across),
        *(_curve(index, points, across, up) for index, points in enumerate(curves.values())),
        *_validations(validations, across, up),
        *_marks(losses(seen), list(curves), curves, across, up),
        *_legend(list(curves), bool(validations)),
    ]
    if not everything:
        body.append(element("text", "no step was logged", x=WIDTH / 2, y=HEIGHT / 2, text_anchor="middle"))
    return document(WIDTH, HEIGHT, body, title)


def _curves(seen: Sequence[Seen]) -> dict[str, list[Point]]:
    """Training loss by peer, sorted by name."""
    curves: dict[str, list[Point]] = {}
    for each in seen:
        if isinstance(each.event, events.TrainingStep) and math.isfinite(each.event.loss):
            curves.setdefault(each.source, []).append((float(each.event.step), each.event.loss))
    return dict(sorted(curves.items()))


def _y_range(losses_seen: Sequence[float]) -> tuple[float, float]:
    if not losses_seen:
        return 0.0, 1.0
    margin = 0.04 * (max(losses_seen) - min(losses_seen)) or 0.5
    return max(0.0, min(losses_seen) - margin), max(losses_seen) + margin


def _axes(across: Scale, up: Scale, unit: str) -> list[str]:
    parts = []
    for value in ticks(up.low, up.high, 6):
        y = up(value)
        parts.append(element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, stroke="#e8eaed"))
        parts.append(element("text", f"{value:g}", x=LEFT - 8, y=y + 4, text_anchor="end", fill=INK))
    floor = up.start
    for value in ticks(across.low, across.high, 8):
        x = across(value)
        parts.append(element("line", x1=x, x2=x, y1=floor, y2=floor + 5, stroke=INK))
        parts.append(element("text", f"{value:g}", x=x, y=floor + 19, text_anchor="middle", fill=INK))
    parts.append(element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=floor, y2=floor, stroke=INK))
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(element("text", "inner step", x=middle, y=HEIGHT - 16, text_anchor="middle", fill=INK))
    y = (TOP + HEIGHT - BOTTOM) / 2
    turn = f"rotate(-90 18 {y:.0f})"
    parts.append(element("text", f"loss, {unit}", x=18, y=y, text_anchor="middle", transform=turn, fill=INK))
    return parts


def _rounds(seen: Sequence[Seen], across: Scale) -> list[str]:
    """A small tick above the axis where a round was committed."""
    steps = {
        each.event.version: each.event.step for each in seen if isinstance(each.event, events.RoundApplied)
    }
    floor = HEIGHT - BOTTOM
    return [
        element("line", x1=across(step), x2=across(step), y1=floor - 6, y2=floor, stroke=FAINT)
        for step in steps.values()
    ]


def _style(index: int) -> dict[str, str | float]:
    return {"stroke": COLOURS[index % len(COLOURS)], "stroke_dasharray": DASHES[index % len(DASHES)]}


def _curve(index: int, points: Sequence[Point], across: Scale, up: Scale) -> str:
    """The raw losses, faint, and their centred mean on top."""
    raw = [(across(x), up(y)) for x, y in points]
    mean = [(across(x), up(y)) for x, y in _smoothed(points)]
    faint = polyline(raw, stroke=COLOURS[index % len(COLOURS)], stroke_width=1, stroke_opacity=0.3)
    return faint + "\n" + polyline(mean, stroke_width=2, stroke_linejoin="round", **_style(index))


def _smoothed(points: Sequence[Point]) -> list[Point]:
    """Means over windows centred on each point, narrower towards the ends, so that the curve does not lag."""
    smooth = []
    for index, (x, _) in enumerate(points):
        reach = min(WINDOW, index, len(points) - 1 - index)
        window = [y for _, y in points[index - reach : index + reach + 1]]
        smooth.append((x, sum(window) / len(window)))
    return smooth


def _validations(points: Sequence[Point], across: Scale, up: Scale) -> list[str]:
    return [
        element("circle", cx=across(x), cy=up(y), r=3.4, fill="#ffffff", stroke=INK, stroke_width=1.5)
        for x, y in points
    ]


def _marks(
    lost: Sequence[Loss], names: Sequence[str], curves: dict[str, list[Point]], across: Scale, up: Scale
) -> list[str]:
    """A cross where a lost peer's line ends, and a line down from its name."""
    parts = []
    for each in lost:
        if each.peer not in curves:
            continue
        x, y = across(curves[each.peer][-1][0]), up(curves[each.peer][-1][1])
        colour = COLOURS[names.index(each.peer) % len(COLOURS)]
        word = "killed" if "killed" in each.reason else "lost"
        side = "end" if x > WIDTH * 0.75 else "start"
        parts += [
            element("line", x1=x, x2=x, y1=TOP - 4, y2=HEIGHT - BOTTOM, stroke=ALARM, stroke_dasharray="4 4"),
            element("path", d=_cross(x, y, 6), stroke=ALARM, stroke_width=2.5, stroke_linecap="round"),
            element(
                "text",
                f"{each.peer} {word}",
                x=x + (-6 if side == "end" else 6),
                y=TOP + 8,
                fill=ALARM,
                text_anchor=side,
                font_weight="600",
            ),
            element("circle", cx=x, cy=TOP - 4, r=3, fill=colour),
        ]
    return parts


def _cross(x: float, y: float, size: float) -> str:
    left, right, top, low = x - size, x + size, y - size, y + size
    return f"M{left:.1f} {top:.1f}L{right:.1f} {low:.1f}M{left:.1f} {low:.1f}L{right:.1f} {top:.1f}"


def _legend(names: Sequence[str], with_validation: bool) -> list[str]:
    parts, x, y = [], float(LEFT), 56.0
    for index, name in enumerate(names):
        parts.append(element("line", x1=x, x2=x + 30, y1=y - 4, y2=y - 4, stroke_width=2, **_style(index)))
        parts.append(element("text", name, x=x + 36, y=y, fill=INK))
        x += 56 + 7 * len(name)
    if with_validation:
        parts.append(
            element("circle", cx=x + 6, cy=y - 4, r=3.4, fill="#ffffff", stroke=INK, stroke_width=1.5)
        )
        parts.append(element("text", "validation (shared weights)", x=x + 16, y=y, fill=INK))
        x += 206
    parts.append(element("line", x1=x, x2=x, y1=y - 9, y2=y, stroke=FAINT))
    parts.append(element("text", "committed round", x=x + 8, y=y, fill=INK))
    return parts
