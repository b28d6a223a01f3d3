"""The engine on emulated wide-area networks: seconds beside the bound of each network, and their ratio.

Every site is a network namespace with its own processes (tools/wanlab; needs root). Each variant of a case has
processes of its own, as a run has one plan for long: connections, and what they learned, are used again. Rivals take
turns with the first one. A turn in which the emulator delivered a packet late, or the kernel dropped one, is void and
taken again. A variant that is planned as an earlier one is not timed twice, one that is predicted to be far slower
once. Bounds and networks are in wan_cases.py: 2V(N-1)/(N b 0.965) + 1 round trip where all sites are alike. TCP is
CUBIC with the buffers of an untouched server, unless --cc and --bufs say otherwise.

    python benchmarks/wan.py                    all cases (about half an hour)
    python benchmarks/wan.py --only two four    some
    python benchmarks/wan.py --only loss --turns 1 --connections 8 --record
    python benchmarks/wan.py --only two --tls FOLDER    plain and TLS by turns
    python benchmarks/wan.py --table            write the table in docs/benchmarks.md anew, from the record
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tools" / "wanlab"))

from wanlab import Lab  # noqa: E402

from atoll.cli.bench.crew import Crew, Spawned  # noqa: E402
from atoll.cli.bench.measure import Bench, Contender, Turn  # noqa: E402
from atoll.cli.bench.options import read_tls  # noqa: E402
from atoll.cli.bench.plans import TOPOLOGIES, Recipe  # noqa: E402
from atoll.cli.bench.report import table_of  # noqa: E402
from atoll.plan.grid import Grid  # noqa: E402
from atoll.values import PlanChoice  # noqa: E402
from wan_cases import CASES, Case, Variant  # noqa: E402

RECORD = HERE.parent / "docs" / "benchmarks" / "wan.jsonl"
PAGE = HERE.parent / "docs" / "benchmarks.md"
BEGIN, END = "<!-- wan: begin -->", "<!-- wan: end -->"
LATE_MS = 5.0
"""Later than this, even once, and the turn measured the emulator instead."""
MAX_VOID = 6
"""Void turns of one variant, then the machine is too busy for this case."""
SLOW = 2.0
"""Of a variant that is predicted to take so many times as long as the best one, one turn is all."""
PATIENCE = 4
"""It is taken to be warm after so many times as much time."""
IDLE_S = 60.0
COLUMNS = (
    "case",
    "variant",
    "V MB",
    "seconds",
    "min-max",
    "bound s",
    "x bound",
    "sent MB",
    "CPU s",
    "predicted",
    "lanes",
    "void",
)


@dataclass
class Judge:
    """Takes turns, throws away those that the emulator spoiled, and gives up on a contender after too many."""

    bench: Bench
    lab: Lab
    late_ms: float = LATE_MS
    void: dict[str, int] = field(default_factory=dict)

    def turn(self, contender: Contender, idle_s: float = 0.0) -> Turn | None:
        """After idling so long; None if given up."""
        while self.void.setdefault(contender.name, 0) <= MAX_VOID:
            time.sleep(idle_s)
            dropped = self.lab.stats()["kernel_dropped"]  # this call also begins the maxima anew
            turn = self.bench.turn(contender)
            seen = self.lab.stats()
            why = why_void(seen["late_max_us"] / 1e3, self.late_ms, seen["kernel_dropped"] - dropped)
            if not why:
                return turn
            self.void[contender.name] += 1
            number = f"{self.void[contender.name]} of {MAX_VOID + 1}"
            print(
                f"  void ({number}): {contender.name}, {turn.seconds:.2f} s: {why}; taken again", flush=True
            )
        print(
            f"  given up: {contender.name}: {MAX_VOID + 1} turns were void; measure on a quieter machine, or allow "
            f"more than --late-ms {self.late_ms:g}",
            flush=True,
        )
        return None

    def turns(self, contender: Contender, count: int, idle_s: float) -> list[Turn]:
        return [turn for _ in range(count) if (turn := self.turn(contender, idle_s)) is not None]


def why_void(late_ms: float, limit_ms: float, dropped: int) -> str:
    """Why a turn measured this machine instead of the network; "" if it did not."""
    reasons = []
    if late_ms > limit_ms:
        reasons.append(f"the emulator delivered a packet {late_ms:.1f} ms late ({limit_ms:g} allowed)")
    if dropped:
        reasons.append(f"the kernel dropped {dropped} packets before the emulator had them")
    return " and ".join(reasons)


@contextmanager
def crew_in(case: Case, options: argparse.Namespace, rivals: Sequence[str]) -> Iterator[tuple[Lab, Crew]]:
    """A member at each site of the case's network."""
    with (
        Lab(case.network, name="atollwan", cc=options.cc, bufs=options.bufs, gso=case.gso) as lab,
        Spawned() as spawned,
    ):
        seats = [
            spawned.seat(
                site, lab.public(site), lambda command, s=site, **more: lab.popen(s, command, **more)
            )
            for site in case.network["sites"]
        ]
        crew = Crew(seats, read_tls(options.tls, None))
        crew.meet(rivals)
        yield lab, crew


