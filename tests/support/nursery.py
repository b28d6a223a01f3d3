"""Starts Python processes that share one import of torch: real processes, forked from one that has it loaded.

Importing torch costs seconds of CPU; a swarm test starts several peers. The nursery is a single-threaded process that
imports what peers need, then forks one child per request; a child has its own output file and its own exit code, and
can be killed or frozen like any other process; it dies with the nursery, and the nursery with its test session.
Requests and answers are JSON lines over the nursery's pipes.
"""

from __future__ import annotations

import io
import json
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from support.tied import tie, tied

# Scripts import their neighbours as tests do.
_SERVE = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r}); import support.nursery as n; n.serve()"


class Child:
    """A process that the nursery started; as much of subprocess.Popen as tests use."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self._nursery, self.pid = nursery, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._nursery.ask({"poll": self.pid})
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float) -> int:
        deadline_s = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline_s:
                raise subprocess.TimeoutExpired(f"pid {self.pid}", timeout)
            time.sleep(0.01)
        return code


class Nursery:
    """The test's side: one nursery per test session. Children die with it."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            tied([sys.executable, "-c", _SERVE]),
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(
        self,
        script: Path,
        arguments: list[str],
        log: Path,
        environment: dict[str, str] | None = None,
        errors: Path | None = None,
    ) -> Child:
        """Run a script in a new process, with more of an `environment`; its output is appended to `log`, and what it
        says on stderr to `errors` (default: `log`). Waits for the first import of torch."""
        request = {
            "start": [str(script), *arguments],
            "log": str(log),
            "errors": str(errors or log),
            "environment": environment or {},
        }
        return Child(self, self.ask(request))

    def ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """End the nursery and every child it still has: they are one process group."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=30)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe
            pipe.close()


def serve() -> None:
    """The nursery's own loop: start and poll children until the pipe closes."""
    import torch
    import torch.distributed.fsdp
    import torch.distributed.tensor

    import atoll.diloco.optimizer
    import atoll.train.build  # noqa: F401  (this is what is worth sharing)

    torch.set_num_threads(1)
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])  # the first optimizer imports as much again
    for line in sys.stdin.buffer:
        request = json.loads(line)
        if "start" in request:
            answer: int | None = fork(
                request["start"], request["log"], request["errors"], request["environment"]
            )
        else:
            done, status = os.waitpid(request["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if done else None
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


def fork(arguments: list[str], log: str, errors: str, environment: dict[str, str]) -> int:
    nursery = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        tie(nursery)
        output, complaints = (
            os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644) for path in (log, errors)
        )
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(complaints, 2)
        sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", 0), write_through=True)
        sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb", 0), write_through=True)
        sys.argv = arguments
        os.environ.update(environment)
        runpy.run_path(arguments[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
