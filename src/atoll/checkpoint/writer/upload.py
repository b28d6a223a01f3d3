"""One upload: a version that was saved and verified here, to the run's remote place."""

from __future__ import annotations

import time
from pathlib import Path

from atoll.checkpoint.folder import CheckpointFolder, Found
from atoll.checkpoint.remote import RemotePlace
from atoll.checkpoint.writer.orders import Save, Uploaded
from atoll.errors import AtollError


def upload(order: Save) -> Uploaded:
    """Bring this peer's own part there and, if it is its turn, the shared part; then `latest` moves, old versions go.
    Blocks, for minutes if the store is gone. Never raises for what a store does."""
    began_s = time.monotonic()
    removed: list[int] = []
    reason = ""
    try:
        folder = CheckpointFolder(Path(order.place))
        remote = RemotePlace.at(order.remote)
        if order.state_bytes:
            remote.publish_own(folder, order.peer, order.version)
        if order.uploads:
            manifest = remote.publish(folder, order.version)
            good = Found(manifest.term, manifest.version, manifest.digest)
            removed = remote.retain(good, keep_last=order.keep_last, keep_every=order.keep_every)
    except (AtollError, OSError) as error:
        reason = str(error)
    return Uploaded(
        version=order.version,
        seconds=time.monotonic() - began_s,
        shared=order.uploads,
        removed=tuple(removed),
        reason=reason,
    )
