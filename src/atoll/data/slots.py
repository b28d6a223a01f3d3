"""Slots: the train part cut into a fixed number of pieces, which are leased to peers.

The documents are shuffled once, by the seed, and the sequence is cut between documents into slots of about
equal numbers of tokens. Neither depends on the number of peers. A slot is read from its start to its end,
once an epoch; by whom, and in which order, is decided by the leases (`membership.leases`).

Long documents are shuffled in pieces: a row that read one long file for hundreds of steps would show a peer
little else, and peers would drift apart. Only the first target of a later piece misses what stood before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from atoll.data.corpus import Documents, Indices, TokenArray
from atoll.shuffle import shuffled

_DOCUMENTS = 0  # what a shuffle orders; the slots of an epoch have another number


@dataclass(frozen=True, slots=True, eq=False)
class Slots:
    """Slot `s` is `tokens[starts[s] : starts[s + 1]]`: whole documents or pieces of them; never empty."""

    tokens: TokenArray
    starts: Indices
    seed: int

    @classmethod
    def cut(cls, corpus: Documents, num_slots: int, seed: int, *, piece_tokens: int | None = None) -> Slots:
        """`num_slots` slots of `corpus`, or one for each document where there are fewer documents.

        Documents longer than `piece_tokens` count as several (None: never).
        """
        if piece_tokens is not None:
            corpus = corpus.in_pieces(piece_tokens)
        documents = corpus.select(shuffled(corpus.num_documents, seed, _DOCUMENTS))
        return cls(documents.tokens, _balanced_cuts(documents.starts, num_slots), seed)

    @property
    def count(self) -> int:
        return len(self.starts) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens that one epoch over all slots predicts."""
        return len(self.tokens) - 1


def _balanced_cuts(starts: Indices, num_slots: int) -> Indices:
    """Token offsets of the cuts: the document ends nearest to equal shares, at least a document in each."""
    num_documents = len(starts) - 1
    num_slots = min(num_slots, num_documents)
    slots = np.arange(num_slots + 1, dtype=np.int64)
    ideal = starts[0] + slots * (starts[-1] - starts[0]) // num_slots
    middles = (starts[:-1] + starts[1:] + 1) // 2
    cuts = np.searchsorted(middles, ideal)
    cuts = np.maximum.accumulate(cuts - slots) + slots  # strictly rising: no slot is empty
    cuts = np.clip(cuts, slots, num_documents - num_slots + slots)
    cuts[0], cuts[-1] = 0, num_documents
    return starts[cuts]
