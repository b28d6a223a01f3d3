"""What a peer is said to need: shapes without weights, sums over ranks, what saves backward, and who is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from atoll.config.load import load
from atoll.config.schema import RunConfig
from atoll.errors import LocalError
from atoll.plan.memory import LlamaShape, activation_bytes, total_bytes
from atoll.state.tensors import ModelTensors
from atoll.train import room
from atoll.train.llama import Llama, LlamaConfig
from atoll.train.models import build_model
from atoll.train.room import check_room, free_bytes_in, is_ram
from atoll.train.sizes import llama_layout, peer_sizes, rank_grid

SMALL = {
    "vocab_size": 96,
    "dim": 40,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_dim": 88,
    "max_seq_len": 64,
}


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
    assert named()["decoded mean"] == named()["pseudo-gradient"] == 4 * elements
    assert "decoded mean" not in named('outer.codec="fp32"'), "the result is the mean"
    assert named('outer.codec="stat2"')["residual of error feedback"] == 4 * elements
    assert "a round's copy of one parameter" in named('local.device="cuda"')
    donor = peer_sizes(_with_model('inner.joiner="donor"'))
    assert donor.staged_bytes - peer_sizes(_with_model()).staged_bytes == 2 * 8 * elements
    feedback = peer_sizes(_with_model('outer.codec="stat2"'))
    assert feedback.staged_bytes - peer_sizes(_with_model()).staged_bytes == 4 * elements


def test_activations_are_about_what_torch_keeps_for_the_backward_pass() -> None:
    """Within a tenth, less the logits, which are gone by then."""
    config = LlamaConfig(**{**SMALL, "dim": 64, "ffn_dim": 176, "vocab_size": 512})
    model, kept = Llama(config), {}
    own = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.randint(0, 512, (2, 64))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model.loss(tokens, tokens)
    assert loss.isfinite()
    shape = LlamaShape(vocab_size=512, dim=64, num_layers=3, kv_dim=32, ffn_dim=176)
    estimate = activation_bytes(shape, tokens.numel(), half=False) - 4 * 512 * tokens.numel()
    assert estimate == pytest.approx(sum(kept.values()), rel=0.1)


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


def test_a_peer_is_refused_before_it_reads_or_builds_anything(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from atoll.train import build

    monkeypatch.setattr(room, "free_memory_bytes", lambda: 1 << 20)
    monkeypatch.setattr(build, "load_corpus", lambda *rest: pytest.fail("it reads its data first"))
    monkeypatch.setattr(build, "build_model", lambda *rest: pytest.fail("it builds its model first"))
    with pytest.raises(LocalError, match=r"of RAM, and 0\.00105 GB are free"):
        build.run_peer(_with_model(f'local.out="{tmp_path}"'), token=b"t" * 32)
    assert list(tmp_path.iterdir()) == [], "nothing has started"


def test_the_real_model_has_what_the_plan_says() -> None:
    config = _with_model()
    model = build_model(config)
    sizes = peer_sizes(config)
    parameters = next(item for item in sizes.largest.device if item.name == "parameters")
    assert parameters.num_bytes == sum(each.numel() * each.element_size() for each in model.parameters())


def _with_model(*assignments: str) -> RunConfig:
    return config_of(
        *(f"model.{key}={value}" for key, value in SMALL.items()), "data.seq_len=64", *assignments
    )
