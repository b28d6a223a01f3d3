"""How much memory each rank of a peer needs, and how many bytes a round moves: from a RunConfig, without any weights.

`atoll plan` prints it; `train/build.py` refuses by it what cannot fit. What each line is made of is `plan.memory`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from atoll.codecs.views import is_plain
from atoll.config.schema import RunConfig
from atoll.diloco.exchange import Shelf
from atoll.plan.grid import Grid
from atoll.plan.memory import (
    VALUE_BYTES,
    Item,
    LlamaShape,
    activation_bytes,
    copy_items,
    gathered_items,
    outer_items,
    own_part_bytes,
    total_bytes,
    training_items,
)
from atoll.plan.planner import choose
from atoll.plan.traffic import Traffic, traffic
from atoll.recovery.donor import LOG_ROOM_BYTES
from atoll.recovery.staging import SLACK_BYTES, staged_bytes
from atoll.state.feedback import chosen_beta
from atoll.state.layout import Layout
from atoll.state.ownership import sharded_ranges
from atoll.train.evaluate import EVAL_MICRO_BATCH
from atoll.train.llama import LlamaConfig
from atoll.values import LinkRate, ParameterInfo, PlanChoice, PlanRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSizes:
    """What one rank needs, on its device and on the host."""

    rank: int
    elements: int
    wire_bytes: int
    device: tuple[Item, ...]
    host: tuple[Item, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSizes:
    """A peer's: its largest rank, its staging folder, which all its ranks share, and what a round moves by the plan:
    `moved` for each member, all ranks together. `staged_bytes` of staging have to be there; the update log may be
    shorter."""

    parameters: int
    num_ranks: int
    largest: RankSizes
    staging: tuple[Item, ...]
    staged_bytes: int
    on_cpu: bool
    wire_bytes: int
    choice: PlanChoice
    moved: dict[str, Traffic]


def llama_layout(config: LlamaConfig) -> Layout:
    """Names and shapes as `ModelTensors` finds them in a `Llama`: tied weights once, by the first of their names. Not
    asked of a model on the meta device: that takes torch a second and a half to begin with."""
    dim, kv_dim = config.dim, config.num_kv_heads * config.head_dim
    of_layer = {
        "input_layernorm": (dim,),
        "post_attention_layernorm": (dim,),
        "self_attn.q_proj": (config.num_heads * config.head_dim, dim),
        "self_attn.k_proj": (kv_dim, dim),
        "self_attn.v_proj": (kv_dim, dim),
        "self_attn.o_proj": (dim, config.num_heads * config.head_dim),
        "mlp.gate_proj": (config.ffn_dim, dim),
        "mlp.up_proj": (config.ffn_dim, dim),
        "mlp.down_proj": (dim, config.ffn_dim),
    }
    shapes: dict[str, tuple[int, ...]] = {"lm_head": (config.vocab_size, dim), "model.norm": (dim,)}
    if not config.tie_embeddings:
        shapes["model.embed_tokens"] = (config.vocab_size, dim)
    for layer in range(config.num_layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    return Layout.of(
        [ParameterInfo(name=f"{name}.weight", shape=shape, dtype="float32") for name, shape in shapes.items()]
    )


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
    topology: str = "",
) -> PeerSizes:
    """A peer of `num_ranks` in a run of `members` (default: as many as the run begins with), by what is known of the
    links between them. Raises ValueError if the model has no rows for so many ranks."""
    section = config.model
    llama = LlamaConfig(**section.model_dump(include=set(LlamaConfig.__slots__)))
    layout, codec = llama_layout(llama), config.outer.codec
    grids = [rank_grid(layout, rank, num_ranks) for rank in range(num_ranks)]
    if not all(grid.numel for grid in grids):
        empty = next(rank for rank, grid in enumerate(grids) if not grid.numel)
        raise ValueError(f"rank {empty} of {num_ranks} would hold nothing: the model has too few rows")
    names = tuple(sorted(members)) or tuple(f"peer-{n:04d}" for n in range(config.membership.start_peers))
    wire_bytes = sum(grid.wire_bytes(codec) for grid in grids)
    choice = _planned(config, names, wire_bytes, links, topology)
    by_rank = [traffic(choice.lanes, names, grid, codec, chunk_bytes=choice.chunk_bytes) for grid in grids]
    moved = {name: sum((each[name] for each in by_rank), Traffic()) for name in names}
    largest = max(range(num_ranks), key=lambda rank: (grids[rank].numel, -rank))
    held_bytes = max(each.held_bytes for each in by_rank[largest].values())
    staging, staged = _staging(config, layout.numel, num_ranks, wire_bytes)
    return PeerSizes(
        parameters=layout.numel,
        num_ranks=num_ranks,
        staging=staging,
        staged_bytes=staged,
        largest=_rank_sizes(config, llama, layout, largest, num_ranks, grids[largest], held_bytes),
        on_cpu=config.local.device == "cpu",
        wire_bytes=wire_bytes,
        choice=choice,
        moved=moved,
    )


def _planned(
    config: RunConfig, names: tuple[str, ...], wire_bytes: int, links: Sequence[LinkRate], topology: str
) -> PlanChoice:
    net = config.net
    return choose(
        PlanRequest(
            members=names,
            contributors=names,
            wire_bytes=wire_bytes,
            codec=config.outer.codec,
            links=tuple(links),
            topology=topology or net.topology,
            connections=0 if net.connections == "auto" else net.connections,
        )
    )


def _rank_sizes(
    config: RunConfig,
    llama: LlamaConfig,
    layout: Layout,
    rank: int,
    num_ranks: int,
    grid: Grid,
    held_bytes: int,
) -> RankSizes:
    codec, elements = config.outer.codec, grid.numel
    device = list(training_items(elements))
    device += gathered_items(_groups(layout), num_ranks)
    device.append(Item("activations", _activations(config, llama, num_ranks), estimate=True))
    if config.local.device != "cpu":
        device += copy_items(max(grid.segments))
    host = list(
        outer_items(
            elements,
            grid.wire_bytes(codec),
            held_bytes,
            plain=is_plain(codec) and num_ranks == 1,  # of several ranks the order is that of the wire
            feedback=_has_feedback(config),
        )
    )
    if config.inner.joiner == "donor":
        host.append(Item("inner optimizer on its way to a joiner", _inner_bytes(config, elements)))
    return RankSizes(
        rank=rank,
        elements=elements,
        wire_bytes=grid.wire_bytes(codec),
        device=tuple(device),
        host=tuple(host),
    )


def _staging(
    config: RunConfig, parameters: int, num_ranks: int, wire_bytes: int
) -> tuple[tuple[Item, ...], int]:
    """What is staged, and how many bytes of it have to have room."""
    keep_bytes = Shelf().keep_bytes
    items = [
        Item("two slots of anchor and momentum", staged_bytes(parameters, _inner_bytes(config, parameters))),
        Item(
            "a slot of the own part",
            own_part_bytes(parameters, feedback=_has_feedback(config)) + SLACK_BYTES,
        ),
    ]
    if num_ranks > 1:
        items.append(Item("an update, put together by the ranks", wire_bytes))
    needed_bytes = total_bytes(items) + min(keep_bytes, LOG_ROOM_BYTES)
    items.append(Item("update log, at most", keep_bytes // wire_bytes * wire_bytes))
    return tuple(items), needed_bytes


def _has_feedback(config: RunConfig) -> bool:
    return chosen_beta(config.outer.codec, config.outer.error_feedback) > 0


def _inner_bytes(config: RunConfig, elements: int) -> int:
    """Of an inner state that is staged with each snapshot, for joiners."""
    return 2 * VALUE_BYTES * elements if config.inner.joiner == "donor" else 0


def _groups(layout: Layout) -> list[int]:
    """The elements of what FSDP2 gathers as one: a layer each, and first the root's: embeddings, last norm, head."""
    sizes: dict[str, int] = {"": 0}
    for each, size in zip(layout.parameters, layout.sizes, strict=True):
        _, found, rest = each.name.partition(".layers.")
        layer = rest.partition(".")[0] if found else ""
        sizes[layer] = sizes.get(layer, 0) + size
    return list(sizes.values())


def _activations(config: RunConfig, llama: LlamaConfig, num_ranks: int) -> int:
    """Of a training step of the rank's part of a batch, or of an evaluation where that has more."""
    shape = LlamaShape(
        vocab_size=llama.vocab_size,
        dim=llama.dim,
        num_layers=llama.num_layers,
        kv_dim=llama.num_kv_heads * llama.head_dim,
        ffn_dim=llama.ffn_dim,
    )
    local, half = config.local, config.local.autocast and config.local.device != "cpu"
    part = -(-config.inner.batch_size // num_ranks)
    sequences = min(local.micro_batch or part, part)
    training = activation_bytes(shape, sequences * config.data.seq_len, half=half)
    evaluated = min(EVAL_MICRO_BATCH, config.eval.sequences) * config.data.seq_len
    return max(training, 8 * llama.vocab_size * evaluated)
