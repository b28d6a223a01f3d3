"""Layers that are computed again: the same gradients to the bit, less memory, and of every n-th layer that many."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from functools import partial
from typing import Literal

import pytest
import torch
from torch import nn

from atoll.config.load import load
from atoll.errors import ConfigError
from atoll.train import activations
from atoll.train.activations import blocks, checkpoint_activations
from atoll.train.init import initialize
from atoll.train.llama import Llama, LlamaConfig
from atoll.train.models import build_model
from support.alive import Alive

Mode = Literal["none", "selective", "full"]
LAYERS, WIDTH, TOKENS = 6, 64, 4 * 64
LAYER_INPUT = 4 * WIDTH * TOKENS  # bytes


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make(mode: Mode = "none", every: int = 1, layers: int = LAYERS) -> Llama:
    shape = LlamaConfig(
        vocab_size=32, dim=WIDTH, num_layers=layers, num_heads=4, num_kv_heads=2, ffn_dim=176, max_seq_len=64
    )
    model = Llama(shape)
    initialize(model, 1)
    checkpoint_activations(model, mode, every)
    return model


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 32, (4, 65), generator=torch.Generator().manual_seed(0))
    return ids[:, :-1], ids[:, 1:]


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def kept(model: Llama) -> int:
    """Bytes that wait for the backward pass."""
    with Alive() as alive:
        loss = model.loss(*batch())
        held = alive.bytes()
    loss.backward()
    return held


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("every", [1, 2, 4])
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
def test_gradients_have_the_same_bits(mode: Mode, every: int, autocast: bool) -> None:
    plain, again = make(), make(mode, every)
    for model in (plain, again):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model.loss(*batch())
        loss.backward()
    expected, found = gradients(plain), gradients(again)
    assert list(expected) == list(found)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize(("every", "count"), [(1, 42), (2, 21), (3, 14), (4, 10), (42, 1)])
def test_every_nth_layer_means_every_nth(every: int, count: int) -> None:
    shape = LlamaConfig(
        vocab_size=8, dim=8, num_layers=42, num_heads=2, num_kv_heads=2, ffn_dim=8, max_seq_len=8
    )
    model = Llama.on_meta(shape)
    assert checkpoint_activations(model, "full", every) == count
    chosen = [index for index, layer in enumerate(model.model.layers) if "forward" in vars(layer)]
    assert chosen == list(range(every - 1, 42, every))


def test_memory_falls_with_mode_and_with_every() -> None:
    none, selective, full = kept(make()), kept(make("selective")), kept(make("full"))
    # By the shapes: in units of a layer's input, plain keeps more than ten a layer, full one.
    assert none > 10 * LAYERS * LAYER_INPUT
    assert full < 0.3 * none
    assert full < (LAYERS + 4) * LAYER_INPUT
    assert full < 0.6 * selective
    assert selective < 0.7 * none
    per_layer = (none - full) / LAYERS
    for every, count in ((2, 3), (3, 2), (4, 1), (6, 1)):
        assert kept(make("full", every)) == pytest.approx(none - count * per_layer, rel=0.02), every


def test_selective_computes_no_matrix_product_again_and_full_does() -> None:
    class Products(torch.utils._python_dispatch.TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
            self.count += "scaled_dot_product" in str(func)
            return func(*args, **(kwargs or {}))

    counts = {}
    modes: tuple[Mode, ...] = ("none", "selective", "full")
    for mode in modes:
        model = make(mode)
        with Products() as products:
            model.loss(*batch()).backward()
        counts[mode] = products.count
    assert counts["selective"] == counts["none"]
    # Seven products and one attention a layer; the last product's value is not needed, only its inputs.
    assert counts["full"] - counts["none"] in (8 * LAYERS, 7 * LAYERS)


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_names_and_copies_are_as_without(mode: Mode) -> None:
    model = make(mode, 2)
    assert list(model.state_dict()) == list(make().state_dict())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    model.loss(*batch()).backward()
    assert gradients(twin) == {}  # a copy computes with its own weights
    assert twin.loss(*batch()).item() == pytest.approx(math.log(32))


def test_evaluation_pays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("full")
    expected = make().loss(*batch())
    monkeypatch.setattr(activations, "checkpoint", lambda *_, **__: pytest.fail("it pays"))
    with torch.no_grad():
        assert torch.equal(model.loss(*batch()), expected)


@pytest.mark.filterwarnings("ignore")  # torch's own, about itself
def test_compiled_keeps_less_and_gives_the_same_gradients() -> None:
    saved, found = {}, {}
    modes: tuple[Mode, ...] = ("none", "selective", "full")
    for mode in modes:
        model = make(mode, layers=1)
        sizes: list[int] = []

        def pack(tensor: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(tensor.nbytes)
            return tensor

        torch._dynamo.reset()
        # All but making C++ of it, which takes a minute here and changes nothing of what is kept.
        model.loss_chunk_tokens = 100
        fast = torch.compile(partial(model.loss, z_loss=1e-3), backend="aot_eager", fullgraph=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = fast(*batch())
        loss.backward()
        saved[mode], found[mode] = sum(sizes), gradients(model)
    assert saved["full"] < 0.6 * saved["selective"]
    assert saved["selective"] < 0.8 * saved["none"]
    for name, gradient in found["none"].items():
        assert torch.equal(found["selective"][name], gradient)
        assert torch.equal(found["full"][name], gradient)


class Net(nn.Module):
    """A model of somebody else: its blocks take keywords, have dropout, and a list inside each."""

    def __init__(self, lists: int = 1, blocks: int = 3) -> None:
        super().__init__()
        for index in range(lists):
            self.add_module(f"stack{index}", nn.ModuleList(Block() for _ in range(blocks)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.stack0:  # type: ignore[union-attr]
            x = block(x, scale=0.5)
        return x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, *, scale: float) -> torch.Tensor:
        return self.dropout(sum(expert(x) for expert in self.experts)) * scale


def test_any_model_with_one_list_of_blocks() -> None:
    found = []
    modes: tuple[Mode, ...] = ("none", "full", "selective")
    for mode in modes:
        torch.manual_seed(3)
        net = Net()
        assert blocks(net) == list(net.stack0)  # type: ignore[arg-type]
        assert checkpoint_activations(net, mode) == (0 if mode == "none" else 3)
        net(torch.ones(2, 4)).sum().backward()
        found.append(gradients(net))
    for other in found[1:]:  # dropout drops the same again
        assert all(torch.equal(found[0][name], other[name]) for name in found[0])


@pytest.mark.parametrize(
    ("net", "said"),
    [
        (Net(0), "has none"),
        (Net(2), "has 2: stack0, stack1"),
    ],
)
def test_what_has_no_one_list_is_refused(net: Net, said: str) -> None:
    with pytest.raises(ConfigError, match=f'; Net {said}; set local.activation_checkpointing = "none"'):
        checkpoint_activations(net, "full")


def test_more_than_there_are_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"checkpoint_every = 7 is above the model's 6 layers"):
        checkpoint_activations(make(), "full", 7)


def test_the_settings_reach_the_model() -> None:
    keys = ["model.size=1m", "local.activation_checkpointing=selective", "local.checkpoint_every=2"]
    model = build_model(load(None, [*keys, "local.loss_chunk_tokens=32"], {}))
    assert [index for index, layer in enumerate(model.model.layers) if "forward" in vars(layer)] == [1, 3]
    assert model.loss_chunk_tokens == 32


def test_of_which_layers_without_what_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'checkpoint_every = 2 does nothing with .* "none"'):
        load(None, ["local.checkpoint_every=2"], {})
