"""The two buffers between a device and the host; streams and events that do nothing stand in for a GPU's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from atoll.state import staging
from atoll.state.staging import Staging


class Stream:
    """Of a device that does everything at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.waited_for: list[Any] = []

    def wait_stream(self, other: Any) -> None:
        self.waited_for.append(other)


class Event:
    def __init__(self) -> None:
        self.log: list[str] = []

    def record(self, stream: Stream) -> None:
        self.log.append("recorded")

    def synchronize(self) -> None:
        self.log.append("waited")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> tuple[Staging, Stream]:
    current = Stream(torch.device("cpu"))
    monkeypatch.setattr(staging, "BLOCK", 6)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    return Staging(torch.device("cpu")), current


def blocks() -> list[torch.Tensor]:
    wide = torch.arange(24.0).reshape(2, 12)
    return [
        wide[0, :6],
        wide.t()[6:9],  # not contiguous
        torch.tensor(2.5, dtype=torch.bfloat16),
        torch.tensor([1 / 3] * 6, dtype=torch.float64),
        torch.ones(1, 2, 3, dtype=torch.float16),
    ]


def test_each_block_is_on_the_host_until_the_next_but_one(made: tuple[Staging, Stream]) -> None:
    for again in (1, 2):  # the buffers are used again
        seen = [block.clone() for block in made[0].to_host(iter(blocks()))]
        assert len(seen) == 5
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(seen, blocks(), strict=True))
        logs = [each.log for each in made[0]._copied]  # type: ignore[attr-defined]
        assert logs == [["recorded", "waited"] * 3 * again, ["recorded", "waited"] * 2 * again]
    assert list(made[0].to_host([])) == []


def test_one_block_is_on_its_way_while_another_is_used(made: tuple[Staging, Stream]) -> None:
    asked = []

    def source() -> Iterator[torch.Tensor]:
        for number, block in enumerate(blocks()):
            asked.append(number)
            yield block

    there = made[0].to_host(source())
    next(there)
    assert asked == [0, 1]
    next(there)
    assert asked == [0, 1, 2], "a third one would overwrite what is in use"


def test_blocks_are_set_from_the_host_in_their_own_dtype(made: tuple[Staging, Stream]) -> None:
    transfers, current = made
    targets = blocks()
    values = [torch.full(block.shape, 1 + number / 3) for number, block in enumerate(targets)]
    transfers.to_device(zip(targets, values, strict=True))
    for block, value in zip(targets, values, strict=True):
        assert torch.equal(block, value.to(block.dtype))
    assert transfers._copied[0].log == ["waited", "recorded"] * 3  # type: ignore[attr-defined]
    assert current.waited_for == [transfers._stream], "what is computed next sees the new values"
