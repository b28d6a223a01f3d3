"""What is said of a machine, from facts that are given."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from atoll.cli.checks import machine
from atoll.cli.checks.device import Devices, gpu

GB = 10**9


def test_versions_are_those_of_this_process() -> None:
    found = machine.versions()
    assert found.grade == "ok"
    assert {"atoll", "python", "torch", "kernels"} <= set(found.details)


def test_a_compiler_is_a_problem_only_where_one_is_needed() -> None:
    assert machine.compiler(False, which=lambda name: None).grade == "ok"
    missing = machine.compiler(True, which=lambda name: None)
    assert (missing.grade, missing.about) == ("problem", "machine")
    assert "local.compile=false" in missing.remedy
    assert machine.compiler(True, which=lambda name: "/bin/echo").sentence.startswith("echo")


def test_memory_beside_what_the_run_takes() -> None:
    assert machine.memory(8 * GB, 16 * GB).grade == "ok"
    assert machine.memory(GB // 2, 16 * GB).grade == "warning"
    short = machine.memory(8 * GB, 16 * GB, 12 * GB)
    assert (short.grade, short.sentence) == ("problem", "8.0 GB free of 16.0 GB; this run takes 12.0 GB")
    assert machine.memory(8 * GB, 16 * GB, 2 * GB).grade == "ok"


def test_a_folder_that_is_not_there_or_not_to_be_written_is_named(tmp_path: Path) -> None:
    missing = machine.room("/dev/shm", tmp_path / "none", "choose another", staging=True)
    assert (missing.grade, missing.remedy) == ("problem", "choose another")
    assert machine.room("disk", tmp_path / "runs" / "mine", "").grade == "ok", (
        "the nearest one above it counts"
    )
    file = tmp_path / "file"
    file.touch()
    assert machine.room("disk", file, "").grade == "problem"
    if os.geteuid():
        tmp_path.chmod(0o500)
        assert "cannot be written" in machine.room("disk", tmp_path, "").sentence
        tmp_path.chmod(0o700)


def test_a_run_that_is_larger_than_the_folder_is_staged_elsewhere(tmp_path: Path) -> None:
    found = machine.room("/dev/shm", tmp_path, "make room", 10**18, staging=True)
    assert found.grade == "warning"
    assert "slower place" in found.sentence


@pytest.mark.parametrize(
    ("limits", "grade", "remedy"),
    [
        ((1024, 4096), "ok", ""),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), "ok", ""),
        ((512, 524288), "warning", "ulimit -n 4096"),
        ((200, resource.RLIM_INFINITY), "problem", "ulimit -n 4096"),
        ((200, 300), "problem", "limits.conf"),
    ],
)
def test_few_open_files(limits: tuple[int, int], grade: str, remedy: str) -> None:
    found = machine.open_files(limits)
    assert found.grade == grade
    assert remedy in found.remedy


H100 = Devices(cuda="12.8", names=("H100",), memory_bytes=(80 * GB,))


@pytest.mark.parametrize(
    ("device", "held", "nvidia", "grade", "says", "remedy"),
    [
        ("cpu", Devices(), False, "ok", "none", ""),
        ("cpu", H100, True, "ok", "H100 (80.0 GB); local.device is cpu", "set local.device=cuda"),
        ("cuda", H100, True, "ok", "H100 (80.0 GB)", ""),
        ("cuda:1", H100, True, "problem", "there is only H100", "local.device=cpu"),
        (
            "cuda",
            Devices(cuda="12.8"),
            True,
            "problem",
            "torch sees no GPU and is built for CUDA 12.8",
            "driver",
        ),
        ("cuda", Devices(), True, "problem", "is built without CUDA", "driver"),
        ("cpu", Devices(), True, "warning", "is there, but torch is built without CUDA", "driver"),
        ("mps", Devices(), False, "problem", "torch sees none", "cpu"),
        ("mps", Devices(mps=True), False, "ok", "Apple GPU", ""),
    ],
)
def test_what_it_computes_with(
    tmp_path: Path, device: str, held: Devices, nvidia: bool, grade: str, says: str, remedy: str
) -> None:
    there = tmp_path / "nvidia0"
    if nvidia:
        there.touch()
    found = gpu(device, lambda: held, there)
    assert found.grade == grade
    assert says in found.sentence
    assert remedy in found.remedy
