"""Members and coordinators over real sockets: rounds, restarts, freezes, and what people see when it goes
wrong.
"""

from __future__ import annotations

import _thread
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from atoll import events
from atoll.errors import ConfigError, LocalError, MembershipError, Refused, Unreachable
from atoll.membership import attendant, link
from atoll.membership import member as machine
from atoll.membership.client import Member
from atoll.membership.journal import JournalFile
from atoll.membership.messages import Leave
from atoll.membership.operator import EvictPeer
from atoll.membership.operator_link import give_order
from atoll.membership.steps import MembersChanged, PlanMade, StateDigest, VerdictMade
from support import fake_peer
from support.fake_peer import QUICK, TOKEN, CoordinatorThread, FakePeer, new_member


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def train(coordinator: CoordinatorThread, peers: tuple[str, ...], rounds: int) -> list[FakePeer]:
    """Each peer in a thread of its own: join, train, leave."""

    def one(peer: str) -> FakePeer:
        fake = FakePeer(new_member(coordinator.address, peer), peer)
        try:
            fake.join()
            fake.run(rounds)
            fake.member.leave("all rounds are done", done=True)
        finally:
            fake.member.close()
        return fake

    with ThreadPoolExecutor(len(peers)) as pool:
        return list(pool.map(one, peers))


# ---- a run -------------------------------------------------------------------------------------------------


def test_two_peers_commit_rounds_and_the_coordinator_ends_with_them(journal: Path) -> None:
    with CoordinatorThread(journal, start_peers=2) as coordinator:
        a, b = train(coordinator, ("a", "b"), rounds=5)
        code, reason = coordinator.wait()
    assert (a.version, b.version) == (5, 5)
    assert a.digest == b.digest
    assert a.verdicts == b.verdicts
    assert code == 0, reason
    committed = [event for event in coordinator.events if isinstance(event, events.RoundCommitted)]
    assert [event.version for event in committed] == [1, 2, 3, 4, 5]


def test_members_receive_settings_timeouts_and_one_session_key(journal: Path) -> None:
    with CoordinatorThread(journal) as coordinator:
        a, b = new_member(coordinator.address, "a"), new_member(coordinator.address, "b")
        first, second = a.connect(), b.connect()
        assert first.settings == {"outer": {"lr": 0.7}}
        assert first.timeouts == QUICK
        assert len(first.session_key) == 32
        assert first.session_key == second.session_key == a.session_key
        a.close()
        b.close()


def test_a_peer_with_other_settings_is_refused_with_both_values(journal: Path) -> None:
    with CoordinatorThread(journal) as coordinator:
        fake = FakePeer(new_member(coordinator.address, "a"), "a")
        with pytest.raises(Refused, match=r"outer\.lr = 0\.5, the run has 0\.7"):
            fake.join(settings={**fake_peer.SETTINGS, "outer.lr": 0.5})
        refused = coordinator.seen(events.PeerRefused)
        assert "outer.lr = 0.5, the run has 0.7" in refused.reason  # type: ignore[attr-defined]
        fake.member.close()


def test_the_older_of_two_processes_with_one_name_ends(journal: Path) -> None:
    with CoordinatorThread(journal) as coordinator:
        older, newer = (FakePeer(new_member(coordinator.address, "a"), "a") for _ in range(2))
        older.join()
        newer.join()
        with pytest.raises(Refused, match="a newer process takes part as 'a'; give every peer its own name"):
            older.run(rounds=1)
        newer.run(rounds=2)
        older.member.close()
        newer.member.close()


def test_a_newer_process_takes_the_name_catches_up_and_the_old_one_is_told(journal: Path) -> None:
    with CoordinatorThread(journal) as coordinator:
        old, new = (FakePeer(new_member(coordinator.address, "a"), "a") for _ in range(2))
        old.join()
        old.run(rounds=1)
        new.join()
        assert new.digest == old.digest
        with pytest.raises(Refused, match="a newer process takes part as 'a'; give every peer its own name"):
            old.run(rounds=9)
        old.member.close()
        new.run(rounds=2)
        new.member.leave("all rounds are done", done=True)
        code, reason = coordinator.wait()
    assert code == 0, reason


