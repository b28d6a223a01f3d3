"""A plan says each cut once on the wire, and is the same again afterwards."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from atoll.membership import messages
from atoll.membership.compact import compact, whole
from atoll.membership.messages import Reduce
from atoll.state.ownership import sharded_ranges
from atoll.values import Contribution, Lane, OpId, Plan, RankInfo

SHAPES = [(4096, 4), (1024, 4), (4096,)] * 60


def plan_of(counts: dict[str, int], **changes: Any) -> Plan:
    ranks = {
        peer: tuple(
            RankInfo(f"host-{peer}", 7000 + rank, sharded_ranges(SHAPES, rank, count), max_up=rank)
            for rank in range(count)
        )
        for peer, count in counts.items()
    }
    members = tuple(sorted(counts))
    contributions = tuple(Contribution(peer, 1) for peer in members)
    made = Plan(OpId(1, 2), 0, members, contributions, ranks, (Lane(members[0]),), "int8", 10.0)
    return msgspec.structs.replace(made, **changes)


def test_each_cut_travels_once() -> None:
    plan = plan_of({f"p{index:02}": 8 for index in range(40)} | {"q": 3, "r": 3, "s": 1})
    sent = messages.encode(Reduce(plan))
    one = messages.encode(Reduce(plan_of({"p00": 8, "q": 3, "s": 1})))
    assert len(sent) < len(one) + 42 * 8 * 80
    got = messages.decode_from_coordinator(sent)
    assert got == Reduce(plan)


def test_peers_of_one_rank_are_said_as_they_were() -> None:
    plan = plan_of({"a": 1, "b": 1})
    assert compact(plan) is plan
    assert whole(plan) is plan


@pytest.mark.parametrize("alike", [{"b": "c"}, {"b": "b"}, {"b": "a", "a": "b"}, {"z": "a"}], ids=str)
def test_nonsense_is_a_decode_error(alike: dict[str, str]) -> None:
    plan = plan_of({"a": 2, "b": 2}, alike=alike)
    with pytest.raises(ValueError, match="cannot be"):
        whole(plan)
    data = msgspec.msgpack.encode(Reduce(plan))
    with pytest.raises(msgspec.ValidationError):
        messages.decode_from_coordinator(data)


def test_another_number_of_ranks_is_not_alike() -> None:
    plan = plan_of({"a": 2, "b": 3}, alike={"b": "a"})
    with pytest.raises(ValueError, match="'b' is cut as 'a' is"):
        whole(plan)
