"""Oracles of compression: E12 (nothing is lost), E13 (what feedback owes), E21 (error laws), E22 (errors of a mean)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from atoll.codecs.laws import CODEBOOK_CODECS, GRID_CODECS, MEASURED_ERROR
from atoll.plan.grid import Grid
from atoll.state.feedback import ErrorFeedback
from atoll.state.tensors import ModelTensors
from atoll.values import CODECS
from oracle.problem import diloco, make_model
from support.codec_vectors import Bytes, Floats, decode, encoded, mean_of, relative_error, there_and_back

DISTRIBUTIONS: dict[str, Callable[[np.random.Generator, int], Floats]] = {
    "gaussian": lambda rng, size: rng.standard_normal(size, np.float32),
    "laplace": lambda rng, size: rng.laplace(size=size).astype(np.float32),
    "student-3": lambda rng, size: rng.standard_t(3, size).astype(np.float32),
}


# ---- E12 and E13: error feedback ----


def test_e12_a_codec_that_drops_nothing_owes_nothing() -> None:
    plain = diloco(3, 4, 20, codec="fp32", error_feedback=0.0)
    fed = diloco(3, 4, 20, codec="fp32", error_feedback=0.95)
    assert [row.digest for row in fed.rounds] == [row.digest for row in plain.rounds]
    grid = Grid.of([300, 41])
    feedback = ErrorFeedback("fp32", grid.boundaries, 1.0)
    rng = np.random.default_rng(12)
    for _ in range(3):
        delta = rng.standard_normal(grid.numel, np.float32)
        send(feedback, grid, "fp32", delta)
        assert feedback.residual is not None
        assert not feedback.residual.any()


@pytest.mark.parametrize("beta", [1.0, 0.95])
@pytest.mark.parametrize("codec", [name for name in CODECS if name != "fp32"])
def test_e13_what_was_sent_and_what_is_owed_make_up_the_updates(codec: str, beta: float) -> None:
    """sum of beta^(t-s) q_s + e_t = sum of beta^(t-s) x_s, with every third round aborted: its x is in the next one."""
    grid, rng = Grid.of([5000, 7]), np.random.default_rng(13)
    feedback = ErrorFeedback(codec, grid.boundaries, beta)
    sent, given, norms = np.zeros(grid.numel), np.zeros(grid.numel), 0.0
    pending = np.zeros(grid.numel, np.float32)
    for round_ in range(30):
        pending = pending + rng.standard_normal(grid.numel, np.float32)
        if round_ % 3 == 2:
            data = np.empty(grid.wire_bytes(codec), np.uint8)
            assert feedback.encode(pending, data)  # encoded, and not committed
            continue
        q = send(feedback, grid, codec, pending)
        sent, given = beta * sent + q, beta * given + pending
        norms += float(np.linalg.norm(pending))
        pending = np.zeros(grid.numel, np.float32)
    assert feedback.residual is not None
    assert np.linalg.norm(sent + feedback.residual - given) <= 1e-6 * norms


@pytest.mark.parametrize("codec", CODEBOOK_CODECS)
def test_e13_feedback_contracts(codec: str) -> None:
    """With rho = |x - x'| / |x| < 1, what is owed stays below rho / (1 - rho) updates; so the mean error of n rounds
    shrinks as 1 / n. Without feedback it stays where it is: a coordinate that topk never picks is never sent."""
    grid, rng = Grid.of([4096 * 4]), np.random.default_rng(14)
    update = rng.standard_normal(grid.numel, np.float32)
    feedback = ErrorFeedback(codec, grid.boundaries, 1.0)
    rho, sent, num_rounds = 0.0, np.zeros(grid.numel), 100
    for _ in range(num_rounds):
        assert feedback.residual is not None
        total = update + feedback.residual
        q = send(feedback, grid, codec, update)
        rho = max(rho, float(np.linalg.norm(total - q) / np.linalg.norm(total)))
        sent += q
    assert feedback.residual is not None
    assert rho < 1
    assert np.linalg.norm(feedback.residual) <= rho / (1 - rho) * np.linalg.norm(update) * (1 + 1e-4)
    with_feedback = relative_error(sent / num_rounds, update)
    without = relative_error(there_and_back(codec, grid.segments, update), update)
    assert with_feedback <= rho / (1 - rho) / num_rounds * (1 + 1e-4)
    assert with_feedback < without / 3


def send(feedback: ErrorFeedback, grid: Grid, codec: str, delta: Floats) -> Floats:
    """One committed round: what the others get of `delta`."""
    data = np.empty(grid.wire_bytes(codec), np.uint8)
    assert feedback.encode(delta, data)
    feedback.commit(delta, data)
    return decode(codec, grid.segments, data)


# ---- E21: the error laws of docs/codecs.md ----


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("kind", range(len(DISTRIBUTIONS)), ids=DISTRIBUTIONS)
def test_e21_errors_are_as_measured(codec: str, kind: int) -> None:
    draw = list(DISTRIBUTIONS.values())[kind]
    values = draw(np.random.default_rng(21), 1 << 18)
    error = relative_error(there_and_back(codec, [len(values)], values), values)
    tail = 0.1 if kind == 2 else 0.02  # a Student's error hangs on its largest values
    assert error == pytest.approx(MEASURED_ERROR[codec][kind], rel=tail)


# ---- E22: where a mean is rounded ----


@pytest.mark.parametrize(("codec", "most"), [("int8", 16), ("int4", 8)])
def test_e22_a_star_rounds_twice_a_chain_at_every_hop(codec: str, most: int) -> None:
    """Relative error of the mean of independent updates. Star: own update and mean are rounded, eps * sqrt(2). Chain:
    own updates, and the sums of 2, 3, ... M of them: eps * sqrt((M + 1) / 2 + 1 - 1 / M). (The law of a ring whose
    members do not round their own before they add it, eps * sqrt((M + 1) / 2), is what it tends to.)"""
    rng = np.random.default_rng(22)
    numel, eps = 1 << 16, MEASURED_ERROR[codec][0]
    for num_peers in [n for n in (2, 4, 8, 16) if n <= most]:
        vectors = [rng.standard_normal(numel, np.float32) for _ in range(num_peers)]
        data = [encoded(codec, [numel], vector) for vector in vectors]
        wanted = np.mean(vectors, axis=0, dtype=np.float64)
        star = mean_of(codec, [numel], data, [1] * num_peers)
        assert star is not None
        assert relative_error(decode(codec, [numel], star), wanted) == pytest.approx(eps * 2**0.5, rel=0.05)
        chain = decode(codec, [numel], mean_along_a_chain(codec, numel, data))
        law = eps * ((num_peers + 1) / 2 + 1 - 1 / num_peers) ** 0.5
        assert relative_error(chain, wanted) == pytest.approx(law, rel=0.05)


def mean_along_a_chain(codec: str, numel: int, data: list[Bytes]) -> Bytes:
    """Every hop adds its own to the mean so far, weighted by how many are in it, and encodes again."""
    so_far = data[0]
    for number, own in enumerate(data[1:], start=1):
        mean = mean_of(codec, [numel], [so_far, own], [number, 1])
        assert mean is not None
        so_far = mean
    return so_far


@pytest.mark.parametrize("codec", GRID_CODECS)
@pytest.mark.parametrize("num_peers", [4, 16])
def test_e26_independent_updates_shrink_by_the_root_of_their_number(codec: str, num_peers: int) -> None:
    rng = np.random.default_rng(26)
    vectors = [rng.standard_normal(20_000, np.float32) for _ in range(num_peers)]
    mean = mean_of(codec, [20_000], [encoded(codec, [20_000], v) for v in vectors], [1] * num_peers)
    assert mean is not None
    ratio = np.linalg.norm(decode(codec, [20_000], mean)) / np.linalg.norm(vectors[0])
    assert ratio == pytest.approx(num_peers**-0.5, rel=0.05)


@pytest.mark.parametrize("codec", CODEBOOK_CODECS)
def test_e13_feedback_brings_training_closer_to_what_it_would_be_uncompressed(codec: str) -> None:
    """Two peers, 20 rounds of averaging: how far the anchor ends from the fp32 run's, as a share of the way it went."""
    start, exact = ModelTensors(make_model().named_parameters()).read(), diloco(2, 4, 80).state.anchor
    away = {
        beta: np.linalg.norm(diloco(2, 4, 80, codec=codec, error_feedback=beta).state.anchor - exact)
        / np.linalg.norm(exact - start)
        for beta in (0.0, 0.95)
    }
    assert away[0.95] < 0.85 * away[0.0], away
