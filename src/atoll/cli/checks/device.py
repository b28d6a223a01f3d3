"""What the machine computes with, as torch sees it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from atoll.dashboard.words import bytes_text
from atoll.network.checks.finding import Finding, found, problem, warning

NVIDIA = Path("/dev/nvidia0")


class Devices(msgspec.Struct, frozen=True):
    """`cuda` is the version that torch was built for, "" if it was not; `names` and `memory_bytes` of each GPU."""

    cuda: str = ""
    names: tuple[str, ...] = ()
    memory_bytes: tuple[int, ...] = ()
    mps: bool = False


def ask_torch() -> Devices:
    """Takes the seconds that torch takes to import."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    held = [torch.cuda.get_device_properties(number) for number in range(count)]
    return Devices(
        cuda=str(torch.version.cuda or torch.version.hip or ""),
        names=tuple(each.name for each in held),
        memory_bytes=tuple(each.total_memory for each in held),
        mps=torch.backends.mps.is_available(),
    )


def gpu(device: str, ask: Callable[[], Devices] = ask_torch, nvidia: Path = NVIDIA) -> Finding:
    """`device` is local.device: what this peer is to train on."""
    held = ask()
    details = {"device": device, **{name: getattr(held, name) for name in Devices.__struct_fields__}}
    kind, _, number = device.partition(":")
    seen = ", ".join(
        f"{name} ({bytes_text(size)})" for name, size in zip(held.names, held.memory_bytes, strict=True)
    )
    if kind == "cuda" and int(number or 0) >= len(held.names):
        there = f"there is only {seen}" if seen else "torch sees no GPU"
        built = f" and is built for CUDA {held.cuda}" if held.cuda else " and is built without CUDA"
        remedy = "install a torch that fits the driver (nvidia-smi names its CUDA), or set local.device=cpu"
        return problem(
            "gpu", f"local.device = {device}, but {there}{'' if seen else built}", remedy, details=details
        )
    if kind == "mps" and not held.mps:
        return problem(
            "gpu", "local.device = mps, but torch sees none", "set local.device=cpu", details=details
        )
    if held.names:
        hint = "set local.device=cuda to train on it" if kind == "cpu" else ""
        return found("gpu", seen + ("; local.device is cpu" if hint else ""), remedy=hint, details=details)
    if held.mps:
        hint = "set local.device=mps to train on it" if kind == "cpu" else ""
        return found(
            "gpu", "Apple GPU" + ("; local.device is cpu" if hint else ""), remedy=hint, details=details
        )
    if nvidia.exists():
        built = f"is built for CUDA {held.cuda}" if held.cuda else "is built without CUDA"
        remedy = "install a torch that fits the driver (nvidia-smi names its CUDA)"
        return warning(
            "gpu", f"{nvidia} is there, but torch {built} and sees no GPU", remedy, details=details
        )
    return found("gpu", "none; this peer trains on the CPU", details=details)
