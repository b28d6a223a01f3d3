"""Which way is taken to each peer: candidates in turn, the relay last, and direct again where it goes."""

from __future__ import annotations

from atoll.network.wireguard import Change, Seen
from atoll.network.wireguard_keys import address_of, checked_network
from atoll.network.wireguard_mesh import AGAIN_S, LOST_S, MOST_TRY_S, TRIES_AGAIN, TRY_S, Listed, Mesh, Peer

NETWORK = checked_network("fd00:1:2:3::/64")
OWN, A, H = (letter * 32 for letter in (b"o", b"a", b"h"))
PRIVATE, PUBLIC, HUB = ("192.168.1.5", 51820), ("203.0.113.7", 51820), ("192.0.2.1", 51820)
RELAY = ("192.0.2.1", 51821)


def listed(name: str, key: bytes, *endpoints: str, relay_port: int = 51821) -> Listed:
    return Listed(name, key, 51820, 9, relay_port, endpoints)


PEER = listed("a", A, "203.0.113.7:51820", "192.168.1.5:51820")
THE_HUB = listed("h", H, "192.0.2.1:51820")


def mesh_of(*peers: Listed, hub: str = "h", now_s: float = 0.0) -> Mesh:
    mesh = Mesh(OWN, NETWORK, draw=lambda: 0.0)
    mesh.learn(peers, hub, True, now_s)
    return mesh


def answer(mesh: Mesh, key: bytes, endpoint: tuple[str, int], asked_s: float) -> None:
    """It answers what was asked then, and WireGuard shows it at this endpoint."""
    mesh.ponged(key, asked_s, 0.02)
    seen = {other: peer.seen for other, peer in mesh.peers.items() if peer.seen}
    mesh.look({**seen, key: at(endpoint)}, asked_s)


def at(endpoint: tuple[str, int] | None) -> Seen:
    return Seen(endpoint, 1.0, 0, 0)


def endpoints(changes: list[Change]) -> list[tuple[str, int] | None]:
    return [change.endpoint for change in changes]


def peer(mesh: Mesh) -> Peer:
    return mesh.peers[A]


def test_a_newcomer_is_tried_at_its_first_endpoint() -> None:
    mesh = Mesh(OWN, NETWORK)
    (change,) = mesh.learn([PEER, listed("me", OWN, "192.0.2.9:1")], "", True, 0.0)
    assert change == Change(A, address_of(NETWORK, A), PUBLIC)
    assert mesh.learn([PEER], "", True, 1.0) == []


def test_who_does_not_answer_is_tried_elsewhere_and_at_the_relay_last() -> None:
    mesh = mesh_of(PEER, THE_HUB)
    answer(mesh, H, HUB, 0.1)
    assert mesh.tick(TRY_S - 0.1) == []
    tried = []
    for turn in range(1, 5):
        answer(mesh, H, HUB, TRY_S * turn)
        (change,) = mesh.tick(TRY_S * turn)
        assert change.afresh, "so that WireGuard does not wait until it tries again"
        tried.append(change.endpoint)
    assert tried == [PRIVATE, RELAY, PUBLIC, PRIVATE]


def test_who_answers_is_left_alone() -> None:
    mesh = mesh_of(PEER)
    for second in range(0, 300, 3):
        answer(mesh, A, PUBLIC, second + 0.5)
        assert mesh.tick(second + 1.0) == []
    assert peer(mesh).way == "direct"


def test_who_begins_just_now_is_not_begun_anew() -> None:
    """It sends, so it may be through in a moment; but not for ever, if our own packets do not reach it."""
    mesh = mesh_of(PEER)
    for second in range(1, int(MOST_TRY_S)):
        mesh.look({A: Seen(PUBLIC, 1.0, 148 * second, 0)}, float(second))
        assert mesh.tick(float(second)) == []
    mesh.look({A: Seen(PUBLIC, 1.0, 148 * 100, 0)}, MOST_TRY_S)
    assert endpoints(mesh.tick(MOST_TRY_S)) == [PRIVATE]


def test_two_do_not_begin_anew_at_one_pace() -> None:
    mesh = mesh_of(PEER)
    mesh.draw = lambda: 1.0
    assert mesh.tick(TRY_S) != []
    assert mesh.tick(TRY_S + 1.4 * TRY_S) == []
    assert mesh.tick(TRY_S + 1.5 * TRY_S) != []


