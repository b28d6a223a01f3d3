"""A real etcd on loopback for tests: in a folder of the test, on free ports, ended by the test."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from atoll.membership.etcd_client import Etcd, EtcdGone, delete_range

BINARY = shutil.which("etcd")
START_S = 30.0


class EtcdProcess:
    """One member of an etcd, by default the only one. Started again it goes on with its data, on the same port."""

    def __init__(
        self,
        folder: Path,
        name: str = "only",
        ports: tuple[int, int] | None = None,
        peer_ports: dict[str, int] | None = None,
    ) -> None:
        """`ports` are for clients and for other members; `peer_ports` are the latter of all, by name."""
        self._folder, self._name = folder, name
        self.port, self._peer_port = ports or free_ports(2)
        self._peer_ports = peer_ports or {name: self._peer_port}
        self.spawn()

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    def spawn(self) -> None:
        client, peer = f"http://{self.endpoint}", f"http://127.0.0.1:{self._peer_port}"
        members = [f"{name}=http://127.0.0.1:{port}" for name, port in self._peer_ports.items()]
        assert BINARY is not None, "ask for the fixture `etcd`, which skips the test"
        command = [BINARY, "--name", self._name, "--data-dir", str(self._folder / self._name)]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client]
        command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        command += ["--initial-cluster", ",".join(members), "--logger", "zap"]
        with self._log().open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def wait(self) -> None:
        """Until it answers."""
        deadline_s = time.monotonic() + START_S
        client = Etcd((self.endpoint,), 1.0)
        try:
            while not self._answers(client):
                said = self._log().read_text()[-2000:]
                assert time.monotonic() < deadline_s, f"etcd does not answer:\n{said}"
                assert self.process.poll() is None, f"etcd ended:\n{said}"
                time.sleep(0.05)
        finally:
            client.close()

    def start(self) -> None:
        """Again, after `kill`; returns once it answers."""
        self.spawn()
        self.wait()

    def clear(self) -> None:
        """Forget everything."""
        client = Etcd((self.endpoint,), 5.0)
        client.transact([], [delete_range("\0", "\0")], [], START_S)  # so etcd spells "all keys"
        client.close()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(timeout=10)

    def _answers(self, client: Etcd) -> bool:
        try:
            client.read_one("ready?")
        except EtcdGone:
            return False
        return True

    def _log(self) -> Path:
        return self._folder / f"{self._name}.log"


def start_members(folder: Path, count: int) -> list[EtcdProcess]:
    """An etcd of several members; all answer when this returns."""
    ports = free_ports(2 * count)
    peer_ports = {f"m{index}": port for index, port in enumerate(ports[count:])}
    members = [
        EtcdProcess(folder, name, (ports[index], peer_ports[name]), peer_ports)
        for index, name in enumerate(peer_ports)
    ]
    for member in members:
        member.wait()
    return members


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, all different."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports
