"""A schedule as lines that a person can follow."""

from __future__ import annotations

from atoll.membership.leases import Lease, SlotTable
from atoll.membership.messages import (
    Abort,
    Applied,
    AskToLeave,
    CatchUp,
    CaughtUp,
    Declare,
    Ended,
    Freeze,
    Heartbeat,
    HeartbeatAck,
    Leases,
    Leave,
    Message,
    Probe,
    Probed,
    Reach,
    Reached,
    Ready,
    Reduce,
    Refused,
    Serve,
    SlotsWanted,
    SnapshotWanted,
    Verdict,
    View,
    Vote,
)
from atoll.membership.steps import (
    Connected,
    CoordinatorSaid,
    EvictionDecided,
    LeasesChanged,
    MembersChanged,
    OperatorSaid,
    PeerArrived,
    PeerDropped,
    PeerSaid,
    PlanMade,
    RunDefined,
    StateDigest,
    StopDecided,
    TermRaised,
    TrainerSaid,
    VerdictMade,
    VersionLearned,
)


def print_line(now_s: float, who: str, what: object, reason: str) -> None:
    """One event: when, who heard it, what it was, and the machine's own sentence. Heartbeats are left out."""
    match what:
        case PeerSaid(message=Heartbeat()) | CoordinatorSaid(message=HeartbeatAck()):
            return
    print(f"{now_s:8.3f}  {who:<12} {describe(what)}" + (f"\n{'':22} -> {reason}" if reason else ""))


def describe(what: object) -> str:
    """An event, a message or a journal record in a few words."""
    match what:
        case PeerSaid(peer=peer, incarnation=incarnation, message=message):
            return f"{peer}/{incarnation} says {describe_message(message)}"
        case OperatorSaid(request=request):
            return f"operator says {request}"
        case PeerArrived(peer=peer, incarnation=incarnation):
            return f"{peer}/{incarnation} arrives"
        case PeerDropped(peer=peer, incarnation=incarnation):
            return f"{peer}/{incarnation} is dropped"
        case CoordinatorSaid(message=message):
            return f"hears {describe_message(message)}"
        case TrainerSaid(message=message):
            return f"trainer says {describe_message(message)}"
        case Connected(term=term):
            return f"connected, term {term}"
        case TermRaised(term=term):
            return f"term {term}"
        case PlanMade(op=op, members=members, contributors=contributors):
            return f"plan {op} of {','.join(members)}, contributors {','.join(contributors)}"
        case VerdictMade(verdict=verdict):
            return describe_message(verdict)
        case RunDefined(digest=digest):
            return f"the run is defined, start digest {digest}"
        case StateDigest(version=version, digest=digest):
            return f"version {version} has digest {digest}"
        case StopDecided():
            return "the run is to stop"
        case EvictionDecided(peer=peer, for_s=for_s):
            return f"{peer} is evicted" + (f" for {for_s:g} s" if for_s else "")
        case MembersChanged(members=members, started=started, done=done):
            return f"members {','.join(members) or '-'}" + " started" * started + " done" * done
        case VersionLearned(version=version, round=round_, slots=slots):
            return f"the run stands at version {version} after round {round_}{_held(slots)}"
        case LeasesChanged(slots=slots, returned=returned):
            return f"leases change{_held(slots)}" + f", {','.join(returned)} holds none" * bool(returned)
        case str():
            return what
    return type(what).__name__.lower()


def describe_message(message: Message) -> str:
    """A message in a few words."""
    match message:
        case Declare(version=version, pending=pending):
            return f"declare version {version}" + (f", waiting in round {pending.round}" if pending else "")
        case Ready():
            return (
                f"ready round {message.round} version {message.version} digest {message.digest} "
                f"steps {message.steps} norm {message.norm:g}"
            )
        case Reduce(plan=plan):
            weights = " ".join(f"{each.peer}*{each.weight}" for each in plan.contributions)
            return f"reduce {plan.op} of {','.join(plan.members)}: {weights}"
        case Vote(op=op, ok=ok, digest=digest, reason=reason):
            return f"vote {op} " + (f"yes {digest}" if ok else f"no ({reason})")
        case Verdict(op=op, outcome=outcome, version=version, members=members, ends=ends, slots=slots):
            what = f"verdict {op} {outcome}, version {version} of {','.join(members)}"
            return what + ", the last" * ends + _held(slots)
        case Leases(slots=slots, answers=answers):
            return f"leases{_held(slots)}" + f", the answer to wish {answers}" * bool(answers)
        case SlotsWanted(number=number, more=more):
            return f"wish {number}: {more} more data slots"
        case View(members=members, started=started):
            return f"view {','.join(members) or '-'}" + " started" * started
        case CatchUp(version=version, sources=sources, trusted=trusted):
            names = ",".join(source.peer for source in sources) or "nobody yet"
            return f"catch up with version {version} from {names}" + ", by a snapshot" * (not trusted)
        case CaughtUp(version=version, digest=digest):
            return f"caught up version {version} digest {digest}"
        case SnapshotWanted(version=version):
            return f"wants a snapshot, holds version {version}"
        case Serve(version=version, stage=stage):
            return f"serve version {version}" + ", stage it" * stage
        case Probe(targets=targets):
            return f"measure the links to {','.join(sorted(targets))}"
        case Probed(links=links, failed=failed):
            return f"measured {len(links)} links, not {','.join(sorted(failed)) or 'one'}"
        case Reach(targets=targets):
            return f"dial {','.join(sorted(targets))}"
        case Reached(where=where, failed=failed):
            return f"reached {','.join(sorted(where)) or 'nobody'}, not {','.join(sorted(failed)) or 'one'}"
        case Applied(version=version, digest=digest):
            return f"applied version {version} digest {digest}"
        case Abort(op=op, reason=reason):
            return f"abort {op} ({reason})"
        case Freeze(round=number):
            return f"freeze round {number}"
        case AskToLeave(reason=reason):
            return f"ask to leave ({reason})"
        case Leave(reason=reason, done=done):
            return f"leave ({reason})" + ", done" * done
        case Refused(kind=kind, reason=reason) | Ended(kind=kind, reason=reason):
            return f"{type(message).__name__.lower()} {kind}: {reason}"
    return type(message).__name__.lower()


def _held(slots: SlotTable | None) -> str:
    """Who holds which slots; where one is partly read, from where on."""
    if slots is None:
        return ""
    peers = [f"{peer} {' '.join(map(_lease, held))}" for peer, held in slots.leases.items()]
    came_back = f", free: {' '.join(map(_lease, slots.pool))}" if slots.pool else ""
    return f"; slots: {', '.join(peers) or '-'}{came_back}"


def _lease(lease: Lease) -> str:
    at = f"+{lease.at}" if lease.at else ""
    return f"{lease.slot}" + (f"@{lease.epoch}{at}" if lease.epoch or at else "")
