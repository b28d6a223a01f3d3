"""The laws of every codec, on every instruction set of this machine, against numpy.

The same tests run on all codecs; grid codecs and codebook codecs promise different things about errors
(`atoll.codecs.laws`). `hypothesis` prints the example that fails, and keeps it.
"""

from __future__ import annotations

import typing

import numpy as np
import pytest
from hypothesis import example, given, settings

from atoll import kernels
from atoll.codecs import reference
from atoll.codecs.laws import CODEBOOK_CODECS, GRID_CODECS, error_bound, largest_value
from atoll.config import schema
from atoll.plan.grid import Grid
from atoll.values import CODECS
from support.codec_vectors import (
    SIZES,
    Vector,
    any_vector,
    decode,
    encode,
    encoded,
    same_bits,
    there_and_back,
    within,
)

pytestmark = pytest.mark.usefixtures("kernel_target")
every_codec = pytest.mark.parametrize("codec", CODECS)
grid_codecs = pytest.mark.parametrize("codec", GRID_CODECS)
codebook_codecs = pytest.mark.parametrize("codec", CODEBOOK_CODECS)
many = settings(max_examples=40, deadline=None)


def test_every_codec_is_of_one_kind() -> None:
    assert sorted(GRID_CODECS + CODEBOOK_CODECS) == sorted(CODECS)


def test_a_run_can_choose_every_codec() -> None:
    assert typing.get_args(schema.Codec) == tuple(CODECS)


# ---- all codecs ----


@every_codec
@many
@given(any_vector)
def test_bits_equal_the_numpy_twin(codec: str, vector: Vector) -> None:
    segments, values = vector[0], within(codec, vector[1])
    data = encoded(codec, segments, values)
    expected = reference.encode(codec, segments, values)
    assert expected is not None
    assert data.tobytes() == expected.tobytes()
    assert same_bits(decode(codec, segments, data), reference.decode(codec, segments, data))


@every_codec
@pytest.mark.parametrize("size", SIZES)
def test_zero_stays_zero_and_wire_bytes_follow_the_formula(codec: str, size: int) -> None:
    segments, spec = [size, 3, size], CODECS[codec]
    zeros = np.zeros(2 * size + 3, np.float32)
    assert same_bits(there_and_back(codec, segments, zeros), zeros)
    full, tail = divmod(size, spec.block)
    sizes = [spec.block] * full + [tail] * (tail > 0)
    assert Grid.of([size]).wire_bytes(codec) == sum(
        spec.header_bytes + -(-min(numel, spec.kept) * spec.bits // 8) for numel in sizes
    )


@every_codec
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, -np.nan])
@pytest.mark.parametrize("where", [0, 255, 256, 300, 512])
def test_a_value_that_is_not_finite_is_refused(codec: str, bad: float, where: int) -> None:
    values = np.ones(513, np.float32)
    values[where] = bad
    assert encode(codec, [300, 213], values) is None
    assert reference.encode(codec, [300, 213], values) is None


@every_codec
@pytest.mark.parametrize("sign", [1, -1])
def test_a_value_that_would_not_be_finite_is_refused(codec: str, sign: int) -> None:
    """bf16 and fp16 round to nearest: what is nearer to the next power of two than to their largest is too much."""
    largest = largest_value(codec)
    values = np.asarray([1, sign * largest], np.float32)
    assert encode(codec, [2], values) is not None
    first_refused = {"fp16": 65520.0, "bf16": 2.0**128 - 2.0**119}.get(codec)
    if first_refused is None:
        return
    values[1] = sign * first_refused
    assert encode(codec, [2], values) is None
    assert reference.encode(codec, [2], values) is None
    values[1] = np.nextafter(values[1], np.float32(0))
    assert decode(codec, [2], encoded(codec, [2], values))[1] == sign * largest


@every_codec
def test_all_extreme_scales(codec: str) -> None:
    """Every exponent, with the mantissas where rounding a scale is most delicate."""
    mantissas = np.asarray(
        [0, 1, 0x3F, 0x40, 0x41, 0x7F, 0x80, 0x7FFFFF, 0x7FFF80, 0x7E0000, 0x010204], np.uint32
    )
    exponents = np.arange(255, dtype=np.uint32) << 23
    tops = (exponents[:, None] | mantissas[None, :]).ravel().view(np.float32)
    values = np.stack([tops, -tops / 2, tops / 3, tops / 254, tops * 0, tops], axis=1).astype(np.float32)
    segments = [values.shape[1]] * len(tops)
    flat = within(codec, np.ascontiguousarray(values.ravel()))
    data = encoded(codec, segments, flat)
    expected = reference.encode(codec, segments, flat)
    assert expected is not None
    assert data.tobytes() == expected.tobytes()
    assert np.isfinite(decode(codec, segments, data)).all()


