"""A peer's addresses are dialled in the order that `atoll vpn` on this machine has measured."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from atoll.network.chosen_paths import FRESH_S, ordered

HOSTS = ("192.0.2.7", "fd00:0:0:1::7", "198.51.100.7")
LAST = ("192.0.2.7", "198.51.100.7", "fd00:0:0:1::7")
FIRST = ("fd00:0:0:1::7", "192.0.2.7", "198.51.100.7")


def tell(folder: Path, use: str, *, path: str = "direct", ago_s: float = 0.0, name: str = "atoll0") -> None:
    peers = [
        {"address": "fd00:0:0:1::7", "use": use, "path": path},
        {"address": "fd00::8", "use": "vpn", "path": path},
    ]
    (folder / f"{name}.json").write_text(json.dumps({"written_s": time.time() - ago_s, "peers": peers}))


@pytest.mark.parametrize(
    ("use", "expected"), [("vpn", FIRST), ("direct", LAST)], ids=["VPN first", "VPN last"]
)
def test_the_faster_path_comes_first(tmp_path: Path, use: str, expected: tuple[str, ...]) -> None:
    tell(tmp_path, use)
    assert ordered(HOSTS, tmp_path) == expected
    assert ordered(("fd00:0:0:1:0::7", "192.0.2.7"), tmp_path)[0] == (
        "192.0.2.7" if use == "direct" else "fd00:0:0:1:0::7"
    ), "however it is written"
    assert ordered(("192.0.2.1", "192.0.2.2"), tmp_path) == ("192.0.2.1", "192.0.2.2")


def test_who_dials_us_directly_is_not_dialled_inside(tmp_path: Path) -> None:
    tell(tmp_path, "their direct")
    assert ordered(HOSTS, tmp_path) == ("192.0.2.7", "198.51.100.7")
    assert ordered(("fd00:0:0:1::7",), tmp_path) == ("fd00:0:0:1::7",), "unless there is no other way"


def test_what_is_not_known_changes_nothing(tmp_path: Path) -> None:
    assert ordered(HOSTS, tmp_path / "nothing") == HOSTS
    assert ordered(HOSTS, tmp_path) == HOSTS
    for text in ("", "{", "[]", "{}", '{"written_s": "x", "peers": []}', '{"written_s": 1e99, "peers": 3}'):
        (tmp_path / "atoll0.json").write_text(text)
        assert ordered(HOSTS, tmp_path) == HOSTS
    tell(tmp_path, "vpn", ago_s=FRESH_S + 5)
    assert ordered(HOSTS, tmp_path) == HOSTS, "its process was killed"
    tell(tmp_path, "vpn", path="no answer")
    assert ordered(HOSTS, tmp_path) == HOSTS, "nobody answers there"
    tell(tmp_path, "vpn", name="atoll1")
    assert ordered(HOSTS, tmp_path) == FIRST, "each interface counts"
