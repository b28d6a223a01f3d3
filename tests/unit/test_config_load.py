"""Files, variables and --set become one config; all mistakes are told at once, with place and suggestion."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.config.load import load
from atoll.config.schema import RunConfig
from atoll.errors import ConfigError


def write(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


def mistakes(path: Path | None, *assignments: str, environ: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(path, assignments, environ or {})
    text = str(caught.value)
    return (text.replace(f"{path.parent}/", "") if path else text).splitlines()


def test_later_layers_win_key_by_key(tmp_path: Path) -> None:
    path = write(tmp_path, "[outer]\nlr = 0.5\nmomentum = 0.5\ninner_steps = 7\n")
    environ = {"ATOLL_OUTER__MOMENTUM": "0.6", "ATOLL_OUTER__INNER_STEPS": "8"}
    outer = load(path, ["outer.inner_steps=9"], environ).outer
    assert (outer.lr, outer.momentum, outer.inner_steps) == (0.5, 0.6, 9)


def test_a_table_named_like_a_command_is_not_lost(tmp_path: Path) -> None:
    assert load(write(tmp_path, "[run]\nsteps = 100\n"), [], {}).run.steps == 100


def test_no_file_gives_the_defaults() -> None:
    assert load(None, [], {}) == RunConfig()


def test_whole_numbers_lists_and_stages_are_accepted(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "[inner]\nlr = 1\nbetas = [0, 0.5]\n"
        "[[outer.inner_steps]]\nuntil = 10\ninner_steps = 2\n"
        "[[outer.inner_steps]]\ninner_steps = 5\nlr = 1\n",
    )
    config = load(path, ['data.sources=["a", "b"]'], {})
    assert config.inner.lr == 1.0
    assert config.inner.betas == (0.0, 0.5)
    assert config.data.sources == ("a", "b")
    assert isinstance(config.outer.inner_steps, tuple)
    assert [stage.inner_steps for stage in config.outer.inner_steps] == [2, 5]


def test_values_that_are_no_toml_are_text() -> None:
    config = load(None, ["run.name=first", "local.coordinator=10.0.0.1:7070", "local.peer=17"], {})
    assert (config.run.name, config.local.coordinator, config.local.peer) == ("first", "10.0.0.1:7070", "17")


def test_a_share_is_a_number_or_a_word(tmp_path: Path) -> None:
    path = write(tmp_path, "[outer]\nerror_feedback = 2\n")
    assert mistakes(path) == ["run.toml:2: outer.error_feedback = 2: must be at most 1"]
    path = write(tmp_path, '[outer]\nerror_feedback = "all"\n')
    assert mistakes(path) == ['run.toml:2: outer.error_feedback = "all": must be a number or "auto"']


def test_all_mistakes_are_told_at_once_with_their_lines(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "[run]\nsteps = 0\nseed = 1.5\n\n"
        '[outer]\nlr = "fast"\ninner_stesp = 50\ncodec = "int9"\nmomentum = inf\n'
        "[modle]\ndim = 3\n",
    )
    assert mistakes(path, "eval.sequences=0", "data.sources=foo") == [
        "run.toml:3: run.seed = 1.5: must be a whole number",
        "run.toml:2: run.steps = 0: must be above 0",
        '--set data.sources = "foo": must be a list in [ ]',
        'run.toml:6: outer.lr = "fast": must be a number',
        "run.toml:9: outer.momentum = inf: must be a finite number",
        'run.toml:8: outer.codec = "int9": must be "fp32", "bf16", "fp16", "int8", "int4", "e3m0", "stat2", "topk" or '
        '"topk256"; did you mean "int8"?',
        "run.toml:7: outer.inner_stesp = 50: unknown key; did you mean outer.inner_steps?",
        "--set eval.sequences = 0: must be above 0",
        "run.toml:10: modle: unknown table; did you mean model?",
    ]


def test_a_key_in_the_wrong_table_is_found_in_the_right_one(tmp_path: Path) -> None:
    path = write(tmp_path, "[inner]\ninner_steps = 4\n")
    assert mistakes(path) == [
        "run.toml:2: inner.inner_steps = 4: unknown key; did you mean outer.inner_steps?"
    ]


def test_a_key_without_a_table_is_found(tmp_path: Path) -> None:
    path = write(tmp_path, "momentum = 0.5\n")
    assert mistakes(path) == ["run.toml:1: momentum = 0.5: unknown table; did you mean outer.momentum?"]


def test_mistakes_inside_stages_have_their_own_lines(tmp_path: Path) -> None:
    tables = "[[outer.inner_steps]]\nuntil = 5\ninner_steps = 0\n[[outer.inner_steps]]\ninner_stesp = 3\n"
    assert mistakes(write(tmp_path, tables)) == [
        "run.toml:3: outer.inner_steps[0].inner_steps = 0: must be above 0",
        "run.toml:5: outer.inner_steps[1].inner_stesp = 3: unknown key; "
        "did you mean outer.inner_steps[1].inner_steps?",
    ]
    inline = "[outer]\ninner_steps = [\n  { until = 5, inner_steps = 1 },\n  { inner_steps = -1 },\n]\n"
    assert mistakes(write(tmp_path, inline)) == [
        "run.toml:4: outer.inner_steps[1].inner_steps = -1: must be above 0"
    ]


def test_either_form_of_inner_steps_is_named_when_neither_is_given() -> None:
    assert mistakes(None, "outer.inner_steps=often") == [
        '--set outer.inner_steps = "often": must be a whole number or a list in [ ]'
    ]
    assert mistakes(None, "outer.inner_steps=0") == ["--set outer.inner_steps = 0: must be above 0"]


def test_rules_between_keys_point_at_a_key_that_was_given(tmp_path: Path) -> None:
    path = write(tmp_path, "[membership]\n\nmin_peers = 3\n[model]\nnum_heads = 3\n")
    assert mistakes(path) == [
        "run.toml:5: model: dim = 128 is not a multiple of num_heads = 3",
        "run.toml:3: membership: min_peers = 3 is above start_peers = 1",
    ]
    assert mistakes(None, "data.seq_len=300") == [
        "--set data.seq_len: data.seq_len = 300 is above model.max_seq_len = 128"
    ]


def test_a_variable_is_named_where_it_is_wrong() -> None:
    environ = {"ATOLL_OUTER__LR": "fast"}
    assert mistakes(None, environ=environ) == ['ATOLL_OUTER__LR: outer.lr = "fast": must be a number']


@pytest.mark.parametrize(
    ("text", "line"),
    [("[run]\nname = \n", 2), ("[run]\nsteps = 1\nsteps = 2\n", 3), ('a = """never closed\n', 2)],
)
def test_broken_toml_is_told_with_its_line(tmp_path: Path, text: str, line: int) -> None:
    (message,) = mistakes(write(tmp_path, text))
    assert message.startswith(f"run.toml:{line}: this is no TOML: ")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (missing,) = mistakes(tmp_path / "no.toml")
    assert missing == "cannot read no.toml: no such file or directory; give the path of a RUN.toml"
    (folder,) = mistakes(tmp_path)
    assert "is a directory" in folder
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"a = 1\n\xff\xfe")
    (message,) = mistakes(binary)
    assert message == "binary.toml: not UTF-8 text (byte 6); a RUN.toml is UTF-8"


