"""The reduction formula and error feedback, on every codec and instruction set, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll import kernels
from atoll.codecs import reference
from atoll.codecs.laws import largest_value
from atoll.plan.grid import Grid
from atoll.values import CODECS
from support.codec_vectors import (
    HUGE,
    SIZES,
    Vector,
    any_vector,
    encoded,
    mean_of,
    same_bits,
    vectors,
    within,
)

pytestmark = [pytest.mark.usefixtures("kernel_target"), pytest.mark.parametrize("codec", CODECS)]
many = settings(max_examples=40, deadline=None)
weight_lists = st.lists(st.one_of(st.integers(0, 9), st.integers(0, 2**60)), min_size=1, max_size=5).filter(
    any
)


@many
@given(vectors, weight_lists, st.integers(0, 2**32 - 1))
def test_mean_equals_the_numpy_twin(codec: str, vector: Vector, weights: list[int], seed: int) -> None:
    segments, values = vector[0], within(codec, vector[1])
    rng = np.random.default_rng(seed)
    data = [encoded(codec, segments, rng.permutation(values)) for _ in weights]
    mean = mean_of(codec, segments, data, weights)
    expected = reference.weighted_mean(codec, segments, data, weights)
    assert (mean is None) == (expected is None)
    if mean is not None and expected is not None:
        assert mean.tobytes() == expected.tobytes()


@pytest.mark.parametrize("size", SIZES)
def test_a_single_contribution_is_copied(codec: str, size: int) -> None:
    """Who only passes on must not round again; others of weight 0 do not matter."""
    rng = np.random.default_rng(size)
    data, other = (encoded(codec, [size], rng.standard_normal(size, np.float32)) for _ in range(2))
    for contributions, weights in (([data], [7]), ([other, data, other], [0, 1, 0])):
        mean = mean_of(codec, [size], contributions, weights)
        assert mean is not None
        assert mean.tobytes() == data.tobytes()


def test_a_single_contribution_that_is_damaged_is_refused(codec: str) -> None:
    data = encoded(codec, [300, 70], np.random.default_rng(5).standard_normal(370, np.float32))
    damaged = data.copy()
    damaged[:16] = 0xFF  # a NaN in every float that may stand there: elements, scale or codebook
    assert mean_of(codec, [300, 70], [damaged], [3]) is None
    assert reference.weighted_mean(codec, [300, 70], [damaged], [3]) is None
    assert mean_of(codec, [300, 70], [data, damaged], [1, 1]) is None


def test_weight_zero_is_absent_to_the_bit(codec: str) -> None:
    rng = np.random.default_rng(3)
    a, b, c = (encoded(codec, [700], rng.standard_normal(700, np.float32)) for _ in range(3))
    with_zero, without = mean_of(codec, [700], [a, b, c], [2, 0, 3]), mean_of(codec, [700], [a, c], [2, 3])
    assert with_zero is not None
    assert without is not None
    assert with_zero.tobytes() == without.tobytes()


@pytest.mark.parametrize("weights", [[1, 2, 3], [0, 2, 0], [4, 0, 0]])
def test_the_mean_may_overwrite_a_contribution(codec: str, weights: list[int]) -> None:
    rng = np.random.default_rng(4)
    grid = Grid.of([300, 5, 5000])
    a, b, c = (encoded(codec, grid.segments, rng.standard_normal(5305, np.float32)) for _ in range(3))
    apart = mean_of(codec, grid.segments, [a, b, c], weights)
    assert kernels.weighted_mean(codec, grid.boundaries, [a, b, c], weights, b)
    assert apart is not None
    assert b.tobytes() == apart.tobytes()


@pytest.mark.parametrize("size", [3, 5000])
def test_a_mean_that_overflows_is_refused(codec: str, size: int) -> None:
    data = encoded(codec, [size], np.full(size, min(HUGE, largest_value(codec)), np.float32))
    overflows = codec != "fp16"  # no sum of its values comes near fp32's end
    assert (mean_of(codec, [size], [data, data], [1, 1]) is None) == overflows
    assert (reference.weighted_mean(codec, [size], [data, data], [1, 1]) is None) == overflows


@pytest.mark.parametrize("where", [0, 1023, 1024, 4999])
def test_one_value_in_a_sum_that_overflows_is_refused(codec: str, where: int) -> None:
    """Wherever it lies among blocks that are summed together."""
    values = np.full(5000, 1.0, np.float32)
    values[where] = min(HUGE, largest_value(codec))
    data = encoded(codec, [5000], values)
    overflows = codec != "fp16"
    assert (mean_of(codec, [5000], [data] * 3, [1, 1, 1]) is None) == overflows
    assert (reference.weighted_mean(codec, [5000], [data] * 3, [1, 1, 1]) is None) == overflows


@many
@given(any_vector, st.sampled_from([0.0, 0.5, 0.95, 1.0]), st.integers(0, 2**32 - 1))
def test_feedback_equals_the_numpy_twin(codec: str, vector: Vector, beta: float, seed: int) -> None:
    segments, values = vector[0], within(codec, vector[1]) / np.float32(4)
    rng = np.random.default_rng(seed)
    residual = rng.permutation(values)
    grid = Grid.of(segments)
    total = reference.with_residual(values, residual, beta)
    expected = reference.encode(codec, segments, total)
    data = np.full(grid.wire_bytes(codec), 0xA5, np.uint8)
    before = residual.copy()
    assert kernels.encode_with_feedback(codec, grid.boundaries, values, residual, beta, data)
    assert same_bits(residual, before)
    assert expected is not None
    assert data.tobytes() == expected.tobytes()
    next_residual = reference.next_residual(codec, segments, values, residual, beta, data)
    kernels.update_residual(codec, grid.boundaries, values, beta, data, residual)
    assert same_bits(residual, next_residual)


def test_feedback_refuses_what_is_not_finite(codec: str) -> None:
    grid = Grid.of([300])
    ones, out = np.ones(300, np.float32), np.zeros(grid.wire_bytes(codec), np.uint8)
    for bad in (np.nan, np.inf, -HUGE):
        residual = ones.copy()
        residual[299] = bad
        delta = np.full(300, -HUGE if bad == -HUGE else 1.0, np.float32)
        assert not kernels.encode_with_feedback(codec, grid.boundaries, delta, residual, 1.0, out)
