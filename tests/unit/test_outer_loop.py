"""What a peer does with its work when the run goes on without it: drop it, or carry it into the next update."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from atoll.clock import ManualClock
from atoll.diloco.data import NoData
from atoll.diloco.outer import OuterState
from atoll.diloco.outer_loop import OuterLoop
from atoll.diloco.round_report import Phases, RoundReport
from atoll.diloco.schedule import OuterSchedule, RoundShape
from atoll.diloco.work import Work
from atoll.kernels import Floats
from atoll.state.tensors import ModelTensors

START = np.array([4.0, -2.0, 1.0], dtype=np.float32)
MOVED = np.array([0.5, 0.25, -1.0], dtype=np.float32)
"""How far the anchor moved while this peer was away."""
STEP = np.array([1.0, 2.0, 4.0], dtype=np.float32)


class Transaction:
    """Stands for `Rounds`: keeps the updates that it is given, and says that the run went on without this peer."""

    def __init__(self) -> None:
        self.deltas: list[Floats] = []
        self.works: list[Work] = []
        self.onlooker = self
        self.data = NoData()

    def stage_if_due(self, state: OuterState) -> None:
        pass

    def run(self, delta: Floats, work: Work) -> RoundReport:
        self.deltas.append(delta.copy())
        self.works.append(Work(steps=work.steps, tokens=work.tokens))
        shape = RoundShape(2, 0.7, 0.9, True)
        return RoundReport(
            False, 1, shape, 0, (), (), "", "went on", False, "", "", 0.0, 0, 0, 0, missed=True
        )


def fetched(state: OuterState) -> None:
    state.anchor += MOVED
    state.version, state.round, state.step = state.version + 1, state.round + 1, state.step + 2


def loop_of(model: torch.nn.Module, transaction: Transaction, *, carry: bool) -> OuterLoop:
    tensors = ModelTensors(model.named_parameters())
    return OuterLoop(
        tensors=tensors,
        state=OuterState(tensors.read()),
        rounds=transaction,  # type: ignore[arg-type]
        schedule=OuterSchedule.constant(2, 0.7, 0.9),
        clock=ManualClock(),
        freeze_requested=lambda round_: False,
        progress=lambda step: None,
        emit=lambda event: None,
        catch_up=fetched,
        carry=carry,
    )


def model_at(values: Floats) -> torch.nn.Module:
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.from_numpy(values.copy()))
    return model


def two_steps(model: torch.nn.Module, loop: OuterLoop) -> None:
    for _ in range(2):
        with torch.no_grad():
            model.w -= torch.from_numpy(STEP)
        loop.step(tokens=3)


@pytest.mark.parametrize("carry", [False, True])
def test_work_that_a_round_did_not_wait_for(carry: bool) -> None:
    """late = carry: local += new anchor - old anchor, so the next update spans both rounds: exactly the sum."""
    model, transaction = model_at(START), Transaction()
    loop = loop_of(model, transaction, carry=carry)
    two_steps(model, loop)
    assert transaction.deltas[0].tolist() == (2 * STEP).tolist()
    assert model.w.tolist() == (START + MOVED - 2 * STEP * carry).tolist()
    assert loop.run_step == 2, "the run's step, wherever this peer was"
    two_steps(model, loop)
    assert transaction.deltas[1].tolist() == (2 * STEP * (1 + carry)).tolist()
    assert (transaction.works[1].steps, transaction.works[1].tokens) == ((4, 12) if carry else (2, 6))


def test_a_snapshot_of_the_same_version_leaves_nothing_to_carry() -> None:
    """Its bits were wrong: whatever this peer made of them is dropped."""

    def repaired(state: OuterState) -> None:
        state.anchor[:] = START + MOVED

    model, transaction = model_at(START), Transaction()
    loop = loop_of(model, transaction, carry=True)
    loop._catch_up = repaired
    two_steps(model, loop)
    assert model.w.tolist() == (START + MOVED).tolist()
    assert loop.work.steps == 0


class Told(NoData):
    """What a round's end says to the data."""

    def __init__(self, unbroken: bool) -> None:
        self.calls: list[str] = []
        self._unbroken = unbroken

    def begin(self) -> None:
        self.calls.append("begin")

    def settle(self) -> None:
        self.calls.append("settle")

    def go_on(self) -> None:
        self.calls.append("go on")

    def is_unbroken(self) -> bool:
        return self._unbroken


