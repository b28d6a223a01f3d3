"""What holds for all tests: one thread a process (two cores are shared by swarms), and a line that says on what."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from support.etcd import BINARY, EtcdProcess

# A shell that runs this in the background has SIGINT ignored, and children inherit that; but Ctrl-C is tested here.
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_report_header() -> str:
    from atoll import kernels

    return f"atoll kernels: {kernels.kernel_target()}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seeds", type=int, default=5, help="how many seeds the random fault tests take")
    parser.addoption("--seed", type=int, help="only this one")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "fault_seed" in metafunc.fixturenames:
        one = metafunc.config.getoption("--seed")
        seeds = range(metafunc.config.getoption("--seeds")) if one is None else [one]
        metafunc.parametrize("fault_seed", seeds)


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdProcess]:
    """A real etcd for all tests of a file; each takes a prefix of its own."""
    if BINARY is None:
        pytest.skip("there is no etcd here; on Debian: apt-get install etcd-server")
    process = EtcdProcess(tmp_path_factory.mktemp("etcd"))
    try:
        process.wait()
        yield process
    finally:
        process.kill()
