"""Nodes of the DHT, coordinators that publish where they are, peers that look for them, and liars: as processes.

Each is told who it is in one JSON line on stdin, and says what it does in JSON lines on stdout; nodes and liars answer
further lines. The authority's private key goes to a coordinator only.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from atoll.errors import AtollError
from atoll.events import EventLog
from atoll.membership.server import serve
from atoll.membership.settings import CoordinatorSettings
from atoll.network.authority import Authority
from atoll.network.dht import Discovery
from atoll.network.dht_publishing import open_publisher
from support.fake_peer import QUICK, TOKEN, FakePeer, make_lanes, new_member
from support.slack import SLACK_S
from support.tied import tied

HERE = "127.0.0.1"
REPUBLISH_S = 1.0


class DhtProcess:
    """One of them. To be entered in a `with`; it is killed at the end."""

    def __init__(self, role: str, **told: Any) -> None:
        self.process = subprocess.Popen(
            tied([sys.executable, __file__]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": ":".join(each for each in sys.path if each)},
        )
        self.said: list[dict[str, Any]] = []
        self.log: list[str] = []
        self._news: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._readers = [threading.Thread(target=each, daemon=True) for each in (self._read, self._read_log)]
        for reader in self._readers:
            reader.start()
        self.tell(role=role, **told)

    def tell(self, **told: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(told) + "\n")
        self.process.stdin.flush()

    def hear(self, what: str, within_s: float = SLACK_S, **values: Any) -> dict[str, Any]:
        """The next thing of a kind that it says."""
        deadline_s = time.monotonic() + within_s
        while True:
            try:
                news = self._news.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no {what!r} in {within_s} s: {self.said} {self.log}") from None
            assert news is not None, f"it ended before {what!r}: {self.said} {self.log}"
            self.said.append(news)
            if news["what"] == what and all(news[name] == value for name, value in values.items()):
                return news

    @property
    def dht(self) -> str:
        """Where its node is, once that is known."""
        said = next((each for each in self.said if "dht" in each), None) or self.hear(
            "listening", within_s=30.0
        )
        return f"{HERE}:{said['dht']}"

    def kill(self) -> None:
        self.process.kill()
        assert self.process.wait(10) == -signal.SIGKILL, "it ended before it was killed"

    @property
    def rss_bytes(self) -> int:
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def __enter__(self) -> DhtProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait(10)
        for reader in self._readers:
            reader.join(10)
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._news.put(json.loads(line))
        self._news.put(None)

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line.rstrip())


def _say(what: str, **values: Any) -> None:
    print(json.dumps({"what": what, **values}), flush=True)


def _discovery(told: dict[str, Any]) -> Discovery:
    return Discovery(
        told["run"], told["authority"], bootstrap=told["bootstrap"], bind=HERE, republish_s=REPUBLISH_S
    ).open()


def _node(told: dict[str, Any]) -> None:
    discovery = _discovery(told)
    _say("listening", dht=discovery.port)
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["what"] == "find":
            record = discovery.find(asked["within_s"])
            _say("found", addresses=record.addresses if record else (), term=record.term if record else 0)
        else:
            node = discovery._node
            _say(
                "held",
                ignored=discovery.ignored(),
                records=len(node.store),
                record_bytes=node.store.size_bytes,
                contacts=len(node.protocol.router),
                sources=len(node.protocol._budget),
                tasks=len(node.protocol._checks),
            )


def _peer(told: dict[str, Any]) -> None:
    discovery = Discovery(
        told["run"], told["authority"], bootstrap=told["bootstrap"], bind=HERE, republish_s=REPUBLISH_S
    )
    address = discovery.coordinator(told["address"])
    _say("listening", dht=discovery.port, address=address)
    member = new_member(address, told["peer"], find=discovery.look_up)
    fake = FakePeer(member, told["peer"], _say, told["reduce_s"])
    try:
        fake.join()
        fake.run(told["rounds"])
        member.leave("all rounds are done", done=True)
        _say("left")
    except AtollError as error:
        member.close()
        _say("failed", code=error.exit_code, reason=str(error))
    discovery.close()


async def _coordinate(told: dict[str, Any]) -> None:
    publisher = open_publisher(
        Authority.from_pem(told["pem"].encode()), told["run"], bootstrap=told["bootstrap"], bind=HERE
    )
    settings = CoordinatorSettings(run=told["run"], start_peers=told["start_peers"], timeouts=QUICK)
    await serve(
        settings,
        host=HERE,
        port=0,
        token=TOKEN,
        journal_path=Path(told["journal"]),
        run_settings=None,
        nested_settings=None,
        events=EventLog("coordinator", publisher),
        make_lanes=make_lanes,
        ready=lambda host, port: _say("listening", dht=publisher.port, address=f"{HERE}:{port}"),
        stop=asyncio.Event(),
    )
    publisher.close()


async def _lie(told: dict[str, Any]) -> None:
    """A node of the plain library, which stores anything; what it says of `key` is told by its test."""
    from kademlia.network import Server

    server = Server()
    await server.listen(0, HERE)
    key, value = bytes.fromhex(told["key"]), bytes.fromhex(told["value"])
    asked = 0

    def find_value(sender: Any, nodeid: bytes, wanted: bytes) -> Any:
        nonlocal asked
        answer = type(server.protocol).rpc_find_value(server.protocol, sender, nodeid, wanted)
        if wanted != key:
            return answer
        asked += 1
        _say("lied", times=asked)
        return {"value": value}  # whatever was stored here meanwhile

    server.protocol.rpc_find_value = find_value
    if told["bootstrap"]:
        await server.bootstrap([(each.split(":")[0], int(each.split(":")[1])) for each in told["bootstrap"]])
    _say("listening", dht=server.transport.get_extra_info("sockname")[1])
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        stored = await server.set_digest(key, bytes.fromhex(json.loads(line)["value"]))
        _say("stored", accepted=stored)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    logging.getLogger("kademlia").setLevel("CRITICAL")
    told = json.loads(sys.stdin.readline())
    match told["role"]:
        case "node":
            _node(told)
        case "peer":
            _peer(told)
        case "coordinator":
            asyncio.run(_coordinate(told))
        case "liar":
            asyncio.run(_lie(told))
