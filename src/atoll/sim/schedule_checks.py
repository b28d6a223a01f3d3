"""The invariants of the protocol, checked while a schedule runs: what is journaled, sent, applied, and when
it ends. Those of links are in `schedule_links`, those of the data in `schedule_data`.

`History` knows the truth: what every process really said, and the chain of states that the journaled verdicts
define. It compares the machines' doings with that, not with what the machines believe.
"""

from __future__ import annotations

import math

from atoll import events
from atoll.membership.coordinator_state import CoordinatorState
from atoll.membership.messages import Ready, Reduce, Verdict, View, Vote
from atoll.membership.steps import (
    CloseConnection,
    CoordinatorEvent,
    Emit,
    Journal,
    JournalRecord,
    LeasesChanged,
    PeerArrived,
    PeerSaid,
    PlanMade,
    Send,
    StateDigest,
    Step,
    TermRaised,
    Tick,
    VerdictMade,
    VersionLearned,
)
from atoll.sim.schedule_arithmetic import next_digest, steps_of_round
from atoll.sim.schedule_data import SlotHistory
from atoll.sim.schedule_links import LinkHistory
from atoll.values import OpId, Plan


class ViolationError(AssertionError):
    """An invariant is broken; the message names it."""


def require(holds: bool, invariant: str) -> None:
    if not holds:
        raise ViolationError(invariant)


