"""Does DiLoCo cost quality? Data-parallel training against DiLoCo with 1, 2, 4 peers, fp32 and int8, at equal tokens.

Real text (the Python standard library, split by document), a small Llama, paired seeds: a seed fixes start weights and
data. Every run sees the same number of tokens: a step is `GLOBAL_BATCH` sequences, shared by the peers. The learning
rate is tuned for data-parallel training, then used for all. DiLoCo starts with short averaging rounds, then takes 90
rounds of 30 steps with Nesterov (0.7, 0.9).

Runs happen in one process (`atoll.train.simulated`): rounds have the same digests as over processes, as the test
suite shows. Finished runs are kept in --out and not repeated.

    python benchmarks/quality.py                     # everything; some minutes a run, 16 runs
    python benchmarks/quality.py --seeds 0 --only tune dp diloco-4-int8
    python benchmarks/quality.py --report            # the table and the curve from what is there
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from atoll.config.schema import (
    DataSection,
    EvalSection,
    InnerSection,
    LocalSection,
    ModelSection,
    OuterSection,
    RunConfig,
    RunSection,
    StageSection,
)
from atoll.plan.grid import Grid
from atoll.train.build import load_corpus
from atoll.train.simulated import simulate_run
from quality_curve import curve_plot

GLOBAL_BATCH = 32
SEQ_LEN = 64
STEPS = 3000
START_STEPS, START_INNER_STEPS, INNER_STEPS = 300, 2, 30
LEARNING_RATES = (2e-3, 3e-3, 5e-3)
PEERS = (1, 2, 4)
CODECS = ("fp32", "int8")


def config(*, seed: int, lr: float, num_peers: int, codec: str, data_parallel: bool, steps: int) -> RunConfig:
    stages = (
        StageSection(until=START_STEPS * steps // STEPS, inner_steps=START_INNER_STEPS),
        StageSection(inner_steps=INNER_STEPS),
    )
    # One peer that averages only is plain training on the whole batch: data-parallel training without its traffic.
    outer = (
        OuterSection(inner_steps=INNER_STEPS, lr=1.0, momentum=0.0, codec="fp32")
        if data_parallel
        else OuterSection(inner_steps=stages, lr=0.7, momentum=0.9, codec=codec)
    )
    return RunConfig(
        run=RunSection(name="quality", seed=seed, steps=steps),
        model=ModelSection(
            dim=64,
            num_layers=3,
            num_heads=4,
            num_kv_heads=4,
            ffn_dim=192,
            max_seq_len=SEQ_LEN,
            vocab_size=256,
        ),
        data=DataSection(seq_len=SEQ_LEN, slots=256),
        inner=InnerSection(lr=lr, batch_size=GLOBAL_BATCH // num_peers, warmup_steps=50, betas=(0.9, 0.99)),
        outer=outer,
        eval=EvalSection(sequences=512),
        local=LocalSection(threads=1),
    )


def planned(seeds: list[int]) -> list[dict[str, Any]]:
    """All runs, in the order in which they are needed: tuning first."""
    runs = [
        {"name": f"tune-{lr:g}", "kind": "tune", "seed": seeds[0], "lr": lr, "peers": 1, "codec": "fp32"}
        for lr in LEARNING_RATES
    ]
    for seed in seeds:
        runs.append(
            {"name": f"dp-{seed}", "kind": "dp", "seed": seed, "lr": None, "peers": 1, "codec": "fp32"}
        )
        runs += [
            {
                "name": f"diloco-{m}-{codec}-{seed}",
                "kind": "diloco",
                "seed": seed,
                "lr": None,
                "peers": m,
                "codec": codec,
            }
            for m in sorted(PEERS, reverse=True)
            for codec in CODECS
        ]
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--only", nargs="+", default=[""], help="run only names that start with one of these")
    parser.add_argument("--lr", type=float, help="take this learning rate, not the best one that was tuned")
    parser.add_argument("--out", type=Path, default=Path("docs/quality/runs.jsonl"))
    parser.add_argument("--report", action="store_true", help="only write the report from finished runs")
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if not args.report:
        run_all(args)
    rows = finished(args.out)
    (args.out.parent / "README.md").write_text(report(rows))
    names = sorted(rows, key=lambda name: (not name.startswith("dp"), name))
    shown = [rows[name] for name in names if name.endswith("-0") and rows[name]["kind"] != "tune"]
    if shown:
        title = f"{shown[0]['tokens'] / 1e6:.1f} M bytes, one seed: data-parallel and DiLoCo"
        (args.out.parent / "curve.svg").write_text(curve_plot(shown, title))
    print(report(rows))


def run_all(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    corpus = None
    for run in planned(args.seeds):
        done = finished(args.out)
        if run["name"] in done or not run["name"].startswith(tuple(args.only)):
            continue
        data_parallel = run["kind"] != "diloco"
        lr = run["lr"] or args.lr or best_lr(done)
        if data_parallel and f"tune-{lr:g}" in done and done[f"tune-{lr:g}"]["seed"] == run["seed"]:
            row = {**done[f"tune-{lr:g}"], **run, "lr": lr}  # the tuned run is this very run
        else:
            settings = config(
                seed=run["seed"],
                lr=lr,
                num_peers=run["peers"],
                codec=run["codec"],
                data_parallel=data_parallel,
                steps=args.steps,
            )
            corpus = corpus or load_corpus(settings)
            row = {**run, "lr": lr, **measured(settings, run["peers"], corpus, data_parallel)}
        with args.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{row['name']:22s} lr {lr:g}  loss {row['loss']:.4f}  {row['seconds']:.0f} s", flush=True)


def measured(settings: RunConfig, num_peers: int, corpus: Any, data_parallel: bool) -> dict[str, Any]:
    started_s = time.monotonic()
    curve: list[tuple[int, float]] = []
    run, loss = simulate_run(
        settings,
        num_peers,
        corpus,
        evaluated=lambda step, value: curve.append((step, round(value, 4))),
        eval_every_rounds=10,
    )
    numel = run.state.anchor.size
    wire = Grid.of([numel]).wire_bytes(settings.outer.codec)
    rounds = len(run.rounds)
    # Bytes that a peer sends: to the roots and, as a root, to the others: 2V(N-1)/N a round; data-parallel: gradients.
    per_exchange = 2 * (4 * numel if data_parallel else wire)
    exchanges = settings.run.steps if data_parallel else rounds
    return {
        "steps": settings.run.steps,
        "tokens": settings.run.steps * GLOBAL_BATCH * SEQ_LEN,
        "parameters": numel,
        "rounds": rounds,
        "sent_bytes_large_n": per_exchange * exchanges,
        "loss": loss,
        "digest": run.state.digest(),
        "curve": curve,
        "seconds": round(time.monotonic() - started_s, 1),
    }


def best_lr(done: dict[str, dict[str, Any]]) -> float:
    tuned = [row for row in done.values() if row["kind"] == "tune"]
    if not tuned:
        raise SystemExit("tune the learning rate first: run with --only tune")
    return min(tuned, key=lambda row: row["loss"])["lr"]


def finished(path: Path) -> dict[str, dict[str, Any]]:
    if not path.exists():
        return {}
    return {row["name"]: row for row in map(json.loads, path.read_text().splitlines())}


def report(rows: dict[str, dict[str, Any]]) -> str:
    tune = [row for row in rows.values() if row["kind"] == "tune"]
    dp = {row["seed"]: row for row in rows.values() if row["kind"] == "dp"}
    if not dp:
        return "no data-parallel run is finished yet\n"
    seeds = sorted({row["seed"] for row in rows.values() if row["kind"] != "tune"})
    any_row = next(iter(dp.values()))
    lines = [
        "# Does DiLoCo cost quality?",
        "",
        f"A Llama of {any_row['parameters']:,} parameters on the Python standard library's sources (bytes), "
        f"{any_row['steps']} steps of {GLOBAL_BATCH} x {SEQ_LEN} tokens ({any_row['tokens'] / 1e6:.1f} M) in all; "
        "validation loss of the final anchor, nats per byte, on held-out files.",
        f"DiLoCo: averaging every {START_INNER_STEPS} steps for the first {START_STEPS * any_row['steps'] // STEPS}, "
        f"then every {INNER_STEPS} steps outer Nesterov (0.7, 0.9). The batch is shared by the peers.",
        "",
        "Learning rate, tuned for data-parallel training (seed "
        f"{tune[0]['seed']}): " + ", ".join(f"{r['lr']:g}: {r['loss']:.4f}" for r in tune) + ".",
        "",
        "| run | "
        + " | ".join(f"seed {s}" for s in seeds)
        + " | mean | against data-parallel | bytes sent per peer |",
        "|---|" + "---|" * (len(seeds) + 3),
        table_row("data-parallel", dp, dp, seeds),
    ]
    for m in PEERS:
        for codec in CODECS:
            found = {s: rows[f"diloco-{m}-{codec}-{s}"] for s in seeds if f"diloco-{m}-{codec}-{s}" in rows}
            if found:
                lines.append(table_row(f"DiLoCo, {m} peer{'s' * (m > 1)}, {codec}", found, dp, seeds))
    lines += ["", *paired_table(rows, seeds)]
    lines += ["", targets(rows, dp, seeds)]
    lines += ["", "![Validation loss against inner steps](curve.svg)"]
    lines += [
        "",
        "Bytes are for many peers (2 bytes-of-vector a round, each way); with N peers (N-1)/N of it.",
        "",
    ]
    return "\n".join(lines)


def targets(rows: dict[str, dict[str, Any]], dp: dict[int, Any], seeds: list[int]) -> str:
    """What was asked of this benchmark, and whether the finished runs show it."""
    found = []
    four = [
        rows[f"diloco-4-int8-{s}"]["loss"] / dp[s]["loss"] - 1 for s in dp if f"diloco-4-int8-{s}" in rows
    ]
    if four:
        gap = statistics.mean(four)
        found.append(f"4 peers (int8) within 1 % of data-parallel: {gap:+.2%}, {verdict(gap <= 0.01)}")
    for m in PEERS:
        differences = paired(rows, m, seeds)
        if differences:
            mean = statistics.mean(differences)
            peers = f"{m} peer{'s' * (m > 1)}"
            found.append(f"{peers}, int8 within 0.003 of fp32: {mean:+.4f}, {verdict(abs(mean) <= 0.003)}")
    return "Asked for: " + "; ".join(found) + "."


def verdict(reached: bool) -> str:
    return "reached" if reached else "not reached"


def table_row(name: str, found: dict[int, Any], dp: dict[int, Any], seeds: list[int]) -> str:
    losses = [f"{found[s]['loss']:.4f}" if s in found else "-" for s in seeds]
    mean = statistics.mean(found[s]["loss"] for s in found)
    both = [found[s]["loss"] / dp[s]["loss"] - 1 for s in found if s in dp]
    against = f"{statistics.mean(both):+.2%}" if both else "-"
    sent = next(iter(found.values()))["sent_bytes_large_n"]
    return f"| {name} | {' | '.join(losses)} | {mean:.4f} | {against} | {sent / 1e6:,.1f} MB |"


def paired(rows: dict[str, dict[str, Any]], num_peers: int, seeds: list[int]) -> list[float]:
    """Loss of int8 minus loss of fp32 (nats), for every seed that has both."""
    pairs = [tuple(rows.get(f"diloco-{num_peers}-{codec}-{s}") for codec in ("int8", "fp32")) for s in seeds]
    return [int8["loss"] - fp32["loss"] for int8, fp32 in pairs if int8 and fp32]


def paired_table(rows: dict[str, dict[str, Any]], seeds: list[int]) -> list[str]:
    """The pairs, and what they say together: a mean without its standard error would read noise as a finding."""
    lines = ["| int8 - fp32, paired by seed (nats) | pairs | mean | standard error |", "|---|---|---|---|"]
    by_peers = {f"{m} peer{'s' * (m > 1)}": paired(rows, m, seeds) for m in PEERS}
    every = [difference for found in by_peers.values() for difference in found]
    for name, found in [*by_peers.items(), ("all", every)]:
        if found:
            error = f"{statistics.stdev(found) / len(found) ** 0.5:.4f}" if len(found) > 1 else "-"
            pairs = ", ".join(f"{d:+.4f}" for d in found) if found is not every else str(len(found))
            lines.append(f"| {name} | {pairs} | {statistics.mean(found):+.4f} | {error} |")
    return lines


if __name__ == "__main__":
    main()
