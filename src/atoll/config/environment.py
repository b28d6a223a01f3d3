"""The environment, read here and nowhere else: the run's token, settings as ATOLL_<SECTION>__<KEY>, and what a launcher
of ranks says."""

from __future__ import annotations

import difflib
import os
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from atoll.config.keys import dotted_names
from atoll.config.toml_lines import KeyPath
from atoll.errors import ConfigError, Refused

TOKEN = "ATOLL_TOKEN"
TOKEN_FILE = "ATOLL_TOKEN_FILE"
RENDEZVOUS = "ATOLL_RENDEZVOUS"
"""Where the ranks of a peer meet: `file:///path` of a file that is not there yet, the same for all of them."""
_NAMES = (TOKEN, TOKEN_FILE, RENDEZVOUS)
_PREFIX = "ATOLL_"
_LAUNCHER_SAYS = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


def variable_of(dotted_name: str) -> str:
    """`outer.lr` as `ATOLL_OUTER__LR`."""
    return _PREFIX + dotted_name.upper().replace(".", "__")


def settings_variables(environ: Mapping[str, str] | None = None) -> dict[str, tuple[KeyPath, str]]:
    """Settings given by the environment: variable -> (path, text). Unknown ATOLL_ names are a ConfigError."""
    environ = os.environ if environ is None else environ
    known = {variable_of(name): name for name in dotted_names()}
    found: dict[str, tuple[KeyPath, str]] = {}
    unknown = []
    for name in sorted(environ):
        if name in known:
            found[name] = (tuple(known[name].split(".")), environ[name])
        elif name.startswith(_PREFIX) and name not in _NAMES:
            close = difflib.get_close_matches(name, [*known, *_NAMES], n=1)
            hint = f"did you mean {close[0]}?" if close else f"settings look like {variable_of('outer.lr')}"
            unknown.append(f"{name}: unknown environment variable; {hint}")
    if unknown:
        raise ConfigError("\n".join(unknown))
    return found


def run_token(
    token_file: str | Path | None = None, environ: Mapping[str, str] | None = None, *, needed: bool = True
) -> bytes:
    """The run's token: from the file named here, else from ATOLL_TOKEN_FILE, else from ATOLL_TOKEN.

    Raises Refused if there is none (unless it is not `needed`: then b""), and ConfigError if the file cannot be read.
    """
    environ = os.environ if environ is None else environ
    path = token_file or environ.get(TOKEN_FILE)
    if path:
        try:
            token = Path(path).read_bytes().strip()
        except OSError as error:
            raise ConfigError(
                f"cannot read the token file {path}: {(error.strerror or str(error)).lower()}"
            ) from None
    else:
        token = environ.get(TOKEN, "").encode().strip()
    if not token and (needed or path):
        source = f"the token file {path} is empty" if path else "no run token"
        raise Refused(
            f"{source}: set {TOKEN}, or name a file by --token-file or {TOKEN_FILE}; "
            "all peers of a run and its coordinator share one"
        )
    return token


def run_authority(given: str = "", environ: Mapping[str, str] | None = None) -> str:
    """The fingerprint of the run's authority: what was given, else local.authority as the environment has it; "" if
    neither says anything."""
    environ = os.environ if environ is None else environ
    return given or environ.get(variable_of("local.authority"), "")