@every_codec
def test_blocks_restart_at_segments(codec: str) -> None:
    rng = np.random.default_rng(7)
    left, right = rng.standard_normal(300, np.float32), 1000 * rng.standard_normal(70, np.float32)
    together = encoded(codec, [300, 70], np.concatenate([left, right]))
    assert together.tobytes() == encoded(codec, [300], left).tobytes() + encoded(codec, [70], right).tobytes()


@every_codec
def test_any_bytes_decode_within_their_bounds(codec: str) -> None:
    """Bytes that no encoder writes decode to something: nothing beside the output is touched, nothing raised."""
    rng = np.random.default_rng(11)
    grid = Grid.of([5000, 3])
    for _ in range(20):
        data = rng.integers(0, 256, grid.wire_bytes(codec), dtype=np.uint8)
        fenced = np.full(grid.numel + 64, 7.0, np.float32)
        kernels.decode(codec, grid.boundaries, data, fenced[32:-32])
        assert (fenced[:32] == 7).all()
        assert (fenced[-32:] == 7).all()


# ---- grid codecs ----


@grid_codecs
@many
@given(any_vector)
def test_each_element_is_within_the_bound(codec: str, vector: Vector) -> None:
    segments, values = vector[0], within(codec, vector[1])
    error = np.abs(there_and_back(codec, segments, values).astype(np.float64) - values)
    assert np.all(error <= error_bound(codec, segments, values))


@grid_codecs
@many
@given(any_vector)
@example(([2], np.asarray([np.nextafter(np.float32(254), np.float32(0)), 1], np.float32)))
def test_encoding_twice_changes_nothing(codec: str, vector: Vector) -> None:
    segments, values = vector[0], within(codec, vector[1])
    data = encoded(codec, segments, values)
    once = decode(codec, segments, data)
    assert encoded(codec, segments, once).tobytes() == data.tobytes()


@grid_codecs
@many
@given(any_vector)
def test_grid_codecs_are_odd(codec: str, vector: Vector) -> None:
    segments, values = vector[0], within(codec, vector[1])
    np.testing.assert_array_equal(
        there_and_back(codec, segments, -values), -there_and_back(codec, segments, values)
    )


# ---- codebook codecs ----


@codebook_codecs
@many
@given(any_vector)
def test_a_codebook_never_lengthens(codec: str, vector: Vector) -> None:
    """Means are projections: |x - x'|^2 = |x|^2 - |x'|^2, but for the rounding of the codebook."""
    segments, values = vector
    wide = values.astype(np.float64)
    kept = there_and_back(codec, segments, values).astype(np.float64)
    dropped = ((wide - kept) ** 2).sum()
    rounding = 2.0**-22 * (wide**2).sum() + 1e-80
    assert abs(dropped - ((wide**2).sum() - (kept**2).sum())) <= rounding


@codebook_codecs
@pytest.mark.parametrize("size", [1, 2, 7, 63, 64])
@pytest.mark.parametrize("value", [3.0, -1e-40, 3.3e38])
def test_a_block_with_one_value_is_exact(codec: str, size: int, value: float) -> None:
    values = np.full(size, value, np.float32)
    assert same_bits(there_and_back(codec, [size], values), values)


@pytest.mark.parametrize("codec", ["topk", "topk256"])
@many
@given(any_vector)
def test_topk_keeps_the_largest(codec: str, vector: Vector) -> None:
    """E13c: what is left out is no larger than what is kept, so |x - top(x)|^2 <= (1 - k/n) |x|^2 in every block."""
    segments, values = vector
    spec, start = CODECS[codec], 0
    for size in segments:
        for first in range(start, start + size, spec.block):
            block = values[first : min(first + spec.block, start + size)]
            data = encoded(codec, [len(block)], block)
            positions = entry_positions(data[spec.header_bytes :], min(len(block), spec.kept))
            assert (np.diff(positions) > 0).all()
            left_out = np.delete(block.astype(np.float64), positions)
            kept = np.abs(block[positions])
            assert left_out.size == 0 or np.abs(left_out).max() <= kept.min()
            density = len(positions) / len(block)
            total = (block.astype(np.float64) ** 2).sum()
            assert (left_out**2).sum() <= (1 - density) * total * (1 + 1e-12)
        start += size


