"""Discovery as users meet it: what they write, what they are told, what a coordinator publishes."""

from __future__ import annotations

import asyncio
import io
import socket
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
from rich.console import Console

pytest.importorskip("kademlia", reason="the extra [dht] is not installed")

import atoll
from atoll.cli.finding import coordinator_of, publisher_of
from atoll.cli.main import run as run_command
from atoll.cli.vpn import up
from atoll.config.load import load, load_joined
from atoll.config.schema import RunConfig
from atoll.config.shared import flatten, nested
from atoll.errors import ConfigError, LocalError, Unreachable
from atoll.events import CoordinatorListening
from atoll.membership.register import Register
from atoll.membership.registrar import Trust
from atoll.network import dht
from atoll.network.authority import Authority
from atoll.network.dht import Discovery, bootstrap_of
from atoll.network.dht_publishing import addresses_of, open_publisher
from atoll.network.dht_record import is_dialable
from atoll.network.dht_resolving import Resolving
from atoll.network.tls import server_context
from support.fake_peer import CoordinatorThread

AUTHORITY = Authority.new("run")
HERE = "127.0.0.1"


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("atoll-dht")]


def test_bootstrap_peers_as_people_write_them() -> None:
    assert bootstrap_of("dht:a:1, [::1]:2,a:1,") == ("a:1", "[::1]:2")
    assert bootstrap_of("") == ()
    for wrong in ("dht:a", "::1:7071", "dht:a:0"):
        with pytest.raises(ConfigError, match="is no bootstrap peer of the DHT; write dht:HOST:PORT"):
            bootstrap_of(wrong)


def test_who_did_not_ask_for_it_takes_no_part() -> None:
    assert Discovery.wanted("10.0.0.5:7070", "run", "") is None
    assert Discovery.wanted("10.0.0.5:7070", "run", AUTHORITY.fingerprint, enabled=True) is not None
    with pytest.raises(ConfigError, match="names no bootstrap peer"):
        Discovery.wanted("dht:", "run", AUTHORITY.fingerprint)


