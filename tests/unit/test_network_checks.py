"""What is said of a machine's network, from facts that are given."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.network.checks import kernel, lines
from atoll.network.checks.finding import Finding
from atoll.network.checks.inbound import Seen, advertised, nat, port_in

PUBLIC, PRIVATE, OUTSIDE = "10.77.1.2", "192.168.1.10", "203.0.113.9"


def sysctl(root: Path, **values: str) -> Path:
    folder = root / "net/ipv4"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in values.items():
        (folder / name).write_text(text + "\n")
    return root


# ---- TCP -------------------------------------------------------------------------------------------------------------


def test_tiny_buffers_are_a_problem_with_the_lines_that_change_them(tmp_path: Path) -> None:
    root = sysctl(tmp_path, tcp_rmem="4096\t16384\t131072", tcp_wmem="4096\t16384\t4194304")
    found = kernel.buffers(root)
    assert (found.grade, found.about) == ("problem", "machine")
    assert "128 KiB to receive" in found.sentence
    assert "tcp_rmem stops one connection at about 5.24 Mbit/s at 100 ms" in found.sentence
    assert found.remedy == (
        'sysctl -w net.ipv4.tcp_rmem="4096 16384 67108864" net.ipv4.tcp_wmem="4096 16384 67108864"'
    )


@pytest.mark.parametrize(
    ("most", "grade", "remedy"),
    [(1 << 20, "warning", True), (4 << 20, "ok", True), (6291456, "ok", True), (64 << 20, "ok", False)],
)
def test_buffers_by_size(tmp_path: Path, most: int, grade: str, remedy: bool) -> None:
    root = sysctl(tmp_path, tcp_rmem=f"4096 1 {most}", tcp_wmem=f"4096 1 {most}")
    found = kernel.buffers(root)
    assert (found.grade, bool(found.remedy)) == (grade, remedy)


def test_what_a_system_does_not_tell_is_no_fault(tmp_path: Path) -> None:
    found = [kernel.buffers(tmp_path), kernel.congestion(tmp_path), kernel.idle(tmp_path)]
    assert [each.grade for each in found] == ["ok"] * 3
    assert all("does not tell" in each.sentence for each in found)
    assert kernel.buffers(sysctl(tmp_path, tcp_rmem="nonsense", tcp_wmem="1 2")).grade == "ok"


@pytest.mark.parametrize(
    ("current", "available", "chosen", "grade", "says", "remedy"),
    [
        ("bbr", "bbr cubic", "", "ok", "bbr", ""),
        (
            "cubic",
            "reno cubic bbr",
            "",
            "ok",
            "bbr is faster",
            "sysctl -w net.ipv4.tcp_congestion_control=bbr",
        ),
        ("cubic", "reno cubic", "", "ok", "bbr is faster", "modprobe tcp_bbr && sysctl"),
        ("reno", "reno cubic", "", "warning", "long ways are slow", "modprobe tcp_bbr"),
        ("reno", "reno bbr", "bbr", "ok", "bbr, by net.congestion", ""),
        ("cubic", "reno cubic", "bbr", "problem", "this kernel has reno, cubic", "modprobe tcp_bbr"),
    ],
)
def test_congestion(
    tmp_path: Path, current: str, available: str, chosen: str, grade: str, says: str, remedy: str
) -> None:
    root = sysctl(tmp_path, tcp_congestion_control=current, tcp_available_congestion_control=available)
    found = kernel.congestion(root, chosen)
    assert found.grade == grade
    assert says in found.sentence
    assert found.remedy.startswith(remedy) if remedy else not found.remedy


def test_slow_start_after_a_pause_has_its_line(tmp_path: Path) -> None:
    slow = kernel.idle(sysctl(tmp_path, tcp_slow_start_after_idle="1"))
    assert slow.remedy == "sysctl -w net.ipv4.tcp_slow_start_after_idle=0"
    assert not kernel.idle(sysctl(tmp_path, tcp_slow_start_after_idle="0")).remedy


# ---- addresses -------------------------------------------------------------------------------------------------------


def test_mtu() -> None:
    assert lines.mtu(1500, {}).grade == "ok"
    assert "tunnel" in lines.mtu(1420, {}).sentence
    assert lines.mtu(576, {}).grade == "warning"
    assert lines.mtu(None, {"eth0": 1500, "wg0": 1420}).sentence == "eth0 1500, wg0 1420"
    on_loopback = lines.way_mtu("127.0.0.1", 9)
    assert on_loopback is not None
    assert on_loopback > 1500
    assert lines.way_mtu("no address", 9) is None


def test_ipv6() -> None:
    assert (
        "2001:db8::5, beside IPv4" in lines.ipv6({"eth0": ("192.0.2.1", "2001:db8::5", "fe80::1")}).sentence
    )
    assert "no IPv4" in lines.ipv6({"eth0": ("2001:db8::5",)}).sentence
    assert lines.ipv6({"eth0": ("192.0.2.1", "fe80::1")}).sentence.startswith("none")
    assert "lo" not in lines.own_addresses()


def test_a_name_that_is_loopback_is_said() -> None:
    assert "never advertise" in lines.names("bern", ["127.0.1.1"]).sentence
    assert lines.names("bern", ["192.0.2.1"]).sentence == "bern is 192.0.2.1"
    assert (
        "no address (name or service not known)"
        in lines.names("bern", [], "name or service not known").sentence
    )


# ---- from outside ----------------------------------------------------------------------------------------------------


def seen(own: str = PUBLIC, host: str = PUBLIC, *, given: bool = False, **more: object) -> Seen:
    values = {"port": 7071, "dialed": {7071: ""}} | more
    return Seen(own_host=own, seen_host=host, port_given=given, **values)  # type: ignore[arg-type]


SHUT = {7071: "no answer in 3 s"}
KINDS = {
    "none": (seen(), "ok"),
    "firewall": (seen(dialed=SHUT), "problem"),
    "forwarded": (seen(PRIVATE, OUTSIDE), "ok"),
    "cone": (seen(PRIVATE, OUTSIDE, dialed={**SHUT, 40000: ""}, mapped=[(OUTSIDE, 40000)] * 2), "ok"),
    "endpoint-independent": (
        seen(PRIVATE, OUTSIDE, dialed={**SHUT, 40000: "no answer in 3 s"}, mapped=[(OUTSIDE, 40000)] * 2),
        "warning",
    ),
    "endpoint-dependent": (
        seen(PRIVATE, OUTSIDE, dialed=SHUT, mapped=[(OUTSIDE, 40000), (OUTSIDE, 40001)]),
        "warning",
    ),
    "translated": (seen(PRIVATE, OUTSIDE, dialed=SHUT), "warning"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_translation_is_told_apart(kind: str) -> None:
    facts, grade = KINDS[kind]
    assert facts.kind() == kind
    assert nat(facts).details["kind"] == kind
    found = port_in(facts)
    assert (found.grade, found.about) == (grade, "in")
    assert bool(found.remedy) == (grade != "ok")


def test_a_port_that_the_user_chose_is_meant_to_be_reached() -> None:
    given = seen(PRIVATE, OUTSIDE, given=True, dialed=SHUT, mapped=[(OUTSIDE, 40000)] * 2)
    found = port_in(given)
    assert found.grade == "problem"
    assert "forward TCP port 7071 on the router" in found.remedy
    shut = port_in(seen(given=True, dialed=SHUT))
    assert "port 7071 at 10.77.1.2 (no answer in 3 s): a firewall shuts it" in shut.sentence
    assert "tcp dport 7071 accept" in shut.remedy


def judged(
    address: str, resolved: list[str], facts: Seen, coordinator: str = "10.77.9.2", why: str = ""
) -> Finding:
    return advertised(address, resolved, why, coordinator_host=coordinator, seen=facts, own=[facts.own_host])


def test_a_loopback_advertisement_is_named() -> None:
    found = judged("bern", ["127.0.1.1"], seen())
    assert (found.grade, found.about) == ("problem", "in")
    assert "others are told bern (127.0.1.1), which is loopback" in found.sentence
    assert found.remedy == f"set local.advertise={PUBLIC}"
    assert judged("127.0.0.1", ["127.0.0.1"], seen()).grade == "problem"
    here = seen("127.0.0.1", "127.0.0.1")
    assert judged("127.0.0.1", ["127.0.0.1"], here, coordinator="127.0.0.1").grade == "ok"


def test_an_advertisement_that_leads_elsewhere_is_named() -> None:
    assert judged(PUBLIC, [PUBLIC], seen()).grade == "ok"
    assert judged("10.9.9.9", ["10.9.9.9"], seen()).grade == "warning"
    assert judged("nowhere", ["nowhere"], seen(), why="name or service not known").grade == "problem"
    behind = seen(PRIVATE, OUTSIDE)
    assert judged(PRIVATE, [PRIVATE], behind).remedy == f"set local.advertise={OUTSIDE}"
    assert judged(OUTSIDE, [OUTSIDE], behind).grade == "ok"
