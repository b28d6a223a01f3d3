"""A run on a terminal: a live screen where there is one, else plain lines, from the same view and events."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from atoll import events
from atoll.dashboard.view import PeerView, RoundView, Seen, View, fold
from atoll.dashboard.words import bytes_text, clock_text, number_text, sentence, step_line

_STATE_STYLE = {
    "training": "green",
    "syncing": "cyan",
    "done": "green",
    "killed": "bold red",
    "lost": "red",
    "failed": "red",
    "left": "yellow",
    "evicted": "yellow",
}


@dataclass(frozen=True, slots=True)
class Goal:
    """How long the run lasts: seconds after its first step (0: no limit), or inner steps."""

    seconds: float
    steps: int

    def progress(self, view: View, now_s: float) -> tuple[float, float | None]:
        """The share that is done, and the seconds left (None while unknown). `now_s` is Unix time."""
        if view.started_at_s is None:
            return 0.0, self.seconds or None
        elapsed_s = now_s - view.started_at_s
        by_steps = min((peer.step for peer in view.living), default=self.steps) / self.steps
        by_time = elapsed_s / self.seconds if self.seconds else 0.0
        share = min(1.0, max(by_steps, by_time))
        return share, elapsed_s * (1 - share) / share if share > 0 else None


class Display(Protocol):
    """Shows a run while it goes on."""

    def show(self, view: View, news: Sequence[Seen]) -> None:
        """The view as it is now, and the events since the last call."""
        ...

    def close(self) -> None: ...


class Nothing:
    """Shows nothing."""

    def show(self, view: View, news: Sequence[Seen]) -> None:
        del view, news

    def close(self) -> None:
        pass


class PlainLines:
    """One line an event that people want to read; for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._first_s: float | None = None
        self._told: dict[type[events.Event], int] = {}

    def show(self, view: View, news: Sequence[Seen]) -> None:
        del view
        for seen in news:
            self._first_s = seen.wall_time_s if self._first_s is None else self._first_s
            text = sentence(seen.source, seen.event)
            if text is not None and self._is_new(seen.event):
                elapsed = f"{seen.wall_time_s - self._first_s:7.1f}s  "
                self._console.print(elapsed + text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        pass

    def _is_new(self, event: events.Event) -> bool:
        """Every member reports each round; the first to do so speaks for all."""
        if not isinstance(event, events.RoundApplied | events.AnchorEvaluated):
            return True
        newest = self._told.get(type(event), -1)
        self._told[type(event)] = max(newest, event.version)
        return event.version > newest


class EventPrinter:
    """A sink that prints one process's own events as lines, steps too."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lines = PlainLines(console)
        self._view = View()

    def __call__(self, wall_time_s: float, source: str, event: events.Event) -> None:
        seen = Seen(wall_time_s, source, event)
        self._view = fold(self._view, seen)
        if isinstance(event, events.TrainingStep):
            self._console.print(step_line(event), markup=False, highlight=False, soft_wrap=True)
        else:
            self._lines.show(self._view, [seen])


class Screen:
    """A live table, drawn by whoever calls `show`; owns no thread."""

    def __init__(self, console: Console, goal: Goal) -> None:
        self._goal = goal
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._live.start()

    def show(self, view: View, news: Sequence[Seen]) -> None:
        del news
        self._live.update(render(view, self._goal, time.time()), refresh=True)

    def close(self) -> None:
        self._live.stop()


def display_for(console: Console, goal: Goal) -> Display:
    """A live screen on a terminal, plain lines elsewhere."""
    return Screen(console, goal) if console.is_terminal else PlainLines(console)


def render(view: View, goal: Goal, now_s: float) -> RenderableType:
    """The whole screen. `now_s` is Unix time."""
    title = Text.assemble(("run ", "dim"), (view.run, "bold"), ("  Ctrl-C stops it", "dim"))
    newest = _round_line(view.last_round, view)
    return Group(title, _peers(view.peers), newest, _bar(view, goal, now_s), _news(view))


def _peers(peers: Sequence[PeerView]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", min_width=60)
    table.add_column("peer", min_width=10)
    for heading in ("step", "loss", "tokens/s", "sent"):
        table.add_column(heading, justify="right", min_width=8)
    table.add_column("state", min_width=10)
    for peer in peers:
        table.add_row(
            peer.name,
            str(peer.step),
            "" if peer.loss is None else f"{peer.loss:.3f}",
            "" if peer.is_gone or not peer.tokens_per_s else number_text(peer.tokens_per_s),
            bytes_text(peer.sent_bytes),
            Text(peer.state, style=_STATE_STYLE.get(peer.state, "")),
            style="dim" if peer.is_gone and peer.state != "done" else "",
        )
    return table


def _round_line(newest: RoundView | None, view: View) -> Text:
    if newest is None:
        return Text("no round yet", style="dim")
    text = Text.assemble(
        ("round ", "dim"),
        (str(newest.number), "bold"),
        (f" of {len(newest.members)} peers:", "dim"),
        f" compute {newest.compute_s:.2f} s, wait {newest.wait_s:.2f} s, wire {newest.wire_s:.2f} s"
        f"{_plan_text(newest)}, apply {newest.apply_s:.2f} s, {bytes_text(newest.sent_bytes)} sent per peer",
    )
    if view.validations:
        text.append(f"\nvalidation loss {view.validations[-1].loss:.3f}")
        text.append(f" (at the start {view.validations[0].loss:.3f})", style="dim")
    return text


def _plan_text(newest: RoundView) -> str:
    """Which way the sums went, and how long it should have taken; nothing where a round's plan was not seen."""
    plan = newest.plan
    return f" ({plan.topology}, {plan.predicted_s:.2f} s planned)" if plan and plan.topology else ""


def _bar(view: View, goal: Goal, now_s: float) -> Table:
    share, left_s = goal.progress(view, now_s)
    row = Table.grid(padding=(0, 1))
    if view.started_at_s is None:
        label = "starting"
    elif view.living:
        label = "finishing the last round" if share >= 1 else f"{clock_text(left_s or 0)} left"
    else:
        label = "over"
    row.add_row(ProgressBar(total=1.0, completed=share, width=44), f"{share:4.0%}", label)
    return row


def _news(view: View) -> Text:
    text = Text()
    first_s = view.started_at_s or (view.news[0][0] if view.news else 0.0)
    for wall_time_s, line in view.news:
        text.append(f"{wall_time_s - first_s:+7.1f}s  {line}\n", style="dim")
    return text