def for_child(token: str, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """A child's environment: this one, without its Atoll settings (resolved by now), with the token."""
    return {**for_sidecar(environ), TOKEN: token}


def for_sidecar(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a process that needs nothing of Atoll's, least of all the token, and is nobody's rank."""
    environ = os.environ if environ is None else environ
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith(_PREFIX) and name not in _LAUNCHER_SAYS
    }


def for_writer(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of the process that writes checkpoints: without Atoll's settings and token. What an object store
    asks for (AWS_..., GOOGLE_..., AZURE_...) stays."""
    return for_sidecar(environ)


def of_process(process: psutil.Process) -> dict[str, str]:
    """The environment of another process of this user, as it was when that began: to start the like of it. One rank of
    several is started as a peer of its own: its siblings are not there to be met again."""
    gone = {*_LAUNCHER_SAYS, RENDEZVOUS}
    return {name: value for name, value in process.environ().items() if name not in gone}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnvironment:
    """What torchrun, or `atoll launch --ranks`, told this process; the defaults are those of a process of its own.

    `num_ranks` is the world size, `local_ranks` how many of them are on this machine (0: not said). The ranks meet
    through the file `rendezvous` if that is given, else through the store at `master_addr:master_port`, which the
    launcher serves itself if `launcher_serves`. `start` counts the launcher's starts of the same ranks.
    `gloo_interface` is the network interface that gloo is told to use ("": none).
    """

    rank: int = 0
    local_rank: int = 0
    num_ranks: int = 1
    local_ranks: int = 0
    rendezvous: str = ""
    master_addr: str = ""
    master_port: int = 0
    launcher_serves: bool = False
    start: int = 0
    gloo_interface: str = ""


def rank_environment(environ: Mapping[str, str] | None = None) -> RankEnvironment:
    """What a launcher of ranks says, if one started this process. Raises ConfigError for what does not fit."""
    environ = os.environ if environ is None else environ
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        if RENDEZVOUS in environ:
            raise ConfigError(f"{RENDEZVOUS} is set, but not RANK and WORLD_SIZE: a launcher sets all three")
        return RankEnvironment()
    rank, num_ranks = _number(environ, "RANK"), _number(environ, "WORLD_SIZE", least=1)
    if rank >= num_ranks:
        raise ConfigError(
            f"RANK = {rank} does not fit WORLD_SIZE = {num_ranks}: ranks are 0 to {num_ranks - 1}"
        )
    rendezvous = _rendezvous_file(environ)
    by_address = num_ranks > 1 and not rendezvous
    if by_address and not environ.get("MASTER_ADDR"):
        raise ConfigError(
            f"WORLD_SIZE = {num_ranks}, but neither MASTER_ADDR nor {RENDEZVOUS} says where the ranks meet; "
            "start them by torchrun or atoll launch --ranks"
        )
    return RankEnvironment(
        rank=rank,
        local_rank=_number(environ, "LOCAL_RANK", default=rank),
        num_ranks=num_ranks,
        local_ranks=_number(environ, "LOCAL_WORLD_SIZE", default=0),
        rendezvous=rendezvous,
        master_addr=environ.get("MASTER_ADDR", ""),
        master_port=_number(environ, "MASTER_PORT", least=1) if by_address else 0,
        launcher_serves=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        start=_number(environ, "TORCHELASTIC_RESTART_COUNT", default=0),
        gloo_interface=environ.get("GLOO_SOCKET_IFNAME", ""),
    )


def for_rank(
    rank: int, num_ranks: int, rendezvous: Path, environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """`environ` (this process's) with what one of `num_ranks` ranks on this machine needs. `rendezvous` is a file that
    is not there yet, in a folder of this start alone."""
    environ = os.environ if environ is None else environ
    said = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        RENDEZVOUS: rendezvous.absolute().as_uri(),
    }
    return {**environ, **said}


def _rendezvous_file(environ: Mapping[str, str]) -> str:
    """The path that RENDEZVOUS names; "" if it is not set."""
    text = environ.get(RENDEZVOUS, "")
    if not text:
        return ""
    parts = urllib.parse.urlsplit(text)
    if parts.scheme != "file" or parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise ConfigError(f"{RENDEZVOUS} = {text!r} names no file; it looks like file:///run/atoll/ranks")
    return urllib.parse.unquote(parts.path)


def _number(environ: Mapping[str, str], name: str, *, default: int | None = None, least: int = 0) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None:
        raise ConfigError(f"{name} is not set, but a launcher's other variables are; torchrun sets them all")
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise ConfigError(f"{name} = {text!r} is not a whole number from {least} on")
    return int(text)
