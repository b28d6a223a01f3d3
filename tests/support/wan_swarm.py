"""A run whose coordinator and peers are at sites of an emulated network (tools/wanlab): real processes and packets."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

from support.swarm import QUADRATIC, Peer, Swarm, environment

HUB = "hub"
PORT = 7070


def star(names: Iterable[str], rate: str = "100mbit", rtt_ms: float = 20) -> dict[str, Any]:
    """A site for each peer, and one for the coordinator."""
    sites = {name: {"up": rate, "down": rate} for name in (HUB, *names)}
    return {"sites": sites, "default": {"rtt_ms": rtt_ms}, "links": []}


class WanSwarm(Swarm):
    """Peers live at the site of their own name, the coordinator at HUB. Statuses can not be asked from here."""

    def __init__(self, lab: Any, folder: Path, *, start_peers: int, **membership: Any) -> None:
        self.lab = lab
        super().__init__(folder, start_peers=start_peers, **membership)

    def __enter__(self) -> WanSwarm:
        return self

    def first_address(self) -> str:
        return f"{self.lab.addr(HUB)}:{PORT}"

    def placed(self, command: list[str]) -> list[str]:
        """Nothing is encrypted, so the interface is named on which that is accepted."""
        return self.lab.command(HUB, [*command, "--set", 'net.vpn="wan0"'])

    def quadratic(self, name: str, center: float, *arguments: object) -> Peer:
        command = [str(QUADRATIC), "--address", self.address, "--peer", name, "--center", str(center)]
        command += ["--results", str(self.folder / f"{name}.results")]
        command += ["--marker", str(self.folder / f"{name}.marker"), "--out", str(self.folder)]
        return self.start(name, [*command, *map(str, arguments)])

    def start(self, name: str, arguments: list[str]) -> Peer:
        """Python with these arguments, as the peer of this name."""
        results, marker = self.folder / f"{name}.results", self.folder / f"{name}.marker"
        log_path = self.folder / f"{name}.log"
        with log_path.open("ab") as log:
            process = subprocess.Popen(
                self.lab.command(name, [sys.executable, *arguments]),
                env={**environment(), "PYTHONPATH": ":".join(path for path in sys.path if path)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.peers[name] = Peer(name, process, results, marker, log_path)  # type: ignore[arg-type]
        return self.peers[name]

    def split(self, side: Iterable[str], other: Iterable[str]) -> None:
        """Nothing passes between the two sides any more, and nobody is told."""
        for a, b in product(side, other):
            self.lab.cut(a, b)

    def swallowed(self) -> int:
        """Packets that cuts took since the network is up."""
        return sum(pair["cut_dropped"] for pair in self.lab.stats()["pairs"].values())