def test_malformed_assignments_are_all_told() -> None:
    first, second = mistakes(None, "outer.lr", "=3")
    assert first.startswith("--set outer.lr: write it as section.key=value")
    assert second.startswith("--set =3: ")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["dead_s=1", "heartbeat_s=0.6"], "dead_s = 1.0 is below 2 x heartbeat_s = 1.2"),
        (["coordinator_lost_s=5"], "coordinator_lost_s = 5.0 must be above dead_s = 5.0"),
        (["dead_s=40"], "relearn_s = 30.0 is below dead_s = 40.0"),
        (["stall_s=1.5"], "stall_s = 1.5 is below 2 x heartbeat_s = 2.0"),
        (["vote_s=0.9"], "vote_s = 0.9 is below heartbeat_s = 1.0"),
        (
            ["policy=deadline", "grace_s=9", "ready_wait_s=9"],
            "grace_s = 9.0 must be below ready_wait_s = 9.0",
        ),
        (["attempt_s=5"], "net.progress_timeout_s = 5.0 must be below membership.attempt_s = 5.0"),
    ],
)
def test_timeouts_that_contradict_each_other_are_refused_with_the_numbers(
    given: list[str], said: str
) -> None:
    (message,) = mistakes(None, *(f"membership.{each}" for each in given))
    assert said in message


@pytest.mark.parametrize("recipe", sorted(Path("recipes").glob("*.toml")), ids=lambda path: path.name)
def test_recipes_contradict_nothing(recipe: Path) -> None:
    load(recipe, [], {})


def test_steps_by_speed_go_with_weights_by_tokens(tmp_path: Path) -> None:
    path = write(tmp_path, '[outer]\nsteps_by_speed = true\nweights = "equal"\n')
    (message,) = mistakes(path)
    assert 'steps_by_speed = true goes with weights = "tokens"' in message


def test_the_sidecar_has_a_port_of_its_own() -> None:
    with pytest.raises(ConfigError, match="sidecar_port = 7071 is the engine's port: choose another one"):
        load(None, ["local.port=7071", "local.sidecar_port=7071"])
    assert load(None, ["local.port=7071", "local.sidecar_port=7072"]).local.sidecar_port == 7072
