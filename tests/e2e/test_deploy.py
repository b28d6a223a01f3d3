"""What `deploy/` holds is what Atoll takes: scripts that run, units of known options, an image's commands."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from atoll.cli.main import run
from atoll.events import read_events
from support.commands import complaint_of
from support.small_run import write_small_run
from support.swarm import TOKEN, environment

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]
ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SBATCH = DEPLOY / "slurm" / "peer.sbatch"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
DOCKERFILE = DEPLOY / "docker" / "Dockerfile"

# Slurm's part in it, on one machine: srun starts the task and passes signals on to it, as the real one does.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
"$@" &
task=$!
trap 'kill -TERM $task' TERM
echo $$ > "$SITE.new"; mv "$SITE.new" "$SITE.srun"
wait $task; code=$?
while kill -0 $task 2> /dev/null; do wait $task; code=$?; done
exit $code
"""
SCONTROL = """#!/bin/bash
case $1 in
    show) echo localhost ;;
    requeue) echo "$2" >> requeued ;;
esac
"""


# ---- SLURM ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.close()


class Cluster:
    """A coordinator, and sites that run the script with a PATH in which Slurm's commands and `atoll` are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        commands = folder / "bin"
        commands.mkdir()
        atoll = f'#!/bin/bash\nexec {shlex.quote(sys.executable)} -m atoll "$@"\n'
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("atoll", atoll)):
            (commands / name).write_text(text)
            (commands / name).chmod(0o755)
        self.token = folder / "token"
        self.token.write_text(TOKEN)
        self.token.chmod(0o600)
        base = environment()
        self._environment = {name: value for name, value in base.items() if not name.startswith("ATOLL_")}
        self._environment["PATH"] = f"{commands}:{base.get('PATH', os.defpath)}"

    def coordinate(self, steps: int) -> str:
        """Start it; its address."""
        more = {"membership.start_peers": 2, "checkpoint.every_rounds": 1}
        run_toml = write_small_run(self.folder, "deployed", more, steps=steps)
        out = ["--token-file", str(self.token), "--out", str(self.folder / "c")]
        self.start(
            "c", [sys.executable, "-m", "atoll", "coordinator", str(run_toml), "--bind", "127.0.0.1:0", *out]
        )
        self.wait(lambda: "join: atoll join" in self.said("c"), "a coordinator")
        found = re.search(r"join: atoll join (\S+) --run deployed", self.said("c"))
        assert found is not None
        return found[1]

    def job(self, site: str, address: str, **variables: str) -> subprocess.Popen[bytes]:
        """One job, as `sbatch` would start it."""
        given = {"COORDINATOR": address, "RUN": "deployed", "TOKEN_FILE": str(self.token), "SITE": site}
        given |= {
            "SLURM_JOB_ID": f"job-{site}",
            "SLURM_NNODES": "1",
            "OUT": str(self.folder / site),
            **variables,
        }
        own = ["--set", "local.threads=1", "--set", f'data.sources=["{self.folder / "text"}"]']
        return self.start(site, ["bash", str(SBATCH), *own], given)

    def start(
        self, name: str, command: list[str], variables: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env={**self._environment, **(variables or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._processes.append(process)
        return process

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def versions(self, site: str) -> list[int]:
        """What the site committed, over all its starts."""
        return [event["version"] for event in self.events(site, "RoundApplied")]

    def events(self, site: str, kind: str) -> list[dict[str, Any]]:
        path = self.folder / site / "deployed" / f"{site}.jsonl"
        lines = [line.event for _, line, _ in read_events(path)] if path.exists() else []
        return [event for event in lines if event["type"] == kind]

    def wait(self, holds: object, what: str, within_s: float = 90.0) -> None:
        assert callable(holds)
        deadline_s = time.monotonic() + within_s
        while not holds():
            logs = "\n".join(f"{path.name}: {path.read_text()}" for path in self.folder.glob("*.log"))
            assert time.monotonic() < deadline_s, f"{what}: not within {within_s} s\n{logs}"
            time.sleep(0.05)

    def close(self) -> None:
        """Each has a session of its own: what it started ends with it."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)


