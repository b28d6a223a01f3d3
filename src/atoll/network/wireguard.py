"""One WireGuard interface of our own: made, told of peers, looked at, removed.

The kernel's WireGuard where there is one, else `wireguard-go`, the same in a process; `wg` (wireguard-tools) speaks to
both. An interface of ours carries `MARK` and its run in its alias, in the kernel, so that nobody else's is ever
touched; the mark is gone with the interface. The private key goes to `wg` over a pipe. Calls block for some
milliseconds, `make` and `remove` for seconds; all need root.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.addresses import join_address
from atoll.errors import ConfigError, LocalError
from atoll.network.wireguard_keys import KeyPair, key_of, text_of

MARK = "atoll vpn: "
MTU = 1420  # what WireGuard's own tools take on a path of 1500 bytes
KEEPALIVE_S = 25  # shorter than routers forget
SOCKETS = Path("/var/run/wireguard")
_CALL_S = 10.0
_START_S = 10.0
_PACKAGES = "on Debian and Ubuntu: apt-get install wireguard-tools iproute2, and wireguard-go where the kernel has none"


@dataclass(frozen=True, slots=True)
class Seen:
    """One peer as WireGuard shows it. `endpoint` None: none yet; `handshake_s`: of the last one, Unix time, 0: none."""

    endpoint: tuple[str, int] | None
    handshake_s: float
    received_bytes: int
    sent_bytes: int


@dataclass(frozen=True, slots=True)
class Change:
    """What to set of one peer. `endpoint` None: as it is. `afresh`: forget what was agreed with it, and begin anew at
    once (else WireGuard waits up to 5 s between attempts). `gone`: remove it, nothing else counts."""

    public: bytes
    address: str = ""
    endpoint: tuple[str, int] | None = None
    afresh: bool = False
    gone: bool = False


def check_able(name: str) -> None:
    """Raises ConfigError or LocalError, in one line, if this process can make no interface of this name."""
    if not re.fullmatch(r"[a-zA-Z][a-zA-Z0-9_.-]{0,14}", name):
        raise ConfigError(f"--interface {name}: a letter, then up to 14 letters, digits or any of _.-")
    if os.geteuid():
        raise LocalError("atoll vpn makes a network interface, which only root may: sudo -E atoll vpn ...")
    if not Path("/proc/net/if_inet6").exists():
        raise LocalError(
            "this kernel has no IPv6, and the VPN's addresses are IPv6: boot it with, or use another VPN"
        )
    if missing := [tool for tool in ("ip", "wg") if shutil.which(tool) is None]:
        raise LocalError(f"no {' and no '.join(missing)} here; {_PACKAGES}")


def free_port(port: int) -> int:
    """This UDP port, or any free one for 0, free for IPv4 and IPv6. Raises LocalError."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as both:
            both.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            both.bind(("::", port))
            return int(both.getsockname()[1])
    except OSError as error:
        raise LocalError(
            f"UDP port {port}: {(error.strerror or str(error)).lower()}; stop what has it (ss -ulpn), or choose "
            "another with --port"
        ) from None


