"""Object servers on loopback for tests: moto's S3 and SeaweedFS, started by the test and ended by pid."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from urllib.request import Request, urlopen

from atoll.checkpoint.objects import Objects
from atoll.checkpoint.remote import RemotePlace

START_S = 60.0
HAS_MOTO = find_spec("moto") is not None and find_spec("obstore") is not None
WEED = shutil.which("weed") or shutil.which("weed", path=str(Path(sys.executable).parent))


class Server:
    """One server process. `start` again takes the same port."""

    def __init__(self, command: list[str], port: int, log: Path) -> None:
        self._command, self.port, self._log = command, port, log
        self.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        deadline_s = time.monotonic() + START_S
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            assert self.process.poll() is None, f"the server ended:\n{self._log.read_text()[-2000:]}"
            assert time.monotonic() < deadline_s, f"no answer:\n{self._log.read_text()[-2000:]}"
            time.sleep(0.05)

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def end(self) -> None:
        self.process.kill()
        self.process.wait(timeout=10)

    def place(self, bucket: str = "bucket", prefix: str = "run", deadline_s: float = 30.0) -> RemotePlace:
        from obstore.store import S3Store

        store = S3Store(
            bucket,
            prefix=prefix,
            endpoint=self.endpoint,
            access_key_id="test",
            secret_access_key="test",
            region="us-east-1",
            virtual_hosted_style_request=False,
            client_options={"allow_http": True, "connect_timeout": "2s", "timeout": "20s"},
            retry_config={"max_retries": 0},
        )
        return RemotePlace(Objects(store, f"s3://{bucket}/{prefix}", deadline_s))

    def make_bucket(self, bucket: str) -> None:
        """Moto and SeaweedFS, as they are started here, ask nobody for a signature."""
        deadline_s = time.monotonic() + START_S
        while True:
            try:
                with urlopen(Request(f"{self.endpoint}/{bucket}", method="PUT", data=b""), timeout=10):
                    return
            except OSError:
                assert time.monotonic() < deadline_s, "no bucket can be made"
                time.sleep(0.1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def moto(folder: Path) -> Iterator[Server]:
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = Server(command, port, folder / "moto.log")
    try:
        yield server
    finally:
        server.end()


@contextmanager
def weed(folder: Path) -> Iterator[Server]:
    """SeaweedFS with all its parts in one process, on free ports, open to anybody on loopback."""
    assert WEED is not None
    (folder / "data").mkdir()
    command = [
        WEED,
        "server",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        f"-dir={folder / 'data'}",
        "-s3",
        "-filer",
    ]
    command += ["-master.volumeSizeLimitMB=64", "-volume.max=20"]
    for part in ("master", "volume", "filer"):
        command += [f"-{part}.port={free_port()}", f"-{part}.port.grpc={free_port()}"]
    port = free_port()
    command += [f"-s3.port={port}", f"-s3.port.grpc={free_port()}"]
    server = Server(command, port, folder / "weed.log")
    try:
        yield server
    finally:
        server.end()
