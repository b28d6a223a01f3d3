"""`atoll doctor`: whether this machine is fit to take part, and what keeps it from doing so."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from cyclopts import Parameter
from rich.console import Console

from atoll import __version__
from atoll.cli.checks.join_line import read_join_line
from atoll.cli.options import Assignments, Authority, TokenFile
from atoll.cli.output import deliver
from atoll.config.environment import run_authority, run_token
from atoll.config.schema import RunConfig
from atoll.errors import AtollError, Refused

if TYPE_CHECKING:
    from atoll.cli.checks.record import Examining
    from atoll.network.checks.finding import Finding

BOUND_S = 30.0
"""The whole takes no longer, besides the seconds that torch takes to import."""
EXIT_CODES = {"coordinator": 4, "refused": 5, "machine": 3, "out": 11, "in": 10, "clock": 12}
"""By what a problem is about; of several problems the first one here counts."""
_THIS, _NETWORK, _RUN = "this machine", "its network", "the run"
_MACHINE_CHECKS = ("settings", "own port")
_RUN_CHECKS = ("coordinator", "version", "clock", "joining", "a round")


def doctor(
    address: Annotated[
        str | None,
        Parameter(
            help="The coordinator, as the join line gives it; or the whole join line, quoted.",
            show_default=False,
        ),
    ] = None,
    /,
    *,
    run: Annotated[
        str | None, Parameter(help="The run's name, as the join line gives it.", show_default=False)
    ] = None,
    authority: Authority = "",
    set_: Assignments = None,
    rates: Annotated[bool, Parameter(help="Measure the ways to the members, a second each.")] = True,
    json: Annotated[
        bool, Parameter(help="Print one JSON object on stdout, and nothing else.", negative="")
    ] = False,
    token_file: TokenFile = None,
) -> int:
    """Check whether this machine can take part, and say what to do where it cannot.

    Alone it looks at this machine: versions, devices, memory, folders, limits, TCP. With a join line it also asks the
    coordinator: what that sees of this machine and whether it reaches it, the clock, the members, and how long a round
    will take. The run does not notice. Nothing is changed: what could be better is printed as lines to copy.

    Try:

        atoll doctor
        atoll doctor 10.0.0.5:7070 --run my-run
        atoll doctor 10.0.0.5:7070 --run my-run --set local.port=7071 --json

    Exit codes: 0 fit, or warnings only; 2 the join line or other usage; 3 this machine; 4 no coordinator;
    5 refused (token, version, other run); 10 others cannot reach this machine; 11 it cannot reach them; 12 its clock.
    Of several the first in the order 4, 5, 3, 11, 10, 12. Takes at most 30 s.
    """
    until_s = time.monotonic() + BOUND_S
    line = read_join_line(address, run, run_authority(authority))
    from atoll.cli.checks.examined import examine_run, own_config  # the web client is slow to import

    config = own_config(set_ or [])
    examining, trouble = None, None
    with _waiting(json, "looking at this machine" if line is None else f"asking {line.address}"):
        if line is not None:
            token, trouble = _token(token_file, line.authority)
            if token is not None:
                examining = examine_run(line, token, set_ or [], rates=rates, until_s=until_s)
        sections = _sections(config, examining, trouble)
    every = [each for findings in sections.values() for each in findings]
    code = exit_code(every)
    from atoll.cli.checks import screen

    ways = examining.ways if examining is not None else []
    if json:
        told = {
            "version": __version__,
            "run": line.run if line else None,
            "coordinator": line.address if line else None,
            "exit_code": code,
            "findings": every,
            "members": ways,
        }
        deliver(msgspec.json.encode(told).decode() + "\n")
    else:
        title = f"atoll doctor: {socket.gethostname()}" + (
            f", for {line.run} at {line.address}" if line else ""
        )
        screen.show(Console(highlight=False), title, sections, ways, _verdict(every, code, line is not None))
    return code


def exit_code(findings: Sequence[Finding]) -> int:
    """0, or that of the first problem in the order of EXIT_CODES."""
    about = {each.about for each in findings if each.grade == "problem"}
    return next((code for name, code in EXIT_CODES.items() if name in about), 0)


def _verdict(findings: Sequence[Finding], code: int, asked: bool) -> str:
    if code:
        return f"not fit yet (exit {code})"
    fit = (
        "fit to take part"
        if asked
        else "fit, as far as this machine goes; with a join line the run is asked too"
    )
    warned = any(each.grade == "warning" for each in findings)
    return f"{fit}, with the warnings above" if warned else fit


def _waiting(json: bool, what: str) -> Any:
    """A word on stderr while it takes its time."""
    return Console(stderr=True, quiet=json).status(f"{what} ...")


def _token(token_file: Path | None, authority: str) -> tuple[bytes | None, Finding | None]:
    """The run's token; or what to say without one: the machine is looked at all the same. In a run with an authority
    the certificate of an earlier start may take its place."""
    from atoll.membership.auth import check_token
    from atoll.network.checks.finding import problem

    try:
        token = run_token(token_file, needed=not authority)
        if not authority:
            check_token(token)
    except AtollError as error:
        what, _, remedy = str(error).partition(": " if isinstance(error, Refused) else "; ")
        return None, problem("coordinator", what, remedy, about="refused")
    return token, None


def _sections(
    config: RunConfig, examining: Examining | None, trouble: Finding | None
) -> Mapping[str, list[Finding]]:
    from atoll.cli.checks.local import look_at_machine, look_at_network

    seen = examining.seen if examining is not None else None
    way = (seen.coordinator_host, int(seen.address.rpartition(":")[2])) if seen is not None else None
    told = [trouble] if trouble is not None else []
    joined = False
    if examining is not None:
        config, joined, told = examining.config, examining.joined, examining.findings
    return {
        _THIS: [
            *look_at_machine(config, joined=joined),
            *(each for each in told if each.name in _MACHINE_CHECKS),
        ],
        _NETWORK: [
            *look_at_network(config, way),
            *(each for each in told if each.name not in (*_MACHINE_CHECKS, *_RUN_CHECKS)),
        ],
        _RUN: [each for each in told if each.name in _RUN_CHECKS],
    }
