"""Rates of links as people give them, on the command line or in a file, as the planner reads them."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from atoll.config.rates import Rate, parse_rate
from atoll.config.schema import Section
from atoll.errors import ConfigError
from atoll.plan.links import DEFAULT_BYTES_PER_S, DEFAULT_RTT_S
from atoll.values import LinkRate

_MOST_MS = 60_000.0


class _Line(Section):
    """A peer's own line."""

    up: Rate = ""
    down: Rate = ""


class _Link(Section):
    """From one peer to another, where that is not as good as their lines."""

    source: str
    target: str
    rate: Rate = ""
    rtt_ms: Annotated[float, Field(gt=0, le=_MOST_MS)] | None = None
    loss: Annotated[float, Field(ge=0, lt=1)] = 0.0


class _File(Section):
    rtt_ms: Annotated[float, Field(gt=0, le=_MOST_MS)] = DEFAULT_RTT_S * 1000
    peers: Annotated[dict[str, _Line], Field(min_length=1)]
    links: tuple[_Link, ...] = ()


def even_rates(members: Sequence[str], up: str, down: str, rtt_ms: float) -> tuple[LinkRate, ...]:
    """All members alike; "" and 0 stand for what the planner assumes; () if all three do. Raises ConfigError."""
    if not 0 <= rtt_ms <= _MOST_MS:
        raise ConfigError(f"--rtt {rtt_ms:g}: milliseconds, at most {_MOST_MS:g}")
    if not (up or down or rtt_ms):
        return ()
    lines = {member: (_rate("--up", up or down), _rate("--down", down or up)) for member in members}
    return _links(lines, (rtt_ms / 1000) or DEFAULT_RTT_S, {})


def read_rates(path: Path) -> tuple[tuple[str, ...], tuple[LinkRate, ...]]:
    """The members that a file names, and the rates of their links. Raises ConfigError, with a line for each mistake."""
    try:
        file = _File.model_validate(tomllib.loads(path.read_text()), strict=False)
    except OSError as error:
        raise ConfigError(f"--rates {path}: {(error.strerror or str(error)).lower()}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--rates {path}: it is no TOML: {error}") from None
    except ValidationError as error:
        lines = [f"{path}: {'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
        raise ConfigError("\n".join(lines)) from None
    own = {}
    for link in file.links:
        for name in (link.source, link.target):
            if name not in file.peers:
                raise ConfigError(f"{path}: links: there is no [peers.{name}]")
        own[link.source, link.target] = link
    lines = {
        name: (
            parse_rate(line.up or line.down) or DEFAULT_BYTES_PER_S,
            parse_rate(line.down or line.up) or DEFAULT_BYTES_PER_S,
        )
        for name, line in file.peers.items()
    }
    return tuple(sorted(lines)), _links(lines, file.rtt_ms / 1000, own)


def _links(
    lines: dict[str, tuple[int, int]], rtt_s: float, own: dict[tuple[str, str], _Link]
) -> tuple[LinkRate, ...]:
    found = []
    for name, (up, down) in lines.items():
        found += [LinkRate(name, "", float(up)), LinkRate("", name, float(down))]
    for source, (up, _) in lines.items():
        for target, (_, down) in lines.items():
            if source == target:
                continue
            link = own.get((source, target))
            back = own.get((target, source))
            rate = parse_rate(link.rate) if link is not None else 0
            trip_ms = (link.rtt_ms if link is not None else None) or (
                back.rtt_ms if back is not None else None
            )
            found.append(
                LinkRate(
                    source,
                    target,
                    float(min(up, down, rate or up)),
                    trip_ms / 1000 if trip_ms else rtt_s,
                    link.loss if link is not None else 0.0,
                )
            )
    return tuple(found)


def _rate(option: str, text: str) -> int:
    try:
        return parse_rate(text) or DEFAULT_BYTES_PER_S
    except ValueError as error:
        raise ConfigError(f"{option} {error}") from None
