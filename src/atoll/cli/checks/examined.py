"""The part of `atoll doctor` that needs a run: it asks the coordinator, measures the ways, and collects what is found.

Blocks, within bounds: names, the examination and the measurements each have a deadline, and the measurements take only
what is left of the whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from atoll.cli.checks import run as run_checks
from atoll.cli.checks.join_line import JoinLine
from atoll.cli.checks.pace import seconds_per_round
from atoll.cli.checks.run import LOOPBACK, Way
from atoll.cli.finding import coordinator_of
from atoll.comm.native import NativeCommunicator, Tls
from atoll.config.load import load, load_joined
from atoll.config.rates import parse_rate
from atoll.config.schema import RunConfig
from atoll.diloco.badge import enrol, way_in
from atoll.errors import AtollError, ConfigError, LocalError, Refused, Unreachable
from atoll.membership.client import Member
from atoll.membership.examination import MemberSeen
from atoll.membership.examining_link import Examination, examine
from atoll.membership.link import Admission, Resolver
from atoll.network.addresses import EngineAddress, engine_address
from atoll.network.checks import inbound, lines
from atoll.network.checks.finding import Finding, problem, warning
from atoll.network.checks.inbound import Seen

RESOLVE_S = 3.0
CONNECT_S = 5.0
PROBE_S = 1.0
MOST_PROBED = 8
PROBE_BYTES = 4 << 20
LEAST_PROBE_BYTES = 64 << 10
_CONNECTIONS = 4


@dataclass(slots=True)
class Examining:
    """What was found of the run, and what else came of it: the way to the coordinator, and this machine's settings,
    `joined` with the run's once those were told."""

    config: RunConfig
    joined: bool = False
    findings: list[Finding] = field(default_factory=list)
    ways: list[Way] = field(default_factory=list)
    seen: Examination | None = None


def examine_run(
    line: JoinLine, token: bytes, assignments: Sequence[str], *, rates: bool, until_s: float
) -> Examining:
    """Everything that is to be asked of the run's coordinator and members, until `until_s` of the monotonic clock. An
    error becomes a finding; what depends on it is left out. Raises ConfigError for `assignments` that make no sense.
    """
    held = Examining(own_config(assignments))
    address = _found(line, held)
    if not address or not _names_stand(address, held):
        return held
    where = _own_address(address, held)
    listener = _listener(where, held) if where is not None else None
    try:
        token, secure = way_in(
            address,
            peer=held.config.local.peer,
            token=token,
            fingerprint=line.authority,
            folder=Path(held.config.local.out) / line.run,
        )
        seen = held.seen = asyncio.run(examine(address, token, listener, secure))
    except Refused as error:
        held.findings.append(_refused(error))
        return held
    except Unreachable as error:
        remedy = "check the address, that the coordinator runs, and that firewalls let its port through"
        held.findings.append(problem("coordinator", str(error), remedy, about="coordinator"))
        return held
    finally:
        if listener is not None:
            listener.close()
    held.findings += [
        run_checks.coordinator(seen, line.run),
        run_checks.package(seen),
        run_checks.clock(seen),
    ]
    inward = _inward(seen, where, held) if where is not None else None
    if seen.told.run == line.run:
        reachable = inward is not None and inward.kind() in ("none", "forwarded", "cone")
        _outward(line, token, assignments, held, rates=rates, until_s=until_s, reachable=reachable)
    return held


def _found(line: JoinLine, held: Examining) -> str:
    """The coordinators' addresses, as the line gives them or the DHT tells; "" if that does not, and a finding."""
    given = [f"run.name={line.run}", f"local.coordinator={line.address}", f"local.authority={line.authority}"]
    try:
        return coordinator_of(load(None, given))
    except (Unreachable, LocalError) as error:
        remedy = "give other bootstrap peers, or the coordinator's address itself"
        held.findings.append(problem("dht", str(error), remedy, about="coordinator"))
        return ""


def own_config(assignments: Sequence[str]) -> RunConfig:
    """This machine's settings without a run. What has to go with a run's batch is judged beside that."""
    alone = [each for each in assignments if not each.startswith("local.micro_batch")]
    return load_joined({}, alone)


def resolve(host: str) -> list[str]:
    """The addresses that a name stands for, within RESOLVE_S. Raises OSError, TimeoutError too."""

    async def look_up() -> list[str]:
        async with asyncio.timeout(RESOLVE_S):
            return [each["host"] for each in await Resolver().resolve(host)]

    return list(dict.fromkeys(asyncio.run(look_up())))


