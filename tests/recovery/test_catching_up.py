"""Catching up with real sidecars: the same bits at the newest version, by the fewest bytes, and no hang."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from atoll import kernels
from atoll.errors import DeadlineExceeded, QuorumLost, Unreachable
from atoll.recovery.board import MAX_SECOND_TAKES
from atoll.recovery.donor import Donor
from atoll.recovery.fetching import Fetcher
from atoll.recovery.pursuit import UNUSABLE
from atoll.recovery.targets import Source, Target
from atoll.recovery.update import PIECE_BYTES
from atoll.recovery.wanted import Wanted
from support.asking import serve, stage_and_serve
from support.donating import commit_to, crew, new_donor, sources_of, staged_shard, target_of
from support.history import History
from support.joining import Joiner
from support.slack import SLACK_S
from support.states import assert_same, copy_of, flip_byte

NUMEL = 2 * kernels.PIECE + 1000
STATE_BYTES = 8 * NUMEL


@pytest.fixture
def donors(tmp_path: Path) -> Iterator[list[Donor]]:
    with crew(tmp_path) as donors:
        yield donors


@pytest.fixture
def history() -> History:
    return History(NUMEL)


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def test_who_is_there_already_asks_nobody(history: History) -> None:
    joiner = Joiner(history, [])
    report = joiner.run()
    assert (report.version, report.fetched_bytes, report.updates) == (0, 0, 0)
    assert "atoll-fetch" not in threads()


def test_a_newcomer_takes_a_snapshot_and_the_updates_after_it(donors: list[Donor], history: History) -> None:
    commit_to(history, donors, 20)
    stage_and_serve(history.state, donors)
    commit_to(history, donors, 3)
    joiner = Joiner(history, donors)
    report = joiner.run()
    assert_same(joiner.state, history.state)
    assert (report.version, report.from_version, report.snapshot_version, report.updates) == (23, 0, 20, 3)
    assert joiner.replayed == [21, 22, 23]
    assert joiner.wanted == 0
    updates = sum(history.updates[version][0].wire_bytes for version in joiner.replayed)
    assert report.fetched_bytes == sum(report.bytes_by_source.values())
    # A busy machine may stall a piece until it is fetched again.
    assert 0 <= report.fetched_bytes - STATE_BYTES - updates <= MAX_SECOND_TAKES * PIECE_BYTES
    assert set(report.bytes_by_source) <= {"p0", "p1", "p2"}
    assert joiner.longest_silence_s() < 0.5 + SLACK_S
    assert "atoll-fetch" not in threads()


def test_updates_are_on_their_way_before_the_snapshot_is_whole(
    donors: list[Donor], history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit_to(history, donors, 20)
    stage_and_serve(history.state, donors)
    commit_to(history, donors, 2)
    calls: list[tuple[str, str]] = []

    def noted(name: str) -> Callable[[Fetcher, Wanted], None]:
        original = getattr(Fetcher, name)

        def call(self: Fetcher, item: Wanted) -> None:
            calls.append((name, item.name))
            original(self, item)

        return call

    for name in ("want", "forget"):
        monkeypatch.setattr(Fetcher, name, noted(name))
    joiner = Joiner(history, donors)
    assert joiner.run().updates == 2
    assert_same(joiner.state, history.state)
    whole = calls.index(("forget", "the snapshot of version 20"))
    for update in ("update 21", "update 22"):
        assert calls.index(("want", update)) < whole
        assert calls.count(("want", update)) == calls.count(("forget", update)) == 1


def test_nothing_is_fetched_that_is_not_needed(tmp_path: Path, history: History) -> None:
    """With one source, and so without second takes, to the byte."""
    with crew(tmp_path, 1) as donors:
        commit_to(history, donors, 20)
        stage_and_serve(history.state, donors)
        commit_to(history, donors, 2)
        joiner = Joiner(history, donors)
        report = joiner.run()
        assert_same(joiner.state, history.state)
        assert report.fetched_bytes == STATE_BYTES + 2 * history.updates[21][0].wire_bytes


def test_a_peer_that_was_away_replays_what_it_missed(donors: list[Donor], history: History) -> None:
    commit_to(history, donors, 4)
    joiner = Joiner(history, donors)
    joiner.state = copy_of(history.state)
    commit_to(history, donors, 3)
    stage_and_serve(history.state, donors)
    report = joiner.run()
    assert_same(joiner.state, history.state)
    assert (report.from_version, report.snapshot_version, report.updates) == (4, None, 3)
    assert report.fetched_bytes == 3 * history.updates[5][0].wire_bytes


@pytest.mark.parametrize("codec", ["fp32", "topk"])
def test_updates_of_any_codec_are_replayed(tmp_path: Path, codec: str) -> None:
    history = History(300_000, codec)
    with crew(tmp_path, 2) as donors:
        serve(donors)
        joiner = Joiner(history, donors)
        commit_to(history, donors, 1)
        joiner.run()
        assert_same(joiner.state, history.state)


def test_a_large_update_comes_from_several_sources(tmp_path: Path) -> None:
    history = History(3 * kernels.PIECE, "fp32")
    with crew(tmp_path, 3, max_bytes_per_s=20e6) as donors:
        serve(donors)
        joiner = Joiner(history, donors)
        commit_to(history, donors, 1)
        report = joiner.run()
        assert_same(joiner.state, history.state)
        assert len(report.bytes_by_source) >= 2


def test_the_run_goes_on_meanwhile_and_is_caught_up_with(donors: list[Donor], history: History) -> None:
    """Commits come while the snapshot does, and their donors tell a target that moves."""
    commit_to(history, donors, 20)
    stage_and_serve(history.state, donors)
    joiner = Joiner(history, donors)
    commits_at = iter((3, 6, 9, 12, 15))
    due = [next(commits_at)]

    def go_on() -> None:
        if due and len(joiner.checks_s) > due[0]:
            commit_to(history, donors)
            due[:] = [each for each in (next(commits_at, 0),) if each]

    joiner.during = go_on
    report = joiner.run(rate=40e6)
    assert_same(joiner.state, history.state)
    assert report.snapshot_version == 20
    assert report.updates == report.version - 20 >= 2


def test_without_a_snapshot_one_is_asked_for_once(donors: list[Donor], history: History) -> None:
    with_log = [donors[0]]
    commit_to(history, donors, 1)
    for _ in range(3):
        history.commit()  # nobody wrote these down
    commit_to(history, donors, 1)
    serve(donors)
    joiner = Joiner(history, donors)

    def stage_soon() -> None:
        threading.Timer(0.3, stage_and_serve, [history.state, with_log]).start()

    joiner.want = stage_soon
    report = joiner.run()
    assert_same(joiner.state, history.state)
    assert (joiner.wanted, report.snapshot_version) == (1, 5)


def test_the_snapshot_of_an_older_version_leads_on(donors: list[Donor], history: History) -> None:
    """The digest of the newest version is not known yet."""
    stage_and_serve(history.state, donors)
    commit_to(history, donors, 2)
    digests = {0: history.digests[0]}
    joiner = Joiner(history, donors)
    joiner.target = lambda: Target(2, digests, sources_of(donors), trusted=False)
    report = joiner.run()
    assert_same(joiner.state, history.state)
    assert (report.snapshot_version, report.updates) == (0, 2)


def test_a_peer_on_wrong_bits_fetches_only_what_is_wrong(donors: list[Donor], history: History) -> None:
    commit_to(history, donors, 2)
    stage_and_serve(history.state, donors)
    joiner = Joiner(history, donors, trusted=False)
    joiner.state = copy_of(history.state)
    joiner.state.velocity[NUMEL - 5] += 1
    report = joiner.run()
    assert_same(joiner.state, history.state)
    assert (report.from_version, report.snapshot_version) == (2, 2)
    assert report.fetched_bytes == 4 * 1000, "the last piece of one vector"


def test_wrong_bits_that_nobody_noticed_are_found_before_anything_is_built_on_them(
    donors: list[Donor], history: History
) -> None:
    joiner = Joiner(history, donors)
    joiner.state.anchor[0] += 1
    commit_to(history, donors, 2)
    stage_and_serve(history.state, donors)
    report = joiner.run()
    assert_same(joiner.state, history.state)
    assert (report.snapshot_version, report.updates) == (2, 0)
    assert "version 0 has another digest here than in the run" in joiner.notes


def test_a_run_that_was_rolled_back_is_followed(tmp_path: Path, history: History) -> None:
    with crew(tmp_path, 1) as donors:
        stage_and_serve(history.state, donors)
        joiner = Joiner(history, donors, trusted=False)
        joiner.state.version = 7
        joiner.state.anchor[:] = 7
        joiner.run()
        assert_same(joiner.state, history.state)


def test_a_target_that_lags_behind_is_waited_for(tmp_path: Path, history: History) -> None:
    """A coordinator may tell an old version for a moment; nobody goes back for that."""
    with crew(tmp_path, 1) as donors:
        stage_and_serve(history.state, donors)
        joiner = Joiner(history, donors)
        history.commit()
        joiner.state = copy_of(history.state)
        lagging = msgspec.structs.replace(target_of(history, donors), version=0)
        joiner.target = lambda: lagging if len(joiner.checks_s) < 5 else target_of(history, donors)
        report = joiner.run()
        assert len(joiner.checks_s) >= 5
        assert_same(joiner.state, history.state)
        assert (report.snapshot_version, report.updates) == (None, 0)


def test_it_does_not_ask_itself(tmp_path: Path, history: History) -> None:
    with crew(tmp_path, 1) as donors, new_donor(tmp_path, "joiner") as own:
        joiner = Joiner(history, donors)
        commit_to(history, donors, 1)
        wrong, data = history.updates[1]
        own.keep(wrong, np.zeros_like(data))
        serve([own, *donors])
        joiner.target = lambda: target_of(history, [own, *donors])
        report = joiner.run()
        assert_same(joiner.state, history.state)
        assert set(report.bytes_by_source) == {"p0"}


def test_its_own_cap_is_kept(tmp_path: Path, history: History) -> None:
    with crew(tmp_path, 2) as donors:
        commit_to(history, donors, 20)
        stage_and_serve(history.state, donors)
        joiner = Joiner(history, donors)
        report = joiner.run(rate=10e6)
        assert report.seconds >= (STATE_BYTES - 1e6) / 10e6


# ---- sources that are no good ------------------------------------------------------------------------------


def only_until_caught(joiner: Joiner, liar: Donor) -> None:
    """The other sources come up once this one was caught: so it is asked, however busy the machine is."""
    joiner.target = lambda: target_of(joiner.history, joiner.donors if joiner.liars() else [liar])


def test_a_source_that_gives_wrong_bytes_is_named_and_not_asked_again(
    donors: list[Donor], history: History
) -> None:
    commit_to(history, donors, 20)
    stage_and_serve(history.state, donors)
    liar = donors[1]
    for at in range(4096, STATE_BYTES, 50_000):
        flip_byte(staged_shard(liar, 20), at)
    joiner = Joiner(history, donors)
    only_until_caught(joiner, liar)
    report = joiner.run()
    assert_same(joiner.state, history.state)
    (told,) = [text for text in joiner.notes if "gave what is wrong" in text]
    assert told.startswith(
        f"p1 at 127.0.0.1:{liar.port} gave what is wrong (the snapshot of version 20: piece "
    )
    assert report.bytes_by_source.get("p1", 0) <= 4 * 4 * kernels.PIECE, "what was on its way"


def test_a_source_on_other_bits_is_named_by_its_manifest(donors: list[Donor], history: History) -> None:
    commit_to(history, donors, 20)
    other = copy_of(history.state)
    other.anchor[5] += 1
    stage_and_serve(other, donors[:1])
    stage_and_serve(history.state, donors[1:])
    joiner = Joiner(history, donors)
    only_until_caught(joiner, donors[0])
    report = joiner.run()
    assert_same(joiner.state, history.state)
    assert any(text.startswith("p0 ") and "the run's is" in text for text in joiner.notes)
    assert "p0" not in report.bytes_by_source


def test_an_update_with_wrong_bytes_names_its_source(tmp_path: Path, history: History) -> None:
    with crew(tmp_path, 2) as donors:
        joiner = Joiner(history, donors)
        commit_to(history, donors, 3)
        folder = donors[0].folder
        assert folder is not None
        for path in (folder / "updates").glob("*.bin"):
            flip_byte(path, 1234)
        serve(donors)
        only_until_caught(joiner, donors[0])
        joiner.run()
        assert_same(joiner.state, history.state)
        assert joiner.liars() == ["p0"]


def test_a_lie_that_holds_together_is_found_by_the_digest(tmp_path: Path, history: History) -> None:
    """The only source of updates tells other ones, with fitting digests; it is not believed twice."""
    with crew(tmp_path, 2) as (liar, honest):
        joiner = Joiner(history, [liar, honest])
        other = History(NUMEL, seed=77)
        commit_to(other, [liar], 1)
        serve([liar, honest])
        history.commit()  # which the honest one did not write down
        joiner.want = lambda: stage_and_serve(history.state, [honest])
        report = joiner.run()
        assert_same(joiner.state, history.state)
        assert report.snapshot_version == 1
        assert joiner.wanted == 1
        assert any(text.startswith("p0 ") and "updates to version 1" in text for text in joiner.notes)


def test_nonsense_and_strangers_among_the_sources_are_passed_over(tmp_path: Path, history: History) -> None:
    """One port is closed, one is a black hole, one speaks no HTTP, one does not know the key, one name is unknown."""
    hole = socket.create_server(("127.0.0.1", 0))
    babble = socket.create_server(("127.0.0.1", 0))

    def chatter() -> None:
        while True:
            try:
                caller, _ = babble.accept()
            except OSError:
                return
            with caller:
                caller.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

    threading.Thread(target=chatter, daemon=True).start()
    with crew(tmp_path, 2) as (honest, unkeyed):
        closed = new_donor(tmp_path, "gone")
        closed.close()
        commit_to(history, [honest], 20)
        stage_and_serve(history.state, [honest])
        unkeyed.set_session_key(b"x" * 32)
        stage_and_serve(history.state, [unkeyed])
        joiner = Joiner(history, [honest])
        sources = (
            Source("hole", "127.0.0.1", hole.getsockname()[1]),
            Source("babble", "127.0.0.1", babble.getsockname()[1]),
            Source("gone", "127.0.0.1", closed.port),
            Source("unknown", "no-such-host.invalid", 1),
            *sources_of([unkeyed, honest]),
            Source("impostor", "127.0.0.1", honest.port),
        )
        joiner.target = lambda: msgspec.structs.replace(target_of(history, [honest]), sources=sources)
        report = joiner.run(progress_timeout_s=1.0)
        assert_same(joiner.state, history.state)
        assert set(report.bytes_by_source) == {"p0"}
        assert any(text.startswith("gone ") and "connection refused" in text for text in joiner.notes)
    hole.close()
    babble.close()


# ---- ends that are none ------------------------------------------------------------------------------------


def test_a_deadline_says_how_far_it_came(history: History, tmp_path: Path) -> None:
    with crew(tmp_path, 1) as donors:
        joiner = Joiner(history, donors)
        history.commit()
        serve(donors)
        start_s = time.monotonic()
        with pytest.raises(
            DeadlineExceeded,
            match=r"not at version 1 after 1 s \(version 0, 0 bytes fetched, 1 of 1 sources answer\)",
        ):
            joiner.run(deadline_s=1.0)
        assert 1.0 <= time.monotonic() - start_s < 1.0 + SLACK_S
        assert "atoll-fetch" not in threads()


def test_the_end_of_membership_ends_it_at_once(donors: list[Donor], history: History) -> None:
    commit_to(history, donors, 20)
    stage_and_serve(history.state, donors)
    joiner = Joiner(history, donors)

    def over() -> None:
        if len(joiner.checks_s) > 10:
            raise QuorumLost("the run is over")

    joiner.during = over
    start_s = time.monotonic()
    with pytest.raises(QuorumLost, match="the run is over"):
        joiner.run(rate=200_000.0)
    assert time.monotonic() - start_s < 10 * 0.5 + SLACK_S
    assert joiner.state.version in (0, UNUSABLE)
    assert "atoll-fetch" not in threads()


def test_a_snapshot_that_came_only_in_part_leaves_no_version(tmp_path: Path, history: History) -> None:
    with crew(tmp_path, 1, max_bytes_per_s=8e6) as donors:
        commit_to(history, donors, 20)
        stage_and_serve(history.state, donors)
        joiner = Joiner(history, donors)
        joiner.during = lambda: None
        start = copy_of(joiner.state)
        with pytest.raises(DeadlineExceeded):
            joiner.run(deadline_s=1.5)
        mixed = not np.array_equal(joiner.state.anchor, start.anchor)
        assert joiner.state.version == (UNUSABLE if mixed else 0)
        assert mixed, "no piece came in: the test says nothing"
        joiner.run()
        assert_same(joiner.state, history.state)


def test_a_run_that_is_too_fast_is_left_with_both_rates(tmp_path: Path) -> None:
    history = History(600_000)
    with crew(tmp_path, 1) as donors:
        commit_to(history, donors, 20)
        stage_and_serve(history.state, donors)
        joiner = Joiner(history, donors)
        start_s = time.monotonic()

        def commit_often() -> None:
            if history.state.version - 20 < 5 * (time.monotonic() - start_s):  # 3 MB/s of updates
                commit_to(history, donors)

        joiner.during = commit_often
        with pytest.raises(
            Unreachable, match=r"the run makes updates of \S+ MB/s and this peer fetches \S+ MB/s"
        ):
            joiner.run(rate=500_000.0)
        assert time.monotonic() - start_s < 9.6 + SLACK_S, "it is said before the whole snapshot is in"


CTRL_C = """
import sys, threading
from pathlib import Path
sys.path.insert(0, {tests!r})
from support.asking import stage_and_serve
from support.donating import commit_to, crew
from support.history import History
from support.joining import Joiner
history = History(500_000)
with crew(Path({folder!r}), 1) as donors:
    commit_to(history, donors, 20)
    stage_and_serve(history.state, donors)
    joiner = Joiner(history, donors)
    joiner.during = lambda: len(joiner.checks_s) == 5 and print("fetching", flush=True)
    try:
        joiner.run(rate=100_000.0)
    except KeyboardInterrupt:
        print("interrupted", [thread.name for thread in threading.enumerate()], flush=True)
"""


def test_ctrl_c_gets_through(tmp_path: Path) -> None:
    code = CTRL_C.format(tests=str(Path(__file__).parents[1]), folder=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "fetching\n"
        process.send_signal(signal.SIGINT)
        start_s = time.monotonic()
        assert process.stdout.readline() == "interrupted ['MainThread']\n"
        assert time.monotonic() - start_s < 0.5 + SLACK_S
