"""A run's status on a terminal: who is there, what each does, and in sentences why the round is not over yet."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from atoll.dashboard.words import bytes_text, clock_text, counted, number_text
from atoll.membership.operator import PeerStatus, ReachStatus, Remark, StandingBy, Status
from atoll.values import LinkRate

SHOWN_REMARKS = 6
SHOWN_LINKS = 12
SHOWN_REACH = 16  # of peers: above, pairs that lack an edge are told in sentences only
SHOWN_PEERS = 12  # a wider table of links is not read by anybody

_STYLE = {
    "training": "green",
    "ready": "cyan",
    "reducing": "cyan",
    "voted": "cyan",
    "applying": "cyan",
    "catching up": "magenta",
    "silent": "red",
    "away": "red",
    "expected": "yellow",
}


def render(status: Status | StandingBy) -> RenderableType:
    """The whole answer."""
    if isinstance(status, StandingBy):
        return _standing_by(status)
    parts: list[RenderableType] = [_head(status), _peers(status)]
    parts += [_sentences("why", status.why)] if status.why else []
    parts += [_evicted(status)] if status.evicted else []
    links = [link for link in status.links if link.source and link.target]
    if links:
        names = sorted({name for link in links for name in (link.source, link.target)})
        few = len(names) <= SHOWN_PEERS
        parts.append(_matrix(links, names) if few else _slowest(links))
    parts += _reach(status.reach) if status.reach is not None else []
    parts += [_remarks("failed lately", status.failures)] if status.failures else []
    parts += [_remarks("decided lately", status.reasons)] if status.reasons else []
    return Group(*parts)


def _standing_by(told: StandingBy) -> Text:
    leads = f"{told.leader} leads: ask that one how the run stands" if told.leader else told.trouble
    return Text.assemble(("run ", "dim"), (told.run, "bold"), f"  this coordinator stands by; {leads}")


def _head(status: Status) -> Text:
    members = sum(peer.member for peer in status.peers)
    begun = (
        counted(members, "member") if status.started else f"{members} of {status.start_peers} peers are in"
    )
    text = Text.assemble(
        ("run ", "dim"),
        (status.run, "bold"),
        f"  version {status.version}, round {status.round}, {begun}, {clock_text(status.age_s)} old",
        (f"  (policy {status.policy}, min_peers {status.min_peers}, term {status.term})", "dim"),
    )
    if status.round_s is not None and status.tokens_per_s is not None:
        text.append(
            f"\n{status.round_s:.1f} s a round, {number_text(status.tokens_per_s)} tokens/s", style="dim"
        )
    if status.slots is not None:
        data = status.slots
        told = f"data: epoch {data.epoch}, {data.leased} of {data.count} slots leased, {data.unread} unread"
        text.append(f"\n{told}", style="dim")
    if status.stopping:
        text.append(f"\n{status.stopping}: this round is the last", style="bold yellow")
    text.append(f"\n{status.waiting}" if status.waiting else "", style="bold")
    return text


def _peers(status: Status) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", min_width=60)
    table.add_column("peer", min_width=10)
    table.add_column("state", min_width=10)
    table.add_column("")
    for heading in ("step", "tokens", "heard"):
        table.add_column(heading, justify="right", min_width=7)
    for peer in status.peers:
        table.add_row(
            escape(peer.peer),
            Text(peer.state, style=_STYLE.get(peer.state, "")),
            Text(_detail(peer)),
            str(peer.step),
            number_text(peer.tokens) if peer.tokens else "",
            f"{peer.heard_s:.1f} s" if peer.state != "expected" else "",
        )
    return table


def _detail(peer: PeerStatus) -> str:
    return "" if peer.says == peer.state else peer.says


def _sentences(title: str, sentences: Sequence[str]) -> Text:
    text = Text(f"{title}\n", style="bold")
    text.append("\n".join(f"  {sentence}" for sentence in sentences), style="not bold")
    return text


def _remarks(title: str, remarks: Sequence[Remark]) -> Text:
    told = [f"{_ago(each.ago_s):>9}  {each.text}" for each in remarks[:SHOWN_REMARKS]]
    return _sentences(title, told)


def _ago(seconds: float) -> str:
    return f"-{seconds:.1f}s" if seconds < 60 else f"-{clock_text(seconds)}"


def _evicted(status: Status) -> Text:
    told = [
        f"{each.peer}, {'until the run ends' if each.left_s is None else f'another {each.left_s:.0f} s'}: {each.reason}"
        for each in status.evicted
    ]
    return _sentences("evicted", told)


def _matrix(links: Sequence[LinkRate], names: Sequence[str]) -> Table:
    """Rows send to columns."""
    found = {(link.source, link.target): link for link in links}
    table = Table(box=None, pad_edge=False, header_style="bold", title=None)
    table.add_column("sends to")
    for name in names:
        table.add_column(escape(name), justify="right")
    for source in names:
        cells = [_rate(found.get((source, target))) if source != target else "" for target in names]
        table.add_row(escape(source), *cells)
    return table


def _reach(reach: ReachStatus) -> list[RenderableType]:
    """Rows dial columns; nothing where all reach all."""
    says: list[RenderableType] = [_sentences("reach", reach.says)] if reach.says else []
    whole = not any(set(row) & {"-", "?"} for row in reach.rows)
    if whole or len(reach.peers) > SHOWN_REACH:
        return says
    table = Table(box=None, pad_edge=False, header_style="bold", title=None)
    table.add_column("dials")
    for name in reach.peers:
        table.add_column(escape(name), justify="right")
    for i, name in enumerate(reach.peers):
        cells = [_way(letter, reach.rows[j][i]) for j, letter in enumerate(reach.rows[i])]
        table.add_row(escape(name), *cells)
    return [table, *says]


def _way(there: str, back: str) -> Text:
    """A cell: whether the row's peer can dial the column's, or that one calls it, or neither."""
    if there == "+":
        return Text("yes", style="green")
    if there == "-":
        return (
            Text("called", style="yellow") if back == "+" else Text("no", style="red" if back == "-" else "")
        )
    return Text("?" if there == "?" else "")


def _rate(link: LinkRate | None) -> str:
    if link is None:
        return "?"
    trip = f" {link.rtt_s * 1000:.2g} ms" if link.rtt_s else ""
    return f"{bytes_text(link.bytes_per_s)}/s{trip}"


def _slowest(links: Sequence[LinkRate]) -> Text:
    told = [f"{each.source} -> {each.target}: {_rate(each)}" for each in links[:SHOWN_LINKS]]
    return _sentences("slowest links", told)
