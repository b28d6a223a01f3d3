"""The words of coordinator scenarios."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from atoll.membership import coordinator
from atoll.membership.leases import Lease, Position, Read
from atoll.membership.messages import (
    Applied,
    CaughtUp,
    Declare,
    Heartbeat,
    HeartbeatAck,
    Leave,
    PeerMessage,
    Ready,
    SlotsWanted,
    SnapshotWanted,
    Vote,
)
from atoll.membership.operator import EvictPeer, LeavePeer, StopRun
from atoll.membership.settings import CoordinatorSettings, Timeouts
from atoll.membership.steps import (
    Answer,
    CloseConnection,
    CoordinatorEvent,
    Effect,
    Emit,
    Finish,
    Journal,
    JournalRecord,
    OperatorSaid,
    PeerArrived,
    PeerDropped,
    PeerSaid,
    Send,
    Step,
    Tick,
)
from atoll.sim.schedule_coordinator import make_lanes
from atoll.sim.schedule_transcript import describe, describe_message
from atoll.values import Edge, ParameterInfo, Range, RankInfo, TransferStats

LAYOUT = "w:4:float32 b:2:float32"
SETTINGS = {"run.seed": "1", "outer.codec": "int8", "outer.weights": "tokens"}


class CoordinatorScript:
    """One coordinator, its journal and its clock. Peers send heartbeats while time passes, unless told not
    to.
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        self._settings = CoordinatorSettings(run="r")
        self._journal: list[JournalRecord] = []
        self._state: coordinator.CoordinatorState | None = None
        self._incarnations: dict[str, str] = {}
        self._connected: set[str] = set()

    def run(self, command: str, words: list[str]) -> list[str]:
        if command != "settings" and self._state is None:
            self._start()
        names = [word for word in words if "=" not in word]
        options = dict(word.split("=", 1) for word in words if "=" in word)
        return getattr(self, f"do_{command}")(names, options)

    # ---- commands ----------------------------------------------------------------------------------------

    def do_settings(self, names: list[str], options: dict[str, str]) -> list[str]:
        known = {field.name: field.type for field in msgspec.structs.fields(CoordinatorSettings)}
        run = {key: value for key, value in options.items() if key in known}
        waits = {key: float(value) for key, value in options.items() if key not in known}
        merged = {**msgspec.structs.asdict(self._settings), **run, "timeouts": Timeouts(**waits)}
        self._settings = msgspec.convert(merged, CoordinatorSettings, strict=False)
        return []

    def do_restart(self, names: list[str], options: dict[str, str]) -> list[str]:
        self._connected.clear()
        return self._start()

    def do_join(self, names: list[str], options: dict[str, str]) -> list[str]:
        """Arrive and declare."""
        return [
            line
            for name in names
            for line in [*self.do_arrive([name], options), *self.do_declare([name], options)]
        ]

    def do_arrive(self, names: list[str], options: dict[str, str]) -> list[str]:
        told = []
        for name in names:
            self._incarnations[name] = options.get("as", self._incarnations.get(name, "1"))
            self._connected.add(name)
            told += self._feed(PeerArrived(name, self._incarnations[name], f"{name}.net"))
        return told

    def do_declare(self, names: list[str], options: dict[str, str]) -> list[str]:
        settings = SETTINGS | {key: value for key, value in options.items() if "." in key}
        layout = tuple(
            _parameter(each) for each in options.get("layout", LAYOUT.replace(" ", ",")).split(",")
        )
        whole = Range(0, sum(math.prod(each.shape) for each in layout))
        message = Declare(
            layout=layout,
            settings=settings,
            ranks=(RankInfo("host", 0, (whole,), sidecar_port=2),),
            version=int(options.get("version", 0)),
            round=int(options.get("round", 0)),
            digest=options.get("digest", "d0"),
            step=0,
            pending=_ready(options, int(options["pending"])) if "pending" in options else None,
            term=int(options.get("term", 0)),
            version_term=int(options.get("version_term", 0)),
            applying="applying" in options,
            num_slots=int(options.get("slots", 0)),
            wish=int(options.get("wish", 0)),
            leases=_leases(options.get("claims", "")),
        )
        return self._said(names, message)

    def do_ready(self, names: list[str], options: dict[str, str]) -> list[str]:
        assert self._state is not None
        return self._said(names, _ready(options, int(options.get("round", self._state.round.number))))

    def do_wants(self, names: list[str], options: dict[str, str]) -> list[str]:
        """`wants a more=2`: it runs dry before the round ends."""
        return self._said(names, SlotsWanted(int(options.get("number", 1)), int(options["more"])))

    def do_vote(self, names: list[str], options: dict[str, str]) -> list[str]:
        """`vote a b yes=RESULT` or `vote a no=WHY broken=a>b`, on the attempt under way or `attempt=N`."""
        assert self._state is not None
        attempt = self._state.round.attempt
        assert attempt is not None
        op = msgspec.structs.replace(
            attempt.plan.op, attempt=int(options.get("attempt", attempt.plan.op.attempt))
        )
        broken = tuple(Edge(*edge.split(">")) for edge in options.get("broken", "").split(",") if edge)
        reason = options.get("no", "").replace("_", " ")
        return self._said(
            names, Vote(op, "yes" in options, options.get("yes", ""), broken, reason, TransferStats())
        )

    def do_applied(self, names: list[str], options: dict[str, str]) -> list[str]:
        assert self._state is not None
        return self._said(names, Applied(self._state.version, options["digest"]))

    def do_caught(self, names: list[str], options: dict[str, str]) -> list[str]:
        """`caught a version=V round=R digest=D`."""
        version, number = int(options["version"]), int(options["round"])
        return self._said(names, CaughtUp(version, number, options["digest"], 10 * number))

    def do_snapshot(self, names: list[str], options: dict[str, str]) -> list[str]:
        return self._said(names, SnapshotWanted(int(options.get("version", 0))))

    def do_leave(self, names: list[str], options: dict[str, str]) -> list[str]:
        self._connected -= set(names)
        return self._said(names, Leave(options.get("why", "goodbye").replace("_", " "), "done" in options))

    def do_operator(self, names: list[str], options: dict[str, str]) -> list[str]:
        """`operator stop`, `operator leave a`, `operator evict a for=60`."""
        order, *peers = names
        reason = options.get("why", "").replace("_", " ")
        match order:
            case "stop":
                request: StopRun | LeavePeer | EvictPeer = StopRun(reason)
            case "leave":
                request = LeavePeer(peers[0], reason)
            case _:
                request = EvictPeer(peers[0], reason, float(options.get("for", 0)))
        return self._feed(OperatorSaid(1, request))

    def do_drop(self, names: list[str], options: dict[str, str]) -> list[str]:
        self._connected -= set(names)
        return [line for name in names for line in self._feed(PeerDropped(name, self._incarnations[name]))]

    def do_silent(self, names: list[str], options: dict[str, str]) -> list[str]:
        """From now on no heartbeat comes from these peers, but their connections stay open."""
        self._connected -= set(names)
        return []

    def do_wait(self, names: list[str], options: dict[str, str]) -> list[str]:
        """Let seconds pass, with ticks and heartbeats; tells what was done, and at the end what is waited
        for.
        """
        told: list[str] = []
        beat_s = self._settings.timeouts.heartbeat_s
        for half in range(round(float(names[0]) / beat_s * 2)):
            self._now_s += beat_s / 2
            for name in sorted(self._connected) if half % 2 else ():
                told += self._feed(
                    PeerSaid(name, self._incarnations[name], Heartbeat(0, "local")), quiet=True
                )
            told += self._feed(Tick(), quiet=True)
        return told or self._feed(Tick())

    def do_pause(self, names: list[str], options: dict[str, str]) -> list[str]:
        """The coordinator itself sleeps for so many seconds."""
        self._now_s += float(names[0])
        return self._feed(Tick())

    # ---- the machine -------------------------------------------------------------------------------------

    def _start(self) -> list[str]:
        begun = coordinator.start(self._settings, tuple(self._journal), b"key", None, self._now_s)
        return self._take(begun)

    def _said(self, names: list[str], message: PeerMessage) -> list[str]:
        return [
            line for name in names for line in self._feed(PeerSaid(name, self._incarnations[name], message))
        ]

    def _feed(self, event: CoordinatorEvent, quiet: bool = False) -> list[str]:
        assert self._state is not None
        step = coordinator.step(self._state, event, self._now_s, make_lanes=make_lanes)
        told = self._take(step)
        return [] if quiet and len(told) == 1 else told

    def _take(self, step: Step[Any]) -> list[str]:
        self._state = step.state
        self._journal += [effect.record for effect in step.effects if isinstance(effect, Journal)]
        return [f"-> {step.reason}", *(told for effect in step.effects if (told := _told(effect)))]