def wait_for_the_end(member: Member) -> None:
    """Raises what ended it."""
    deadline_s = time.monotonic() + 10
    while time.monotonic() < deadline_s:
        member.check()
        time.sleep(0.01)


def test_who_is_evicted_learns_no_key_when_it_comes_again(journal: Path) -> None:
    """It is welcomed, since it has to know its own coordinator, and hears why it is refused; the key opens nothing."""
    with CoordinatorThread(journal, start_peers=1) as coordinator:
        member, bad = (new_member(coordinator.address, peer) for peer in ("a", "bad"))
        try:
            key = member.connect().session_key
            assert bad.connect().session_key == key
            assert give_order(coordinator.address, TOKEN, EvictPeer("bad", "it lies", 0.0)).ok
            again = new_member(coordinator.address, "bad")
            try:
                assert again.connect().session_key != key
                with pytest.raises(Refused, match="it lies"):
                    wait_for_the_end(again)
            finally:
                again.close()
        finally:
            member.close()
            bad.close()


def test_after_goodbye_nobody_looks_for_the_coordinator(journal: Path) -> None:
    with CoordinatorThread(journal) as coordinator:
        fake = FakePeer(new_member(coordinator.address, "a"), "a")
        fake.join()
        fake.member._post(lambda: fake.member._attendant.leave(Leave("bye", True), 5.0, lambda: None))
        coordinator.wait()
        thread = fake.member._thread
        assert thread is not None
        thread.join(10)
        assert not thread.is_alive(), "it looks for a coordinator that it said goodbye to"
    fake.member.close()


def test_a_link_that_takes_no_more_is_closed_so_that_all_is_said_again(journal: Path) -> None:
    with CoordinatorThread(journal) as coordinator:
        fake = FakePeer(new_member(coordinator.address, "a"), "a")
        fake.join()
        flooded = threading.Event()

        def flood() -> None:
            for _ in range(attendant.OUTBOX_MESSAGES + 1):
                fake.member._attendant._beat()
            flooded.set()

        fake.member._post(flood)
        assert flooded.wait(5)
        connected = [event for event in coordinator.events if isinstance(event, events.PeerConnected)]
        deadline_s = time.monotonic() + 10
        while len(connected) < 2 and time.monotonic() < deadline_s:
            time.sleep(0.01)
            connected = [event for event in coordinator.events if isinstance(event, events.PeerConnected)]
        assert len(connected) == 2, "the link stayed up although words were lost"
        fake.run(rounds=2)
        fake.member.close()


# ---- nobody there ------------------------------------------------------------------------------------------


def test_a_coordinator_that_is_not_there_is_named_with_a_remedy() -> None:
    address = f"127.0.0.1:{free_port()}"
    member = new_member(address, "a", connect_s=0.5)
    begun_s = time.monotonic()
    with pytest.raises(
        Unreachable, match=f"no coordinator at {address} in 0.5 s .connection refused.; start one"
    ) as caught:
        member.connect()
    assert time.monotonic() - begun_s < 0.5 + 2
    assert caught.value.exit_code == 4
    member.close()


def test_a_port_that_never_answers_is_named_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        member = new_member(f"127.0.0.1:{silent.getsockname()[1]}", "a", connect_s=0.5)
        begun_s = time.monotonic()
        with pytest.raises(Unreachable, match=r"no answer in 0\.\d+ s"):
            member.connect()
        assert time.monotonic() - begun_s < 0.5 + 2
        member.close()


