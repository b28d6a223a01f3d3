"""How much memory each rank of a peer needs, and how many bytes a round moves: from a RunConfig, without any weights.

`atoll plan` prints it; `train/build.py` refuses by it what cannot fit. What each line is made of is `plan.memory`'s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from atoll.codecs.views import is_plain
from atoll.config.schema import RunConfig
from atoll.diloco.exchange import Shelf
from atoll.errors import ConfigError
from atoll.plan.grid import Grid
from atoll.plan.memory import (
    VALUE_BYTES,
    Computing,
    Item,
    LlamaShape,
    activation_bytes,
    copy_items,
    gathered_items,
    inner_state_bytes,
    muon_items,
    outer_items,
    own_part_bytes,
    total_bytes,
    training_items,
)
from atoll.plan.planner import choose
from atoll.plan.routes import routing
from atoll.plan.traffic import Traffic, traffic_by_route
from atoll.recovery.donor import LOG_ROOM_BYTES
from atoll.recovery.staging import SLACK_BYTES, staged_bytes
from atoll.state.feedback import chosen_beta
from atoll.state.layout import Layout
from atoll.state.own_rows import BLOCK
from atoll.state.ownership import sharded_ranges
from atoll.train.evaluate import EVAL_MICRO_BATCH
from atoll.train.llama import LlamaConfig
from atoll.train.llama_layout import EMBEDDING, Weights, hidden_matrices, llama_weights
from atoll.train.models import llama_config
from atoll.values import LinkRate, PlanChoice, PlanRequest, RankInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSizes:
    """What one rank needs, on its device and on the host, and there for a moment only (`passing`): while the model is
    made, and as the run ends."""

    rank: int
    elements: int
    device: tuple[Item, ...]
    host: tuple[Item, ...]
    passing: tuple[Item, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSizes:
    """A peer's: its largest rank, its staging folder, which all its ranks share, and what a round moves by the plan:
    `moved` for each member, all ranks together. `staged_bytes` of staging have to be there; the update log may be
    shorter."""

    parameters: int
    trained: int
    num_ranks: int
    largest: RankSizes
    staging: tuple[Item, ...]
    staged_bytes: int
    on_cpu: bool
    wire_bytes: int
    choice: PlanChoice
    moved: dict[str, Traffic]


def rank_grid(layout: Layout, rank: int, num_ranks: int) -> Grid:
    """The grid of what one rank owns: blocks begin anew at each of its slices. Of members with other numbers of ranks
    there would be a few more."""
    slices = (sharded_ranges([each.shape], rank, num_ranks) for each in layout.parameters)
    return Grid.of([own.stop - own.start for ranges in slices for own in ranges])


def peer_sizes(
    config: RunConfig,
    *,
    num_ranks: int = 1,
    members: Sequence[str] = (),
    links: Sequence[LinkRate] = (),
) -> PeerSizes:
    """A peer of `num_ranks` in a run of `members` (default: as many as the run begins with), by what is known of the
    links between them. Raises ValueError if the model has no rows for so many ranks, ConfigError if it is not the
    built-in one."""
    if config.model.hf:
        raise ConfigError(
            f"model.hf = {config.model.hf!r}: what that model takes is not known before it is built; sizes are told of "
            "the built-in model"
        )
    section = config.model
    llama = llama_config(section)
    weights = llama_weights(llama, lora_rank=section.lora_rank, lora_targets=section.lora_targets)
    layout, codec = weights.trained, config.outer.codec
    grids = [rank_grid(layout, rank, num_ranks) for rank in range(num_ranks)]
    if not all(grid.numel for grid in grids):
        empty = next(rank for rank, grid in enumerate(grids) if not grid.numel)
        raise ValueError(f"rank {empty} of {num_ranks} would hold nothing: the model has too few rows")
    names = tuple(sorted(members)) or tuple(f"peer-{n:04d}" for n in range(config.membership.start_peers))
    wire_bytes = sum(grid.wire_bytes(codec) for grid in grids)
    choice = _planned(config, names, wire_bytes, links)
    by_rank = _traffic(choice, names, layout, num_ranks, codec)
    moved = {name: sum((each[name] for each in by_rank), Traffic()) for name in names}
    largest = max(range(num_ranks), key=lambda rank: (grids[rank].numel, -rank))
    held_bytes = max(each.held_bytes for each in by_rank[largest].values())
    staging, staged = _staging(config, layout, num_ranks, wire_bytes)
    return PeerSizes(
        parameters=weights.numel,
        trained=layout.numel,
        num_ranks=num_ranks,
        staging=staging,
        staged_bytes=staged,
        largest=_rank_sizes(config, llama, weights, largest, num_ranks, grids[largest], held_bytes),
        on_cpu=config.local.device == "cpu",
        wire_bytes=wire_bytes,
        choice=choice,
        moved=moved,
    )


def _traffic(
    choice: PlanChoice, names: Sequence[str], layout: Layout, num_ranks: int, codec: str
) -> list[dict[str, Traffic]]:
    """Of each rank. All members are cut alike, so that each has a route of its own, and one member's tell them all."""
    shapes = [each.shape for each in layout.parameters]
    ranks = tuple(RankInfo("", 0, sharded_ranges(shapes, rank, num_ranks)) for rank in range(num_ranks))
    found = routing(("",), {"": ranks}, Grid.of(layout.sizes))
    by_route = traffic_by_route(
        choice.lanes, names, found.grid, codec, chunk_bytes=choice.chunk_bytes, routes=found.cuts
    )
    return [by_route[found.routes.index((rank,))] for rank in range(num_ranks)]


