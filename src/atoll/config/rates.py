"""Rates as people write them, `200 Mbit/s` or `25 MB/s`, as bytes per second; prefixes are decimal."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

_PREFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kmg]?)(bit|b)(?:/s|ps)", re.IGNORECASE)


def parse_rate(text: str) -> int:
    """Bytes per second; 0 for "". A small b alone could mean either and is refused.

    Raises ValueError with what to write instead.
    """
    if not text.strip():
        return 0
    match = _RATE.fullmatch(text.strip())
    if match is None or match[3] == "b":
        raise ValueError(f'{text!r} is no rate: write it as "200 Mbit/s" or "25 MB/s"')
    number, prefix, unit = match[1], match[2].lower(), match[3]
    bytes_per_s = round(float(number) * _PREFIXES[prefix] / (1 if unit == "B" else 8))
    if bytes_per_s < 1:
        raise ValueError(f'{text!r} is below one byte per second; leave it empty for "no limit"')
    return bytes_per_s


def _checked(text: str) -> str:
    parse_rate(text)
    return text


Rate = Annotated[str, AfterValidator(_checked)]
"""A setting that is a rate as people write it, kept as they wrote it; "" for none."""
