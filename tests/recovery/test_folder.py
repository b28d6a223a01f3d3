"""The staging folder: in RAM where there is room, for this user only, and gone when its owner is."""

from __future__ import annotations

import logging
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.errors import LocalError
from atoll.recovery.folder import RAM, make_folder, remove_stale

OWNER = """
import sys, time
from pathlib import Path
from atoll.recovery.folder import make_folder
folder = make_folder("run", "p", 1, Path("/nowhere"), ram=Path(sys.argv[1]))
print(folder.path, flush=True)
time.sleep(60)
"""


def test_it_is_in_ram_for_this_user_only_and_goes(tmp_path: Path) -> None:
    folder = make_folder("my/run", "päer 1", 1 << 20, tmp_path)
    assert folder.path.parent == RAM
    assert folder.path.name.startswith("atoll-my_run-p_er_1-")
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    folder.yield_to_round(True)
    assert (folder.path / "yield").read_bytes() == b"\1"
    folder.yield_to_round(False)
    assert (folder.path / "yield").read_bytes() == b"\0"
    folder.remove()
    folder.remove()
    assert not folder.path.exists()


def test_without_room_it_is_elsewhere_and_one_warning_has_the_bytes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        folder = make_folder("run", "p", 1 << 60, tmp_path / "out", ram=RAM)
    assert folder.path.parent == tmp_path / "out"
    (text,) = caplog.messages
    assert f"staging needs {1 << 60}: staging in {tmp_path / 'out'}" in text
    folder.remove()


def test_without_ram_it_is_elsewhere(tmp_path: Path) -> None:
    folder = make_folder("run", "p", 1, tmp_path / "out", ram=tmp_path / "no such")
    assert folder.path.parent == tmp_path / "out"
    folder.remove()


def test_without_any_place_both_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        LocalError, match=r"no such has 0 bytes free of the 1 needed, and .*/file/out cannot be used"
    ):
        make_folder("run", "p", 1, tmp_path / "file" / "out", ram=tmp_path / "no such")


def owner(root: Path) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen([sys.executable, "-c", OWNER, str(root)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_folders_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path) -> None:
    (dead, left_behind), (living, in_use), (frozen, held) = (owner(tmp_path) for _ in range(3))
    try:
        frozen.send_signal(signal.SIGSTOP)
        dead.kill()
        dead.wait()
        assert left_behind.exists()
        others = tmp_path / "atoll-not-a-staging-folder"
        others.mkdir()
        link = tmp_path / "atoll-link"
        link.symlink_to(left_behind)
        fresh = make_folder("run", "p", 1, tmp_path, ram=tmp_path)
        assert not left_behind.exists()
        assert in_use.exists()
        assert held.exists()
        assert others.exists()
        assert link.is_symlink()
        assert fresh.path.exists()
        assert remove_stale(tmp_path) == 0
        fresh.remove()
    finally:
        for process in (dead, living, frozen):
            end(process)
    assert remove_stale(tmp_path) == 2


def test_a_folder_of_another_user_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process, path = owner(tmp_path)
    end(process)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert remove_stale(tmp_path) == 0
    assert path.exists()
