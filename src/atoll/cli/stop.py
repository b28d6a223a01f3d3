"""`atoll stop`: end a run with its open round."""

from __future__ import annotations

from atoll.cli.options import Address, Authority, Reason, TokenFile
from atoll.cli.orders import give
from atoll.membership.operator import StopRun


def stop(
    address: Address, /, *, reason: Reason = "", token_file: TokenFile = None, authority: Authority = ""
) -> int:
    """End a run: its open round is closed at once and is the last. All peers keep what is committed and exit 0.

    Every peer contributes the steps it has made. If too few members live for another round, or nobody answers
    within membership.freeze_s, the run ends at the version it has. Saying it twice is no mistake.

    Try:

        atoll stop 10.0.0.5:7070 --reason "good enough"

    Exit codes: 0 the run ends; 2 usage; 4 cannot reach; 5 wrong token; 130/143 stopped.
    """
    return give(address, token_file, authority, StopRun(reason))
