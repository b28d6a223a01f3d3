"""Prices against closed forms and slow walks; bounds that nothing beats; connections and chunk sizes."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from atoll.plan.bounds import bounds
from atoll.plan.candidates import BUILDERS, Task
from atoll.plan.connections import (
    INITIAL_BYTES,
    MOST,
    MOST_UNDER_LOSS,
    SEGMENT_BYTES,
    chunk_size,
    connections,
    start_seconds,
    stream_bytes,
    streams,
)
from atoll.plan.links import Links
from atoll.plan.planner import choose
from atoll.plan.price import loads, price
from atoll.plan.ring import chains
from atoll.plan.shapes import Tree, avoids, re_encodings, used_links
from atoll.values import Edge, Lane, LinkRate, PlanRequest
from support.networks import MB, links_of, names, random_links, random_tree, slow_moved

V = 100 * MB
SEEDS = range(40)


def even(count: int, bytes_per_s: float, delay_s: float = 0.0) -> Links:
    return links_of(lambda i, j: bytes_per_s, [bytes_per_s] * count, delay_s=delay_s)


@pytest.mark.parametrize("count", [2, 3, 4, 8, 64])
def test_equal_direct_lanes_cost_what_algebra_says(count: int) -> None:
    """2 V (N - 1) / (N b), one round trip, and a chunk on each of two hops."""
    rate, delay_s, chunk = 12.5 * MB, 0.04, 65536
    cost = price(
        even(count, rate, delay_s), [Lane(m) for m in names(count)], V, codec="int8", chunk_bytes=chunk
    )
    assert cost.busy_s == pytest.approx(2 * V * (count - 1) / (count * rate))
    assert cost.last_s == pytest.approx(2 * (delay_s + chunk / rate))


@pytest.mark.parametrize("count", [3, 5, 8])
def test_a_ring_costs_as_much_and_its_delays_add_up(count: int) -> None:
    rate, delay_s, chunk = 12.5 * MB, 0.01, 65536
    lanes = [tree.lane(names(count)) for tree in chains(list(range(count)))]
    cost = price(even(count, rate, delay_s), lanes, V, codec="int8", chunk_bytes=chunk)
    assert cost.busy_s == pytest.approx(2 * V * (count - 1) / (count * rate))
    assert cost.last_s == pytest.approx(2 * (count - 1) * (delay_s + chunk / rate))


def test_one_root_alone_is_a_server() -> None:
    """All contributions come in at its downlink, all results go out at its uplink."""
    cost = price(even(5, 10 * MB), [Lane(names(5)[2])], V, codec="int8")
    assert cost.busy_s == pytest.approx(4 * V / (10 * MB))
    assert cost.bottleneck in {"the uplink of p0002", "the downlink of p0002"}


def test_who_does_not_contribute_sends_nothing_up() -> None:
    cost = price(even(2, 10 * MB), [Lane("p0000")], V, codec="int8", contributors=["p0000"])
    assert cost.busy_s == pytest.approx(V / (10 * MB))


def test_the_codec_is_a_bottleneck_where_links_are_not() -> None:
    cost = price(even(4, 1e12), [Lane(m) for m in names(4)], V, codec="int8")
    assert "the codec" in cost.bottleneck
    assert cost.busy_s == pytest.approx((V + V / 4 * 5) / (1e9 * 260 / 256))


def test_a_link_that_cannot_be_used_has_no_price() -> None:
    links = links_of(lambda i, j: 0 if {i, j} == {0, 1} else 10 * MB, [10 * MB] * 3)
    assert price(links, [Lane("p0000")], V, codec="int8").seconds == math.inf
    assert price(links, [Lane("p0002")], V, codec="int8").seconds < math.inf


@pytest.mark.parametrize("seed", SEEDS)
def test_bytes_agree_with_a_walk_over_trees(seed: int) -> None:
    rng = random.Random(seed)
    members = names(rng.randint(2, 7))
    lanes = [random_tree(rng, members, rng.randint(1, 4)) for _ in range(rng.randint(1, 4))]
    lanes += [Lane(rng.choice(members), 2)]
    contributors = set(rng.sample(members, rng.randint(1, len(members))))
    contributes = np.asarray([member in contributors for member in members])
    found = loads(members, lanes, V, contributes).links
    assert found == pytest.approx(slow_moved(lanes, members, contributors, V)), f"seed {seed}"


@pytest.mark.parametrize("seed", SEEDS)
def test_the_last_chunk_takes_the_longest_way(seed: int) -> None:
    rng = random.Random(seed)
    links, chunk = random_links(rng, rng.randint(2, 6)), 65536
    lane = random_tree(rng, links.members)

    def way_s(node: int, parents: tuple[int, ...], up: bool) -> float:
        seconds, root = 0.0, links.members.index(lane.root)
        while node != root:
            i, j = (node, parents[node]) if up else (parents[node], node)
            seconds += links.delay_s[i, j] + chunk / links.flow[i, j]
            node = parents[node]
        return seconds

    nodes = range(len(links))
    expected = max(way_s(i, lane.up, True) for i in nodes) + max(way_s(i, lane.down, False) for i in nodes)
    assert price(links, [lane], V, codec="int8", chunk_bytes=chunk).last_s == pytest.approx(expected), (
        f"seed {seed}"
    )


def slow_start_s(num_bytes: float, bytes_per_s: float, rtt_s: float, num_streams: int) -> float:
    """Round trip by round trip: what is sent doubles until it fills the way. How much later than at full rate."""
    sent, now_s, window = 0.0, 0.0, float(num_streams * INITIAL_BYTES)
    while window < bytes_per_s * rtt_s and sent + window < num_bytes:
        sent, now_s, window = sent + window, now_s + rtt_s, 2 * window
    rate = min(window / rtt_s, bytes_per_s)
    return now_s + (num_bytes - sent) / rate - num_bytes / bytes_per_s


@pytest.mark.parametrize("seed", SEEDS)
def test_streams_get_under_way_in_round_trips(seed: int) -> None:
    """Within a round trip of what a walk through them gives: there the last doubling is whole."""
    rng = random.Random(seed)
    num_bytes, rate, rtt_s = (
        10 ** rng.uniform(4, 9),
        10 ** rng.uniform(5.5, 8.5),
        rng.choice((0.001, 0.03, 0.15)),
    )
    num_streams = rng.choice((1, 4, 16))
    found = start_seconds(num_bytes, rate, rtt_s, num_streams)
    assert found >= 0
    assert found == pytest.approx(slow_start_s(num_bytes, rate, rtt_s, num_streams), abs=rtt_s), (
        f"seed {seed}"
    )


def test_a_long_way_is_slow_at_first() -> None:
    """Two at 200 Mbit/s, 80 ms, after a pause: fourteen streams lose 0.19 s, one 0.49 s; a short way loses nothing."""
    lanes = [Lane(member) for member in names(2)]

    def start_s(delay_s: float, num_connections: int) -> float:
        links = even(2, 24.1 * MB, delay_s)
        return price(links, lanes, V, codec="int8", num_connections=num_connections).start_s

    assert start_s(0.04, 14) == pytest.approx(0.19, abs=0.01)
    assert start_s(0.04, 1) == pytest.approx(0.49, abs=0.01)
    assert start_s(0.0001, 1) == 0.0


def test_few_connections_cannot_fill_a_fat_way() -> None:
    """4 Gbit/s at 80 ms: eight streams of 3 MiB each carry 314 MB/s, sixteen all of it."""
    lanes = [Lane(member) for member in names(2)]
    links = even(2, 482 * MB, 0.04)
    eight, sixteen = (price(links, lanes, 800 * MB, codec="fp32", num_connections=n) for n in (8, 16))
    assert eight.bottleneck == "the link of p0000 to p0001"
    assert 800 * MB / eight.busy_s == pytest.approx(8 * (3 << 20) / 0.08)
    assert 800 * MB / sixteen.busy_s == pytest.approx(482 * MB)


# ---- bounds ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_no_topology_beats_the_bounds(seed: int) -> None:
    rng = random.Random(seed)
    links = random_links(rng, rng.randint(2, 9), unusable=rng.choice((0.0, 0.2)))
    contributors = tuple(rng.sample(links.members, rng.randint(1, len(links))))
    least_s = bounds(links, V, contributors).seconds
    task = Task(links, V, "int8", contributors)
    for name, build in BUILDERS.items():
        found = build(task)
        if found.lanes:
            assert found.price.busy_s >= least_s * (1 - 1e-9), f"seed {seed}: {name}"


def test_bounds_of_equal_members_are_reached() -> None:
    found = bounds(even(8, 10 * MB), V)
    assert found.balanced_s == pytest.approx(2 * V * 7 / (8 * 10 * MB))
    assert found.own_s == pytest.approx(V / (10 * MB))
    assert found.seconds == found.balanced_s


def test_a_slow_member_must_send_and_hear_all() -> None:
    links = links_of(lambda i, j: 1e9, [125 * MB] * 7 + [12.5 * MB])
    assert bounds(links, V).seconds == pytest.approx(8.0)


def test_a_thin_cut_bounds() -> None:
    links = links_of(lambda i, j: 100 * MB if i // 2 == j // 2 else MB, [1e9] * 4)
    assert bounds(links, V).seconds == pytest.approx(V / (4 * MB))
    big = links_of(lambda i, j: 100 * MB if i // 8 == j // 8 else MB, [1e10] * 16)
    assert bounds(big, V).seconds == pytest.approx(V / (64 * MB))


# ---- connections and chunks ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bytes_per_s", "rtt_s", "loss", "window", "expected"),
    [
        (125 * MB, 0.1, 0.0, 4 << 20, 3),
        (125 * MB, 0.1, 0.0, 212 << 10, 58),
        (125 * MB, 0.1, 1e-4, 4 << 20, 71),  # 14 Mbit/s each
        (125 * MB, 0.0, 0.0, 4 << 20, 1),
        (0.0, 0.1, 0.0, 4 << 20, 1),
    ],
)
def test_streams_fill_the_way(
    bytes_per_s: float, rtt_s: float, loss: float, window: int, expected: int
) -> None:
    assert streams(bytes_per_s, rtt_s, loss, window) == expected


@pytest.mark.parametrize(
    ("count", "rate", "delay_s", "expected"),
    [
        (2, 500 * MB, 0.04, 16),  # 4 Gbit/s at 80 ms: 40 MB on the way need more than any pair gets
        (2, 25 * MB, 0.04, 16),  # 200 Mbit/s at 80 ms fit one window, which takes long to open
        (4, 25 * MB, 0.04, 6),  # a third of it
        (2, 2.5 * MB, 0.04, 4),  # a few for losses
        (2, 25 * MB, 0.004, 1),  # a short way
        (2, 500 * MB, 0.0001, 1),
        (1000, 125 * MB, 0.04, 1),  # nobody holds thousands of sockets
    ],
)
def test_connections_by_rate_and_round_trip(count: int, rate: float, delay_s: float, expected: int) -> None:
    moved = np.full((count, count), rate) * (1 - np.eye(count)) / (count - 1)
    assert connections(even(count, rate, delay_s), moved, 1.0) == expected


def test_chunks_are_smaller_on_slow_links_and_in_deep_trees() -> None:
    lanes = [Lane(m) for m in names(4)]
    assert chunk_size(even(4, 125 * MB), lanes, V, 1) == 1 << 20
    assert chunk_size(even(4, 6.25 * MB), lanes, V, 1) == 256 << 10
    assert chunk_size(even(4, 125 * MB), lanes, V, 16) == 128 << 10
    assert chunk_size(even(4, 125 * MB), lanes, 1000, 1) == 32 << 10
    assert chunk_size(even(4, 125 * MB), lanes, V, 1, 16) == 128 << 10


def test_the_chunks_of_all_connections_do_not_hold_up_a_slow_line() -> None:
    """Twelve of 256 kB at once would take half a second of 50 Mbit/s before the first of them is there."""
    lanes = [Lane(m) for m in names(4)]
    assert chunk_size(even(4, 6.25 * MB), lanes, V, 1, 4) == 64 << 10
    around = [Lane(names(4)[3], 1, (1, 2, 3, 3), (3, 0, 1, 3))]  # each sends to one
    assert chunk_size(even(4, 6.25 * MB), around, V, 1, 4) == 256 << 10


# ---- losses ----------------------------------------------------------------------------------------------


def lossy(count: int, bytes_per_s: float, delay_s: float, loss: float) -> Links:
    """The first member's link to the second loses packets."""
    lost = np.zeros((count, count))
    lost[0, 1] = loss
    return replace(even(count, bytes_per_s, delay_s), loss=lost)


