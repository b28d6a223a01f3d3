"""Peers that do not hold the newest version: what they are told, who serves them, and when they are members again.

A newcomer, a peer that was cut off or frozen, and one whose bits are wrong all go the same way: the coordinator tells
them the newest version and the members' sidecars, and again whenever that changes; they fetch, and say what they hold.
Who holds the newest version while no attempt is under way is a member. Members wait for none of it.
"""

from __future__ import annotations

import math
from itertools import chain, islice, zip_longest

from msgspec.structs import replace

from atoll import events
from atoll.membership import leasing
from atoll.membership.admission import dismiss
from atoll.membership.coordinator_draft import Draft
from atoll.membership.coordinator_state import CatchingUp, CoordinatorState, PeerRecord, counted, ids
from atoll.membership.messages import Applied, CatchUp, CaughtUp, Declare, Serve, SnapshotWanted
from atoll.membership.rates import by_uplink
from atoll.membership.ways import unreached
from atoll.values import CODECS, Source

MAX_SOURCES = 8
SNAPSHOT_BYTES_PER_ELEMENT = 8
"""Anchor and outer momentum, in fp32."""
MOST_ELEMENTS = 1 << 48
"""A parameter that is declared larger counts as if it had so many: nobody holds it anyway."""


def begin(draft: Draft, record: PeerRecord, held: CatchingUp) -> None:
    """From now on this peer is no member, but one that catches up."""
    was_member = record.member
    draft.put(replace(record, member=False, ready=None, digest="", catching_up=held))
    draft.because(held.why)
    draft.emit(
        events.PeerCatchingUp(
            peer=record.peer,
            version=held.version,
            newest=draft.state.version,
            reason=held.why,
            members=ids(draft.state.members()),
        )
    )
    if was_member:
        draft.members_changed(held.why)


def begin_declared(draft: Draft, record: PeerRecord, message: Declare, why: str, *, trusted: bool) -> None:
    """A peer declared a state that is not the newest version's."""
    held = CatchingUp(
        version=message.version,
        round=message.round - message.applying,
        digest=message.digest,
        since_s=draft.now_s,
        trusted=trusted,
        wants_snapshot=message.version == 0 and _replay_is_more(draft.state),
        why=why,
        slots=message.slots,
    )
    begin(
        draft,
        replace(
            record,
            ranks=message.ranks,
            step=max(record.step, message.step),
            wish=message.wish,
            own_data=message.own_data,
        ),
        held,
    )
    leasing.compare_own(draft, record.peer, message.own_data)


def _replay_is_more(state: CoordinatorState) -> bool:
    """Whether all updates of the run are more bytes than a snapshot: then a newcomer will want one, and it can be
    staged while it still asks who has what."""
    codec = CODECS.get(str((state.run_settings or {}).get("outer.codec")))
    sizes = [min(math.prod(each.shape), MOST_ELEMENTS) for each in (state.layout or {}).values()]
    if codec is None:
        return False
    return state.version * sum(codec.run_bytes(size) for size in sizes) > SNAPSHOT_BYTES_PER_ELEMENT * sum(
        sizes
    )


def left_behind(draft: Draft, record: PeerRecord) -> None:
    """The run committed a version without this member."""
    state = draft.state
    why = (
        f"the run committed version {state.version} without {record.peer}, which was away or did not answer in "
        "time: it drops its work since the version before, and catches up"
    )
    held = CatchingUp(
        version=state.version - 1,
        round=state.round.number - 2,
        digest="",
        since_s=draft.now_s,
        why=why,
    )
    begin(draft, record, held)


def wrong_bits(draft: Draft, record: PeerRecord, found: str, *, held_round: int = 0) -> None:
    """This peer's state is not the run's. Once it may fetch a good one; if that happens again, it has to go."""
    state = draft.state
    draft.emit(
        events.DigestMismatch(peer=record.peer, version=state.version, expected=state.digest, found=found)
    )
    what = (
        f"{record.peer} holds other bits than the run at version {state.version} (digest {found}, the run's is "
        f"{state.digest})"
    )
    start_over(draft, record, what, digest=found, held_round=held_round)


def start_over(draft: Draft, record: PeerRecord, what: str, *, digest: str = "", held_round: int = 0) -> None:
    """What this peer holds, or computes, differs from all others': a snapshot, but only once."""
    state = draft.state
    if record.differed or state.version == 0 or state.ending():
        reason = f"{what}; it takes no part in a sum: check its memory and its software"
        dismiss(draft, record, "diverged", reason)
        return
    held = CatchingUp(
        version=state.version,
        round=held_round,
        digest=digest,
        since_s=draft.now_s,
        trusted=False,
        why=f"{what}: it takes a snapshot",
    )
    begin(draft, replace(record, differed=record.differed + 1), held)


def hear_caught_up(draft: Draft, record: PeerRecord, message: CaughtUp) -> None:
    held = record.catching_up
    if held is None:
        draft.because(f"ignored that {record.peer} caught up: it is a member")
        draft.send(record.peer, draft.view(f"{record.peer} is a member"))
        return
    held = replace(
        held,
        version=message.version,
        round=message.round,
        digest=message.digest,
        slots=None,
        trusted=_is_of_the_run(draft.state, message.version, message.digest),
    )
    draft.put(replace(record, catching_up=held, step=max(record.step, message.step)))
    if message.version == draft.state.version and not held.trusted:
        wrong_bits(draft, draft.state.peers[record.peer], message.digest, held_round=message.round)
        return
    draft.because(f"{record.peer} holds version {message.version}, the newest is {draft.state.version}")


