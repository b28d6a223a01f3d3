"""The codec that is only compared with: its error is the published one, and what it can not do shows."""

from __future__ import annotations

import numpy as np
import pytest

from atoll.codecs import three_sigma
from atoll.values import CODECS


@pytest.mark.parametrize(
    ("kind", "expected"), [("gaussian", 0.0161), ("laplace", 0.0860), ("student-3", 0.3221)]
)
def test_errors_are_as_known(kind: str, expected: float) -> None:
    rng = np.random.default_rng(3)
    size = 1 << 18
    draws = {
        "gaussian": rng.standard_normal(size),
        "laplace": rng.laplace(size=size),
        "student-3": rng.standard_t(3, size),
    }
    values = draws[kind].astype(np.float32)
    data = three_sigma.encode(values)
    assert len(data) == size + 1024
    error = np.linalg.norm(three_sigma.decode(data) - values) / np.linalg.norm(values)
    assert error == pytest.approx(expected, rel=0.25 if kind == "student-3" else 0.06)


def test_zeros_stay_zeros() -> None:
    assert not three_sigma.decode(three_sigma.encode(np.zeros(1000, np.float32))).any()


def test_no_run_can_choose_it() -> None:
    assert not any("sigma" in name for name in CODECS)
