"""Shards at an http address: fetched once, verified, and patient with a source that fails two times in three."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from atoll.data.origins import origin_of
from atoll.data.preparing import identity_of, prepare
from atoll.data.remote_shards import RemoteFolder
from atoll.data.shards import Shards
from atoll.data.tokenizer import ByteTokenizer
from atoll.errors import DataError

BYTES = ByteTokenizer()
TEXTS = [f"document {i} " * 20 for i in range(60)]


@dataclass
class Origin:
    """A server of one folder, which can be told to behave badly."""

    folder: Path
    address: str = ""
    asked: list[str] = field(default_factory=list)
    ranges: list[str] = field(default_factory=list)
    good_one_in: int = 1
    breaks_off: bool = False
    knows_ranges: bool = True


@pytest.fixture
def origin(tmp_path: Path) -> Iterator[Origin]:
    prepare(TEXTS, BYTES, identity_of("bytes", BYTES), tmp_path / "origin", shard_tokens=4000)
    found = Origin(tmp_path / "origin")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found.asked.append(self.path)
            if len(found.asked) % found.good_one_in:
                self.send_error(502)
                return
            path = found.folder / self.path.lstrip("/")
            if not path.is_file():
                self.send_error(404)
                return
            data, status = path.read_bytes(), 200
            wanted = self.headers.get("Range")
            if wanted and found.knows_ranges:
                found.ranges.append(wanted)
                data, status = data[int(wanted.removeprefix("bytes=").rstrip("-")) :], 206
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if found.breaks_off and len(data) > 1000:
                data = data[: len(data) // 2]
                self.close_connection = True
            self.wfile.write(data)

        def log_message(self, *said: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, *where: object) -> None:
            pass  # clients that hang up are part of this

    with Server(("127.0.0.1", 0), Handler) as server:
        found.address = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield found
        server.shutdown()
        thread.join()


def opened(origin: Origin, tmp_path: Path, **settings: object) -> Shards:
    given = {"pause_s": 0.001, "deadline_s": 20.0, **settings}
    return Shards(RemoteFolder(origin.address, origin_of(origin.address), tmp_path / "cache", **given))  # type: ignore[arg-type]


def whole(origin: Origin) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(origin.folder.glob("*.tokens")))


def test_files_are_fetched_as_they_are_read_and_once(origin: Origin, tmp_path: Path) -> None:
    shards = opened(origin, tmp_path)
    assert origin.asked == ["/manifest.json"]
    corpus = shards.corpus()
    assert not [path for path in origin.asked if path.endswith(".tokens")]
    first = corpus.tokens[1:50]
    assert [path for path in origin.asked if path.endswith(".tokens")] == ["/shard-00000.tokens"]
    assert bytes(first.astype(np.uint8)).startswith(b"document 0 ")
    assert corpus.tokens[1:].tobytes() == whole(origin)
    asked = len(origin.asked)
    again = opened(origin, tmp_path).corpus()
    assert again.tokens[1:].tobytes() == whole(origin)
    assert origin.asked[asked:] == ["/manifest.json"], "another run takes them from the cache"
    assert not list((tmp_path / "cache").glob(".*"))


def test_a_source_that_answers_502_two_times_in_three_works(origin: Origin, tmp_path: Path) -> None:
    origin.good_one_in = 3
    assert opened(origin, tmp_path).corpus().tokens[1:].tobytes() == whole(origin)


@pytest.mark.parametrize("knows_ranges", [True, False])
def test_what_broke_off_is_gone_on_with(origin: Origin, tmp_path: Path, knows_ranges: bool) -> None:
    origin.breaks_off = True
    origin.knows_ranges = knows_ranges
    if knows_ranges:
        assert opened(origin, tmp_path).corpus().tokens[1:].tobytes() == whole(origin)
        assert origin.ranges
    else:
        with pytest.raises(DataError, match="broke off after"):
            _ = opened(origin, tmp_path, deadline_s=0.2).corpus().tokens[1:]


def test_other_bytes_than_the_manifest_says_are_not_kept(origin: Origin, tmp_path: Path) -> None:
    path = origin.folder / "shard-00000.tokens"
    data = bytearray(path.read_bytes())
    data[7] ^= 1
    path.write_bytes(data)
    corpus = opened(origin, tmp_path).corpus()
    with pytest.raises(DataError, match=r"shard-00000\.tokens does not have the SHA-256 of its manifest"):
        _ = corpus.tokens[1:20]
    assert not [each for each in (tmp_path / "cache").iterdir() if "tokens" in each.name]


def test_more_bytes_than_promised_are_not_taken(origin: Origin, tmp_path: Path) -> None:
    path = origin.folder / "shard-00000.tokens"
    path.write_bytes(path.read_bytes() * 1000)
    corpus = opened(origin, tmp_path).corpus()
    with pytest.raises(DataError, match=r"bytes and should have at most"):
        _ = corpus.tokens[1:20]


def test_a_wrong_address_is_told_at_once(origin: Origin, tmp_path: Path) -> None:
    origin.address += "/nowhere"
    with pytest.raises(DataError, match=r"nowhere/manifest.json: it answers 404 .*; is the address right\?"):
        opened(origin, tmp_path, deadline_s=1000.0)
    assert len(origin.asked) == 1


def test_a_source_that_is_gone_is_given_up_after_the_deadline(origin: Origin, tmp_path: Path) -> None:
    origin.good_one_in = 1 << 30
    with pytest.raises(DataError, match=r"it answers 502 .*; tried \d+ times in 0 s"):
        opened(origin, tmp_path, deadline_s=0.1)
    assert len(origin.asked) > 2


def test_the_cache_is_bounded(origin: Origin, tmp_path: Path) -> None:
    most = 40_000
    corpus = opened(origin, tmp_path, cache_bytes=most).corpus()
    for start in range(1, corpus.num_tokens, 500):
        assert len(corpus.tokens[start : start + 100])
        held = sum(path.stat().st_size for path in (tmp_path / "cache").iterdir())
        assert held <= most
    assert sum(path.stat().st_size for path in origin.folder.iterdir()) > most / 2


def test_a_file_that_another_run_removes_meanwhile_is_no_error(origin: Origin, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "ab12.tokens").symlink_to(tmp_path / "gone")  # listed, and not there when it is looked at
    assert opened(origin, tmp_path).corpus().num_tokens
