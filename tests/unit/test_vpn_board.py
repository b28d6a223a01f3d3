"""The VPN's board: who is on it, what others hear, what is refused; and the same over a real socket."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.errors import Refused
from atoll.membership import vpn_board
from atoll.membership.operator import Done, EvictPeer, VpnAnnounce, VpnMesh
from atoll.membership.operator_link import announce_vpn, give_order
from atoll.membership.register import Register, Unknown
from atoll.membership.registrar import Holder, Registrar
from atoll.membership.vpn_board import FRESH_S, VpnBoard, certificate_name, network_of
from support.fake_peer import TOKEN, CoordinatorThread, new_member

NETWORK = "fd00:1:2:3::/64"


def said(peer: str, **more: object) -> VpnAnnounce:
    about = {"public_key": peer.encode().ljust(32, b"."), "port": 51820, "relay_port": 51821, **more}
    return VpnAnnounce(**{"run": "run", "peer": peer, **about})  # type: ignore[arg-type]


@pytest.fixture
def board() -> VpnBoard:
    return VpnBoard(NETWORK, 0.0)


def heard(answer: VpnMesh | Done) -> VpnMesh:
    assert isinstance(answer, VpnMesh), answer
    return answer


def names(answer: VpnMesh | Done) -> list[str]:
    return [entry.peer for entry in heard(answer).entries]


def refusal(answer: VpnMesh | Done) -> str:
    assert isinstance(answer, Done)
    assert not answer.ok
    return answer.reason


def test_the_network_is_private_and_the_run_s_own() -> None:
    network = ipaddress.ip_network(network_of("run", b"k" * 32))
    assert (network.prefixlen, network.is_private, network.network_address.packed[0]) == (64, True, 0xFD)
    assert str(network) == network_of("run", b"k" * 32)
    assert network_of("other", b"k" * 32) != str(network) != network_of("run", b"q" * 32)
    assert b"k" * 4 not in network.network_address.packed


def test_peers_hear_of_each_other_and_who_is_silent_is_gone(board: VpnBoard) -> None:
    assert names(board.hear(said("a"), "192.0.2.1", 0.0)) == ["a"]
    assert names(board.hear(said("b"), "192.0.2.2", 1.0)) == ["a", "b"]
    assert names(board.hear(said("b"), "192.0.2.2", FRESH_S)) == ["a", "b"]
    assert names(board.hear(said("b"), "192.0.2.2", FRESH_S + 0.1)) == ["b"]


def test_endpoints_are_what_was_said_what_is_seen_and_what_the_hub_sees(board: VpnBoard) -> None:
    home = said("a", endpoints=("203.0.113.9:7000", "192.168.1.5:51820"), stated=1)
    board.hear(home, "203.0.113.9", 0.0)
    board.hear(said("h", hub=True, seen={"a": "203.0.113.9:40001"}), "192.0.2.1", 0.0)
    mesh = heard(board.hear(said("b"), "2001:db8::5", 0.0))
    assert mesh.hub == "h"
    assert {entry.peer: entry.endpoints for entry in mesh.entries} == {
        "a": ("203.0.113.9:7000", "203.0.113.9:40001", "203.0.113.9:51820", "192.168.1.5:51820"),
        "b": ("[2001:db8::5]:51820",),
        "h": ("192.0.2.1:51820",),
    }


def test_only_the_hub_is_believed_about_others(board: VpnBoard) -> None:
    board.hear(said("h", hub=True), "192.0.2.1", 0.0)
    board.hear(said("a"), "192.0.2.2", 0.0)
    mesh = heard(board.hear(said("liar", seen={"a": "198.51.100.66:1"}), "192.0.2.3", 0.0))
    assert not any("198.51.100.66" in each for entry in mesh.entries for each in entry.endpoints)


def test_the_hub_is_who_asked_to_be_else_who_is_behind_no_nat(board: VpnBoard) -> None:
    behind = {"endpoints": ("192.168.1.5:51820",)}
    assert heard(board.hear(said("a", **behind), "203.0.113.1", 0.0)).hub == ""
    open_ = said("b", endpoints=("203.0.113.2:51820",))
    assert heard(board.hear(open_, "203.0.113.2", 1.0)).hub == "b"
    later = said("aa", endpoints=("203.0.113.3:51820",))
    assert heard(board.hear(later, "203.0.113.3", 2.0)).hub == "b", "the one that came first stays"
    assert heard(board.hear(said("z", hub=True, **behind), "203.0.113.4", 3.0)).hub == "z"
    assert heard(board.hear(said("z", hub=True, relay_port=0), "203.0.113.4", 4.0)).hub == "b"


def test_a_name_and_a_key_belong_together(board: VpnBoard) -> None:
    board.hear(said("a"), "192.0.2.1", 0.0)
    other = said("a", public_key=b"x" * 32)
    assert "the name a is taken by another machine's key" in refusal(board.hear(other, "192.0.2.2", 1.0))
    copied = said("b", public_key=said("a").public_key)
    assert "a has the same key as b" in refusal(board.hear(copied, "192.0.2.2", 1.0))
    assert names(board.hear(other, "192.0.2.2", FRESH_S + 2)) == ["a"]


def test_goodbye_is_heard_from_the_one_who_goes_only(board: VpnBoard) -> None:
    board.hear(said("a"), "192.0.2.1", 0.0)
    assert isinstance(board.hear(said("a", public_key=b"x" * 32, leaving=True), "192.0.2.9", 0.0), Done)
    assert names(board.hear(said("b"), "192.0.2.2", 0.0)) == ["a", "b"]
    assert isinstance(board.hear(said("a", leaving=True), "192.0.2.1", 0.0), Done)
    assert names(board.hear(said("b"), "192.0.2.2", 0.0)) == ["b"]


def test_who_was_evicted_is_refused_and_no_longer_told(board: VpnBoard) -> None:
    board.hear(said("a"), "192.0.2.1", 0.0)
    assert names(board.hear(said("b"), "192.0.2.2", 0.0, evicted={"a"})) == ["b"]
    assert "a was evicted" in refusal(board.hear(said("a"), "192.0.2.1", 0.0, evicted={"a"}))


@pytest.mark.parametrize(
    "wrong",
    [
        {"public_key": b"short"},
        {"port": 0},
        {"port": 70000},
        {"ping_port": -1},
        {"endpoints": ("host.example:51820",)},
        {"endpoints": ("192.0.2.1",)},
        {"endpoints": ("192.0.2.1:51820 peer x",)},
        {"endpoints": ("2001:db8::1:51820",)},
        {"endpoints": ("[fe80::1%eth0]:51820",)},
        {"endpoints": ("192.0.2.1:1",) * 9},
        {"seen": {"b": "nowhere"}},
    ],
)
def test_what_makes_no_sense_is_refused(board: VpnBoard, wrong: dict[str, object]) -> None:
    assert refusal(board.hear(said("a", **wrong), "192.0.2.1", 0.0))
    assert names(board.hear(said("b"), "192.0.2.2", 0.0)) == ["b"]


@pytest.mark.parametrize("name", ["", "x" * 129, "a\nb"])
def test_names_are_printable_and_short(board: VpnBoard, name: str) -> None:
    assert "printable" in refusal(board.hear(VpnAnnounce("run", name, b"k" * 32, 51820), "192.0.2.1", 0.0))


def test_it_holds_only_so_many(board: VpnBoard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vpn_board, "MAX_ENTRIES", 2)
    board.hear(said("a"), "192.0.2.1", 0.0)
    board.hear(said("b"), "192.0.2.2", 0.0)
    assert "full: 2 peers" in refusal(board.hear(said("c"), "192.0.2.3", 0.0))
    assert names(board.hear(said("b"), "192.0.2.2", 0.0)) == ["a", "b"], "who is there may renew"


def test_a_restarted_coordinator_says_that_it_may_not_know_all_yet(board: VpnBoard) -> None:
    assert not heard(board.hear(said("a"), "192.0.2.1", FRESH_S - 1)).settled
    assert heard(board.hear(said("a"), "192.0.2.1", FRESH_S)).settled


def test_a_peer_is_told_its_own_links_to_who_is_there(board: VpnBoard) -> None:
    links = {("a", "b"): 5.0, ("b", "a"): 6.0, ("a", "gone"): 7.0, ("a", ""): 8.0}
    board.hear(said("b"), "192.0.2.2", 0.0)
    mesh = heard(board.hear(said("a"), "192.0.2.1", 0.0, links=links))
    assert [(each.source, each.target, each.bytes_per_s) for each in mesh.links] == [("a", "b", 5.0)]


# ---- over a socket ------------------------------------------------------------------------------------------------


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[CoordinatorThread]:
    with CoordinatorThread(tmp_path / "journal", start_peers=2) as running:
        yield running


def test_the_token_gives_a_place_and_eviction_takes_it(coordinator: CoordinatorThread) -> None:
    def tell(announce: VpnAnnounce, token: bytes = TOKEN) -> VpnMesh | Done:
        return asyncio.run(announce_vpn(coordinator.address, token, announce))

    mesh = heard(tell(said("a")))
    assert ipaddress.ip_network(mesh.network).prefixlen == 64
    assert mesh.entries[0].endpoints == ("127.0.0.1:51820",)
    assert names(tell(said("b"))) == ["a", "b"]
    with pytest.raises(Refused, match="the run token does not fit"):
        tell(said("c"), b"x" * 32)
    with pytest.raises(Refused, match="this coordinator runs 'run', not 'other'"):
        tell(said("c", run="other"))
    with pytest.raises(Refused, match="taken by another machine's key"):
        tell(said("a", public_key=b"x" * 32))
    member = new_member(coordinator.address, "a")
    try:
        member.connect()
        assert give_order(coordinator.address, TOKEN, EvictPeer("a", "it turned bad", 60.0)).ok
    finally:
        member.close()
    with pytest.raises(Refused, match="a was evicted"):
        tell(said("a"))
    assert names(tell(said("b"))) == ["b"]
    assert isinstance(tell(said("b", leaving=True)), Done)


def test_with_an_authority_a_name_is_its_certificate_s_and_a_watcher_has_no_place() -> None:
    register = Register()
    tokens = {}
    for scope in ("watch", "join"):
        made, _ = register.make_token(scope)
        register.learn(made)
        tokens[scope] = made.id
    register.learn(register.certified(7, certificate_name("a"), tokens["join"]))
    registrar = Registrar("run", register, None, lambda record: None, lambda event: None, lambda peer: "")
    registrar.check(Holder(tokens["join"]), said("a"))
    registrar.check(Holder("", certificate_name("a"), "7"), said("a"))
    with pytest.raises(Unknown, match="may watch, and this needs one that may join"):
        registrar.check(Holder(tokens["watch"]), said("a"))
    with pytest.raises(Unknown, match=r"the certificate of 'a\.vpn', not of 'b'"):
        registrar.check(Holder("", certificate_name("a"), "7"), said("b"))
