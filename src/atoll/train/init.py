"""Start weights: a function of the run's seed and the parameter's name, with the same bits on every machine.

Peers never send start weights; each makes its own, and the digest at *declare* refuses a peer whose bits
differ. So nothing here may depend on the number of threads, the device, the order in which modules were made,
the processor or the version of a library. `torch.randn` and numpy's `standard_normal` do not promise that:
their streams may change with a release, and logarithms and sines differ in the last bit between processors.
What is promised is the integer stream of numpy's Philox. Each element is the sum of four 16-bit parts of one
Philox word, centred, scaled and rounded to fp32: exact integers and IEEE arithmetic. That is close to a
normal distribution cut off at 3.46 standard deviations.

Matrices get a standard deviation of 0.02; those that write into the residual stream get that over
sqrt(2 num_layers), so that its variance at the start does not grow with depth (GPT-2). Norms start at one.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.train.llama import Llama

STD = 0.02
RESIDUAL_WRITERS = ("o_proj.weight", "down_proj.weight")
PIECE = 1 << 20  # elements made at once, so that a large matrix needs little memory beside itself

_WORDS = 4  # that Philox makes of one counter
_PARTS, _LEVELS = 4, 1 << 16
_SUM_MEAN = _PARTS * (_LEVELS - 1) / 2
_SUM_STD = math.sqrt(_PARTS * (_LEVELS**2 - 1) / 12)


@torch.no_grad()
def initialize(model: Llama, seed: int) -> None:
    """Set all parameters of `model`, of any dtype, on any device, from the run's `seed` (0 to 2^63 - 1)."""
    for name, parameter in model.named_parameters():
        initialize_parameter(name, parameter, seed=seed, num_layers=model.config.num_layers)


@torch.no_grad()
def initialize_parameter(name: str, values: Tensor, *, seed: int, num_layers: int, first: int = 0) -> None:
    """Set one parameter of a model of `num_layers` layers, or those of its rows that begin at element `first`.

    `values`: contiguous, of any dtype, on any device. The bits are those that the whole would have there. A vector is a
    norm. Needs memory for `PIECE` elements beside it.
    """
    if values.ndim < 2:
        values.fill_(1.0)
        return
    std = STD / math.sqrt(2 * num_layers) if name.endswith(RESIDUAL_WRITERS) else STD
    for at, piece in enumerate(values.view(-1).split(PIECE)):
        start = first + at * PIECE
        made = start_values(name, piece.numel(), seed=seed, std=std, first=start)
        piece.copy_(torch.from_numpy(made))


def start_values(name: str, count: int, *, seed: int, std: float, first: int = 0) -> NDArray[np.float32]:
    """`count` start values of the parameter `name` from its element `first` on, with mean 0 and deviation `std`."""
    name_key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    stream = np.random.Philox(key=seed | name_key << 64)
    stream.advance(first // _WORDS)  # counted in blocks
    stream.random_raw(first % _WORDS)
    scale = std / _SUM_STD
    values = np.empty(count, np.float32)
    for start in range(0, count, PIECE):
        piece = values[start : start + PIECE]
        words = stream.random_raw(len(piece))
        total = np.zeros(len(piece), np.float64)
        for part in range(_PARTS):
            total += words >> np.uint64(16 * part) & np.uint64(_LEVELS - 1)
        piece[:] = (total - _SUM_MEAN) * scale
    return values