def test_two_sites_train_to_the_end_and_one_is_queued_again(cluster: Cluster) -> None:
    """Site b's time is over in the middle: SIGTERM to its step, a goodbye, a requeue; run again, it goes on."""
    address = cluster.coordinate(steps=10_000_000)
    a, b = cluster.job("a", address), cluster.job("b", address)
    cluster.wait(lambda: len(cluster.versions("b")) > 2, "a few versions of b")
    cluster.wait(lambda: cluster.events("b", "CheckpointSaved"), "a checkpoint of b")
    os.kill(int((cluster.folder / "b.srun").read_text()), signal.SIGTERM)
    assert b.wait(30) == 143, cluster.said("b")
    assert (cluster.folder / "requeued").read_text() == "job-b\n"
    (ended,) = cluster.events("b", "RunEnded")
    assert ended["reason"] == "stopped by SIGTERM", "it said goodbye"
    before = len(cluster.versions("b"))
    b = cluster.job("b", address, SLURM_RESTART_COUNT="1")
    cluster.wait(lambda: len(cluster.versions("b")) > before, "a version of b that is back")
    (resumed,) = cluster.events("b", "Resumed")
    assert resumed["own_part"], "with its own inner optimizer"
    stop = [sys.executable, "-m", "atoll", "stop", address, "--token-file", str(cluster.token)]
    assert cluster.start("stop", stop).wait(60) == 0, cluster.said("stop")
    assert (a.wait(60), b.wait(60)) == (0, 0), cluster.said("a") + cluster.said("b")
    assert cluster.versions("a")[-1] == cluster.versions("b")[-1]
    assert (cluster.folder / "requeued").read_text() == "job-b\n", "who ends well is not queued again"
    assert TOKEN not in cluster.said("a") + cluster.said("b")


def test_requeues_have_an_end(cluster: Cluster) -> None:
    for count in ("4", "5"):
        job = cluster.job("a", "127.0.0.1:1", MOST_REQUEUES="5", SLURM_RESTART_COUNT=count)
        cluster.wait(lambda: (cluster.folder / "a.srun").exists(), "the step")
        os.kill(int((cluster.folder / "a.srun").read_text()), signal.SIGTERM)
        assert job.wait(30) == 143
        (cluster.folder / "a.srun").unlink()
    assert "stopped after 5 requeues; not queued again" in cluster.said("a")
    assert (cluster.folder / "requeued").read_text() == "job-a\n", "the first time only"


def test_a_job_that_fails_is_not_queued_again(cluster: Cluster) -> None:
    address = cluster.coordinate(steps=10)
    job = cluster.job("a", address, RUN="another")
    assert job.wait(60) == 5, cluster.said("a")
    assert not (cluster.folder / "requeued").exists()


@pytest.mark.parametrize("missing", ["COORDINATOR", "RUN", "TOKEN_FILE"])
def test_a_job_says_what_it_lacks(cluster: Cluster, missing: str) -> None:
    assert cluster.job("a", "127.0.0.1:1", **{missing: ""}).wait(30) != 0
    assert re.search(rf"peer\.sbatch.*\b{missing}\b", cluster.said("a")), cluster.said("a")


def test_a_token_that_others_can_read_is_refused(cluster: Cluster) -> None:
    cluster.token.chmod(0o640)
    assert cluster.job("a", "127.0.0.1:1").wait(30) == 2
    assert "chmod 600" in cluster.said("a")


def test_several_ranks_are_started_by_torchrun(cluster: Cluster) -> None:
    command = cluster.folder / "bin" / "torchrun"
    command.write_text(f'#!/bin/bash\nprintf "%s\\n" "$@" > {cluster.folder}/torchrun.said\n')
    command.chmod(0o755)
    job = cluster.job("a", "h:7070", RANKS="4", SLURM_NNODES="2", SLURM_JOB_NODELIST="n[1-2]")
    assert job.wait(30) == 0
    said = (cluster.folder / "torchrun.said").read_text().splitlines()
    options = get_args_parser().parse_args(
        said
    )  # torchrun's own: it would take --run for short of an option of its own
    assert (options.nnodes, options.nproc_per_node, options.rdzv_endpoint) == ("2", "4", "localhost:29400")
    assert (options.module, options.training_script) == (True, "atoll")
    assert options.training_script_args[:4] == ["join", "h:7070", "--run", "deployed"]


def test_the_script_asks_slurm_for_a_signal_and_a_requeue() -> None:
    options = re.findall(r"^#SBATCH (\S+)$", SBATCH.read_text(), re.MULTILINE)
    assert {"--signal=TERM@120", "--requeue", "--open-mode=append"} <= set(options)


