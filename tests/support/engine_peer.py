"""A peer that is nothing but an engine, as a process of its own: to be killed and frozen.

Prints its port; reads one plan (JSON, a line) from stdin, takes part, and prints the report as JSON. With
--halt it sends itself that signal as soon as --after bytes have come in, and says so before, on stderr.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from pathlib import Path

import msgspec
import numpy as np

from atoll import kernels
from atoll.comm.native import NativeCommunicator, Tls
from atoll.plan.grid import Grid
from atoll.values import Plan


def halt_after(comm: NativeCommunicator, received_bytes: int, signum: int) -> None:
    while comm.stats()["received_bytes"] < received_bytes:
        time.sleep(0.0005)
    print(f"halting after {comm.stats()['received_bytes']} bytes", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signum)


def certificates() -> Tls:
    folder = Path(__file__).parent / "certificates"
    return Tls(*((folder / name).read_text() for name in ("peer.pem", "peer.key", "authority.pem")))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--peer", required=True)
    parser.add_argument("--key", required=True, help="hex")
    parser.add_argument("--value", type=float, required=True)
    parser.add_argument("--halt", choices=["SIGKILL", "SIGSTOP"])
    parser.add_argument("--after", type=int, default=0)
    parser.add_argument("--tls", action="store_true", help="with the certificates of tests")
    args = parser.parse_args()
    comm = NativeCommunicator(
        run="test",
        peer=args.peer,
        rank=0,
        session_key=bytes.fromhex(args.key),
        bind_host="127.0.0.1",
        tls=certificates() if args.tls else None,
    )
    print(comm.port, flush=True)
    plan = msgspec.json.decode(sys.stdin.readline(), type=Plan)
    grid = Grid.of([plan.ranks[args.peer][0].ranges[0].stop])
    contribution = np.empty(grid.wire_bytes(plan.codec), dtype=np.uint8)
    kernels.encode(
        plan.codec, grid.boundaries, np.full(grid.numel, args.value, dtype=np.float32), contribution
    )
    if args.halt:
        signum = getattr(signal, args.halt)
        threading.Thread(target=halt_after, args=(comm, args.after, signum), daemon=True).start()
    report = comm.reduce(plan, grid, contribution, np.empty_like(contribution))
    print(msgspec.json.encode(report).decode(), flush=True)
    comm.close()


if __name__ == "__main__":
    main()
