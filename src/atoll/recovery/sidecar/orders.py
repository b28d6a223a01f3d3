"""What a trainer tells its sidecar, over a pipe: one JSON value a line, settings first. Its end is the sidecar's."""

from __future__ import annotations

import msgspec


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """`listeners` are descriptors of listening sockets that the sidecar inherits. `folder` "": none yet, so there is
    nothing to give. `max_bytes_per_s` 0: no limit. With `certificate`, `key` and `authority` (PEM) it speaks TLS, to
    holders of a certificate of that authority. `repr` shows no key."""

    run: str
    peer: str
    trainer_pid: int
    session_key: str
    listeners: tuple[int, ...]
    folder: str
    max_bytes_per_s: float
    certificate: str = ""
    key: str = ""
    authority: str = ""

    def __repr__(self) -> str:
        return f"Settings({self.peer} of {self.run}, {self.folder})"


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """A change: another session key (hex), or another staging folder. None: as before."""

    session_key: str | None = None
    folder: str | None = None

    def __repr__(self) -> str:
        return f"Order(folder={self.folder})"
