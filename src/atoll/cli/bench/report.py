"""Rows as tables for people. Rates are in decimal units, as networks are sold; sizes too."""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec

from atoll.cli.bench.measure import COMPUTED, MEASURED, Row
from atoll.cli.output import deliver


def json_rows(rows: Sequence[msgspec.Struct]) -> None:
    """One list on stdout."""
    deliver(json.dumps([msgspec.to_builtins(row) for row in rows]) + "\n")


def table_of(title: str, columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Aligned text, as wide as it needs to be: the first column to the left, numbers to the right."""
    widths = [max(len(cell) for cell in cells) for cells in zip(columns, *lines, strict=True)]
    shown = [
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in (columns, *lines)
    ]
    return "\n".join([title, "", *shown, ""])


def all_reduce_table(rows: Sequence[Row]) -> str:
    """Ours, and under each what it was compared with at the same size."""
    first = rows[0]
    title = f"all-reduce of fp32 among {first.world}: median of {first.turns} turns, taken by turns"
    columns = (
        "",
        "numel",
        "seconds",
        "min-max",
        "sent MB",
        "of plan",
        "Gbit/s",
        "bound s",
        "x bound",
        "rel. error",
        "CPU s",
        "extra MB",
        "faster",
    )
    lines: list[tuple[str, ...]] = []
    for row in rows:
        lines.append(
            (
                f"{row.codec}{' tls' * row.tls} {row.topology}",
                short_count(row.numel),
                f"{row.seconds:.3f}",
                f"{row.seconds_min:.3f}-{row.seconds_max:.3f}",
                f"{row.bytes_sent / 1e6:.1f}",
                f"{row.bytes_sent / row.bytes_formula:.4f}" if row.bytes_formula else "-",
                f"{row.bytes_sent * 8e-9 / row.seconds:.2f}",
                f"{row.lower_bound_s:.3f}" if row.lower_bound_s else "-",
                f"{row.ratio:.2f}" if row.ratio else "-",
                f"{row.rel_error:.1e}",
                f"{row.cpu_s:.3f}",
                f"{row.extra_bytes / 1e6:.0f}" if row.extra_bytes is not None else "-",
                "",
            )
        )
        for name, figures in row.compared.items():
            error = f"{figures.rel_error:.1e}" + ("" if figures.equal else ", differ")
            speedup = f"{row.speedup[name]:.2f} x"
            blank = ("",) * 6
            lines.append(
                (
                    f"  {name}",
                    "",
                    f"{figures.seconds:.3f}",
                    *blank,
                    error,
                    f"{figures.cpu_s:.3f}",
                    "",
                    speedup,
                )
            )
    return table_of(title, columns, lines)


def footnote(rows: Sequence[Row]) -> str:
    kinds = {
        MEASURED: "bound: what bare sockets of the same processes took for the bytes of equal shares, among the turns",
        COMPUTED: "bound: 2V(N-1)/(N b 0.965) + 1 RTT, for the rate and round trip that were given",
    }
    return "\n".join(
        [
            "seconds: the slowest member's, from fp32 to fp32; CPU s: per member, all threads",
            "extra: memory that the first one took at most, beyond the caller's buffers",
            "sent: the busiest member's bytes at the sockets, and their ratio to the plan's own count",
            *{kinds[row.bound] for row in rows if row.lower_bound_s},
        ]
    )


def short_count(count: int) -> str:
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:g}{unit}"
    return str(count)
