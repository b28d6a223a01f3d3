"""The loss plot is well-formed SVG with one line per peer, each of its own, and the kill marked."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from atoll import events
from atoll.dashboard.plot import HEIGHT, WIDTH, loss_plot
from atoll.dashboard.svg import Scale, element, ticks
from atoll.dashboard.view import Seen
from support.made_up_run import BEGAN_S, made_up_run

SVG = "{http://www.w3.org/2000/svg}"


def drawn(seen: list[Seen], title: str = "loss") -> ET.Element:
    return ET.fromstring(loss_plot(seen, title))


def texts(root: ET.Element) -> list[str]:
    return [text.text or "" for text in root.iter(f"{SVG}text")]


def test_one_line_per_peer_with_its_own_colour_and_dash() -> None:
    lines = [line for line in drawn(made_up_run()).iter(f"{SVG}polyline") if line.get("stroke-width") == "2"]
    assert len(lines) == 3
    assert len({line.get("stroke") for line in lines}) == 3
    assert len({line.get("stroke-dasharray") for line in lines}) == 3


def test_axes_legend_validation_and_kill() -> None:
    root = drawn(made_up_run(), "a <title> & more")
    shown = texts(root)
    assert {"a <title> & more", "inner step", "loss, nats per byte", "peer-0", "peer-1", "peer-2"} <= set(
        shown
    )
    assert {"peer-2 killed", "validation (shared weights)", "committed round"} <= set(shown)
    assert {"0", "100", "200", "2", "3", "4", "5"} <= set(shown)
    assert len(list(root.iter(f"{SVG}path"))) == 1  # the cross


def test_without_a_kill_nothing_is_marked() -> None:
    root = drawn(made_up_run(kill_at_round=None))
    assert not list(root.iter(f"{SVG}path"))
    assert not [text for text in texts(root) if "killed" in text]


def test_everything_lies_inside_the_picture() -> None:
    for line in drawn(made_up_run()).iter(f"{SVG}polyline"):
        for pair in line.attrib["points"].split():
            x, y = map(float, pair.split(","))
            assert 0 <= x <= WIDTH
            assert 0 <= y <= HEIGHT


@pytest.mark.parametrize("losses", [[], [3.0], [float("nan"), 2.0], [2.0, 2.0]])
def test_few_or_odd_points_still_make_a_picture(losses: list[float]) -> None:
    seen = [
        Seen(BEGAN_S, "peer-0", events.TrainingStep(step, loss, 1, 1.0, 1.0, 1.0))
        for step, loss in enumerate(losses, start=1)
    ]
    root = drawn(seen)
    assert ("no step was logged" in texts(root)) == (not losses)
    assert "nan" not in ET.tostring(root, encoding="unicode")


def test_ticks_are_round_numbers_inside_the_range() -> None:
    assert ticks(0, 240, 8) == [0, 50, 100, 150, 200]
    assert ticks(1.7, 5.8, 6) == [2, 3, 4, 5]
    assert ticks(0.013, 0.027, 5) == [0.015, 0.02, 0.025]
    assert ticks(1, 1, 5) == [1]


def test_scale_maps_ends_to_ends() -> None:
    down = Scale(0, 10, 100, 0)
    assert (down(0), down(5), down(10)) == (100, 50, 0)


def test_elements_escape_what_they_hold() -> None:
    assert (
        element("text", "a<b&c", font_size=12, fill='"x"')
        == '<text font-size="12" fill=\'"x"\'>a&lt;b&amp;c</text>'
    )
