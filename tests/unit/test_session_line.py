"""A peer's own line: what it is told reaches its engine and, as caps, the planner."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import torch

from atoll.diloco import engine_slot
from atoll.diloco.engine_slot import EngineSlot
from atoll.diloco.joining import join
from atoll.diloco.schedule import OuterSchedule
from atoll.diloco.session import Session
from atoll.errors import ConfigError, LocalError
from atoll.events import EventLog
from atoll.membership.link import Admission
from atoll.membership.messages import Declare, View
from atoll.membership.settings import Timeouts
from atoll.network.addresses import EngineAddress
from atoll.network.line import Line
from atoll.recovery.donor import Donor
from atoll.state.tensors import ModelTensors

TIMEOUTS = Timeouts(connect_s=3.0, progress_timeout_s=2.0)


class Seat:
    """A member that is let in at once."""

    declared: Declare
    session_key = b"k" * 32

    def declare(self, message: Declare, meanwhile: object = None) -> View:
        self.declared = message
        return View(term=1, version=0, round=0, members=("a",), started=True, reason="")

    def progress(self, step: int, phase: str, steps_in_round: int, round_steps: int) -> None: ...
    def freeze_requested(self, round: int) -> bool:
        return False

    def asked_to_leave(self) -> str:
        return ""

    def close(self) -> None: ...


def opened(seat: Seat, line: Line, sidecar_port: int = 0) -> Session:
    admission = Admission(
        settings=None, timeouts=TIMEOUTS, session_key=b"k" * 32, term=1, seen_as="127.0.0.1"
    )
    session = Session(
        run="r",
        peer="a",
        member=seat,  # type: ignore[arg-type]
        admission=admission,
        slot=EngineSlot(),
        engine=EngineAddress("127.0.0.1", 0, "127.0.0.1", sidecar_port),
        tensors=ModelTensors([("w", torch.nn.Parameter(torch.zeros(8)))]),
        inner=None,
        total_steps=4,
        events=EventLog("a"),
        line=line,
    )
    session.open_rounds(OuterSchedule.constant(2, 0.7, 0.9, True, 4), codec="int8", settings={})
    return session


def test_caps_and_timeouts_reach_the_engine_and_the_declaration(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    real = engine_slot.NativeCommunicator

    def engine(**options: Any) -> Any:
        given.update(options)
        return real(**options)

    monkeypatch.setattr(engine_slot, "NativeCommunicator", engine)
    seat = Seat()
    opened(seat, Line(max_up=1000, max_down=2000)).close()
    assert (given["max_up_bytes_per_s"], given["max_down_bytes_per_s"]) == (1000, 2000)
    assert (given["connect_timeout_s"], given["progress_timeout_s"], given["congestion"]) == (3.0, 2.0, "")
    (rank,) = seat.declared.ranks
    assert (rank.max_up, rank.max_down) == (1000, 2000)


def test_a_key_that_changed_while_the_peer_got_ready_reaches_engine_and_sidecar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Somebody was evicted between this peer's admission and the moment it has an engine to be told."""
    told: list[tuple[str, bytes]] = []
    engine, donor = engine_slot.NativeCommunicator, Donor
    monkeypatch.setattr(engine, "set_session_key", lambda self, key: told.append(("engine", key)))
    monkeypatch.setattr(donor, "set_session_key", lambda self, key: told.append(("sidecar", key)))
    seat = Seat()
    seat.session_key = b"n" * 32
    opened(seat, Line()).close()
    assert told == [("engine", b"n" * 32), ("sidecar", b"n" * 32)]


def test_a_chosen_sidecar_port_is_what_others_are_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LocalError, match=f"127.0.0.1:{port}"):
            opened(Seat(), Line(), port)
    seat = Seat()
    opened(seat, Line(), port).close()
    assert [rank.sidecar_port for rank in seat.declared.ranks] == [port]


def test_an_unknown_congestion_control_is_said_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"net\.congestion: .*nonsense"):
        opened(Seat(), Line(congestion="nonsense"))


def test_join_takes_rates_as_people_write_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_TOKEN", "a token for tests only")
    with pytest.raises(ConfigError, match="max_up: 'fast' is no rate: write it as"):
        join("127.0.0.1:1", run="r", max_up="fast")