def test_a_name_server_that_hangs_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(link.socket, "getaddrinfo", lambda *args, **more: released.wait(30) and [])
    member = new_member("no-such-host.invalid:7070", "a", connect_s=0.5)
    begun_s = time.monotonic()
    with pytest.raises(Unreachable, match=r"no coordinator at no-such-host.invalid:7070"):
        member.connect()
    member.close()
    assert time.monotonic() - begun_s < 0.5 + 2
    released.set()


def test_a_web_server_is_no_coordinator(journal: Path) -> None:
    def serve_one(listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.recv(4096)
                connection.sendall(
                    b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                )

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve_one, args=(listener,), daemon=True).start()
        member = new_member(f"127.0.0.1:{listener.getsockname()[1]}", "a", connect_s=0.5)
        with pytest.raises(Unreachable, match="it is no coordinator: it answered HTTP 404"):
            member.connect()
        member.close()
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("address", ["", "host", "host:", ":7070", "host:port", "host:0", "host:70000"])
def test_what_is_no_address_is_said_before_anything_starts(address: str) -> None:
    with pytest.raises(ConfigError, match="is no coordinator address; write it as host:port"):
        new_member(address, "a")


def test_an_ipv6_address_is_written_in_brackets() -> None:
    assert link.split_address("[::1]:7070") == ("::1", 7070)


def test_a_peer_may_start_before_its_coordinator(journal: Path) -> None:
    port = free_port()
    member = new_member(f"127.0.0.1:{port}", "a", connect_s=0.2, wait_s=20)
    with ThreadPoolExecutor(1) as pool:
        admission = pool.submit(member.connect)
        with pytest.raises(TimeoutError):
            admission.result(timeout=0.5)
        with CoordinatorThread(journal, port=port):
            assert admission.result(timeout=10).term == 1
    member.close()


