"""The built-in shapes by name: in RUN.toml, and their parameters against the numbers that their makers published."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
import torch

from atoll.config.dump import to_toml
from atoll.config.load import load
from atoll.config.schema import ModelSection
from atoll.config.shared import flatten, nested
from atoll.config.sizes import SIZES, ModelSize
from atoll.errors import ConfigError
from atoll.train.llama import Llama
from atoll.train.models import llama_config

# Those of published models are what the safetensors of their releases hold.
PARAMETERS = {
    "1m": 988_544,
    "10m": 9_638_784,
    "150m": 151_020_288,
    "1b": 983_640_064,
    "10b": 10_211_381_248,
    "70b": 70_553_706_496,
    "smollm2-135m": 134_515_008,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "intellect-1": 10_211_381_248,
}


@pytest.mark.parametrize("size", SIZES)
def test_parameters_of_every_size(size: ModelSize) -> None:
    config = llama_config(ModelSection(size=size))
    model = Llama.on_meta(config)
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"meta"}
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[size]
    assert config.num_parameters() == PARAMETERS[size]
    assert all(parameter.dtype is torch.float32 for parameter in model.parameters())


def test_every_size_is_a_value_of_the_key_and_in_the_docs() -> None:
    assert get_args(ModelSize) == (*SIZES, "")
    page = (Path(__file__).parents[2] / "docs/models.md").read_text()
    for size, count in PARAMETERS.items():
        rows = [row for row in page.splitlines() if row.startswith("|") and f"`{size}`" in row]
        assert [f"{count:,}" in row for row in rows] == [True], size


def test_a_size_fills_what_is_not_given(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[model]\nsize = "10m"\nmax_seq_len = 64\n[data]\nseq_len = 64\n')
    model = load(path, ["model.num_layers=3"], {}).model
    said = {**SIZES["10m"], "max_seq_len": 64, "num_layers": 3}
    assert model.model_dump(include=said.keys()) == said


def test_a_size_by_set_and_by_variable() -> None:
    assert load(None, ["model.size=1b"], {}).model.dim == 2048
    assert load(None, [], {"ATOLL_MODEL__SIZE": "llama-3.2-1b"}).model.tie_embeddings


def test_without_a_size_all_is_as_it_is_written() -> None:
    model = load(None, ["model.dim=64"], {}).model
    assert (model.size, model.dim, model.num_layers) == ("", 64, 4)


def test_an_unknown_size_lists_the_known() -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, ["model.size=10n"], {})
    said = str(caught.value)
    assert said.startswith('--set model.size = "10n": must be "1m", "10m"')
    assert all(f'"{size}"' in said for size in SIZES)
    assert said.endswith(' or ""; did you mean "10m"?')


@pytest.mark.parametrize("value", ["[1]", "{ a = 1 }", "7"])
def test_a_size_that_is_no_text_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"model\.size"):
        load(None, [f"model.size={value}"], {})


def test_a_shape_that_a_size_and_keys_make_together_is_checked() -> None:
    with pytest.raises(ConfigError, match="dim = 128 is not a multiple of num_heads = 3"):
        load(None, ["model.size=1m", "model.num_heads=3"], {})


def test_a_resolved_size_reads_back_equal_and_says_every_key(tmp_path: Path) -> None:
    config = load(None, ["model.size=10b", "model.rope_theta=1e6"], {})
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config))
    assert "num_layers = 42" in path.read_text()
    assert load(path, [], {}) == config


def test_peers_may_name_a_shape_or_write_it_out() -> None:
    named = load(None, ["model.size=1m"], {})
    written = load(None, [f"model.{key}={str(value).lower()}" for key, value in SIZES["1m"].items()], {})
    assert flatten(named) == flatten(written)
    assert flatten(named) != flatten(load(None, ["model.size=10m"], {}))
    assert (
        nested(named)["model"]["dim"] == 128
    )  # what a newcomer receives does not depend on its release's table
