"""The error family: one class per thing a caller would do differently.

AtollError                    exit code
├── ConfigError               2   fix the command or the file; nothing has started
├── LocalError                3   this machine: port in use, no space, no compiler
├── SiblingLost               9   another rank of this peer is gone, or does not answer: start the peer again
├── MembershipError
│   ├── Unreachable           4   nobody answers at the address: check it, then start again
│   ├── Refused               5   this peer may not take part (token, version, other model or settings)
│   ├── QuorumLost            6   the run cannot go on, or went on without this peer
│   └── Dismissed             0   an operator sent this peer away before it trained: nothing is wrong
├── DeadlineExceeded          4   a wait took longer than its deadline
├── Diverged                  7   not finite, or digests disagree
└── DataError                 8   the corpus: empty, unreadable, or too many bad rows

Messages say what happened, with which values, and what to do. Exit 0 means that every step that was
asked for was committed; 130 and 143 are SIGINT and SIGTERM. 10, 11 and 12 are findings of `atoll doctor`.
"""

from __future__ import annotations


class AtollError(Exception):
    """Base of all errors that Atoll raises on purpose. `exit_code` is what the command line ends with."""

    exit_code = 1


class ConfigError(AtollError):
    """The command line or a RUN.toml is wrong; nothing has started."""

    exit_code = 2


class LocalError(AtollError):
    """Something on this machine is in the way."""

    exit_code = 3


class SiblingLost(AtollError):
    """Another rank of this peer is gone, frozen, or ended; no rank can go on without it.

    `exit_code` is 9, or that of the sibling if it ended with an error and said so.
    """

    exit_code = 9

    def __init__(self, message: str, exit_code: int = 9) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class MembershipError(AtollError):
    """Base of everything that concerns taking part in a run."""


class Unreachable(MembershipError):
    """Nobody answers at an address, or not any more."""

    exit_code = 4


class Refused(MembershipError):
    """The coordinator does not admit this peer, and says why."""

    exit_code = 5


class QuorumLost(MembershipError):
    """The run cannot go on, or went on without this peer."""

    exit_code = 6


class Dismissed(MembershipError):
    """An operator sent this peer away, or stopped the run, before it took part. Nothing is wrong."""

    exit_code = 0


class DeadlineExceeded(AtollError):
    """A wait reached its deadline."""

    exit_code = 4


class Diverged(AtollError):
    """Numbers are not finite, or members hold different bits."""

    exit_code = 7


class DataError(AtollError):
    """The corpus is empty, unreadable, or has too many bad rows."""

    exit_code = 8
