"""`python -m atoll.recovery.sidecar`, started by `recovery.donor`: settings on stdin, listening sockets inherited.

Ends when its trainer ends, however that happens, and then removes the staging folder.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import sys
from pathlib import Path

import msgspec

from atoll import log
from atoll.recovery.folder import PREFIX
from atoll.recovery.sidecar.orders import Order, Settings
from atoll.recovery.sidecar.server import Server

_LOOK_UP_S = 1.0

_log = log.get(__name__)


async def serve() -> None:
    orders = await _open_stdin()
    first = await orders.readline()
    if not first.endswith(b"\n"):
        return  # the trainer died before it said a word
    settings = msgspec.json.decode(first, type=Settings)
    listeners = [socket.socket(fileno=fd) for fd in settings.listeners]
    server = Server(settings)
    serving = asyncio.create_task(server.run(listeners))
    # Either is the trainer's end.
    ends = [asyncio.create_task(_obey(server, orders)), asyncio.create_task(_outlive(settings.trainer_pid))]
    try:
        done, _ = await asyncio.wait([serving, *ends], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for listener in listeners:
            listener.close()
        for task in (serving, *ends):
            task.cancel()
        await asyncio.gather(serving, *ends, return_exceptions=True)
    _remove(server.folder)


async def _open_stdin() -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer
    )
    return reader


async def _obey(server: Server, orders: asyncio.StreamReader) -> None:
    """Returns when the trainer closed the pipe."""
    while line := await orders.readline():
        if not line.endswith(b"\n"):
            return  # it died in the middle of a word
        server.obey(msgspec.json.decode(line, type=Order))


async def _outlive(trainer_pid: int) -> None:
    """Returns when the trainer is gone; its other children may hold the pipe open after it."""
    while os.getppid() == trainer_pid:
        await asyncio.sleep(_LOOK_UP_S)


def _remove(folder: Path | None) -> None:
    if folder is not None and folder.name.startswith(PREFIX):
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    log.to_stderr("WARNING")
    asyncio.run(serve())


if __name__ == "__main__":
    main()
