"""Somebody between a peer and its coordinator: records what a client says, or ends its TLS with an own certificate."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading


class TappingProxy:
    """Passes connections on to `target`, and keeps what clients said, connection by connection. With `context` it is a
    man in the middle: clients shake hands with it, and what it understands is kept. Ends with `close`."""

    def __init__(self, target: int, context: ssl.SSLContext | None = None) -> None:
        self._target, self._context = target, context
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.said: list[bytearray] = []
        self.failed_handshakes = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        heard = bytearray()
        self.said.append(heard)
        with contextlib.ExitStack() as open_, contextlib.suppress(OSError):
            open_.enter_context(client)
            server = open_.enter_context(socket.create_connection(("127.0.0.1", self._target)))
            if self._context is not None:
                try:
                    client = open_.enter_context(self._context.wrap_socket(client, server_side=True))
                except OSError:
                    self.failed_handshakes += 1
                    return
                blind = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
                blind.check_hostname, blind.verify_mode = False, ssl.CERT_NONE
                server = open_.enter_context(blind.wrap_socket(server))
            back = threading.Thread(target=_pump, args=(server, client, None), daemon=True)
            back.start()
            _pump(client, server, heard)
            back.join(30)


def _pump(source: socket.socket, target: socket.socket, keep: bytearray | None) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            if keep is not None:
                keep += data
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
