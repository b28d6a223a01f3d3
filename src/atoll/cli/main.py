"""The command line's door: the table of commands, and the one place that turns errors into exit codes."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError

from atoll import __version__
from atoll.cli import config, token
from atoll.cli.bench.allreduce import allreduce
from atoll.cli.bench.codec import codec
from atoll.cli.bench.link import link
from atoll.cli.chaos import chaos
from atoll.cli.checkpoints.diff import diff
from atoll.cli.checkpoints.export import export
from atoll.cli.checkpoints.import_ import import_
from atoll.cli.checkpoints.ls import ls
from atoll.cli.checkpoints.verify import verify
from atoll.cli.coordinator import coordinator
from atoll.cli.data.prep import prep
from atoll.cli.data.stats import stats
from atoll.cli.demo import demo
from atoll.cli.doctor import doctor
from atoll.cli.evict import evict
from atoll.cli.join import join
from atoll.cli.launch import launch
from atoll.cli.leave import leave
from atoll.cli.output import outlive_readers
from atoll.cli.plan import plan
from atoll.cli.signals import Stopped, stopped_by_signals
from atoll.cli.status import status
from atoll.cli.stop import stop
from atoll.cli.train import train
from atoll.cli.vpn.down import down
from atoll.cli.vpn.status import status as vpn_status
from atoll.cli.vpn.up import up
from atoll.errors import AtollError, ConfigError, LocalError

HELP = """Train one model on machines that are far apart.

A *run* has one coordinator and any number of peers. Each peer trains by itself for many steps; now and
then all agree on one new set of weights. Try it on this machine:

    atoll demo

On several machines: `atoll coordinator run.toml --bind 0.0.0.0:7070 --new` on one of them makes the run, and prints
the line that all others join with. From any machine that has a token, `atoll status HOST:7070` tells how the run
stands.
"""

EPILOGUE = """Exit codes: 0 done; 2 usage or config; 3 this machine (port in use, no space); 4 cannot reach; \
5 refused (token, version, other model or settings); 6 quorum lost; 7 diverged or not finite; 8 data; \
9 another rank of the same peer is lost; 10, 11, 12 `atoll doctor` alone; 130 and 143 stopped by SIGINT and SIGTERM."""

COMMANDS = {
    "demo": demo,
    "coordinator": coordinator,
    "train": train,
    "join": join,
    "launch": launch,
    "plan": plan,
    "doctor": doctor,
    "status": status,
    "stop": stop,
    "leave": leave,
    "evict": evict,
    "chaos": chaos,
}
CONFIG_COMMANDS = {"show": config.show, "schema": config.schema}
CHECKPOINT_COMMANDS = {"ls": ls, "verify": verify, "diff": diff, "export": export, "import": import_}
TOKEN_COMMANDS = {"create": token.create, "list": token.list_, "revoke": token.revoke}
DATA_COMMANDS = {"prep": prep, "stats": stats}
VPN_COMMANDS = {"up": up, "down": down, "status": vpn_status}
BENCH_COMMANDS = {"allreduce": allreduce, "codec": codec, "link": link}


def build_app() -> App:
    """All commands. Their docstrings are their help; what is slow to import, they import when they run."""
    version = f"atoll {__version__}"
    app = App(
        name="atoll",
        help=HELP,
        help_epilogue=EPILOGUE,
        help_format="markdown",
        version=version,
        suppress_keyboard_interrupt=False,
    )
    settings = App(name="config", help="Show what a RUN.toml may say, or resolves to.", help_epilogue="")
    bench = App(
        name="bench",
        help="Measure the engine: beside its bound, and beside what others use.",
        help_epilogue="",
    )
    checkpoints = App(
        name="checkpoints",
        help="Look at what runs have saved, and take models out and in.",
        help_epilogue="",
    )
    data = App(
        name="data", help="Prepare text for training, and look at what was prepared.", help_epilogue=""
    )
    tokens = App(name="token", help="Say who may come to a run, and until when.", help_epilogue="")
    vpn = App(name="vpn", help="A WireGuard network of the run's own peers.", help_epilogue="")
    groups = (
        (app, COMMANDS),
        (tokens, TOKEN_COMMANDS),
        (settings, CONFIG_COMMANDS),
        (checkpoints, CHECKPOINT_COMMANDS),
        (data, DATA_COMMANDS),
        (vpn, VPN_COMMANDS),
        (bench, BENCH_COMMANDS),
    )
    for group, commands in groups:
        for name, command in commands.items():
            group.command(command, name=name, help_epilogue="")
    app.command(tokens)
    app.command(settings)
    app.command(checkpoints)
    app.command(data)
    app.command(vpn)
    app.command(bench)
    return app


def run(arguments: Sequence[str]) -> int:
    """Run one command; returns the exit code. Users' mistakes are one line each on stderr, no traceback."""
    try:
        with stopped_by_signals():
            code = build_app()(
                list(arguments), exit_on_error=False, print_error=False, result_action="return_value"
            )
            return code if isinstance(code, int) else 0
    except CycloptsError as error:
        return _complain(ConfigError(f"{_one_line(error)} (see atoll --help)"))
    except AtollError as error:
        return _complain(error)
    except OSError as error:
        if error.filename is None:
            raise
        reason = (error.strerror or str(error)).lower()
        return _complain(LocalError(f"{error.filename}: {reason}; is there space, and permission?"))
    except Stopped as stop:
        print(f"atoll: {stop}", file=sys.stderr)
        return stop.exit_code


def main() -> None:
    """The `atoll` command. All is closed when it has run; the interpreter's own end is not waited for: after torch it
    costs one to two seconds of a processor, and the process would still be there.
    """
    outlive_readers()
    code = run(sys.argv[1:])
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed from the start
            stream.flush()
    os._exit(code)


def _complain(error: AtollError) -> int:
    kind = "error: " if error.exit_code else ""
    for line in str(error).splitlines():
        print(f"atoll: {kind}{line}", file=sys.stderr)
    return error.exit_code


def _one_line(error: CycloptsError) -> str:
    text = " ".join(str(error).split())
    return text[:1].lower() + text[1:].rstrip(".")
