"""From a RunConfig to the model that a peer trains, on as many ranks as it has, and to its inner step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from atoll.config.schema import InnerSection, ModelSection, RunConfig
from atoll.errors import ConfigError
from atoll.state.tensors import ModelTensors
from atoll.train.activations import checkpoint_activations
from atoll.train.adamw import make_adamw
from atoll.train.causal import (
    CausalLM,
    max_tokens,
    names_elsewhere,
    open_causal_lm,
    plain_config,
    read_hub_config,
)
from atoll.train.init import initialize
from atoll.train.inner import InnerStep
from atoll.train.llama import Llama, LlamaConfig
from atoll.train.lora import adapters_of, add_adapters
from atoll.train.lr_schedule import LRSchedule
from atoll.train.masters import Masters
from atoll.train.muon import make_muon
from atoll.train.pretrained import load_weights
from atoll.train.ranks import ALONE, Ranks
from atoll.train.sharding import Sharding, gathered, shard

Model = Llama | CausalLM


def build_model(config: RunConfig, *, with_weights: bool = True, mesh: DeviceMesh | None = None) -> Model:
    """The run's model with the run's start weights, on this peer's device. Without them it has any.

    With several ranks in `mesh` each has its rows only: of the built-in model from the beginning, so that no rank ever
    holds all of it; of another one, or one with adapters, when it is made. Collective then. Raises ConfigError.
    """
    prepare_torch(config)
    if mesh is not None and mesh.size() > 1:
        check_ranks(config, mesh.size())
    else:
        mesh = None
    if config.model.hf or config.model.lora_rank:
        return _from_whole(config, with_weights, mesh)
    local = config.local
    model = Llama.on_meta(llama_config(config.model), loss_chunk_tokens=local.loss_chunk_tokens)
    checkpoint_activations(model, local.activation_checkpointing, local.checkpoint_every)
    rests = local.device
    if mesh is not None:
        how = sharding(config)
        shard(model, mesh, how)
        rests = "cpu" if how.cpu_offload else local.device
    model.materialize(rests)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(local.device)
    _set_weights(model, config, with_weights)
    return model


def _from_whole(config: RunConfig, with_weights: bool, mesh: DeviceMesh | None) -> Model:
    """Built on the CPU with all its weights, then moved or cut."""
    section, local = config.model, config.local
    if section.hf:
        model: Model = _hub_model(config)
    else:
        model = Llama(llama_config(section), loss_chunk_tokens=local.loss_chunk_tokens)
        _set_weights(model, config, with_weights)
    if section.lora_rank:
        rank, alpha, targets = section.lora_rank, section.lora_alpha, section.lora_targets
        add_adapters(model, rank=rank, alpha=alpha, targets=targets, seed=config.run.seed)
    checkpoint_activations(model, local.activation_checkpointing, local.checkpoint_every)
    if mesh is None:
        return model.to(local.device)
    how = sharding(config)
    if not how.cpu_offload:
        model.to(local.device)
    shard(model, mesh, how)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(local.device)
    return model


def _set_weights(model: Llama, config: RunConfig, with_weights: bool) -> None:
    if config.model.init_from and with_weights:
        load_weights(model, Path(config.model.init_from))
    else:
        initialize(model, config.run.seed)


def _hub_model(config: RunConfig) -> CausalLM:
    path = Path(config.model.hf)
    longest = max_tokens(read_hub_config(path))
    if longest is not None and config.data.seq_len > longest:
        raise ConfigError(
            f"data.seq_len = {config.data.seq_len} is above the {longest} tokens that the model of {path} takes"
        )
    if config.local.loss_chunk_tokens:
        raise ConfigError("local.loss_chunk_tokens is for the built-in model, not for model.hf; set it to 0")
    return open_causal_lm(path, seed=config.run.seed)


def llama_config(section: ModelSection) -> LlamaConfig:
    return LlamaConfig(**section.model_dump(include=set(LlamaConfig.__slots__)))


def told_of(model: Model, config: RunConfig) -> dict[str, Any]:
    """What a checkpoint says of the model to who reads it later, as `checkpoint.saver.Keeping` has it."""
    is_hub = isinstance(model, CausalLM)
    base = config.model.hf or config.model.init_from
    return {
        "config": plain_config(model) if is_hub else model.config.hf_config(),
        "names": names_elsewhere(model) if is_hub else {},
        "adapters": adapters_of(model, base) if config.model.lora_rank else None,
    }


def check_ranks(config: RunConfig, num_ranks: int) -> None:
    """Raises ConfigError if a peer's batch cannot be shared among so many ranks."""
    if config.inner.batch_size % num_ranks:
        raise ConfigError(
            f"inner.batch_size = {config.inner.batch_size} is not a multiple of this peer's {num_ranks} ranks, which "
            "share it; start as many ranks as divide it, or set another one for the run"
        )


