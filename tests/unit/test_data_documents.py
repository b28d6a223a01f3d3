"""Sources and documents: what is read, in which order, and what is said about rows that cannot be read."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from atoll.data.documents import read_documents
from atoll.data.rows import PIECE_CHARS
from atoll.data.sources import STDLIB, expand_sources
from atoll.errors import ConfigError, DataError
from atoll.events import RowsSkipped

Read = Callable[..., list[str]]


@pytest.fixture
def skipped() -> list[RowsSkipped]:
    return []


@pytest.fixture
def read(skipped: list[RowsSkipped]) -> Read:
    def read(*files: Path, field: str = "text", max_bad_rows: int = 100) -> list[str]:
        rows = read_documents(files, field=field, max_bad_rows=max_bad_rows, report=skipped.append)
        return list(rows)

    return read


def jsonl(path: Path, *lines: bytes | str) -> Path:
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    return path


def test_stdlib_is_found_sorted_and_without_tests() -> None:
    files = expand_sources([STDLIB])
    assert len(files) > 300
    assert {path.suffix for path in files} == {".py"}
    assert not [path for path in files if {"site-packages", "dist-packages", "test"} & set(path.parts)]
    assert files == expand_sources([STDLIB])
    assert "json/decoder.py" in "\n".join(path.as_posix() for path in files)


def test_folder_glob_and_file_are_sorted_and_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("b.txt", "a/z.txt", "a/a.md", ".hidden", ".git/x.txt", "__pycache__/x.pyc"):
        (tmp_path / "corpus" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "corpus" / name).write_text(name)
    os.mkfifo(tmp_path / "corpus" / "pipe")
    monkeypatch.chdir(tmp_path)
    sources = ["corpus/b.txt", str(tmp_path / "corpus/b.txt"), "corpus", "corpus/**/*.txt"]
    names = [path.as_posix() for path in expand_sources(sources)]
    assert names == ["corpus/b.txt", "corpus/a/a.md", "corpus/a/z.txt"]


@pytest.mark.parametrize("source", ["no-such-file.txt", "no-such-folder/*.txt"])
def test_a_source_that_is_not_there_is_named(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        expand_sources([STDLIB, source])
    assert source in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_pipe_is_refused_rather_than_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="neither a file nor a folder"):
        expand_sources([str(tmp_path / "pipe")])


def test_text_files_are_read_whole_and_long_ones_cut_at_line_ends(tmp_path: Path, read: Read) -> None:
    text = "".join(f"line {i} é\n" for i in range(20_000))
    (tmp_path / "long.txt").write_text(text, encoding="utf-8")
    (tmp_path / "one-line.txt").write_text("x" * (PIECE_CHARS + 1))
    (tmp_path / "bom.txt").write_bytes(b"\xef\xbb\xbfhello\r\n")
    pieces = read(tmp_path / "long.txt")
    assert "".join(pieces) == text
    assert all(piece.endswith("\n") and len(piece) <= PIECE_CHARS for piece in pieces)
    assert list(map(len, read(tmp_path / "one-line.txt"))) == [PIECE_CHARS, 1]
    assert read(tmp_path / "bom.txt") == ["hello\r\n"]


def test_bytes_that_are_no_utf8_name_file_line_and_byte(
    tmp_path: Path, read: Read, skipped: list[RowsSkipped]
) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes(b"fine\ncaf\xe9\n")
    assert read(path) == []
    assert skipped == [RowsSkipped(str(path), 1, f"{path}:2: is no UTF-8 text (byte 8 is 0xe9)")]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"not json", "is no JSON"),
        (b'{"text": "cut of', "is no JSON"),
        (b'{"text": "caf\xe9"}', "is no JSON"),
        (b'{"text": "\\ud800"}', "is no JSON"),
        (b'["text"]', "is no JSON object"),
        (b'{"body": "x", "id": 1}', "has no field 'text'; it has 'body', 'id'"),
        (b'{"text": 7}', "field 'text' is no string but int"),
        (b'{"text": null}', "field 'text' is no string but NoneType"),
    ],
)
def test_a_bad_jsonl_line_is_skipped_counted_and_named(
    line: bytes, why: str, tmp_path: Path, read: Read, skipped: list[RowsSkipped]
) -> None:
    path = jsonl(tmp_path / "rows.jsonl", b'\xef\xbb\xbf{"text": "a"}', "", '{"text": ""}', line)
    assert read(path) == ["a", ""]
    (event,) = skipped
    assert (event.path, event.count) == (str(path), 1)
    assert event.example.startswith(f"{path}:4: {why}")


def test_the_limit_holds_over_all_files(tmp_path: Path, read: Read, skipped: list[RowsSkipped]) -> None:
    good = json.dumps({"body": "fine"})
    files = [jsonl(tmp_path / f"{name}.jsonl", good, "bad", "bad", good) for name in "abc"]
    assert read(*files, field="body", max_bad_rows=6) == ["fine"] * 6
    assert [event.count for event in skipped] == [2, 2, 2]
    skipped.clear()
    with pytest.raises(DataError, match=r"max_bad_rows = 3.*b\.jsonl:2: is no JSON") as caught:
        read(*files, field="body", max_bad_rows=3)
    assert caught.value.exit_code == 8
    assert [event.count for event in skipped] == [2, 2]


def test_a_file_that_cannot_be_opened_counts_as_a_bad_row(
    tmp_path: Path, read: Read, skipped: list[RowsSkipped]
) -> None:
    path = tmp_path / "gone.txt"
    assert read(path) == []
    assert skipped[0].example == f"{path}: cannot be read: No such file or directory"


def test_parquet_rows_and_nulls(tmp_path: Path, read: Read, skipped: list[RowsSkipped]) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "rows.parquet"
    texts = [f"row {i}" for i in range(2500)]
    table = pa.table({"id": range(2500), "text": [None if i == 1500 else t for i, t in enumerate(texts)]})
    pq.write_table(table, path)
    assert read(path) == texts[:1500] + texts[1501:]
    assert [event.example for event in skipped] == [f"{path}:1501: field 'text' is null"]
    with pytest.raises(ConfigError, match=r"no column 'body'; set data.field to one of 'id', 'text'"):
        read(path, field="body")
    with pytest.raises(ConfigError, match="column 'id' holds int64, not text"):
        read(path, field="id")


def test_parquet_text_that_is_no_utf8(tmp_path: Path, read: Read, skipped: list[RowsSkipped]) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "rows.parquet"
    binary = pa.array([b"good", b"caf\xe9", b"fine"], type=pa.binary())
    text = pa.Array.from_buffers(pa.string(), 3, binary.buffers())
    pq.write_table(pa.table({"text": text}), path)
    assert read(path) == ["good", "fine"]
    assert [event.example for event in skipped] == [f"{path}:2: field 'text' is no UTF-8 text (at byte 3)"]


def test_half_a_parquet_file_is_a_bad_row(tmp_path: Path, read: Read, skipped: list[RowsSkipped]) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "half.parquet"
    pq.write_table(pa.table({"text": ["a", "b"] * 1000}), path)
    path.write_bytes(path.read_bytes()[:-40])
    assert read(path) == []
    assert skipped[0].count == 1
    assert skipped[0].example.startswith(f"{path}:1: the rest of the file is damaged: ")


def test_a_damaged_page_keeps_what_came_before(
    tmp_path: Path, read: Read, skipped: list[RowsSkipped]
) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "damaged.parquet"
    texts = [f"{i} {i * 2654435761 % 2**32:x}" for i in range(4096)]
    pq.write_table(
        pa.table({"text": texts}), path, row_group_size=1024, compression="zstd", use_dictionary=False
    )
    second = pq.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    raw = bytearray(path.read_bytes())
    raw[second : second + 4000] = b"\xff" * 4000
    path.write_bytes(raw)
    assert read(path) == texts[:1024]
    assert skipped[0].example.startswith(f"{path}:1025: the rest of the file is damaged: ")


def test_without_pyarrow_the_install_line_is_given(
    tmp_path: Path, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match=r'pip install "atoll-train\[data\]"'):
        read(tmp_path / "rows.parquet")