class History:
    """What really happened in one schedule. Every method raises ViolationError for what must not be."""

    def __init__(self, min_peers: int, first_digest: str) -> None:
        self._min_peers = min_peers
        self._terms: list[int] = []
        self._ops: list[OpId] = []
        self._plans: dict[OpId, Plan] = {}
        self._planned: dict[tuple[str, OpId], str] = {}
        self._readies: dict[tuple[str, str, int, int], Ready] = {}
        self._votes: dict[tuple[str, OpId], Vote] = {}
        self._first_digest = first_digest
        self._bits = {0: first_digest}
        self._states = {0: first_digest}
        self._agreed: dict[int, str] = {}
        self._journaled: list[Verdict] = []
        self._made: dict[OpId, str] = {}
        self._ever = {(0, 0, first_digest): 0}
        self._round = self._step = 0
        self._newest: dict[str, str] = {}
        self._replaced: set[tuple[str, str]] = set()
        self._links = LinkHistory(require)
        self.version = 0
        self._slots = SlotHistory(require)
        self._told: dict[tuple[str, int, int], Ready] = {}

    # ---- the truth about peers ---------------------------------------------------------------------------

    def peer_is_ready(self, peer: str, incarnation: str, ready: Ready) -> None:
        self._readies[peer, incarnation, ready.round, ready.version] = ready
        self._told[peer, ready.round, ready.version] = ready

    def peer_votes(self, peer: str, vote: Vote) -> None:
        self._votes[peer, vote.op] = vote

    def peer_applies(self, peer: str, version: int, verdict: Verdict) -> None:
        """A peer is about to step from `version` because of `verdict`."""
        require(verdict in self._journaled, f"{peer} steps on a verdict that is not journaled")
        require(
            verdict.version == version + 1,
            f"{peer} at version {version} applies {verdict.version}: twice or a gap",
        )
        vote = self._votes.get((peer, verdict.op))
        holds = vote is not None and vote.ok and vote.digest == verdict.digest
        require(holds, f"{peer} steps on {verdict.op} without the result it is about")

    def peer_applied(self, peer: str, verdict: Verdict, digest: str) -> None:
        """A peer whose bits never flipped has taken its outer step."""
        require(
            self._made[verdict.op] == digest,
            f"{peer} took another outer step to version {verdict.version} than the run",
        )

    def peer_caught_up(self, peer: str, version: int, digest: str) -> None:
        """A peer fetched this version's state. Bits that flipped unseen in a majority are the run's."""
        require(
            any((version, digest) == (known, bits) for known, _, bits in self._ever),
            f"{peer} fetched other bits of version {version} than the run's",
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
            self._check_arrival(event, step)
        elif isinstance(event, PeerSaid) and (record := step.state.peers.get(event.peer)) and record.member:
            self._newest[event.peer] = record.incarnation
        self._check_everybody_voted(before, step)
        self._links.check_step(before, event, step)
        self._slots.check_step(step.effects, step.state)

    def _check_arrival(self, event: PeerArrived, step: Step[CoordinatorState]) -> None:
        """A process that was a member in this term and lost its name to a newer one does not get it back."""
        process = (event.peer, event.incarnation)
        after = step.state.peers.get(event.peer)
        if process in self._replaced:
            require(
                after is None or after.incarnation != event.incarnation,
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
                case Emit(
                    event=events.PeerLost(peer=peer)
                    | events.PeerLeft(peer=peer)
                    | events.PeerEvicted(peer=peer)
                ):
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
                self._links.forget()
            case PlanMade(op=op):
                require(all(op > other for other in self._ops), f"op id {op} is not above all earlier ones")
                self._ops.append(op)
                require(len(set(record.members)) == len(record.members), f"{op} has a member twice")
            case VersionLearned():
                self._version_is_learned(record)
                self._slots.learned(record)
            case LeasesChanged():
                self._slots.changed(record)
            case StateDigest(version=version, digest=digest):
                self._agreed[version] = digest
                self._states[version] = digest  # the majority's; who knows better has other bits than the run
                self._ever[version, self._round, digest] = self._step
            case VerdictMade(verdict=verdict):
                self._verdict_is_made(verdict)

    def journal_is_lost(self) -> None:
        """All begins anew, unless a version is learned; what peers hold and have heard stays."""
        self._terms.clear()
        self._ops.clear()
        self._plans.clear()
        self._stand_at(0, 0, self._first_digest)
        self._slots.lost()

    def _version_is_learned(self, record: VersionLearned) -> None:
        """The run goes on from a version that was committed; what came after it is no part of the history."""
        bits = [
            bits
            for version, round_, bits in self._ever
            if (version, round_) == (record.version, record.round) and record.digest in ("", bits)
        ]
        require(bool(bits), f"the run never stood at version {record.version} after round {record.round}")
        self._stand_at(record.version, record.round, bits[-1])

    def _stand_at(self, version: int, round_: int, digest: str) -> None:
        self._states, self._agreed, self._bits = {version: digest}, {}, {}
        self._round, self._step, self.version = round_, self._ever[version, round_, digest], version

    def _verdict_is_made(self, verdict: Verdict) -> None:
        op = verdict.op
        self._journaled.append(verdict)
        require(op.round > self._round, f"round {op.round} has two verdicts")
        require(op.round == self._round + 1, f"the verdict of round {op.round} skips a round")
        step = self._step
        self._round, self._step = op.round, step + steps_of_round(step)
        self._steps_are_named(verdict)
        self._slots.concluded(verdict, self._were_ready(verdict))
        if verdict.outcome == "skipped":
            require(verdict.version == self.version, f"skipping round {op.round} changed the version")
            self._ever[self.version, op.round, self._states[self.version]] = self._step
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
        self._states[verdict.version] = self._made[op] = next_digest(
            self._states[self.version], step, verdict.contributions, verdict.digest
        )
        self.version = verdict.version
        self._ever[self.version, op.round, self._states[self.version]] = self._step

    def _were_ready(self, verdict: Verdict) -> dict[str, Ready]:
        """What those were ready with who took part: the process that was planned, or whoever spoke last."""
        names = {*verdict.members, *(each.peer for each in verdict.contributions)}
        version = verdict.version - (verdict.outcome == "committed")
        found = {}
        for peer in sorted(names):
            incarnation = self._planned.get((peer, verdict.op), "")
            ready = self._readies.get((peer, incarnation, verdict.op.round, version))
            ready = ready or self._told.get((peer, verdict.op.round, version))
            if ready is not None:
                found[peer] = ready
        return found

    def _steps_are_named(self, verdict: Verdict) -> None:
        """Steps by speed: for members only, at least one, and the fastest makes the round's own number."""
        named = verdict.inner_steps
        require(set(named) <= set(verdict.members), f"{verdict.op} names steps of a peer that is no member")
        if named:
            fits = min(named.values()) >= 1 and max(named.values()) == steps_of_round(self._step)
            require(
                fits,
                f"{verdict.op} names {named}, round {verdict.op.round + 1} has {steps_of_round(self._step)}",
            )

    def sent(self, peer: str, incarnation: str, send: Send) -> None:
        """The coordinator sends to the process (peer, incarnation)."""
        match send.message:
            case Reduce(plan=plan):
                self._plan_is_sent(peer, incarnation, plan)
            case Verdict() as verdict:
                require(
                    verdict in self._journaled, f"a verdict on {verdict.op} is sent before it is journaled"
                )
            case View(members=members):
                require(len(set(members)) == len(members), "a view names a member twice")

    def _plan_is_sent(self, peer: str, incarnation: str, plan: Plan) -> None:
        require(plan.op in self._ops, f"{plan.op} is sent before it is journaled")
        first = self._plans.setdefault(plan.op, plan)
        self._planned[peer, plan.op] = incarnation
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
