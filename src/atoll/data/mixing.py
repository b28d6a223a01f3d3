"""Several prepared corpora as one, by weight: a pure function from the corpora, their weights and the seed.

An epoch is as long as the corpus needs that is the longest for its weight: it is read once, every other one as often
as its weight asks for: whole passes, and for the rest a part of its documents that the seed chooses. What repeats is an
index, not tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from atoll.data.corpus import Indices
from atoll.data.gathered import Gathered, Store
from atoll.data.shards import ShardCorpus, Shards
from atoll.data.tokenizer import Tokens
from atoll.errors import ConfigError
from atoll.shuffle import shuffled

_CHOICE = 2  # what this shuffle orders; 0 and 1 are those of data/slots.py


@dataclass(frozen=True, slots=True)
class Share:
    """What one corpus gives to an epoch: `tokens` with repeats, `passes` times its own."""

    name: str
    weight: float
    tokens: int
    passes: float


class _Stack:
    """Stores one after the other."""

    def __init__(self, stores: Sequence[Store], sizes: Sequence[int]) -> None:
        self._stores = list(stores)
        self.firsts = [0, *np.cumsum(sizes).tolist()]

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._stores[0].dtype

    def read(self, offset: int, out: Tokens) -> None:
        which = int(np.searchsorted(self.firsts, offset, side="right")) - 1
        self._stores[which].read(offset - self.firsts[which], out)


def mix(parts: Sequence[Shards], weights: Sequence[float], seed: int) -> tuple[ShardCorpus, list[Share]]:
    """All of `parts` as one corpus; without weights each document once. Raises ConfigError for parts that do
    not fit."""
    if weights and len(weights) != len(parts):
        raise ConfigError(
            f"data.weights has {len(weights)} numbers and data.shards {len(parts)} entries; give one each, or none"
        )
    first = parts[0].manifest
    for part in parts[1:]:
        theirs = part.manifest
        if (theirs.tokenizer, theirs.item_bytes) != (first.tokenizer, first.item_bytes):
            raise ConfigError(
                f"{parts[0].name} and {part.name} were prepared with two tokenizers, {first.tokenizer.name} and "
                f"{theirs.tokenizer.name}; prepare them with one"
            )
    if len(parts) == 1:
        return parts[0].corpus(), [Share(parts[0].name, 1.0, first.num_tokens, 1.0)]
    sizes = [part.manifest.num_tokens for part in parts]
    total = sum(weights) if weights else float(sum(sizes))
    shares = [weight / total for weight in weights] if weights else [size / total for size in sizes]
    epoch = max(size / share for size, share in zip(sizes, shares, strict=True))
    stack = _Stack(parts, sizes)
    at, lengths, keys, said = [], [], [], []
    for i, (part, share) in enumerate(zip(parts, shares, strict=True)):
        own_lengths, own_keys = part.index()
        chosen = _chosen(own_lengths, epoch * share, seed, i)
        own_at = np.cumsum(own_lengths) - own_lengths + stack.firsts[i]
        at.append(own_at[chosen])
        lengths.append(own_lengths[chosen])
        keys.append(own_keys[chosen])
        tokens = int(own_lengths[chosen].sum())
        said.append(Share(part.name, share, tokens, tokens / sizes[i]))
    all_lengths = np.concatenate(lengths)
    gathered = Gathered(stack, first.tokenizer.separator_id, np.concatenate(at), all_lengths)
    digests = [f"{part.manifest.digest} {share!r}" for part, share in zip(parts, shares, strict=True)]
    digest = hashlib.sha256("\n".join(["atoll mix 1", *digests]).encode()).hexdigest()
    empty = sum(part.manifest.empty_documents for part in parts)
    return ShardCorpus.of(gathered, all_lengths, np.concatenate(keys), digest, empty), said


def _chosen(lengths: Indices, wanted: float, seed: int, which: int) -> Indices:
    """Documents whose tokens come to about `wanted`: whole passes in order, then some that the seed chooses."""
    size = int(lengths.sum())
    passes = int(wanted / size + 1e-9)
    everything = np.arange(len(lengths))
    rest = wanted - passes * size
    order = shuffled(len(lengths), seed, _CHOICE, which)
    some = order[: int(np.searchsorted(np.cumsum(lengths[order]), rest, side="right"))]
    return np.concatenate([*[everything] * passes, np.sort(some)])
