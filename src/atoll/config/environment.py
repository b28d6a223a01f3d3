"""The environment, read here and nowhere else: the run's token, and settings as ATOLL_<SECTION>__<KEY>."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path

import psutil

from atoll.config.keys import dotted_names
from atoll.config.toml_lines import KeyPath
from atoll.errors import ConfigError, Refused

TOKEN = "ATOLL_TOKEN"
TOKEN_FILE = "ATOLL_TOKEN_FILE"
_PREFIX = "ATOLL_"


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
        elif name.startswith(_PREFIX) and name not in {TOKEN, TOKEN_FILE}:
            close = difflib.get_close_matches(name, [*known, TOKEN, TOKEN_FILE], n=1)
            hint = f"did you mean {close[0]}?" if close else f"settings look like {variable_of('outer.lr')}"
            unknown.append(f"{name}: unknown environment variable; {hint}")
    if unknown:
        raise ConfigError("\n".join(unknown))
    return found


def run_token(token_file: str | Path | None = None, environ: Mapping[str, str] | None = None) -> bytes:
    """The run's token: from the file named here, else from ATOLL_TOKEN_FILE, else from ATOLL_TOKEN.

    Raises Refused if there is none, and ConfigError if the file cannot be read.
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
    if not token:
        source = f"the token file {path} is empty" if path else "no run token"
        raise Refused(
            f"{source}: set {TOKEN}, or name a file by --token-file or {TOKEN_FILE}; "
            "all peers of a run and its coordinator share one"
        )
    return token


def for_child(token: str, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """A child's environment: this one, without its Atoll settings (resolved by now), with the token."""
    return {**for_sidecar(environ), TOKEN: token}


def for_sidecar(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a process that needs nothing of Atoll's, least of all the token."""
    environ = os.environ if environ is None else environ
    return {name: value for name, value in environ.items() if not name.startswith(_PREFIX)}


def for_writer(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of the process that writes checkpoints: without Atoll's settings and token. What an object store
    asks for (AWS_..., GOOGLE_..., AZURE_...) stays."""
    return for_sidecar(environ)


def of_process(process: psutil.Process) -> dict[str, str]:
    """The environment of another process of this user, as it was when that began: to start the like of it."""
    return process.environ()
