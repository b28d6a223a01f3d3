"""Everything that happens, as past-tense values given to sinks.

An event is a frozen struct; its class name is its `type` on disk. `wall_time_s` (Unix time) and `source` (a peer
id, or "coordinator") are added by the `EventLog`. Sinks must not block for long: training waits for them. What a
sink raises ends this process's part in the run, so it is LocalError, and only for a record that cannot be kept. The
JSON-lines file is always there; console, plots and dashboards are folds over the same events.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from atoll.errors import LocalError
from atoll.values import Edge, LinkRate

SlotReads = dict[str, tuple[tuple[int, int, int, int, int], ...]]
"""By peer: (slot, epoch, token, epoch, token), from where to where it read."""


class Event(msgspec.Struct, frozen=True, tag_field="type", tag=True):
    """Base of all events."""


class RunStarted(Event, frozen=True):
    """A process of the run began: `role` is "coordinator" or "peer"."""

    role: str
    run: str
    settings_digest: str
    pid: int


class CoordinatorListening(Event, frozen=True):
    address: str
    term: int
    restarted: bool


class CoordinatorStoodBy(Event, frozen=True):
    """Another coordinator of this run leads (`leader` is its address); this one waits for its lease to end."""

    address: str
    leader: str


class CoordinatorSteppedDown(Event, frozen=True):
    """This coordinator led, and may not any more; nothing was sent that the journal does not hold."""

    reason: str


class PeerConnected(Event, frozen=True):
    """A peer proved the token. It is no member yet."""

    peer: str
    address: str


class PeerRefused(Event, frozen=True):
    peer: str
    reason: str


class PeerJoined(Event, frozen=True):
    """A peer holds the run's newest version: it is a member from now on. `seconds` is how long it had to catch up."""

    peer: str
    version: int
    members: tuple[str, ...]
    seconds: float = 0.0


class PeerCatchingUp(Event, frozen=True):
    """A peer (new, or a member until now) holds `version` and not the newest: it is told to fetch what it lacks."""

    peer: str
    version: int
    newest: int
    reason: str
    members: tuple[str, ...]


class SnapshotStaged(Event, frozen=True):
    """A copy of the shared state lies ready for those who catch up."""

    version: int


class CaughtUp(Event, frozen=True):
    """This peer fetched what it lacked, `bytes_by_source` from each donor; `snapshot_version` None: updates did it."""

    version: int
    from_version: int
    snapshot_version: int | None
    updates: int
    received_bytes: int
    bytes_by_source: dict[str, int]
    seconds: float


class InnerStateTaken(Event, frozen=True):
    """This peer, new in the run, begins with a copy of `donor`'s inner optimizer state (`inner.joiner` "donor")."""

    donor: str
    version: int
    size_bytes: int


class InnerStateMissed(Event, frozen=True):
    """It should, and no donor had one that fits: it begins with a fresh one, and its learning rate rises anew."""

    reason: str


class StartWeightsMissed(Event, frozen=True):
    """`model.init_from` is not on this machine: the peer, which joins by its line, declares that it holds nothing, and
    takes the whole state from other peers."""

    path: str


class VersionLearned(Event, frozen=True):
    """The run stands at another version than the journal says: learned from the peers, or rolled back to it."""

    version: int
    round: int
    reason: str


class PeerLost(Event, frozen=True):
    """A member's heartbeat was gone for longer than `dead_s`, or it stopped making progress."""

    peer: str
    reason: str
    members: tuple[str, ...]


class PeerLeft(Event, frozen=True):
    """A member said goodbye."""

    peer: str
    reason: str
    members: tuple[str, ...]


class PeerAskedToLeave(Event, frozen=True):
    """An operator asked a member to leave; `PeerLeft` follows when it does."""

    peer: str
    reason: str


class PeerEvicted(Event, frozen=True):
    """An operator sent a peer away; its id is refused for `for_s` seconds (0: until the run ends)."""

    peer: str
    reason: str
    for_s: float
    members: tuple[str, ...]


class PeerCertified(Event, frozen=True):
    """The run's authority gave a peer a certificate, because it holds this token, or `renewed` an earlier one."""

    peer: str
    serial: str
    token: str
    renewed: bool


class TokenChanged(Event, frozen=True):
    """A token was "made" or "revoked". Its secret is nowhere."""

    token: str
    scope: str
    what: str


class RunStopped(Event, frozen=True):
    """An operator stopped the run: the round that is open is its last, or there is none."""

    reason: str


class PeerLeftOut(Event, frozen=True):
    """A member's update was left out of a round by decision; all members decide alike."""

    peer: str
    round: int
    reason: str


class AttemptStarted(Event, frozen=True):
    """An attempt was planned. `predicted_s` is how long it should take on the wire, `reason` says why these lanes."""

    op: str
    members: tuple[str, ...]
    contributors: tuple[str, ...]
    reason: str
    topology: str = ""
    predicted_s: float = 0.0


