"""Logging for people. Machines read events (`atoll.events`); nothing parses a log line."""

from __future__ import annotations

import logging


def get(name: str) -> logging.Logger:
    """The logger of a module. Atoll is a library: it installs no handler on import."""
    return logging.getLogger(name)


def to_stderr(level: str = "INFO") -> None:
    """Send Atoll's log lines to stderr; called once, by the command line."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname).1s %(name)s: %(message)s", "%H:%M:%S"))
    root = logging.getLogger("atoll")
    root.handlers[:] = [handler]
    root.setLevel(level)
    root.propagate = False
