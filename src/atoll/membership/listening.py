"""Sockets that listen: on all addresses of a host, with one port."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Generator

from atoll.errors import LocalError


def listen_on(host: str, port: int) -> list[socket.socket]:
    """Sockets on all addresses of `host`, all with one port (`port` 0: any free one). Raises LocalError."""
    listeners: list[socket.socket] = []
    try:
        infos = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in dict.fromkeys(infos):
            try:
                listeners.append(_listen(family, (address[0], port, *address[2:])))
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT) or len(infos) == 1:
                    raise
            else:
                port = listeners[0].getsockname()[1]
        if not listeners:
            raise OSError(errno.EADDRNOTAVAIL, "cannot assign requested address")
    except OSError as error:
        for listener in listeners:
            listener.close()
        raise LocalError(_bind_failure(host, port, error)) from error
    return listeners


@contextlib.contextmanager
def listening(host: str, port: int) -> Generator[list[socket.socket]]:
    """`listen_on`, for the time of a `with` block."""
    listeners = listen_on(host, port)
    try:
        yield listeners
    finally:
        for listener in listeners:
            listener.close()


def _listen(family: int, address: tuple[object, ...]) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(128)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def _bind_failure(host: str, port: int, error: OSError) -> str:
    where = f"{host or '*'}:{port}"
    match error.errno:
        case errno.EADDRINUSE:
            return (
                f"cannot listen on {where}: the port is in use; stop the other process or choose another port"
            )
        case errno.EACCES:
            return f"cannot listen on {where}: not permitted; choose a port above 1023"
    return f"cannot listen on {where}: {error.strerror or error}; give an address of this machine"
