"""The part of `atoll doctor` that needs a run: it asks the coordinator, measures the ways, and collects what is found.

Blocks, within bounds: names, the examination and the measurements each have a deadline, and the measurements take only
what is left of the whole.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atoll.cli.checks import run as run_checks
from atoll.cli.checks.join_line import JoinLine
from atoll.cli.checks.record import Examining
from atoll.cli.checks.ways import look_outward
from atoll.cli.finding import found_at
from atoll.config.load import load_joined
from atoll.config.schema import RunConfig
from atoll.diloco.badge import way_in
from atoll.errors import ConfigError, LocalError, Refused, Unreachable
from atoll.membership.examining_link import Examination, examine
from atoll.membership.link import Resolver
from atoll.network.addresses import EngineAddress, engine_address, host_of, seen_from_outside
from atoll.network.checks import inbound, lines
from atoll.network.checks.finding import Finding, problem, warning
from atoll.network.checks.inbound import Seen
from atoll.network.own_addresses import look_up

RESOLVE_S = 3.0


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
    if where is not None and listener is not None and not seen.dialed:
        held.findings.append(inbound.not_tried(where.bind, seen.own_host))
    if seen.told.run == line.run:
        if inward is not None:
            reachable = inward.kind() in ("none", "forwarded", "cone")
        else:  # not tried: whoever is not known to be out of reach need not reach everybody
            reachable = listener is not None
        look_outward(line, token, assignments, held, rates=rates, until_s=until_s, reachable=reachable)
    return held


def _found(line: JoinLine, held: Examining) -> str:
    """The coordinators' addresses, as the line gives them or the DHT tells; "" if that does not, and a finding."""
    try:
        return found_at(line.address, line.run, line.authority)
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
    """Where the engine would listen; None, and a finding, if that cannot be."""
    try:
        return _listen(where.bind, where.port)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        held.findings.append(
            problem(
                "own port",
                f"cannot listen on {where.bind or 'any address'} port {where.port}: {reason}",
                "end what has the port (ss -ltnp shows it; a peer that runs here?), or choose another local.port",
            )
        )
        return None


def _listen(bind: str, port: int) -> socket.socket:
    """As the engine does: everywhere ("") is IPv6 and IPv4, or IPv4 alone where there is no IPv6. Raises OSError."""
    if not bind:
        try:
            return _listen_at(socket.AF_INET6, ("::", port))
        except OSError as error:
            if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                raise
            return _listen_at(socket.AF_INET, ("0.0.0.0", port))
    return _listen_at(*look_up(bind, port)[0])


def _listen_at(family: int, address: Any) -> socket.socket:
    """SO_REUSEPORT, because the same port also dials. Raises OSError."""
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            listener.setsockopt(socket.SOL_SOCKET, option, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(address)
        listener.listen(4)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
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
    own = {text for texts in lines.own_addresses().values() for text in texts}
    resolved, why_not = [], ""
    hosts = seen_from_outside(where, seen.told.seen_host).hosts
    for host in hosts:
        try:
            resolved += resolve(host_of(host))
        except OSError as error:
            why_not = str(error.strerror or "").lower() or f"no answer in {RESOLVE_S:g} s"
    told = inbound.advertised(
        ", ".join(hosts),
        resolved,
        "" if resolved else why_not,
        coordinator_host=seen.coordinator_host,
        seen=found,
        own=own,
    )
    if where.doubts and told.grade == "ok":
        remedy = f"leave local.advertise and local.bind out, or set local.advertise={seen.told.seen_host}"
        told = warning("advertised", "; ".join(where.doubts), remedy, about="in", details=told.details)
    held.findings.append(told)
    if not seen.dialed:
        return None
    held.findings += [inbound.nat(found), inbound.port_in(found)]
    return found
