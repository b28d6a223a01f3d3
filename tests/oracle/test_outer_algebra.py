"""Oracles E1-E8, E12, E14, E17, E24-E26 of the low-communication family, each with its negative control."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from atoll import kernels
from atoll.diloco.outer import OuterState
from atoll.diloco.schedule import OuterSchedule, RoundShape
from atoll.diloco.simulation import simulate
from atoll.plan.grid import Grid
from atoll.state.tensors import ModelTensors
from oracle.problem import Worker, adamw, diloco, make_model, plain, relative, sgd


def test_e1_one_step_rounds_of_sgd_are_data_parallel_sgd() -> None:
    run = diloco(4, 1, 20, optimizer=sgd(0.1))
    assert relative(run.state.anchor, plain(20, sgd(0.1))) < 3e-6


def test_e2_the_outer_lr_scales_the_inner_one_once() -> None:
    run = diloco(4, 1, 20, optimizer=sgd(0.1), lr=0.5)
    assert relative(run.state.anchor, plain(20, sgd(0.05))) < 3e-6
    assert relative(run.state.anchor, plain(20, sgd(0.1))) > 1e-2


def test_e3_outer_nesterov_is_torchs_nesterov() -> None:
    run = diloco(4, 1, 20, optimizer=sgd(0.1), lr=0.7, momentum=0.9)
    nesterov = lambda p: torch.optim.SGD(p, lr=0.07, momentum=0.9, nesterov=True)  # noqa: E731
    assert relative(run.state.anchor, plain(20, nesterov)) < 3e-6
    heavy_ball = diloco(4, 1, 20, optimizer=sgd(0.1), lr=0.7, momentum=0.9, nesterov=False)
    assert relative(heavy_ball.state.anchor, plain(20, nesterov)) > 1e-2


def test_e4_one_step_rounds_of_adamw_are_not_data_parallel_adamw() -> None:
    run = diloco(4, 1, 20)
    assert relative(run.state.anchor, plain(20, adamw)) > 1e-3, "gradients are averaged somewhere"


def test_e5_equal_data_makes_the_number_of_peers_irrelevant() -> None:
    anchors = {
        n: diloco(n, 5, 20, lr=0.7, momentum=0.9, same_data=True).state.anchor for n in (1, 2, 3, 4, 8)
    }
    assert np.array_equal(anchors[1], anchors[2])
    for n in (3, 4, 8):
        assert relative(anchors[n], anchors[1]) < 3e-6


def test_e6_one_averaging_peer_is_plain_training() -> None:
    run = diloco(1, 5, 20)
    assert relative(run.state.anchor, plain(20, adamw)) < 2e-6


def test_e7_one_peer_with_outer_sgd_is_lookahead() -> None:
    run = diloco(1, 5, 20, lr=0.5)
    model = make_model()
    tensors, optimizer, worker = (
        ModelTensors(model.named_parameters()),
        adamw(list(model.parameters())),
        Worker(0, 1, adamw),
    )
    slow = torch.from_numpy(tensors.read())
    worker.model, worker.tensors, worker.optimizer = model, tensors, optimizer
    for start in range(0, 20, 5):
        worker.train(5, start)
        slow = torch.lerp(slow, torch.from_numpy(tensors.read()), 0.5)
        tensors.write(slow.numpy())
    assert relative(run.state.anchor, slow) < 3e-6


def test_e8_outer_sgd_with_lr_one_is_the_mean_of_the_peers() -> None:
    workers = [Worker(i, 4, adamw) for i in range(4)]
    for worker in workers:
        worker.train(5, 0)
    mean = torch.stack([torch.from_numpy(w.tensors.read()) for w in workers]).mean(0)
    run = diloco(4, 5, 5)
    assert relative(run.state.anchor, mean) < 3e-6


def test_e12_the_fp32_codec_changes_nothing() -> None:
    state = OuterState(np.zeros(1000, dtype=np.float32))
    deltas = np.random.default_rng(5).standard_normal((3, 1000), dtype=np.float32)
    mean = ((deltas[0] + deltas[1]) + deltas[2]) / np.float32(3)
    found = reduced(deltas, [1, 1, 1], "fp32")
    assert np.array_equal(found, mean)
    state.commit(found, RoundShape(5, 1.0, 0.0, True))
    assert np.array_equal(state.anchor, -mean)
    assert not np.array_equal(reduced(deltas, [1, 1, 1], "int8"), mean)


def reduced(deltas: np.ndarray, weights: list[int], codec: str) -> np.ndarray:
    grid = Grid.of([deltas.shape[1]])
    contributions = []
    for delta in deltas:
        contributions.append(np.empty(grid.wire_bytes(codec), dtype=np.uint8))
        assert kernels.encode(codec, grid.boundaries, delta, contributions[-1])
    out = np.empty(grid.wire_bytes(codec), dtype=np.uint8)
    assert kernels.weighted_mean(codec, grid.boundaries, contributions, weights, out)
    mean = np.empty(grid.numel, dtype=np.float32)
    kernels.decode(codec, grid.boundaries, out, mean)
    return mean


def test_e14_the_order_of_the_peers_is_what_must_be_canonical() -> None:
    deltas = np.random.default_rng(6).standard_normal((6, 10_000), dtype=np.float32)
    ones = [1] * 6
    assert np.array_equal(reduced(deltas, ones, "fp32"), reduced(deltas.copy(), ones, "fp32"))
    assert not np.array_equal(reduced(deltas, ones, "fp32"), reduced(deltas[::-1].copy(), ones, "fp32"))


def test_e17_a_round_without_a_peer_is_the_mean_over_the_others() -> None:
    lost = diloco(4, 5, 10, lr=0.7, momentum=0.9, absent=lambda round_: (3,) if round_ == 1 else ())
    workers = [Worker(i, 4, adamw) for i in range(4)]
    schedule = OuterSchedule.constant(5, 0.7, 0.9, True, 10)
    first = simulate(workers, schedule, codec="fp32", num_rounds=1)
    state = first.state
    for worker in workers[:3]:
        worker.train(5, 5)
    deltas = np.stack([state.anchor - w.tensors.read() for w in workers[:3]])
    state.commit(((deltas[0] + deltas[1]) + deltas[2]) / np.float32(3), schedule.round_at(5))
    assert np.array_equal(lost.state.anchor, state.anchor)
    whole = diloco(4, 5, 10, lr=0.7, momentum=0.9)
    assert not np.array_equal(lost.state.anchor, whole.state.anchor)


def test_a_weight_of_zero_is_absence_to_the_bit() -> None:
    idle = [Worker(i, 3, adamw) for i in range(2)] + [Worker(2, 3, adamw, skip=5)]
    run = diloco(3, 5, 15, workers=idle, lr=0.7, momentum=0.9)
    other = diloco(3, 5, 15, lr=0.7, momentum=0.9, absent=lambda round_: (2,))
    assert np.array_equal(run.state.anchor, other.state.anchor)
    assert run.rounds[0].contributors == (0, 1)


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_e24_no_inner_step_leaves_the_anchor(codec: str) -> None:
    model = nn.Linear(300, 3)
    tensors = ModelTensors(model.named_parameters())
    anchor = tensors.read()
    delta = np.empty_like(anchor)
    tensors.subtract_from(anchor, delta)
    assert not delta.any()
    state = OuterState(anchor.copy())
    state.commit(reduced(np.stack([delta, delta]), [1, 1], codec), RoundShape(0, 0.7, 0.9, True))
    assert np.array_equal(state.anchor, anchor)


def test_e25_a_constant_pseudo_gradient_gives_the_closed_form() -> None:
    state = OuterState(np.zeros(1, dtype=np.float32))
    shape, ones = RoundShape(1, 0.7, 0.9, True), np.ones(1, dtype=np.float32)
    for k in range(60):
        before = state.anchor[0]
        state.commit(ones, shape)
        expected = 0.7 * (1 + 0.9 * (1 - 0.9 ** (k + 1)) / 0.1)
        assert before - state.anchor[0] == pytest.approx(expected, rel=3e-5)
    assert before - state.anchor[0] == pytest.approx(7.0, abs=0.03)


def test_e26_independent_updates_average_to_one_over_root_m() -> None:
    rng = np.random.default_rng(7)
    for m in (4, 16, 64):
        deltas = rng.standard_normal((m, 20_000), dtype=np.float32)
        mean = reduced(deltas, [1] * m, "int8")
        ratio = np.linalg.norm(mean) / np.linalg.norm(deltas, axis=1).mean()
        assert ratio == pytest.approx(1 / np.sqrt(m), rel=0.05)


def test_token_weights_are_a_weighted_mean() -> None:
    deltas = np.random.default_rng(8).standard_normal((2, 500), dtype=np.float32)
    found = reduced(deltas, [1, 3], "fp32")
    assert np.array_equal(found, (deltas[0] + np.float32(3) * deltas[1]) / np.float32(4))
    assert np.allclose(found, np.average(deltas, axis=0, weights=[1, 3]), atol=1e-6)