def measure(name: str, case: Case, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One record for each variant, warm, and after idling where the case asks for it; and for each rival."""
    earlier: list[Contender] = []
    for number, variant in enumerate(chosen_variants(case, options)):
        yield from measure_variant(name, case, variant, options, earlier, rivals=number == 0)


def measure_variant(
    name: str,
    case: Case,
    variant: Variant,
    options: argparse.Namespace,
    earlier: list[Contender],
    *,
    rivals: bool,
) -> Iterator[dict[str, Any]]:
    """With processes of its own, and the rivals among its turns; nothing if it is planned as one of the `earlier`."""
    codec, numel = options.codec or case.codec, options.numel or case.numel
    wire_bytes = Grid.of([numel]).wire_bytes(codec)
    with crew_in(case, options, options.compare if rivals else ()) as (lab, crew):
        bench = Bench(crew, random.Random(options.seed), () if options.learn else case.links)
        judge = Judge(bench, lab, options.late_ms)
        bench.fill(numel, options.seed)
        ours = contender_of(bench, variant, codec, numel)
        if not options.learn and (twin := twin_of(ours, earlier)) is not None:
            print(f"  {ours.name}: the same plan as {twin.name}", flush=True)
            return
        earlier.append(ours)
        contenders = [ours]
        if options.tls:
            contenders.append(contender_of(bench, variant, codec, numel, tls=True))
        if rivals:
            contenders += [bench.rival(rival) for rival in options.compare]
        if rivals and options.bare:
            moved = 2 * wire_bytes * (bench.world - 1) // bench.world
            contenders.append(bench.sockets(f"bare sockets, {options.bare} conn", moved, options.bare))
        for contender in contenders:
            contender.checked = bench.turn(contender, check=True)
            if (slower := how_much_slower(contender, earlier)) > SLOW:
                more = judge.turns(contender, int(case.warm_turns * PATIENCE / slower), 0.0)
                contender.turns = [contender.checked, *more][-1:]
        quick = [each for each in contenders if not each.turns]
        order = random.Random(options.seed)
        for _ in range(case.warm_turns):
            for contender in order.sample(quick, len(quick)):
                bench.turn(contender)
        for _ in range(options.turns):
            for contender in order.sample(quick, len(quick)):
                contender.turns += judge.turns(contender, 1, 0.0)
        facts = {
            "case": name,
            "codec": codec,
            "numel": numel,
            "wire_bytes": wire_bytes,
            "bound_s": case.bound_s(wire_bytes),
            "cc": options.cc,
            "bufs": options.bufs,
            "late_ms": options.late_ms,
        }
        for contender in contenders:
            measured = [contender]
            if contender is ours and variant.idle and not options.no_idle:
                turns = judge.turns(contender, -(-options.turns // 3), IDLE_S)
                measured.append(
                    replace(contender, name=f"{contender.name}, after {IDLE_S:g} s idle", turns=turns)
                )
            for each in measured:
                if each.turns:
                    yield record_of(each, facts, judge.void.get(contender.name, 0))


def twin_of(contender: Contender, earlier: Sequence[Contender]) -> Contender | None:
    """An earlier one that was planned exactly so: it need not be timed twice."""
    mine = contender.choice
    return next((one for one in earlier if mine and one.choice and is_same(mine, one.choice)), None)


def is_same(one: PlanChoice, other: PlanChoice) -> bool:
    return (one.lanes, one.connections, one.chunk_bytes) == (
        other.lanes,
        other.connections,
        other.chunk_bytes,
    )


def how_much_slower(contender: Contender, among: Sequence[Contender]) -> float:
    """Than the fastest, as predicted. Lanes with equal shares, and rivals, are predicted by nobody: 1."""
    predicted_s = [each.choice.predicted_s for each in among if each.choice and each.choice.predicted_s]
    if contender.choice is None or not contender.choice.predicted_s or not predicted_s:
        return 1.0
    return contender.choice.predicted_s / min(predicted_s)


def case_name(text: str) -> str:
    """A case, by its name or what it begins with."""
    found = [name for name in CASES if name.startswith(text)]
    if len(found) != 1 and text not in CASES:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(CASES)}")
    return text if text in CASES else found[0]


def chosen_variants(case: Case, options: argparse.Namespace) -> list[Variant]:
    """The case's own, or the one that the command line forces."""
    if options.topology or options.connections or options.chunk_kb:
        idle = any(variant.idle for variant in case.variants)
        return [Variant(options.topology or "auto", options.connections, options.chunk_kb, idle)]
    return list(case.variants)


def contender_of(bench: Bench, variant: Variant, codec: str, numel: int, *, tls: bool = False) -> Contender:
    recipe = Recipe(codec, variant.topology, variant.connections, variant.chunk_kb * 1024, tls)
    contender = bench.ours(variant.label + ", tls" * tls, recipe, numel)
    contender.choice = bench.choose(recipe, numel)
    return contender


def record_of(contender: Contender, facts: dict[str, Any], void: int) -> dict[str, Any]:
    assert contender.checked is not None
    seconds = [turn.seconds for turn in contender.turns]
    return {
        **facts,
        "variant": contender.name,
        "seconds": statistics.median(seconds),
        "seconds_all": [round(value, 4) for value in seconds],
        "wire_s": statistics.median(turn.wire_s for turn in contender.turns),
        "ratio": statistics.median(seconds) / facts["bound_s"],
        "sent_bytes": contender.turns[-1].sent_bytes,
        "cpu_s": contender.cpu_s,
        "rel_error": contender.checked.rel_error,
        "equal": contender.checked.equal,
        "void": void,
        **({} if contender.choice is None else plan_facts(contender.choice, seconds)),
    }


def plan_facts(choice: PlanChoice, seconds: Sequence[float]) -> dict[str, Any]:
    return {
        "topology": choice.topology,
        "connections": choice.connections,
        "chunk_bytes": choice.chunk_bytes,
        "predicted_s": choice.predicted_s,
        "of_predicted": statistics.median(seconds) / choice.predicted_s if choice.predicted_s else None,
        "reason": choice.reason,
    }


def line_of(record: dict[str, Any]) -> tuple[str, ...]:
    sent, seconds = record["sent_bytes"], record["seconds_all"]
    return (
        record["case"],
        record["variant"],
        f"{record['wire_bytes'] / 1e6:.1f} {record['codec']}",
        f"{record['seconds']:.2f}",
        f"{min(seconds):.2f}-{max(seconds):.2f}",
        f"{record['bound_s']:.2f}",
        f"{record['ratio']:.3f}",
        f"{sent / 1e6:.1f}" if sent else "-",
        f"{record['cpu_s']:.2f}",
        f"{record['predicted_s']:.2f}" if record.get("predicted_s") else "-",
        f"{record['topology']} x{record['connections']}" if "topology" in record else "-",
        str(record["void"]),
    )


def keep(records: Sequence[dict[str, Any]]) -> None:
    """Append to the record, with what they were measured on."""
    commit = subprocess.run(
        ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    RECORD.parent.mkdir(exist_ok=True)
    with RECORD.open("a") as file:
        for record in records:
            line = {**record, "commit": commit, "kernel": platform.release(), "time": int(time.time())}
            file.write(json.dumps(line) + "\n")


def write_table() -> None:
    """The newest record of each case and variant, as markdown, into the page."""
    newest: dict[tuple[str, str], dict[str, Any]] = {}
    for line in RECORD.read_text().splitlines():
        record = json.loads(line)
        newest[record["case"], record["variant"]] = record
    order = list(CASES)
    records = sorted(newest.values(), key=lambda record: order.index(record["case"]))
    rows = [COLUMNS, tuple("-" * 3 for _ in COLUMNS), *map(line_of, records)]
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", type=case_name, default=list(CASES), metavar="CASE")
    parser.add_argument("--turns", type=int, default=3, help="that count; a third of them after idling")
    parser.add_argument("--topology", choices=TOPOLOGIES, help="force one, instead of the case's variants")
    parser.add_argument("--connections", type=int, default=0)
    parser.add_argument(
        "--bare", type=int, default=0, help="also so many plain connections a pair, equal shares"
    )
    parser.add_argument("--chunk-kb", type=int, default=0)
    parser.add_argument("--codec", default="")
    parser.add_argument("--numel", type=int, default=0)
    parser.add_argument("--compare", nargs="+", default=[], help="gloo, hivemind")
    parser.add_argument(
        "--learn",
        action="store_true",
        help="plan from the rates that the engines saw, not from the true ones",
    )
    parser.add_argument("--tls", type=Path, metavar="FOLDER", help="each variant over TLS too, by turns")
    parser.add_argument("--no-idle", action="store_true", help="leave out the turns after 60 s idle")
    parser.add_argument("--cc", default="cubic")
    parser.add_argument("--bufs", default="stock", choices=["stock", "tuned"])
    parser.add_argument(
        "--late-ms",
        type=float,
        default=LATE_MS,
        help="a turn in which the emulator was later than this is void; the record says which limit it was",
    )
    parser.add_argument("--seed", type=int, default=0, help="order of the turns, and the values")
    parser.add_argument("--record", action="store_true", help=f"append to {RECORD.name} in docs/benchmarks")
    parser.add_argument("--table", action="store_true")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    if options.table:
        write_table()
        return 0
    code = 0
    for name in options.only:
        case = CASES[name]
        print(f"{name}: {case.text}; {options.cc}, {options.bufs} buffers", flush=True)
        records = list(measure(name, case, options))
        code = code or int(not records)
        if records:
            print(table_of("", COLUMNS, [line_of(record) for record in records]), flush=True)
        if options.record:
            keep(records)
    return code


if __name__ == "__main__":
    sys.exit(main())
