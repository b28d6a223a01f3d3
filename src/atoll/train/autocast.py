"""Mixed precision: weights and optimizer stay fp32, matrix products run in bf16 where the device has it.

bf16 has the exponent range of fp32, so gradients need no scaling.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def bf16_available(device: torch.device) -> bool:
    """Whether `device` computes in bf16 itself (a CPU without bf16 instructions does so too, but slowly)."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.amp.is_autocast_available(device.type)


def autocast_context(device: torch.device, wanted: bool) -> AbstractContextManager[object]:
    """A context for forward passes, to be entered as often as one likes; an empty one if not available."""
    if wanted and bf16_available(device):
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()
