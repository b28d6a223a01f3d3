"""The invariants of the protocol, checked while a schedule runs: what is journaled, sent, applied, and when
it ends.

`History` knows the truth: what every process really said, and the chain of states that the journaled verdicts
define. It compares the machines' doings with that, not with what the machines believe.
"""

from __future__ import annotations

import math
import zlib

from atoll import events
from atoll.membership.coordinator_state import CoordinatorState
from atoll.membership.messages import Ready, Reduce, Verdict, View, Vote
from atoll.membership.steps import (
    CloseConnection,
    CoordinatorEvent,
    Emit,
    Journal,
    JournalRecord,
    PeerArrived,
    PeerSaid,
    PlanMade,
    Send,
    Step,
    TermRaised,
    Tick,
    VerdictMade,
)
from atoll.values import Contribution, OpId, Plan


class ViolationError(AssertionError):
    """An invariant is broken; the message names it."""


def require(holds: bool, invariant: str) -> None:
    if not holds:
        raise ViolationError(invariant)


def next_digest(digest: str, step: int, contributions: tuple[Contribution, ...], result: str) -> str:
    """The state after a committed round that began at the run's `step`: a hash chain over what was committed.

    A real outer step depends on `step` through its schedule (learning rate, momentum, length), hence this one.
    """
    told = f"{digest}|{step}|{result}|{[(each.peer, each.weight) for each in contributions]}"
    return f"{zlib.crc32(told.encode()):08x}"


def steps_of_round(step: int) -> int:
    """How long the round is that begins at the run's `step`: a schedule whose stages differ in length."""
    return 2 if step < 6 else 5


