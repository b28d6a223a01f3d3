"""The findings on a terminal: a mark and a sentence each, and at the end what to do, the gravest last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from atoll.cli.checks.run import Way
from atoll.network.checks.finding import Finding, Grade

MARKS: dict[Grade, tuple[str, str]] = {
    "ok": ("✓", "green"),
    "warning": ("!", "yellow"),
    "problem": ("✗", "red"),
}
_NAME_WIDTH = 14


def show(
    console: Console, title: str, sections: Mapping[str, Sequence[Finding]], ways: Sequence[Way], verdict: str
) -> None:
    """Everything, in the order of `sections`; `verdict` is the last line."""
    console.print(Text(title, style="bold"))
    for name, findings in sections.items():
        if findings:
            console.print(Group(Text(""), Text(name, style="bold dim"), _section(findings)))
    if ways:
        console.print(Group(Text(""), _members(ways)))
    every = [each for findings in sections.values() for each in findings]
    grades: tuple[Grade, ...] = ("ok", "warning", "problem")
    for grade, heading in zip(grades, ("could be better", "warnings", "to be done"), strict=True):
        remedies = [each for each in every if each.grade == grade and each.remedy]
        if remedies:
            console.print(Group(Text(""), Text(heading, style="bold dim")))
            _remedies(console, remedies)
    console.print(Group(Text(""), Text(verdict, style="bold")))


def _section(findings: Sequence[Finding]) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    table.add_column(width=3, justify="right")
    table.add_column(width=_NAME_WIDTH, no_wrap=True)
    table.add_column(overflow="fold")
    for each in findings:
        mark, style = MARKS[each.grade]
        table.add_row(Text(mark, style=style), Text(each.name), Text(each.sentence))
    return table


def _members(ways: Sequence[Way]) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="bold dim", padding=(0, 2, 0, 0))
    table.add_column("members", overflow="fold")
    table.add_column("address", overflow="fold")
    table.add_column("round trip", justify="right")
    table.add_column("rate", justify="right")
    for way in ways:
        where = way.where or "none told"
        if not way.tried:
            cells = (Text("not measured", style="dim"), Text(""))
        elif way.why_not:
            cells = (Text("✗", style="red"), Text("not reached", style="red"))
        else:
            cells = (Text(f"{1000 * way.rtt_s:.3g} ms"), Text(_rate(way.bytes_per_s)))
        table.add_row(Text(way.peer), Text(where, style="dim"), *cells)
    return table


def _rate(bytes_per_s: float) -> str:
    mbit = bytes_per_s * 8 / 1e6
    return f"{mbit:.3g} Mbit/s" if mbit < 1000 else f"{mbit / 1000:.3g} Gbit/s"


def _remedies(console: Console, findings: Sequence[Finding]) -> None:
    """Lines to be copied are not cut: the terminal wraps them."""
    for each in findings:
        mark, style = MARKS[each.grade]
        shown = " " if each.grade == "ok" else mark
        line = Text.assemble((f"  {shown} ", style), each.name.ljust(_NAME_WIDTH + 1), each.remedy)
        console.print(line, soft_wrap=True)
