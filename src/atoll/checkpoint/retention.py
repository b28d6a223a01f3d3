"""What is kept. Pure: versions in, versions to be removed out."""

from __future__ import annotations

from collections.abc import Collection

from atoll.checkpoint.folder import Found


def to_remove(
    found: Collection[Found], good: Found, damaged: Collection[int], *, keep_last: int, keep_every: int
) -> list[int]:
    """Which versions go, now that `good` was verified: never that one.

    Kept are the newest `keep_last`, and those that `keep_every` divides. What a roll-back left behind goes: versions
    above `good` that were made under an older term. So do folders whose manifest nobody can read (`damaged`), if they
    are older.
    """
    abandoned = {each.version for each in found if each.version > good.version and each.term < good.term}
    standing = sorted((each.version for each in found if each.version not in abandoned), reverse=True)
    kept = {good.version, *standing[: max(1, keep_last)]}
    if keep_every:
        kept |= {version for version in standing if version % keep_every == 0}
    old_damage = {version for version in damaged if version < good.version}
    return sorted(abandoned | old_damage | (set(standing) - kept))
