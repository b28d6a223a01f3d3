"""Routes: whoever is cut how, each element has one place in the op, and each rank finds its own there."""

from __future__ import annotations

import re
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.plan.chunks import chunk_table
from atoll.plan.grid import Grid
from atoll.plan.routes import Routing, routing
from atoll.runs import Runs
from atoll.state.feedback import ErrorFeedback
from atoll.values import CODECS, Lane, Range, RankInfo
from support.rank_engines import GRID, Cut, cut_of, own_vector

codecs = st.sampled_from(sorted(CODECS))


def ranks_of(cuts: dict[str, Cut]) -> dict[str, tuple[RankInfo, ...]]:
    return {peer: tuple(RankInfo("h", 1, own) for own in cut) for peer, cut in cuts.items()}


def routing_for(cuts: dict[str, Cut], grid: Grid = GRID) -> Routing:
    return routing(tuple(cuts), ranks_of(cuts), grid)


@st.composite
def any_cut(draw: st.DrawFn, numel: int) -> Cut:
    """Some ranks, of which each owns any pieces, or none."""
    num_ranks = draw(st.integers(1, 4))
    inner = st.sets(st.integers(1, numel - 1), max_size=6) if numel > 1 else st.just(set())
    ends = [0, *sorted(draw(inner)), numel]
    owners = draw(st.lists(st.integers(0, num_ranks - 1), min_size=len(ends) - 1, max_size=len(ends) - 1))
    pieces = list(zip(ends, ends[1:], owners, strict=False))
    return tuple(tuple(Range(a, b) for a, b, owner in pieces if owner == rank) for rank in range(num_ranks))


@st.composite
def a_run(draw: st.DrawFn) -> tuple[Grid, dict[str, Cut]]:
    shapes = draw(
        st.lists(
            st.one_of(
                st.just(()), st.tuples(st.integers(1, 40)), st.tuples(st.integers(1, 9), st.integers(1, 700))
            ),
            min_size=1,
            max_size=5,
        )
    )
    grid = Grid.of([int(np.prod(shape)) for shape in shapes])
    by_rows = st.integers(1, 5).map(lambda count: cut_of(count, shapes))
    cuts = draw(st.lists(st.one_of(by_rows, any_cut(grid.numel)), min_size=1, max_size=4))
    return grid, {f"p{i}": cut for i, cut in enumerate(cuts)}


def owner_of_each(cut: Cut, numel: int) -> np.ndarray:
    owners = np.full(numel, -1)
    for rank, own in enumerate(cut):
        for each in own:
            owners[each.start : each.stop] = rank
    return owners


@given(a_run(), codecs)
def test_every_element_has_one_place_and_every_rank_finds_its_own(
    run: tuple[Grid, dict[str, Cut]], codec: str
) -> None:
    grid, cuts = run
    found = routing_for(cuts, grid)
    position = np.arange(grid.numel, dtype=np.float32)
    in_op = np.full(grid.numel, -1.0, dtype=np.float32)
    for start, cut, stop in zip(found.whole.starts, found.whole.cuts, found.whole.cuts[1:], strict=False):
        in_op[cut:stop] = position[start : start + stop - cut]
    order = in_op.astype(int)
    assert sorted(order) == list(range(grid.numel))
    assert sum(stop - start for start, stop in found.order or ((0, grid.numel),)) == grid.numel
    # Along a route nobody's owner changes, and two routes differ in somebody's.
    owners = np.stack([owner_of_each(cut, grid.numel)[order] for cut in cuts.values()], axis=1)
    for route, ranks in enumerate(found.routes):
        stretch = slice(int(found.cuts[route]), int(found.cuts[route + 1]))
        assert (owners[stretch] == ranks).all()
        assert (np.diff(order[stretch]) > 0).all()
    assert len(set(found.routes)) == len(found.routes)
    assert found.cuts[-1] == grid.numel
    # Blocks begin anew at every parameter and at every cut of a member.
    changes = np.flatnonzero(
        np.diff(np.stack([owner_of_each(c, grid.numel) for c in cuts.values()]), axis=1).any(0)
    )
    expected = sorted({*grid.boundaries.tolist(), *(changes + 1).tolist()})
    assert sorted({*found.starts.tolist(), grid.numel}) == expected
    # What each rank sees of the op is what it owns of the model.
    for peer, cut in cuts.items():
        whole, seen = position[order], 0
        for rank in range(len(cut)):
            part = found.part(peer, rank)
            mine = own_vector(cut, rank, position)
            assert part.grid.numel == mine.size
            local = np.concatenate(
                [whole[found.cuts[route] : found.cuts[route + 1]] for route in part.routes] or [mine[:0]]
            )
            at = np.concatenate(
                [
                    mine[s : s + b - a]
                    for s, a, b in zip(part.runs.starts, part.runs.cuts, part.runs.cuts[1:], strict=False)
                ]
                or [mine[:0]]
            )
            np.testing.assert_array_equal(at, local)
            wire = sum(each.stop - each.start for each in found.wire_slices(codec, part))
            assert wire == part.grid.wire_bytes(codec) == part.runs.wire_bytes(codec)
            seen += wire
        assert seen == found.grid.wire_bytes(codec)


