"""TLS 1.3 as Python speaks it: one context for each use. Nothing is resumed, nothing older is spoken."""

from __future__ import annotations

import os
import ssl

from atoll.network.authority import Identity


def server_context(identity: Identity, *, strangers: bool) -> ssl.SSLContext:
    """For who listens. With `strangers` a client need not show a certificate: it has to prove itself in another way."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, identity.authority)
    context.num_tickets = 0
    context.verify_mode = ssl.CERT_OPTIONAL if strangers else ssl.CERT_REQUIRED
    _show(context, identity)
    return context


def client_context(authority: str, identity: Identity | None = None) -> ssl.SSLContext:
    """For who dials: believes this authority (PEM) alone. The name to expect is given with each connection."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT, authority)
    if identity is not None:
        _show(context, identity)
    return context


def blind_context() -> ssl.SSLContext:
    """Believes everybody: only to fetch what is checked by other means. Never say a secret over it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _context(protocol: int, authority: str) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=authority)
    return context


def _show(context: ssl.SSLContext, identity: Identity) -> None:
    """OpenSSL reads certificate and key from a file only: one in memory, which no other process can open."""
    fd = os.memfd_create("atoll-identity", os.MFD_CLOEXEC)
    try:
        os.write(fd, (identity.certificate + identity.key).encode())
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