class Interface:
    """The interface `name`. `environment` is what the processes that it starts see."""

    def __init__(self, name: str, environment: Mapping[str, str]) -> None:
        self.name = name
        self._environment = dict(environment)

    def owner(self) -> str | None:
        """Whose it is: the run for one of ours, "" for somebody else's, None if there is none."""
        shown = self._call("ip", "-json", "link", "show", "dev", self.name, may_fail=True)
        if not shown.strip():
            return None
        alias = str(json.loads(shown)[0].get("ifalias", ""))
        return alias.removeprefix(MARK) if alias.startswith(MARK) else ""

    def check_free(self) -> None:
        """Raises LocalError if there is one of this name that is not ours."""
        if self.owner() == "":
            raise LocalError(
                f"the interface {self.name} exists and is not Atoll's: choose another name with --interface"
            )

    def make(self, run: str, keys: KeyPair, port: int, address: str) -> str:
        """Make it, with no peers yet; one of ours that is left over is removed first. Returns which WireGuard it is.

        Raises LocalError, and leaves nothing.
        """
        self.check_free()
        self.remove()
        kind = self._create()
        try:
            self._call("ip", "link", "set", "dev", self.name, "alias", f"{MARK}{run}")
            self._call(
                "wg", "set", self.name, "private-key", "/dev/stdin", "listen-port", str(port),
                stdin=text_of(keys.private) + "\n",
            )  # fmt: skip
            self._allow_ipv6()
            self._call("ip", "-6", "addr", "add", f"{address}/64", "dev", self.name, "nodad")
            self._call("ip", "link", "set", "dev", self.name, "mtu", str(MTU), "up")
        except BaseException:
            with contextlib.suppress(LocalError):
                self._call("ip", "link", "del", "dev", self.name)
            raise
        return kind

    def set(self, changes: Sequence[Change]) -> None:
        """All of them in one call. Raises LocalError."""
        words = [word for change in changes for word in _words(change)]
        if words:
            self._call("wg", "set", self.name, *words)

    def look(self) -> dict[bytes, Seen]:
        """Its peers, by public key. Raises LocalError if it is gone."""
        # The first line is of the interface itself, private key and all: dropped unseen.
        _, *lines = self._call("wg", "show", self.name, "dump").splitlines()
        return {key_of(fields[0]): _seen(fields) for fields in (line.split("\t") for line in lines)}

    def remove(self) -> bool:
        """Remove it if it is one of ours; False if there is none of ours. Raises LocalError.

        wireguard-go ends with its interface: waited for until its socket is gone.
        """
        if not self.owner():
            return False
        self._call("ip", "link", "del", "dev", self.name)
        deadline_s = time.monotonic() + _CALL_S
        while self._socket().exists() and time.monotonic() < deadline_s:
            time.sleep(0.02)
        return True

    def _create(self) -> str:
        try:
            self._call("ip", "link", "add", "dev", self.name, "type", "wireguard")
            return "kernel"
        except LocalError as refused:
            if shutil.which("wireguard-go") is None:
                reason = str(refused).partition(": ")[2] or str(refused)
                raise LocalError(
                    f"no WireGuard here: the kernel's says {reason!r}, and there is no wireguard-go; {_PACKAGES}"
                ) from None
        self._socket().unlink(missing_ok=True)  # of one that was killed: there is no such interface
        self._call("wireguard-go", self.name)  # ends once the interface is there; its daemon goes on
        deadline_s = time.monotonic() + _START_S
        while not self._socket().exists() or self.owner() is None:
            if time.monotonic() > deadline_s:
                raise LocalError(
                    f"wireguard-go made no interface {self.name} in {_START_S:g} s; is there /dev/net/tun?"
                )
            time.sleep(0.02)
        return "wireguard-go"

    def _allow_ipv6(self) -> None:
        """On this interface only, whatever the machine's default is."""
        setting = Path(f"/proc/sys/net/ipv6/conf/{self.name}/disable_ipv6")
        try:
            if setting.read_text().strip() != "0":
                setting.write_text("0")
        except OSError as error:
            raise LocalError(
                f"no IPv6 on {self.name} ({(error.strerror or str(error)).lower()}): the VPN's addresses are IPv6; "
                "let this kernel or container have it"
            ) from None

    def _socket(self) -> Path:
        return SOCKETS / f"{self.name}.sock"

    def _call(self, *command: str, stdin: str = "", may_fail: bool = False) -> str:
        try:
            done = subprocess.run(
                command, input=stdin, capture_output=True, text=True, timeout=_CALL_S, env=self._environment
            )
        except subprocess.TimeoutExpired:
            raise LocalError(f"{command[0]} did not end in {_CALL_S:g} s ({' '.join(command[:4])})") from None
        if done.returncode and not may_fail:
            said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
            raise LocalError(f"{' '.join(command[:5])}: {said[:300]}")
        return "" if done.returncode else done.stdout


def _words(change: Change) -> list[str]:
    peer = ["peer", text_of(change.public)]
    if change.gone:
        return [*peer, "remove"]
    words = [*peer, "remove"] if change.afresh else []
    words += [*peer, "persistent-keepalive", str(KEEPALIVE_S), "allowed-ips", f"{change.address}/128"]
    return words if change.endpoint is None else [*words, "endpoint", join_address(*change.endpoint)]


def _seen(fields: Sequence[str]) -> Seen:
    """A line of `wg show dump`: public key, preshared key, endpoint, allowed ips, handshake, received, sent, ..."""
    host, _, port = fields[2].rpartition(":")
    endpoint = (host.strip("[]"), int(port)) if port.isdecimal() else None
    return Seen(endpoint, float(fields[4]), int(fields[5]), int(fields[6]))
