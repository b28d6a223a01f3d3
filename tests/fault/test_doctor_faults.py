"""`atoll doctor` on a machine that really is so: a full /dev/shm, tiny TCP buffers, few open files.

Each fault is made in a namespace, or for a process, of its own; nothing outside sees it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.swarm import environment

pytestmark = pytest.mark.fault

DOCTOR = f"exec {sys.executable} -m atoll doctor --json"


def examined(tmp_path: Path, fault: str, *unshare: str) -> tuple[int, dict[str, dict[str, Any]], str]:
    """What doctor finds by name after the shell has made `fault`, the exit code, and what the shell said of it."""
    if unshare:
        _need_namespaces(unshare)
    command = ["sh", "-c", f"set -e; {fault}; {DOCTOR}"]
    done = subprocess.run(
        ["unshare", *unshare, *command] if unshare else command,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=tmp_path,
        env={**environment(), "PYTHONPATH": ":".join(path for path in sys.path if path)},
    )
    said, _, told = (
        done.stdout.rpartition("\n{") if not done.stdout.startswith("{") else ("", "", done.stdout[1:])
    )
    assert told, done.stderr
    found = json.loads("{" + told)
    assert found["exit_code"] == done.returncode
    return done.returncode, {each["name"]: each for each in found["findings"]}, said


def _need_namespaces(kinds: tuple[str, ...]) -> None:
    if shutil.which("unshare") is None or os.geteuid():
        pytest.skip("a fault of its own needs namespaces: Linux, root, and unshare (util-linux)")
    tried = subprocess.run(["unshare", *kinds, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no namespaces here: {tried.stderr.strip()}")


def test_a_full_dev_shm_is_named(tmp_path: Path) -> None:
    fault = (
        "mount -t tmpfs -o size=2m tmpfs /dev/shm; "
        "dd if=/dev/zero of=/dev/shm/big bs=64k count=64 2>/dev/null || true; stat -f -c %a /dev/shm"
    )
    code, found, said = examined(tmp_path, fault, "-m")
    assert said.strip() == "0", "the fault fired: no block is free"
    assert (found["/dev/shm"]["grade"], code) == ("problem", 3)
    assert "it is full" in found["/dev/shm"]["sentence"]
    assert "du -sh /dev/shm/*" in found["/dev/shm"]["remedy"]
    assert found["disk"]["grade"] != "problem"


def test_tiny_tcp_buffers_are_named_with_the_lines_to_change_them(tmp_path: Path) -> None:
    """In a network namespace, whose buffers are its own."""
    fault = 'sysctl -w net.ipv4.tcp_wmem="4096 16384 65536"'
    code, found, said = examined(tmp_path, fault, "-n")
    assert "65536" in said, "the fault fired"
    buffers = found["tcp buffers"]
    assert (buffers["grade"], code) == ("problem", 3)
    assert "64 KiB to send" in buffers["sentence"]
    line = next(word for word in buffers["remedy"].split('"') if "67108864" in word)
    assert line.split()[-1] == "67108864"
    again = 'sysctl -w net.ipv4.tcp_wmem="4096 16384 65536"; ' + buffers["remedy"]
    _, mended, _ = examined(tmp_path, again, "-n")
    assert mended["tcp buffers"]["grade"] == "ok", "the line that it gives is right"


def test_few_open_files_are_named(tmp_path: Path) -> None:
    code, found, _ = examined(tmp_path, "ulimit -n 128")
    assert (found["open files"]["grade"], code) == ("problem", 3)
    assert "at most 128" in found["open files"]["sentence"]


def test_no_network_at_all_is_said_and_not_waited_for(tmp_path: Path) -> None:
    """No interface but loopback, which is down."""
    _, found, _ = examined(tmp_path, "true", "-n")
    assert found["mtu"]["sentence"] == "no interface is up"
    assert found["ipv6"]["sentence"].startswith("none")
