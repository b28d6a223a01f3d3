"""How long documents are."""

from __future__ import annotations

import numpy as np

from atoll.data.corpus import Indices

_AT = ("0", "0.01", "0.1", "0.25", "0.5", "0.75", "0.9", "0.99", "1")


def length_quantiles(lengths: Indices) -> dict[str, int]:
    """By share of the documents: no document is shorter than "0", none longer than "1"; each is a real length."""
    found = np.quantile(lengths, [float(at) for at in _AT], method="inverted_cdf")
    return dict(zip(_AT, found.astype(int).tolist(), strict=True))
