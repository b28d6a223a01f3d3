"""`atoll bench codec`: how fast this machine encodes and decodes, beside how fast it copies."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Annotated

import msgspec
import numpy as np
from cyclopts import Parameter

from atoll import kernels
from atoll.cli.bench.options import Codecs, Json, counts
from atoll.cli.bench.plans import check_codec
from atoll.cli.bench.report import json_rows, short_count, table_of
from atoll.cli.bench.values import fill
from atoll.cli.output import deliver
from atoll.errors import ConfigError
from atoll.plan.grid import Grid
from atoll.values import CODECS

CACHED_NUMEL = 1 << 16  # 256 kB of fp32: in the second cache of any machine of these years
MIN_TURN_S = 0.02  # short work is repeated until a turn takes about so long


class CodecRow(msgspec.Struct, frozen=True, kw_only=True):
    """One codec at one size on one core. `of_memcpy`: its bytes read and written per second, as a share of a copy's."""

    codec: str
    numel: int
    encode_elements_per_s: float
    decode_elements_per_s: float
    both_elements_per_s: float
    encode_of_memcpy: float
    decode_of_memcpy: float
    bits_per_element: float
    rel_error: float
    target: str


def codec(
    *,
    codec: Codecs = None,
    numel: Annotated[
        list[str] | None,
        Parameter(
            help="Values. May be repeated. Default: 65536 (cached) and 25M (from memory).",
            negative="",
            show_default=False,
        ),
    ] = None,
    turns: Annotated[int, Parameter(help="How often each takes its turn.")] = 7,
    json: Json = False,
) -> int:
    """Time encode and decode on one core: from cache, and from memory as a share of what a plain copy moves.

    Try:

        atoll bench codec
        atoll bench codec --codec int8 --numel 100M --json

    With --json: a list of rows: codec, numel, encode_elements_per_s, decode_elements_per_s,
    both_elements_per_s (one after the other), encode_of_memcpy, decode_of_memcpy, bits_per_element,
    rel_error, target (the instruction set).

    Exit codes: 0 done; 2 usage.
    """
    names = [check_codec(name) for name in ",".join(codec or list(CODECS)).split(",")]
    sizes = counts("--numel", numel or [str(CACHED_NUMEL), "25M"])
    if turns < 1:
        raise ConfigError(f"--turns {turns}: at least 1")
    rows = [row for size in sizes for row in measure(names, size, turns)]
    if json:
        json_rows(rows)
        return 0
    lines = [
        (
            row.codec,
            short_count(row.numel),
            f"{row.encode_elements_per_s / 1e9:.2f}",
            f"{row.decode_elements_per_s / 1e9:.2f}",
            f"{row.both_elements_per_s / 1e9:.2f}",
            f"{row.encode_of_memcpy:.0%}",
            f"{row.decode_of_memcpy:.0%}",
            f"{row.bits_per_element:.3f}",
            f"{row.rel_error:.1e}",
        )
        for row in rows
    ]
    columns = (
        "",
        "numel",
        "encode G/s",
        "decode G/s",
        "both G/s",
        "of memcpy",
        "decode",
        "bits",
        "rel. error",
    )
    table = table_of(f"codecs on one core, {kernels.kernel_target()}", columns, lines)
    note = "G/s: billions of elements; of memcpy: bytes read and written per second beside a copy's"
    deliver(f"{table}\n{note}\n")
    return 0


def measure(names: list[str], numel: int, turns: int) -> list[CodecRow]:
    """All codecs and the copy, by turns."""
    values = np.empty(numel, dtype=np.float32)
    fill(values, 0, 0)
    back = np.zeros(numel, dtype=np.float32)
    grid = Grid.of([numel])
    wires = {name: np.zeros(grid.wire_bytes(name), dtype=np.uint8) for name in names}
    errors = {}
    work: dict[tuple[str, str], Callable[[], object]] = {("memcpy", ""): lambda: np.copyto(back, values)}
    for name, wire in wires.items():
        work[name, "encode"] = lambda n=name, w=wire: kernels.encode(n, grid.boundaries, values, w)
        work[name, "decode"] = lambda n=name, w=wire: kernels.decode(n, grid.boundaries, w, back)
        work[name, "encode"]()
        work[name, "decode"]()
        errors[name] = float(np.linalg.norm(back - values) / np.linalg.norm(values))
    taken: dict[tuple[str, str], list[float]] = {key: [] for key in work}
    for _ in range(turns):
        for key, run in work.items():
            taken[key].append(_seconds(run))
    seconds = {key: statistics.median(times) for key, times in taken.items()}
    copy_bytes_per_s = 8 * numel / seconds["memcpy", ""]
    rows = []
    for name, wire in wires.items():
        encode_s, decode_s = seconds[name, "encode"], seconds[name, "decode"]
        moved = 4 * numel + len(wire)
        rows.append(
            CodecRow(
                codec=name,
                numel=numel,
                encode_elements_per_s=numel / encode_s,
                decode_elements_per_s=numel / decode_s,
                both_elements_per_s=numel / (encode_s + decode_s),
                encode_of_memcpy=moved / encode_s / copy_bytes_per_s,
                decode_of_memcpy=moved / decode_s / copy_bytes_per_s,
                bits_per_element=8 * len(wire) / numel,
                rel_error=errors[name],
                target=kernels.kernel_target(),
            )
        )
    return rows


def _seconds(run: Callable[[], object]) -> float:
    """Of one run; the mean over as many as take `MIN_TURN_S`."""
    begin, count = time.perf_counter(), 0
    while True:
        run()
        count += 1
        taken = time.perf_counter() - begin
        if taken >= MIN_TURN_S:
            return taken / count
