"""Replaying an update is a round below its commit line: the same bits, or nothing at all."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from atoll import kernels
from atoll.comm.digests import combined_digest, route_digests
from atoll.diloco.outer import OuterState
from atoll.diloco.schedule import RoundShape
from atoll.plan.routes import routing_of
from atoll.recovery.update import PIECE_BYTES, Update, decode_head, head_of, piece_bytes_of, replay
from atoll.state.snapshot import LoadedState
from atoll.values import CODECS, Contribution, OpId
from support.history import History
from support.rank_engines import GRID, Cut, cut_of, plan_with
from support.states import assert_same, copy_of

NUMEL = 5000


@pytest.mark.parametrize("codec", CODECS)
def test_a_replay_has_the_bits_of_the_commit(codec: str) -> None:
    history = History(NUMEL, codec)
    state = OuterState(history.start.anchor.copy())
    for _ in range(3):
        update, data = history.commit()
        mean = np.empty(NUMEL, dtype=np.float32)
        kernels.decode(codec, history.grid.boundaries, data, mean)
        state.commit(mean, RoundShape(update.inner_steps, update.lr, update.momentum, update.nesterov))
        state.round, state.step = (
            history.state.round,
            history.state.step,
        )  # of skipped rounds it heard elsewhere
        assert_same(state, history.state)


def test_step_and_round_are_those_after_the_commit_though_rounds_were_skipped() -> None:
    history = History(100)
    for _ in range(5):
        history.commit()
    assert (history.at(5).round, history.at(5).step) == (history.state.round, history.state.step)
    assert history.state.round > 5


def changed(**fields: object) -> Callable[[Update], Update]:
    return lambda update: msgspec.structs.replace(update, **fields)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (changed(version=3), "update 3 does not follow version 1"),
        (changed(version=1), "update 1 does not follow version 1"),
        (changed(boundaries=(0, 99)), "update 2 is for 99 elements, the state has 100"),
        (changed(result_digest="0" * 32), "the bytes given for update 2 are not those of the commit"),
        (changed(wire_bytes=5), "the bytes given for update 2 are not those of the commit"),
    ],
)
def test_what_does_not_follow_changes_nothing(change: Callable[[Update], Update], sentence: str) -> None:
    history = History(100)
    history.commit()
    before = copy_of(history.state)
    update, data = history.commit()
    state = copy_of(before)
    with pytest.raises(ValueError, match=sentence):
        replay(state, change(update), data)
    assert_same(state, before)
    replay(state, update, data)
    assert_same(state, history.state)


def test_a_head_tells_the_digest_of_every_piece() -> None:
    history = History(PIECE_BYTES + 100, "int8")
    update, data = history.commit()
    head = head_of(update, data)
    step = piece_bytes_of(data.size)
    assert len(head.pieces) == -(-data.size // step) > 1
    assert head.pieces[1] == kernels.digest_bytes(data[step : 2 * step]).hex()
    assert decode_head(msgspec.json.encode(head)) == head


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (changed(codec="zip"), "unknown codec 'zip'"),
        (changed(boundaries=(0,)), "its grid makes no sense"),
        (changed(boundaries=(0, 60, 50, 100)), "its grid makes no sense"),
        (changed(boundaries=(1, 100)), "its grid makes no sense"),
        (changed(wire_bytes=1 << 60), f"it has {1 << 60} bytes, its grid takes"),
    ],
)
def test_a_head_that_contradicts_itself_is_refused(change: Callable[[Update], Update], sentence: str) -> None:
    update, data = History(100).commit()
    head = msgspec.structs.replace(head_of(update, data), update=change(update))
    with pytest.raises(ValueError, match=sentence):
        decode_head(msgspec.json.encode(head))


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"update": 1}', b"\x80\x04cos\nsystem\n"])
def test_what_is_no_head_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="it is no update"):
        decode_head(data)


def test_small_updates_are_cut_finer_and_large_ones_as_snapshots_are() -> None:
    sizes = (1, 300_000, 5_000_000, 16 * PIECE_BYTES, 10**12)
    counts = [-(-size // piece_bytes_of(size)) for size in sizes]
    assert counts == [1, 2, 16, 16, -(-(10**12) // PIECE_BYTES)]


# ---- in the order of an op of peers that are cut differently ----


def routed_update(codec: str, cuts: dict[str, Cut]) -> tuple[Update, kernels.Bytes, LoadedState, np.ndarray]:
    """A commit of these peers: the update, its bytes in the order of the op, the state before, the mean."""
    routing = routing_of(plan_with(cuts, {}, codec, OpId(1, 1)), GRID)
    rng = np.random.default_rng(3)
    anchor, mean = rng.standard_normal((2, GRID.numel), dtype=np.float32)
    data = np.empty(routing.grid.wire_bytes(codec), dtype=np.uint8)
    assert routing.whole.encode(codec, mean, data)
    routing.whole.decode(codec, data, mean)
    rows = []
    for rank in range(len(cuts["c"])):
        part = routing.part("c", rank)
        own = np.concatenate([data[place] for place in routing.wire_slices(codec, part)])
        rows.append(route_digests(routing, codec, "c", rank, own))
    update = Update(
        version=1,
        op=OpId(1, 1),
        round=1,
        step=0,
        inner_steps=5,
        lr=0.7,
        momentum=0.9,
        nesterov=True,
        codec=codec,
        contributions=(Contribution("a", 1),),
        boundaries=tuple(routing.grid.boundaries.tolist()),
        wire_bytes=data.size,
        result_digest=combined_digest(routing, rows),
        order=routing.order,
        routes=tuple(routing.wire_cuts(codec).tolist()) if len(routing.routes) > 1 else (),
    )
    return update, data, LoadedState(anchor, np.zeros_like(anchor), version=0, round=0, step=0), mean


@pytest.mark.parametrize("codec", ["fp32", "int8", "stat2"])
def test_an_update_of_peers_that_are_cut_differently_is_replayed_on_a_whole_vector(codec: str) -> None:
    """Whoever replays it may be cut otherwise again: its anchor is in the model's own order."""
    update, data, state, mean = routed_update(codec, {"a": cut_of(1), "b": cut_of(2), "c": cut_of(3)})
    assert len(update.order) > len(update.routes) - 1 == 4
    expected = OuterState(state.anchor.copy())
    expected.commit(mean, RoundShape(update.inner_steps, update.lr, update.momentum, update.nesterov))
    head = decode_head(msgspec.json.encode(head_of(update, data)))
    assert head.update == update
    replay(state, head.update, data)
    np.testing.assert_array_equal(state.anchor, expected.anchor)
    np.testing.assert_array_equal(state.velocity, expected.velocity)


