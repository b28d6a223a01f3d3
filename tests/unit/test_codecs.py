"""The laws of every grid codec and of the reduction formula, on every instruction set, against numpy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from atoll import _native, kernels
from atoll.codecs import reference
from atoll.codecs.laws import error_bound
from atoll.plan.grid import Grid
from atoll.values import CODECS

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

SIZES = (0, 1, 7, 13, 255, 256, 257, 1023)
TINY = np.finfo(np.float32).tiny
HUGE = np.finfo(np.float32).max

pytestmark = pytest.mark.parametrize("codec", CODECS)
many = settings(max_examples=60, deadline=None)


@pytest.fixture(scope="module", params=_native.kernel_targets(), autouse=True)
def target(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _native.kernel_target()
    _native.set_kernel_target(request.param)
    yield request.param
    _native.set_kernel_target(before)


def encode(codec: str, segments: Sequence[int], values: Floats) -> Bytes | None:
    grid = Grid.of(segments)
    out = np.full(grid.wire_bytes(codec), 0xA5, np.uint8)
    return out if kernels.encode(codec, grid.boundaries, values, out) else None


def decode(codec: str, segments: Sequence[int], data: Bytes) -> Floats:
    grid = Grid.of(segments)
    out = np.full(grid.numel, np.nan, np.float32)
    kernels.decode(codec, grid.boundaries, data, out)
    return out


def there_and_back(codec: str, segments: Sequence[int], values: Floats) -> Floats:
    data = encode(codec, segments, values)
    assert data is not None
    return decode(codec, segments, data)


def same_bits(a: Floats, b: Floats) -> bool:
    return a.dtype == b.dtype == np.float32 and a.tobytes() == b.tobytes()


def finite_bits(rng: np.random.Generator, size: int) -> Floats:
    """Any finite bit pattern: all exponents, denormals and both zeros."""
    bits = rng.integers(0, 1 << 32, size, dtype=np.uint32).view(np.float32)
    return np.where(np.isfinite(bits), bits, np.float32(0))


def draw_values(kind: str, exponent: int, seed: int, size: int) -> Floats:
    rng = np.random.default_rng(seed)
    if kind == "bits":
        return finite_bits(rng, size)
    if kind == "codes":  # an absmax of 127 levels and half-way points between levels
        values = rng.integers(-254, 255, size).astype(np.float32) / 2
    elif kind == "sparse":
        values = rng.standard_normal(size, np.float32) * (rng.random(size) < 0.1)
    else:
        values = rng.standard_normal(size, np.float32)
    with np.errstate(over="ignore", under="ignore"):
        return np.clip(np.ldexp(values, exponent), -HUGE, HUGE).astype(np.float32)


vectors = st.builds(
    lambda segments, kind, exponent, seed: (segments, draw_values(kind, exponent, seed, sum(segments))),
    st.lists(st.sampled_from(SIZES), min_size=1, max_size=4),
    st.sampled_from(("normal", "sparse", "codes", "bits")),
    st.one_of(st.integers(-12, 4), st.integers(-149, 127)),
    st.integers(0, 2**32 - 1),
)
single_blocks = st.lists(
    st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=9
).map(lambda values: ([len(values)], np.asarray(values, np.float32)))
Vector = tuple[list[int], Floats]


@many
@given(st.one_of(vectors, single_blocks))
def test_bits_equal_the_numpy_twin(codec: str, vector: Vector) -> None:
    segments, values = vector
    data = encode(codec, segments, values)
    expected = reference.encode(codec, segments, values)
    assert data is not None
    assert expected is not None
    assert data.tobytes() == expected.tobytes()
    assert same_bits(decode(codec, segments, data), reference.decode(codec, segments, data))


@many
@given(st.one_of(vectors, single_blocks))
def test_each_element_is_within_the_bound(codec: str, vector: Vector) -> None:
    segments, values = vector
    error = np.abs(there_and_back(codec, segments, values).astype(np.float64) - values)
    assert np.all(error <= error_bound(codec, segments, values))


@many
@given(st.one_of(vectors, single_blocks))
@example(([2], np.asarray([np.nextafter(np.float32(254), np.float32(0)), 1], np.float32)))
def test_encoding_twice_changes_nothing(codec: str, vector: Vector) -> None:
    segments, values = vector
    once = there_and_back(codec, segments, values)
    assert same_bits(there_and_back(codec, segments, once), once)
    once_data, data = encode(codec, segments, once), encode(codec, segments, values)
    assert once_data is not None
    assert data is not None
    assert once_data.tobytes() == data.tobytes()


@many
@given(st.one_of(vectors, single_blocks))
def test_codecs_are_odd(codec: str, vector: Vector) -> None:
    segments, values = vector
    np.testing.assert_array_equal(
        there_and_back(codec, segments, -values), -there_and_back(codec, segments, values)
    )


@pytest.mark.parametrize("size", SIZES)
def test_zero_stays_zero_and_wire_bytes_follow_the_formula(codec: str, size: int) -> None:
    segments, spec = [size, 3, size], CODECS[codec]
    assert same_bits(
        there_and_back(codec, segments, np.zeros(2 * size + 3, np.float32)), np.zeros(2 * size + 3, "f4")
    )
    blocks = 2 * -(-size // spec.block) + 1
    expected = blocks * spec.header_bytes + (2 * size + 3) * spec.bits // 8
    assert Grid.of(segments).wire_bytes(codec) == expected


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, -np.nan])
@pytest.mark.parametrize("where", [0, 255, 256, 300, 512])
def test_a_value_that_is_not_finite_is_refused(codec: str, bad: float, where: int) -> None:
    values = np.ones(513, np.float32)
    values[where] = bad
    assert encode(codec, [300, 213], values) is None
    assert reference.encode(codec, [300, 213], values) is None


def test_all_extreme_scales(codec: str) -> None:
    """Every exponent, with the mantissas where rounding a scale is most delicate."""
    mantissas = np.asarray(
        [0, 1, 0x3F, 0x40, 0x41, 0x7F, 0x80, 0x7FFFFF, 0x7FFF80, 0x7E0000, 0x010204], np.uint32
    )
    exponents = np.arange(255, dtype=np.uint32) << 23
    tops = (exponents[:, None] | mantissas[None, :]).ravel().view(np.float32)
    values = np.stack([tops, -tops / 2, tops / 3, tops / 254, tops * 0, tops], axis=1).astype(np.float32)
    segments = [values.shape[1]] * len(tops)
    flat = np.ascontiguousarray(values.ravel())
    once = there_and_back(codec, segments, flat)
    assert same_bits(once, reference.decode(codec, segments, reference.encode(codec, segments, flat)))
    assert same_bits(there_and_back(codec, segments, once), once)
    assert np.isfinite(once).all()
    assert np.all(np.abs(once.astype(np.float64) - flat) <= error_bound(codec, segments, flat))


def test_blocks_restart_at_segments(codec: str) -> None:
    rng = np.random.default_rng(7)
    left, right = rng.standard_normal(300, np.float32), 1000 * rng.standard_normal(70, np.float32)
    together = encode(codec, [300, 70], np.concatenate([left, right]))
    assert together is not None
    assert together.tobytes() == b"".join(
        part.tobytes()
        for part in (encode(codec, [300], left), encode(codec, [70], right))
        if part is not None
    )


# ---- the reduction formula ----

weight_lists = st.lists(st.one_of(st.integers(0, 9), st.integers(0, 2**60)), min_size=1, max_size=5).filter(
    any
)


def reduce(
    codec: str, segments: Sequence[int], contributions: list[Bytes], weights: list[int]
) -> Bytes | None:
    grid = Grid.of(segments)
    out = np.empty(grid.wire_bytes(codec), np.uint8)
    return out if kernels.weighted_mean(codec, grid.boundaries, contributions, weights, out) else None


@many
@given(vectors, weight_lists, st.integers(0, 2**32 - 1))
def test_mean_equals_the_numpy_twin(codec: str, vector: Vector, weights: list[int], seed: int) -> None:
    segments, values = vector
    rng = np.random.default_rng(seed)
    data = []
    for _ in weights:
        encoded = encode(codec, segments, rng.permutation(values))
        assert encoded is not None
        data.append(encoded)
    mean, expected = (
        reduce(codec, segments, data, weights),
        reference.weighted_mean(codec, segments, data, weights),
    )
    assert (mean is None) == (expected is None)
    if mean is not None and expected is not None:
        assert mean.tobytes() == expected.tobytes()


@pytest.mark.parametrize("size", SIZES)
def test_the_mean_of_one_is_itself(codec: str, size: int) -> None:
    """E12 for a world of one: for fp32 the identity, else what the codec keeps. (-0 becomes +0.)"""
    data = encode(codec, [size], np.random.default_rng(size).standard_normal(size, np.float32))
    assert data is not None
    mean = reduce(codec, [size], [data], [1])
    assert mean is not None
    assert mean.tobytes() == data.tobytes()


def test_weight_zero_is_absent_to_the_bit(codec: str) -> None:
    rng = np.random.default_rng(3)
    data = [encode(codec, [700], rng.standard_normal(700, np.float32)) for _ in range(3)]
    a, b, c = (part for part in data if part is not None)
    with_zero, without = reduce(codec, [700], [a, b, c], [2, 0, 3]), reduce(codec, [700], [a, c], [2, 3])
    assert with_zero is not None
    assert without is not None
    assert with_zero.tobytes() == without.tobytes()


def test_the_mean_may_overwrite_a_contribution(codec: str) -> None:
    rng = np.random.default_rng(4)
    grid = Grid.of([300, 5, 700])
    data = [encode(codec, grid.segments, rng.standard_normal(1005, np.float32)) for _ in range(3)]
    a, b, c = (part for part in data if part is not None)
    apart = reduce(codec, grid.segments, [a, b, c], [1, 2, 3])
    assert kernels.weighted_mean(codec, grid.boundaries, [a, b, c], [1, 2, 3], b)
    assert apart is not None
    assert b.tobytes() == apart.tobytes()


def test_a_mean_that_overflows_is_refused(codec: str) -> None:
    data = encode(codec, [3], np.full(3, HUGE, np.float32))
    assert data is not None
    assert reduce(codec, [3], [data, data], [1, 1]) is None
    assert reference.weighted_mean(codec, [3], [data, data], [1, 1]) is None


@pytest.mark.parametrize("num_peers", [4, 16, 64])
def test_independent_updates_shrink_by_the_root_of_their_number(codec: str, num_peers: int) -> None:
    """E26, and E22's law: the codec adds its own small error to the mean of independent vectors."""
    rng = np.random.default_rng(26)
    vectors = [rng.standard_normal(20_000, np.float32) for _ in range(num_peers)]
    data = [part for v in vectors if (part := encode(codec, [20_000], v)) is not None]
    encoded = reduce(codec, [20_000], data, [1] * num_peers)
    assert encoded is not None
    mean = decode(codec, [20_000], encoded)
    ratio = np.linalg.norm(mean) / np.linalg.norm(vectors[0])
    assert ratio == pytest.approx(num_peers**-0.5, rel=0.05)
    error = np.linalg.norm(mean - np.mean(vectors, axis=0)) / np.linalg.norm(mean)
    assert error <= 0.012


