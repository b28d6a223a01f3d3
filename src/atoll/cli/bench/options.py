"""Options that several benchmarks share, and what is said about their mistakes."""

from __future__ import annotations

import resource
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from atoll.addresses import parse_address
from atoll.cli.bench.crew import Crew, Spawned
from atoll.cli.bench.joining import Listener, join
from atoll.cli.options import TokenFile
from atoll.comm.native import tls_is_built
from atoll.config.environment import run_token
from atoll.errors import ConfigError

Json = Annotated[bool, Parameter(help="Print one JSON list on stdout, and nothing else.", negative="")]
Listen = Annotated[
    str | None,
    Parameter(
        help="host:port. Conduct between machines: wait there for the other members.", show_default=False
    ),
]
Join = Annotated[
    str | None,
    Parameter(help="host:port. Be one member of the benchmark conducted there.", show_default=False),
]
Codecs = Annotated[
    list[str] | None,
    Parameter(
        name="--codec",
        help="How numbers are written on the wire. May be repeated.",
        negative="",
        show_default=False,
    ),
]

MAX_WORLD = 64
_FDS_OF_A_MEMBER = 16  # besides its links: pipes, epoll, what Python has open


def counts(option: str, texts: list[str]) -> list[int]:
    """`25M`, `1e6`, `4096`; several may stand in one text, with commas. Raises ConfigError."""
    units = {"k": 10**3, "M": 10**6, "G": 10**9}
    found = []
    for text in ",".join(texts).split(","):
        try:
            value = float(text[:-1]) * units[text[-1]] if text[-1:] in units else float(text)
            if value < 1 or value != int(value):
                raise ValueError
        except (ValueError, OverflowError):
            raise ConfigError(f"{option} {text}: a count of elements, e.g. 25M or 4096") from None
        found.append(int(value))
    return found


def check_world(world: int, connections: int) -> None:
    """ConfigError for a world that is empty, or for which a member may not open enough sockets."""
    if world < 1:
        raise ConfigError(f"--world {world}: at least 1 member")
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    needed = 2 * (world - 1) * max(1, connections) + _FDS_OF_A_MEMBER
    if world > MAX_WORLD or needed > allowed:
        raise ConfigError(
            f"--world {world}: a member would need {needed} descriptors of {allowed} allowed (ulimit -n), "
            f"and {MAX_WORLD} members are the most; take fewer members or --connections"
        )


@contextmanager
def crew_of(
    world: int,
    listen: str | None,
    token_file: TokenFile,
    say: Callable[[str], None],
    tls: tuple[str, str, str] | None = None,
) -> Generator[Crew]:
    """A crew on this machine, or (`listen`) one member here and the rest from elsewhere. `say` prints a line."""
    with Spawned() as spawned:
        if listen is None:
            yield Crew([spawned.seat(f"member {index}", "127.0.0.1") for index in range(world)], tls)
            return
        host, port = parse_address("--listen", listen)
        with Listener(host, port, run_token(token_file)) as listener:
            say(f"waiting for {world - 1} more: atoll bench ... --join HOST:{listener.port}")
            yield Crew(listener.gather(world, spawned), tls)


def read_tls(folder: Path | None, listen: str | None) -> tuple[str, str, str] | None:
    """(certificates, key, authorities) in PEM. Raises ConfigError if a file is missing, or TLS is not built."""
    if folder is None:
        return None
    if listen is not None:
        raise ConfigError(
            "--tls is for members on this machine: with --listen the key would travel in the open"
        )
    if not tls_is_built():
        raise ConfigError("--tls: this build has no TLS; install OpenSSL's headers and build again")
    try:
        texts = [(folder / name).read_text() for name in ("node.pem", "node.key", "ca.pem")]
    except OSError as error:
        raise ConfigError(
            f"--tls {folder}: {error.filename}: {(error.strerror or '').lower()}; "
            "the folder holds node.pem, node.key and ca.pem"
        ) from None
    return texts[0], texts[1], texts[2]


def join_instead(address: str, token_file: TokenFile) -> int:
    host, port = parse_address("--join", address)
    join(host, port, run_token(token_file))
    return 0