def entry_positions(stream: np.ndarray, count: int) -> np.ndarray:
    bits = np.unpackbits(stream, bitorder="little")[: 14 * count].reshape(count, 14)
    return (bits[:, :12] << np.arange(12)).sum(axis=1)


# ---- what is refused ----


@every_codec
def test_arguments_that_do_not_fit_are_refused(codec: str) -> None:
    grid = Grid.of([300])
    values, out = np.zeros(300, np.float32), np.zeros(grid.wire_bytes(codec), np.uint8)
    with pytest.raises(ValueError, match=r"length of values is 299; the grid needs 300"):
        kernels.encode(codec, grid.boundaries, values[:-1], out)
    with pytest.raises(ValueError, match=rf"length of out is {len(out) + 1}; the grid needs {len(out)}"):
        kernels.encode(codec, grid.boundaries, values, np.zeros(len(out) + 1, np.uint8))
    with pytest.raises(ValueError, match=r"length of data is 3"):
        kernels.decode(codec, grid.boundaries, out[:3], values)
    with pytest.raises(ValueError, match=r"length of residual is 299; the grid needs 300"):
        kernels.encode_with_feedback(codec, grid.boundaries, values, values[:-1], 1.0, out)
    with pytest.raises(ValueError, match=r"length of delta is 299; the grid needs 300"):
        kernels.update_residual(codec, grid.boundaries, values[:-1], 1.0, out, values)
    with pytest.raises(ValueError, match="boundaries must begin with 0"):
        kernels.encode(codec, grid.boundaries + 1, values, out)
    with pytest.raises(ValueError, match="weights are all zero"):
        kernels.weighted_mean(codec, grid.boundaries, [out], [0], out.copy())
    with pytest.raises(ValueError, match="length of weights is 2; contributions needs 1"):
        kernels.weighted_mean(codec, grid.boundaries, [out], [1, 2], out.copy())
    with pytest.raises(ValueError, match="does not fit 64 bits"):
        kernels.weighted_mean(codec, grid.boundaries, [out, out], [2**63, 2**63], out.copy())
    with pytest.raises(TypeError):
        kernels.weighted_mean(codec, grid.boundaries, [out], [-1], out.copy())


def test_an_unknown_codec_is_refused_with_the_list() -> None:
    names = ", ".join(CODECS)
    with pytest.raises(ValueError, match=f"unknown codec 'int5'; known: {names}$"):
        kernels.encode("int5", Grid.of([1]).boundaries, np.zeros(1, np.float32), np.zeros(1, np.uint8))


@every_codec
def test_arrays_are_never_converted(codec: str) -> None:
    grid = Grid.of([300])
    values, out = np.zeros(300, np.float32), np.zeros(grid.wire_bytes(codec), np.uint8)
    read_only = out.copy()
    read_only.flags.writeable = False
    frozen = values.copy()
    frozen.flags.writeable = False
    strided, doubles = np.zeros(600, np.float32)[::2], np.zeros(300, np.float64)
    for bad in (strided, doubles, values.reshape(1, 300), list(values)):
        with pytest.raises(TypeError):
            kernels.encode(codec, grid.boundaries, bad, out)  # pyrefly: ignore
        with pytest.raises(TypeError):
            kernels.decode(codec, grid.boundaries, out, bad)  # pyrefly: ignore
        with pytest.raises(TypeError):
            kernels.encode_with_feedback(codec, grid.boundaries, values, bad, 1.0, out)  # pyrefly: ignore
    with pytest.raises(TypeError):
        kernels.encode(codec, grid.boundaries, values, read_only)
    with pytest.raises(TypeError):
        kernels.update_residual(codec, grid.boundaries, values, 1.0, out, frozen)
    with pytest.raises(TypeError):
        kernels.weighted_mean(codec, grid.boundaries, [np.zeros(2 * len(out), np.uint8)[::2]], [1], out)
    with pytest.raises(TypeError):
        kernels.encode(codec, grid.boundaries.astype(np.int32), values, out)  # pyrefly: ignore
    kernels.decode(codec, grid.boundaries, read_only, values)
