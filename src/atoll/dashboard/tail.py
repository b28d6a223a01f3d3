"""Reading the events of a run from its folder, while it is written and afterwards: one file a process."""

from __future__ import annotations

from pathlib import Path

from atoll.dashboard.view import Seen
from atoll.events import read_events

MERGED = "events.jsonl"


class EventTail:
    """New events of all processes of a run, each time it is asked. Owns no open file between calls."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}

    def read(self) -> list[Seen]:
        """What was written since the last call, in order of time."""
        seen = []
        for path in event_files(self._folder):
            for offset, line, event in read_events(path, self._offsets.get(path, 0)):
                self._offsets[path] = offset
                if event is not None:
                    seen.append(Seen(line.wall_time_s, line.source, event))
        return sorted(seen, key=lambda each: each.wall_time_s)


def event_files(folder: Path) -> list[Path]:
    """The event files of single processes, in a fixed order. They lie in the run's folder itself: folders below it
    (checkpoints in the making) come and go while it is read, and what is named so there is somebody's data."""
    return sorted(path for path in folder.glob("*.jsonl") if path.name != MERGED)


def merge_events(folder: Path) -> Path:
    """Write `events.jsonl`: the whole lines of all processes, in order of time. Returns its path."""
    lines: list[tuple[float, bytes]] = []
    for path in event_files(folder):
        raw = path.read_bytes()
        start = 0
        for end, line, _ in read_events(path):
            lines.append((line.wall_time_s, raw[start:end]))
            start = end
    merged = folder / MERGED
    merged.write_bytes(b"".join(raw for _, raw in sorted(lines, key=lambda each: each[0])))
    return merged
