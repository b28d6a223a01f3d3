"""How fast a joiner's download is, by what its and its donors' lines carry, on an emulated wide-area network.

    python benchmarks/joiner_download.py                 80 MB of state, 20 ms (Linux, root)
    python benchmarks/joiner_download.py --mb 40 --rtt-ms 80 --json

- link: one donor, all lines alike. Bytes of the state a second, by the payload that the line carries (asked: at least
  0.85). From the first question to the last byte checked.
- three donors, by one: the donors' uplinks are narrow, the joiner's downlink is not (asked: at least 2.5).

No run is needed: donors stage a snapshot of random values and serve it through their sidecars, the joiner catches up by
the product's own path, every piece verified. Each is a process at a site of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

from atoll.cli.bench.bounds import payload_rate  # noqa: E402
from atoll.recovery.catching_up import catch_up  # noqa: E402
from atoll.recovery.donor import Donor  # noqa: E402
from atoll.recovery.targets import Source, Target  # noqa: E402
from atoll.state.manifest import digest_of, rows_of  # noqa: E402
from atoll.state.snapshot import LoadedState  # noqa: E402
from support.swarm import environment  # noqa: E402
from support.wan_crew import WANLAB, why_not  # noqa: E402

RUN, KEY, VERSION = "bench", b"k" * 32, 1
BYTES_PER_ELEMENT = 8
DONORS = ("d0", "d1", "d2")
JOINER = "j"
LINK_MBIT, NARROW_MBIT, WIDE_MBIT = 100.0, 40.0, 200.0
TIMEOUT_S = 120.0


def state_of(numel: int) -> LoadedState:
    rng = np.random.default_rng(0)
    anchor, velocity = (rng.standard_normal(numel, dtype=np.float32) for _ in range(2))
    return LoadedState(anchor, velocity, VERSION, VERSION, VERSION)


def digest(state: LoadedState) -> str:
    return digest_of(tuple(rows_of(state.anchor)), tuple(rows_of(state.velocity)))


def donate(options: argparse.Namespace) -> None:
    """A donor's process: until its standard input ends."""
    with Donor(
        run=RUN,
        peer=options.donate,
        session_key=KEY,
        bind_host=options.host,
        fallback=Path(tempfile.gettempdir()),
        keep_bytes=0,
        pin_bytes=0,
    ) as donor:
        assert donor.stage(state_of(options.numel))
        donor.start_serving()
        print(donor.port, flush=True)
        sys.stdin.read()


def fetch(options: argparse.Namespace) -> None:
    """The joiner's process: one catch-up from nothing."""
    nothing = [np.zeros(options.numel, dtype=np.float32) for _ in range(2)]
    state = LoadedState(nothing[0], nothing[1], -1, 0, 0)
    sources = [Source(name, host, int(port)) for name, host, port in (s.split(",") for s in options.fetch)]
    target = Target(VERSION, {VERSION: options.digest}, tuple(sources), False)
    report = catch_up(
        state,
        run=RUN,
        peer=JOINER,
        session_key=lambda: KEY,
        target=lambda: target,
        want_snapshot=lambda: None,
        check=lambda: None,
        progress_timeout_s=20.0,
        deadline_s=TIMEOUT_S,
    )
    assert digest(state) == options.digest
    print(json.dumps({"seconds": report.seconds, "bytes_by_source": report.bytes_by_source}), flush=True)


@contextmanager
def donors_at(lab: Any, names: Sequence[str], numel: int) -> Iterator[list[str]]:
    """Donors that serve; what the joiner is told of each."""
    with ExitStack() as stack:
        processes = {}
        for name in names:
            command = ["--donate", name, "--host", lab.addr(name), "--numel", str(numel)]
            processes[name] = stack.enter_context(started(lab, name, command))
        told = []
        for name, process in processes.items():
            assert process.stdout is not None
            told.append(f"{name},{lab.addr(name)},{process.stdout.readline().strip()}")
        yield told
        for process in processes.values():
            assert process.stdin is not None
            process.stdin.close()
            process.wait(30)


@contextmanager
def started(lab: Any, site: str, arguments: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        lab.command(site, [sys.executable, __file__, *arguments]),
        env={**environment(), "PYTHONPATH": ":".join(path for path in sys.path if path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(30)


def download(lab: Any, names: Sequence[str], numel: int, wanted: str) -> dict[str, Any]:
    with donors_at(lab, names, numel) as sources:
        fetches = [part for source in sources for part in ("--fetch", source)]
        with started(lab, JOINER, [*fetches, "--numel", str(numel), "--digest", wanted]) as joiner:
            said, _ = joiner.communicate(timeout=TIMEOUT_S)
            assert joiner.returncode == 0, said
    return json.loads(said)


def network(up: float, down: float, rtt_ms: float) -> dict[str, Any]:
    """Donors' uplinks and the joiner's downlink; the other ways are as wide as the wider of both."""
    widest = f"{max(up, down):g}mbit"
    sites = {name: {"up": f"{up:g}mbit", "down": widest} for name in DONORS}
    sites[JOINER] = {"up": widest, "down": f"{down:g}mbit"}
    return {"sites": sites, "default": {"rtt_ms": rtt_ms}, "links": []}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    sys.path.insert(0, str(WANLAB.parent))
    import wanlab

    numel = int(options.mb * 1e6) // BYTES_PER_ELEMENT
    state_bytes = BYTES_PER_ELEMENT * numel
    wanted = digest(state_of(numel))
    late_us = 0.0
    with wanlab.Lab(network(LINK_MBIT, LINK_MBIT, options.rtt_ms), name="jdown") as lab:
        alone = download(lab, DONORS[:1], numel, wanted)
        late_us = max(late_us, lab.stats().get("late_max_us", 0))
    with wanlab.Lab(network(NARROW_MBIT, WIDE_MBIT, options.rtt_ms), name="jdown") as lab:
        one = download(lab, DONORS[:1], numel, wanted)
        three = download(lab, DONORS, numel, wanted)
        late_us = max(late_us, lab.stats().get("late_max_us", 0))
    return {
        "state_mb": state_bytes / 1e6,
        "rtt_ms": options.rtt_ms,
        "link_mbit": LINK_MBIT,
        "link_s": alone["seconds"],
        "link_share": state_bytes / alone["seconds"] / payload_rate(LINK_MBIT),
        "uplinks_mbit": NARROW_MBIT,
        "one_s": one["seconds"],
        "three_s": three["seconds"],
        "three_by_one": one["seconds"] / three["seconds"],
        "shares": {name: each / state_bytes for name, each in sorted(three["bytes_by_source"].items())},
        "emulator_late_ms": late_us / 1e3,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=float, default=80.0, help="of state: weights and outer momentum")
    parser.add_argument("--rtt-ms", type=float, default=20.0)
    parser.add_argument("--json", action="store_true")
    for name in ("donate", "host", "digest"):  # what its own processes are told
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    parser.add_argument("--numel", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--fetch", action="append", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.donate or options.fetch:
        (donate if options.donate else fetch)(options)
        return 0
    if reason := why_not():
        print(f"joiner_download: {reason}", file=sys.stderr)
        return 3
    found = measure(options)
    if not options.json:
        print(f"one donor, {LINK_MBIT:g} Mbit/s: {found['link_share']:.3f} of the line (asked: 0.85)")
        print(f"three donors of {NARROW_MBIT:g} Mbit/s, by one: {found['three_by_one']:.2f} (asked: 2.5)")
    print(json.dumps({key: round(v, 3) if isinstance(v, float) else v for key, v in found.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
