"""One constant: what a loaded machine may add to a wait that a test bounds."""

from __future__ import annotations

SLACK_S = 5.0
