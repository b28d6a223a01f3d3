"""All that is looked at without a run, and what is known better with its settings."""

from __future__ import annotations

import socket
from pathlib import Path

import msgspec
import psutil

from atoll.cli.checks import device, machine
from atoll.cli.checks.examined import resolve
from atoll.config.schema import RunConfig
from atoll.errors import ConfigError
from atoll.network.checks import kernel, lines
from atoll.network.checks.finding import Finding

_SHM_REMEDY = (
    "see what fills it (du -sh {0}/*), or make it larger (mount -o remount,size=8G {0}; docker run --shm-size=8g), "
    "or choose another folder (checkpoint.staging)"
)
_DISK_REMEDY = "make room, or choose another folder: --set local.out=FOLDER"


class Needs(msgspec.Struct, frozen=True):
    """Bytes that a run takes of this machine; None where that is not known."""

    memory: int | None = None
    staging: int | None = None


def needs(config: RunConfig) -> Needs:
    """What `atoll plan` counts for a run with these settings; nothing is known of a model that only building it would
    tell the size of."""
    from atoll.plan.memory import total_bytes
    from atoll.train.sizes import peer_sizes

    try:
        sizes = peer_sizes(config)
    except (ConfigError, ValueError):
        return Needs()
    held = sizes.largest.host + (sizes.largest.device if sizes.on_cpu else ())
    return Needs(total_bytes(held, estimates=False), sizes.staged_bytes)


def look_at_machine(config: RunConfig, *, joined: bool) -> list[Finding]:
    """`joined`: the settings are a run's, so that it is known what that takes. Takes the seconds that torch takes to
    import."""
    from atoll.train.room import free_memory_bytes

    held = needs(config) if joined else Needs()
    staging = config.checkpoint.staging
    return [
        machine.versions(),
        machine.compiler(config.local.compile),
        device.gpu(config.local.device),
        machine.memory(free_memory_bytes(), psutil.virtual_memory().total, held.memory),
        machine.room(staging, Path(staging), _SHM_REMEDY.format(staging), held.staging, staging=True),
        machine.room("disk", Path(config.local.out).absolute(), _DISK_REMEDY),
        machine.open_files(),
    ]


def look_at_network(config: RunConfig, way: tuple[str, int] | None) -> list[Finding]:
    """`way` is the coordinator's numeric address, if there is one."""
    name = socket.gethostname()
    try:
        host = lines.names(name, resolve(name))
    except OSError as error:
        host = lines.names(name, (), str(error.strerror or "no answer").lower())
    return [
        kernel.buffers(),
        kernel.congestion(chosen=config.net.congestion),
        kernel.idle(),
        lines.mtu(lines.way_mtu(*way) if way is not None else None, lines.interface_mtus()),
        lines.ipv6(lines.own_addresses()),
        host,
    ]
