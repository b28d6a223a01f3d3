"""How many bytes a rank needs, and what for. Pure arithmetic over sizes: nothing is allocated or looked up here.

Vectors of the model are fp32. `elements` are those that the rank owns (its slices of all parameters), `wire_bytes` is
its part of an encoded update. What is marked as an estimate depends on what torch makes of it; everything else is
counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

VALUE_BYTES = 4
_HALF_BYTES = 2


@dataclass(frozen=True, slots=True)
class Item:
    """One line of a bill."""

    name: str
    num_bytes: int
    estimate: bool = False


def total_bytes(items: Iterable[Item], *, estimates: bool = True) -> int:
    """The sum, with or without what is only estimated."""
    return sum(item.num_bytes for item in items if estimates or not item.estimate)


def training_items(
    elements: int, inner_bytes: int, *, frozen: int = 0, copies: bool = False, accumulates: bool = False
) -> tuple[Item, ...]:
    """What training holds of the rank's own elements, where the weights are. `inner_bytes` is the inner optimizer's
    state. `frozen` elements lie there in fp32 to begin with. `copies`: the model computes with bf16 copies, whose
    gradients go to the masters after each backward pass; where a step has several (`accumulates`) both are there.
    """
    vector = VALUE_BYTES * elements
    items = [
        Item("parameters", vector),
        Item("gradients", vector),
        Item("inner optimizer", inner_bytes),
    ]
    if frozen:
        items.append(Item("frozen weights", VALUE_BYTES * frozen))
    if copies:
        items.append(Item("bf16 copies", _HALF_BYTES * elements))
        if accumulates:
            items.append(Item("gradients of the copies", _HALF_BYTES * elements))
    return tuple(items)


def inner_state_bytes(elements: int, of_muon: int = 0) -> int:
    """AdamW keeps two moments of each of `elements`; Muon one of those that are its."""
    return VALUE_BYTES * (2 * elements - of_muon)


def muon_items(rows: int, columns: int, num_ranks: int) -> tuple[Item, ...]:
    """What a step of Muon takes for the largest matrix: the direction in fp32, whole on every rank; and in bf16 the
    matrix, the next one and a product of it with each row of a side."""
    numel, side = rows * columns, min(rows, columns)
    whole = VALUE_BYTES * numel * (2 if num_ranks > 1 else 1)
    return (Item("a step of Muon", whole + _HALF_BYTES * (3 * numel + 3 * side * side), estimate=True),)


def outer_items(
    elements: int, wire_bytes: int, held_bytes: int, *, plain: bool, feedback: bool
) -> tuple[Item, ...]:
    """What rounds hold on the host, from the first one on to the end of the run: they allocate nothing later.

    `held_bytes` is for what others send to be added up (`plan.traffic`). `plain`: the codec's bytes are the values'
    own, so the pseudo-gradient is what is sent, and the result is the mean.
    """
    vector = VALUE_BYTES * elements
    items = [
        Item("anchor", vector),
        Item("outer momentum", vector),
        Item("pseudo-gradient", vector),
        Item("result", wire_bytes),
        Item("others' updates", held_bytes),
    ]
    if not plain:
        items.append(Item("encoded update", wire_bytes))
    if feedback:
        items.append(Item("residual of error feedback", vector))
        if not plain:  # else it is decoded to where the pseudo-gradient was
            items.append(Item("decoded mean", vector))
    return tuple(items)


def copy_items(block: int) -> tuple[Item, ...]:
    """Two pinned buffers between a GPU and host memory, each for `block` elements of any dtype."""
    return (Item("pinned buffers, to and from the GPU", 2 * 8 * block),)


def own_part_bytes(elements: int, *, feedback: bool) -> int:
    """About what a save has of a rank's own: AdamW's two moments, and a residual if there is one."""
    return inner_state_bytes(elements) + (VALUE_BYTES * elements if feedback else 0)


def gathered_items(
    groups: Sequence[int], trained: Sequence[int], *, half: bool, reshards: bool
) -> tuple[Item, ...]:
    """What FSDP2 gathers, where a model is sharded: `groups` are the elements of each group that is gathered as one,
    the root's own first, and `trained` those of each that get gradients. The root's stay gathered through a step; of
    the others one is used while the next one comes (not `reshards`: all stay until the backward pass), and a gradient
    is whole until it is scattered, in fp32. `half`: gathered in bf16."""
    number = _HALF_BYTES if half else VALUE_BYTES
    first, *others = groups
    there = first + (2 * max(others, default=0) if reshards else sum(others))
    scattered = max(trained, default=0)
    return (
        Item("gathered parameters", number * there, estimate=True),
        Item("gradients before they are scattered", (number + VALUE_BYTES) * scattered, estimate=True),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """As much of the built-in model as activations depend on."""

    vocab_size: int
    dim: int
    num_layers: int
    kv_dim: int
    ffn_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Computing:
    """How a model computes: `autocast` multiplies matrices in bf16, with `bf16` weights everything is. Of every
    `again_every`-th layer (0: of none) activations are computed again, but for matrix products where `selective`. The
    loss makes logits of `chunk_tokens` at once; 0: of all."""

    autocast: bool = False
    bf16: bool = False
    again_every: int = 0
    selective: bool = False
    chunk_tokens: int = 0


def activation_bytes(shape: LlamaShape, tokens: int, how: Computing = Computing()) -> int:
    """What the backward pass of `tokens` at once reads again, with attention that keeps no matrix of scores, and what
    the loss is made of: logits, their fp32 form if they are not, and their logarithms."""
    half = how.autocast or how.bf16
    number = _HALF_BYTES if half else VALUE_BYTES
    stream = _HALF_BYTES if how.bf16 else VALUE_BYTES
    dim, kv_dim, ffn_dim = shape.dim, shape.kv_dim, shape.ffn_dim
    # In fp32 whatever else is: the inputs of both norms, and what they are normalised to. In the products' type: what
    # linear layers read (autocast makes a copy for each of those that read the same), q, k, v, the attention's result,
    # and four vectors of the feed-forward's width.
    in_fp32, read = (4, 7 if how.autocast else 4) if half else (3, 5)
    layer = VALUE_BYTES * in_fp32 * dim + number * (read * dim + 2 * kv_dim + 4 * ffn_dim)
    again = shape.num_layers // how.again_every if how.again_every else 0
    kept = stream * dim
    if how.selective:  # q, the attention's result and two results on the stream; k and v; gate and up
        kept += number * (4 * dim + 2 * kv_dim + 2 * ffn_dim)
    last_norm = VALUE_BYTES * (2 if half else 3) * dim + (number * dim if half else 0)
    layers = (shape.num_layers - again) * layer + again * kept + (layer if again else 0)
    logits = shape.vocab_size * ((number + 4 + 4) if half else (4 + 4))
    return tokens * (layers + last_norm) + min(how.chunk_tokens or tokens, tokens) * logits
