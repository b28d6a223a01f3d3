"""`atoll vpn up` at the sites of an emulated network (tools/wanlab): real processes, real WireGuard, real packets."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from atoll.network.chosen_paths import FOLDER
from support.swarm import environment
from support.wan_swarm import HUB, PORT

ATOLL = [sys.executable, "-m", "atoll"]
NEEDED = ("wireguard-go", "wg", "tcpdump", "conntrack")
ECHO_PORT = 9100

# Echoes whatever comes, over IPv4 and IPv6, until it is killed.
_ECHO = """
import asyncio, socket, sys
async def echo(reader, writer):
    while piece := await reader.read(65536):
        writer.write(piece)
        await writer.drain()
    writer.close()
async def main():
    both = socket.create_server(("::", int(sys.argv[1])), family=socket.AF_INET6, dualstack_ipv6=True)
    server = await asyncio.start_server(echo, sock=both)
    print("ready", flush=True)
    await server.serve_forever()
asyncio.run(main())
"""
# Says what comes on its stdin, line by line, over one connection, and prints what comes back.
_SAY = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), 20) as there, there.makefile("rb") as back:
    there.settimeout(60)
    print("connected", flush=True)
    for line in sys.stdin:
        there.sendall(line.encode())
        print(back.readline().decode(), end="", flush=True)
"""


def skip_without_tools() -> None:
    """Skips the test, saying why, where there is no WireGuard to be tested."""
    if missing := [tool for tool in NEEDED if shutil.which(tool) is None]:
        packages = "wireguard-go wireguard-tools tcpdump conntrack"
        pytest.skip(f"the VPN's tests need {', '.join(missing)}: apt-get install {packages}")
    if not Path("/dev/net/tun").exists():
        pytest.skip("the VPN's tests need /dev/net/tun, for wireguard-go")


class Conversation:
    """One TCP connection from a site to an address, kept open."""

    def __init__(self, lab: Any, site: str, address: str, port: int = ECHO_PORT) -> None:
        self._process = lab.popen(
            site,
            [sys.executable, "-c", _SAY, address, str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.connected = self._process.stdout.readline().strip() == "connected"

    def say(self, line: str) -> str:
        """What comes back; waits for it, at most a minute."""
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return str(self._process.stdout.readline()).strip()

    def close(self) -> None:
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            pipe.close()
        self._process.wait(timeout=10)


class VpnLab:
    """The VPN's processes, one a site, of the run `run` whose coordinator is at HUB. Leaving it ends them all."""

    def __init__(
        self, lab: Any, folder: Path, run: str, sites: Sequence[str], port: int = PORT, letter: str = "x"
    ) -> None:
        """The coordinator listens on `port`; `letter` tells this VPN's interfaces from another one's."""
        self.lab, self.folder, self.run, self.port = lab, folder, run, port
        self.interfaces = {site: f"vt{os.getpid() % 100000}{letter}{i}" for i, site in enumerate(sites)}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._echoes: list[subprocess.Popen[str]] = []

    def up(self, site: str, *more: str, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start `atoll vpn up` there."""
        command = [
            *ATOLL,
            "vpn",
            "up",
            f"{self.lab.public(HUB)}:{self.port}",
            "--run",
            self.run,
            "--peer",
            site,
        ]
        command += ["--interface", self.interfaces[site], "--out", str(self.folder / site), *more]
        with self.log(site).open("ab") as log:
            process = subprocess.Popen(
                self.lab.command(site, command),
                env=env or child_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.processes[site] = process
        return process

    def log(self, site: str) -> Path:
        return self.folder / f"{site}.vpn.log"

    def logs(self) -> str:
        return "\n".join(f"--- {site}\n{self.log(site).read_text()}" for site in self.processes)

    def atoll(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run `atoll vpn WORDS` and wait for it."""
        return subprocess.run(
            [*ATOLL, "vpn", *words],
            env=child_environment(),
            capture_output=True,
            text=True,
            timeout=60,
            stdin=subprocess.DEVNULL,
        )

    def atoll_at(self, site: str, *words: str) -> subprocess.CompletedProcess[str]:
        """The same at a site, and on its interface."""
        command = [*ATOLL, "vpn", *words, "--interface", self.interfaces[site]]
        return subprocess.run(
            self.lab.command(site, command),
            env=child_environment(),
            capture_output=True,
            text=True,
            timeout=60,
            stdin=subprocess.DEVNULL,
        )

    def status(self, site: str) -> dict[str, Any]:
        """As its process wrote it last; {} if there is none."""
        try:
            return dict(json.loads((FOLDER / f"{self.interfaces[site]}.json").read_text()))
        except (FileNotFoundError, ValueError):
            return {}

    def peers(self, site: str) -> dict[str, dict[str, Any]]:
        return {each["peer"]: each for each in self.status(site).get("peers", ())}

    def path(self, site: str, other: str) -> str:
        return str(self.peers(site).get(other, {}).get("path", "unknown"))

    def address(self, site: str) -> str:
        return str(self.status(site)["address"])

    def wait(self, condition: Callable[[], object], within_s: float, what: str) -> None:
        deadline_s = time.monotonic() + within_s
        while not condition():
            if time.monotonic() > deadline_s:
                raise AssertionError(f"{what}: not within {within_s:g} s\n{self.logs()}")
            time.sleep(0.1)

    def wait_for_all(self, within_s: float = 60.0) -> None:
        """Until everybody hears everybody."""
        sites = list(self.interfaces)

        def complete() -> bool:
            pairs = ((a, b) for a in sites for b in sites if a != b)
            return all(self.path(a, b) not in ("unknown", "no answer") for a, b in pairs)

        self.wait(complete, within_s, "everybody hears everybody")

    def echo_at(self, site: str) -> None:
        """Listen there on ECHO_PORT, outside and inside the VPN."""
        echo = self.lab.popen(
            site, [sys.executable, "-c", _ECHO, str(ECHO_PORT)], stdout=subprocess.PIPE, text=True
        )
        self._echoes.append(echo)
        assert echo.stdout.readline().strip() == "ready"

    def left(self) -> list[str]:
        """Whatever of ours is still there: interfaces, wireguard-go's sockets and processes."""
        found = []
        for site, name in self.interfaces.items():
            if self.lab.run(site, ["ip", "link", "show", "dev", name])[0] == 0:
                found.append(f"interface {name} at {site}")
            if Path(f"/var/run/wireguard/{name}.sock").exists():
                found.append(f"socket of {name}")
            found += [f"process {pid} of {name}" for pid in wireguard_processes(name)]
        return found

    def __enter__(self) -> VpnLab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(timeout=10)
        for site, name in self.interfaces.items():
            self.atoll_at(site, "down")
            (FOLDER / f"{name}.lock").unlink(missing_ok=True)
        for echo in self._echoes:
            echo.kill()
            echo.wait(timeout=10)
            assert echo.stdout
            echo.stdout.close()


def wireguard_processes(interface: str) -> list[int]:
    """Of wireguard-go for this interface, the ended ones that nobody collected left out."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[0].endswith(b"wireguard-go") and interface.encode() in words:
            found.append(int(entry.name))
    return found


def child_environment() -> dict[str, str]:
    return {**environment(), "PYTHONPATH": ":".join(path for path in sys.path if path)}
