"""The built-in trainer on a little text, with a coordinator in a thread: one peer, or several in threads of theirs."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path

from atoll.config.load import load
from atoll.config.schema import RunConfig
from atoll.events import Event
from atoll.train.build import run_peer
from support.fake_peer import QUICK, TOKEN, CoordinatorThread

JOIN_S = 60.0


def write_text(folder: Path) -> Path:
    folder.mkdir()
    for number in range(30):
        lines = (f"line {i} of document {number}: {i * number}" for i in range(20))
        (folder / f"{number}.txt").write_text("\n".join(lines))
    return folder


def config_of(folder: Path, address: str, peer: str, more: Mapping[str, object]) -> RunConfig:
    settings = {
        "run.name": "run",
        "run.steps": 9,
        "data.sources": f'["{folder / "text"}"]',
        "data.seq_len": 32,
        "data.slots": 8,
        "inner.batch_size": 4,
        "outer.inner_steps": 3,
        "outer.codec": "fp32",
        "eval.sequences": 4,
        "local.coordinator": address,
        "local.peer": peer,
        "local.out": folder / peer,
        "local.threads": 1,
        **more,
    }
    return load(None, [f"{key}={value}" for key, value in settings.items()], {})


def train(
    folder: Path,
    more: Mapping[str, object],
    peers: tuple[str, ...] = ("a",),
    own: Mapping[str, Mapping[str, object]] | None = None,
) -> dict[str, list[Event]]:
    """The events of each peer. `folder` gets `text`, and a folder for each peer. What is a peer's `own` is
    set for it alone. Raises what a peer did."""
    if not (folder / "text").exists():
        write_text(folder / "text")
    events: dict[str, list[Event]] = {peer: [] for peer in peers}
    failures: list[BaseException] = []

    def run(peer: str, address: str) -> None:
        try:
            run_peer(
                config_of(folder, address, peer, {**more, **(own or {}).get(peer, {})}),
                token=TOKEN,
                sinks=[lambda _, __, event: events[peer].append(event)],
            )
        except BaseException as error:
            failures.append(error)

    with CoordinatorThread(
        folder / "journal", run_settings=None, start_peers=len(peers), save_rounds=3, timeouts=QUICK
    ) as coordinator:
        threads = [
            threading.Thread(target=run, args=(peer, coordinator.address), daemon=True) for peer in peers
        ]
        for thread in threads:
            thread.start()
        until_s = time.monotonic() + JOIN_S
        while not failures and any(thread.is_alive() for thread in threads):
            assert time.monotonic() < until_s, f"no end within {JOIN_S} s"
            threads[0].join(0.05)
    if failures:
        raise failures[0]
    return events
