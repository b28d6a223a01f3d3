"""The words of member scenarios."""

from __future__ import annotations

from typing import Any

from atoll.membership import member
from atoll.membership.leases import Lease, SlotTable
from atoll.membership.messages import (
    Abort,
    Applied,
    AskToLeave,
    CatchUp,
    CaughtUp,
    CoordinatorMessage,
    Declare,
    Ended,
    Freeze,
    HeartbeatAck,
    Leases,
    Leave,
    PeerMessage,
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
from atoll.membership.settings import Timeouts
from atoll.membership.steps import (
    AbortAttempt,
    Connected,
    CoordinatorSaid,
    Disconnected,
    Effect,
    Fail,
    MemberEvent,
    Order,
    RequestFreeze,
    RequestLeave,
    Resume,
    Send,
    ServeOthers,
    Step,
    TellLeases,
    Tick,
    TrainerSaid,
)
from atoll.sim.schedule_transcript import describe_message
from atoll.values import Contribution, OpId, Plan, Source, TransferStats


class MemberScript:
    """One peer "a" among "a" and "b". Ops are written TERM/ROUND/ATTEMPT."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._timeouts = Timeouts()
        self._state = member.start("a", self._timeouts, 0.0).state

    def run(self, command: str, words: list[str]) -> list[str]:
        names = [word for word in words if "=" not in word]
        options = dict(word.split("=", 1) for word in words if "=" in word)
        return getattr(self, f"do_{command}")(names, options)

    # ---- the connection and time -------------------------------------------------------------------------

    def do_connected(self, names: list[str], options: dict[str, str]) -> list[str]:
        return self._feed(Connected(int(names[0])))

    def do_disconnected(self, names: list[str], options: dict[str, str]) -> list[str]:
        return self._feed(Disconnected())

    def do_wait(self, names: list[str], options: dict[str, str]) -> list[str]:
        """Let seconds pass; `acks` come from the coordinator if it says so."""
        told: list[str] = []
        for _ in range(round(float(names[0]) * 2)):
            self._now_s += 0.5
            if "acks" in names:
                self._feed(CoordinatorSaid(HeartbeatAck(term=1)))
            told = self._feed(Tick())
        return told

    def do_pause(self, names: list[str], options: dict[str, str]) -> list[str]:
        self._now_s += float(names[0])
        return self._feed(Tick())

    # ---- the training thread -----------------------------------------------------------------------------

    def do_declare(self, names: list[str], options: dict[str, str]) -> list[str]:
        return self._say(Declare(layout=(), settings={}, ranks=(), version=0, round=0, digest="d0", step=0))

    def do_ready(self, names: list[str], options: dict[str, str]) -> list[str]:
        return self._say(Ready(0, self._state.version, f"d{self._state.version}", 100, 10, 1.0, True))

    def do_vote(self, names: list[str], options: dict[str, str]) -> list[str]:
        ok = "yes" in options
        reason = options.get("no", "")
        return self._say(Vote(_op(names[0]), ok, options.get("yes", ""), (), reason, TransferStats()))

    def do_applied(self, names: list[str], options: dict[str, str]) -> list[str]:
        return self._say(Applied(int(names[0]), f"d{names[0]}"))

    def do_caught(self, names: list[str], options: dict[str, str]) -> list[str]:
        """`caught VERSION ROUND`."""
        version, number = map(int, names)
        return self._say(CaughtUp(version, number, f"d{version}", 10 * number))

    def do_snapshot(self, names: list[str], options: dict[str, str]) -> list[str]:
        return self._say(SnapshotWanted(self._state.version))

    def do_wants(self, names: list[str], options: dict[str, str]) -> list[str]:
        """`wants NUMBER`."""
        return self._say(SlotsWanted(int(names[0]), 2))

    def do_leave(self, names: list[str], options: dict[str, str]) -> list[str]:
        return self._say(Leave("goodbye", done=True))

    # ---- the coordinator ---------------------------------------------------------------------------------

    def do_view(self, names: list[str], options: dict[str, str]) -> list[str]:
        number, version = int(options.get("round", 0)), int(options.get("version", 0))
        return self._hear(View(1, version, number, ("a", "b"), "started" in names, "the members are a, b"))

    def do_reduce(self, names: list[str], options: dict[str, str]) -> list[str]:
        both = ("a", "b")
        plan = Plan(
            op=_op(names[0]),
            base_version=int(options.get("version", self._state.version)),
            members=both,
            contributions=tuple(Contribution(peer, 1) for peer in both),
            ranks={},
            lanes=(),
            codec="fp32",
            deadline_s=60.0,
        )
        return self._hear(Reduce(plan))

    def do_abort(self, names: list[str], options: dict[str, str]) -> list[str]:
        return self._hear(Abort(_op(names[0]), "b is lost"))

    def do_freeze(self, names: list[str], options: dict[str, str]) -> list[str]:
        return self._hear(Freeze(term=1, round=int(names[0])))

    def do_verdict(self, names: list[str], options: dict[str, str]) -> list[str]:
        """`verdict OP committed RESULT` or `verdict OP skipped`, ending the run with `ends`."""
        op, outcome, *rest = names
        version = self._state.version + (outcome == "committed")
        digest = rest[0] if outcome == "committed" else ""
        verdict = Verdict(
            op=_op(op),
            outcome=outcome,
            version=int(options.get("version", version)),
            digest=digest,
            contributions=(),
            members=("a", "b"),
            left_out={},
            reason=f"the round is {outcome}",
            ends="ends" in rest,
            slots=_table(options, version),
        )
        return self._hear(verdict)

    def do_catchup(self, names: list[str], options: dict[str, str]) -> list[str]:
        """`catchup VERSION ROUND`, with `untrusted` if what the peer holds is wrong."""
        version, number, *rest = names
        source = Source("b", "host", 2)
        trusted = "untrusted" not in rest
        term = int(options.get("term", 1))
        order = CatchUp(term, int(version), int(number), {}, (source,), trusted, "the run went on without a")
        return self._hear(order)

    def do_serve(self, names: list[str], options: dict[str, str]) -> list[str]:
        return self._hear(Serve(int(names[0]), "stage" in names))

    def do_leases(self, names: list[str], options: dict[str, str]) -> list[str]:
        """`leases holds=1,2 stamp=3`, `answers=N`."""
        table = _table(options, int(options.get("version", self._state.version)))
        assert table is not None
        return self._hear(Leases(table, int(options.get("answers", 0))))

    def do_ended(self, names: list[str], options: dict[str, str]) -> list[str]:
        return self._hear(Ended(names[0], "the run goes on without a"))

    def do_refused(self, names: list[str], options: dict[str, str]) -> list[str]:
        return self._hear(Refused(names[0], "a differs"))

    def do_ask_to_leave(self, names: list[str], options: dict[str, str]) -> list[str]:
        return self._hear(AskToLeave("asked to leave by an operator"))

    # ---- the machine -------------------------------------------------------------------------------------

    def _say(self, message: PeerMessage) -> list[str]:
        return self._feed(TrainerSaid(message))

    def _hear(self, message: CoordinatorMessage) -> list[str]:
        return self._feed(CoordinatorSaid(message))

    def _feed(self, event: MemberEvent) -> list[str]:
        return self._take(member.step(self._state, event, self._now_s))

    def _take(self, step: Step[Any]) -> list[str]:
        self._state = step.state
        return [f"-> {step.reason}", *map(_told, step.effects)]


def _table(options: dict[str, str], version: int) -> SlotTable | None:
    """What "a" holds: `holds=1,2 stamp=3`."""
    if "holds" not in options:
        return None
    held = tuple(Lease(int(slot)) for slot in options["holds"].split(",") if slot)
    stamp = (1, int(options.get("stamp", 1)))
    return SlotTable(count=9, seed=0, stamp=stamp, version=version, leases={"a": held})


def _op(text: str) -> OpId:
    term, number, attempt = map(int, text.split("/"))
    return OpId(term=term, round=number, attempt=attempt)


def _told(effect: Effect) -> str:
    match effect:
        case Send(message=message):
            return f"says {describe_message(message)}"
        case Order(order=Plan() as plan):
            return f"order: reduce {plan.op}"
        case Order(order=Verdict() as verdict):
            return f"order: obey {describe_message(verdict)}"
        case Order(order=CatchUp() as order):
            return f"order: {describe_message(order)}"
        case TellLeases(slots=slots, answers=answers):
            held = " ".join(str(lease.slot) for lease in slots.held("a"))
            return f"trainer: it holds the data slots {held}" + f", as it wished ({answers})" * bool(answers)
        case Resume():
            return "trainer: it is a member"
        case ServeOthers(version=version, stage=stage):
            return f"sidecar: serve version {version}" + ", stage it" * stage
        case AbortAttempt(op=op):
            return f"engine: abort {op}"
        case RequestFreeze(round=number):
            return f"trainer: freeze round {number}"
        case RequestLeave():
            return "trainer: leave"
        case Fail(kind=kind):
            return f"fail: {kind}"
    raise AssertionError(effect)
