"""What `atoll doctor` has found of a run so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from atoll.cli.checks.run import Way
from atoll.config.schema import RunConfig
from atoll.membership.examining_link import Examination
from atoll.network.checks.finding import Finding


@dataclass(slots=True)
class Examining:
    """What was found of the run, and what else came of it: the way to the coordinator, and this machine's settings,
    `joined` with the run's once those were told."""

    config: RunConfig
    joined: bool = False
    findings: list[Finding] = field(default_factory=list)
    ways: list[Way] = field(default_factory=list)
    seen: Examination | None = None
