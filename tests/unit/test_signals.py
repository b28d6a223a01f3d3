"""Signals to a program with a seat in a run: what is raised, what is put back, and what is none of our business.

Each case is a process of its own, since handlers and the descriptor belong to the process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.signals import GONE_S, GOODBYE_S
from support.slack import SLACK_S

PRELUDE = """
import os, signal, sys, threading, time
from atoll import signals
from support.blocked import block

def say(*words):
    print(*words, flush=True)

def send(number=signal.SIGTERM):
    os.kill(os.getpid(), number)
    time.sleep(30)
"""


class Program:
    """A script after the prelude, as a process."""

    def __init__(self, folder: Path, body: str) -> None:
        (folder / "program.py").write_text(PRELUDE + body)
        self.process = subprocess.Popen(
            [sys.executable, "-u", str(folder / "program.py")],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def rest(self, within_s: float = 30.0) -> tuple[int, str]:
        out, _ = self.process.communicate(timeout=within_s)
        return self.process.returncode, out


@pytest.fixture
def run(tmp_path: Path) -> Iterator[object]:
    started: list[Program] = []

    def one(body: str) -> Program:
        started.append(Program(tmp_path, body))
        return started[-1]

    yield one
    for program in started:
        program.process.kill()
        program.process.communicate()


def test_sigterm_unwinds_the_program_and_ends_it_with_143(run) -> None:
    code, out = run(
        """
manners = signals.leave_politely(say)
try:
    send()
finally:
    say("unwound", sys.exc_info()[1])
    manners.close()
"""
    ).rest()
    assert (code, out) == (143, "unwound stopped by SIGTERM\n")


def test_ctrl_c_is_a_keyboard_interrupt_as_ever(run) -> None:
    code, out = run(
        """
manners = signals.leave_politely(say)
try:
    send(signal.SIGINT)
except KeyboardInterrupt as error:
    say("unwound", error)
    manners.close()
    say(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""
    ).rest()
    assert (code, out) == (0, "unwound stopped by SIGINT\nTrue\n")


def test_what_was_there_is_there_again(run) -> None:
    code, out = run(
        """
before = [signal.getsignal(number) for number in signals.SIGNALS]
manners = signals.leave_politely(say)
say([signal.getsignal(number) for number in signals.SIGNALS] != before)
say("atoll-signals" in [thread.name for thread in threading.enumerate()])
manners.close()
manners.close()
say([signal.getsignal(number) for number in signals.SIGNALS] == before)
say(signal.set_wakeup_fd(-1), threading.active_count())
"""
    ).rest()
    assert (code, out) == (0, "True\nTrue\nTrue\n-1 1\n")


@pytest.mark.parametrize(
    "theirs",
    [
        "signal.signal(signal.SIGTERM, lambda *told: say('theirs'))",
        "signal.signal(signal.SIGINT, signal.SIG_IGN)",
        "read, write = os.pipe(); os.set_blocking(write, False); signal.set_wakeup_fd(write)",
        "sys.ps1 = '>>> '",
    ],
    ids=["a handler", "ignored", "an event loop", "interactive"],
)
def test_a_program_with_ways_of_its_own_keeps_them(run, theirs: str) -> None:
    code, out = run(
        f"""
{theirs}
before = [signal.getsignal(number) for number in signals.SIGNALS]
manners = signals.leave_politely(say)
say([signal.getsignal(number) for number in signals.SIGNALS] == before, threading.active_count())
manners.leaving()
manners.close()
"""
    ).rest()
    assert (code, out) == (0, "True 1\n")


def test_another_thread_than_the_main_one_touches_nothing(run) -> None:
    code, out = run(
        """
def seat():
    manners = signals.leave_politely(say)
    say(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
    manners.close()

thread = threading.Thread(target=seat)
thread.start()
thread.join()
"""
    ).rest()
    assert (code, out) == (0, "True\n")


def test_a_main_thread_in_one_long_call_is_spoken_for_and_ended(run) -> None:
    program = run("signals.leave_politely(say); block(lambda: say('blocked'))")
    assert program.line() == "blocked"
    program.process.send_signal(signal.SIGTERM)
    asked_s = time.monotonic()
    assert program.line() == "stopped by SIGTERM"
    assert time.monotonic() - asked_s < GOODBYE_S + SLACK_S
    code, out = program.rest(GONE_S + SLACK_S)
    assert (code, out) == (143, "atoll: still busy 4 s after SIGTERM: ended at once\n")


def test_what_the_program_makes_of_the_signal_is_not_bounded(run) -> None:
    """Only what comes after `leaving` is."""
    program = run(
        """
signals.GOODBYE_S, signals.GONE_S = 0.1, 0.5
manners = signals.leave_politely(say)
try:
    send()
except SystemExit:
    time.sleep(1.5)
    say("saved")
    manners.leaving()
    time.sleep(30)
"""
    )
    code, out = program.rest()
    assert (code, out) == (143, "saved\natoll: still busy 0.5 s after SIGTERM: ended at once\n")


def test_a_command_is_bounded_whatever_it_does(run) -> None:
    code, out = run(
        """
signals.GOODBYE_S, signals.GONE_S = 0.1, 0.5
signal.signal(signal.SIGTERM, lambda *told: say("handled"))
with signals.ended_in_time():
    manners = signals.leave_politely(say)
    send()
"""
    ).rest()
    expected = "handled\nstopped by SIGTERM\natoll: still busy 0.5 s after SIGTERM: ended at once\n"
    assert (code, out) == (143, expected)


def test_the_signals_of_a_forked_child_are_not_its_parent_s(run) -> None:
    code, out = run(
        """
signals.GOODBYE_S = signals.GONE_S = 0.2
manners = signals.leave_politely(say)
child = os.fork()
if child == 0:
    time.sleep(30)
time.sleep(0.2)
os.kill(child, signal.SIGTERM)
say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
time.sleep(1)
say("the parent lives")
manners.close()
"""
    ).rest()
    assert (code, out) == (0, "-15\nthe parent lives\n")
