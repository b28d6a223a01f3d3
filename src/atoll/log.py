"""Logging for people. Machines read events (`atoll.events`); nothing parses a log line."""

from __future__ import annotations

import logging
import sys


def get(name: str) -> logging.Logger:
    """The logger of a module. Atoll is a library: it installs no handler on import."""
    return logging.getLogger(name)


class _Stderr(logging.Handler):
    """Writes to what is `sys.stderr` then: whoever redirects it later is followed."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except (OSError, ValueError):
            self.handleError(record)


def to_stderr(level: str = "INFO") -> None:
    """Send Atoll's log lines to stderr; called once, by the command line."""
    handler = _Stderr()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname).1s %(name)s: %(message)s", "%H:%M:%S"))
    root = logging.getLogger("atoll")
    root.handlers[:] = [handler]
    root.setLevel(level)
    root.propagate = False
