"""How a wait of the ranks' channel ends: a slice that runs out is no error, and no error is a slice."""

from __future__ import annotations

from datetime import timedelta

import pytest

from atoll.mesh.channel import Channel


class Work:
    """A collective that ends in the moment when a slice of waiting for it has run out."""

    def __init__(self, error: str = "", *, ends: bool = True) -> None:
        self._error, self._ends = error, ends

    def wait(self, slice_s: timedelta | None = None) -> bool:
        if slice_s is not None:
            raise RuntimeError("Operation timed out!")
        if self._error:
            raise RuntimeError(self._error)
        return True

    def is_completed(self) -> bool:
        return self._ends


def ended(work: Work) -> bool:
    return Channel._ended(object.__new__(Channel), work)  # type: ignore[bad-argument-type]


def test_what_ends_well_just_after_a_slice_has_ended_well() -> None:
    assert ended(Work())


def test_what_fails_has_its_own_word() -> None:
    with pytest.raises(RuntimeError, match="connection closed"):
        ended(Work("connection closed"))


def test_a_slice_that_runs_out_is_no_end() -> None:
    assert not ended(Work(ends=False))
