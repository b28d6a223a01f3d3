"""`atoll demo`: the whole thing on one machine, in about a minute."""

from __future__ import annotations

import json as jsonlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console

from atoll.cli.demo_report import json_report, num_parameters, sample, text_report
from atoll.cli.demo_run import demo_config
from atoll.cli.local_run import LocalRun, fresh_name
from atoll.cli.output import deliver
from atoll.dashboard.console import Display, Goal, Nothing, PlainLines, Screen
from atoll.dashboard.plot import loss_plot
from atoll.dashboard.summary import summarise
from atoll.dashboard.view import View
from atoll.errors import ConfigError, Diverged

SLACK_S = 120.0  # beyond --seconds, for starting, the last round and ending; then the demo is stopped


def demo(
    *,
    peers: Annotated[int, Parameter(help="How many peers train together.")] = 3,
    seconds: Annotated[
        float, Parameter(help="How long they train; starting takes a few seconds more.")
    ] = 60.0,
    kill: Annotated[bool, Parameter(help="Kill the last peer half-way, by SIGKILL.")] = True,
    json: Annotated[
        bool, Parameter(help="Print one JSON object on stdout, and nothing else.", negative="")
    ] = False,
    out: Annotated[Path, Parameter(help="Folder that gets the run folder.")] = Path("runs"),
) -> int:
    """Train a small language model with three peers on this machine, and kill one of them half-way.

    A coordinator and the peers are separate processes that speak over loopback. They train on the source
    files of Python's own standard library, with DiLoCo: many steps alone, then one exchange of 8-bit
    updates. The others go on when one dies. Nothing is downloaded.

    The run folder keeps `events.jsonl`, `config.toml`, `loss.svg`, `model.safetensors` and the logs.

    Try:

        atoll demo
        atoll demo --peers 2 --seconds 20 --no-kill --json

    With --json: val_loss_before and val_loss_after (nats per byte), tokens, rounds, peers_lost (names),
    bytes_sent_per_peer (to other peers, counted at the sockets: the mean of those that were there to the
    end; what is said to the coordinator is not in it), bytes_data_parallel (what each peer would have sent
    in plain data-parallel training of the same steps), compute_utilisation (0 to 1), digests_equal, saves_done,
    saves_skipped and saves_failed (checkpoints, over all peers), saved_version (the newest, -1: none), run_dir.

    Exit codes: 0 done; 2 usage; 3 this machine; 4, 6 the run broke; 7 peers disagree; 130/143 stopped.
    """
    if peers < 1 or seconds <= 0:
        raise ConfigError(f"--peers {peers} --seconds {seconds:g}: both must be above 0")
    name = fresh_name(out, "demo")
    config = demo_config(name, peers, seconds, str(out))
    console = Console(stderr=json, highlight=False)
    goal = Goal(seconds=seconds, steps=config.run.steps)
    display = _display(console, goal, quiet=json)
    try:
        with LocalRun(config, num_peers=peers, narrator="demo") as run:
            run.start()
            _watch(run, display, kill_after_s=seconds / 2 if kill and peers > 1 else None, seconds=seconds)
    finally:
        display.close()
    run.raise_failure()
    model = run.folder / "model.safetensors"
    summary = summarise(run.seen, num_parameters(model))
    plot = run.folder / "loss.svg"
    plot.write_text(loss_plot(run.seen, f"{peers} peers, one model: Python's standard library, byte by byte"))
    if json:
        deliver(jsonlib.dumps(json_report(summary, run.folder)) + "\n")
    else:
        console.print(
            text_report(summary, run.folder, sample(model, config.model)), markup=False, soft_wrap=True
        )
    if not summary.digests_equal:
        raise Diverged(
            f"the peers did not hold the same bits after every round; see {run.folder}/events.jsonl"
        )
    return 0


def _display(console: Console, goal: Goal, *, quiet: bool) -> Display:
    """A live screen on a terminal. Else plain lines, but with --json nothing: stderr is for errors then."""
    if console.is_terminal:
        return Screen(console, goal)
    return Nothing() if quiet else PlainLines(console)


def _watch(run: LocalRun, display: Display, *, kill_after_s: float | None, seconds: float) -> None:
    """Watch the run to its end, and kill the last peer (the first saves the model) at the given time."""
    victim = run.peers[-1]
    views: Iterator[View] = run.watch(display, deadline_s=seconds + SLACK_S)
    for view in views:
        if kill_after_s is None or view.started_at_s is None or not run.is_running(victim):
            continue
        if time.time() - view.started_at_s >= kill_after_s:
            run.kill(victim)
            kill_after_s = None
