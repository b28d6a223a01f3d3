"""A checkpoint as a folder that `transformers` opens: model.safetensors, config.json, and the tokenizer."""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path
from typing import Final, Literal

import msgspec
import numpy as np
import torch
from safetensors.torch import save_file

from atoll.checkpoint.choosing import Chosen
from atoll.checkpoint.description import Description
from atoll.checkpoint.merging import merged
from atoll.errors import ConfigError, LocalError
from atoll.state.manifest import MANIFEST, digest_of, rows_of

DType = Literal["float32", "bfloat16", "float16"]

WEIGHTS: Final = "model.safetensors"
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def export(
    chosen: Chosen,
    out: Path,
    *,
    dtype: DType = "float32",
    tokenizer: str = "",
    base: str = "",
    force: bool = False,
) -> int:
    """Write the anchor of a checkpoint to the folder `out`, whole or not at all; returns the bytes of the weights.

    `tokenizer` takes the place of what the run used, and `base` that of the folder whose weights adapters were trained
    over: these are merged. Reads the whole anchor into memory and compares it with its
    digest. Raises LocalError, and ConfigError if the model has no config or the tokenizer is not here.
    """
    said = chosen.description()
    if not said.config:
        raise ConfigError(
            f"{chosen.place.path} is of a model of your own, for which there is no config.json; its parameters are "
            "named in model.json, its values lie in safetensors"
        )
    if out.exists() and not force:
        raise ConfigError(f"{out} exists; choose another --out, or add --force to replace it")
    if said.adapters is None:
        tensors = _tensors(chosen, said, getattr(torch, dtype))
    else:
        trained = _tensors(chosen, said, torch.float32)
        tensors = merged(said.adapters, trained, Path(base or said.adapters.base), getattr(torch, dtype))
    config = {**said.config, "torch_dtype": dtype}
    draft = out.with_name(f".{out.name}.{secrets.token_hex(4)}.partial")
    try:
        draft.mkdir(parents=True)
        save_file(tensors, draft / WEIGHTS, {"format": "pt"})
        (draft / "config.json").write_bytes(
            msgspec.json.format(msgspec.json.encode(config), indent=2) + b"\n"
        )
        _write_tokenizer(draft, tokenizer or said.tokenizer)
        size_bytes = (draft / WEIGHTS).stat().st_size
        if out.exists():
            shutil.rmtree(out)
        draft.rename(out)
    except OSError as error:
        raise LocalError(
            f"cannot write {out}: {(error.strerror or str(error)).lower()}; free some space or choose another --out"
        ) from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return size_bytes


def _tensors(chosen: Chosen, said: Description, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    manifest = chosen.manifest
    anchor = chosen.read("anchor", 0, manifest.numel)
    if digest_of(tuple(rows_of(anchor)), manifest.velocity) != manifest.digest:
        raise LocalError(
            f"the anchor in {chosen.folder} does not have the digest of its {MANIFEST}; export another version "
            "(atoll checkpoints verify)"
        )
    if not np.isfinite(anchor).all():
        raise LocalError(f"the anchor in {chosen.folder} is not finite; export another version")
    whole = torch.from_numpy(anchor)
    tensors = {
        said.names.get(each.name, each.name): whole[range_.start : range_.stop]
        .view(each.shape)
        .to(dtype)
        .clone()
        for each, range_ in zip(said.parameters, said.layout.ranges, strict=True)
    }
    if said.config.get("tie_word_embeddings") and _EMBEDDING not in tensors and _HEAD in tensors:
        tensors[_EMBEDDING] = tensors.pop(_HEAD)  # a tied weight goes by its first name here
    return tensors


def _write_tokenizer(folder: Path, name: str) -> None:
    """`bytes`, or the path of a tokenizer.json; with "" there is none to be written."""
    if not name:
        return
    if name == "bytes":
        (folder / "tokenizer.json").write_bytes(msgspec.json.encode(_bytes_tokenizer()) + b"\n")
    else:
        source = Path(name)
        if not source.is_file():
            raise ConfigError(
                f"the run's tokenizer {name} is not here; give --tokenizer with where it is on this machine"
            )
        shutil.copyfile(source, folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_bytes(
        b'{"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": false}\n'
    )


def _bytes_tokenizer() -> dict[str, object]:
    """A tokenizer.json whose ids are the bytes of UTF-8: byte-level BPE without merges. That writes the bytes that are
    no printable Latin-1 characters as characters from U+0100 on, in order."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {letters[byte]: byte for byte in range(256)},
            "merges": [],
        },
    }