@pytest.mark.parametrize(("loss", "num_streams"), [(1e-3, 1), (1e-3, 8), (1e-2, 32)])
def test_streams_that_lose_packets_carry_what_mathis_says(loss: float, num_streams: int) -> None:
    rtt_s, lanes = 0.1, [Lane(m) for m in names(2)]
    each = SEGMENT_BYTES / rtt_s * math.sqrt(1.5 / loss)
    cost = price(lossy(2, 25 * MB, rtt_s / 2, loss), lanes, V, codec="int8", num_connections=num_streams)
    assert cost.busy_s == pytest.approx(V / (num_streams * each))
    assert cost.bottleneck == f"the link of p0000 to p0001, which loses {100 * loss:.2g} % of its packets"


def test_the_last_chunks_wait_for_what_is_lost_and_for_the_slowest_stream() -> None:
    rtt_s, loss, chunk, lanes = 0.1, 1e-3, 65536, [Lane("p0001")]
    links, whole = lossy(2, 25 * MB, rtt_s / 2, loss), even(2, 25 * MB, rtt_s / 2)
    found = [
        price(each, lanes, V, codec="int8", chunk_bytes=chunk, num_connections=8).last_s
        for each in (whole, links)
    ]
    again = 1 - (1 - loss) ** (8 * chunk / SEGMENT_BYTES)
    half = SEGMENT_BYTES / rtt_s * math.sqrt(1.5 / loss) / 2
    assert found[0] == pytest.approx(rtt_s + 2 * chunk / (25 * MB))
    assert found[1] == pytest.approx(found[0] + again * rtt_s + chunk / half - chunk / (25 * MB), rel=1e-3)