@given(a_run(), codecs, st.integers(0, 1 << 30))
def test_ranks_encode_and_decode_what_the_whole_is(
    run: tuple[Grid, dict[str, Cut]], codec: str, seed: int
) -> None:
    """Also with error feedback: the residual is in the order of the vector."""
    grid, cuts = run
    found = routing_for(cuts, grid)
    rng = np.random.default_rng(seed)
    values, residual = rng.standard_normal((2, grid.numel), dtype=np.float32)
    data = np.empty(found.grid.wire_bytes(codec), np.uint8)
    assert found.whole.encode_with_feedback(codec, values, residual, 0.5, data)
    decoded, owed = np.empty_like(values), residual.copy()
    found.whole.decode(codec, data, decoded)
    found.whole.update_residual(codec, values, 0.5, data, owed)
    for peer, cut in cuts.items():
        for rank in range(len(cut)):
            part = found.part(peer, rank)
            own, own_owed = own_vector(cut, rank, values), own_vector(cut, rank, residual)
            wire = np.empty(part.grid.wire_bytes(codec), np.uint8)
            assert part.runs.encode_with_feedback(codec, own, own_owed, 0.5, wire)
            places = found.wire_slices(codec, part)
            np.testing.assert_array_equal(wire, np.concatenate([data[each] for each in places] or [data[:0]]))
            back = np.empty_like(own)
            part.runs.decode(codec, wire, back)
            np.testing.assert_array_equal(back, own_vector(cut, rank, decoded))
            part.runs.update_residual(codec, own, 0.5, wire, own_owed)
            np.testing.assert_array_equal(own_owed, own_vector(cut, rank, owed))


@given(a_run(), st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any), st.integers(1, 3000))
def test_chunks_are_whole_blocks_of_one_route(
    run: tuple[Grid, dict[str, Cut]], shares: list[int], chunk_bytes: int
) -> None:
    grid, cuts = run
    found = routing_for(cuts, grid)
    lanes = [Lane(root=f"p{i}", share=share) for i, share in enumerate(shares)]
    table = chunk_table(found.grid, lanes, "int8", chunk_bytes, found.cuts)
    assert table.starts[0] == 0
    assert table.starts[-1] == grid.numel
    assert (np.diff(table.starts) > 0).all()
    assert set(found.cuts.tolist()) <= set(table.starts.tolist())
    np.testing.assert_array_equal(
        np.searchsorted(found.cuts, table.starts[:-1], side="right") - 1, table.routes
    )
    assert table.offsets[-1] == found.grid.wire_bytes("int8")
    for route in range(len(found.routes)):
        assert (np.diff(table.lanes[table.routes == route]) >= 0).all()
    assert all(shares[lane] for lane in table.lanes)


def test_lanes_share_every_route_as_they_share_the_whole() -> None:
    grid = Grid.of([9000 * 256] * 4)
    cuts = {
        "a": cut_of(1, [(9000, 256)] * 4),
        "b": cut_of(2, [(9000, 256)] * 4),
        "c": cut_of(3, [(9000, 256)] * 4),
    }
    found = routing_for(cuts, grid)
    lanes = [Lane("a", 1), Lane("b", 2), Lane("c", 5)]
    table = chunk_table(found.grid, lanes, "int8", 1 << 16, found.cuts)
    for route in range(len(found.routes)):
        sizes = np.zeros(3)
        np.add.at(sizes, table.lanes[table.routes == route], np.diff(table.starts)[table.routes == route])
        np.testing.assert_allclose(sizes / sizes.sum(), [1 / 8, 2 / 8, 5 / 8], atol=0.001)
    assert np.diff(table.offsets).max() <= 1 << 16


def test_a_short_route_is_not_cut_to_crumbs() -> None:
    """Lanes of 64 members would get single blocks of it: each would cost two headers and a turn of the loop."""
    cuts = {
        "a": ((Range(0, 1 << 22),), (Range(1 << 22, (1 << 22) + 8192),)),
        "b": ((Range(0, (1 << 22) + 8192),),),
    }
    found = routing_for(cuts, Grid.of([(1 << 22) + 8192]))
    lanes = [Lane(f"p{i}") for i in range(64)]
    table = chunk_table(found.grid, lanes, "int8", 1 << 20, found.cuts)
    assert (table.routes == 1).sum() == 1
    assert len(table) == 65


def test_one_rank_in_each_member_is_what_it_was_without_routes() -> None:
    whole = Range(0, GRID.numel)
    halves = (Range(0, 100), Range(100, GRID.numel))  # the same, told in two pieces
    found = routing_for({"a": ((whole,),), "b": (halves,)})
    assert found.grid is GRID
    assert found.is_identity
    assert found.order == ()
    assert found.order_key == 0
    assert found.routes == ((0, 0),)
    part = found.part("b", 0)
    assert part.grid is GRID
    assert len(part.runs) == 1
    lanes = [Lane("a", 3), Lane("b", 4)]
    plain, routed = chunk_table(GRID, lanes, "int8", 999), chunk_table(GRID, lanes, "int8", 999, found.cuts)
    for name in ("starts", "offsets", "lanes", "routes"):
        np.testing.assert_array_equal(getattr(plain, name), getattr(routed, name))


