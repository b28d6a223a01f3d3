"""What a check found: one sentence for a person, a remedy if something can be done, and the facts for a program."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Grade = Literal["ok", "warning", "problem"]
About = Literal["machine", "coordinator", "refused", "out", "in", "clock"]
"""What a problem is about; scripts tell these apart by the exit code."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """`name` is a word or two. A `problem` keeps this machine from taking part, or the others from it; a `warning`
    costs speed or may become one. A remedy at `ok` is a thing that could be better yet.
    """

    name: str
    grade: Grade
    about: About = "machine"
    sentence: str
    remedy: str = ""
    details: dict[str, Any] = {}


def found(name: str, sentence: str, **more: Any) -> Finding:
    """An `ok` finding."""
    return Finding(name=name, grade="ok", sentence=sentence, **more)


def warning(name: str, sentence: str, remedy: str, **more: Any) -> Finding:
    return Finding(name=name, grade="warning", sentence=sentence, remedy=remedy, **more)


def problem(name: str, sentence: str, remedy: str, **more: Any) -> Finding:
    return Finding(name=name, grade="problem", sentence=sentence, remedy=remedy, **more)
