"""What the commands of `atoll checkpoints` share."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

Place = Annotated[
    str,
    Parameter(help="A folder of checkpoints, or the run's folder that has one.", show_default=False),
]
Checkpoint = Annotated[
    str,
    Parameter(
        help="PLACE for its latest version, or PLACE@VERSION.",
        show_default=False,
    ),
]
Json = Annotated[bool, Parameter(help="Print one JSON object on stdout, and nothing else.", negative="")]
