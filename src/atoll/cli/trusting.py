"""Whether a coordinator's run has an authority, and what is made of it: `atoll coordinator`, with and without --new."""

from __future__ import annotations

import ipaddress
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from atoll.config.schema import RunConfig
from atoll.errors import ConfigError, LocalError
from atoll.membership.register import Register
from atoll.membership.registrar import Trust
from atoll.membership.steps import TokenMade
from atoll.network.authority import Authority
from atoll.network.own_addresses import interface_addresses, plain
from atoll.network.tls import server_context

AUTHORITY: Final = "authority.pem"
ADMIN_TOKEN: Final = "admin.token"
JOIN_TOKEN: Final = "join.token"
LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True)
class Trusted:
    """A run's authority as its coordinator holds it. `secrets` are files to be written, with mode 0600. `first_tokens`
    are those that a journal without any begins with."""

    authority: Authority = field(repr=False)
    first_tokens: tuple[TokenMade, ...]
    secrets: dict[Path, bytes] = field(repr=False)
    lines: tuple[str, ...]

    @property
    def fingerprint(self) -> str:
        return self.authority.fingerprint

    @property
    def trust(self) -> Trust:
        context = server_context(self.authority.coordinator_identity(), strangers=True)
        return Trust(
            context=context, authority=self.authority.certificate, certify=self.authority.certify_peer
        )

    def keep(self) -> None:
        """Write what is new. Raises LocalError; nothing that is there is overwritten."""
        for path, data in self.secrets.items():
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with open(fd, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(fd)
            except OSError as error:
                raise LocalError(f"cannot write {path}: {(error.strerror or str(error)).lower()}") from None


def open_trust(config: RunConfig, host: str, file: Path, *, new: bool, join_for_s: float) -> Trusted | None:
    """The run's authority: made if it is `new`, else read from `file` if that is there, else made if net.security asks
    for one. None: the run has none, and where it listens (`host`) that is allowed.

    Raises ConfigError if it is not, or if `file` does not fit what was asked for.
    """
    security = config.net.security
    if security == "off" and (new or file.exists()):
        asked = "--new" if new else f"{file} is there"
        raise ConfigError(
            f"net.security = off, and {asked}: a run with an authority is always TLS; drop one of them"
        )
    if new:
        if file.exists():
            raise ConfigError(f"--new: {file} is there already; leave out --new to go on with that authority")
        return _made(config, file, join_for_s)
    if file.exists():
        return _read(file, join_for_s)
    if security == "tls":  # a service has one command for its first start and all later ones
        return _made(config, file, join_for_s)
    _check_open(host, config.net.vpn)
    return None


def _made(config: RunConfig, file: Path, join_for_s: float) -> Trusted:
    authority, register = Authority.new(config.run.name), Register()
    admin, admin_text = register.make_token("admin", note="made with the run")
    join, join_text = register.make_token("join", join_for_s, note="made with the run")
    folder = file.parent
    days = join_for_s / 86400
    lasts = "for ever" if not join_for_s else f"for {days:g} days" if days >= 2 else f"for {24 * days:.2g} h"
    return Trusted(
        authority=authority,
        first_tokens=(admin, join),
        secrets={
            file: authority.to_pem(),
            folder / ADMIN_TOKEN: admin_text.encode() + b"\n",
            folder / JOIN_TOKEN: join_text.encode() + b"\n",
        },
        lines=(
            f"      token to join, {lasts}: {folder / JOIN_TOKEN} (id {join.id})",
            f"      token to give orders: {folder / ADMIN_TOKEN} (id {admin.id}); keep it, and {file}, to yourself",
        ),
    )


def _read(file: Path, join_for_s: float) -> Trusted:
    try:
        data, mode = file.read_bytes(), file.stat().st_mode
    except OSError as error:
        raise LocalError(f"cannot read {file}: {(error.strerror or str(error)).lower()}") from None
    if mode & 0o077:
        raise ConfigError(f"{file} can be read by others, who could admit anybody; run: chmod 600 {file}")
    try:
        authority = Authority.from_pem(data)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}; put back the file that --new made") from None
    # A start that ended before it led (the port was in use) has left tokens that no journal knows.
    register, folder = Register(), file.parent
    kept = [
        register.known_token("admin", _token_in(folder / ADMIN_TOKEN)),
        register.known_token("join", _token_in(folder / JOIN_TOKEN), join_for_s),
    ]
    return Trusted(authority, tuple(each for each in kept if each is not None), {}, ())


def _token_in(file: Path) -> bytes:
    try:
        return file.read_bytes().strip()
    except OSError:
        return b""


def _check_open(host: str, vpn: str) -> None:
    """Whether a run without an authority may listen here."""
    found = _addresses_of(host)
    if all(address.is_loopback for address in found):
        return
    if not vpn:
        raise ConfigError(
            f"--bind {host}: without an authority nothing is encrypted, and this is not loopback; make one with --new, "
            "or name the VPN's interface (--set net.vpn=NAME)"
        )
    inside = {plain(each) for each in interface_addresses().get(vpn, ())}
    if not inside:
        raise ConfigError(f"net.vpn = {vpn!r}: this machine has no interface of that name with an address")
    if outside := [str(address) for address in found if address not in inside]:
        raise ConfigError(
            f"--bind {host}: {', '.join(outside)} is not on {vpn}, whose addresses are "
            f"{', '.join(sorted(map(str, inside)))}; bind to one of those, or make an authority with --new"
        )


def _addresses_of(host: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    try:
        infos = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise LocalError(
            f"cannot listen on {host}: {error.strerror or error}; give an address of this machine"
        ) from None
    return [plain(str(info[4][0])) for info in infos]
