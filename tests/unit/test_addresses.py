"""Where an engine listens and what it advertises, from what the user said."""

from __future__ import annotations

import socket
import threading
import time
from types import SimpleNamespace

import pytest

from atoll.errors import ConfigError
from atoll.network import own_addresses
from atoll.network.addresses import EngineAddress, engine_address, seen_from_outside


def test_a_coordinator_on_loopback_keeps_the_engine_there() -> None:
    assert engine_address("127.0.0.1:7070", "", 0, "") == EngineAddress("127.0.0.1", 0, "127.0.0.1")
    assert engine_address("localhost:7070", "", 0, "").advertise == "127.0.0.1"
    assert engine_address("127.0.0.1:7070", "", 1, "", 2) == EngineAddress("127.0.0.1", 1, "127.0.0.1", 2)


def test_an_interface_is_up_before_the_kernel_has_seen_its_carrier(monkeypatch: pytest.MonkeyPatch) -> None:
    """psutil's `isup` waits for the carrier; an address of an interface that was set up a moment ago is one."""
    seen = {"wan0": "up,broadcast,multicast", "ifb0": "broadcast,noarp"}
    stats = {name: SimpleNamespace(isup=False, flags=flags) for name, flags in seen.items()}
    address = SimpleNamespace(family=socket.AF_INET, address="192.0.2.7")
    monkeypatch.setattr(own_addresses.psutil, "net_if_stats", lambda: stats)
    monkeypatch.setattr(own_addresses.psutil, "net_if_addrs", lambda: {name: [address] for name in seen})
    assert own_addresses.interface_addresses() == {"wan0": ("192.0.2.7",)}


def test_elsewhere_it_listens_everywhere_and_advertises_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.network.addresses.address_towards", lambda host, port: "192.0.2.7")
    assert engine_address("192.0.2.1:7070", "", 7, "") == EngineAddress("", 7, "192.0.2.7")
    assert engine_address("192.0.2.1:7070", "auto", 7, "auto") == EngineAddress("", 7, "192.0.2.7")
    assert engine_address("192.0.2.1:7070", "0.0.0.0", 7, "") == EngineAddress("0.0.0.0", 7, "192.0.2.7")
    assert engine_address("192.0.2.1:7070", "192.0.2.8", 7, "").advertise == "192.0.2.8"
    assert engine_address("192.0.2.1:7070", "0.0.0.0", 7, "public.example").advertise == "public.example"


def test_ipv6_stays_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = {"::1": "::1", "2001:db8::1": "2001:db8::7"}
    monkeypatch.setattr("atoll.network.addresses.address_towards", lambda host, port: ways[host])
    assert engine_address("[::1]:7070", "", 0, "") == EngineAddress("::1", 0, "::1")
    assert engine_address("[2001:db8::1]:7070", "", 0, "") == EngineAddress("", 0, "2001:db8::7")


