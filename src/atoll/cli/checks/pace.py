"""What a round will take with this machine in it: the planner's prediction over the rates that are known."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.cli.checks.run import Way, span
from atoll.membership.examination import Examined
from atoll.network.checks.finding import Finding, found, problem
from atoll.plan.planner import choose
from atoll.values import Edge, LinkRate, PlanRequest

OWN = "this machine"


def seconds_per_round(
    told: Examined, ways: Sequence[Way], *, reachable: bool, max_up: int = 0, max_down: int = 0
) -> Finding:
    """Seconds of one sync with and without this machine, and of a round as rounds took lately.

    What nobody has measured is taken to be like what was, in the planner's way; `max_up` and `max_down` are this
    machine's own caps. A member that was not reached has no link to this machine, unless that is `reachable`. How fast
    it trains is known only once it does.
    """
    if not told.wire_bytes or not told.members:
        return found("a round", "not known before a first member has declared its model")
    members = tuple(each.peer for each in told.members)
    before = PlanRequest(
        members=members,
        contributors=members,
        wire_bytes=told.wire_bytes,
        codec=told.codec,
        links=told.links,
        max_up=told.max_up,
        max_down=told.max_down,
        topology=told.topology,
        connections=told.connections,
    )
    with_own = _with_own(before, ways, reachable, max_up, max_down)
    now, then = choose(before), choose(with_own)
    details = {
        "sync_s": then.predicted_s,
        "sync_without_s": now.predicted_s,
        "topology": then.topology,
        "round_s": told.round_s,
        "inner_steps": told.inner_steps,
        "reason": then.reason,
    }
    if OWN in then.dropped:
        return problem(
            "a round",
            "no plan has this machine in it: it would be sent away at its first round",
            "make it reachable (see above), or see that it reaches the members",
            about="out",
            details=details,
        )
    says = f"a sync takes about {span(then.predicted_s)} with this machine ({then.topology})"
    if len(members) > 1:
        says += f", {span(now.predicted_s)} without"
    if told.round_s is not None:
        later_s = told.round_s + max(0.0, then.predicted_s - now.predicted_s)
        steps = f" of {told.inner_steps} inner steps" if told.inner_steps else ""
        says += (
            f"; rounds{steps} took {span(told.round_s)} lately, so about {span(later_s)}, if it is no slower"
        )
    return found("a round", says, details=details)


def _with_own(
    before: PlanRequest, ways: Sequence[Way], reachable: bool, max_up: int, max_down: int
) -> PlanRequest:
    links, broken = [], []
    for way in ways:
        if way.tried and not way.why_not:
            links.append(LinkRate(OWN, way.peer, way.bytes_per_s, way.rtt_s))
        elif way.tried and not reachable:
            broken.append(Edge(OWN, way.peer))
    return PlanRequest(
        members=(*before.members, OWN),
        contributors=(*before.contributors, OWN),
        wire_bytes=before.wire_bytes,
        codec=before.codec,
        broken=frozenset(broken),
        links=(*before.links, *links),
        max_up={**before.max_up, OWN: max_up},
        max_down={**before.max_down, OWN: max_down},
        topology=before.topology,
        connections=before.connections,
    )