def _planned(
    config: RunConfig, names: tuple[str, ...], wire_bytes: int, links: Sequence[LinkRate]
) -> PlanChoice:
    net = config.net
    return choose(
        PlanRequest(
            members=names,
            contributors=names,
            wire_bytes=wire_bytes,
            codec=config.outer.codec,
            links=tuple(links),
            topology=net.topology,
            connections=0 if net.connections == "auto" else net.connections,
        )
    )


def _rank_sizes(
    config: RunConfig,
    llama: LlamaConfig,
    weights: Weights,
    rank: int,
    num_ranks: int,
    grid: Grid,
    held_bytes: int,
) -> RankSizes:
    codec, elements, local = config.outer.codec, grid.numel, config.local
    on_cpu, several = local.device == "cpu", num_ranks > 1
    bf16 = local.param_dtype == "bf16"
    part = -(-config.inner.batch_size // num_ranks)
    frozen = rank_grid(weights.frozen, rank, num_ranks).numel
    resting = training_items(
        elements,
        _inner_state_bytes(config, weights.trained, rank, num_ranks),
        frozen=frozen,
        copies=bf16 and not several,  # of several ranks FSDP gathers them
        accumulates=0 < local.micro_batch < part,
    )
    device: list[Item] = []
    host: list[Item] = []
    (host if several and local.cpu_offload and not on_cpu else device).extend(resting)
    if several:
        device += gathered_items(
            weights.groups(), weights.groups(trained=True), half=bf16, reshards=local.reshard_after_forward
        )
    matrices = [each.shape for each in hidden_matrices(weights.trained)]
    if config.inner.optimizer == "muon" and matrices:
        rows, columns = max(matrices, key=math.prod)
        device += muon_items(rows, columns, num_ranks)
    if local.autocast and not bf16:
        device.append(Item("matrices cast by autocast", 2 * _cast(weights), estimate=True))
    device.append(Item("activations", _activations(config, llama, part), estimate=True))
    if local.device.startswith("cuda") and not (several and local.cpu_offload):
        host += copy_items(BLOCK)
    host += outer_items(
        elements,
        grid.wire_bytes(codec),
        held_bytes,
        plain=is_plain(codec),  # where all are cut alike, a rank's vector is in the order of the wire
        feedback=_has_feedback(config),
    )
    if config.inner.joiner == "donor" and not several:
        inner_bytes = _inner_state_bytes(config, weights.trained, rank, num_ranks)
        host.append(Item("inner optimizer on its way to a joiner", inner_bytes))
    return RankSizes(
        rank=rank,
        elements=elements,
        device=tuple(device),
        host=tuple(host),
        passing=_whole_items(config, weights, rank) if several or not on_cpu else (),
    )


def _whole_items(config: RunConfig, weights: Weights, rank: int) -> tuple[Item, ...]:
    """All of the model in host memory, where it is not there otherwise."""
    items = []
    if config.model.lora_rank:
        items.append(Item("the whole model, as it is made", VALUE_BYTES * weights.frozen.numel))
    if config.local.save_model and rank == 0:
        items.append(Item("all that was trained, as it is saved", VALUE_BYTES * weights.trained.numel))
    return tuple(items)


def _staging(
    config: RunConfig, layout: Layout, num_ranks: int, wire_bytes: int
) -> tuple[tuple[Item, ...], int]:
    """What is staged, and how many bytes of it have to have room."""
    keep_bytes = Shelf().keep_bytes
    gives = config.inner.joiner == "donor" and num_ranks == 1
    given = _inner_state_bytes(config, layout) if gives else 0
    own_bytes = own_part_bytes(layout.numel, feedback=_has_feedback(config))  # as it is reserved
    items = [
        Item("two slots of anchor and momentum", staged_bytes(layout.numel, given)),
        Item("a slot of the own part", own_bytes + SLACK_BYTES),
    ]
    if num_ranks > 1:
        items.append(Item("an update, put together by the ranks", wire_bytes))
    needed_bytes = total_bytes(items) + min(keep_bytes, LOG_ROOM_BYTES)
    items.append(Item("update log, at most", keep_bytes // wire_bytes * wire_bytes))
    return tuple(items), needed_bytes


def _has_feedback(config: RunConfig) -> bool:
    return chosen_beta(config.outer.codec, config.outer.error_feedback) > 0


def _inner_state_bytes(config: RunConfig, layout: Layout, rank: int = 0, num_ranks: int = 1) -> int:
    """What one rank has of the inner optimizer's state."""
    muons = hidden_matrices(layout) if config.inner.optimizer == "muon" else []
    own, of_muon = (rank_grid(each, rank, num_ranks).numel for each in (layout, Layout(tuple(muons))))
    return inner_state_bytes(own, of_muon)


def _cast(weights: Weights) -> int:
    """The elements of all matrices that are multiplied."""
    found = [*weights.trained.parameters, *weights.frozen.parameters]
    return sum(math.prod(p.shape) for p in found if len(p.shape) == 2 and EMBEDDING not in p.name)


def _activations(config: RunConfig, llama: LlamaConfig, part: int) -> int:
    """Of a training step of `part` of a batch, in sequences, or of an evaluation where that has more."""
    shape = LlamaShape(
        vocab_size=llama.vocab_size,
        dim=llama.dim,
        num_layers=llama.num_layers,
        kv_dim=llama.num_kv_heads * llama.head_dim,
        ffn_dim=llama.ffn_dim,
    )
    local = config.local
    sequences = min(local.micro_batch or part, part)
    how = Computing(
        autocast=local.autocast,
        bf16=local.param_dtype == "bf16",
        again_every=local.checkpoint_every if local.activation_checkpointing != "none" else 0,
        selective=local.activation_checkpointing == "selective",
        chunk_tokens=local.loss_chunk_tokens,
    )
    training = activation_bytes(shape, sequences * config.data.seq_len, how)
    evaluated = min(EVAL_MICRO_BATCH, config.eval.sequences) * config.data.seq_len
    return max(training, 8 * llama.vocab_size * min(local.loss_chunk_tokens or evaluated, evaluated))
