"""A swarm whose journal is in etcd, with two coordinators, "east" and "west": east leads first, west stands by."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from atoll.membership.etcd_journal import Contender
from atoll.membership.etcd_place import EtcdPlace, parse_place
from atoll.membership.steps import VerdictMade
from support.swarm import Swarm, environment
from support.tied import tied

NAMES = ("east", "west")
LEASE_S = 3.0  # etcd's least is 2; a busy machine may keep a process waiting for one


class TwoCoordinators(Swarm):
    """Each coordinator has a folder of its own, as on a machine of its own. `endpoints` may differ: where each
    finds etcd.
    """

    def __init__(
        self, folder: Path, endpoints: dict[str, str], *, start_peers: int, **membership: Any
    ) -> None:
        self.endpoints = endpoints
        self.coordinators: dict[str, subprocess.Popen[bytes]] = {}
        super().__init__(folder, start_peers=start_peers, **{"lease_s": LEASE_S, **membership})

    @property
    def place(self) -> EtcdPlace:
        return parse_place(f"etcd://{self.endpoints['west']}", self.run)

    # ---- starting and hitting ----------------------------------------------------------------------------------

    def _start_coordinator(self) -> subprocess.Popen[bytes]:
        self.start_one("east")
        self.wait(lambda: self.events("CoordinatorListening", "east"), within_s=60, what="east leads")
        self.start_one("west")
        self.wait(lambda: self.events("CoordinatorStoodBy", "west"), within_s=60, what="west stands by")
        (leads,), (stands_by,) = (
            self.events("CoordinatorListening", "east"),
            self.events("CoordinatorStoodBy", "west"),
        )
        assert stands_by["leader"] == leads["address"]
        self.address = f"{leads['address']},{stands_by['address']}"
        return self.coordinators["east"]

    def start_one(self, name: str) -> subprocess.Popen[bytes]:
        settings = {"local.out": str(self.folder / name)}
        settings |= {f"membership.{key}": value for key, value in self.settings.items()}
        command = [sys.executable, "-m", "atoll", "coordinator", "--run", self.run, "--bind", "127.0.0.1:0"]
        command += ["--journal", f"etcd://{self.endpoints[name]}"]
        command += [f"--set={key}={json.dumps(value)}" for key, value in settings.items()]
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                tied(command), env=environment(), stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        self.coordinators[name] = process
        return process

    def hit(self, name: str, number: signal.Signals) -> None:
        """Send a coordinator a signal, and see that it fired."""
        process = self.coordinators[name]
        process.send_signal(number)
        if number == signal.SIGKILL:
            assert process.wait(10) == -signal.SIGKILL
        elif number == signal.SIGSTOP:
            stopped = psutil.Process(process.pid)
            self.wait(lambda: stopped.status() == psutil.STATUS_STOPPED, within_s=10, what=f"{name} stopped")

    def wait_until_it_leads(self, name: str, within_s: float) -> None:
        self.wait(
            lambda: self.events("CoordinatorListening", name), within_s=within_s, what=f"{name} takes over"
        )

    # ---- watching ----------------------------------------------------------------------------------------------

    def events(self, kind: str | None = None, source: str = "east") -> list[dict[str, Any]]:
        return super().events(kind, source)

    def _events_file(self, source: str) -> Path:
        if source in NAMES:
            return self.folder / source / self.run / "coordinator.jsonl"
        return super()._events_file(source)

    def committed(self) -> list[int]:
        """The versions that the journal says were committed, in its order."""
        contender = Contender(self.place, self.run, "nobody", LEASE_S)
        verdicts = [record.verdict for record in contender.records() if isinstance(record, VerdictMade)]
        contender.close()
        return [verdict.version for verdict in verdicts if verdict.outcome == "committed"]

    def terms(self) -> dict[str, list[int]]:
        """Under which terms each of them led."""
        return {
            name: [event["term"] for event in self.events("CoordinatorListening", name)] for name in NAMES
        }

    # ---- ending ------------------------------------------------------------------------------------------------

    def end_coordinators(self, within_s: float = 30.0) -> dict[str, int]:
        """Exit codes of those that were not killed, once the run is over."""
        self.wait(
            lambda: all(process.poll() is not None for process in self.coordinators.values()),
            within_s=within_s,
            what="the end of both coordinators",
        )
        return {
            name: process.returncode
            for name, process in self.coordinators.items()
            if process.returncode != -signal.SIGKILL
        }

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        for process in self.coordinators.values():
            if process.poll() is None:
                process.kill()
            process.wait(timeout=10)
