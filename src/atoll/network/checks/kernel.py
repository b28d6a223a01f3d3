"""What the kernel lets TCP do: buffers, congestion control, and what it does after a pause. Read from /proc/sys."""

from __future__ import annotations

import math
from pathlib import Path

from atoll.network.checks.finding import Finding, found, problem, warning

SYSCTL = Path("/proc/sys")
STOCK_BYTES = 4 << 20
"""What a stock Linux allows one socket; the planner counts on it."""
TINY_BYTES = 512 << 10
GOOD_BYTES = 64 << 20
"""Enough for one connection of 5 Gbit/s at 100 ms."""
_RTT_S = 0.1
_CURRENT = "net/ipv4/tcp_congestion_control"
_AVAILABLE = "net/ipv4/tcp_available_congestion_control"
_IDLE = "net/ipv4/tcp_slow_start_after_idle"


def buffers(root: Path = SYSCTL) -> Finding:
    """How much one connection can have on the way: the most that its buffers grow to, and what that carries."""
    names = ("tcp_rmem", "tcp_wmem")
    limits = {name: held for name in names if (held := _triple(root / f"net/ipv4/{name}")) is not None}
    if len(limits) < len(names):
        return found("tcp buffers", "this system does not tell its TCP buffers")
    most = {name: triple[2] for name, triple in limits.items()}
    name, least = min(most.items(), key=lambda item: item[1])
    carries = least / 2 / _RTT_S * 8 / 1e6  # half a buffer is the kernel's own
    says = f"{_size(most['tcp_rmem'])} to receive, {_size(most['tcp_wmem'])} to send"
    details = {"tcp_rmem": limits["tcp_rmem"], "tcp_wmem": limits["tcp_wmem"]}
    raise_ = "sysctl -w " + " ".join(
        f'net.ipv4.{each}="{triple[0]} {triple[1]} {GOOD_BYTES}"' for each, triple in limits.items()
    )
    if least >= GOOD_BYTES:
        return found("tcp buffers", says, details=details)
    if least >= STOCK_BYTES:
        says += f": about {carries:.0f} Mbit/s a connection at 100 ms, so Atoll opens several"
        return found("tcp buffers", says, remedy=raise_, details=details)
    says += f": {name} stops one connection at about {carries:.3g} Mbit/s at 100 ms"
    judge = problem if least < TINY_BYTES else warning
    return judge("tcp buffers", says, raise_, details=details)


def congestion(root: Path = SYSCTL, chosen: str = "") -> Finding:
    """Which congestion control new connections have; `chosen` is net.congestion of the run ("": the system's)."""
    current, available = _text(root / _CURRENT), _text(root / _AVAILABLE).split()
    if not current:
        return found("congestion", "this system does not tell its congestion control")
    details = {"current": current, "available": available, "chosen": chosen}
    used = chosen or current
    if chosen and chosen not in available:
        return problem(
            "congestion",
            f"net.congestion = {chosen!r}, and this kernel has {', '.join(available)}",
            f"modprobe tcp_{chosen}, or leave net.congestion out",
            details=details,
        )
    says = used + (", by net.congestion" if chosen else "")
    if used == "bbr":
        return found("congestion", says, details=details)
    load = "" if "bbr" in available else "modprobe tcp_bbr && "
    remedy = f"{load}sysctl -w net.ipv4.tcp_congestion_control=bbr, or net.congestion for Atoll alone"
    if used == "cubic":
        return found(
            "congestion", f"{says}; where packets get lost, bbr is faster", remedy=remedy, details=details
        )
    return warning(
        "congestion", f"{says}: neither cubic nor bbr, so long ways are slow", remedy, details=details
    )


def idle(root: Path = SYSCTL) -> Finding:
    """Whether a connection begins slowly again after a pause: between two rounds there always is one."""
    text = _text(root / _IDLE)
    if not text:
        return found("after a pause", "this system does not tell whether TCP begins slowly after a pause")
    details = {"tcp_slow_start_after_idle": text}
    if text == "0":
        return found("after a pause", "connections go on as fast as before", details=details)
    return found(
        "after a pause",
        "connections begin slowly again, at every round",
        remedy="sysctl -w net.ipv4.tcp_slow_start_after_idle=0",
        details=details,
    )


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _triple(path: Path) -> tuple[int, int, int] | None:
    """least, default, most."""
    try:
        least, default, most = (int(each) for each in _text(path).split())
    except ValueError:
        return None
    return least, default, most


def _size(count: int) -> str:
    unit = min(max(0, int(math.log2(max(1, count)) // 10)), 3)
    return f"{count / 1024**unit:.3g} {('B', 'KiB', 'MiB', 'GiB')[unit]}"
