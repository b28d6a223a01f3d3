"""What of a session belongs to its peer's own part of a checkpoint: inner optimizer, residual, buffers, data positions.

`Safekeeping` saves what it is told to hold; here it is told. Used on the training thread, while a session opens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch

from atoll.diloco.outer_loop import OuterLoop
from atoll.diloco.safekeeping import Safekeeping
from atoll.membership.leases import SlotTable, contradiction
from atoll.state.inner_rows import own_state, take_state


def hold_training(
    safekeeping: Safekeeping, loop: OuterLoop, inner: torch.optim.Optimizer | None, rank: int = 0
) -> None:
    """Save the inner optimizer's state, and what the codec still owes."""
    if inner is not None:
        # a list: of a peer that was cut otherwise, what all of its ranks saved
        safekeeping.hold(
            "inner",
            lambda: own_state(inner),
            lambda saved: take_state(inner, saved if isinstance(saved, list) else [saved], rank),
            inner.state.clear,
        )
    feedback = loop.feedback
    if feedback.residual is not None:
        safekeeping.hold("residual", lambda: feedback.residual, feedback.restore)


def hold_buffers(safekeeping: Safekeeping, model: torch.nn.Module) -> None:
    """Save the model's persistent buffers: no other peer has them."""
    saved = model.state_dict(keep_vars=True)
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    if buffers:
        safekeeping.hold("buffers", lambda: buffers, lambda held: _copy_into(buffers, held))


def hold_slots(
    safekeeping: Safekeeping, version: int, num_slots: int, slots: Callable[[], SlotTable | None]
) -> SlotTable | None:
    """How far the data was read, as this peer's part or that of another one tells, best of all of this version. What
    tells of another text than one of `num_slots` slots is dropped, with a remark. Saved again with every version from
    now on: `slots` tells the newest."""
    saved: list[Any] = list(safekeeping.others("data").values())
    safekeeping.hold("data", lambda: _plain(slots()), saved.append)
    known: list[SlotTable] = []
    for each in saved:
        try:
            table = msgspec.convert(each, SlotTable) if each else None
        except msgspec.ValidationError as error:
            safekeeping.remark(f"what was saved of data does not fit and is dropped: {error}")
            continue
        if table is not None and (why := contradiction(table, num_slots)):
            safekeeping.remark(f"what was saved of data is of another text and is dropped: {why}")
        elif table is not None:
            known.append(table)
    return max((each for each in known if each.version <= version), key=_version_of, default=None)


def _plain(slots: SlotTable | None) -> Any:
    return msgspec.to_builtins(slots) if slots is not None else None


def _version_of(slots: SlotTable) -> int:
    return slots.version


def _copy_into(buffers: Mapping[str, torch.Tensor], held: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in buffers.items():
            buffer.copy_(held[name])
