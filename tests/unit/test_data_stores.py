"""Shards in an object store: fetched once, verified, cached, and asked for again where an attempt fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.data import origins
from atoll.data.opening import open_shards
from atoll.data.origins import PassingError, StoreOrigin, origin_of
from atoll.data.preparing import identity_of, prepare
from atoll.data.remote_shards import RemoteFolder
from atoll.data.shards import Shards
from atoll.data.sources import expand_sources
from atoll.data.tokenizer import ByteTokenizer
from atoll.errors import ConfigError, DataError
from support.object_store import HAS_MOTO, Server, moto

obstore = pytest.importorskip("obstore", reason='needs: pip install "atoll-train[cloud]"')
BYTES = ByteTokenizer()
TEXTS = [f"document {i} " * 20 for i in range(60)]


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    prepare(TEXTS, BYTES, identity_of("bytes", BYTES), tmp_path / "prepared", shard_tokens=4000)
    return tmp_path / "prepared"


@pytest.fixture(scope="module")
def moto_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if not HAS_MOTO:
        pytest.skip("needs moto[server], of the extra [dev]")
    with moto(tmp_path_factory.mktemp("moto")) as server:
        server.make_bucket("bucket")
        yield server


@pytest.fixture(params=["file", "s3"])
def address(request: pytest.FixtureRequest, prepared: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of the same shards, in both kinds of stores; every file comes in several parts."""
    monkeypatch.setattr(origins, "_PART_BYTES", 700)
    if request.param == "file":
        return f"file://{prepared}"
    server: Server = request.getfixturevalue("moto_server")
    prefix = prepared.parent.name
    for path in prepared.iterdir():
        obstore.put(server.place(prefix=prefix).objects.store, path.name, path)
    use(server, monkeypatch)
    return f"s3://bucket/{prefix}"


def use(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a user sets for the store's own tools."""
    for name, value in {
        "ENDPOINT": server.endpoint,
        "ACCESS_KEY_ID": "test",
        "SECRET_ACCESS_KEY": "test",
        "REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(f"AWS_{name}", value)


def whole(prepared: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(prepared.glob("*.tokens")))


def test_files_are_fetched_as_they_are_read_and_once(
    address: str, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    get = StoreOrigin.get

    def noted(self: StoreOrigin, file: str, out: Any, most: int) -> None:
        asked.append(file)
        get(self, file, out, most)

    monkeypatch.setattr(StoreOrigin, "get", noted)
    corpus = open_shards(address, tmp_path / "cache").corpus()
    assert not [file for file in asked if file.endswith(".tokens")]
    assert bytes(corpus.tokens[1:50].astype(np.uint8)).startswith(b"document 0 ")
    assert [file for file in asked if file.endswith(".tokens")] == ["shard-00000.tokens"]
    assert corpus.tokens[1:].tobytes() == whole(prepared)
    before = len(asked)
    again = open_shards(address, tmp_path / "cache").corpus()
    assert again.tokens[1:].tobytes() == whole(prepared)
    assert asked[before:] == ["manifest.json"], "another run takes them from the cache"
    assert not list((tmp_path / "cache").glob(".*"))


def test_an_attempt_that_breaks_off_is_gone_on_with(prepared: Path, tmp_path: Path) -> None:
    """Each answer ends after a part of what it promised."""
    origin = origin_of(f"file://{prepared}")
    assert isinstance(origin, StoreOrigin)
    starts: list[int] = []

    class Breaking:
        def get(self, file: str, out: Any, most: int) -> None:
            starts.append(len(out))
            origin.get(file, Piece(out, 900), most)

    class Piece:
        """Takes 900 bytes of an answer, then the connection is gone."""

        def __init__(self, out: Any, most: int) -> None:
            self._out, self._left = out, most

        def __len__(self) -> int:
            return len(self._out)

        def extend(self, data: bytes) -> None:
            self._out.extend(data[: self._left])
            if len(data) > self._left:
                raise PassingError("the connection is gone")
            self._left -= len(data)

    folder = RemoteFolder("file:", Breaking(), tmp_path / "cache", pause_s=0.001, deadline_s=20.0)
    assert Shards(folder).corpus().tokens[1:].tobytes() == whole(prepared)
    assert max(starts) >= 900, "a later attempt began where one had ended"


def test_what_is_not_there_is_told_at_once(address: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot fetch .*/nowhere.*; is the address right\?"):
        open_shards(f"{address}/nowhere", tmp_path / "cache")


def test_other_bytes_than_the_manifest_says_are_not_kept(prepared: Path, tmp_path: Path) -> None:
    path = prepared / "shard-00000.tokens"
    data = bytearray(path.read_bytes())
    data[7] ^= 1
    path.write_bytes(data)
    corpus = open_shards(f"file://{prepared}", tmp_path / "cache").corpus()
    with pytest.raises(DataError, match=r"shard-00000\.tokens does not have the SHA-256 of its manifest"):
        _ = corpus.tokens[1:20]
    path.write_bytes(bytes(data) * 1000)
    with pytest.raises(DataError, match=r"bytes and should have at most"):
        _ = corpus.tokens[1:20]
    assert not [each for each in (tmp_path / "cache").iterdir() if "tokens" in each.name]


def test_a_bucket_that_is_missing_is_told_at_once(
    moto_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(moto_server, monkeypatch)
    with pytest.raises(DataError, match=r"s3://no-such-bucket/x/manifest\.json: there is no such bucket"):
        open_shards("s3://no-such-bucket/x", tmp_path / "cache")


@pytest.mark.skipif(not HAS_MOTO, reason="needs moto[server], of the extra [dev]")
def test_a_store_that_is_gone_is_given_up_after_the_deadline(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with moto(tmp_path) as server:
        use(server, monkeypatch)
        server.end()
        origin = origin_of("s3://bucket/x")
        folder = RemoteFolder("s3://bucket/x", origin, tmp_path / "cache", pause_s=0.01, deadline_s=0.5)
        with pytest.raises(DataError, match=r"cannot fetch s3://bucket/x/manifest.json: .*; tried \d+ times"):
            Shards(folder)


@pytest.mark.parametrize("address", ["s3://", "file://relative/folder"])
def test_an_address_of_nothing_is_a_config_error(address: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.shards: .* is no place of an object store"):
        open_shards(address, tmp_path / "cache")


def test_an_address_among_the_sources_is_told_where_it_belongs() -> None:
    with pytest.raises(ConfigError, match=r"'s3://bucket/x' is an address.*data\.shards"):
        expand_sources(["s3://bucket/x"])