class History:
    """What really happened in one schedule. Every method raises ViolationError for what must not be."""

    def __init__(self, min_peers: int, first_digest: str) -> None:
        self._min_peers = min_peers
        self._terms: list[int] = []
        self._ops: list[OpId] = []
        self._plans: dict[OpId, Plan] = {}
        self._verdicts: dict[int, Verdict] = {}
        self._readies: dict[tuple[str, str, int, int], Ready] = {}
        self._votes: dict[tuple[str, OpId], Vote] = {}
        self._bits = {0: first_digest}
        self._states = {0: first_digest}
        self._step = 0
        self._newest: dict[str, str] = {}
        self._replaced: set[tuple[str, str]] = set()
        self.version = 0

    # ---- the truth about peers ---------------------------------------------------------------------------

    def peer_is_ready(self, peer: str, incarnation: str, ready: Ready) -> None:
        self._readies[peer, incarnation, ready.round, ready.version] = ready

    def peer_votes(self, peer: str, vote: Vote) -> None:
        self._votes[peer, vote.op] = vote

    def peer_applies(self, peer: str, version: int, verdict: Verdict) -> None:
        """A peer is about to step from `version` because of `verdict`."""
        require(
            self._verdicts.get(verdict.op.round) == verdict,
            f"{peer} steps on a verdict that is not journaled",
        )
        require(
            verdict.version == version + 1,
            f"{peer} at version {version} applies {verdict.version}: twice or a gap",
        )
        vote = self._votes.get((peer, verdict.op))
        holds = vote is not None and vote.ok and vote.digest == verdict.digest
        require(holds, f"{peer} steps on {verdict.op} without the result it is about")

    def peer_applied(self, peer: str, version: int, digest: str) -> None:
        """A peer whose bits never flipped has taken its outer step."""
        require(
            self._states[version] == digest,
            f"{peer} took another outer step to version {version} than the run",
        )

    # ---- what the coordinator does -----------------------------------------------------------------------

    def check_step(
        self, before: CoordinatorState, event: CoordinatorEvent, step: Step[CoordinatorState]
    ) -> None:
        """Checks on a decision as a whole; `journaled` and `sent` check its effects one by one."""
        require(bool(step.reason) or isinstance(event, Tick), "a step gives its reason")
        if isinstance(event, PeerSaid):
            record = before.peers.get(event.peer)
            if record is None or record.incarnation != event.incarnation:
                only_closes = all(isinstance(effect, CloseConnection) for effect in step.effects)
                require(
                    only_closes and before.peers.keys() == step.state.peers.keys(),
                    f"an old process of {event.peer} has a voice: two members with one id",
                )
        if isinstance(event, PeerArrived):
            self._check_arrival(before, event, step)
        elif isinstance(event, PeerSaid) and (record := step.state.peers.get(event.peer)) and record.member:
            self._newest[event.peer] = record.incarnation
        self._check_everybody_voted(before, step)

    def _check_arrival(
        self, before: CoordinatorState, event: PeerArrived, step: Step[CoordinatorState]
    ) -> None:
        """A process that was a member in this term and lost its name to a newer one does not get it back."""
        process, record = (event.peer, event.incarnation), before.peers.get(event.peer)
        after = step.state.peers.get(event.peer)
        if process in self._replaced:
            require(
                before.peers.keys() == step.state.peers.keys() and after == record,
                f"an old process of {event.peer} takes its name back: two members with one id",
            )
            return
        newest = self._newest.get(event.peer)
        accepted = after is not None and after.incarnation == event.incarnation
        if accepted and newest is not None and newest != event.incarnation:
            self._replaced.add((event.peer, newest))

    def _check_everybody_voted(self, before: CoordinatorState, step: Step[CoordinatorState]) -> None:
        """A commit needs the yes of every member of the plan that was not lost before, or in this very
        step.
        """
        gone: set[str] = set()
        for effect in step.effects:
            match effect:
                case Emit(event=events.PeerLost(peer=peer) | events.PeerLeft(peer=peer)):
                    gone.add(peer)
                case Journal(record=VerdictMade(verdict=verdict)) if verdict.outcome == "committed":
                    attempt = before.round.attempt
                    planned = attempt.incarnations if attempt else {}
                    for peer, incarnation in planned.items():
                        record = before.peers.get(peer)
                        lives = (
                            record
                            and record.member
                            and record.incarnation == incarnation
                            and peer not in gone
                        )
                        require(
                            not lives or peer in verdict.members,
                            f"{verdict.op} is committed without the vote of {peer}, which lives",
                        )

    def journaled(self, record: JournalRecord) -> None:
        match record:
            case TermRaised(term=term):
                require(all(term > other for other in self._terms), f"term {term} was used before")
                self._terms.append(term)
                self._newest.clear()  # a new coordinator has to take everybody for new
                self._replaced.clear()
            case PlanMade(op=op):
                require(all(op > other for other in self._ops), f"op id {op} is not above all earlier ones")
                self._ops.append(op)
                require(len(set(record.members)) == len(record.members), f"{op} has a member twice")
            case VerdictMade(verdict=verdict):
                self._verdict_is_made(verdict)

    def _verdict_is_made(self, verdict: Verdict) -> None:
        op = verdict.op
        require(op.round not in self._verdicts, f"round {op.round} has two verdicts")
        require(op.round == len(self._verdicts) + 1, f"the verdict of round {op.round} skips a round")
        self._verdicts[op.round] = verdict
        step = self._step
        self._step += steps_of_round(step)
        if verdict.outcome == "skipped":
            require(verdict.version == self.version, f"skipping round {op.round} changed the version")
            return
        require(
            verdict.version == self.version + 1, f"version {verdict.version} does not follow {self.version}"
        )
        require(len(verdict.members) >= self._min_peers, f"{op} is committed by fewer than min_peers")
        plan = self._plans.get(op)
        require(
            plan is not None and plan.contributions == verdict.contributions, f"{op}: not the plan's weights"
        )
        for peer in verdict.members:
            vote = self._votes.get((peer, op))
            said = vote is not None and vote.ok and vote.digest == verdict.digest
            require(said, f"{op} is committed although {peer} never voted yes for this result")
        self._states[verdict.version] = next_digest(
            self._states[self.version], step, verdict.contributions, verdict.digest
        )
        self.version = verdict.version

    def sent(self, peer: str, incarnation: str, send: Send) -> None:
        """The coordinator sends to the process (peer, incarnation)."""
        match send.message:
            case Reduce(plan=plan):
                self._plan_is_sent(peer, incarnation, plan)
            case Verdict() as verdict:
                known = self._verdicts.get(verdict.op.round) == verdict
                require(known, f"a verdict on {verdict.op} is sent before it is journaled")
            case View(members=members):
                require(len(set(members)) == len(members), "a view names a member twice")

    def _plan_is_sent(self, peer: str, incarnation: str, plan: Plan) -> None:
        require(plan.op in self._ops, f"{plan.op} is sent before it is journaled")
        first = self._plans.setdefault(plan.op, plan)
        require(first == plan, f"{plan.op} has different plans for different members")
        weights = [each.weight for each in plan.contributions]
        require(bool(weights) and min(weights) > 0, f"{plan.op}: a contributor of weight 0 is not absent")
        require(math.gcd(*weights) == 1, f"{plan.op}: weights {weights} have a common divisor")
        ready = self._readies.get((peer, incarnation, plan.op.round, plan.base_version))
        require(
            ready is not None,
            f"{peer} is planned in {plan.op} but is not ready on version {plan.base_version}",
        )
        assert ready is not None
        # A bit that flips in a lone peer cannot be seen; two members on different bits always can.
        agreed = self._bits.setdefault(plan.base_version, ready.digest)
        require(
            agreed == ready.digest, f"{peer} is planned in {plan.op} and stands on other bits than others"
        )
        if any(each.peer == peer for each in plan.contributions):
            require(ready.steps > 0 and ready.tokens > 0, f"{peer} contributes to {plan.op} without work")
            require(ready.finite, f"{peer} contributes to {plan.op} what is not finite")
