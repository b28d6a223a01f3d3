"""`atoll token`: who may come to a run with an authority, and until when."""

from __future__ import annotations

import sys
from typing import Annotated

import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from atoll.cli.evict import parse_duration
from atoll.cli.join_line import join_line
from atoll.cli.options import Address, Authority, TokenFile
from atoll.cli.orders import ask, give
from atoll.cli.output import deliver
from atoll.config.environment import run_authority
from atoll.errors import ConfigError
from atoll.membership.operator import Done, MakeToken, RevokeToken, Tokens, TokensWanted, TokenText


def create(
    address: Address,
    /,
    *,
    scope: Annotated[str, Parameter(help="watch: look; join: take part; admin: give orders.")] = "join",
    for_: Annotated[
        str, Parameter(name="--for", help="How long it lets in: 90m, 12h, 7d; 0: for ever.")
    ] = "7d",
    note: Annotated[str, Parameter(help="Whom it is for, to be shown in the list.")] = "",
    run: Annotated[
        str, Parameter(help="The run's name, to print the whole join line.", show_default=False)
    ] = "",
    authority: Authority = "",
    token_file: TokenFile = None,
) -> int:
    """Make a token and print it, on stdout and once: the coordinator keeps only what proves it.

    Several can exist at a time, one for each team or volunteer, and each can be revoked alone. Needs a token that may
    admin.

    Try:

        atoll token create 10.0.0.5:7070 --for 12h --note "the lab in Bern" > join.token
        atoll token create 10.0.0.5:7070 --scope watch --for 0

    Exit codes: 0 made; 2 usage; 4 cannot reach; 5 refused; 130/143 stopped.
    """
    for_s = 0.0 if for_.strip() == "0" else parse_duration(for_)
    made = ask(address, token_file, authority, MakeToken(scope, for_s, note))
    if isinstance(made, Done):
        raise ConfigError(made.reason)
    assert isinstance(made, TokenText)
    if run and scope != "watch":
        print(join_line(address, run, run_authority(authority)), file=sys.stderr)
        print("      with this token in ATOLL_TOKEN, or its file in ATOLL_TOKEN_FILE:", file=sys.stderr)
    deliver(made.text + "\n")
    return 0


def list_(
    address: Address,
    /,
    *,
    json: Annotated[
        bool, Parameter(help="Print one JSON array on stdout, and nothing else.", negative="")
    ] = False,
    authority: Authority = "",
    token_file: TokenFile = None,
) -> int:
    """Show the run's tokens: what each allows, until when, and which peers came by it. Never their secrets.

    Exit codes: 0 done; 2 usage; 4 cannot reach; 5 refused; 130/143 stopped.
    """
    found = ask(address, token_file, authority, TokensWanted())
    if isinstance(found, Done):
        raise ConfigError(found.reason)
    assert isinstance(found, Tokens)
    if json:
        deliver(msgspec.json.encode(found.tokens).decode() + "\n")
        return 0
    table = Table("token", "may", "until", "peers", "note", box=None, pad_edge=False)
    for each in found.tokens:
        table.add_row(
            each.id, each.scope, _until(each.left_s, each.revoked), ", ".join(each.peers), each.note
        )
    Console(highlight=False).print(table)
    return 0


def revoke(
    address: Address,
    token: Annotated[str, Parameter(help="The token's id: its part before the dot.", show_default=False)],
    /,
    *,
    authority: Authority = "",
    token_file: TokenFile = None,
) -> int:
    """Let nobody in by this token any more. Peers that came by it stay: `atoll evict` sends them away.

    Exit codes: 0 revoked; 2 usage, or no such token; 4 cannot reach; 5 refused; 130/143 stopped.
    """
    return give(address, token_file, authority, RevokeToken(token.partition(".")[0]))


def _until(left_s: float | None, revoked: bool) -> str:
    if revoked:
        return "revoked"
    if left_s is None:
        return "for ever"
    return "expired" if left_s <= 0 else f"in {left_s / 3600:.1f} h"
