"""Keys and addresses of the VPN: made here, kept from others, and the same wherever they are computed."""

from __future__ import annotations

import base64
import re
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from atoll.errors import LocalError
from atoll.network.wireguard_keys import (
    address_of,
    checked_network,
    kept_key_pair,
    key_of,
    new_key_pair,
    text_of,
    usable_endpoint,
)

NETWORK = checked_network("fd00:1:2:3::/64")


def test_the_key_file_is_made_once_and_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "atoll0.key"
    made = kept_key_pair(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert kept_key_pair(path) == made
    assert [each.name for each in path.parent.iterdir()] == ["atoll0.key"]
    assert key_of(path.read_text()) == made.private
    assert text_of(made.private) not in repr(made)
    assert repr(made.private) not in repr(made)


def test_the_public_key_is_the_one_that_wireguard_computes(tmp_path: Path) -> None:
    if shutil.which("wg") is None:
        pytest.skip("no wg to compare with: apt-get install wireguard-tools")
    made = kept_key_pair(tmp_path / "key")
    computed = subprocess.run(
        ["wg", "pubkey"], input=text_of(made.private), capture_output=True, text=True, check=True
    )
    assert computed.stdout.strip() == text_of(made.public)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644])
def test_a_key_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "key"
    kept_key_pair(path)
    path.chmod(mode)
    with pytest.raises(LocalError, match="others may read the private key"):
        kept_key_pair(path)


@pytest.mark.parametrize("text", ["", "not a key", base64.b64encode(b"short").decode()])
def test_a_file_without_a_key_is_said(tmp_path: Path, text: str) -> None:
    path = tmp_path / "key"
    path.touch(0o600)
    path.write_text(text)
    with pytest.raises(LocalError, match="holds no WireGuard key: remove it"):
        kept_key_pair(path)


def test_two_peers_share_what_no_third_one_knows() -> None:
    a, b, c = new_key_pair(), new_key_pair(), new_key_pair()
    assert a.shared_with(b.public) == b.shared_with(a.public)
    assert c.shared_with(a.public) not in (a.shared_with(b.public), b.shared_with(c.public))
    with pytest.raises(ValueError, match="Error computing shared key"):
        a.shared_with(bytes(32))  # a point that gives away nothing of the private key, but proves nothing


def test_an_address_follows_from_the_key_alone() -> None:
    keys = [new_key_pair().public for _ in range(50)]
    addresses = [address_of(NETWORK, key) for key in keys]
    assert len(set(addresses)) == 50
    assert addresses == [address_of(NETWORK, key) for key in keys]
    assert all(address.startswith("fd00:1:2:3:") for address in addresses)


@pytest.mark.parametrize("text", ["fd00::/8", "2001:db8::/64", "::/0", "fd00::1/64", "x"])
def test_no_other_route_is_taken_from_a_coordinator(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        checked_network(text)


@pytest.mark.parametrize(
    ("text", "usable"),
    [
        ("192.0.2.1:51820", ("192.0.2.1", 51820)),
        ("[2001:db8::1]:7", ("2001:db8::1", 7)),
        ("127.0.0.1:51820", None),
        ("[::1]:51820", None),
        ("0.0.0.0:51820", None),
        ("224.0.0.1:51820", None),
        ("[fe80::1]:51820", None),
        ("[fd00:1:2:3::9]:51820", None),
        ("[fd00:1:2:4::9]:51820", ("fd00:1:2:4::9", 51820)),
        ("host.example:51820", None),
        ("192.0.2.1:0", None),
        ("192.0.2.1:99999", None),
        ("192.0.2.1:-o", None),
    ],
)
def test_endpoints_that_lead_elsewhere_are_left_out(text: str, usable: tuple[str, int] | None) -> None:
    assert usable_endpoint(text, NETWORK) == usable
