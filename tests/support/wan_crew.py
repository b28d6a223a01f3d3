"""Engines at the sites of an emulated network, each in a namespace of its own (tools/wanlab; needs root)."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.fault_crew import Crew, Process

WANLAB = Path(__file__).parents[2] / "tools" / "wanlab" / "wanlab.py"
NEEDED = ("ip", "iptables-restore", "cc")
# What every lab does, in namespaces that end with it: two ends of a wire, and packets handed to a process.
_TRIAL = "ip link add end0 type veth peer name end1 && iptables -w -A FORWARD -j NFQUEUE --queue-num 1"


def why_not() -> str:
    """Why there can be no such network here; empty if there can."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    if os.geteuid():
        return "network namespaces need root"
    if missing := [tool for tool in NEEDED if shutil.which(tool) is None]:
        return f"wanlab needs {', '.join(missing)}: apt-get install iproute2 iptables gcc libc6-dev"
    probe = subprocess.run(
        ["unshare", "--net", "--mount", "sh", "-c", _TRIAL], capture_output=True, text=True, check=False
    )
    if not probe.returncode:
        return ""
    said = probe.stderr.strip().splitlines() or [f"exit code {probe.returncode}"]
    return f"no emulated networks here, the kernel or its permissions lack what they need: {said[0]}"


def lab(network: dict[str, Any]) -> Any:
    """A lab of its own name, not up yet. Skips the test, saying why, where there can be none."""
    if reason := why_not():
        pytest.skip(reason)
    spec = importlib.util.spec_from_file_location("wanlab", WANLAB)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Lab(network, name=f"test{os.getpid() % 100000}")


class WanCrew(Crew):
    """Peer `p<i>` at the site of the same name."""

    def __init__(self, world: int, lab: Any, connect_timeout_s: float = 2.0) -> None:
        self.lab = lab
        super().__init__(world, connect_timeout_s)

    def __enter__(self) -> WanCrew:
        return self

    def start(self, name: str) -> Process:
        return Process(name, self.lab.command(name, self.command(name, self.lab.addr(name))))

    def address(self, reader: str, name: str) -> tuple[str, int]:
        """Behind a NAT: the address that others see."""
        return self.lab.public(name), self.peers[name].port