def test_scripts_are_sound() -> None:
    assert subprocess.run(["bash", "-n", str(SBATCH)], timeout=30, check=False).returncode == 0
    if (checker := shutil.which("shellcheck")) is None:
        pytest.skip("shellcheck is not here; bash has read the script")
    done = subprocess.run([checker, str(SBATCH)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


# ---- systemd ---------------------------------------------------------------------------------------------------------


def options_of(unit: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in unit.read_text().splitlines():
        if line and not line.startswith(("#", "[")):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_reads_every_line_of_a_unit(unit: Path, tmp_path: Path) -> None:
    if (checker := shutil.which("systemd-analyze")) is None:
        pytest.skip("systemd-analyze is not here")
    copy = tmp_path / unit.name
    copy.write_text(unit.read_text().replace("/opt/atoll/bin/atoll", sys.executable))
    done = subprocess.run(
        [checker, "verify", "--man=no", str(copy)], capture_output=True, text=True, timeout=60, check=False
    )
    ours = [line for line in done.stderr.splitlines() if unit.name in line]
    assert ours == []
    broken = tmp_path / "broken.service"
    broken.write_text(copy.read_text().replace("TimeoutStopSec", "TimeoutStopSecs"))
    done = subprocess.run(
        [checker, "verify", "--man=no", str(broken)], capture_output=True, text=True, timeout=60, check=False
    )
    assert "TimeoutStopSecs" in done.stderr, "a line that systemd does not know would be found"


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_keeps_the_token_to_itself_and_gives_it_time(unit: Path) -> None:
    options = options_of(unit)
    if "coordinator" in unit.stem:  # it makes its own, in a folder that nobody else can read
        assert "net.security=tls" in options["ExecStart"][0]
        assert options["StateDirectoryMode"] == ["0700"]
    else:
        assert options["LoadCredential"] == ["token:/etc/atoll/token"]
        assert "ATOLL_TOKEN_FILE=%d/token" in options["Environment"]
    assert options["KillSignal"] == ["SIGTERM"]
    assert int(options["TimeoutStopSec"][0]) > 5, "a peer may take so long"
    assert "143" in options["SuccessExitStatus"][0]
    assert options["NoNewPrivileges"] == ["yes"]
    assert "token" not in options["ExecStart"][0].lower()


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_units_command_is_one_of_atolls(unit: Path) -> None:
    (line,) = options_of(unit)["ExecStart"]
    words = [word for word in line.split()[1:] if not word.startswith("$M")]
    assert complaint_of(words) is None


# ---- Docker ----------------------------------------------------------------------------------------------------------


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"\\\n\s*", "", DOCKERFILE.read_text())
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines]


def test_the_image_copies_what_there_is() -> None:
    """No engine builds the image here: what is read from the repository is there, and is let through."""
    ignored = (DOCKERFILE.parent / "Dockerfile.dockerignore").read_text().splitlines()
    copied = [
        words.split()[:-1] for kind, words in instructions() if kind == "COPY" and "--from" not in words
    ]
    sources = [source for each in copied for source in each]
    assert {"pyproject.toml", "native", "src"} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists(), source
        assert f"!{source}" in ignored, f"{source} is not sent to the engine"
    needed = re.findall(r"^include\((\w+)/", (ROOT / "CMakeLists.txt").read_text(), re.MULTILINE)
    assert set(needed) <= set(sources)
    stages = [words.split()[-1] for kind, words in instructions() if kind == "FROM" and " AS " in words]
    for kind, words in instructions():
        for stage in re.findall(r"from=(\w+)", words):
            assert stage in stages, (kind, words)


def test_the_images_commands_are_sound() -> None:
    known = {
        "FROM",
        "ARG",
        "RUN",
        "WORKDIR",
        "COPY",
        "USER",
        "VOLUME",
        "ENV",
        "EXPOSE",
        "STOPSIGNAL",
        "ENTRYPOINT",
        "CMD",
    }
    assert {kind for kind, _ in instructions()} <= known
    for kind, words in instructions():
        if kind == "RUN":
            script = re.sub(r"^(--mount=\S+\s+)*", "", words)
            done = subprocess.run(["bash", "-n", "-c", script], capture_output=True, timeout=30, check=False)
            assert done.returncode == 0, (script, done.stderr)
    last = dict(instructions())
    assert last["ENTRYPOINT"] == '["atoll"]', "the list form: the program is process 1, and gets the signals"
    assert last["STOPSIGNAL"] == "SIGTERM"
    assert last["USER"] != "root"
    assert run(["--help"]) == 0
    assert last["CMD"] == '["--help"]'


def test_process_1_ends_at_a_sigterm(tmp_path: Path) -> None:
    """In a container nobody else is there: no default action ends process 1, only a handler of its own."""
    command = [sys.executable, "-m", "atoll", "coordinator", "--run", "one", "--bind", "127.0.0.1:0"]
    command += ["--out", str(tmp_path)]
    unshare = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if subprocess.run([*unshare, "true"], capture_output=True, timeout=30, check=False).returncode:
        pytest.skip("no namespace of processes can be made here (it needs root)")
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([*unshare, *command], env=environment(), stdout=log, stderr=log)
    try:
        deadline_s = time.monotonic() + 60
        while "join: atoll join" not in (tmp_path / "log").read_text():
            assert time.monotonic() < deadline_s, (tmp_path / "log").read_text()
            time.sleep(0.05)
        inside = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        status = Path(f"/proc/{inside[0]}/status").read_text()
        assert re.search(r"^NSpid:\t\d+(\t\d+)*\t1$", status, re.MULTILINE), (
            "it is process 1 of its namespace"
        )
        os.kill(int(inside[0]), signal.SIGTERM)
        assert process.wait(15) == 143, (tmp_path / "log").read_text()
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(30)
