"""Options that several commands share, each documented once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

RunFile = Annotated[
    Path, Parameter(help="The run's settings; recipes/ holds complete ones.", show_default=False)
]
Address = Annotated[str, Parameter(help="The coordinator's host:port.", show_default=False)]
PeerName = Annotated[str, Parameter(help="The peer's name, as `atoll status` shows it.", show_default=False)]
Reason = Annotated[str, Parameter(help="Said to the peers, and kept in the events.", show_default=False)]
Assignments = Annotated[
    list[str] | None,
    Parameter(
        name="--set",
        help="Change one setting: section.key=value, e.g. outer.inner_steps=50. May be repeated.",
        negative="",
        show_default=False,
    ),
]
Authority = Annotated[
    str,
    Parameter(
        help="The fingerprint of the run's authority, from its join line. Default: ATOLL_LOCAL__AUTHORITY.",
        show_default=False,
    ),
]
TokenFile = Annotated[
    Path | None,
    Parameter(
        help="File with the run's token. Default: ATOLL_TOKEN_FILE, then ATOLL_TOKEN. Never an argument.",
        show_default=False,
    ),
]
