"""Coordinators in threads that share a journal in a real etcd: one leads, the others wait their turn."""

from __future__ import annotations

import io
import itertools
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
from msgspec.structs import replace
from rich.console import Console, RenderableType

from atoll import __version__, events
from atoll.cli.status import json_line
from atoll.dashboard.status import render
from atoll.errors import LocalError, Refused, Unreachable
from atoll.membership.etcd_journal import EtcdJournal
from atoll.membership.etcd_place import EtcdPlace
from atoll.membership.journal import LeadLost
from atoll.membership.operator import StandingBy, Status, StopRun
from atoll.membership.operator_link import ask_status, give_order
from atoll.membership.steps import JournalRecord, PlanMade
from support.etcd import EtcdProcess, free_ports
from support.fake_peer import QUICK, TOKEN, CoordinatorThread, FakePeer, new_member
from support.slack import SLACK_S

LEASE_S = 2.0
_prefixes = itertools.count()


@pytest.fixture
def place(etcd: EtcdProcess) -> EtcdPlace:
    return EtcdPlace((etcd.endpoint,), f"test/{next(_prefixes)}")


def coordinator(place: EtcdPlace, **changes: object) -> CoordinatorThread:
    return CoordinatorThread(place, **{"lease_s": LEASE_S, **changes})  # type: ignore[arg-type]


@contextmanager
def standing_by(place: EtcdPlace, **changes: object) -> Iterator[CoordinatorThread]:
    second = coordinator(place, **changes).stand_by()
    try:
        yield second
    finally:
        second.__exit__()


def status(address: str, path: str) -> int:
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=5) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def test_who_stands_by_sends_everybody_on(place: EtcdPlace) -> None:
    with coordinator(place) as first, standing_by(place) as second:
        stood_by = second.seen(events.CoordinatorStoodBy)
        assert stood_by == events.CoordinatorStoodBy(address=second.address, leader=first.address)
        assert (status(second.address, "/"), status(second.address, "/v1/peer")) == (200, 503)
        member = new_member(f"{second.address},{first.address}", "a")
        assert member.connect().term == 1
        member.close()
    assert second.result == (143, "stopped on request, while another coordinator led")


def test_an_operator_is_told_for_whom_it_stands_by(place: EtcdPlace) -> None:
    with coordinator(place) as first, standing_by(place) as second:
        second.seen(events.CoordinatorStoodBy)
        told = ask_status(second.address, TOKEN)
        assert told == StandingBy(run="run", package=__version__, leader=first.address)
        assert f"run run  this coordinator stands by; {first.address} leads" in text_of(render(told))
        fields = json.loads(json_line(told))
        assert fields == {"run": "run", "package": __version__, "leader": first.address, "trouble": ""}
        assert isinstance(ask_status(first.address, TOKEN), Status)
        with pytest.raises(Unreachable, match=f"stands by, and decides nothing: {first.address} leads"):
            give_order(second.address, TOKEN, StopRun("enough"))
        with pytest.raises(Refused, match="the run token does not fit"):
            ask_status(second.address, b"x" * 32)


def test_an_operator_is_told_that_etcd_is_gone(place: EtcdPlace, etcd: EtcdProcess) -> None:
    with coordinator(place), standing_by(place) as second:
        second.seen(events.CoordinatorStoodBy)
        etcd.kill()
        try:
            wait(lambda: "no etcd answers" in told_by(second.address).trouble)
            assert told_by(second.address).leader == ""
        finally:
            etcd.start()


def told_by(address: str) -> StandingBy:
    told = ask_status(address, TOKEN)
    assert isinstance(told, StandingBy)
    return told


def text_of(shown: RenderableType) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(shown, soft_wrap=True)
    return console.export_text()


def test_a_run_goes_on_under_the_second_when_the_first_stops(place: EtcdPlace) -> None:
    first = coordinator(place).__enter__()
    with standing_by(place) as second:
        fake = FakePeer(new_member(f"{first.address},{second.address}", "a"), "a")
        fake.join()
        fake.run(rounds=2)
        first.__exit__()
        second.leads(within_s=SLACK_S)
        fake.run(rounds=4)
        fake.member.leave("all rounds are done", done=True)
        assert second.wait()[0] == 0
    listening = [event for event in second.events if isinstance(event, events.CoordinatorListening)]
    assert listening == [events.CoordinatorListening(second.address, 2, restarted=True)]


def test_whoever_stands_by_ends_with_the_run(place: EtcdPlace) -> None:
    with coordinator(place) as first, standing_by(place) as second:
        fake = FakePeer(new_member(first.address, "a"), "a")
        fake.join()
        fake.run(rounds=1)
        fake.member.leave("all rounds are done", done=True)
        assert first.wait()[0] == 0
        code, reason = second.wait()
    assert code == 0
    assert reason.startswith("run run is over already, at version 1")
    assert coordinator(place).__enter__().wait() == (code, reason), "a late one does not stand by at all"


def test_of_several_that_stand_by_one_takes_over(place: EtcdPlace) -> None:
    with ExitStack() as others:
        with coordinator(place):
            waiting = [others.enter_context(standing_by(place)) for _ in range(3)]
        wait(lambda: any(each._listening.is_set() for each in waiting))
        (leader,) = [each for each in waiting if each._listening.is_set()]
        for each in set(waiting) - {leader}:
            wait(lambda each=each: events.CoordinatorStoodBy(each.address, leader.address) in each.events)


def wait(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + SLACK_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_leader_that_cannot_write_sends_nothing_and_stands_by(
    place: EtcdPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan that it lost the lead over reaches nobody; when it leads again, the round is planned anew."""
    real_append = EtcdJournal.append
    lost: list[JournalRecord] = []

    def append(self: EtcdJournal, record: JournalRecord) -> None:
        if isinstance(record, PlanMade) and not lost:
            lost.append(record)
            raise LeadLost("planted")
        real_append(self, record)

    monkeypatch.setattr(EtcdJournal, "append", append)
    plans: list[str] = []

    def hear(what: str, **values: object) -> None:
        plans.extend([str(values["op"])] if what == "plan" else [])

    with coordinator(place) as only:
        fake = FakePeer(new_member(only.address, "a"), "a", hear)
        fake.join()
        fake.run(rounds=1)
        fake.member.close()
    assert plans == ["t2/r1/f0/a0"]
    stepped_down = [event for event in only.events if isinstance(event, events.CoordinatorSteppedDown)]
    assert stepped_down == [events.CoordinatorSteppedDown(reason="planted")]
    terms = [event.term for event in only.events if isinstance(event, events.CoordinatorListening)]
    assert terms == [1, 2]


def test_what_is_wrong_with_the_journal_is_said_at_once(place: EtcdPlace) -> None:
    with coordinator(place):
        with pytest.raises(LocalError, match="belongs to run 'run', not 'other'"):
            coordinator(place, run="other").__enter__()


def test_a_port_in_use_is_said_before_the_lead_is_asked_for(place: EtcdPlace) -> None:
    with coordinator(place) as first:
        with pytest.raises(LocalError, match="the port is in use"):
            coordinator(place, port=first.port).__enter__()


def test_no_etcd_at_the_start_is_said_in_time() -> None:
    place = EtcdPlace((f"127.0.0.1:{free_ports(1)[0]}",), "p")
    begun_s = time.monotonic()
    with pytest.raises(Unreachable, match=f"cannot use journal {place}: no etcd answers") as caught:
        coordinator(place, timeouts=replace(QUICK, connect_s=0.5)).__enter__()
    assert time.monotonic() - begun_s < 0.5 + SLACK_S
    assert caught.value.exit_code == 4
