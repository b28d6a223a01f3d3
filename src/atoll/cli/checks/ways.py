"""The ways from this machine to the members: as a peer of a name of its own, which declares nothing."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Sequence

import msgspec

from atoll.cli.checks import run as run_checks
from atoll.cli.checks.join_line import JoinLine
from atoll.cli.checks.pace import seconds_per_round
from atoll.cli.checks.record import Examining
from atoll.cli.checks.run import LOOPBACK, Way
from atoll.comm.native import NativeCommunicator, Tls
from atoll.config.load import load_joined
from atoll.config.rates import parse_rate
from atoll.diloco.badge import enrol
from atoll.errors import AtollError, ConfigError, LocalError
from atoll.membership.client import Member
from atoll.membership.examination import MemberSeen
from atoll.membership.link import Admission
from atoll.network.checks import lines
from atoll.network.checks.finding import problem, warning
from atoll.network.own_addresses import all_loopback

CONNECT_S = 5.0
PROBE_S = 1.0
MOST_PROBED = 8
PROBE_BYTES = 4 << 20
LEAST_PROBE_BYTES = 64 << 10
_CONNECTIONS = 4


def look_outward(
    line: JoinLine,
    token: bytes,
    assignments: Sequence[str],
    held: Examining,
    *,
    rates: bool,
    until_s: float,
    reachable: bool,
) -> None:
    """Join as far as a newcomer does before it declares, measure the ways to the members if `rates`, and predict what a
    round will take. `reachable`: the coordinator reached this machine. `until_s` is of the monotonic clock."""
    assert held.seen is not None
    told = held.seen.told
    name = f"!doctor-{secrets.token_hex(4)}"  # of two engines the lower name dials
    admission, tls = _admission(held.seen.address, line, name, token, held, until_s)
    if admission is not None:
        _join(held, admission, assignments)
    held.ways = [_way(each) for each in told.members]
    if admission is not None and rates and held.ways:
        held.ways = _measured(held, line.run, name, admission.session_key, tls, until_s)
    held.findings += run_checks.ways_out(held.ways, reachable=reachable)
    own = held.config
    held.findings.append(
        seconds_per_round(
            told,
            held.ways,
            reachable=reachable,
            max_up=parse_rate(own.net.max_up),
            max_down=parse_rate(own.net.max_down),
        )
    )


def _join(held: Examining, admission: Admission, assignments: Sequence[str]) -> None:
    """Take over the run's settings, if it has any yet and they go with this machine's. Those of somebody's own training
    loop may hold anything; they say nothing of what the run takes."""
    if admission.settings is None:
        return
    try:
        load_joined(admission.settings)
    except ConfigError:
        return
    try:
        held.config = load_joined(admission.settings, assignments)
        held.joined = True
    except ConfigError as error:
        first = str(error).splitlines()[0]
        remedy = "change this machine's settings (--set local...), which the run's have to go with"
        held.findings.append(problem("settings", first, remedy))


def _admission(
    address: str, line: JoinLine, name: str, token: bytes, held: Examining, until_s: float
) -> tuple[Admission | None, Tls | None]:
    """As a peer of a name of its own, which declares nothing: what a newcomer is given, and shows."""
    remedy = "without it the ways to the members cannot be measured, and nobody could join"
    badge = None
    if line.authority:
        try:
            badge = enrol(
                address, run=line.run, peer=name, token=token, fingerprint=line.authority, folder=None
            )
        except AtollError as error:
            held.findings.append(problem("joining", str(error), remedy, about="refused"))
            return None, None
    asking = Member(
        address=address,
        run=line.run,
        peer=name,
        token=token,
        on_abort=lambda op: None,
        connect_s=max(1.0, min(CONNECT_S, until_s - time.monotonic())),
        secure=badge.secure if badge else None,
    )
    try:
        return asking.connect(), badge.tls if badge else None
    except AtollError as error:
        held.findings.append(problem("joining", str(error), remedy, about="refused"))
        return None, None
    finally:
        asking.close()


def _measured(
    held: Examining, run: str, name: str, session_key: bytes, tls: Tls | None, until_s: float
) -> list[Way]:
    """The ways to the first MOST_PROBED members, one after another, as far as there is time."""
    assert held.seen is not None
    own_host, told = held.seen.own_host, held.seen.told
    try:
        comm = NativeCommunicator(
            run=run,
            peer=name,
            rank=0,
            session_key=session_key,
            bind_host=own_host,
            connect_timeout_s=PROBE_S,
            num_workers=1,
            tls=tls,
        )
    except (LocalError, ValueError) as error:
        held.findings.append(warning("ports out", f"the ways were not measured: {error}", "", about="out"))
        return held.ways
    with contextlib.closing(comm):
        num_bytes = max(LEAST_PROBE_BYTES, min(PROBE_BYTES, told.wire_bytes))
        elsewhere = not lines.is_loopback(held.seen.coordinator_host)
        measured = list(held.ways)
        for index, member in enumerate(told.members[:MOST_PROBED]):
            if time.monotonic() > until_s:
                break
            measured[index] = _measure(comm, member, num_bytes, elsewhere)
    return measured


def _measure(comm: NativeCommunicator, member: MemberSeen, num_bytes: int, elsewhere: bool) -> Way:
    """`elsewhere`: the run is not on this machine alone."""
    way = msgspec.structs.replace(_way(member), tried=True)
    if member.rank is None:
        return msgspec.structs.replace(way, why_not="it told no address")
    if elsewhere and all_loopback(member.rank.bare_hosts()):
        return msgspec.structs.replace(way, why_not=LOOPBACK)
    rate, rtt_s, why_not = comm.probe(member.peer, member.rank, num_bytes, 2 * PROBE_S, _CONNECTIONS)
    return msgspec.structs.replace(way, bytes_per_s=rate, rtt_s=rtt_s, why_not=why_not)


def _way(member: MemberSeen) -> Way:
    if member.rank is None:
        return Way(peer=member.peer, host="", port=0)
    rank = member.rank
    return Way(peer=member.peer, host=rank.host, port=rank.port, more_hosts=rank.more_hosts)
