"""What a peer is said to need: shapes without weights, sums over ranks, what saves backward, and who is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from atoll.config.load import load
from atoll.config.schema import RunConfig
from atoll.errors import ConfigError, LocalError
from atoll.plan.memory import Computing, LlamaShape, activation_bytes, total_bytes
from atoll.state.own_rows import BLOCK
from atoll.state.tensors import ModelTensors
from atoll.train import room
from atoll.train.activations import checkpoint_activations
from atoll.train.llama import Llama, LlamaConfig
from atoll.train.llama_layout import llama_layout, llama_weights
from atoll.train.masters import Masters
from atoll.train.models import build_inner, build_model
from atoll.train.room import check_room, free_bytes_in, is_ram
from atoll.train.sizes import peer_sizes, rank_grid

SMALL = {
    "vocab_size": 96,
    "dim": 40,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_dim": 88,
    "max_seq_len": 64,
}

ADAPTED = ("model.lora_rank=4", 'model.lora_targets=["q_proj", "down_proj"]', 'model.init_from="nowhere"')


def config_of(*assignments: str) -> RunConfig:
    return load(None, assignments, environ={})


@pytest.mark.parametrize("tied", [True, False])
def test_shapes_without_weights_are_those_of_the_model(tied: bool) -> None:
    config = LlamaConfig(**SMALL, tie_embeddings=tied)
    layout = llama_layout(config)
    assert layout == ModelTensors(Llama(config).named_parameters(remove_duplicate=False)).layout
    assert layout.numel == config.num_parameters()


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
def test_ranks_share_the_elements(num_ranks: int) -> None:
    layout = llama_layout(LlamaConfig(**SMALL))
    grids = [rank_grid(layout, rank, num_ranks) for rank in range(num_ranks)]
    assert sum(grid.numel for grid in grids) == layout.numel
    sizes = peer_sizes(_with_model(), num_ranks=num_ranks)
    assert sizes.largest.elements == max(grid.numel for grid in grids)
    assert sizes.wire_bytes == sum(grid.wire_bytes("int8") for grid in grids)


def test_a_rank_of_two_needs_about_half() -> None:
    one, two = peer_sizes(_with_model()), peer_sizes(_with_model(), num_ranks=2)
    half = total_bytes(two.largest.host) / total_bytes(one.largest.host)
    assert 0.5 <= half < 0.52
    assert any(item.name == "gathered parameters" for item in two.largest.device)
    assert not any(item.name == "gathered parameters" for item in one.largest.device)


def test_a_model_of_too_few_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 100 of 128 would hold nothing"):
        peer_sizes(_with_model("model.vocab_size=100"), num_ranks=128)


def test_what_codec_and_settings_change() -> None:
    def named(*assignments: str) -> dict[str, int]:
        largest = peer_sizes(_with_model(*assignments)).largest
        return {item.name: item.num_bytes for item in (*largest.host, *largest.device)}

    elements = peer_sizes(_with_model()).parameters
    assert "decoded mean" not in named(), "it takes the place of the pseudo-gradient"
    fed = named('outer.codec="stat2"')
    assert fed["residual of error feedback"] == fed["decoded mean"] == 4 * elements
    fp32 = peer_sizes(_with_model('outer.codec="fp32"'), num_ranks=2).largest
    assert "encoded update" not in named('outer.codec="fp32"'), "the vectors are what is sent"
    assert "encoded update" not in {item.name for item in fp32.host}, "all have the order of the wire"
    muon = peer_sizes(_with_model('inner.optimizer="muon"'))
    assert muon.staging == peer_sizes(_with_model()).staging, "what is reserved for a save is AdamW's"
    assert "pinned buffers, to and from the GPU" not in named()
    assert named('local.device="cuda"')["pinned buffers, to and from the GPU"] == 2 * 8 * BLOCK
    donor = peer_sizes(_with_model('inner.joiner="donor"'))
    assert donor.staged_bytes - peer_sizes(_with_model()).staged_bytes == 2 * 8 * elements
    feedback = peer_sizes(_with_model('outer.codec="stat2"'))
    assert feedback.staged_bytes - peer_sizes(_with_model()).staged_bytes == 4 * elements


# ---- what training holds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [(), ('inner.optimizer="muon"',), ('inner.optimizer="muon"', *ADAPTED)])
def test_the_inner_optimizer_has_what_the_plan_says(settings: tuple[str, ...]) -> None:
    config = _with_model(*settings)
    model = build_model(config, with_weights=False)
    inner = build_inner(model, config)
    tokens = torch.randint(0, SMALL["vocab_size"], (config.inner.batch_size, 8))
    inner.step(tokens, tokens, 0)
    held = [value for state in inner.optimizer.state.values() for value in state.values()]
    num_bytes = sum(each.nbytes for each in held if each.ndim)
    assert _items(config)["inner optimizer"] == num_bytes


def test_muon_keeps_one_moment_of_a_matrix_on_every_rank() -> None:
    config = _with_model('inner.optimizer="muon"')
    assert _items(config, 2)["inner optimizer"] == pytest.approx(
        _items(config)["inner optimizer"] / 2, rel=0.02
    )
    assert _items(config)["inner optimizer"] < _items(_with_model())["inner optimizer"]


def test_adapters_are_what_is_trained_and_travels() -> None:
    config = _with_model(*ADAPTED)
    model, sizes = build_model(config, with_weights=False), peer_sizes(config)
    trained = [each for each in model.parameters() if each.requires_grad]
    weights = llama_weights(LlamaConfig(**SMALL), lora_rank=4, lora_targets=("q_proj", "down_proj"))
    assert weights.trained == ModelTensors(model.named_parameters(remove_duplicate=False)).layout
    assert sizes.trained == sum(each.numel() for each in trained)
    assert sizes.parameters == sum(each.numel() for each in model.parameters())
    items = _items(config)
    assert items["parameters"] + items["frozen weights"] == 4 * sizes.parameters
    assert items["gradients"] == items["anchor"] == 4 * sizes.trained
    with pytest.raises(
        ConfigError, match=r"model\.lora_targets has gate, and no linear layer is named so; there are"
    ):
        peer_sizes(_with_model(*ADAPTED, 'model.lora_targets=["gate"]'))


def test_a_model_of_transformers_has_no_sizes_beforehand() -> None:
    with pytest.raises(
        ConfigError, match=r"model\.hf = 'a/config\.json': .* sizes are told of the built-in model"
    ):
        peer_sizes(config_of('model.hf="a/config.json"'))


def test_bf16_copies_and_what_goes_to_their_masters() -> None:
    elements = peer_sizes(_with_model()).parameters
    one = _items(_with_model('local.param_dtype="bf16"', "local.micro_batch=1", "inner.batch_size=4"))
    assert one["bf16 copies"] == one["gradients of the copies"] == 2 * elements
    whole = _items(_with_model('local.param_dtype="bf16"', "inner.batch_size=4"))
    assert "gradients of the copies" not in whole, "they become the masters' one after the other"
    model = build_model(_with_model())
    masters = Masters(model)
    held = [*model.parameters(), *(masters.of(each) for each in model.parameters())]
    assert sum(each.nbytes for each in held) == whole["parameters"] + whole["bf16 copies"]


def test_what_ranks_gather_and_where_their_rows_rest() -> None:
    plain = _items(_with_model(), 2)
    half = _items(_with_model('local.param_dtype="bf16"'), 2)
    assert "bf16 copies" not in half
    assert 2 * half["gathered parameters"] == plain["gathered parameters"]
    kept = _items(_with_model("local.reshard_after_forward=false"), 2)
    assert kept["gathered parameters"] == 4 * peer_sizes(_with_model()).parameters
    offloaded = peer_sizes(_with_model("local.cpu_offload=true", 'local.device="cuda"'), num_ranks=2).largest
    there, here = ({item.name for item in items} for items in (offloaded.device, offloaded.host))
    assert {"parameters", "gradients", "inner optimizer"} <= here
    assert offloaded.passing[0].num_bytes == 4 * peer_sizes(_with_model()).parameters, "saved at the end"
    assert there == {"gathered parameters", "gradients before they are scattered", "activations"}


@pytest.mark.parametrize("computes", ["fp32", "autocast", "bf16"])
@pytest.mark.parametrize("mode", ["none", "full", "every other"])
@pytest.mark.parametrize("chunk_tokens", [0, 32])
def test_activations_are_about_what_torch_keeps_for_the_backward_pass(
    computes: str, mode: str, chunk_tokens: int
) -> None:
    """Within a tenth or a vector a token, less what is not there then: logits, and a layer that is made again."""
    config = LlamaConfig(**{**SMALL, "num_layers": 4, "dim": 64, "ffn_dim": 176, "vocab_size": 512})
    model, kept, alive = Llama(config, loss_chunk_tokens=chunk_tokens), {}, []
    every = {"none": 0, "full": 1, "every other": 2}[mode]
    if every:
        checkpoint_activations(model, "full", every)
    if computes == "bf16":
        Masters(model)
    own = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        is_cast = tensor.ndim == 2 and 2 * 64 not in tensor.shape  # a matrix, by autocast
        if storage.data_ptr() not in own and not is_cast:
            kept[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)
        return tensor

    tokens = torch.randint(0, 512, (2, 64))
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=computes == "autocast"),
    ):
        loss = model.loss(tokens, tokens)
    assert loss.isfinite()
    how = Computing(
        autocast=computes == "autocast", bf16=computes == "bf16", again_every=every, chunk_tokens=chunk_tokens
    )
    shape = LlamaShape(vocab_size=512, dim=64, num_layers=4, kv_dim=32, ffn_dim=176)
    layer = replace(how, again_every=0)
    again = activation_bytes(shape, 128, layer) - activation_bytes(replace(shape, num_layers=3), 128, layer)
    gone = 512 * (chunk_tokens * 8 or 128 * 4) + 512 * (chunk_tokens or 128) * (
        0 if computes == "fp32" else 2
    )
    estimate = activation_bytes(shape, 128, how) - gone - (again if every else 0)
    assert estimate == pytest.approx(sum(kept.values()), rel=0.1, abs=4 * 64 * 128)


def test_selective_keeps_more_than_full_and_less_than_all() -> None:
    shape = LlamaShape(vocab_size=512, dim=64, num_layers=16, kv_dim=32, ffn_dim=176)
    every, selective, full = (
        activation_bytes(shape, 128, how)
        for how in (Computing(), Computing(again_every=1, selective=True), Computing(again_every=1))
    )
    assert full < selective < every


# ---- room -----------------------------------------------------------------------------------------------------------


def test_who_finds_no_memory_is_told_the_numbers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sizes = peer_sizes(_with_model())
    needed = total_bytes([*sizes.largest.host, *sizes.largest.device], estimates=False)
    monkeypatch.setattr(room, "is_ram", lambda folder: False)
    monkeypatch.setattr(room, "free_memory_bytes", lambda: needed)
    check_room(sizes, staging=tmp_path, fallback=tmp_path)
    monkeypatch.setattr(room, "free_memory_bytes", lambda: needed - 1)
    with pytest.raises(
        LocalError, match=r"needs .* GB of RAM, and .* GB are free: .* GB anchor, .* GB outer mo"
    ):
        check_room(sizes, staging=tmp_path, fallback=tmp_path)


def test_what_is_staged_in_ram_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sizes = peer_sizes(_with_model())
    held = total_bytes([*sizes.largest.host, *sizes.largest.device], estimates=False)
    monkeypatch.setattr(room, "free_memory_bytes", lambda: held + sizes.staged_bytes)
    monkeypatch.setattr(room, "is_ram", lambda folder: True)
    check_room(sizes, staging=tmp_path, fallback=tmp_path)
    monkeypatch.setattr(room, "free_memory_bytes", lambda: held + sizes.staged_bytes - 1)
    with pytest.raises(LocalError, match=f"GB staged in {tmp_path}; take a machine with more"):
        check_room(sizes, staging=tmp_path, fallback=tmp_path)
    two = peer_sizes(_with_model(), num_ranks=2)
    with pytest.raises(LocalError, match="for each of 2 ranks"):
        check_room(two, staging=tmp_path, fallback=tmp_path)


def test_no_place_to_stage_is_told_for_both(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    free = {tmp_path / "ram": 1 << 20, tmp_path / "disk": 1 << 40}
    monkeypatch.setattr(room, "free_bytes_in", lambda folder: free[folder])
    check_room(peer_sizes(_with_model()), staging=tmp_path / "ram", fallback=tmp_path / "disk")
    free[tmp_path / "disk"] = 2 << 20
    with pytest.raises(LocalError, match=r"staging needs .*/ram has 0.00105 GB free and .*/disk 0.0021 GB"):
        check_room(peer_sizes(_with_model()), staging=tmp_path / "ram", fallback=tmp_path / "disk")


def test_the_limits_of_control_groups_count(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text("4:memory:/job/step\n0::/slice/unit\n")
    for group, limit, taken, stat in (
        ("memory/job/step", ("limit_in_bytes", 900), ("usage_in_bytes", 500), "total_inactive_file 70"),
        ("slice/unit", ("max", "max"), ("current", 5), "inactive_file 0"),
        ("slice", ("max", 600), ("current", 500), "inactive_file 20"),
    ):
        folder = tmp_path / "groups" / group
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in (limit, taken):
            (folder / f"memory.{name}").write_text(f"{value}\n")
        (folder / "memory.stat").write_text(f"anon 3\n{stat}\n")
    assert sorted(room._left_in_groups(own, tmp_path / "groups")) == [120, 470]
    assert list(room._left_in_groups(tmp_path / "none", tmp_path)) == []


def test_free_bytes_of_a_folder_to_come(tmp_path: Path) -> None:
    assert free_bytes_in(tmp_path / "a" / "b") == pytest.approx(free_bytes_in(tmp_path), rel=0.1)
    assert is_ram(Path("/dev/shm/x")) or not Path("/dev/shm").is_mount()
    assert not is_ram(Path("/proc"))


@pytest.mark.parametrize("settings", [(), ADAPTED], ids=["all weights", "adapters"])
def test_a_peer_is_refused_before_it_reads_or_builds_anything(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, settings: tuple[str, ...]
) -> None:
    from atoll.train import build

    monkeypatch.setattr(room, "free_memory_bytes", lambda: 1 << 20)
    monkeypatch.setattr(build, "load_corpus", lambda *rest: pytest.fail("it reads its data first"))
    monkeypatch.setattr(build, "build_model", lambda *rest: pytest.fail("it builds its model first"))
    with pytest.raises(LocalError, match=r"of RAM, and 0\.00105 GB are free"):
        build.run_peer(_with_model(f'local.out="{tmp_path}"', *settings), token=b"t" * 32)
    assert list(tmp_path.iterdir()) == [], "nothing has started"


def test_the_real_model_has_what_the_plan_says() -> None:
    config = _with_model()
    model = build_model(config)
    sizes = peer_sizes(config)
    parameters = next(item for item in sizes.largest.device if item.name == "parameters")
    assert parameters.num_bytes == sum(each.numel() * each.element_size() for each in model.parameters())


def _items(config: RunConfig, num_ranks: int = 1) -> dict[str, int]:
    largest = peer_sizes(config, num_ranks=num_ranks).largest
    return {item.name: item.num_bytes for item in (*largest.device, *largest.host)}


def _with_model(*assignments: str) -> RunConfig:
    return config_of(
        *(f"model.{key}={value}" for key, value in SMALL.items()), "data.seq_len=64", *assignments
    )