def test_an_answer_to_a_question_from_before_the_move_proves_nothing() -> None:
    mesh = mesh_of(PEER)
    mesh.tick(TRY_S)
    answer(mesh, A, PRIVATE, TRY_S - 0.5)
    mesh.tick(TRY_S + 0.1)
    assert peer(mesh).way == ""
    answer(mesh, A, PRIVATE, TRY_S + 0.5)
    mesh.tick(TRY_S + 0.6)
    assert peer(mesh).way == "direct"


def test_who_falls_silent_is_tried_elsewhere() -> None:
    mesh = mesh_of(PEER)
    answer(mesh, A, PUBLIC, 1.0)
    assert mesh.tick(1.0 + LOST_S) == []
    (change,) = mesh.tick(1.1 + LOST_S)
    assert (change.endpoint, change.afresh) == (PRIVATE, True)
    assert peer(mesh).way == ""


def test_from_the_relay_direct_ways_are_tried_again_a_few_times() -> None:
    """Without forgetting what is agreed: if the direct way leads nowhere, the relay serves again at once."""
    mesh = mesh_of(PEER, THE_HUB)
    tried = []
    for second in range(int(AGAIN_S * (TRIES_AGAIN + 3))):
        answer(mesh, H, HUB, second)
        answer(mesh, A, RELAY, second)  # it answers through the relay whatever we try
        for change in mesh.tick(second + 0.1):
            assert not change.afresh
            tried.append(change.endpoint)
    assert peer(mesh).way == "hub"
    assert len(tried) == TRIES_AGAIN
    assert set(tried) == {PUBLIC, PRIVATE}


def test_other_candidates_are_a_reason_to_try_direct_ways_again() -> None:
    mesh = mesh_of(PEER, THE_HUB)
    peer(mesh).tries_again = 0
    answer(mesh, H, HUB, 30.0)
    answer(mesh, A, RELAY, 30.0)
    assert mesh.tick(30.1) == []
    assert peer(mesh).way == "hub"
    mesh.learn([listed("a", A, "203.0.113.7:40001"), THE_HUB], "h", True, 31.0)
    answer(mesh, A, RELAY, 31.0)
    assert endpoints(mesh.tick(31.1)) == [("203.0.113.7", 40001)]


def test_the_hub_has_no_relay_and_none_leads_to_it() -> None:
    mesh = mesh_of(PEER, THE_HUB)
    answer(mesh, H, HUB, 1.0)
    mesh.tick(1.1)
    assert (mesh.peers[H].relay, peer(mesh).relay) == (None, RELAY)
    mesh.learn([PEER, THE_HUB], "me", True, 2.0)  # we are it now
    mesh.tick(2.1)
    assert peer(mesh).relay is None


def test_a_relay_that_is_not_known_to_answer_is_no_candidate() -> None:
    mesh = mesh_of(PEER, THE_HUB)
    mesh.tick(0.1)
    assert peer(mesh).candidates == (PUBLIC, PRIVATE)


def test_who_is_gone_is_removed_once_the_coordinator_knows_all() -> None:
    mesh = mesh_of(PEER, THE_HUB)
    assert mesh.learn([THE_HUB], "h", False, 1.0) == []
    assert mesh.learn([THE_HUB], "h", True, 2.0) == [Change(A, gone=True)]
    assert set(mesh.peers) == {H}


def test_two_with_one_address_are_not_both_taken() -> None:
    mesh = mesh_of(PEER, listed("twin", A, "192.0.2.66:1"))
    assert mesh.refused == {"twin": f"its address {address_of(NETWORK, A)} is another peer's"}
    assert peer(mesh).listed.name == "a"


def test_what_is_no_peer_is_left_out() -> None:
    wrong = Listed("long", A, 51820, 70000, 0, ())
    mesh = mesh_of(listed("short", b"key", "192.0.2.1:5"), wrong, PEER)
    assert (set(mesh.refused), set(mesh.peers)) == ({"short", "long"}, {A})


def test_endpoints_that_lead_nowhere_are_no_candidates() -> None:
    mesh = mesh_of(listed("a", A, "127.0.0.1:51820", "[fd00:1:2:3::9]:51820", "junk", "192.0.2.5:5"))
    assert peer(mesh).candidates == (("192.0.2.5", 5),)
    assert mesh_of(listed("a", A)).tick(100.0) == []
