"""Names to tensors: ties, strides, dtypes, frozen and empty parameters (hard case K13, oracles E23 and E24)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from atoll.errors import ConfigError
from atoll.state.tensors import ModelTensors
from support.awkward import Awkward


def named(model: nn.Module) -> ModelTensors:
    return ModelTensors(model.named_parameters(remove_duplicate=False))


def test_layout_is_ordered_by_name_whatever_the_module_order() -> None:
    one = named(Awkward())
    other = named(Awkward(reverse=True))
    names = [p.name for p in one.layout.parameters]
    assert names == sorted(names)
    assert one.layout == other.layout
    assert not any("frozen" in name or "count" in name for name in names)


def test_tied_weights_count_once() -> None:
    tensors = named(Awkward())
    assert sum("embed" in p.name or "head" in p.name for p in tensors.layout.parameters) == 1
    assert tensors.layout.numel == 35 + 14 + 1 + 1023 + 1 + 0 + 6 + 9 + 3


def test_values_move_in_logical_order() -> None:
    model = Awkward()
    tensors = named(model)
    flat = tensors.read()
    index = [p.name for p in tensors.layout.parameters].index("turned")
    range_ = tensors.layout.ranges[index]
    assert flat[range_.start : range_.stop].tolist() == model.turned.detach().flatten().tolist()
    tensors.write(flat + 1)
    assert np.allclose(tensors.read(), flat + 1, atol=2e-2)  # bf16 rounds
    assert model.turned.detach()[0, 1] == 4.0


def test_no_inner_step_gives_exactly_zero_also_for_bf16() -> None:
    tensors = named(Awkward())
    anchor = tensors.read() * np.float32(1.2345)
    tensors.write(anchor)
    delta = np.empty_like(anchor)
    tensors.subtract_from(anchor, delta)
    assert not delta.any()
    naive = anchor - tensors.read()
    assert naive.any(), "the control must differ, or this test shows nothing"


def test_subtracting_equals_plain_arithmetic_for_fp32() -> None:
    model = nn.Linear(11, 3)
    tensors = named(model)
    anchor = np.random.default_rng(0).standard_normal(36, dtype=np.float32)
    delta = np.empty_like(anchor)
    tensors.subtract_from(anchor, delta)
    assert np.array_equal(delta, anchor - tensors.read())


def test_partial_overlap_is_refused_by_name() -> None:
    base = torch.zeros(10)
    with pytest.raises(ConfigError, match=r"'a' and 'b' share storage"):
        ModelTensors([("a", nn.Parameter(base[:6])), ("b", nn.Parameter(base[4:]))])


def test_neighbours_in_one_storage_are_fine() -> None:
    base = torch.zeros(10)
    tensors = ModelTensors([("a", nn.Parameter(base[:5])), ("b", nn.Parameter(base[5:]))])
    assert tensors.layout.numel == 10


def test_compiled_names_match_plain_ones() -> None:
    plain = ModelTensors(nn.Linear(2, 2).named_parameters())
    compiled = ModelTensors((f"_orig_mod.{n}", p) for n, p in nn.Linear(2, 2).named_parameters())
    assert plain.layout == compiled.layout


def test_frozen_parameters_are_compared_by_digest() -> None:
    one, other = Awkward(), Awkward()
    assert named(one).frozen_digest() == named(other).frozen_digest()
    with torch.no_grad():
        other.frozen.weight[0, 0] += 1
    assert named(one).frozen_digest() != named(other).frozen_digest()


def test_a_model_without_trainable_elements_is_refused() -> None:
    with pytest.raises(ConfigError, match="no trainable element"):
        ModelTensors([("a", nn.Parameter(torch.zeros(3), requires_grad=False))])


def test_what_must_be_equal_on_all_ranks_has_a_digest() -> None:
    def digest(change: str) -> str:
        model = Awkward()
        if change == "frozen":
            model.odd.requires_grad_(False)
        elif change == "shape":
            model.odd = nn.Linear(1022, 1, bias=False)
        elif change == "dtype":
            model.odd.half()
        elif change == "frozen shape":
            model.frozen = nn.Linear(3, 4).requires_grad_(False)
        elif change == "values":
            model.odd.weight.data.zero_()
        return named(model).layout_digest()

    assert digest("") == digest("values")
    assert len({digest(each) for each in ("", "frozen", "shape", "dtype", "frozen shape")}) == 5


def test_a_model_without_values_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"parameter 'bias' has no values yet \(device meta\)"):
        named(model)


def test_a_vector_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="has 7 elements, this rank owns 6"):
        named(nn.Linear(2, 2)).write(np.zeros(7, np.float32))


def test_large_parameters_go_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = named(Awkward()).read()
    monkeypatch.setattr("atoll.state.own_rows.BLOCK", 4)
    model = Awkward()
    tensors = named(model)
    assert np.array_equal(tensors.read(), whole)
    digest = tensors.frozen_digest()
    tensors.write(whole + 1)
    delta = np.empty_like(whole)
    tensors.subtract_from(whole, delta)
    assert np.allclose(delta, -1, atol=2e-2)
    monkeypatch.undo()
    assert digest == named(Awkward()).frozen_digest()
