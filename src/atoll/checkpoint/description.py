"""What the elements of a place's snapshots are: `<place>/model.json`, one for all versions.

A snapshot is one long vector; this names its parameters, and says how a model is made that takes them. Nothing that
trains reads it: it is for `atoll checkpoints`, and for whoever opens a checkpoint with other tools.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any, Final

import msgspec

from atoll.errors import LocalError
from atoll.state.layout import Layout
from atoll.state.snapshot import open_itself
from atoll.values import ParameterInfo

FORMAT: Final = 1
DESCRIPTION: Final = "model.json"

_MAX_BYTES = 64 << 20


class Adapted(msgspec.Struct, frozen=True):
    """A layer with an adapter: SHA-256 of its frozen weight in fp32, and whether that is [in, out]."""

    digest: str
    transposed: bool = False


class Adapters(msgspec.Struct, frozen=True):
    """Low-rank adapters, trained over the frozen weights in the folder `base`: each of `layers` computes with
    W + scale lora_b lora_a."""

    base: str
    scale: float
    layers: dict[str, Adapted]


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """`parameters` in the order in which they lie in the vector. `config` is the model's config.json for
    `transformers`, empty for a user's own model; `tokenizer` what `data.tokenizer` said. `names` says what parameters
    are called elsewhere, where that is different (a tied weight has two names). With `adapters` the parameters are
    those of adapters alone."""

    format: int = FORMAT
    run: str
    parameters: tuple[ParameterInfo, ...]
    config: dict[str, Any] = {}
    tokenizer: str = ""
    names: dict[str, str] = {}
    adapters: Adapters | None = None

    @property
    def layout(self) -> Layout:
        return Layout(self.parameters)


def write_description(place: Path, said: Description) -> None:
    """Put it there, whole or not at all; nothing is written if it is there already. Raises OSError."""
    path = place / DESCRIPTION
    data = msgspec.json.format(msgspec.json.encode(said), indent=1) + b"\n"
    if path.is_file() and path.read_bytes() == data:
        return
    place.mkdir(parents=True, exist_ok=True)
    draft = place / f".{DESCRIPTION}.{secrets.token_hex(4)}.partial"
    try:
        draft.write_bytes(data)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def read_description(place: Path) -> Description:
    """Raises LocalError, naming the file and what to do."""
    path = place / DESCRIPTION
    try:
        with open(path, "rb", opener=open_itself) as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise ValueError(f"it is larger than {_MAX_BYTES} bytes")
        said = msgspec.json.decode(data, type=Description)
        if said.format != FORMAT:
            raise ValueError(f"it has format {said.format}, this version reads {FORMAT}")
        if any(size < 0 for each in said.parameters for size in each.shape):
            raise ValueError("a parameter has a negative size")
        names = [each.name for each in said.parameters]
        if len(set(names)) != len(names):
            raise ValueError("two parameters have one name")
    except (OSError, ValueError) as error:  # a MsgspecError is a ValueError
        reason = (error.strerror or str(error)).lower() if isinstance(error, OSError) else str(error)
        raise LocalError(
            f"{path}, which names the parameters, cannot be used: {reason}; copy it from another peer's checkpoints "
            "of this run"
        ) from None
    return said
