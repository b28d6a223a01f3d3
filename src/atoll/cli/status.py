"""`atoll status`: how a run stands, asked from outside."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.live import Live

from atoll.cli.options import Address, Authority, TokenFile
from atoll.cli.orders import way_to
from atoll.cli.output import deliver
from atoll.config.environment import run_token
from atoll.dashboard.status import render
from atoll.errors import ConfigError
from atoll.membership.operator import StandingBy, Status


def status(
    address: Address,
    /,
    *,
    json: Annotated[
        bool, Parameter(help="Print one JSON object on stdout, and nothing else.", negative="")
    ] = False,
    watch: Annotated[
        float, Parameter(help="Ask again every so many seconds, until Ctrl-C.", show_default=False)
    ] = 0.0,
    token_file: TokenFile = None,
    authority: Authority = "",
) -> int:
    """Show how a run stands: its peers and what each does, the round, why it waits, and what failed lately.

    Asking costs the run nothing: no round waits for it. Any machine will do that reaches the coordinator and has the
    run's token.

    Try:

        atoll status 10.0.0.5:7070
        atoll status 10.0.0.5:7070 --watch 2
        atoll status 10.0.0.5:7070 --json

    The fields of --json are listed in docs/operating.md. With --watch it prints one object a line. A coordinator that
    stands by says so, and who leads.

    Exit codes: 0 done; 2 usage; 4 cannot reach, within 15 s; 5 no or wrong token; 130/143 stopped.
    """
    if watch < 0:
        raise ConfigError(f"--watch {watch:g}: give a number of seconds above 0")
    ask = _asker(address, token_file, authority)
    if json:
        _show(ask, watch, lambda found: deliver(json_line(found)))
        return 0
    console = Console(highlight=False)
    if watch and console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:
            _show(ask, watch, lambda found: live.update(render(found), refresh=True))
    else:
        _show(ask, watch, lambda found: console.print(render(found), soft_wrap=True))
    return 0


def json_line(found: Status | StandingBy) -> str:
    """The struct's fields, without the tag that it travels with."""
    fields = {name: getattr(found, name) for name in found.__struct_fields__}
    return msgspec.json.encode(fields).decode() + "\n"


def _asker(address: str, token_file: Path | None, authority: str) -> Callable[[], Status | StandingBy]:
    token = run_token(token_file)
    from atoll.membership.operator_link import ask_status  # the web client is slow to import

    secure = way_to(address, authority)
    return lambda: ask_status(address, token, secure)


def _show(
    ask: Callable[[], Status | StandingBy], watch_s: float, show: Callable[[Status | StandingBy], None]
) -> None:
    """Once, or until the coordinator does not answer any more."""
    show(ask())
    while watch_s:
        time.sleep(watch_s)
        show(ask())
