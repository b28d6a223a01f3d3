"""How many bytes a rank needs, and what for. Pure arithmetic over sizes: nothing is allocated or looked up here.

Vectors of the model are fp32. `elements` are those that the rank owns (its slices of all parameters), `wire_bytes` is
its part of an encoded update. What is marked as an estimate depends on what torch makes of it; everything else is
counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

VALUE_BYTES = 4


@dataclass(frozen=True, slots=True)
class Item:
    """One line of a bill."""

    name: str
    num_bytes: int
    estimate: bool = False


def total_bytes(items: Iterable[Item], *, estimates: bool = True) -> int:
    """The sum, with or without what is only estimated."""
    return sum(item.num_bytes for item in items if estimates or not item.estimate)


def training_items(elements: int) -> tuple[Item, ...]:
    """What plain training with AdamW holds of the rank's own elements, on the device."""
    vector = VALUE_BYTES * elements
    return (
        Item("parameters", vector),
        Item("gradients", vector),
        Item("inner optimizer, two moments", 2 * vector),
    )


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
        items += [Item("encoded update", wire_bytes), Item("decoded mean", vector)]
    if feedback:
        items.append(Item("residual of error feedback", vector))
    return tuple(items)


def own_part_bytes(elements: int, *, feedback: bool) -> int:
    """About what a save has of a rank's own: AdamW's two moments, and a residual if there is one."""
    return (3 if feedback else 2) * VALUE_BYTES * elements


def copy_items(largest: int) -> tuple[Item, ...]:
    """What a round takes on a device with memory of its own, for a moment: the slice of one parameter after the other
    as the anchor has it, and the difference. `largest` is the most elements of one."""
    return (Item("a round's copy of one parameter", 2 * VALUE_BYTES * largest),)


def gathered_items(groups: Iterable[int], num_ranks: int) -> tuple[Item, ...]:
    """What FSDP2 gathers, where a model is sharded: `groups` are the elements of each group that is gathered as one,
    the root's own first. The root's stay gathered through a step; of the others one is used while the next one comes,
    and a gradient is whole until it is scattered."""
    first, *others = groups
    if num_ranks == 1:
        return ()
    most = max(others, default=0)
    return (
        Item("gathered parameters", VALUE_BYTES * (first + 2 * most), estimate=True),
        Item("gradients before they are scattered", VALUE_BYTES * max(first, most), estimate=True),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """As much of the built-in model as activations depend on."""

    vocab_size: int
    dim: int
    num_layers: int
    kv_dim: int
    ffn_dim: int


def activation_bytes(shape: LlamaShape, tokens: int, *, half: bool) -> int:
    """What the backward pass of `tokens` at once reads again, with attention that keeps no matrix of scores, and what
    the loss is made of: logits, their fp32 form if they are not, and their logarithms.

    `half`: matrices are multiplied in bf16 (autocast).
    """
    number = 2 if half else 4
    # In fp32 whatever autocast does: the inputs of both norms, and one of them normalised. In the products' type: the
    # outputs of both, q, k, v, the attention's result and its copy with the heads side by side, and four vectors of the
    # feed-forward's width.
    layer = 4 * 3 * shape.dim + number * (5 * shape.dim + 2 * shape.kv_dim + 4 * shape.ffn_dim)
    logits = shape.vocab_size * ((number + 4 + 4) if half else (4 + 4))
    return tokens * (shape.num_layers * layer + 4 * 2 * shape.dim + logits)