class AttemptFailed(Event, frozen=True):
    op: str
    reason: str


class RatesMeasured(Event, frozen=True):
    """Links whose rate was seen for the first time, or has changed: by a round's own traffic, at most once a round, or
    `probed`: by a peer that was asked to, while no round ran.
    """

    round: int
    links: tuple[LinkRate, ...]
    probed: bool = False


class ProbesFailed(Event, frozen=True):
    """A peer could not measure its links to these peers; the reasons are by target. Rounds will, if they use them."""

    peer: str
    reasons: dict[str, str]


class ReachChanged(Event, frozen=True):
    """Who can dial whom is not what it was. `none`: pairs of which neither can dial the other, so rounds go round them.
    `one_way`: source can dial target, and not the other way; that is enough. `reasons` say why dials failed, by
    "source -> target"."""

    none: tuple[Edge, ...]
    one_way: tuple[Edge, ...]
    reasons: dict[str, str]


class AddressDoubted(Event, frozen=True):
    """A peer's address may not be what others need; the reason says why, and what to do."""

    address: str
    reason: str


class RoundCommitted(Event, frozen=True):
    """The coordinator's record of a committed round."""

    round: int
    version: int
    op: str
    members: tuple[str, ...]
    contributors: tuple[str, ...]
    weights: tuple[int, ...]
    result_digest: str
    reason: str


class SlotsLeased(Event, frozen=True):
    """Within a round, data slots were leased to a peer: it holds `slots` now, and held `before`. At a verdict all are
    shared out anew, without a word."""

    peer: str
    slots: int
    before: int


class SlotsReturned(Event, frozen=True):
    """A peer is gone and the data slots that it held are free; what it read and was not committed is read again."""

    peer: str
    slots: int


class SlotsRead(Event, frozen=True):
    """What a round has read of the text, by peer: (slot, epoch, token, epoch, token), from where to where. `dropped`
    was read by those whose work does not count; it is not read again."""

    round: int
    version: int
    committed: SlotReads
    dropped: SlotReads


class DataRanDry(Event, frozen=True):
    """What is leased to this peer was read before the round ended, and asking (it held `before` slots, now `slots`) did
    not bring enough: it reads them once more, in the next epoch; with none it takes no step until the next round."""

    slots: int
    before: int


class SameDataRead(Event, frozen=True):
    """Peers that read each its own data (`data.scope` "own") read the same."""

    peers: tuple[str, ...]
    reason: str


class OldPositionsUsed(Event, frozen=True):
    """The run goes on from a version whose positions in the data are not known, and reads on from those of another."""

    version: int
    positions_of: int
    reason: str


class RoundSkipped(Event, frozen=True):
    round: int
    reason: str


class DigestMismatch(Event, frozen=True):
    """A peer stands on other bits than the run; it is not planned."""

    peer: str
    version: int
    expected: str
    found: str


class TrainingStep(Event, frozen=True):
    """One inner step of a peer (every `[local] log_every`-th, a round's last, and every skipped one).

    `loss` is nats per token. `skipped`: it was not finite, and the weights were left alone.
    """

    step: int
    loss: float
    tokens: int
    tokens_per_s: float
    lr: float
    grad_norm: float
    skipped: bool = False


class RoundApplied(Event, frozen=True):
    """A peer's own record of a round that it committed; seconds are this peer's, bytes are counted at its sockets.

    `mean_loss` (nats per token) is None where the peer made no step, or reported no loss.
    """

    round: int
    version: int
    step: int
    inner_steps: int
    members: tuple[str, ...]
    contributors: tuple[str, ...]
    tokens: int
    mean_loss: float | None
    compute_s: float
    wait_s: float
    encode_s: float
    wire_s: float
    vote_s: float
    apply_s: float
    sent_bytes: int
    received_bytes: int
    delta_norm: float
    outer_lr: float
    outer_momentum: float
    digest: str


class AnchorEvaluated(Event, frozen=True):
    """Validation loss of the anchor (nats per token), the weights all members agree on."""

    step: int
    version: int
    val_loss: float
    tokens: int


class RowsSkipped(Event, frozen=True):
    """Input rows that could not be read, or (`empty`) hold no text; counted, never silent."""

    path: str
    count: int
    example: str
    empty: bool = False


class PeerKilled(Event, frozen=True):
    """The demo (or a rehearsal) ended a peer on purpose."""

    peer: str
    signal: str


class FaultPlayed(Event, frozen=True):
    """A rehearsal did something else to a peer: `kind` is "stop", "join" or "leave"; a stop lasts `seconds`."""

    kind: str
    peer: str
    seconds: float = 0.0


class ModelSaved(Event, frozen=True):
    path: str
    version: int
    digest: str


class CheckpointSaved(Event, frozen=True):
    """A version is in this peer's place, verified, and `latest` leads to it. Training stood still for `still_s`; the
    rest was done beside it. `shared_bytes` 0: another peer that shares the place had written that part."""

    version: int
    path: str
    shared_bytes: int
    own_bytes: int
    still_s: float
    write_s: float
    verify_s: float
    removed: tuple[int, ...]


