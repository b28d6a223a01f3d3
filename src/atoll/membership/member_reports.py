"""The member machine, half of it: what the training thread says, and what is sent of it to the coordinator. Pure.

The trainer is our own: that it keeps to the phases is asserted.
"""

from __future__ import annotations

from msgspec.structs import replace

from atoll.membership.member_outcome import Outcome, of_version, outcome, send
from atoll.membership.member_state import MemberState, Phase
from atoll.membership.messages import (
    Applied,
    CaughtUp,
    Declare,
    Leave,
    PeerMessage,
    Probed,
    Reached,
    Ready,
    SlotsWanted,
    SnapshotWanted,
    Vote,
)
from atoll.membership.steps import AbortAttempt


def say(state: MemberState, message: PeerMessage) -> Outcome:
    match message:
        case Declare():
            assert state.phase is Phase.CONNECTING, f"declared twice: phase {state.phase}"
            state = replace(
                state,
                phase=Phase.DECLARING,
                declare=message,
                version=message.version,
                round=message.round,
                digest=message.digest,
                version_term=message.version_term,
                slots=message.slots,
            )
            return outcome(state, f"{state.peer} declares version {state.version}", *send(state, message))
        case Ready():
            return _say_ready(state, message)
        case Vote():
            return _say_vote(state, message)
        case Applied():
            assert state.applying is not None, f"nothing to apply in phase {state.phase}"
            assert message.version == state.applying.version, "applied another version than the verdict's"
            phase = Phase.LOCAL if state.phase is Phase.APPLYING else state.phase
            state = replace(
                state,
                phase=phase,
                version=message.version,
                digest=message.digest,
                applying=None,
                slots=of_version(message.version, state.told, state.applying.slots),
            )
            return outcome(state, f"{state.peer} holds version {state.version}", *send(state, message))
        case SlotsWanted(more=more):
            state = replace(state, wanted=message)
            return outcome(state, f"{state.peer} asks for {more} more data slots", *send(state, message))
        case SnapshotWanted():
            return outcome(state, f"{state.peer} asks for a snapshot", *send(state, message))
        case CaughtUp():
            return _say_caught_up(state, message)
        case Probed():
            return outcome(state, f"{state.peer} has measured its links", *send(state, message))
        case Reached():
            return outcome(state, f"{state.peer} knows whom it reaches", *send(state, message))
        case Leave():
            aborts = (AbortAttempt(state.op, message.reason),) if state.phase is Phase.REDUCING else ()
            over = replace(state, phase=Phase.OVER)
            return outcome(over, f"{state.peer} leaves: {message.reason}", *aborts, *send(state, message))
        case _:
            raise AssertionError(f"not for the training thread to say: {message!r}")


def _say_ready(state: MemberState, message: Ready) -> Outcome:
    """The round is the coordinator's to number: a round skipped meanwhile makes this `ready` the next one's. What it
    says of the round after its own holds no more then.
    """
    if state.phase is Phase.CATCHING_UP:
        return outcome(state, f"{state.peer} was ready, but has to catch up first")
    assert state.phase is Phase.LOCAL, f"ready in phase {state.phase}"
    assert message.version == state.version, f"ready on version {message.version}, holds {state.version}"
    number = state.round + 1
    round_steps = message.round_steps if message.round == number else 0
    pending = replace(message, round=number, round_steps=round_steps)
    state = replace(state, phase=Phase.READY, pending=pending, digest=message.digest)
    if state.declare is not None:
        state = replace(state, declare=replace(state.declare, wish=message.wish))
    return outcome(state, f"{state.peer} is ready for round {pending.round}", *send(state, pending))


def _say_vote(state: MemberState, message: Vote) -> Outcome:
    if state.phase is not Phase.REDUCING or message.op != state.op:
        return outcome(state, f"the vote on {message.op} is late: the attempt was given up already")
    state = replace(state, phase=Phase.VOTED, vote=message)
    answer = "yes" if message.ok else f"no ({message.reason})"
    return outcome(state, f"{state.peer} votes {answer} on {message.op}", *send(state, message))


def _say_caught_up(state: MemberState, message: CaughtUp) -> Outcome:
    assert state.phase is Phase.CATCHING_UP, f"caught up in phase {state.phase}"
    state = replace(
        state,
        version=message.version,
        version_term=state.term,
        round=message.round,
        digest=message.digest,
        slots=of_version(message.version, state.told, None),
    )
    return outcome(state, f"{state.peer} has caught up with version {message.version}", *send(state, message))
