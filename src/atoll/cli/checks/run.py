"""The run, as the coordinator tells of it: whether this machine and it fit, and the ways to its members."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from atoll import __version__
from atoll.dashboard.words import counted
from atoll.membership.examining_link import Examination
from atoll.network.checks.finding import Finding, found, problem, warning
from atoll.values import shown

CLOCK_S, WRONG_CLOCK_S = 2.0, 60.0
"""Records and tokens that end at a time are written by one machine and read by another."""


LOOPBACK = "loopback"
"""Why a way was not tried to its end: the address would lead back here."""


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """The way from here to a member: what it carries (bytes per second) and its round trip, or `why_not`, if it was
    `tried`. The hosts are as it announces them, some maybe with a port of their own."""

    peer: str
    host: str
    port: int
    tried: bool = False
    bytes_per_s: float = 0.0
    rtt_s: float = 0.0
    why_not: str = ""
    more_hosts: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """All its addresses, for people; "" if it told none."""
        return shown((self.host, *self.more_hosts), self.port) if self.host else ""


def coordinator(seen: Examination, run: str) -> Finding:
    """That it answers, and that it is this run's."""
    told = seen.told
    details = {"address": seen.address, "run": told.run, "rtt_s": seen.rtt_s, "members": told.num_members}
    if told.run != run:
        return problem(
            "coordinator",
            f"{seen.address} runs {told.run!r}, not {run!r}",
            "copy the join line whole, with the address and --run of one run",
            about="refused",
            details=details,
        )
    says = f"{seen.address} answers in {1000 * seen.rtt_s:.0f} ms: {counted(told.num_members, 'member')}"
    return found("coordinator", says, about="coordinator", details=details)


def package(seen: Examination) -> Finding:
    """Both versions of Atoll. They speak one protocol, or nothing would have been told."""
    details = {"own": __version__, "coordinator": seen.told.package}
    if seen.told.package == __version__:
        return found("version", f"the coordinator's Atoll is {__version__} too", details=details)
    says = f"Atoll {__version__} here, {seen.told.package} there; they speak the same protocol"
    return warning("version", says, f"pip install atoll-train=={seen.told.package}", details=details)


def clock(seen: Examination) -> Finding:
    """This machine's wall clock beside the coordinator's; known to half a round trip."""
    apart_s = abs(seen.ahead_s)
    details = {"ahead_s": seen.ahead_s, "known_to_s": seen.rtt_s / 2}
    which = "behind" if seen.ahead_s > 0 else "ahead of"
    if apart_s <= CLOCK_S + seen.rtt_s / 2:
        apart = f"{span(apart_s)} {which} the coordinator's"
        says = apart if apart_s > seen.rtt_s / 2 else f"the coordinator's, to within {span(seen.rtt_s / 2)}"
        return found("clock", says, about="clock", details=details)
    judge = problem if apart_s > WRONG_CLOCK_S + seen.rtt_s / 2 else warning
    return judge(
        "clock",
        f"{span(apart_s)} {which} the coordinator's: tokens and records that end at a time are taken wrongly",
        "set the clock of whichever is wrong: timedatectl set-ntp true, or chronyc makestep",
        about="clock",
        details=details,
    )


def span(seconds: float) -> str:
    """`12 ms`, `3.4 s`, `10 min`, `2.5 h`; never less than `1 ms`."""
    if seconds < 0.001:
        return "1 ms"
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 100:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 6000 else f"{seconds / 3600:.3g} h"


def ways_out(ways: Sequence[Way], *, reachable: bool) -> list[Finding]:
    """A finding for all members that were reached, and one for each that was not. `reachable`: the coordinator reached
    this machine. Two peers need one way of the two, so a member that cannot be dialled is a problem only for a machine
    that cannot be dialled either, or that reaches nobody."""
    tried = [way for way in ways if way.tried]
    reached = [way for way in tried if not way.why_not]
    findings = []
    if reached:
        shown = f"{len(reached)} of {counted(len(tried), 'member')} reached"
        findings.append(
            found("ports out", shown, about="out", details={"reached": [way.peer for way in reached]})
        )
    for way in tried:
        if way.why_not:
            findings.append(_not_reached(way, grave=not reachable or not reached))
    return findings


def _not_reached(way: Way, *, grave: bool) -> Finding:
    where = way.where or "no address"
    if way.why_not == LOOPBACK:
        says = f"{way.peer} tells others {where}, which is loopback: nobody else reaches it"
        remedy = f"on {way.peer}'s machine: set local.advertise to an address of it that others reach"
    else:
        says = f"no way from here to {way.peer} at {where} ({way.why_not.rpartition(': ')[2]})"
        remedy = (
            f"on {way.peer}'s machine open TCP port {way.port} (local.port keeps it the same), or here let "
            "connections out"
        )
    if not grave:
        says += "; it has to dial this machine"
    judge = problem if grave else warning
    return judge("ports out", says, remedy, about="out", details=msgspec.to_builtins(way))
