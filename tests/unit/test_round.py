"""The round transaction against scripted orders: what it commits, and what it must never commit."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from atoll import kernels
from atoll.clock import ManualClock
from atoll.comm.faulty import FailAttempt, Faulty
from atoll.comm.loopback import LoopbackCommunicator, LoopbackHub
from atoll.diloco.outer import OuterState
from atoll.diloco.round import Rounds
from atoll.diloco.schedule import OuterSchedule
from atoll.diloco.work import Work
from atoll.errors import Diverged, QuorumLost
from atoll.membership.messages import Applied, Ready, Verdict, Vote
from atoll.plan.grid import Grid
from atoll.values import Contribution, Lane, OpId, Plan, Range, RankInfo

GRID = Grid.of([5])
SCHEDULE = OuterSchedule.of([(6, 2, None, None), (0, 4, None, None)], 0.7, 0.9)
Order = Plan | Verdict | Callable[[], Verdict] | None


class Script:
    """A member whose coordinator says what the test wrote down; a callable is asked when its turn comes."""

    def __init__(self, *orders: Order) -> None:
        self.orders = list(orders)
        self.said: list[object] = []
        self.clock = ManualClock()

    def ready(self, message: Ready) -> None:
        self.said.append(message)

    def vote(self, message: Vote) -> None:
        self.said.append(message)

    def applied(self, message: Applied) -> None:
        self.said.append(message)

    def next_order(self, timeout_s: float) -> Plan | Verdict | None:
        self.clock.advance(timeout_s)
        order = self.orders.pop(0) if self.orders else None
        return order() if callable(order) else order

    def last_vote(self) -> Vote:
        return next(message for message in reversed(self.said) if isinstance(message, Vote))


def plan(round_: int, attempt: int = 0, codec: str = "fp32") -> Plan:
    return Plan(
        op=OpId(1, round_, 0, attempt),
        base_version=0,
        members=("a",),
        contributions=(Contribution("a", 1),),
        ranks={"a": (RankInfo("", 0, (Range(0, 5),)),)},
        lanes=(Lane("a"),),
        codec=codec,
        deadline_s=5.0,
    )


def verdict(
    op: OpId, digest: str = "", *, outcome: str = "committed", version: int = 1, **more: object
) -> Verdict:
    values = {
        "contributions": (Contribution("a", 1),),
        "members": ("a",),
        "left_out": {},
        "reason": "said so",
    } | more
    return Verdict(op=op, outcome=outcome, version=version, digest=digest, **values)  # type: ignore[arg-type]


def rounds(
    script: Script, state: OuterState, comm: object = None, *, codec: str = "fp32", beta: float = 0.0
) -> Rounds:
    return Rounds(
        peer="a",
        member=script,
        comm=comm or LoopbackCommunicator(LoopbackHub(), "a"),  # type: ignore[arg-type]
        state=state,
        schedule=SCHEDULE,
        grid=GRID,
        codec=codec,
        clock=script.clock,
        patience_s=10.0,
        beta=beta,
    )


def fresh() -> OuterState:
    return OuterState(np.zeros(5, dtype=np.float32))


ONES = np.ones(5, dtype=np.float32)
UNEVEN = np.asarray([1, 2, 3, 40, 50], dtype=np.float32)
WORK = Work(steps=2, tokens=2)


def test_a_committed_round_takes_the_outer_step_of_its_stage() -> None:
    script, state = Script(), fresh()
    script.orders = [plan(1), lambda: verdict(OpId(1, 1, 0, 0), script.last_vote().digest)]
    report = rounds(script, state).run(ONES, WORK)
    assert report.committed
    assert state.anchor.tolist() == [-1.0] * 5  # the first stage averages
    assert (state.version, state.round, state.step) == (1, 1, 2)
    assert isinstance(script.said[-1], Applied)
    assert script.said[-1].digest == state.digest()


def test_an_attempt_that_fails_leaves_nothing_behind() -> None:
    script, state = Script(), fresh()
    comm = Faulty(LoopbackCommunicator(LoopbackHub(), "a"), {OpId(1, 1, 0, 0): FailAttempt((), "planned")})
    script.orders = [plan(1), plan(1, 1), lambda: verdict(OpId(1, 1, 0, 1), script.last_vote().digest)]
    report = rounds(script, state, comm).run(ONES, WORK)
    assert comm.fired == [OpId(1, 1, 0, 0)]
    assert [m.ok for m in script.said if isinstance(m, Vote)] == [False, True]
    assert (report.attempts, state.version) == (2, 1)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda script: verdict(OpId(1, 1, 0, 0), "0" * 32),  # other bytes than were voted for
        lambda script: verdict(
            OpId(1, 1, 0, 7), script.last_vote().digest
        ),  # an attempt that this peer was not in
    ],
)
def test_a_verdict_about_another_result_is_never_applied(wrong: Callable[[Script], Verdict]) -> None:
    script, state = Script(), fresh()
    script.orders = [plan(1), lambda: wrong(script)]
    with pytest.raises(Diverged, match="holds another result"):
        rounds(script, state).run(ONES, WORK)
    assert state.version == 0
    assert not state.anchor.any()


def test_no_verdict_is_no_step() -> None:
    script, state = Script(plan(1)), fresh()
    with pytest.raises(QuorumLost, match="no verdict within 10 s"):
        rounds(script, state).run(ONES, WORK)
    assert state.version == 0
    assert not state.anchor.any()


def test_rounds_that_were_skipped_unheard_move_the_runs_step() -> None:
    """Two peers, one of which trained on while rounds 1 to 3 were skipped, end with the same step and the same bits."""
    behind, aware = fresh(), fresh()
    for state in (behind, aware):
        script = Script()
        script.orders = [plan(4), lambda script=script: verdict(OpId(1, 4, 0, 0), script.last_vote().digest)]
        if state is aware:
            skips = [verdict(OpId(1, r), outcome="skipped", version=0) for r in (1, 2, 3)]
            for skip in skips:
                rounds(Script(skip), state).run(ONES, WORK)
        rounds(script, state).run(ONES, WORK)
    assert (behind.step, behind.round) == (aware.step, aware.round) == (2 + 2 + 2 + 4, 4)
    assert behind.digest() == aware.digest()
    assert behind.anchor[0] == pytest.approx(-0.7 * 1.9)  # the outer step of the last stage, not of the first


def test_an_update_that_is_not_finite_is_said_so() -> None:
    script = Script(verdict(OpId(1, 1), outcome="skipped", version=0, left_out={"a": "not finite"}))
    report = rounds(script, fresh()).run(np.full(5, np.nan, dtype=np.float32), WORK)
    assert isinstance(script.said[0], Ready)
    assert not script.said[0].finite
    assert report.left_out == "not finite"


def test_weights_that_overflow_end_the_run() -> None:
    script, state = Script(), OuterState(np.full(5, 3e38, dtype=np.float32))
    script.orders = [plan(1), lambda: verdict(OpId(1, 1, 0, 0), script.last_vote().digest)]
    with pytest.raises(Diverged, match="version 1 are not finite"):
        rounds(script, state).run(np.full(5, -3e38, dtype=np.float32), WORK)
    assert not np.isfinite(kernels.squared_norm(state.anchor))


# ---- the update's memory: it becomes the mean's, and not before ----


def test_a_committed_mean_takes_the_place_of_the_update() -> None:
    script, state = Script(), fresh()
    script.orders = [plan(1, 0, "int8"), lambda: verdict(OpId(1, 1, 0, 0), script.last_vote().digest)]
    delta = UNEVEN.copy()
    assert rounds(script, state, codec="int8").run(delta, WORK).committed
    assert delta.tolist() == (-state.anchor).tolist(), "the first stage averages, and this is the only peer"
    assert delta.tolist() != UNEVEN.tolist()


def test_while_an_update_may_be_sent_again_it_stays_as_it_was() -> None:
    script, state = Script(), fresh()
    delta, seen = UNEVEN.copy(), []

    def aborted() -> Verdict:
        seen.append(delta.tolist())
        return verdict(OpId(1, 1), outcome="skipped", version=0)

    comm = Faulty(LoopbackCommunicator(LoopbackHub(), "a"), {OpId(1, 1, 0, 0): FailAttempt((), "planned")})
    one = rounds(script, state, comm, codec="int8")
    script.orders = [plan(1, 0, "int8"), plan(1, 1, "int8"), aborted]
    assert not one.run(delta, WORK).committed
    assert [m.ok for m in script.said if isinstance(m, Vote)] == [False, True]
    assert seen == [UNEVEN.tolist()]
    assert delta.tolist() == UNEVEN.tolist()


# ---- error feedback: the residual is part of the transaction ----


def fed(script: Script, state: OuterState) -> Rounds:
    """Rounds under stat2, which can not tell 1, 2 and 3 apart, and owes the whole difference."""
    return rounds(script, state, codec="stat2", beta=1.0)


def owed(one: Rounds) -> list[float]:
    assert one.feedback.residual is not None
    return one.feedback.residual.tolist()


def test_what_a_committed_contribution_dropped_is_owed() -> None:
    script, state = Script(), fresh()
    one = fed(script, state)
    script.orders = [plan(1, 0, "stat2"), lambda: verdict(OpId(1, 1, 0, 0), script.last_vote().digest)]
    delta = UNEVEN.copy()
    assert one.run(delta, WORK).committed
    assert delta.tolist() == UNEVEN.tolist(), "what is owed is reckoned from it"
    sent = -state.anchor  # the first stage averages, and this is the only peer
    assert owed(one) == (UNEVEN - sent).tolist()
    assert any(owed(one))
    script.orders = [
        plan(2, 0, "stat2"),
        lambda: verdict(OpId(1, 2, 0, 0), script.last_vote().digest, version=2),
    ]
    before = np.asarray(owed(one), np.float32)
    assert one.run(UNEVEN, WORK).committed
    sent = -state.anchor - sent
    np.testing.assert_allclose(np.asarray(owed(one)), UNEVEN + before - sent, rtol=0, atol=1e-5)


def test_an_attempt_that_fails_owes_the_same_as_one_that_does_not() -> None:
    results = []
    for fails in (False, True):
        script, state = Script(), fresh()
        one = fed(script, state)
        attempt = 1 if fails else 0
        script.orders = [
            lambda attempt=attempt, script=script: verdict(OpId(1, 1, 0, attempt), script.last_vote().digest)
        ]
        script.orders[:0] = [plan(1, i, "stat2") for i in range(attempt + 1)]
        if fails:
            comm = Faulty(
                LoopbackCommunicator(LoopbackHub(), "a"), {OpId(1, 1, 0, 0): FailAttempt((), "planned")}
            )
            one = rounds(script, state, comm, codec="stat2", beta=1.0)
        assert one.run(UNEVEN, WORK).committed
        results.append((owed(one), state.digest()))
    assert results[0] == results[1]


@pytest.mark.parametrize(
    "left_behind",
    [
        verdict(OpId(1, 1), outcome="skipped", version=0),
        verdict(OpId(1, 1), outcome="skipped", version=0, left_out={"a": "too late"}),
    ],
    ids=["skipped", "left out"],
)
def test_a_round_without_this_peers_update_changes_nothing_that_is_owed(left_behind: Verdict) -> None:
    script = Script()
    one = fed(script, fresh())
    assert one.feedback.residual is not None
    one.feedback.residual[:] = [5, 4, 3, 2, 1]
    script.orders = [left_behind]
    assert not one.run(UNEVEN, WORK).committed
    assert owed(one) == [5, 4, 3, 2, 1]


def test_a_commit_without_this_peers_update_changes_nothing_that_is_owed() -> None:
    script, state = Script(), fresh()
    one = fed(script, state)
    assert one.feedback.residual is not None
    one.feedback.residual[:] = [5, 4, 3, 2, 1]
    others = verdict(OpId(1, 1, 0, 0), "", contributions=(Contribution("b", 1),))
    script.orders = [
        plan(1, 0, "stat2"),
        lambda: msgspec.structs.replace(others, digest=script.last_vote().digest),
    ]
    assert one.run(UNEVEN, WORK).committed
    assert owed(one) == [5, 4, 3, 2, 1]


def test_what_is_owed_is_forgotten_with_an_update_that_is_not_finite() -> None:
    script = Script(verdict(OpId(1, 1), outcome="skipped", version=0, left_out={"a": "not finite"}))
    one = fed(script, fresh())
    assert one.feedback.residual is not None
    one.feedback.residual[:] = 1e38
    one.run(np.full(5, 3e38, dtype=np.float32), WORK)
    assert isinstance(script.said[0], Ready)
    assert not script.said[0].finite
    assert not any(owed(one))
