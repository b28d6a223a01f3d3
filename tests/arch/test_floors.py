"""Imports go down the house's floors only, lazy ones too; threads and the environment have one owner each."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import atoll

SOURCE = Path(__file__).parents[2] / "src" / "atoll"

FLOOR = {
    **dict.fromkeys(
        (
            "addresses",
            "errors",
            "values",
            "clock",
            "events",
            "log",
            "signals",
            "config",
            "kernels",
            "runs",
            "shuffle",
        ),
        0,
    ),
    **dict.fromkeys(("codecs", "state", "membership", "plan", "network", "data"), 1),
    **dict.fromkeys(("comm", "mesh", "recovery", "checkpoint"), 2),
    "diloco": 3,
    **dict.fromkeys(("train", "sim", "dashboard"), 4),
    "cli": 5,
}
# The public face, the entry point, and the native module (wrapped by kernels.py and comm/native.py alone).
DOORS = {"__init__", "__main__"}
NATIVE_USERS = {"kernels.py", "comm/native.py"}
# `diloco.session` opens what users join: it may name the client of membership; pure rooms stay pure.
TORCH_FREE = {
    "membership",
    "plan",
    "network",
    "comm",
    "codecs",
    "config",
    "kernels",
    "values",
    "events",
    "errors",
    "clock",
    "log",
    "signals",
    "data",
    "recovery",
    "addresses",
}
THREAD_OWNERS = {
    "comm/prober.py",
    "data/prefetching.py",
    "membership/client.py",
    "membership/etcd_client.py",
    "membership/link.py",
    "mesh/watch.py",
    "network/dht.py",
    "network/dht_resolving.py",
    "network/own_addresses.py",
    "recovery/fetching.py",
    "signals.py",
    "state/snapshot.py",
}
CONFIG_READERS = {"cli", "config"}
CONFIG_READER_FILES = {"train/build.py", "train/models.py", "train/simulated.py", "train/sizes.py"}


def modules() -> list[tuple[str, str, ast.AST]]:
    """(path within the package, room, syntax tree) of every file."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        relative = path.relative_to(SOURCE)
        found.append(
            (relative.as_posix(), relative.parts[0].removesuffix(".py"), ast.parse(path.read_text()))
        )
    return found


def imported(tree: ast.AST) -> list[str]:
    """Full names of everything a module imports, at any depth, lazily or not."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the floor; write the full path"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif (
            isinstance(node, ast.Call)
            and getattr(node.func, "id", getattr(node.func, "attr", "")) == "import_module"
        ):
            names += [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    return names


def test_imports_go_down_only() -> None:
    breaks = []
    for path, room, tree in modules():
        if room in DOORS:
            continue
        assert room in FLOOR, (
            f"{path}: give the new room {room!r} a floor in this test and in docs/architecture.md"
        )
        for name in imported(tree):
            parts = name.split(".")
            if parts[0] != "atoll" or len(parts) < 2 or parts[1] == room:
                continue
            there = parts[1]
            if there == "_native":
                if path not in NATIVE_USERS:
                    breaks.append(f"{path} imports atoll._native; only {sorted(NATIVE_USERS)} may")
            elif there == "__version__":
                continue
            elif FLOOR.get(there, 99) >= FLOOR[room] > 0 or (FLOOR[room] == 0 and FLOOR.get(there, 99) > 0):
                breaks.append(f"{path} (floor {FLOOR[room]}) imports {name} (floor {FLOOR.get(there)})")
    assert breaks == []


def test_a_planted_break_is_found() -> None:
    names = imported(ast.parse("def f():\n    from atoll.cli.main import main\n"))
    assert names == ["atoll.cli.main.main"]


def test_protocol_rooms_never_import_torch() -> None:
    users = [
        path
        for path, room, tree in modules()
        if room in TORCH_FREE and any(name.split(".")[0] == "torch" for name in imported(tree))
    ]
    assert users == []


@pytest.mark.parametrize(
    "module",
    [
        "atoll",
        "atoll.membership.client",
        "atoll.comm.native",
        "atoll.recovery.donor",
        "atoll.recovery.catching_up",
        "atoll.cli.main",
    ],
)
def test_import_does_no_heavy_work(module: str) -> None:
    code = f"import sys, threading, {module}; sys.exit(('torch' in sys.modules) * 2 + (threading.active_count() > 1))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_threads_and_processes_have_one_owner() -> None:
    makers = set()
    for path, _, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                name = (
                    node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                )
                if name in ("Thread", "ThreadPoolExecutor", "ProcessPoolExecutor", "Process"):
                    makers.add(path)
    assert makers <= THREAD_OWNERS, "a new thread needs an owner here and a line in docs/threads.md"


def test_the_environment_is_read_in_one_file() -> None:
    readers = set()
    for path, _, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb"):
                readers.add(path)
    assert readers <= {"config/environment.py"}


def test_config_objects_stay_at_the_edge() -> None:
    readers = {
        path
        for path, room, tree in modules()
        if room not in CONFIG_READERS
        and path not in CONFIG_READER_FILES
        and any(name.startswith("atoll.config.schema") for name in imported(tree))
    }
    assert readers == set()


def test_nothing_is_unpickled() -> None:
    users = [
        path
        for path, _, tree in modules()
        if any(name.split(".")[0] in ("pickle", "marshal", "dill", "cloudpickle") for name in imported(tree))
    ]
    assert users == []


def test_public_names_exist() -> None:
    assert sorted(atoll.__all__) == ["DiLoCoOptimizer", "ElasticDeviceMesh", "Session", "__version__", "join"]
    for name in atoll.__all__:
        assert getattr(atoll, name) is not None
