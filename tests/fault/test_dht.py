"""Finding the coordinator by the DHT, with real processes: bootstrap peers that die, a coordinator that moves, lies."""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("kademlia", reason="the extra [dht] is not installed")

from atoll.errors import Unreachable
from atoll.network.authority import Authority
from atoll.network.dht import Discovery
from atoll.network.dht_record import key_of, sign
from support.dht_process import HERE, DhtProcess
from support.fake_peer import QUICK
from support.slack import SLACK_S

pytestmark = [pytest.mark.fault, pytest.mark.timeout(180)]

AUTHORITY = Authority.new("run")
KEY = key_of("run", AUTHORITY.fingerprint)
MIB = 1 << 20

Start = Callable[..., DhtProcess]


@pytest.fixture
def start() -> Iterator[Start]:
    with ExitStack() as stack:

        def begin(role: str, bootstrap: list[str] | None = None, **told: object) -> DhtProcess:
            about = {"run": "run", "authority": AUTHORITY.fingerprint, "bootstrap": bootstrap or []}
            return stack.enter_context(DhtProcess(role, **(about | told)))

        yield begin


def record(term: int, port: int, authority: Authority = AUTHORITY) -> bytes:
    return sign(authority, run="run", addresses=[f"{HERE}:{port}"], term=term, sequence=0)


def discovery(*bootstrap: str) -> Discovery:
    return Discovery("run", AUTHORITY.fingerprint, bootstrap=bootstrap, bind=HERE)


def wait(condition: Callable[[], object], what: str, within_s: float = SLACK_S) -> None:
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, f"no {what} in {within_s} s"
        time.sleep(0.1)


def start_coordinator(start: Start, folder: Path, bootstrap: list[str], start_peers: int = 1) -> DhtProcess:
    return start(
        "coordinator",
        bootstrap,
        pem=AUTHORITY.to_pem().decode(),
        journal=str(folder / "journal"),
        start_peers=start_peers,
    )


def held_by(node: DhtProcess) -> dict[str, object]:
    node.tell(what="held")
    return node.hear("held")


def finds(node: DhtProcess, within_s: float = 5.0) -> tuple[list[str], int]:
    node.tell(what="find", within_s=within_s)
    found = node.hear("found", within_s=within_s + SLACK_S)
    return found["addresses"], found["term"]


def test_any_bootstrap_peer_that_is_alive_is_enough(start: Start, tmp_path: Path) -> None:
    first = start("node")
    peers = [first, *(start("node", [first.dht]) for _ in range(2))]
    coordinator = start_coordinator(start, tmp_path, [peer.dht for peer in peers])
    address = coordinator.hear("listening")["address"]
    for peer in peers:
        wait(lambda peer=peer: finds(peer) == ([address], 1), "record at every bootstrap peer")
    coordinator.kill()  # the record outlives it

    line = "dht:" + ",".join(peer.dht for peer in peers)
    for peer in peers:
        with closing(Discovery.wanted(line, "run", AUTHORITY.fingerprint)) as newcomer:  # type: ignore[type-var]
            assert newcomer.coordinator(line) == address
        peer.kill()
    with closing(Discovery.wanted(line, "run", AUTHORITY.fingerprint)) as newcomer:  # type: ignore[type-var]
        with pytest.raises(
            Unreachable, match=r"knows no coordinator of run 'run' .*nobody answered"
        ) as error:
            newcomer.coordinator(line)
        assert all(peer.dht in str(error.value) for peer in peers)


def test_peers_find_a_coordinator_that_has_moved(start: Start, tmp_path: Path) -> None:
    coordinator = start_coordinator(start, tmp_path, [], start_peers=2)
    old = coordinator.hear("listening")["address"]
    line = f"dht:{coordinator.dht}"
    peers = [
        start("peer", [coordinator.dht], address=address, peer=name, rounds=100_000, reduce_s=0.05)
        for name, address in (("a", line), ("b", old))
    ]
    for peer in peers:
        assert peer.hear("listening")["address"] == old
        peer.hear("verdict", version=3)
    coordinator.kill()

    moved = start_coordinator(start, tmp_path, [peer.dht for peer in peers], start_peers=2)
    new = moved.hear("listening")["address"]
    assert new != old, "the fault: it is elsewhere"
    for peer in peers:
        seen = peer.hear("verdict", within_s=QUICK.coordinator_lost_s)["version"]
        while seen < 3 + 20:  # of a round that only the second coordinator can have committed
            seen = peer.hear("verdict", within_s=QUICK.coordinator_lost_s)["version"]
        assert any(f"said to be at {new}" in line for line in peer.log), peer.log
    with closing(discovery(peers[0].dht).open()) as newcomer:
        found = newcomer.find()
        assert found is not None
        assert (found.addresses, found.term) == ((new,), 2)


FORGED = {
    "unsigned": (record(9, 1)[:-64] + bytes(64), "wrongly signed"),
    "wrongly signed": (record(1, 1).replace(b"\x01\x00\xc4", b"\x09\x00\xc4"), "wrongly signed"),
    "of another authority": (record(9, 1, Authority.new("run")), "of another run or authority"),
    "no record at all": (b"\x80\x04\x95" + os.urandom(100), "no record"),  # as pickles begin
    "too long": (os.urandom(1500), "form"),
}


