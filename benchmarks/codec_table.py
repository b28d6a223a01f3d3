"""Codecs side by side: bytes, error on three distributions, and speed on one core, as the table of docs/codecs.md.

    python benchmarks/codec_table.py

Errors are |x - x'| / |x| over 2^20 independent values. Speeds are those of the fastest of many turns, which the codecs
and a plain copy take one after the other (other work on the machine only ever slows a turn down): from cache (65,536
values), and from memory (25 million) as a share of the bytes that the copy reads and writes in a second. The 3-sigma
codebook of INTELLECT-1 is in numpy: its speed is not comparable, and not shown.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import numpy as np

from atoll import kernels
from atoll.codecs import three_sigma
from atoll.kernels import Floats
from atoll.plan.grid import Grid
from atoll.values import CODECS

ERROR_NUMEL = 1 << 20
CACHED_NUMEL = 1 << 16
MEMORY_NUMEL = 25_000_000
DISTRIBUTIONS: dict[str, Callable[[np.random.Generator, int], Floats]] = {
    "Gaussian": lambda rng, size: rng.standard_normal(size, np.float32),
    "Laplace": lambda rng, size: rng.laplace(size=size).astype(np.float32),
    "Student-3": lambda rng, size: rng.standard_t(3, size).astype(np.float32),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=15, help="how often each takes its turn, from memory")
    parser.add_argument(
        "--memory-numel", type=int, default=MEMORY_NUMEL, help="values of the run from memory"
    )
    given = parser.parse_args()
    cached, _ = _fastest(CACHED_NUMEL, 20 * given.turns)
    memory, copy_s = _fastest(given.memory_numel, given.turns)
    rows = []
    for name in CODECS:
        speeds = [f"{CACHED_NUMEL / cached[name, action] / 1e9:.2f}" for action in ("encode", "decode")]
        moved = 4 * given.memory_numel + Grid.of([given.memory_numel]).wire_bytes(name)
        share = moved / (8 * given.memory_numel) * copy_s
        shares = [f"{share / memory[name, action]:.0%}" for action in ("encode", "decode")]
        size = f"{Grid.of([ERROR_NUMEL]).wire_bytes(name) / ERROR_NUMEL:.4f}"
        rows.append([f"`{name}`", size, *_shown(_native_errors(name)), *speeds, *shares])
    sigma_bytes = len(three_sigma.encode(np.zeros(ERROR_NUMEL, np.float32))) / ERROR_NUMEL
    rows.append(["3-sigma, 8 bit", f"{sigma_bytes:.4f}", *_shown(_errors(_by_three_sigma)), "", "", "", ""])
    head = [
        "codec",
        "bytes per value",
        *DISTRIBUTIONS,
        "encode, G/s",
        "decode, G/s",
        "encode, of a copy",
        "decode, of a copy",
    ]
    print(f"Instruction set {kernels.kernel_target()}, one core, the fastest of {given.turns} turns.\n")
    for cells in (head, ["---", *["---:"] * (len(head) - 1)], *rows):
        print(f"| {' | '.join(cells)} |")
    return 0


def _fastest(numel: int, turns: int) -> tuple[dict[tuple[str, str], float], float]:
    """Seconds of each codec's encode and decode, and of a copy."""
    rng = np.random.default_rng(2)
    values = rng.standard_normal(numel, np.float32)
    back = np.empty_like(values)
    grid = Grid.of([numel])
    work: dict[tuple[str, str], Callable[[], object]] = {("copy", ""): lambda: np.copyto(back, values)}
    for name in CODECS:
        data = np.zeros(grid.wire_bytes(name), np.uint8)
        work[name, "encode"] = lambda n=name, d=data: kernels.encode(n, grid.boundaries, values, d)
        work[name, "decode"] = lambda n=name, d=data: kernels.decode(n, grid.boundaries, d, back)
    best = dict.fromkeys(work, float("inf"))
    for _ in range(turns):
        for key, run in work.items():
            begin = time.perf_counter()
            run()
            best[key] = min(best[key], time.perf_counter() - begin)
    return best, best["copy", ""]


def _shown(errors: list[float]) -> list[str]:
    return [f"{error:.4f}" for error in errors]


def _errors(there_and_back: Callable[[Floats], Floats]) -> list[float]:
    """One for each distribution, always on the same values."""
    found = []
    for draw in DISTRIBUTIONS.values():
        values = draw(np.random.default_rng(1), ERROR_NUMEL)
        found.append(float(np.linalg.norm(there_and_back(values) - values) / np.linalg.norm(values)))
    return found


def _native_errors(name: str) -> list[float]:
    grid = Grid.of([ERROR_NUMEL])
    data = np.empty(grid.wire_bytes(name), np.uint8)

    def there_and_back(values: Floats) -> Floats:
        back = np.empty_like(values)
        if not kernels.encode(name, grid.boundaries, values, data):
            raise ValueError(f"{name} refused the values")
        kernels.decode(name, grid.boundaries, data, back)
        return back

    return _errors(there_and_back)


def _by_three_sigma(values: Floats) -> Floats:
    return three_sigma.decode(three_sigma.encode(values))


if __name__ == "__main__":
    sys.exit(main())
