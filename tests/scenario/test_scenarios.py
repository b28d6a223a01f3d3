"""Every scenario's transcript is what the machines do today; a change of behaviour is a change of these
texts.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from scenario.runner import play

SCENARIOS = sorted(Path(__file__).parent.glob("*/*.txt"))


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_scenario(path: Path) -> None:
    assert play(path) == path.read_text()


def test_scenarios_exist() -> None:
    assert len(SCENARIOS) >= 12
