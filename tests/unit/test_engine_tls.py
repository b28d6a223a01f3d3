"""TLS between engines: whose certificate is not of the run's authorities is nobody, and is told in one line why."""

from __future__ import annotations

import dataclasses
import ssl

import numpy as np
import pytest

from atoll import _native
from atoll.comm.native import Tls
from atoll.network.authority import Authority, new_key
from atoll.plan.grid import Grid
from atoll.values import Edge, OpId
from support import engines
from support.engines import Running, certificates, decoded, encoded, open_engine, plan_for, power_of

GRID = Grid.of([1_000_000])
pytestmark = pytest.mark.skipif(not _native.tls_is_built(), reason="this build has no TLS")


def test_bytes_are_counted_at_the_socket_and_tls_adds_less_than_a_percent() -> None:
    with engines.Engines(2, tls=certificates("peer")) as both:
        running = both.begin(both.plan(GRID, "fp32", OpId(1, 0)), GRID)
        for peer, one in running.items():
            report = one.report()
            assert report.ok, report.reason
            np.testing.assert_array_equal(decoded(GRID, "fp32", one.result), np.float32(1.5))
            wire = GRID.wire_bytes("fp32")
            assert wire < report.stats.sent_bytes < 1.01 * wire + 16_000
            assert wire < report.stats.received_bytes < 1.01 * wire + 16_000
            assert both.comms[peer].stats()["sent_bytes"] >= report.stats.sent_bytes


@pytest.mark.parametrize(
    ("theirs", "why"),
    [
        (certificates("stranger"), "TLS: "),
        (certificates("expired"), "TLS: "),
        (certificates("peer", authorities="stranger_authority"), "TLS: "),
        (None, "could not connect"),
    ],
    ids=["of another authority", "expired", "trusts others", "plain"],
)
@pytest.mark.parametrize("name", ["a", "z"], ids=["it dials", "it is dialled"])
def test_a_peer_without_a_good_certificate_gets_no_link(name: str, theirs: Tls | None, why: str) -> None:
    grid = Grid.of([1000])
    ours = open_engine("m", tls=certificates("peer"), connect_timeout_s=1.0)
    other = open_engine(name, tls=theirs, connect_timeout_s=1.0)
    try:
        plan = plan_for({"m": ours.port, name: other.port}, grid.numel, "fp32", OpId(1, 0), deadline_s=10.0)
        running = [Running(comm, plan, grid, encoded(grid, "fp32", 1.0)) for comm in (ours, other)]
        reports = [one.report() for one in running]
        for report in reports:
            assert not report.ok
            assert set(report.broken) == {Edge("m", name), Edge(name, "m")}
            assert "\n" not in report.reason
        dialler = reports[0] if name == "z" else reports[1]
        assert why in dialler.reason or "certificate" in dialler.reason, dialler.reason
        assert ours.stats()["connections"] == other.stats()["connections"] == 0
    finally:
        ours.close()
        other.close()


@pytest.mark.parametrize("highest", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=lambda v: v.name)
def test_only_tls_13_is_spoken(highest: ssl.TLSVersion) -> None:
    from support.raw_peer import connect

    comm = open_engine("m", tls=certificates("peer"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.maximum_version = False, highest
    context.load_verify_locations(engines.CERTIFICATES / "authority.pem")
    context.load_cert_chain(engines.CERTIFICATES / "peer.pem", engines.CERTIFICATES / "peer.key")
    try:
        with connect(comm.port) as plain:
            if highest == ssl.TLSVersion.TLSv1_3:
                with context.wrap_socket(plain) as secure:
                    assert secure.version() == "TLSv1.3"
                    assert secure.compression() is None
            else:
                with pytest.raises(ssl.SSLError):
                    context.wrap_socket(plain)
    finally:
        comm.close()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"certificates": "no PEM"}, "the TLS certificate is no use"),
        ({"key": "no PEM"}, "the TLS key is no use"),
        ({"key": certificates("stranger").key}, "the TLS key does not belong to the certificate"),
        ({"authorities": ""}, "no TLS authority could be read"),
    ],
    ids=["certificate", "key", "another key", "authorities"],
)
def test_certificates_that_are_no_use_are_refused_in_one_line(change: dict[str, str], why: str) -> None:
    with pytest.raises(ValueError, match=why) as refused:
        open_engine("m", tls=dataclasses.replace(certificates("peer"), **change))
    assert "\n" not in str(refused.value)


def of_authority(authority: Authority, peer: str) -> Tls:
    key, public = new_key()
    certificate, _ = authority.certify_peer(peer, public)
    return Tls(certificate, key, authority.certificate, named=True)


@pytest.mark.parametrize("liar", ["a", "z"], ids=["it dials", "it is dialled"])
def test_nobody_passes_for_another_peer(liar: str) -> None:
    """The liar holds the session key, and a certificate of the run: that of another name."""
    authority, grid = Authority.new("test"), Grid.of([1000])
    ours = open_engine("m", tls=of_authority(authority, "m"), connect_timeout_s=1.0)
    other = open_engine(liar, tls=of_authority(authority, "another"), connect_timeout_s=1.0)
    try:
        plan = plan_for({"m": ours.port, liar: other.port}, grid.numel, "fp32", OpId(1, 0), deadline_s=10.0)
        running = [Running(comm, plan, grid, encoded(grid, "fp32", 1.0)) for comm in (ours, other)]
        report, _ = [one.report() for one in running]
        assert not report.ok
        assert set(report.broken) == {Edge("m", liar), Edge(liar, "m")}
        assert ours.stats()["connections"] == 0
        if liar == "z":  # who accepts only counts
            assert "its certificate is not that of z" in report.reason
        else:
            assert ours.stats()["refused_hellos"] > 0
    finally:
        ours.close()
        other.close()


def test_peers_are_known_by_the_names_in_their_certificates() -> None:
    authority, names = Authority.new("test"), ("a", "bern 🦊", "x" * 128)
    comms = {name: open_engine(name, tls=of_authority(authority, name)) for name in names}
    try:
        ports = {name: comm.port for name, comm in comms.items()}
        plan = plan_for(ports, GRID.numel, "int8", OpId(1, 0))
        running = [Running(comm, plan, GRID, encoded(GRID, "int8", 1.0)) for comm in comms.values()]
        assert all(one.report().ok for one in running)
    finally:
        for comm in comms.values():
            comm.close()


def test_many_members_over_tls() -> None:
    with engines.Engines(4, tls=certificates("peer")) as all_four:
        for result in all_four.reduce(all_four.plan(GRID, "int8", OpId(1, 0)), GRID):
            expected = sum(power_of(i) for i in range(4)) / 4
            np.testing.assert_allclose(decoded(GRID, "int8", result), expected, rtol=0.01)
