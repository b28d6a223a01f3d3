"""What is told about a model of `transformers` where that is not installed, or before it is asked."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from atoll.config.load import load
from atoll.config.shared import flatten, nested
from atoll.errors import ConfigError
from atoll.train.causal import read_hub_config
from support.hub import write_config


def test_the_library_that_is_missing_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"pip install 'atoll-train\[hf\]'$") as caught:
        read_hub_config(write_config("gpt2", tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read: no such file or directory; give a folder"),
        ("{", "is no config.json"),
        ("[]", "is no config.json"),
        (json.dumps({"model_type": "gpt2", "auto_map": {"AutoConfig": "a.B"}}), "names code of its own"),
    ],
)
def test_no_code_of_a_folder_is_asked_for(
    tmp_path: Path, text: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # it would be told of, were it asked
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        read_hub_config(tmp_path)
    assert "\n" not in str(caught.value)


def test_where_a_peer_keeps_the_model_is_its_own_affair() -> None:
    one, two = (load(None, [f"model.hf={path}", "data.seq_len=4096"], {}) for path in ("/a", "/b"))
    assert flatten(one) == flatten(two)
    assert nested(one)["model"]["hf"] == "/a", "a newcomer looks there first"
