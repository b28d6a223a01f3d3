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

from atoll.train.llama import Llama

STD = 0.02
RESIDUAL_WRITERS = ("o_proj.weight", "down_proj.weight")
PIECE = 1 << 20  # elements made at once, so that a large matrix needs little memory beside itself

_PARTS, _LEVELS = 4, 1 << 16
_SUM_MEAN = _PARTS * (_LEVELS - 1) / 2
_SUM_STD = math.sqrt(_PARTS * (_LEVELS**2 - 1) / 12)


@torch.no_grad()
def initialize(model: Llama, seed: int) -> None:
    """Set all parameters of `model`, of any dtype, on any device, from the run's `seed` (0 to 2^63 - 1)."""
    residual_std = STD / math.sqrt(2 * model.config.num_layers)
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            parameter.fill_(1.0)
            continue
        std = residual_std if name.endswith(RESIDUAL_WRITERS) else STD
        values = start_values(name, parameter.numel(), seed=seed, std=std)
        parameter.copy_(torch.from_numpy(values).view(parameter.shape))


def start_values(name: str, numel: int, *, seed: int, std: float) -> NDArray[np.float32]:
    """The first `numel` start values of the parameter `name`, with mean 0 and standard deviation `std`."""
    name_key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    stream = np.random.Philox(key=seed | name_key << 64)
    scale = std / _SUM_STD
    values = np.empty(numel, np.float32)
    for start in range(0, numel, PIECE):
        piece = values[start : start + PIECE]
        words = stream.random_raw(len(piece))
        total = np.zeros(len(piece), np.float64)
        for part in range(_PARTS):
            total += words >> np.uint64(16 * part) & np.uint64(_LEVELS - 1)
        piece[:] = (total - _SUM_MEAN) * scale
    return values
