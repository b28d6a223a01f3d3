"""Where an engine listens and what it advertises, from what the user said."""

from __future__ import annotations

import socket

import pytest

from atoll.errors import ConfigError
from atoll.network.addresses import EngineAddress, engine_address


def test_a_coordinator_on_loopback_keeps_the_engine_there() -> None:
    assert engine_address("127.0.0.1:7070", "", 0, "") == EngineAddress("127.0.0.1", 0, "127.0.0.1")
    assert engine_address("localhost:7070", "", 0, "").advertise == "127.0.0.1"
    assert engine_address("127.0.0.1:7070", "", 1, "", 2) == EngineAddress("127.0.0.1", 1, "127.0.0.1", 2)


def test_elsewhere_it_listens_everywhere_and_advertises_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.network.addresses._address_towards", lambda address: "192.0.2.7")
    assert engine_address("192.0.2.1:7070", "", 7, "") == EngineAddress("0.0.0.0", 7, "192.0.2.7")
    assert engine_address("192.0.2.1:7070", "192.0.2.8", 7, "").advertise == "192.0.2.8"
    assert engine_address("192.0.2.1:7070", "0.0.0.0", 7, "public.example").advertise == "public.example"


def test_ipv6_stays_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = {"[::1]:7070": "::1", "[2001:db8::1]:7070": "2001:db8::7"}
    monkeypatch.setattr("atoll.network.addresses._address_towards", ways.__getitem__)
    assert engine_address("[::1]:7070", "", 0, "") == EngineAddress("::1", 0, "::1")
    assert engine_address("[2001:db8::1]:7070", "", 0, "") == EngineAddress("::", 0, "2001:db8::7")


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
