"""The peers of a run that live on this machine: found by the run's events, proved before anything is done to them.

A process id in a file proves nothing: it may come from another machine, or the process may have ended and its number be
somebody else's now. A process is the peer only if it began before it told so, and holds the peer's event file open, as
every peer does until it ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

from atoll.dashboard.tail import EventTail
from atoll.errors import LocalError
from atoll.events import RunStarted

Running = psutil.Process
"""One that is there; this file starts none."""
CLOCK_STEP_S = 2.0  # a wall clock may be set a little between two looks at it


@dataclass(frozen=True)
class LocalPeer:
    """A living peer. psutil signals a process only if it is still the one that was found."""

    name: str
    process: psutil.Process


class LocalPeers:
    """Finds them again and again; reads only what is new. One thread."""

    def __init__(self, folder: Path) -> None:
        """Raises LocalError unless `folder` is a run's, with events of at least one peer."""
        if not folder.is_dir():
            raise LocalError(
                f"{folder} is no folder; give that of a run under way, as `atoll launch` prints it"
            )
        self._folder, self._tail = folder, EventTail(folder)
        self._told: dict[str, tuple[float, int]] = {}
        self._listen()
        if not self._told:
            raise LocalError(
                f"no peer told of its start in {folder}/*.jsonl; give the folder of a run under way "
                "(local.out/run.name)"
            )

    def living(self) -> dict[str, LocalPeer]:
        """All that live on this machine, by name."""
        self._listen()
        found = {}
        for name, (told_at_s, pid) in self._told.items():
            process = _proved(pid, self._folder / f"{name}.jsonl", told_at_s)
            if process is not None:
                found[name] = LocalPeer(name, process)
        return found

    def _listen(self) -> None:
        for each in self._tail.read():
            if isinstance(each.event, RunStarted) and each.event.role == "peer":
                self._told[each.source] = each.wall_time_s, each.event.pid


def _proved(pid: int, events: Path, told_at_s: float) -> psutil.Process | None:
    """The process, if it is certainly the one that writes these events."""
    try:
        process = Running(pid)
        if process.create_time() > told_at_s + CLOCK_STEP_S or process.status() == psutil.STATUS_ZOMBIE:
            return None
        mine = str(events.resolve())
        return process if any(each.path == mine for each in process.open_files()) else None
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None