class CheckpointUploaded(Event, frozen=True):
    """A version, or this peer's own part of it, is in the run's remote place and was read back. `shared`: the shared
    part, by the peer that the coordinator named; the remote `latest` leads to it."""

    version: int
    address: str
    shared: bool
    seconds: float
    removed: tuple[int, ...] = ()


class CheckpointFetched(Event, frozen=True):
    """This peer had no checkpoint; it took the run's latest from the remote place, every byte checked. `own_version` is
    that of its own part, which may be older; None: there is none of it."""

    version: int
    address: str
    seconds: float
    own_version: int | None = None


class CheckpointSkipped(Event, frozen=True):
    """A version that was due is not saved by this peer, by decision; the next one is another occasion."""

    version: int
    reason: str


class CheckpointFailed(Event, frozen=True):
    """A save came to nothing; `latest` is what it was. `number` counts those of this process, from 1."""

    version: int
    reason: str
    number: int


class CheckpointsCounted(Event, frozen=True):
    """At a peer's end: its saves, and the newest version that is safe (-1: none of this process's)."""

    saved: int
    skipped: int
    failed: int
    newest: int


class CheckpointDamaged(Event, frozen=True):
    """A checkpoint, or a part of one, that is not used; the one before it is tried."""

    version: int
    reason: str


class Resumed(Event, frozen=True):
    """This peer goes on from a checkpoint. `own_part` if its own part was there; `remarks` say what was dropped, or
    comes from elsewhere."""

    version: int
    step: int
    path: str
    own_part: bool
    remarks: tuple[str, ...]


class RunEnded(Event, frozen=True):
    """A process of the run ended. `exit_code` as documented in README."""

    reason: str
    exit_code: int


class LoggedEvent(msgspec.Struct, frozen=True):
    """One line of an events.jsonl: who wrote it, when (Unix seconds), and what happened."""

    wall_time_s: float
    source: str
    event: dict[str, Any]


Sink = Callable[[float, str, Event], None]


class EventLog:
    """Hands events to sinks, in order. Safe to call from any thread if its sinks are."""

    def __init__(self, source: str, *sinks: Sink) -> None:
        self.source = source
        self._sinks = sinks

    def emit(self, event: Event) -> None:
        wall_time_s = time.time()
        for sink in self._sinks:
            sink(wall_time_s, self.source, event)


class JsonLinesSink:
    """Appends events to a file, one JSON object a line, one write a line (so a killed process leaves whole lines).

    For one thread. Raises LocalError (no space, no permission) once; the line that did not fit is taken back, and
    the sink is silent from then on, so that whoever catches the error can still say goodbye.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._encoder = msgspec.json.Encoder()
        self._broken = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise self._in_the_way(error) from None

    def __call__(self, wall_time_s: float, source: str, event: Event) -> None:
        if self._broken:
            return
        line = {"wall_time_s": wall_time_s, "source": source, "event": event}
        rest = memoryview(self._encoder.encode(line) + b"\n")
        begin = os.fstat(self._fd).st_size
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            self._broken = True
            with contextlib.suppress(OSError):  # a device has no length
                os.ftruncate(self._fd, begin)
            raise self._in_the_way(error) from None

    def close(self) -> None:
        os.close(self._fd)

    def _in_the_way(self, error: OSError) -> LocalError:
        reason = (error.strerror or str(error)).lower()
        return LocalError(f"cannot write events to {self._path}: {reason}; make room there or set local.out")


def event_types() -> dict[str, type[Event]]:
    """Every event class by its name on disk."""
    return {cls.__name__: cls for cls in Event.__subclasses__()}


def read_events(path: Path, offset: int = 0) -> Iterator[tuple[int, LoggedEvent, Event | None]]:
    """Whole lines from `offset` on, as (offset after the line, line, typed event).

    The event is None where this version does not know its type. A torn last line is left for the next call.
    """
    decoder = msgspec.json.Decoder(LoggedEvent)
    types = event_types()
    with path.open("rb") as file:
        file.seek(offset)
        for raw in file:
            if not raw.endswith(b"\n"):
                return
            offset += len(raw)
            line = decoder.decode(raw)
            cls = types.get(line.event.get("type", ""))
            yield offset, line, _typed(line.event, cls) if cls else None


def _typed(fields: dict[str, Any], cls: type[Event]) -> Event:
    """JSON has no NaN: where a number was not finite it holds null, and reads as NaN."""
    nan = {name: math.nan for name in _floats(cls) if fields.get(name, 0.0) is None}
    return msgspec.convert({**fields, **nan}, cls)


@functools.cache  # looking at a class costs as much as reading fifty lines
def _floats(cls: type[Event]) -> tuple[str, ...]:
    return tuple(field.name for field in msgspec.structs.fields(cls) if field.type is float)