def hear_applied(draft: Draft, record: PeerRecord, message: Applied) -> None:
    """It took an outer step that was under way when it was told to catch up."""
    held = record.catching_up
    assert held is not None
    if message.version == held.version + 1:
        told = replace(held, version=message.version, round=held.round + 1, digest=message.digest)
        draft.put(replace(record, catching_up=told))
    draft.because(f"{record.peer}, which catches up, holds version {message.version}")


def hear_snapshot_wanted(draft: Draft, record: PeerRecord, message: SnapshotWanted) -> None:
    if record.catching_up is None:
        draft.because(f"ignored that {record.peer} wants a snapshot: it is a member")
        return
    draft.put(replace(record, catching_up=replace(record.catching_up, wants_snapshot=True)))
    draft.because(f"{record.peer} needs a snapshot: the updates after version {message.version} are gone")


def tell_again(draft: Draft, record: PeerRecord) -> None:
    """The peer speaks as if it were a member: it did not hear what it has to do."""
    assert record.catching_up is not None
    draft.put(replace(record, catching_up=replace(record.catching_up, told=None)))
    draft.because(f"ignored what {record.peer} says before it has caught up")


def _is_of_the_run(state: CoordinatorState, version: int, digest: str) -> bool:
    """Whether these bits may be the run's: they are not known to be others."""
    return version <= state.version and state.digests().get(version, digest) == digest


# ---- decided whenever something changed ----------------------------------------------------------------------------


def settle(draft: Draft) -> None:
    """Let in who has caught up, and tell the others what changed for them."""
    state = draft.state
    behind = _behind(state)
    if not behind or state.over or state.ending():
        return
    if _lets_in(state):
        for record in behind:
            held = record.catching_up
            assert held is not None
            newest = held.trusted and held.version == state.version and held.digest
            if newest and (not draft.state.digest or draft.state.digest == held.digest):
                _admit(draft, record, held)
    sources = _sources(draft.state)
    for record in _behind(draft.state):
        assert record.catching_up is not None
        _tell(draft, record, record.catching_up, sources)
    if _behind(draft.state):
        _have_served(draft, sources)


def _lets_in(state: CoordinatorState) -> bool:
    """Not while attempts are made: who is not in them would only fall behind again, unless they wait for more peers."""
    few = len(state.members()) < state.settings.min_peers
    return state.round.attempt is None and (state.round.attempts == 0 or few)


def _admit(draft: Draft, record: PeerRecord, held: CatchingUp) -> None:
    """It is the youngest member, and counted from the next round on; this one does not wait for it."""
    state = draft.state
    draft.remove(record.peer)
    draft.put(
        replace(
            record,
            member=True,
            catching_up=None,
            digest=held.digest,
            moved_s=draft.now_s,
            joined_round=state.round.number,
        )
    )
    leasing.welcome(draft, record.peer)
    members = ids(draft.state.members())
    draft.emit(
        events.PeerJoined(
            peer=record.peer,
            version=state.version,
            members=members,
            seconds=draft.now_s - held.since_s,
        )
    )
    reason = f"{record.peer} has caught up with version {state.version}: {counted(len(members), 'member')}"
    draft.because(reason)
    draft.members_changed(reason)


def _tell(draft: Draft, record: PeerRecord, held: CatchingUp, sources: tuple[Source, ...]) -> None:
    state = draft.state
    if held.trusted and held.version == state.version:
        return
    order = CatchUp(
        term=state.term,
        version=state.version,
        round=state.round.number - 1,
        digests=state.digests(),
        sources=sources,
        trusted=held.trusted,
        reason=held.why,
    )
    if order != held.told and record.connected:
        draft.send(record.peer, order)
        draft.put(replace(record, catching_up=replace(held, told=order)))


def _sources(state: CoordinatorState) -> tuple[Source, ...]:
    """The sidecars of the members with the fastest uplinks, as far as these are known; then the oldest; last those whom
    no member reaches. One at several hosts is several sources, of which some may answer: all donors' first hosts come
    before anybody's second one, so that none takes the place of the others."""
    known = by_uplink(state.rates)
    shut = unreached(state.ways, ids(state.members())) if state.ways else {}
    first = (state.peers[peer] for peer in known if peer in state.peers)
    rest = (record for record in state.members() if record.peer not in known)
    serving = (each for each in chain(first, rest) if each.member and each.connected and _sidecar(each))
    donors = sorted(serving, key=lambda record: record.peer in shut) if shut else serving
    of_each = [
        [Source(record.peer, host, _sidecar(record)) for host in record.ranks[0].bare_hosts()]
        for record in islice(donors, MAX_SOURCES)
    ]
    in_turn = chain.from_iterable(zip_longest(*of_each))
    return tuple(islice((each for each in in_turn if each), MAX_SOURCES))


def _sidecar(record: PeerRecord) -> int:
    return record.ranks[0].sidecar_port if record.ranks else 0


def _have_served(draft: Draft, sources: tuple[Source, ...]) -> None:
    """Wake the sources' sidecars, once a version; have a snapshot staged if somebody needs one."""
    version = draft.state.version
    wanting = [
        record for record in _behind(draft.state) if record.catching_up and record.catching_up.wants_snapshot
    ]
    asked = (version, bool(wanting))
    for source in sources:
        record = draft.state.peers[source.peer]
        if asked > record.served:
            draft.put(replace(record, served=asked))
            draft.send(source.peer, Serve(*asked))
    for record in wanting if sources else ():
        assert record.catching_up is not None
        draft.put(replace(record, catching_up=replace(record.catching_up, wants_snapshot=False)))


def _behind(state: CoordinatorState) -> tuple[PeerRecord, ...]:
    return tuple(record for record in state.peers.values() if record.catching_up is not None)
