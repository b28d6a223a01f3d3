"""What a checkpoint costs, as ratios of what the machine can do: one JSON line, or a table.

    python benchmarks/checkpoint.py --numel 30M --folder /data/scratch

- stand-still: the time that training stands still for a save, by one memcpy of the same bytes into memory that is in
  place (asked: at most 1.3). The first save is told apart: it must be no longer.
- save: shared and own part to the disk with fsync, by one plain sequential write of as many bytes with fsync, in turns
  (asked: at least 0.8).
- verify: bytes a second on one core, read back from the disk's cache: by the digest tables, and with SHA-256 as `atoll
  checkpoints verify` does (asked: at least 1 GB/s); SHA-256 alone, which bounds that; and from the disk.
- loss: the share of matrix products that is not made while the writer works, by the quiet windows before and after it,
  in turns (asked: below 0.05): the median, and the least and the most of all turns. Only on a machine that does
  nothing else. writer_share is the writer's part of all cores' time while it works, which other work does not blur.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import psutil
import torch

from atoll.checkpoint.folder import CheckpointFolder
from atoll.checkpoint.saver import Keeping, Saver
from atoll.checkpoint.trees import Leaf, safetensors_parts, take_apart
from atoll.diloco.outer import OuterState
from atoll.events import CheckpointSaved, Event
from atoll.recovery.donor import Donor
from atoll.state.verify import verify_snapshot

WAIT_S = 600.0
CHUNK_BYTES = 4 << 20
WINDOW_S = 2.0


class Peer:
    """A trainer's side of saving, with AdamW's moments as its own part."""

    def __init__(self, numel: int, folder: Path) -> None:
        self.events: list[Event] = []
        self.donor = Donor(
            run="bench",
            peer="a",
            session_key=b"k" * 32,
            bind_host="127.0.0.1",
            fallback=folder,
            keep_bytes=0,
            pin_bytes=0,
            own_bytes=8 * numel,
        )
        keeping = Keeping(folder / "place", keep_last=1)
        self.saver = Saver(keeping, run="bench", peer="a", staging=self.donor, emit=self.events.append)
        self.state = OuterState(np.random.default_rng(0).standard_normal(numel, dtype=np.float32))
        self.saver.start(self.state)
        self.moments = {name: torch.randn(numel) for name in ("exp_avg", "exp_avg_sq")}
        self.num_bytes = 16 * numel

    def save(self) -> CheckpointSaved:
        self.order()
        self.saver.wait(WAIT_S)
        (saved,) = [event for event in self.events[-1:] if isinstance(event, CheckpointSaved)]
        return saved

    def order(self) -> None:
        self.state.version += 1
        digest = self.state.digest()  # a round has it
        leaves: list[Leaf] = []
        said = take_apart(self.moments, "inner", leaves)
        self.saver.save(
            self.state,
            self.state.tables,
            safetensors_parts(leaves),
            msgspec.json.encode({"inner": said}),
            digest=digest,
            term=1,
            uploads=False,
        )

    def close(self) -> None:
        self.saver.close(WAIT_S)
        self.donor.close()


def memcpy_s(peer: Peer, tries: int) -> float:
    """The same four vectors into memory that is in place already."""
    vectors = [peer.state.anchor, peer.state.velocity, *(each.numpy() for each in peer.moments.values())]
    copies = [np.ones_like(each) for each in vectors]

    def copy() -> None:
        for target, source in zip(copies, vectors, strict=True):
            np.copyto(target, source)

    return min(seconds(copy) for _ in range(tries))


def plain_write_s(folder: Path, data: np.ndarray) -> float:
    path = folder / "plain"

    def write() -> None:
        view = data.view(np.uint8).data
        with path.open("wb") as file:
            for at in range(0, len(view), CHUNK_BYTES):
                file.write(view[at : at + CHUNK_BYTES])
            file.flush()
            os.fsync(file.fileno())

    try:
        return seconds(write)
    finally:
        path.unlink()


def throughput_losses(peer: Peer, tries: int) -> tuple[list[float], list[float]]:
    """Products made in windows with and without a save beside them, in turns; one torch thread a core. What was lost,
    and the writer's share of all cores, each from the least to the most."""
    weights = torch.randn(512, 512)

    def products(until: Callable[[], bool]) -> float:
        began_s, made = time.perf_counter(), 0
        while not until():
            _ = weights @ weights
            made += 1
        return made / (time.perf_counter() - began_s)

    def quiet_window() -> float:
        began_s = time.perf_counter()
        return products(lambda: time.perf_counter() - began_s > WINDOW_S)

    assert peer.saver.pid is not None
    writer = psutil.Process(peer.saver.pid)
    losses, shares = [], []
    quiet = quiet_window()
    for _ in range(tries):
        used_s, began_s = sum(writer.cpu_times()[:2]), time.perf_counter()
        peer.order()
        before = len(peer.events)

        def saved(before: int = before) -> bool:
            peer.saver.look()
            return len(peer.events) > before

        busy = products(saved)
        cores_s = (time.perf_counter() - began_s) * len(os.sched_getaffinity(0))
        shares.append((sum(writer.cpu_times()[:2]) - used_s) / cores_s)
        after = quiet_window()
        losses.append(1 - 2 * busy / (quiet + after))
        quiet = after
    return sorted(losses), sorted(shares)