def test_where_nobody_is_cut_an_update_says_nothing_of_an_order() -> None:
    update, data, _, _ = routed_update("int8", {"a": cut_of(1), "c": cut_of(1)})
    assert (update.order, update.routes) == ((), ())
    assert update.result_digest == kernels.digest_bytes(data).hex()
    old = msgspec.to_builtins(head_of(update, data))  # as it was written before there was an order
    del old["update"]["order"], old["update"]["routes"]
    assert decode_head(msgspec.json.encode(old)).update == update


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda u: changed(order=u.order[1:])(u), "its order"),
        (lambda u: changed(order=(*u.order, u.order[0]))(u), "its order"),
        (lambda u: changed(order=((0, 1), (1, u.boundaries[-1])))(u), "its order"),
        (lambda u: changed(order=((5, 5), *u.order))(u), "its order"),
        (lambda u: changed(order=tuple((a - 3, b - 3) for a, b in u.order))(u), "its order"),
        (lambda u: changed(routes=u.routes[1:])(u), "its routes"),
        (lambda u: changed(routes=(0, *u.routes))(u), "its routes"),
    ],
)
def test_an_order_that_is_none_is_refused(change: Callable[[Update], Update], sentence: str) -> None:
    update, data, _, _ = routed_update("int8", {"a": cut_of(1), "b": cut_of(2), "c": cut_of(3)})
    with pytest.raises(ValueError, match=f"{sentence} makes? no sense"):
        decode_head(msgspec.json.encode(head_of(change(update), data)))
