"""Any causal language model of `transformers` (extra `[hf]`) as the model of a run.

It is the library's own object, with its parameter names, plus a `loss`; nothing of it is wrapped. Nothing is executed
that a folder brings along, and nothing is unpickled: code of the folder's own (`auto_map`) is refused, and weights are
safetensors. Nothing is fetched: a folder is one on this machine.

Start weights without a folder of weights must have the same bits on every peer, whatever its versions, so they do not
come from the library's own initialisation: that only tells which parameters start as constants (norms, biases) and
which at random. The latter get Atoll's rule (`train.init`), with the config's `initializer_range` as deviation.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Protocol, cast

import msgspec
import torch
from torch import Tensor, nn

from atoll.checkpoint.merging import weight_digest
from atoll.errors import ConfigError
from atoll.train.cross_entropy import token_loss
from atoll.train.init import STD, start_values

RESIDUAL_WRITERS = ("o_proj.weight", "down_proj.weight", "c_proj.weight", "dense_4h_to_h.weight")
_UNSAFE = ("auto_map", "quantization_config")
_SAYS_NOTHING = (
    "transformers_version",
    "torch_dtype",
    "dtype",
    "architectures",
    "_name_or_path",
    "use_cache",
)
"""Of a config.json: the same model may have these or not."""


class HubConfig(Protocol):
    """What is used of a config of `transformers`."""

    model_type: str

    def to_dict(self) -> dict[str, Any]: ...
    def to_diff_dict(self) -> dict[str, Any]: ...
    def get_text_config(self) -> Any: ...


class CausalLM(nn.Module):
    """What a model of `transformers` becomes: its class is this and its own class."""

    config: Any

    def loss(self, input_ids: Tensor, targets: Tensor, *, z_loss: float = 0.0) -> Tensor:
        """Mean cross-entropy in nats per token, a scalar; computed in fp32 (or wider, if the weights are).

        Plus `z_loss` times the mean squared logarithm of the softmax's sum.
        """
        logits = self(input_ids=input_ids, use_cache=False).logits
        return token_loss(lambda made: made, logits, targets, z_loss=z_loss)


@cache
def _with_loss(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (CausalLM, kind), {})


def read_hub_config(path: Path) -> HubConfig:
    """The config of a folder, or of a config.json. Raises ConfigError if it is none, or wants code of its own."""
    file = path if path.suffix == ".json" else path / "config.json"
    try:
        said = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise ConfigError(
            f"model.hf: {file} cannot be read: {(error.strerror or str(error)).lower()}; give a folder that "
            "`transformers` saved, or a config.json"
        ) from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"model.hf: {file} is no config.json: {error}") from None
    unsafe = next((key for key in _UNSAFE if _has(said, key)), None)
    if unsafe:
        why = "names code of its own" if unsafe == "auto_map" else "is quantized"
        raise ConfigError(
            f"model.hf: {file} {why} ({unsafe}), which Atoll does not train; choose another model"
        )
    transformers = _transformers()
    model_type = said.get("model_type")
    kind: Any
    try:  # its `get` does not know what is not imported yet
        kind = transformers.CONFIG_MAPPING[model_type]
    except KeyError:
        kind = None
    if kind not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(
            f"model.hf: {file} has model_type {model_type!r}, which is no causal language model of "
            f"transformers {transformers.__version__}"
        )
    try:
        return kind.from_dict(
            {key: value for key, value in said.items() if key not in ("torch_dtype", "dtype")}
        )
    except Exception as error:
        raise ConfigError(f"model.hf: {file} does not describe a {kind.model_type}: {_line(error)}") from None


def open_causal_lm(path: Path, *, seed: int) -> CausalLM:
    """A folder's model with its weights; or that of a config.json, with start weights made of the run's `seed`.

    In fp32, on the CPU. Blocks. Raises ConfigError, naming what does not fit.
    """
    config = read_hub_config(path)
    model = _seeded(config, seed) if path.suffix == ".json" else _saved(config, path)
    if unsynchronised := [name for name in model.state_dict() if name in dict(model.named_buffers())]:
        raise ConfigError(
            f"model.hf: {config.model_type} keeps state that is not trained ({unsynchronised[0]}), which peers would "
            "not have in common; choose another model"
        )
    return model


def config_digest(config: HubConfig) -> str:
    """What peers compare of a config: all that is not a default, whatever it was saved with."""
    said = {key: value for key, value in config.to_diff_dict().items() if key not in _SAYS_NOTHING}
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()


def plain_config(model: CausalLM) -> dict[str, Any]:
    """The `config.json` with which `transformers` loads this model's weights."""
    said = json.loads(json.dumps(model.config.to_dict(), default=str))
    kind = _transformers().MODEL_FOR_CAUSAL_LM_MAPPING[type(model.config)]
    return {**{k: v for k, v in said.items() if k not in _SAYS_NOTHING}, "architectures": [kind.__name__]}


