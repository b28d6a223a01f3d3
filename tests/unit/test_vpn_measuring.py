"""When the paths to a peer are measured, and which is then named: peers and rates are made up, the loop is real."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from atoll.cli.vpn import measuring
from atoll.cli.vpn.measuring import Measuring
from atoll.network import path_rates
from atoll.network.path_rates import BusyError
from atoll.network.wireguard import Seen
from atoll.network.wireguard_keys import checked_network, new_key_pair
from atoll.network.wireguard_mesh import Listed, Mesh, Peer

KEYS, THEIRS = new_key_pair(), new_key_pair()
OUTSIDE = "192.0.2.1"


class World:
    """One peer that answers directly, and what its two paths carry."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(measuring, "LOOK_S", 0.005)
        monkeypatch.setattr(measuring, "SETTLED_S", 0.0)
        monkeypatch.setattr(path_rates, "AGAIN_S", 0.0)
        monkeypatch.setattr(measuring, "measure", self.measure)
        self.direct, self.inside, self.busy = 100.0, 90.0, 0
        self.measured: list[str] = []
        self.links: dict[str, float] = {}
        self.said: list[str] = []
        self.mesh = Mesh(KEYS.public, checked_network("fd00:1:2:3::/64"))
        self.mesh.learn([Listed("a", THEIRS.public, 51820, 9, 0, (f"{OUTSIDE}:51820",))], "", True, 0.0)
        self.measuring = Measuring(KEYS, self.mesh, self.links, self.said.append)

    @property
    def peer(self) -> Peer:
        return self.mesh.peers[THEIRS.public]

    async def measure(self, keys: object, public: bytes, host: str, port: int) -> tuple[float, str]:
        assert (public, port) == (THEIRS.public, 51820)
        if self.busy:
            self.busy -= 1
            raise BusyError
        self.measured.append(host)
        return (self.direct if host == OUTSIDE else self.inside), ""

    def status(self) -> dict[str, object]:
        return self.measuring.status_of(self.peer, 0.0)


def play(world: World, *acts: tuple[Callable[[], object], int]) -> None:
    """The loop runs. Each act is waited for until so many measurements were made in all, and a little longer, in which
    there should be no more."""

    async def run() -> None:
        loop = asyncio.create_task(world.measuring.measure_always())
        try:
            for act, total in acts:
                act()
                async with asyncio.timeout(30):
                    while len(world.measured) < total:
                        await asyncio.sleep(0.005)
                await asyncio.sleep(0.05)
                assert len(world.measured) == total
        finally:
            loop.cancel()

    asyncio.run(run())


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def direct(world: World) -> None:
    world.peer.way, world.peer.seen = "direct", Seen((OUTSIDE, 51820), 1.0, 0, 0)


def test_a_way_is_measured_once(world: World) -> None:
    play(world, (lambda: None, 0), (lambda: direct(world), 2))
    assert world.measured == [OUTSIDE, world.peer.address]
    assert world.status()["use"] == "direct"
    assert world.status()["addresses"] == [OUTSIDE, world.peer.address]
    assert world.said == [
        "a: use the direct path, the direct path is 1.1 times as fast as the vpn one (never measured)"
    ]


def test_a_rate_that_drops_has_both_measured_again_and_the_other_path_named(world: World) -> None:
    def drop() -> None:
        world.direct = 20.0
        world.links["a"] = 45.0

    def good() -> None:
        world.links["a"] = 95.0

    play(world, (lambda: direct(world), 2), (good, 2), (drop, 4))
    assert world.measured == [OUTSIDE, world.peer.address] * 2
    assert (world.status()["use"], world.status()["direct_bytes_per_s"]) == ("vpn", 20.0)
    assert world.said[-1] == (
        "a: use the vpn path, the vpn path is 4.5 times as fast as the direct one (its rate fell to 47% of the best)"
    )


def test_another_way_is_another_measurement(world: World) -> None:
    def hub() -> None:
        world.peer.way, world.direct, world.inside = "hub", 0.0, 30.0

    play(world, (lambda: direct(world), 2), (hub, 4))
    assert (world.status()["use"], world.status()["vpn_bytes_per_s"]) == ("vpn", 30.0)


def test_who_dials_us_directly_and_cannot_be_dialled_is_left_to_do_so(world: World) -> None:
    """A peer behind NAT: only its own measurement can tell that the direct path is the faster."""
    world.direct = 0.0
    play(world, (lambda: direct(world), 2))
    assert world.status()["use"] == "vpn"
    world.measuring.theirs[THEIRS.public] = "direct"
    assert (world.status()["use"], world.measuring.own_use(THEIRS.public)) == ("their direct", "vpn")
    world.measuring.theirs[THEIRS.public] = "vpn"
    assert world.status()["use"] == "vpn"


def test_one_that_measures_with_somebody_else_is_asked_again(world: World) -> None:
    world.busy = 3
    play(world, (lambda: direct(world), 2))
    assert world.measured == [OUTSIDE, world.peer.address]


def test_who_does_not_answer_is_not_measured(world: World) -> None:
    play(world, (lambda: None, 0))
    assert world.measured == []
    assert (world.status()["use"], world.status()["why"]) == ("vpn", "not measured yet")