def test_a_port_in_use_is_named_with_a_remedy(journal: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(
            LocalError, match=f"cannot listen on 127.0.0.1:{port}: the port is in use"
        ) as caught:
            CoordinatorThread(journal, port=port).__enter__()
    assert caught.value.exit_code == 3


def test_a_full_disk_stops_the_coordinator_before_a_peer_hears_of_the_plan(
    journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_append = JournalFile.append

    def append(self: JournalFile, record: Any) -> None:
        if isinstance(record, PlanMade):
            raise LocalError(f"cannot write to journal {journal} (planted)")
        real_append(self, record)

    monkeypatch.setattr(JournalFile, "append", append)
    heard: list[str] = []
    coordinator = CoordinatorThread(journal).__enter__()
    fake = FakePeer(new_member(coordinator.address, "a"), "a", lambda what, **values: heard.append(what))
    fake.join()
    with pytest.raises(AssertionError, match="a: no verdict of round 1"):
        fake.one_round(within_s=1.0)
    with pytest.raises(LocalError, match="planted"):
        coordinator.wait()
    assert "plan" not in heard
    fake.member.close()


def test_words_of_a_step_that_could_not_be_journaled_never_leave(
    journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even those that came before the record: who decided them may not be the leader any more."""
    real_append = JournalFile.append
    agreed = threading.Event()

    def append(self: JournalFile, record: Any) -> None:
        if isinstance(record, MembersChanged) and record.started and record.members == ("a",):
            raise LocalError("planted")
        real_append(self, record)
        if isinstance(record, StateDigest) and record.version == 1:
            agreed.set()

    monkeypatch.setattr(JournalFile, "append", append)
    patient = replace(QUICK, dead_s=15.0)  # on a busy machine b would be lost before it is dismissed
    coordinator = CoordinatorThread(journal, start_peers=2, timeouts=patient).__enter__()
    a, b = (FakePeer(new_member(coordinator.address, peer), peer) for peer in "ab")
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(FakePeer.join, (a, b)))
        list(pool.map(lambda fake: fake.run(rounds=1), (a, b)))
        # Both said what they hold. If b's next word came before a's, it would be one against one.
        assert agreed.wait(10)
        b.digest = "other bits"  # it is to be dismissed for that
        rounds = [pool.submit(fake.one_round, 2.0) for fake in (a, b)]
        for fake, round_ in zip((a, b), rounds, strict=True):
            with pytest.raises(AssertionError, match=f"{fake.peer}: no verdict of round 2"):
                round_.result()
    with pytest.raises(LocalError, match="planted"):
        coordinator.wait()
    for fake in (a, b):
        fake.member.close()


def test_a_stopped_coordinator_says_so_and_its_port_is_free_again(journal: Path) -> None:
    with CoordinatorThread(journal) as coordinator:
        member = new_member(coordinator.address, "a")
        member.connect()
    assert coordinator.result == (
        143,
        "stopped on request; peers reconnect to the next coordinator with this journal",
    )
    with CoordinatorThread(journal, port=coordinator.port) as again:
        again.seen(events.PeerConnected)
    member.close()


def test_two_coordinators_cannot_share_a_journal(journal: Path) -> None:
    with CoordinatorThread(journal):
        with pytest.raises(LocalError, match="is in use by another coordinator"):
            CoordinatorThread(journal).__enter__()


# ---- the member object -------------------------------------------------------------------------------------


def test_closing_is_idempotent_and_joins_the_thread(journal: Path) -> None:
    others = set(threading.enumerate())
    with CoordinatorThread(journal) as coordinator:
        member = new_member(coordinator.address, "a")
        member.close()  # before it began
        member = new_member(coordinator.address, "a")
        member.connect()
        member.close()
        member.close()
        assert not [
            each for each in threading.enumerate() if each.name == "atoll-membership" and each not in others
        ]
        with pytest.raises(Unreachable, match="membership is closed"):
            member.check()


def test_ctrl_c_gets_through_while_waiting_for_others(journal: Path) -> None:
    with CoordinatorThread(journal, start_peers=2) as coordinator:
        fake = FakePeer(new_member(coordinator.address, "a"), "a")
        fake.member.connect()
        timer = threading.Timer(0.5, _thread.interrupt_main)
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            fake.member.declare(fake.declaration())
        timer.join()
        fake.member.close()


def test_a_fault_in_the_membership_thread_reaches_the_trainer(
    journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> None:
        raise ZeroDivisionError("planted")

    with CoordinatorThread(journal) as coordinator:
        member = new_member(coordinator.address, "a")
        member.connect()
        monkeypatch.setattr(machine, "step", broken)
        with pytest.raises(MembershipError, match=r"ended unexpectedly: ZeroDivisionError\('planted'\)"):
            member.next_order(timeout_s=5)
        member.close()


def test_no_order_in_time_is_none(journal: Path) -> None:
    with CoordinatorThread(journal) as coordinator:
        fake = FakePeer(new_member(coordinator.address, "a"), "a")
        fake.join()
        assert fake.member.next_order(timeout_s=0.05) is None
        assert fake.member.view().members == ("a",)
        assert not fake.member.freeze_requested(1)
        fake.member.close()


# ---- coordinators that die ---------------------------------------------------------------------------------


class Process:
    """A fake peer or coordinator as a real process; `heard` are the JSON lines it said."""

    def __init__(self, role: str, folder: Path, **told: object) -> None:
        self.heard: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        self.errors = folder / f"{role}-{told.get('peer', time.monotonic_ns())}.log"
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, fake_peer.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"role": role, "token": TOKEN.decode(), **told}).encode() + b"\n")
        self.process.stdin.close()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                with self._changed:
                    self.heard.append(json.loads(line))
                    self._changed.notify_all()

    def wait_for(self, what: str, within_s: float = 20.0, **values: object) -> dict[str, Any]:
        """The first line that says `what` with these values."""
        wanted = {"what": what, **values}

        def found() -> dict[str, Any] | None:
            return next((line for line in self.heard if wanted.items() <= line.items()), None)

        with self._changed:
            assert self._changed.wait_for(found, within_s), (
                f"no {what} {values}: {self.heard}\n{self.errors.read_text()}"
            )
            line = found()
        assert line is not None
        return line

    def verdicts(self) -> list[tuple[int, int, str]]:
        return [
            (line["round"], line["version"], line["digest"])
            for line in self.heard
            if line["what"] == "verdict"
        ]

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)


Start = Callable[..., Process]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Process] = []

    def start_one(role: str, **told: object) -> Process:
        started.append(Process(role, tmp_path, **told))
        return started[-1]

    yield start_one
    for process in started:
        process.end()


def start_run(
    start: Start, folder: Path, port: int, rounds: int, reduce_s: float
) -> tuple[Process, Process, Process]:
    coordinator = start_coordinator(start, folder, port)
    a, b = (
        start("peer", peer=peer, address=f"127.0.0.1:{port}", rounds=rounds, reduce_s=reduce_s)
        for peer in "ab"
    )
    return coordinator, a, b


def start_coordinator(start: Start, folder: Path, port: int) -> Process:
    told = {"journal": str(folder / "journal"), "events": str(folder / "events.jsonl"), "start_peers": 2}
    coordinator = start("coordinator", port=port, **told)
    coordinator.wait_for("listening")
    return coordinator


def committed_versions(journal: Path) -> list[int]:
    file = JournalFile(journal, "run")
    file.close()
    verdicts = [record.verdict for record in file.records if isinstance(record, VerdictMade)]
    return [verdict.version for verdict in verdicts if verdict.outcome == "committed"]


MOMENTS: dict[str, dict[str, object]] = {
    "between rounds": {"what": "verdict", "version": 3},
    "as a round begins": {"what": "ready", "round": 3},
    "in a round": {"what": "plan", "op": "t1/r3/f0/a0"},
}


@pytest.mark.fault
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_and_restarted_coordinator_goes_on(start: Start, tmp_path: Path, moment: str) -> None:
    port, rounds = free_port(), 5
    coordinator, a, b = start_run(start, tmp_path, port, rounds, reduce_s=0.1)
    a.wait_for(**MOMENTS[moment])
    coordinator.process.send_signal(signal.SIGKILL)
    assert coordinator.process.wait(10) == -signal.SIGKILL
    assert not [line for line in a.heard if line.get("version") == rounds], "the fault came too late"
    over = start_coordinator(start, tmp_path, port).wait_for("over")
    assert over["code"] == 0, over
    assert a.process.wait(10) == b.process.wait(10) == 0
    assert a.verdicts() == b.verdicts()
    assert [version for _, version, _ in a.verdicts()] == list(range(1, rounds + 1))
    assert committed_versions(tmp_path / "journal") == list(range(1, rounds + 1))


@pytest.mark.fault
def test_a_frozen_coordinator_thaws_and_loses_nobody(start: Start, tmp_path: Path) -> None:
    port, rounds = free_port(), 8
    coordinator, a, b = start_run(start, tmp_path, port, rounds, reduce_s=0.05)
    a.wait_for("verdict", version=2)
    coordinator.process.send_signal(signal.SIGSTOP)
    time.sleep(QUICK.dead_s + 1)  # the fault itself: longer than any peer may be silent
    assert not [line for line in a.heard if line.get("version") == rounds], "the fault came too late"
    coordinator.process.send_signal(signal.SIGCONT)
    assert coordinator.wait_for("over")["code"] == 0
    assert a.verdicts() == b.verdicts()
    assert len(a.verdicts()) == rounds
    lost = [line for line in (tmp_path / "events.jsonl").read_text().splitlines() if '"PeerLost"' in line]
    assert lost == []


@pytest.mark.fault
def test_the_other_goes_on_when_a_peer_is_killed(start: Start, tmp_path: Path) -> None:
    rounds = 5
    coordinator, a, b = start_run(start, tmp_path, free_port(), rounds, reduce_s=0.05)
    a.wait_for("verdict", version=2)
    b.process.send_signal(signal.SIGKILL)
    hit_s = time.monotonic()
    a.wait_for("plan", members=["a"])
    assert time.monotonic() - hit_s < QUICK.dead_s + 2
    assert coordinator.wait_for("over")["code"] == 0
    assert len(a.verdicts()) == rounds


@pytest.mark.fault
def test_a_peer_that_thaws_is_told_to_catch_up_and_counts_again(start: Start, tmp_path: Path) -> None:
    _, a, b = start_run(start, tmp_path, free_port(), rounds=10_000, reduce_s=0.05)
    a.wait_for("verdict", version=2)
    b.process.send_signal(signal.SIGSTOP)
    hit_s = time.monotonic()
    a.wait_for("plan", members=["a"])
    assert time.monotonic() - hit_s < QUICK.dead_s + 2
    a.wait_for("verdict", version=a.verdicts()[-1][1] + 2)
    b.process.send_signal(signal.SIGCONT)
    caught_up = b.wait_for("caught up")
    a.wait_for("plan", members=["a", "b"])
    assert caught_up["version"] > 2
    assert not {line["digest"] for line in b.heard if line["what"] == "verdict"} - {
        digest for _, _, digest in a.verdicts()
    }


def test_a_new_session_key_is_told_to_the_engine(tmp_path: Path) -> None:
    keys: list[bytes] = []
    with CoordinatorThread(tmp_path / "first") as coordinator:
        member = new_member(coordinator.address, "a", on_session_key=keys.append)
        first = member.connect().session_key
        port = coordinator.port
    with CoordinatorThread(tmp_path / "first", port=port) as again:
        again.seen(events.PeerConnected)
    assert keys == []
    with CoordinatorThread(tmp_path / "second", port=port) as lost_its_journal:
        lost_its_journal.seen(events.PeerConnected)
        deadline_s = time.monotonic() + 5
        while not keys and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert keys == [member.session_key]
        assert keys != [first]
        member.close()


def test_a_lost_coordinator_ends_a_waiting_peer_with_a_sentence(journal: Path) -> None:
    impatient = {"timeouts": QUICK.__class__(heartbeat_s=0.1, dead_s=0.5, coordinator_lost_s=1.0)}
    with CoordinatorThread(journal, **impatient) as coordinator:
        fake = FakePeer(new_member(coordinator.address, "a"), "a")
        fake.join()
    with pytest.raises(Unreachable, match="connection refused"):
        fake.one_round(within_s=10)
    fake.member.close()


# ---- secrets -----------------------------------------------------------------------------------------------


def test_the_token_is_nowhere_to_be_found(start: Start, tmp_path: Path) -> None:
    coordinator, a, b = start_run(start, tmp_path, free_port(), rounds=3, reduce_s=0.1)
    a.wait_for("plan")
    for process in (coordinator, a, b):
        proc = Path(f"/proc/{process.process.pid}")
        assert TOKEN not in (proc / "cmdline").read_bytes() + (proc / "environ").read_bytes()
    coordinator.wait_for("over")
    b.wait_for("left")
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.name for path in written} >= {"journal", "events.jsonl", "peer-a.log", "peer-b.log"}
    assert [path for path in written if TOKEN in path.read_bytes()] == []
    assert TOKEN.decode() not in repr([coordinator.heard, a.heard, b.heard])


def test_nothing_shows_secrets_by_accident() -> None:
    who = link.Credentials(address="h:1", run="run", peer="a", incarnation="i", token=TOKEN)
    admission = link.Admission(settings=None, timeouts=QUICK, session_key=b"k" * 32, term=1, seen_as="h")
    assert TOKEN.decode() not in repr(who) + str(who)
    assert "kkkk" not in repr(admission) + str(admission)
