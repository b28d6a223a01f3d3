"""Whose update enters a round's sum, and with which weight: one pure decision, the same for all members.

Left out are updates that are not finite, even if no step of theirs counted. A peer that took no step, or saw
no token, is absent to the bit. Left out as well are updates whose norm is above `norm_limit` x the median of
this round's norms and of the last committed rounds' (one median each). Norms of zero say nothing about what is
usual and do not count; the median has a floor, so that a run whose updates vanish does not start to reject
rounding noise.

A peer whose updates were refused in PROBATION_AFTER of the last OFFENCES_REMEMBERED rounds is on *probation* for as
many rounds: it stays a member and receives every result, but its updates do not count, whatever they are.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from statistics import median

import msgspec

from atoll.membership.messages import Ready
from atoll.values import Contribution

NORM_FLOOR = 1e-8
REMEMBERED_NORMS = 8
PROBATION_AFTER = 3
OFFENCES_REMEMBERED = 8

Offences = Mapping[str, tuple[int, ...]]
"""The rounds in which a peer's update was refused, by peer."""


class Selection(msgspec.Struct, frozen=True):
    """`contributions` sorted by peer, weights divided by their common divisor; `left_out` says why, by peer.

    `idle` are the peers without work: absent, but not at fault. `diverging`: there are updates, and none is
    finite.
    """

    contributions: tuple[Contribution, ...]
    left_out: dict[str, str]
    idle: tuple[str, ...]
    norms: tuple[float, ...]
    diverging: bool


def select(
    readies: Mapping[str, Ready],
    committed_norms: Sequence[float],
    *,
    norm_limit: float,
    equal: bool,
    probation: Mapping[str, str] | None = None,
    unleased: Mapping[str, str] | None = None,
) -> Selection:
    """Decide over the round's `readies` (by peer). `equal`: every contributor weighs 1, not its tokens. `probation`
    says of peers that are on it why, `unleased` of those who read data that is not leased to them.
    """
    left_out = {
        peer: f"its update is not finite ({ready.tokens} tokens in {ready.steps} steps)"
        for peer, ready in sorted(readies.items())
        if not (ready.finite and math.isfinite(ready.norm))
    }
    finite = {
        peer: ready
        for peer, ready in sorted(readies.items())
        if peer not in left_out and ready.steps > 0 and ready.tokens > 0
    }
    idle = tuple(sorted(set(readies) - set(left_out) - set(finite)))
    diverging = bool(left_out) and not finite
    left_out |= {peer: why for peer, why in sorted((unleased or {}).items()) if peer in finite}
    finite = {peer: ready for peer, ready in finite.items() if peer not in left_out}
    held = {peer: why for peer, why in sorted((probation or {}).items()) if peer in finite}
    if len(held) < len(finite):  # better an offender's update than none
        left_out |= held
        finite = {peer: ready for peer, ready in finite.items() if peer not in held}
    usual = usual_norm([ready.norm for ready in finite.values()], committed_norms)
    for peer, ready in finite.items():
        if usual is not None and ready.norm > norm_limit * usual:
            left_out[peer] = (
                f"the norm of its update is {ready.norm:.4g}, above norm_limit = {norm_limit:g} x "
                f"the median {usual:.4g}"
            )
    chosen = {peer: ready for peer, ready in finite.items() if peer not in left_out}
    weights = [1 if equal else ready.tokens for ready in chosen.values()]
    divisor = math.gcd(*weights) if weights else 1
    return Selection(
        contributions=tuple(
            Contribution(peer, weight // divisor, ready.update_digest)
            for (peer, ready), weight in zip(chosen.items(), weights, strict=True)
        ),
        left_out=left_out,
        idle=idle,
        norms=tuple(ready.norm for ready in chosen.values()),
        diverging=diverging,
    )


def probation(offences: Offences, round_: int) -> dict[str, str]:
    """Who is on probation in this round, and why."""
    found = {}
    for peer, rounds in offences.items():
        if len(rounds) >= PROBATION_AFTER and round_ <= rounds[-1] + OFFENCES_REMEMBERED:
            found[peer] = (
                f"it is on probation until round {rounds[-1] + OFFENCES_REMEMBERED}: its updates were refused in "
                f"rounds {', '.join(map(str, rounds))}"
            )
    return found


def remember_offences(
    offences: Offences, refused: Collection[str], round_: int
) -> dict[str, tuple[int, ...]]:
    """`refused` had their updates refused in this round, for what they were."""
    kept = {
        peer: tuple(each for each in rounds if each > round_ - OFFENCES_REMEMBERED)
        for peer, rounds in offences.items()
    }
    for peer in refused:
        kept[peer] = (*kept.get(peer, ()), round_)
    return {peer: rounds for peer, rounds in kept.items() if rounds}


def usual_norm(norms: Sequence[float], committed_norms: Sequence[float]) -> float | None:
    """The median that norms are held against; None while there is nothing to compare with."""
    positive = [norm for norm in (*norms, *committed_norms) if norm > 0]
    return max(median(positive), NORM_FLOOR) if positive else None


def remember_norms(committed_norms: Sequence[float], norms: Sequence[float]) -> tuple[float, ...]:
    """The medians of the last committed rounds, the one with `norms` included."""
    positive = [norm for norm in norms if norm > 0]
    newest = (median(positive),) if positive else ()
    return (*committed_norms, *newest)[-REMEMBERED_NORMS:]
