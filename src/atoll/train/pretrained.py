"""Start weights from a folder: those of a Llama that `transformers` or `atoll checkpoints export` has saved.

All of it is safetensors; nothing is executed. Every tensor must be the model's, by name and shape, and every parameter
of the model must be there: a start that is half old and half new would train, and nobody would see why so badly.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from atoll.errors import ConfigError
from atoll.state.own_rows import set_from_whole
from atoll.train.llama import Llama, LlamaConfig

WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_HEAD = "lm_head.weight"
_NOT_WEIGHTS = ("rotary_emb.inv_freq",)  # old files have them; they follow from rope_theta


@torch.no_grad()
def load_weights(model: Llama, folder: Path) -> None:
    """Set all parameters, rounded to their dtypes. Blocks. Raises ConfigError, naming what does not fit."""
    parameters = dict(model.named_parameters())
    where = _where(folder)
    surplus = sorted(where.keys() - parameters.keys())
    if model.config.tie_embeddings:
        surplus = [name for name in surplus if name != _HEAD]
    missing = sorted(parameters.keys() - where.keys())
    if missing or surplus:
        said = [
            f"{len(names)} {what}, the first {names[0]}"
            for names, what in ((missing, "are missing"), (surplus, "are not the model's"))
            if names
        ]
        raise ConfigError(
            f"the weights in {folder} are not those of [model]: of its tensors {' and '.join(said)}; "
            "`atoll checkpoints import` prints the [model] that fits"
        )
    for name, tensor in _tensors(folder, where, parameters):
        parameter = parameters[name]
        if tensor.shape != parameter.shape:
            raise ConfigError(
                f"{folder}: {name} has shape {list(tensor.shape)}, and [model] asks for {list(parameter.shape)}"
            )
        if not torch.isfinite(tensor).all():
            raise ConfigError(f"{folder}: {name} is not finite")
        set_from_whole(name, parameter, tensor)


def read_llama_config(folder: Path) -> LlamaConfig:
    """The shape that a folder's config.json describes. Raises ConfigError for what the built-in Llama does not do."""
    path = folder / "config.json"
    try:
        data = path.read_bytes()
        said = msgspec.json.decode(data, type=dict[str, Any])
        if said.get("model_type") != "llama":
            raise ConfigError(
                f"{path}: model_type is {said.get('model_type')!r}; only 'llama' can be imported"
            )
        shape = msgspec.json.decode(data, type=_Shape)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} does not describe a Llama: {error}") from None
    for key, plain in (("attention_bias", False), ("mlp_bias", False), ("hidden_act", "silu")):
        if said.get(key, plain) != plain:
            raise ConfigError(f"{path}: {key} = {said[key]!r} is not supported, only {plain!r}")
    newer, older = shape.rope_parameters or _Rope(), shape.rope_scaling or _Rope()
    scaling = newer.rope_type or older.rope_type or older.type
    if scaling not in (None, "default"):
        raise ConfigError(f"{path}: rope scaling {scaling!r} is not supported")
    try:
        config = LlamaConfig(
            vocab_size=shape.vocab_size,
            dim=shape.hidden_size,
            num_layers=shape.num_hidden_layers,
            num_heads=shape.num_attention_heads,
            num_kv_heads=shape.num_key_value_heads or shape.num_attention_heads,
            ffn_dim=shape.intermediate_size,
            max_seq_len=shape.max_position_embeddings,
            rope_theta=newer.rope_theta or shape.rope_theta or 10000.0,
            norm_eps=shape.rms_norm_eps,
            tie_embeddings=shape.tie_word_embeddings,
        )
    except ValueError as error:
        raise ConfigError(f"{path} does not describe a Llama: {error}") from None
    if (shape.head_dim or config.head_dim) != config.head_dim:
        raise ConfigError(f"{path}: head_dim = {shape.head_dim} is not hidden_size / num_attention_heads")
    return config


_Count = Annotated[int, msgspec.Meta(gt=0, lt=1 << 31)]


class _Rope(msgspec.Struct):
    """Newer files have all of it in `rope_parameters`, older ones the scaling apart."""

    rope_theta: float | None = None
    rope_type: str | None = None
    type: str | None = None


class _Shape(msgspec.Struct):
    vocab_size: _Count
    hidden_size: _Count
    num_hidden_layers: _Count
    num_attention_heads: _Count
    intermediate_size: _Count
    num_key_value_heads: _Count | None = None
    head_dim: _Count | None = None
    max_position_embeddings: _Count = 2048
    rms_norm_eps: Annotated[float, msgspec.Meta(gt=0)] = 1e-6
    tie_word_embeddings: bool = False
    rope_theta: float | None = None
    rope_parameters: _Rope | None = None
    rope_scaling: _Rope | None = None


def _where(folder: Path) -> dict[str, Path]:
    """Which file has which tensor."""
    index = folder / _INDEX
    if index.is_file():
        try:
            files = msgspec.json.decode(index.read_bytes(), type=dict[str, Any])["weight_map"]
            names = sorted(set(files.values()))
        except (OSError, msgspec.MsgspecError, KeyError, AttributeError, TypeError) as error:
            raise ConfigError(f"{index} is no index of weights: {error}") from None
        if any(not isinstance(name, str) or Path(name).name != name for name in names):
            raise ConfigError(f"{index} names files that are not in its folder")
    else:
        names = [WEIGHTS]
    found = {}
    for name in names:
        with _opened(folder / name) as file:
            stored = file.keys()  # it is no mapping: only this names its tensors
        found |= {tensor: folder / name for tensor in stored if not tensor.endswith(_NOT_WEIGHTS)}
    return found


def _tensors(
    folder: Path, where: Mapping[str, Path], wanted: Mapping[str, object]
) -> Iterator[tuple[str, torch.Tensor]]:
    for path in sorted(set(where.values())):
        with _opened(path) as file:
            for name in sorted(name for name, at in where.items() if at == path and name in wanted):
                yield name, file.get_tensor(name)


@contextmanager
def _opened(path: Path) -> Generator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"start weights {path} cannot be read as safetensors: {error}; only safetensors are taken"
        ) from None
