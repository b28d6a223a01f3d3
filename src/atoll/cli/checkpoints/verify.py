"""`atoll checkpoints verify`: whether every byte is what it was."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from atoll.checkpoint.choosing import choose, place_of
from atoll.checkpoint.survey import verify as verify_versions
from atoll.cli.checkpoints.ls import size_text
from atoll.cli.checkpoints.options import Checkpoint, Json
from atoll.cli.output import deliver
from atoll.errors import LocalError


def verify(
    checkpoint: Checkpoint,
    /,
    *,
    all_: Annotated[
        bool, Parameter(name="--all", help="All versions of the place, not only the latest.", negative="")
    ] = False,
    json: Json = False,
) -> int:
    """Read every byte of a checkpoint, own parts included, and compare it with its sums.

    The shared part is compared three ways: sizes and SHA-256 of the files, the digest tables over every million
    elements, and the run's digest over those.

    Try:

        atoll checkpoints verify runs/laptop
        atoll checkpoints verify runs/laptop@120
        atoll checkpoints verify runs/laptop --all --json

    --json prints one object: place, parts (version, peer or "" for the shared part, size_bytes, seconds, problem).

    Exit codes: 0 all is whole; 2 usage; 3 something is damaged or missing, each with a sentence.
    """
    if all_:
        place = place_of(Path(checkpoint.partition("@")[0]))
        versions = place.all_versions()
    else:
        chosen = choose(checkpoint)
        place, versions = chosen.place, [chosen.manifest.version]
    found = []
    for part in verify_versions(place, versions):
        found.append(part)
        if json:
            continue
        what = f"version {part.version}" + (f", own part of {part.peer}" if part.peer else "")
        rate = f" at {part.size_bytes / part.seconds / 1e9:.2f} GB/s" if part.seconds > 0 else ""
        deliver(f"{what}: {part.problem or f'whole, {size_text(part.size_bytes)}{rate}'}\n")
    if json:
        deliver(msgspec.json.encode({"place": str(place.path), "parts": found}).decode() + "\n")
    damaged = sum(1 for part in found if part.problem)
    if damaged:
        raise LocalError(f"{damaged} of {len(found)} parts in {place.path} are damaged or unfinished")
    return 0