def sharding(config: RunConfig) -> Sharding:
    """How several ranks of this peer hold the model."""
    local = config.local
    return Sharding(
        reshard_after_forward=local.reshard_after_forward,
        cpu_offload=local.cpu_offload,
        param_dtype=torch.bfloat16 if local.param_dtype == "bf16" else None,
    )


def build_inner(model: Model, config: RunConfig, ranks: Ranks = ALONE) -> InnerStep:
    """Raises ConfigError if the ranks cannot share the batch."""
    check_ranks(config, ranks.count)
    section: InnerSection = config.inner
    return InnerStep(
        model,
        _optimizer(model, section),
        lr_schedule(section, config.run.steps),
        clip_norm=section.clip_norm,
        micro_batch=config.local.micro_batch,
        device=config.local.device,
        autocast=config.local.autocast,
        compile=config.local.compile,
        ranks=ranks,
        loss=partial(model.loss, z_loss=section.z_loss) if section.z_loss else None,
    )


def lower_precision(model: Model, tensors: ModelTensors, inner: InnerStep, config: RunConfig) -> None:
    """Let the model compute in bf16, if the peer wishes so; what is trained and synchronised stays fp32. Not before
    peers have compared what is frozen: that is rounded for good. With several ranks FSDP does it (`sharding`)."""
    if config.local.param_dtype == "bf16" and tensors.num_ranks == 1:
        inner.masters = Masters(model)
        tensors.written = inner.weights_changed


def weights_of(model: Model, inner: InnerStep) -> Callable[[], dict[str, Tensor]]:
    """Gathers all that was trained, by name and as precise as it is here, on this peer's rank 0. Collective."""

    def gather() -> dict[str, Tensor]:
        trained = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
        return gathered((name, inner.masters.of(each) if inner.masters else each) for name, each in trained)

    return gather


def lr_schedule(section: InnerSection, total_steps: int) -> LRSchedule:
    return LRSchedule(
        kind=section.schedule,
        peak_lr=section.lr,
        total_steps=total_steps,
        warmup_steps=section.warmup_steps,
        decay_fraction=section.decay_fraction,
        min_lr_ratio=section.min_lr_ratio,
    )


def prepare_torch(config: RunConfig) -> None:
    """Threads, and whether the device is there. Raises ConfigError."""
    if config.local.threads:
        torch.set_num_threads(config.local.threads)
    try:
        torch.empty(0, device=config.local.device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"local.device = {config.local.device!r} can not be used here: {reason}") from None


def _optimizer(model: Model, section: InnerSection) -> torch.optim.Optimizer:
    lr, betas, eps, weight_decay = section.lr, section.betas, section.eps, section.weight_decay
    if section.optimizer == "muon":
        muon_lr = section.muon_lr
        return make_muon(model, lr=lr, muon_lr=muon_lr, betas=betas, eps=eps, weight_decay=weight_decay)
    return make_adamw(model, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