def seconds(call: Callable[[], None]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


def measure(numel: int, folder: Path, tries: int) -> dict[str, float]:
    peer = Peer(numel, folder)
    plain = np.random.default_rng(1).standard_normal(peer.num_bytes // 4, dtype=np.float32)
    try:
        first = peer.save()
        saves: list[CheckpointSaved] = []
        ratios = []
        for _ in range(tries):
            plain_s = plain_write_s(folder, plain)
            saves.append(peer.save())
            ratios.append(plain_s / saves[-1].write_s)
        shared = CheckpointFolder(folder / "place").shared(peer.state.version)
        from_disk_s = seconds(lambda: verify_snapshot(shared))
        cached_s = min(seconds(lambda: verify_snapshot(shared, from_disk=False)) for _ in range(tries))
        hashed_s = min(
            seconds(lambda: verify_snapshot(shared, from_disk=False, hashed=True)) for _ in range(tries)
        )
        sha_s = min(seconds(lambda: hashlib.sha256(peer.state.anchor.data).digest()) for _ in range(tries))
        copied_s = memcpy_s(peer, tries)
        losses, shares = throughput_losses(peer, tries)
        return {
            "numel": numel,
            "saved_bytes": peer.num_bytes,
            "memcpy_s": copied_s,
            "still_per_memcpy": statistics.median(save.still_s for save in saves) / copied_s,
            "first_still_per_memcpy": first.still_s / copied_s,
            "write_mb_per_s": peer.num_bytes / statistics.median(save.write_s for save in saves) / 1e6,
            "write_per_plain": statistics.median(ratios),
            "verify_gb_per_s": 8 * numel / cached_s / 1e9,
            "verify_with_sha256_gb_per_s": 8 * numel / hashed_s / 1e9,
            "sha256_gb_per_s": 4 * numel / sha_s / 1e9,
            "verify_from_disk_gb_per_s": 8 * numel / from_disk_s / 1e9,
            "throughput_loss": statistics.median(losses),
            "least_throughput_loss": losses[0],
            "most_throughput_loss": losses[-1],
            "writer_share": statistics.median(shares),
        }
    finally:
        peer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--numel", default="30M", help="parameters, e.g. 30M")
    parser.add_argument(
        "--folder", type=Path, default=None, help="on the disk to measure; default: the system's"
    )
    parser.add_argument("--tries", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    numel = int(float(args.numel.rstrip("M")) * (1e6 if args.numel.endswith("M") else 1))
    if args.folder is not None:
        args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        found = measure(numel, Path(folder), args.tries)
    if args.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:>28}  {value:.4g}")


if __name__ == "__main__":
    main()
