"""From the names in `data.sources` to a list of files, in the same order on every machine."""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

from atoll.errors import ConfigError, DataError

STDLIB = "python-stdlib"

_CACHES = frozenset({"__pycache__"})
_NOT_STDLIB = _CACHES | {"site-packages", "dist-packages", "test", "tests", "idle_test"}


def expand_sources(sources: Sequence[str]) -> list[Path]:
    """The files behind `sources`, each once: sources in their given order, files of a source sorted.

    A source is a file, a folder (all of it, hidden names left out), a glob (`**` descends), or
    "python-stdlib": the running interpreter's own `.py` files. Relative paths start at the current folder.
    Raises ConfigError for a path that does not exist and a glob that matches no file.
    """
    found: dict[Path, Path] = {}
    for source in sources:
        for path in _expand(source):
            found.setdefault(path.resolve(), path)
    return list(found.values())


def _expand(source: str) -> Iterable[Path]:
    if source == STDLIB:
        return _stdlib_files()
    if "://" in source:
        raise ConfigError(
            f"data.sources: {source!r} is an address, and sources are files here; prepare the text where it lies "
            "(atoll data prep) and give the address of that in data.shards"
        )
    path = Path(source).expanduser()
    if path.is_dir():
        return _files_below(path, _CACHES)
    if path.is_file():
        return (path,)
    if path.exists():
        raise ConfigError(
            f"data.sources: {source!r} is neither a file nor a folder; copy it into a file first"
        )
    if glob.has_magic(source):
        return _matches(source)
    raise ConfigError(
        f"data.sources: {source!r} does not exist (seen from {Path.cwd()}); "
        f'give a file, a folder, a glob, or "{STDLIB}"'
    )


def _matches(pattern: str) -> list[Path]:
    names = glob.glob(os.path.expanduser(pattern), recursive=True)
    files = sorted(path for path in map(Path, names) if path.is_file())
    if not files:
        raise ConfigError(f"data.sources: {pattern!r} matches no file (seen from {Path.cwd()})")
    return files


def _files_below(folder: Path, leave_out: Collection[str]) -> Iterator[Path]:
    """All files below `folder`, each level sorted: the order does not depend on where the folder lies."""
    for here, folders, names in os.walk(folder, onerror=_raise_unreadable):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in leave_out)
        paths = (Path(here, name) for name in sorted(names) if not name.startswith("."))
        # A pipe or socket would block its reader; a dangling link goes on, to be counted as unreadable.
        yield from (path for path in paths if path.is_file() or path.is_symlink())


def _raise_unreadable(error: OSError) -> None:
    raise DataError(f"data.sources: the folder {error.filename} cannot be read: {error.strerror}")


def _stdlib_files() -> Iterator[Path]:
    for path in _files_below(Path(sysconfig.get_path("stdlib")), _NOT_STDLIB):
        # `_sysconfigdata*` is written by the build: it differs between machines with the same Python.
        if path.suffix == ".py" and not path.name.startswith("_sysconfigdata"):
            yield path