IN_CI = ("unsigned", "wrongly signed")  # what is read of a record is tried in tests/unit/test_dht_record.py


@pytest.mark.parametrize(
    "lie", [each if each in IN_CI else pytest.param(each, marks=pytest.mark.slow) for each in FORGED]
)
def test_a_forged_record_is_ignored_and_the_genuine_found(start: Start, lie: str) -> None:
    forged, why = FORGED[lie]
    assert forged != record(1, 1), "it is forged"
    honest = start("node")
    liar = start("liar", [honest.dht], key=KEY.hex(), value=forged.hex())
    with closing(discovery(liar.dht).open()) as deceived:
        assert deceived.find(within_s=2.0) is None
        liar.hear("lied")
        assert deceived.ignored()[why] > 0

    with closing(discovery(honest.dht).open()) as publisher:
        publisher.publish(record(1, 7070))
        wait(lambda: finds(honest) == ([f"{HERE}:7070"], 1), "record at the honest node")
    liar.tell(value=forged.hex())
    liar.hear("stored", within_s=30.0)  # the library waits 5 s for nodes that have gone
    assert held_by(honest)["ignored"].get(why, 0) > 0, "it was offered to the honest node, too"
    with closing(discovery(liar.dht, honest.dht).open()) as newcomer:
        found = newcomer.find()
        assert found is not None
        assert (found.addresses, found.term) == ((f"{HERE}:7070",), 1)
        assert newcomer.ignored()[why] > 0, "the lie was heard"


def test_a_stale_record_is_ignored_once_a_newer_one_was_seen(start: Start) -> None:
    honest = start("node")
    liar = start("liar", [honest.dht], key=KEY.hex(), value=record(1, 7070).hex())
    with closing(discovery(honest.dht).open()) as publisher:
        publisher.publish(record(2, 7171))
        wait(lambda: finds(honest) == ([f"{HERE}:7171"], 2), "record at the honest node")
    with closing(discovery(liar.dht, honest.dht).open()) as newcomer:
        for _ in range(2):
            found = newcomer.find()
            assert found is not None
            assert (found.addresses, found.term) == ((f"{HERE}:7171",), 2)
            liar.hear("lied")
            honest.kill() if honest.process.poll() is None else None
        assert newcomer.ignored()["older than one that is known"] > 0


def test_a_flood_of_junk_leaves_a_node_within_its_bounds(start: Start) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    node = start("node")
    host, port = node.dht.split(":")
    with closing(discovery(node.dht).open()) as publisher:
        publisher.publish(record(1, 7070))
        wait(lambda: finds(node) == ([f"{HERE}:7070"], 1), "record")
        before = node.rss_bytes
        strangers = [Authority.new(f"junk-{number}") for number in range(8)]
        sent = 0
        with ExitStack() as stack:
            sockets = [
                stack.enter_context(closing(bound_to(f"127.0.{number}.66"))) for number in range(1, 41)
            ]
            end_s = time.monotonic() + 5.0
            while time.monotonic() < end_s:
                for sock in sockets:
                    sock.sendto(junk(rng, strangers), (host, int(port)))
                    sent += 1
        held = held_by(node)
        ignored = held["ignored"]
        print(f"{sent} datagrams in 5 s, {(node.rss_bytes - before) / MIB:.1f} MiB more, {held}")
        assert sent > 2000
        assert ignored["form"] > 0
        assert ignored["too many"] > 0, "more came than it listens to"
        assert held["records"] <= 257
        assert held["record_bytes"] <= 257 * 1024
        assert held["sources"] <= 1024
        assert held["tasks"] <= 16
        assert node.rss_bytes - before < 16 * MIB
        assert not any("Traceback" in line or "never retrieved" in line for line in node.log), node.log
    with closing(discovery(node.dht).open()) as newcomer:
        found = newcomer.find(within_s=SLACK_S)
        assert found is not None
        assert found.term == 1


def bound_to(host: str) -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind((host, 0))
    return sock


def junk(rng: random.Random, strangers: list[Authority]) -> bytes:
    """Noise, calls that are nearly right, newcomers, and genuine records of runs that nobody asked for."""
    head = b"\x00" + rng.randbytes(20)
    match rng.randrange(5):
        case 0:
            return rng.randbytes(rng.randrange(1, 3000))
        case 1:
            return head + b"\x91" * 1400
        case 2:
            return head + msgspec.msgpack.encode(["ping", [rng.randbytes(20)]])
        case 3:
            return head + msgspec.msgpack.encode(
                ["store", [rng.randbytes(20), rng.randbytes(20), rng.randbytes(900)]]
            )
    run, authority = f"junk-{rng.randrange(10_000)}", rng.choice(strangers)
    value = sign(authority, run=run, addresses=["10.0.0.66:1"], term=1, sequence=0)
    key = key_of(run, authority.fingerprint)
    return head + msgspec.msgpack.encode(["store", [rng.randbytes(20), key, value]])