def _names_stand(address: str, held: Examining) -> bool:
    """Whether at least one coordinator's name can be looked up; those that cannot are found."""
    hosts = [each.strip().rpartition(":")[0].strip("[]") for each in address.split(",")]
    answers = []
    for host in dict.fromkeys(hosts):
        try:
            answers.append((host, resolve(host)))
        except OSError as error:
            why = str(error.strerror or "").lower() or f"no answer in {RESOLVE_S:g} s"
            remedy = "check the name; getent hosts NAME asks the same; or give the IP address"
            held.findings.append(
                problem("dns", f"{host} cannot be looked up ({why})", remedy, about="coordinator")
            )
    named = [f"{host} is {', '.join(found)}" for host, found in answers if found != [host]]
    if answers:
        said = "; ".join(named) or "not needed: the address is a number"
        held.findings.append(Finding(name="dns", grade="ok", sentence=said, details=dict(answers)))
    return bool(answers)


def _own_address(address: str, held: Examining) -> EngineAddress | None:
    own = held.config.local
    try:
        return engine_address(address, own.bind, own.port, own.advertise)
    except ConfigError as error:
        remedy = "ip route shows the ways that there are; local.bind and local.advertise name one"
        held.findings.append(problem("advertised", str(error), remedy, about="in"))
        return None


def _listener(where: EngineAddress, held: Examining) -> socket.socket | None:
    """Where the engine would listen. SO_REUSEPORT, because the same port also dials."""
    listener = socket.socket(socket.AF_INET6 if ":" in where.bind else socket.AF_INET, socket.SOCK_STREAM)
    try:
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            listener.setsockopt(socket.SOL_SOCKET, option, 1)
        listener.bind((where.bind, where.port))
        listener.listen(4)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        held.findings.append(
            problem(
                "own port",
                f"cannot listen on {where.bind} port {where.port}: {(error.strerror or str(error)).lower()}",
                "end what has the port (ss -ltnp shows it; a peer that runs here?), or choose another local.port",
            )
        )
        return None
    return listener


def _refused(error: Refused) -> Finding:
    said = str(error)
    if "examin" in said:
        remedy = "ask again later"
    elif "authority" in said or "certificate" in said:
        remedy = "copy the join line whole, with its --authority; if it is right, somebody stands in between"
    elif "protocol" in said:
        remedy = "install the coordinator's version of Atoll here"
    else:
        remedy = "set the token of this run in ATOLL_TOKEN or ATOLL_TOKEN_FILE; a token may have ended or been revoked"
    return problem("coordinator", said, remedy, about="refused")


def _inward(seen: Examination, where: EngineAddress, held: Examining) -> Seen | None:
    """What others see of this machine; None if nothing was dialled."""
    port = seen.dialed[0].port if seen.dialed else where.port
    found = Seen(
        own_host=seen.own_host,
        seen_host=seen.told.seen_host,
        port=port,
        port_given=bool(where.port),
        dialed={each.port: each.why for each in seen.dialed},
        mapped=seen.mapped,
    )
    advertise, resolved, why_not = where.advertise, [where.advertise], ""
    try:
        resolved = resolve(advertise)
    except OSError as error:
        why_not = str(error.strerror or "").lower() or f"no answer in {RESOLVE_S:g} s"
    own = {text for texts in lines.own_addresses().values() for text in texts}
    held.findings.append(
        inbound.advertised(
            advertise,
            resolved,
            why_not,
            coordinator_host=seen.coordinator_host,
            seen=found,
            own=own,
        )
    )
    if not seen.dialed:
        return None
    held.findings += [inbound.nat(found), inbound.port_in(found)]
    return found


def _outward(
    line: JoinLine,
    token: bytes,
    assignments: Sequence[str],
    held: Examining,
    *,
    rates: bool,
    until_s: float,
    reachable: bool,
) -> None:
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
    if elsewhere and lines.is_loopback(way.host):
        return msgspec.structs.replace(way, why_not=LOOPBACK)
    rate, rtt_s, why_not = comm.probe(member.peer, member.rank, num_bytes, 2 * PROBE_S, _CONNECTIONS)
    return msgspec.structs.replace(way, bytes_per_s=rate, rtt_s=rtt_s, why_not=why_not)


def _way(member: MemberSeen) -> Way:
    if member.rank is None:
        return Way(peer=member.peer, host="", port=0)
    return Way(peer=member.peer, host=member.rank.host, port=member.rank.port)
