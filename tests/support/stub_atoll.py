"""Stands in for `python -m atoll` where processes are started, watched and ended; the run's name says how.

coordinator: listens at a made-up address, and ends once every peer has ended. train: trains for a second, and
ends. "fails-early": peer-1 ends with exit code 8 before the run begins. "lasts": peers train until they are
asked to end.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import tomllib
from pathlib import Path
from types import FrameType

from atoll import events
from atoll.events import EventLog, JsonLinesSink, read_events


def main() -> None:
    command, config_path, *options = sys.argv[1:]
    folder = Path(config_path).parent
    config = tomllib.loads(Path(config_path).read_text())
    settings = dict(part.split("=", 1) for part in options if "=" in part)
    name = settings.get("local.peer", "coordinator")
    (folder / f"{name}.seen").write_text(json.dumps({"pid": os.getpid(), "argv": sys.argv}))
    assert os.environ["ATOLL_TOKEN"]
    signal.signal(signal.SIGTERM, end_politely)
    signal.signal(signal.SIGINT, end_politely)
    log = EventLog(name, JsonLinesSink(folder / f"{name}.jsonl"))
    if command == "coordinator":
        coordinate(log, folder, config["membership"]["start_peers"])
    else:
        train(log, name, config["run"]["name"].rsplit("-", 2)[0])


def coordinate(log: EventLog, folder: Path, peers: int) -> None:
    log.emit(events.CoordinatorListening("127.0.0.1:1", 1, restarted=False))
    while len(ended(folder)) < peers:
        time.sleep(0.05)


def ended(folder: Path) -> list[str]:
    files = sorted(folder.glob("peer-*.jsonl"))
    return [f.name for f in files for _, _, e in read_events(f) if isinstance(e, events.RunEnded)]


def train(log: EventLog, name: str, behaviour: str) -> None:
    log.emit(events.RunStarted("peer", behaviour, "", os.getpid()))
    if behaviour == "fails-early":
        if name == "peer-1":
            print("atoll: error: the corpus is empty; give other data.sources", file=sys.stderr, flush=True)
            sys.exit(8)
        time.sleep(60)
    step = 0
    while behaviour == "lasts" or step < 10:
        step += 1
        log.emit(events.TrainingStep(step, 3.0, 1, 10.0, 1.0, 1.0))
        time.sleep(0.1)
    log.emit(events.RunEnded("done", 0))


def end_politely(signum: int, frame: FrameType | None) -> None:
    del frame
    print(f"asked to end by {signal.Signals(signum).name}", flush=True)
    sys.exit(128 + signum)


if __name__ == "__main__":
    main()