@pytest.mark.parametrize(
    ("authority", "said"),
    [("", r"give the fingerprint of the run's authority"), ("sha256:12", "has 2 digits"), ("z" * 64, "'z'")],
)
def test_without_its_authority_nothing_could_be_believed(authority: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        Discovery.wanted("dht:a:1", "run", authority)
    assert len(str(error.value).splitlines()) == 1


def test_without_the_extra_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [
        name for name in sys.modules if name.partition(".")[0] == "kademlia" or "network.dht_" in name
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "kademlia", None)
    with pytest.raises(ConfigError, match=r"^the DHT needs kademlia.*: pip install 'atoll-train\[dht\]'$"):
        Discovery("run", AUTHORITY.fingerprint).open()
    assert threads() == []


def test_a_port_in_use_is_said_in_a_line() -> None:
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as taken:
        taken.bind((HERE, 0))
        port = taken.getsockname()[1]
        with pytest.raises(
            LocalError, match=f"cannot use {HERE}, UDP port {port}: .*choose another dht.port"
        ):
            Discovery("run", AUTHORITY.fingerprint, bind=HERE, port=port).open()
    assert threads() == []


def test_its_thread_ends_with_it() -> None:
    discovery = Discovery("run", AUTHORITY.fingerprint, bind=HERE).open()
    assert threads() == ["atoll-dht"]
    discovery.close()
    assert threads() == []
    discovery.close()
    assert discovery.find(within_s=1.0) is None
    assert asyncio.run(discovery.look_up()) == ()


def test_a_publisher_says_where_its_coordinator_listens_whenever_it_begins_to_lead() -> None:
    with closing(open_publisher(AUTHORITY, "run", bind=HERE)) as publisher:
        line = f"dht:{HERE}:{publisher.port}"
        found = []
        for term, port in ((1, 7070), (1, 7171), (3, 7272)):
            publisher(0.0, "coordinator", CoordinatorListening(f"{HERE}:{port}", term, term > 1))
            asking = Discovery.wanted(line, "run", AUTHORITY.fingerprint)
            assert asking is not None
            with asking:
                found.append(asking.coordinator(line))
                record = asking.find()
                assert record is not None
                assert record.term == term
        assert found == [f"{HERE}:7070", f"{HERE}:7171", f"{HERE}:7272"]


def test_a_coordinator_that_lost_its_journal_is_told_that_a_newer_record_exists(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with closing(open_publisher(AUTHORITY, "run", bind=HERE)) as publisher:
        for term in (5, 1):
            publisher(0.0, "coordinator", CoordinatorListening(f"{HERE}:7070", term, restarted=True))
        deadline_s = time.monotonic() + 10
        while not caplog.records:
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
    assert "the DHT has a newer record of run run, of term 5" in caplog.text


def test_what_is_published() -> None:
    assert addresses_of("10.0.0.5", 7070) == ("10.0.0.5:7070",)
    assert addresses_of("2001:db8::5", 7070) == ("[2001:db8::5]:7070",)
    advertised = ("east.example.org", "10.0.0.5:80", "[2001:db8::5]:80", "2001:db8::6")
    assert addresses_of("0.0.0.0", 7070, advertised) == (
        "east.example.org:7070",
        "10.0.0.5:80",
        "[2001:db8::5]:80",
        "[2001:db8::6]:7070",
    )
    assert all(is_dialable(each) for each in addresses_of("::", 7070))
    assert not any(each.startswith("127.") for each in addresses_of("0.0.0.0", 7070))


def test_names_are_looked_up_and_a_dead_one_holds_up_nobody() -> None:
    async def resolve() -> None:
        found = await Resolving(["localhost:7", "[::1]:8", "no-such-host.invalid:9"]).resolve()
        assert ("::1", 8) in found
        assert found[0][1] == 7
        assert all(port != 9 for _, port in found)

    asyncio.run(resolve())


def test_the_section_is_each_machines_own() -> None:
    own = ["dht.enabled=true", "dht.port=7071", "dht.bootstrap=a:1,b:2", "local.authority=sha256:00"]
    config = load(None, own, {})
    assert (config.dht.enabled, config.dht.port, config.dht.bootstrap) == (True, 7071, "a:1,b:2")
    assert "dht" not in nested(config)
    assert flatten(config) == flatten(RunConfig()), "peers that differ in it are not refused"
    joined = load_joined(nested(config), own)
    assert joined == config


def test_a_coordinator_without_an_authority_does_not_publish() -> None:
    out = io.StringIO()
    console = Console(file=out, width=20)
    assert publisher_of(load(None, [], {}), None, "", console) is None
    config = load(None, ["dht.enabled=true"], {})
    with pytest.raises(ConfigError, match="this run has none; make one with --new, or leave the DHT out"):
        publisher_of(config, None, "", console)
    publisher = publisher_of(config, AUTHORITY, "east.example.org, 10.0.0.5", console)
    assert publisher is not None
    with closing(publisher):
        line = f"  or: atoll join dht:HOST:{publisher.port} --run {config.run.name} --authority sha256:"
        assert line in out.getvalue()
        publisher(0.0, "coordinator", CoordinatorListening("0.0.0.0:7070", 1, False))
        asking = Discovery("run", AUTHORITY.fingerprint, bootstrap=[f"{HERE}:{publisher.port}"])
        with asking.open():
            record = asking.find()
    assert record is not None
    assert record.addresses == ("east.example.org:7070", "10.0.0.5:7070")


def test_a_command_asks_the_dht_only_if_it_is_told_to() -> None:
    config = load(None, ["local.coordinator=10.0.0.5:7070", "dht.enabled=true"], {})
    assert coordinator_of(config) == "10.0.0.5:7070"
    nowhere = load(
        None, ["local.coordinator=dht:127.0.0.1:1", f"local.authority={AUTHORITY.fingerprint}"], {}
    )
    with pytest.raises(Unreachable, match=r"nobody answered, 10 s\); check that one of 127.0.0.1:1 is up"):
        coordinator_of(nowhere)
    assert threads() == []


@pytest.mark.parametrize("there", [True, False])
def test_a_vpn_s_coordinator_is_found_by_the_dht(
    there: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It goes no further than to that."""

    def ended(addresses: str) -> None:
        raise Unreachable(f"asked {addresses}")

    monkeypatch.setattr(up, "check_able", lambda interface: None)
    monkeypatch.setattr(up, "split_addresses", ended)
    monkeypatch.setattr(dht, "FIND_S", 5.0 if there else 0.3)
    monkeypatch.setenv("ATOLL_TOKEN", "x" * 32)
    with closing(open_publisher(AUTHORITY, "run", port=0, advertise=[HERE])) as publisher:
        publisher(0.0, "coordinator", CoordinatorListening("0.0.0.0:1", 1, False))
        port = publisher.port if there else 1
        words = ["up", f"dht:{HERE}:{port}", "--run", "run", "--authority", AUTHORITY.fingerprint]
        assert run_command(["vpn", *words]) == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert (f"asked {HERE}:1" if there else "the DHT knows no coordinator of run 'run'") in line


def test_a_program_joins_by_the_dht_and_leaves_it_with_its_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, token = Register().make_token("join")
    monkeypatch.setenv("ATOLL_TOKEN", token)
    context = server_context(AUTHORITY.coordinator_identity(), strangers=True)
    trust = Trust(context=context, authority=AUTHORITY.certificate, certify=AUTHORITY.certify_peer)
    with CoordinatorThread(tmp_path / "journal", trust=trust, first_tokens=[made]) as coordinator:
        with closing(open_publisher(AUTHORITY, "run", bind=HERE)) as publisher:
            publisher(0.0, "coordinator", CoordinatorListening(coordinator.address, 1, False))
            line = f"dht:{HERE}:{publisher.port}"
            with atoll.join(line, run="run", authority=AUTHORITY.fingerprint, out=None) as session:
                assert session.peer
                assert threads() == ["atoll-dht", "atoll-dht"], "the publisher's and the session's"
            assert threads() == ["atoll-dht"]
            with pytest.raises(Unreachable, match="knows no coordinator of run 'walk'"):
                atoll.join(line, run="walk", authority=AUTHORITY.fingerprint, out=None)
            assert threads() == ["atoll-dht"], "a join that failed leaves nothing behind"
