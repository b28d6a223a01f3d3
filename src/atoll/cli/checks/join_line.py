"""A join line as people paste it: what is wrong with it is said of the part that is."""

from __future__ import annotations

import shlex

import msgspec

from atoll.errors import ConfigError
from atoll.network.authority import check_fingerprint
from atoll.network.dht import SCHEME


class JoinLine(msgspec.Struct, frozen=True):
    """`address` is the coordinator's, those of all that may lead, or `dht:` and bootstrap peers; `authority` is ""
    for a run without one."""

    address: str
    run: str
    authority: str


def read_join_line(address: str | None, run: str | None, authority: str) -> JoinLine | None:
    """From its parts, or from all of it in `address`, as it is printed. None for none.

    Raises ConfigError that names the part.
    """
    if address is None:
        if run is not None:
            raise ConfigError("the join line has no address: it begins with the coordinator's host:port")
        return None
    if " " in address.strip():
        address, whole_run, whole_authority = _whole(address)
        run, authority = run or whole_run, whole_authority or authority
    for each in address.removeprefix(SCHEME).split(","):
        _check_address(each.strip())
    if not run:
        raise ConfigError(f"the join line has no run: atoll doctor {address} --run NAME")
    return JoinLine(address, run, check_fingerprint(authority) if authority else "")


def _whole(text: str) -> tuple[str, str | None, str | None]:
    """From `join: atoll join HOST:PORT --run NAME ...`."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"the join line cannot be read ({str(error).lower()}): copy it whole") from None
    words = [word for word in words if word not in ("join:", "atoll", "join", "doctor")]
    given: dict[str, str | None] = {"--run": None, "--authority": None}
    addresses = []
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if name in given:
            if not equals and not words:
                raise ConfigError(f"the join line ends after {name}: copy it whole")
            given[name] = value if equals else words.pop(0)
        elif word.startswith("-"):
            raise ConfigError(
                f"the join line holds {word}: give other options after it, not within the quotes"
            )
        else:
            addresses.append(word)
    if len(addresses) != 1:
        listed = ", ".join(addresses) or "none"
        raise ConfigError(
            f"the join line needs one address (several with commas, no space), and holds {listed}"
        )
    return addresses[0], given["--run"], given["--authority"]


def _check_address(text: str) -> None:
    host, colon, port = text.rpartition(":")
    if not text:
        raise ConfigError("the join line's address is empty between two commas: give host:port each")
    if text.startswith("[") and "]" not in text:
        raise ConfigError(
            f"the join line's address {text!r} has no closing bracket: write it as [{text[1:]}]:7070"
        )
    if not colon or text.endswith("]"):
        raise ConfigError(f"the join line's address {text!r} has no port: write it as {text}:7070")
    if not host:
        raise ConfigError(f"the join line's address {text!r} has no host before the port")
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"the join line's port {port!r} (of {text!r}) is none: ports are 1 to 65535")