@pytest.mark.parametrize("unbroken", [True, False])
def test_work_is_carried_only_while_what_it_read_is_leased(unbroken: bool) -> None:
    model, transaction = model_at(START), Transaction()
    transaction.data = Told(unbroken)
    loop = loop_of(model, transaction, carry=True)
    two_steps(model, loop)
    assert transaction.data.calls == ["go on" if unbroken else "begin"]
    assert loop.work.steps == (2 if unbroken else 0)


def test_left_behind_in_its_inner_loop_it_notices_at_the_next_step() -> None:
    model, transaction = model_at(START), Transaction()
    loop = loop_of(model, transaction, carry=False)
    loop._missed = lambda: True
    with torch.no_grad():
        model.w -= 1
    assert loop.step(tokens=3) is None
    assert transaction.deltas == []
    assert model.w.tolist() == (START + MOVED).tolist()
    assert (loop.work.steps, loop.steps_in_round) == (0, 0)


class Committed(Transaction):
    """Every round is committed; the next one is to have so many steps here."""

    def __init__(self, state: OuterState, *next_steps: int) -> None:
        super().__init__()
        self._state, self._next_steps = state, list(next_steps)

    def run(self, delta: Floats, work: Work) -> RoundReport:
        self.works.append(Work(steps=work.steps, tokens=work.tokens, train_s=work.train_s))
        shape = RoundShape(6, 0.7, 0.9, True)
        self._state.commit(delta, shape)
        number, steps = self._state.round, self._next_steps.pop(0)
        return RoundReport(
            True, number, shape, number, (), (), "", "", False, "", "", 0.0, 0, 0, 1, next_steps=steps
        )


def test_a_slower_peer_makes_fewer_steps_and_the_runs_step_is_one_history() -> None:
    """0 says nothing, and more than the round has is not made."""
    tensors, clock = ModelTensors(model_at(START).named_parameters()), ManualClock()
    state = OuterState(tensors.read())
    transaction = Committed(state, 2, 0, 99, 0)
    loop = OuterLoop(
        tensors=tensors,
        state=state,
        rounds=transaction,  # type: ignore[arg-type]
        schedule=OuterSchedule.constant(6, 0.7, 0.9),
        clock=clock,
        freeze_requested=lambda round_: False,
        progress=lambda step: None,
        emit=lambda event: None,
    )
    jumps: list[int] = []
    loop.on_jump = lambda: jumps.append(loop.run_step)
    ends = []
    for _ in range(6 + 2 + 6 + 6):
        clock.advance(0.5)
        if loop.step(tokens=3) is not None:
            ends.append(loop.run_step)
    assert [work.steps for work in transaction.works] == [6, 2, 6, 6]
    assert [work.train_s for work in transaction.works] == [3.0, 1.0, 3.0, 3.0]
    assert ends == [6, 12, 18, 24], "the run's step goes on by the round's own length"
    assert jumps == [12], "where a learning rate that is followed has to make up for it"


@pytest.mark.parametrize("finite", [True, False])
def test_who_is_left_out_resets_its_inner_optimizer_only_after_an_update_that_is_not_finite(
    finite: bool,
) -> None:
    """By the norm of the update: a commit may have put the mean in its place."""
    model, resets = model_at(STEP), []

    class LeftOut(Transaction):
        def run(self, delta: Floats, work: Work) -> RoundReport:
            norm = float(np.linalg.norm(delta.astype(np.float64)))
            delta[:] = 0
            shape = RoundShape(2, 0.7, 0.9, True)
            return RoundReport(
                True, 1, shape, 1, (), (), "why", "went on", False, "", "", norm, 0, 0, 0, Phases()
            )

    loop = loop_of(model, LeftOut(), carry=False)
    loop.on_reset = lambda: resets.append(True)
    with torch.no_grad():
        model.w -= torch.from_numpy(STEP) if finite else torch.tensor([0, float("nan"), 0])
    loop.finish_round()
    assert resets == ([] if finite else [True])
