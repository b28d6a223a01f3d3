"""Keys of a WireGuard mesh, the addresses that follow from them, and endpoints that may be given to WireGuard.

A key pair is made on the machine that uses it; only the public key leaves. A peer's address inside the VPN is the run's
/64 and 64 bits of its public key's hash: whoever has the key knows the address, and nobody hands addresses out.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import ipaddress
import os
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from atoll.errors import LocalError

KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class KeyPair:
    """X25519, 32 bytes each. `repr` shows no private key."""

    private: bytes = field(repr=False)
    public: bytes

    def shared_with(self, public: bytes) -> bytes:
        """32 bytes that only the two holders of these keys know. Raises ValueError for what is no key."""
        exchanged = X25519PrivateKey.from_private_bytes(self.private).exchange(
            X25519PublicKey.from_public_bytes(public)
        )
        return hashlib.sha256(b"atoll vpn pair " + exchanged).digest()


def new_key_pair() -> KeyPair:
    """A fresh one."""
    return _pair_of(X25519PrivateKey.generate())


def kept_key_pair(path: Path) -> KeyPair:
    """The key pair in the file, which only its owner may read; made there if there is none. Raises LocalError."""
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_mode & 0o077:
            raise LocalError(f"others may read the private key in {path}: chmod 600 {path}, or remove it")
        text = path.read_text()
        try:
            return _pair_of(X25519PrivateKey.from_private_bytes(base64.b64decode(text, validate=True)))
        except ValueError:
            raise LocalError(f"{path} holds no WireGuard key: remove it, and a new one is made") from None
    made = new_key_pair()
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w") as file:
        file.write(text_of(made.private))
    part.rename(path)
    return made


def text_of(key: bytes) -> str:
    """A key as WireGuard's tools write it."""
    return base64.b64encode(key).decode()


def key_of(text: str) -> bytes:
    """The opposite of `text_of`. Raises ValueError."""
    return base64.b64decode(text, validate=True)


def checked_network(text: str) -> ipaddress.IPv6Network:
    """The VPN's network as the coordinator says it. Raises ValueError for anything but a /64 of private addresses: a
    peer gives its machine no other route."""
    network = ipaddress.IPv6Network(text)
    if network.prefixlen != 64 or network.network_address.packed[0] != 0xFD:
        raise ValueError(f"{text} is no /64 in fd00::/8")
    return network


def address_of(network: ipaddress.IPv6Network, public: bytes) -> str:
    """A peer's address inside the VPN."""
    host = hashlib.sha256(b"atoll vpn address " + public).digest()[:8]
    return str(ipaddress.IPv6Address(network.network_address.packed[:8] + host))


def usable_endpoint(text: str, network: ipaddress.IPv6Network) -> tuple[str, int] | None:
    """`address:port` or `[v6]:port` as (address, port); None for what can lead to no other machine, or leads through
    the VPN itself."""
    host, _, port = text.rpartition(":")
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None
    nowhere = address.is_loopback or address.is_multicast or address.is_unspecified or address.is_link_local
    if nowhere or address in network or not port.isdecimal() or not 0 < int(port) < 65536:
        return None
    return str(address), int(port)


def _pair_of(private: X25519PrivateKey) -> KeyPair:
    return KeyPair(private.private_bytes_raw(), private.public_key().public_bytes_raw())