def _parameter(text: str) -> ParameterInfo:
    name, shape, dtype = text.split(":")
    return ParameterInfo(name, tuple(int(size) for size in shape.split("x")), dtype)


def _ready(options: dict[str, str], number: int) -> Ready:
    norm = float(options.get("norm", 1.0))
    return Ready(
        round=number,
        version=int(options.get("version", 0)),
        digest=options.get("digest", "d0"),
        tokens=int(options.get("tokens", 100)),
        steps=int(options.get("steps", 10)),
        norm=norm,
        finite=norm == norm,
        reads=_reads(options.get("reads", "")),
        wish=int(options.get("wish", 0)),
    )


def _leases(text: str) -> tuple[Lease, ...]:
    """`5,6`: slots from their start, in the first epoch."""
    return tuple(Lease(int(slot)) for slot in text.split(",") if slot)


def _reads(text: str) -> tuple[Read, ...]:
    """`5:0.0-0.7,6:0.0-1.0`: slot, from epoch.token to epoch.token."""
    found = []
    for each in text.split(",") if text else ():
        slot, _, span = each.partition(":")
        start, end = (_position(place) for place in span.split("-"))
        found.append(Read(int(slot), start, end))
    return tuple(found)


def _position(text: str) -> Position:
    epoch, token = text.split(".")
    return int(epoch), int(token)


def _told(effect: Effect) -> str:
    match effect:
        case Send(message=HeartbeatAck()):
            return ""
        case Send(peer=peer, message=message):
            return f"{peer} <- {describe_message(message)}"
        case Journal(record=record):
            return f"journal {describe(record)}"
        case Emit(event=event):
            return f"event {type(event).__name__}"
        case CloseConnection(peer=peer, incarnation=incarnation):
            return f"close {peer}/{incarnation}"
        case Answer(reply=reply):
            return f"operator <- {'' if reply.ok else 'no: '}{reply.reason}"
        case Finish(exit_code=exit_code):
            return f"finish with exit code {exit_code}"
    raise AssertionError(effect)
