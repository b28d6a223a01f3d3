"""[net]: rates as people write them, and what is said about those that are none."""

from __future__ import annotations

import pytest

from atoll.cli.coordinator import settings_of
from atoll.config.load import load
from atoll.config.rates import parse_rate
from atoll.config.shared import flatten, nested
from atoll.errors import ConfigError
from atoll.plan.candidates import TOPOLOGIES


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("", 0),
        ("200 Mbit/s", 25_000_000),
        ("200mbit/s", 25_000_000),
        ("1.5 Gbit/s", 187_500_000),
        ("25 MB/s", 25_000_000),
        ("800 kbps", None),
        ("8 bit/s", 1),
        ("1 bit/s", None),
        ("10 GB/s", 10_000_000_000),
        ("200 Mb/s", None),
        ("200", None),
        ("-1 MB/s", None),
        ("fast", None),
        ("1e9 bit/s", None),
    ],
)
def test_rates(text: str, bytes_per_s: int | None) -> None:
    if bytes_per_s is None:
        with pytest.raises(ValueError, match=r"write it as|leave it empty"):
            parse_rate(text)
    else:
        assert parse_rate(text) == bytes_per_s


@pytest.mark.parametrize(
    ("assignment", "said"),
    [
        ("net.topology=rin", '"auto", "direct", "ring" or "two-level"; did you mean "ring"?'),
        ("net.connections=0", "net.connections = 0: must be above 0"),
        ("net.connections=65", "must be at most 64"),
        ("net.connections=many", '"auto"'),
        (
            "net.max_up=200 Mb/s",
            '--set net.max_up: \'200 Mb/s\' is no rate: write it as "200 Mbit/s" or "25 MB/s"',
        ),
    ],
)
def test_mistakes_are_said_in_a_line(assignment: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, [assignment], {})
    assert said in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_the_coordinator_plans_as_configured() -> None:
    config = load(None, ["net.topology=ring", "net.connections=3", "net.progress_timeout_s=2"], {})
    assert (settings_of(config).topology, settings_of(config).connections) == ("ring", 3)
    assert settings_of(config).timeouts.progress_timeout_s == 2
    assert (settings_of(load(None, [], {})).topology, settings_of(load(None, [], {})).connections) == (
        "auto",
        0,
    )


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_every_topology_can_be_configured(topology: str) -> None:
    assert load(None, [f"net.topology={topology}"], {}).net.topology == topology


def test_caps_are_each_peers_own() -> None:
    config = load(None, ["net.max_up=1 MB/s"], {})
    assert set(nested(config)["net"]) == {"topology", "connections", "progress_timeout_s"}
    assert not any(name.startswith("net.") for name in flatten(config))
