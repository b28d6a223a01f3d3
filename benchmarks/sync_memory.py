"""What memory a peer takes, and what a sync adds, beside what `atoll plan` says: a table, or one JSON line.

    python benchmarks/sync_memory.py --set model.dim=512 --set model.num_layers=8

A coordinator and real peers, with the trainer's own code, on loopback. Every rank looks at its own memory
(/proc/self) where a round begins and ends; the kernel keeps the peak between the two.

- rounds: what opening the rounds and the first sync add to RAM, by what the plan says (asked: 0.9 to 1.1).
- sync: the peak of later syncs above the level between rounds, in bytes per parameter of the rank.
- training: what the model and the steps of the first round add, by what the plan says.
- staging: the bytes in the staging folder, by what the plan says for it without its log.
- host_mb: what was measured for "rounds", in MB: with R ranks asked to be a rank's R-th part.
  The first rank of several maps the update that they put together in the staging folder; that is left out here.
- whole: the peak of the process above what it had before its model was built (`base_mb`: imports and text), by the
  plan's sum, estimates included (asked: 0.9 to 1.1).

Freed memory goes back to the system at once (MALLOC_MMAP_THRESHOLD_), so that one thing's is not taken for another's.
With --keep the allocator does as it likes; then a process takes what `whole` says.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from atoll.config.load import load
from atoll.config.schema import RunConfig
from atoll.plan.memory import total_bytes
from atoll.train.sizes import PeerSizes, peer_sizes

TOKEN = "a-token-for-benchmarks-0123456789"
MODEL = (
    "run.name=sync-memory",
    "run.steps=12",
    "outer.inner_steps=3",
    "model.vocab_size=4096",
    "model.dim=512",
    "model.num_layers=8",
    "model.num_heads=8",
    "model.num_kv_heads=8",
    "model.ffn_dim=1408",
    "model.max_seq_len=32",
    "data.seq_len=32",
    "eval.sequences=1",
    "eval.every_rounds=0",
    "checkpoint.every_s=0",
    "checkpoint.every_rounds=0",
    "local.threads=1",
    "local.save_model=false",
)
"""30 million parameters."""
END_S = 600.0
AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Otherwise glibc raises both as memory is freed, up to 32 MiB, and keeps that much and more for what comes next."""


# ---- a rank -----------------------------------------------------------------------------------------------------


