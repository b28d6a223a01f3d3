"""A newcomer that certainly needs a snapshot has one staged while it still asks who has what."""

from __future__ import annotations

import pytest

from atoll.membership.messages import Applied, Declare, Serve
from atoll.membership.steps import PeerArrived, Send
from atoll.values import ParameterInfo, RankInfo
from support.desk import SETTINGS, Desk

RANKS = (RankInfo("host", 1, (), sidecar_port=2),)


def at_version(version: int) -> Desk:
    """Two members with sidecars, so many commits, and a model of which an int8 update is an eighth of a snapshot."""
    desk = Desk(start_peers=2)
    desk.layout = (ParameterInfo("w", (1 << 16,), "float32"),)
    desk.join("a", "b", ranks=RANKS)
    for number in range(1, version + 1):
        digest = f"d{number - 1}"
        desk.ready("a", "b", digest=digest)
        desk.vote("a", f"r{number}")
        desk.vote("b", f"r{number}")
        for peer in ("a", "b"):
            desk.said(peer, Applied(number, f"d{number}"))
    return desk


@pytest.mark.parametrize(("version", "staged"), [(3, False), (9, True)])
def test_staging_begins_with_the_declaration_where_a_replay_would_be_more(version: int, staged: bool) -> None:
    desk = at_version(version)
    desk.hear(PeerArrived("c", "1", "host"))
    effects = desk.said("c", Declare(desk.layout, SETTINGS, RANKS, 0, 0, "d0", 0))
    orders = [each.message for each in effects if isinstance(each, Send) and isinstance(each.message, Serve)]
    assert orders == [Serve(version, staged)] * 2
