"""An engine in a process of its own, seen from the test that starts it; see engine_peer.py."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psutil

from atoll.values import Plan, ReduceReport
from support import engines
from support.engines import KEY
from support.tied import tied

PEER = Path(__file__).parent / "engine_peer.py"


class PeerProcess:
    """An engine in a process of its own; see support/engine_peer.py."""

    def __init__(self, peer: str, value: float, *options: str) -> None:
        command = [
            sys.executable,
            str(PEER),
            "--peer",
            peer,
            "--key",
            KEY.hex(),
            "--value",
            str(value),
            *(["--tls"] if engines.TLS is not None else []),
            *options,
        ]
        self.process = subprocess.Popen(
            tied(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def begin(self, plan: Plan) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(plan).decode() + "\n")
        self.process.stdin.flush()

    def report(self, within_s: float = 30.0) -> ReduceReport:
        out, _ = self.process.communicate(timeout=within_s)
        return msgspec.json.decode(out, type=ReduceReport)

    def halted(self, how: signal.Signals, within_s: float = 10.0) -> bool:
        """Whether the peer's own fault fired: it was killed, or it is stopped."""
        if how == signal.SIGKILL:
            return self.process.wait(within_s) == -how
        return psutil.Process(self.process.pid).status() == psutil.STATUS_STOPPED

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextmanager
def peer_process(peer: str, value: float, *options: str) -> Iterator[PeerProcess]:
    started = PeerProcess(peer, value, *options)
    try:
        yield started
    finally:
        started.end()
