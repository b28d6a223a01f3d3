"""A resolved config reads back equal; what peers compare covers what changes the shared state."""

from __future__ import annotations

import hashlib
import json
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.config.dump import to_toml, toml_value, write_resolved
from atoll.config.keys import dotted_names
from atoll.config.load import load
from atoll.config.schema import RunConfig
from atoll.config.shared import flatten, nested, settings_digest

STAGES = "outer.inner_steps=[{until = 10, inner_steps = 2}, {inner_steps = 5, lr = 1}]"
RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))


@pytest.mark.parametrize("assignments", [[], [STAGES, 'data.sources=["a\\"b\\\\c", "ü"]', "inner.eps=1e-12"]])
def test_a_resolved_config_reads_back_equal(tmp_path: Path, assignments: list[str]) -> None:
    config = load(None, assignments, {})
    path = tmp_path / "run" / "config.toml"
    digest = write_resolved(config, path)
    assert load(path, [], {}) == config
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()


@given(st.one_of(st.text(), st.integers(), st.booleans(), st.floats(allow_nan=False), st.lists(st.text())))
def test_values_survive_toml(value: object) -> None:
    if isinstance(value, str | list):
        value = json.loads(json.dumps(value, default=str).encode("utf-8", "replace"))
    if "\\ud" in ascii(value):  # lone surrogates are no text in TOML
        return
    assert tomllib.loads(f"v = {toml_value(value)}")["v"] == value


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_are_valid(path: Path) -> None:
    config = load(path, [], {})
    assert config.run.name == path.stem


def test_there_are_recipes() -> None:
    assert {"tiny-stdlib", "laptop", "three-clouds", "average"} <= {path.stem for path in RECIPES}


def test_every_key_of_the_run_is_compared_but_where_the_text_lies() -> None:
    mixed = load(None, ['data.shards=["/a"]', "data.weights=[1.0]"], {})
    compared = {".".join(name.split(".")[:2]) for name in flatten(mixed)}
    sections = ("run", "model", "data", "inner", "outer")
    expected = {name for name in dotted_names() if name.split(".")[0] in sections}
    own = {"data.sources", "data.shards", "data.cache", "model.init_from", "model.hf"}
    assert compared == expected - own - {"model.size"}  # which names keys that are compared


def test_own_paths_do_not_differ() -> None:
    one = load(
        None,
        [
            'data.sources=["/a"]',
            "model.init_from=/a",
            "data.cache=/a",
            "data.tokenizer=/a/tok.json",
            "local.out=/a",
        ],
        {},
    )
    two = load(
        None,
        [
            'data.sources=["/b"]',
            "model.init_from=/b",
            "data.cache=/b",
            "data.tokenizer=/b/tok.json",
            "local.out=/b",
        ],
        {},
    )
    assert flatten(one) == flatten(two)
    assert settings_digest(flatten(one)) == settings_digest(flatten(two))


def test_stages_are_compared_one_by_one() -> None:
    flat = flatten(load(None, [STAGES], {}))
    assert flat["outer.inner_steps.1.inner_steps"] == 5
    assert flat["outer.inner_steps.0.lr"] is None
    assert settings_digest(flat) != settings_digest(flatten(RunConfig()))


def test_the_digest_ignores_order() -> None:
    flat = flatten(RunConfig())
    assert settings_digest(dict(reversed(flat.items()))) == settings_digest(flat)


def test_newcomers_receive_everything_but_what_is_each_machines_own() -> None:
    sent = nested(load(None, [STAGES], {}))
    assert set(sent) == set(RunConfig.model_fields) - {"local", "dht"}
    assert json.loads(json.dumps(sent)) == sent


def test_toml_of_defaults_names_every_key() -> None:
    parsed = tomllib.loads(to_toml(RunConfig()))
    assert {f"{section}.{key}" for section, keys in parsed.items() for key in keys} == set(dotted_names())
