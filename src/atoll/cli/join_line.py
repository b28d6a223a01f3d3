"""The join line: all that a newcomer types, printed ready to paste by the coordinator and by every peer."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from atoll import events

TOKEN_LINE = "      with this run's token in ATOLL_TOKEN or ATOLL_TOKEN_FILE"
_LOOPBACK = ("127.", "localhost:", "[::1]:")


def join_line(address: str, run: str, authority: str = "") -> str:
    """`address` is the coordinator's, or those of all that may lead, separated by commas. `authority` is the
    fingerprint of the run's authority, if it has one."""
    return f"join: atoll join {address} --run {run}" + (f" --authority {authority}" if authority else "")


class JoinLinePrinter:
    """A sink that prints it once this peer is connected, with the address that led it to the coordinator."""

    def __init__(self, console: Console, address: str, authority: str = "") -> None:
        self._console, self._address, self._authority = console, address, authority

    def __call__(self, wall_time_s: float, source: str, event: events.Event) -> None:
        if isinstance(event, events.RunStarted):
            lines = [join_line(self._address, event.run, self._authority), TOKEN_LINE]
            if self._address.startswith(_LOOPBACK):
                lines.append(
                    "      on this machine; from others, with the coordinator's address as they reach it"
                )
            elif not self._authority:
                lines.append(
                    "      NOTHING IS ENCRYPTED: this run has no authority, and relies on the VPN it is in"
                )
            print_lines(self._console, lines)


def print_lines(console: Console, lines: Sequence[str]) -> None:
    """As they are, so that they can be pasted: no markup, no wrapping."""
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