def test_of_several_coordinators_the_first_that_can_be_looked_up_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = socket.getaddrinfo

    def look_up(host: str, *arguments: object, **more: object) -> object:
        if host == "gone.invalid":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real(host, *arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    found = engine_address("gone.invalid:7070, 127.0.0.1:7071,127.0.0.1:7072", "", 0, "")
    assert found == EngineAddress("127.0.0.1", 0, "127.0.0.1")


@pytest.mark.parametrize("address", ["7070", "a:b,7070", "host:", "host:port", "no such host.invalid:7070"])
def test_addresses_that_cannot_be_right_are_one_line(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(ConfigError, match="give host:port") as caught:
        engine_address(address, "", 0, "")
    assert "\n" not in str(caught.value)


# ---- what the user says ------------------------------------------------------------------------------------------

INTERFACES = {"lo": ("127.0.0.1", "::1"), "wg0": ("10.7.0.2", "fd00::2"), "eth0": ("192.0.2.7",), "down0": ()}
NAMES = {
    "home": ("127.0.1.1",),
    "public.example": ("198.51.100.1",),
    "coordinator.example": ("192.0.2.1",),
    "box": ("127.0.1.1",),
}


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine at 192.0.2.7, whose own names are loopback; the coordinator is not on it."""

    def towards(host: str, port: int) -> str:
        return "127.0.0.1" if host in ("box", "127.0.0.1", "localhost") else "192.0.2.7"

    module = "atoll.network.addresses"
    monkeypatch.setattr(f"{module}.address_towards", towards)
    monkeypatch.setattr(f"{module}.way_out", lambda: "192.0.2.7")
    monkeypatch.setattr(f"{module}.interface_addresses", lambda: INTERFACES)
    monkeypatch.setattr(f"{module}.numbers_of", lambda host: NAMES.get(host, ()))


THERE = "coordinator.example:7070"


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    ("said", "hosts"),
    [
        ("", ("192.0.2.7",)),
        ("auto", ("192.0.2.7",)),
        ("wg0", ("10.7.0.2", "fd00::2")),
        ("wg0, auto", ("10.7.0.2", "fd00::2", "192.0.2.7")),
        ("198.51.100.1,[2001:db8::9]:7001", ("198.51.100.1", "[2001:db8::9]:7001")),
        ("198.51.100.1:7001", ("198.51.100.1:7001",)),
        ("2001:db8::9", ("2001:db8::9",)),
        ("[2001:db8::9]", ("2001:db8::9",)),
        ("public.example", ("public.example",)),
        ("public.example,public.example", ("public.example",)),
    ],
)
def test_what_can_be_advertised(said: str, hosts: tuple[str, ...]) -> None:
    found = engine_address(THERE, "", 7000, said)
    assert (found.bind, found.hosts, found.doubts) == ("", hosts, ())
    assert found.found_out == (said in ("", "auto"))


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    ("bind", "advertise", "names"),
    [
        ("", "0.0.0.0", ("local.advertise 0.0.0.0", "nobody can dial it")),
        ("", "down0", ("local.advertise", "down0", "ip address show down0")),
        ("down0", "", ("local.bind", "down0")),
        ("", "http://x", ("local.advertise", "http://x")),
        ("", "2001:db8::zz", ("local.advertise", "[2001:db8::1]:7001")),
        ("", ",", ("local.advertise", "leave it empty")),
        ("192.0.2.7:7000", "", ("local.bind", "local.port")),
    ],
)
def test_what_cannot_be_right_is_one_line(bind: str, advertise: str, names: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        engine_address(THERE, bind, 7000, advertise)
    assert "\n" not in str(caught.value)
    assert all(name in str(caught.value) for name in names), caught.value


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("said", ["home", "127.0.0.1", "lo", "::1"])
def test_loopback_is_advertised_to_no_coordinator_elsewhere(said: str) -> None:
    found = engine_address(THERE, "", 7000, said)
    assert found.hosts == ("192.0.2.7",)
    assert "loopback" in found.doubts[0]
    assert "local.advertise" in found.doubts[0]
    kept = engine_address(THERE, "", 7000, f"{said},198.51.100.1")
    assert kept.hosts == ("198.51.100.1",)
    assert engine_address("127.0.0.1:7070", "", 7000, said).hosts[0] not in ("192.0.2.7",), (
        "there it is right"
    )


@pytest.mark.usefixtures("elsewhere")
def test_an_engine_on_loopback_with_a_coordinator_elsewhere_is_doubted() -> None:
    found = engine_address(THERE, "127.0.0.1", 0, "")
    assert (found.bind, found.hosts) == ("127.0.0.1", ("192.0.2.7",))
    (doubt,) = found.doubts
    assert "local.bind" in doubt


@pytest.mark.usefixtures("elsewhere")
def test_a_coordinator_whose_name_is_loopback_here_is_for_others_elsewhere() -> None:
    """Debian's installer writes the host name into /etc/hosts as 127.0.1.1."""
    found = engine_address("box:7070", "", 0, "")
    assert (found.bind, found.hosts) == ("", ("192.0.2.7",))
    assert "/etc/hosts" in found.doubts[0]
    assert engine_address("localhost:7070", "", 0, "") == EngineAddress("127.0.0.1", 0, "127.0.0.1")


@pytest.mark.usefixtures("elsewhere")
def test_an_address_for_others_opens_the_engine_to_them_though_the_coordinator_is_near() -> None:
    found = engine_address("127.0.0.1:7070", "", 7000, "192.0.2.7")
    assert (found.bind, found.hosts) == ("", ("192.0.2.7",))


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    ("port", "advertise", "seen", "hosts", "says"),
    [
        (0, "", "192.0.2.7", ("192.0.2.7",), ""),
        (0, "", "::ffff:192.0.2.7", ("192.0.2.7",), ""),
        (0, "", "127.0.0.1", ("192.0.2.7",), ""),
        (0, "", "", ("192.0.2.7",), ""),
        (0, "", "203.0.113.5", ("192.0.2.7",), "only dials out"),
        (7000, "", "203.0.113.5", ("192.0.2.7", "203.0.113.5"), "forward port 7000"),
        (7000, "10.7.0.2", "203.0.113.5", ("10.7.0.2",), "local.advertise"),
        (7000, "public.example", "198.51.100.1", ("public.example",), ""),
    ],
)
def test_what_the_coordinator_sees_is_compared(
    port: int, advertise: str, seen: str, hosts: tuple[str, ...], says: str
) -> None:
    found = seen_from_outside(engine_address(THERE, "", port, advertise), seen)
    assert found.hosts == hosts
    assert bool(found.doubts) == bool(says)
    if says:
        assert "203.0.113.5" in found.doubts[0]
        assert says in found.doubts[0]


def test_a_name_that_nobody_answers_for_takes_seconds_not_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *given, **more: released.wait(60) and [])
    monkeypatch.setattr(own_addresses, "LOOK_UP_S", 0.2)
    begun_s = time.monotonic()
    with pytest.raises(ConfigError, match=r"no\.dns:7070.*no name server has answered within 0\.2 s"):
        engine_address("no.dns:7070", "", 0, "")
    assert time.monotonic() - begun_s < 15.0
    released.set()


def test_a_host_name_that_is_loopback_here_is_not_told_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "box")
    monkeypatch.setattr(own_addresses, "numbers_of", lambda host: NAMES.get(host, ()))
    monkeypatch.setattr(own_addresses, "way_out", lambda: "192.0.2.7")
    assert own_addresses.name_for_others() == "192.0.2.7"
    monkeypatch.setattr(socket, "gethostname", lambda: "public.example")
    assert own_addresses.name_for_others() == "public.example"
    monkeypatch.setattr(socket, "gethostname", lambda: "nowhere")
    assert own_addresses.name_for_others() == "192.0.2.7"


def test_the_loopback_interface_is_found() -> None:
    found = own_addresses.interface_addresses()
    assert any("127.0.0.1" in addresses for addresses in found.values())