def test_few_losses_bound_nothing() -> None:
    lanes = [Lane(m) for m in names(2)]
    moved = np.full((2, 2), V / 2) * (1 - np.eye(2))
    links, whole = lossy(2, 25 * MB, 0.05, 1e-7), even(2, 25 * MB, 0.05)
    assert price(links, lanes, V, codec="int8").busy_s == price(whole, lanes, V, codec="int8").busy_s
    assert connections(links, moved, 4.0) == connections(whole, moved, 4.0)
    assert (stream_bytes(links) == stream_bytes(whole)).all()


@pytest.mark.parametrize("loss", [1e-3, 5e-3, 2e-2])
def test_connections_do_not_dwindle_on_a_way_that_loses_packets(loss: float) -> None:
    """A round shows what so many streams could carry; planned from that alone the next would get fewer, and so on."""
    line, rtt_s = 25 * MB, 0.1
    members, streams_now = names(2), 4
    counts = []
    for _ in range(6):
        each = SEGMENT_BYTES / rtt_s * math.sqrt(1.5 / loss)
        rate = min(line, streams_now * each)
        seen = tuple(LinkRate(*ends, rate, rtt_s, loss) for ends in (members, members[::-1]))
        streams_now = choose(PlanRequest(members, members, 10 * MB, "int8", links=seen)).connections
        counts.append(streams_now)
    assert counts == sorted(counts)
    assert MOST < counts[-1] <= MOST_UNDER_LOSS or counts[-1] * each >= line


# ---- trees -----------------------------------------------------------------------------------------------


def test_a_star_uses_the_links_of_its_root() -> None:
    members = ("a", "b", "c")
    assert used_links([Lane("a")], members) == {
        Edge("a", "b"),
        Edge("b", "a"),
        Edge("a", "c"),
        Edge("c", "a"),
    }
    assert avoids([Lane("a")], members, {Edge("b", "c")})
    assert not avoids([Lane("a")], members, {Edge("a", "c")})
    assert not avoids([Lane("a", 1, (0, 0, 1), (0, 0, 0))], members, {Edge("b", "c")}), "c sends to b"


def test_sums_on_their_way_are_encoded_once_per_inner_member() -> None:
    assert re_encodings(Tree.of(Lane("a"), ("a", "b"))) == 0
    assert [re_encodings(tree) for tree in chains([0, 1, 2, 3, 4])] == [3] * 5


@pytest.mark.parametrize("parents", [(0, 2, 1), (1, 1, 0), (0, 0), (0, 0, 7), (0, 0, -1)])
def test_what_is_no_tree_is_refused(parents: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="root 0"):
        Tree.of(Lane("a", 1, parents, (0, 0, 0)), ("a", "b", "c"))