def test_members_that_are_cut_alike_have_a_route_for_each_rank_and_keep_their_own_order() -> None:
    found = routing_for({"a": cut_of(2), "b": cut_of(2)})
    assert found.routes == ((0, 0), (1, 1))
    for rank in (0, 1):
        part = found.part("a", rank)
        assert len(part.runs) == 1
        np.testing.assert_array_equal(part.runs.starts, [0])


def test_the_same_sizes_in_another_order_have_another_key() -> None:
    grid = Grid.of([512] * 4)
    ranges = [Range(at, at + 512) for at in range(0, 2048, 512)]
    plain = ((Range(0, 2048),),)
    keys, boundaries = set(), set()
    for own in ((0, 1), (0, 2), (0, 3)):
        cut = tuple(tuple(r for i, r in enumerate(ranges) if (i in own) == first) for first in (True, False))
        found = routing_for({"a": plain, "b": cut}, grid)
        keys.add(found.order_key)
        boundaries.add(found.grid.segments)
    assert boundaries == {(512,) * 4}
    assert len(keys) == 3


@pytest.mark.parametrize(
    ("cut", "sentence"),
    [
        ((((0, 9),), ((5, 12),)), "peer 'b' rank 1 owns elements 5 to 9, which its rank 0 owns too"),
        ((((0, 5),), ((5, 9),)), "nobody of peer 'b' owns elements 9 to 12"),
        ((((3, 12),), ()), "nobody of peer 'b' owns elements 0 to 3"),
        ((((0, 3),), ((5, 12),)), "nobody of peer 'b' owns elements 3 to 5"),
        (((), ()), "nobody of peer 'b' owns elements 0 to 12"),
        ((((0, 5), (2, 12)),), "peer 'b' rank 0 owns elements 2 to 5, twice"),
        ((((0, 12),), ((12, 14),)), "peer 'b' rank 1 owns elements 12 to 14; the model has 0 to 12"),
        ((((-2, 12),),), "peer 'b' rank 0 owns elements -2 to 12; the model has 0 to 12"),
        (
            (((0, 1 << 64),),),
            "peer 'b' rank 0 owns elements 0 to 18446744073709551616; the model has 0 to 12",
        ),
        ((((0, 12), (7, 5)),), "peer 'b' rank 0 owns elements 7 to 5; the model has 0 to 12"),
    ],
)
def test_ranks_that_do_not_own_each_element_once_are_refused(
    cut: tuple[tuple[tuple[int, int], ...], ...], sentence: str
) -> None:
    grid = Grid.of([7, 5])
    cuts = {"a": ((Range(0, 12),),), "b": tuple(tuple(Range(*each) for each in own) for own in cut)}
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        routing_for(cuts, grid)


def test_sixty_four_peers_of_eight_ranks_are_routed_at_once() -> None:
    """No absolute speed is asserted, but the work is: members that are cut alike are looked at once."""
    shapes = [(1024, 64 + i % 7) for i in range(300)]
    grid = Grid.of([int(np.prod(shape)) for shape in shapes])
    cuts = {f"p{i:02d}": cut_of(8 if i else 7, shapes) for i in range(64)}
    begin = time.perf_counter()
    found = routing_for(cuts, grid)
    again = routing_for(cuts, grid)
    print(f"{time.perf_counter() - begin:.3f} s for two")
    assert found is again
    assert len(found.routes) == 14


def test_a_vector_of_the_wrong_length_is_found() -> None:
    several = routing_for({"a": cut_of(1), "b": cut_of(2)}).whole
    assert len(several) > 1
    for runs in (Runs.of_whole(GRID.boundaries), several):
        for elements, size in (
            (GRID.numel + 1, runs.wire_bytes("int8")),
            (GRID.numel, runs.wire_bytes("int8") - 1),
        ):
            with pytest.raises(ValueError, match=f"{elements} elements in {size} bytes"):
                runs.encode("int8", np.zeros(elements, np.float32), np.zeros(size, np.uint8))


def test_feedback_goes_on_when_the_members_are_cut_otherwise() -> None:
    """What is owed is the rank's own, in the order of its vector: another grid only changes what is dropped next."""
    rng = np.random.default_rng(4)
    delta, later = rng.standard_normal((2, GRID.numel), dtype=np.float32)
    feedback = ErrorFeedback("int4", GRID.boundaries, 1.0)
    sent = np.zeros(GRID.numel, np.float32)
    for values, cuts in ((delta, {"a": cut_of(1)}), (later, {"a": cut_of(1), "b": cut_of(3)})):
        part = routing_for(cuts).part("a", 0)
        feedback.follow(part.runs)
        data = np.empty(part.grid.wire_bytes("int4"), np.uint8)
        assert feedback.encode(values, data)
        feedback.commit(values, data)
        decoded = np.empty_like(values)
        part.runs.decode("int4", data, decoded)
        sent += decoded
    assert feedback.residual is not None
    np.testing.assert_allclose(sent + feedback.residual, delta + later, atol=1e-5)
