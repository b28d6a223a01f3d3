"""Which versions are checkpoints, and who brings their shared part to the run's remote place.

Both are said in the verdict, which is journaled and the same for all: so all members save the same versions, and what
one of them lost another has. A run's last commit is always saved.
"""

from __future__ import annotations

from collections.abc import Sequence

from atoll.membership.coordinator_draft import Draft
from atoll.membership.coordinator_state import CoordinatorState
from atoll.membership.rates import by_uplink


def is_due(draft: Draft, version: int) -> bool:
    """Whether the commit that makes `version` is to be saved."""
    state, settings = draft.state, draft.state.settings
    if not settings.save_rounds and not settings.save_s:
        return False
    by_rounds = settings.save_rounds > 0 and version % settings.save_rounds == 0
    by_time = 0 < settings.save_s <= draft.elapsed_s() - state.saved_at_s
    return by_rounds or by_time or bool(draft.why_last())


def uploader(state: CoordinatorState, voters: Sequence[str]) -> str:
    """The member with the fastest uplink, as far as that is known, else the oldest. It holds the version."""
    if not state.settings.save_rounds and not state.settings.save_s:
        return ""
    up = by_uplink(state.rates)
    living = [record.peer for record in state.members() if record.peer in voters]
    return max(living, key=lambda peer: up.get(peer, 0.0), default="")