def status(field: str) -> int:
    """A field of /proc/self/status that is in kB, as bytes."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


@dataclass(slots=True)
class Moment:
    """`anon` and `shared` are what is in RAM; `peak` since the last moment that reset it."""

    what: str
    anon: int
    shared: int
    rss: int
    peak: int


class Witness:
    """Writes down the memory of this process at named moments."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")

    def see(self, what: str, *, reset: bool = False) -> None:
        seen = Moment(what, status("RssAnon"), status("RssShmem"), status("VmRSS"), status("VmHWM"))
        self._file.write(json.dumps(asdict(seen)) + "\n")
        self._file.flush()
        if reset:
            Path("/proc/self/clear_refs").write_text("5")

    def around(self, what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def seen(*rest: Any, **named: Any) -> Any:
            self.see(f"before {what}", reset=True)
            found = call(*rest, **named)
            self.see(f"after {what}", reset=True)
            return found

        return seen


def be_a_rank(config_path: Path, peer: str, address: str, out: Path) -> int:
    """Train as one rank, with the trainer's own code. Its moments go to `out`."""
    from atoll.cli.main import run
    from atoll.diloco.opening import Opening
    from atoll.diloco.outer_loop import OuterLoop
    from atoll.train import build
    from atoll.train.inner import InnerStep

    witness = Witness(out / f"{peer}-{os.environ.get('RANK', '0')}.moments")
    witness.see("imports", reset=True)
    for where, name in (
        (OuterLoop, "finish_round"),
        (InnerStep, "step"),
        (Opening, "open"),
        (build, "build_model"),
    ):
        setattr(where, name, witness.around(name, getattr(where, name)))
    own = ["--set", f"local.peer={peer}", "--set", f"local.coordinator={address}"]
    return run(["train", str(config_path), *own, "--wait", "60", "--fresh", "--force"])


# ---- the run ----------------------------------------------------------------------------------------------------


@contextmanager
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    try:
        yield started
    finally:
        for process in started:
            if process.poll() is None:
                process.terminate()
        for process in started:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def train(config: RunConfig, folder: Path, num_peers: int, num_ranks: int, allocator: dict[str, str]) -> int:
    """The run, to its end; returns the most bytes that one peer had in the staging folder."""
    from atoll.config.dump import write_resolved

    staging = Path(config.checkpoint.staging)
    config_path = folder / "config.toml"
    write_resolved(config, config_path)
    environment = {**os.environ, "ATOLL_TOKEN": TOKEN, **allocator}
    own = [sys.executable, str(Path(__file__).resolve()), "--rank-of"]
    starter = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={num_ranks}"]
    starter += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", *own[1:]]
    with processes() as started:
        with (folder / "coordinator.log").open("wb") as log:
            command = [
                sys.executable,
                "-m",
                "atoll",
                "coordinator",
                str(config_path),
                "--bind",
                "127.0.0.1:0",
            ]
            started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        address = f"127.0.0.1:{listening(folder / 'coordinator.log')}"
        for index in range(num_peers):
            with (folder / f"peer-{index}.log").open("wb") as log:
                command = [*(own if num_ranks == 1 or index else starter), f"peer-{index}"]
                command += ["--config", str(config_path), "--address", address, "--out", str(folder)]
                started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        most, deadline_s = 0, time.monotonic() + END_S
        pattern = f"atoll-{config.run.name}-peer-0-*"
        while any(process.poll() is None for process in started[1:]):
            if time.monotonic() > deadline_s:
                raise SystemExit(f"the run did not end in {END_S:.0f} s; see {folder}")
            most = max(most, sum(map(staged_bytes_in, staging.glob(pattern))))
            time.sleep(0.02)
        codes = [process.wait() for process in started[1:]]
        if any(codes):
            logs = "\n".join((folder / f"peer-{n}.log").read_text()[-2000:] for n in range(num_peers))
            raise SystemExit(f"peers ended with {codes}:\n{logs}")
    return most


def staged_bytes_in(folder: Path) -> int:
    """Blocks in use, of all that is there but the update log. Files come and go meanwhile."""
    found = 0
    for path in folder.rglob("*"):
        try:
            if path.is_file() and "updates" not in path.parts:
                found += path.stat().st_blocks * 512
        except OSError:
            continue
    return found


def listening(log: Path) -> int:
    deadline_s = time.monotonic() + 60
    while not (found := re.search(r"listening on \S+:(\d+);", log.read_text())):
        if time.monotonic() > deadline_s:
            raise SystemExit(f"no coordinator: {log.read_text()}")
        time.sleep(0.05)
    return int(found[1])


# ---- what it says -----------------------------------------------------------------------------------------------


def judge(moments: list[Moment], peer: PeerSizes, *, stages: bool) -> dict[str, float]:
    """Ratios of one rank, measured by planned; `sync` in bytes per element, `base_mb` in MB. `stages`: the peer's first
    rank has the staging folder in its memory."""
    sizes, first = peer.largest, {each.what: each for each in reversed(moments)}
    begun, base = first["before step"], first["before build_model"]
    before = [each for each in moments if each.what == "before finish_round"]
    after = [each for each in moments if each.what == "after finish_round"]
    opened = first["after open"].anon - first["before open"].anon
    mapped = peer.wire_bytes if stages and peer.num_ranks > 1 else 0
    rounds = opened + after[0].peak - before[0].rss - mapped
    built = first["after build_model"].anon - base.anon
    steps = moments[moments.index(begun) + 1 : moments.index(before[0])]
    training = built + max(each.peak for each in steps) - begun.rss
    later = [end.peak - begin.rss - mapped for begin, end in zip(before[1:], after[1:], strict=True)]
    whole = total_bytes(sizes.host) + total_bytes(sizes.device)
    whole += reserved_bytes(peer) if stages else 0
    return {
        "rounds": rounds / total_bytes(sizes.host),
        "host_mb": rounds / 1e6,
        "sync": max(later) / sizes.elements,
        "training": training / total_bytes(sizes.device),
        "whole": (max(each.peak for each in moments) - base.rss) / whole,
        "base_mb": base.rss / 1e6,
    }


def reserved_bytes(sizes: PeerSizes) -> int:
    """Without the log, whose files are written and not mapped."""
    return sum(item.num_bytes for item in sizes.staging if not item.name.startswith("update log"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--peers", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1, help="of the first peer, started by torchrun")
    parser.add_argument("--keep", action="store_true", help="let the allocator keep freed memory")
    parser.add_argument("--set", action="append", default=[], help="section.key=value")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    parser.add_argument("--config", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank_of:
        return be_a_rank(given.config, given.rank_of, given.address, given.out)
    with tempfile.TemporaryDirectory(prefix="sync-memory-") as name:
        folder = Path(name)
        settings = [*MODEL, f"membership.start_peers={given.peers}", f"inner.batch_size={given.ranks}"]
        settings += [f'local.out="{name}"', *given.set]
        config = load(None, settings)
        sizes, single = peer_sizes(config, num_ranks=given.ranks), peer_sizes(config)
        staged = train(config, folder, given.peers, given.ranks, {} if given.keep else AT_ONCE)
        rows: dict[str, dict[str, float]] = {}
        for path in sorted(folder.glob("*.moments")):
            moments = [Moment(**json.loads(line)) for line in path.read_text().splitlines()]
            peer = sizes if path.stem.startswith("peer-0-") else single
            rows[path.stem] = judge(moments, peer, stages=path.stem.endswith("-0"))
    staging = staged / reserved_bytes(sizes)
    if given.json:
        said = {
            "parameters": sizes.parameters,
            "ranks": given.ranks,
            "elements": sizes.largest.elements,
            "host_bytes": total_bytes(sizes.largest.host),
            "device_bytes": total_bytes(sizes.largest.device),
            "staging": staging,
            "rows": rows,
        }
        print(json.dumps(said))
        return 0
    print(f"{sizes.parameters:,} parameters, {given.peers} peers, the first of {given.ranks} ranks")
    print(f"planned for a rank by rounds: {total_bytes(sizes.largest.host) / 1e6:.1f} MB")
    columns = list(next(iter(rows.values())))
    print(f"{'rank':12}" + "".join(f"{column:>10}" for column in columns))
    for rank, row in rows.items():
        print(f"{rank:12}" + "".join(f"{row[column]:10.3f}" for column in columns))
    print(f"staging {staging:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