# ---- what is refused ----


def test_arguments_that_do_not_fit_are_refused(codec: str) -> None:
    grid = Grid.of([300])
    values, out = np.zeros(300, np.float32), np.zeros(grid.wire_bytes(codec), np.uint8)
    with pytest.raises(ValueError, match=r"length of values is 299; the grid needs 300"):
        kernels.encode(codec, grid.boundaries, values[:-1], out)
    with pytest.raises(ValueError, match=rf"length of out is {len(out) + 1}; the grid needs {len(out)}"):
        kernels.encode(codec, grid.boundaries, values, np.zeros(len(out) + 1, np.uint8))
    with pytest.raises(ValueError, match=r"length of data is 3"):
        kernels.decode(codec, grid.boundaries, out[:3], values)
    with pytest.raises(ValueError, match="boundaries must begin with 0"):
        kernels.encode(codec, grid.boundaries + 1, values, out)
    with pytest.raises(ValueError, match="unknown codec 'int5'"):
        kernels.encode("int5", grid.boundaries, values, out)
    with pytest.raises(ValueError, match="weights are all zero"):
        kernels.weighted_mean(codec, grid.boundaries, [out], [0], out.copy())
    with pytest.raises(ValueError, match="length of weights is 2; contributions needs 1"):
        kernels.weighted_mean(codec, grid.boundaries, [out], [1, 2], out.copy())
    with pytest.raises(ValueError, match="does not fit 64 bits"):
        kernels.weighted_mean(codec, grid.boundaries, [out, out], [2**63, 2**63], out.copy())
    with pytest.raises(TypeError):
        kernels.weighted_mean(codec, grid.boundaries, [out], [-1], out.copy())


def test_arrays_are_never_converted(codec: str) -> None:
    grid = Grid.of([300])
    values, out = np.zeros(300, np.float32), np.zeros(grid.wire_bytes(codec), np.uint8)
    read_only = out.copy()
    read_only.flags.writeable = False
    strided, doubles = np.zeros(600, np.float32)[::2], np.zeros(300, np.float64)
    for bad in (strided, doubles, values.reshape(1, 300), list(values)):
        with pytest.raises(TypeError):
            kernels.encode(codec, grid.boundaries, bad, out)  # pyrefly: ignore
        with pytest.raises(TypeError):
            kernels.decode(codec, grid.boundaries, out, bad)  # pyrefly: ignore
    with pytest.raises(TypeError):
        kernels.encode(codec, grid.boundaries, values, read_only)
    with pytest.raises(TypeError):
        kernels.weighted_mean(codec, grid.boundaries, [np.zeros(2 * len(out), np.uint8)[::2]], [1], out)
    with pytest.raises(TypeError):
        kernels.encode(codec, grid.boundaries.astype(np.int32), values, out)  # pyrefly: ignore
    kernels.decode(codec, grid.boundaries, read_only, values)