def names_elsewhere(model: nn.Module) -> dict[str, str]:
    """For each tied parameter: its first name by alphabet, which is Atoll's, and the one `transformers` saves."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {min(each): each[0] for each in names.values() if min(each) != each[0]}


def max_tokens(config: HubConfig) -> int | None:
    """The longest sequence that the model takes, if it says."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def vocab_size(config: HubConfig) -> int:
    return int(config.get_text_config().vocab_size)


def _saved(config: HubConfig, folder: Path) -> CausalLM:
    if not any((folder / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json")):
        raise ConfigError(
            f"model.hf: {folder} has no model.safetensors, and only safetensors are taken (a .bin is a pickle); "
            f"to start from random weights give {folder / 'config.json'}"
        )
    if (folder / "adapter_config.json").exists():
        raise ConfigError(f"model.hf: {folder} holds adapters; merge them into their model first")
    transformers = _transformers()
    kind = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    try:
        with _quiet(transformers.utils.logging):
            model, said = kind.from_pretrained(
                folder,
                config=config,
                dtype=torch.float32,
                attn_implementation=_attention(kind),
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,  # told in `said`, by name
                output_loading_info=True,
            )
    except Exception as error:
        raise ConfigError(f"model.hf: the weights in {folder} cannot be used: {_line(error)}") from None
    for what, names in (
        ("missing", said["missing_keys"]),
        ("not the model's", said["unexpected_keys"]),
        ("of another shape", said["mismatched_keys"]),
    ):
        if names:
            first = min(str(each[0] if isinstance(each, tuple) else each) for each in names)
            raise ConfigError(
                f"model.hf: of the weights in {folder} {len(names)} are {what}, the first {first}"
            )
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise ConfigError(f"model.hf: {folder}: {name} is not finite")
    return _opened(model)


@torch.no_grad()
def _seeded(config: HubConfig, seed: int) -> CausalLM:
    other = _constants(_made(config, 1))
    model = _made(config, 0)
    text = config.get_text_config()
    std = float(getattr(text, "initializer_range", STD))
    residual_std = std / math.sqrt(2 * int(text.num_hidden_layers))
    same = {name for name, digest in _constants(model).items() if other[name] == digest}
    for name, parameter in model.named_parameters():
        if name in same:
            continue
        if parameter.ndim < 2:
            raise ConfigError(
                f"model.hf: {name} of {config.model_type} starts at random and is no matrix, for which Atoll has no "
                "rule; start from a folder with weights"
            )
        chosen = residual_std if name.endswith(RESIDUAL_WRITERS) else std
        values = start_values(name, parameter.numel(), seed=seed, std=chosen)
        parameter.copy_(torch.from_numpy(values).view(parameter.shape))
    return _opened(model)


def _made(config: HubConfig, torch_seed: int) -> nn.Module:
    """As the library makes it, without touching the generators that training uses."""
    kind = _transformers().MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch_seed)
        try:
            return kind._from_config(config, dtype=torch.float32, attn_implementation=_attention(kind))
        except Exception as error:
            raise ConfigError(f"model.hf: {config.model_type} cannot be built: {_line(error)}") from None


def _constants(model: nn.Module) -> dict[str, str]:
    return {name: weight_digest(parameter) for name, parameter in model.named_parameters()}


def _opened(model: nn.Module) -> CausalLM:
    model.__class__ = _with_loss(type(model))
    return cast(CausalLM, model)


@contextmanager
def _quiet(logging: Any) -> Generator[None]:
    """No table and no progress bar of the library's: what is wrong is told in a line of ours."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _attention(kind: Any) -> str:
    """Said outright: a config could name a kernel to be fetched."""
    return "sdpa" if getattr(kind, "_supports_sdpa", False) else "eager"


def _has(said: object, key: str) -> bool:
    """At any depth, and not null."""
    if isinstance(said, dict):
        return said.get(key) is not None or any(_has(each, key) for each in said.values())
    return isinstance(said, list) and any(_has(each, key) for each in said)


def _line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError:
        raise ConfigError(
            "model.hf needs the library transformers, which is not installed: pip install 'atoll-train[hf]'"
        ) from None
