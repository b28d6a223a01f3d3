"""This process's part in the DHT: it finds the run's coordinator, and keeps its record for others.

`Discovery` owns the thread "atoll-dht", on which a node (`dht_node`) serves; once a minute it looks this run's record
up and publishes the newest again, so that the record outlives the coordinator's machine. It needs the extra [dht].
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import random
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, Final, TypeVar

from atoll import log
from atoll.clock import MonotonicClock
from atoll.errors import ConfigError, LocalError, Unreachable
from atoll.network.authority import check_fingerprint
from atoll.network.dht_record import Record, is_dialable, key_of
from atoll.network.dht_resolving import Resolving
from atoll.network.dht_store import EXPIRY_S

SCHEME: Final = "dht:"
FIND_S: Final = 10.0
"""The longest that a look-up takes, if nobody wishes to wait longer."""
WALK_S: Final = 5.0
REPUBLISH_S: Final = EXPIRY_S / 10
PAUSE_S: Final = 0.5
CLOSE_S: Final = 2.0

_log = log.get(__name__)
_T = TypeVar("_T")


def bootstrap_of(text: str) -> tuple[str, ...]:
    """`HOST:PORT,HOST:PORT`, with or without `dht:` before it, each once. Raises ConfigError."""
    given = [each.strip() for each in text.strip().removeprefix(SCHEME).split(",") if each.strip()]
    for each in given:
        if not is_dialable(each):
            raise ConfigError(
                f"{each!r} is no bootstrap peer of the DHT; write {SCHEME}HOST:PORT, several separated by commas, and "
                "IPv6 addresses in brackets"
            )
    return tuple(dict.fromkeys(given))


class Discovery:
    """One owner, who closes it. `open`, `coordinator`, `find` and `close` are for his thread, `look_up` for any event
    loop, `publish` for any thread. Raises ConfigError for a fingerprint or an address that cannot be right."""

    def __init__(
        self,
        run: str,
        authority: str,
        *,
        bootstrap: Sequence[str] = (),
        bind: str = "",
        port: int = 0,
        republish_s: float = REPUBLISH_S,
    ) -> None:
        """`authority` is the fingerprint of the run's authority, whose records alone are believed; `bind` "" is every
        address of this machine; `port` 0 any free one (UDP)."""
        if not authority:
            raise ConfigError(
                f"nothing found by the DHT about run {run!r} could be believed: give the fingerprint of the run's "
                "authority, which the join line has (--authority, or local.authority)"
            )
        self.run, self.authority = run, check_fingerprint(authority)
        self.key = key_of(run, self.authority)
        self.port = port
        self._names = Resolving(bootstrap_of(",".join(bootstrap)))
        self._bind, self._republish_s = bind, republish_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._due = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @classmethod
    def wanted(
        cls,
        address: str,
        run: str,
        authority: str,
        *,
        enabled: bool = False,
        port: int = 0,
        bootstrap: str = "",
    ) -> Discovery | None:
        """One that is to be opened, if the coordinator's address is `dht:...` or it is `enabled`; else None."""
        by_dht = address.startswith(SCHEME)
        if not (by_dht or enabled):
            return None
        peers = (*(bootstrap_of(address) if by_dht else ()), *bootstrap_of(bootstrap))
        if by_dht and not peers:
            raise ConfigError(f"{address!r} names no bootstrap peer; write {SCHEME}HOST:PORT,HOST:PORT")
        return cls(run, authority, bootstrap=peers, port=port)

    def open(self) -> Discovery:
        """Start the thread, once. Raises ConfigError without the extra [dht], LocalError if the port cannot be had."""
        try:
            node_type = importlib.import_module("atoll.network.dht_node").DhtNode
        except ModuleNotFoundError as error:
            raise ConfigError(f"the DHT needs {error.name}: pip install 'atoll-train[dht]'") from None
        assert self._thread is None, "open() once"
        self._node = node_type(clock=MonotonicClock())
        self._node.store.keep_place_for(self.key)
        opened: Future[int] = Future()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._attend, args=(self._loop, opened), name="atoll-dht", daemon=True
        )
        self._thread.start()
        try:
            self.port = opened.result(FIND_S)
        except OSError as error:
            self.close()
            where = f"{self._bind or 'this machine'}, UDP port {self.port}"
            raise LocalError(
                f"the DHT cannot use {where}: {error.strerror or error}; choose another dht.port"
            ) from None
        return self

    def coordinator(self, address: str, wait_s: float = 0.0) -> str:
        """Open, and give the coordinator's addresses, separated by commas: for `dht:...` those that the DHT says, else
        `address` itself. Blocks for a look-up, at most `max(FIND_S, wait_s)`. Raises Unreachable, and as `open`."""
        self.open()
        if not address.startswith(SCHEME):
            return address
        within_s = max(FIND_S, wait_s)
        try:
            record = self.find(within_s)
            if record is None:
                raise Unreachable(
                    f"the DHT knows no coordinator of run {self.run!r} of authority {self.authority[:15]}... "
                    f"({self._silence()}, {within_s:.3g} s); check that one of {', '.join(self._names.names)} is up, "
                    "and the join line"
                )
        except BaseException:
            self.close()
            raise
        return ",".join(record.addresses)

    def find(self, within_s: float = FIND_S) -> Record | None:
        """The newest record of this run's coordinator that anybody has; None if there is none within `within_s`."""
        try:
            return self._ask(self._find(within_s)).result(within_s + CLOSE_S)
        except (TimeoutError, CancelledError):
            return None

    async def look_up(self) -> tuple[str, ...]:
        """The coordinator's addresses as the DHT says by now; () if it says nothing within FIND_S. For any event
        loop."""
        asked = self._ask(self._find(FIND_S))
        if asked.cancelled():  # closed
            return ()
        record = await asyncio.wrap_future(asked)
        return record.addresses if record is not None else ()

    def publish(self, record: bytes) -> None:
        """Hold our own record from now on, and give it to others. Any thread; does not wait."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it is closed
                self._loop.call_soon_threadsafe(self._take, record)

    def ignored(self) -> dict[str, int]:
        """How many records and datagrams were not believed, by reason. Any thread."""
        return {**self._node.store.ignored, **self._node.protocol.dropped}

    def close(self) -> None:
        """Leave the DHT; joins the thread, within CLOSE_S. Idempotent."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stop)
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def __enter__(self) -> Discovery:
        return self

    def __exit__(self, *caught: object) -> None:
        self.close()

    # ---- on the thread -------------------------------------------------------------------------------------

    def _attend(self, loop: asyncio.AbstractEventLoop, opened: Future[int]) -> None:
        """The thread's body."""
        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                runner.run(self._serve(opened))
        except asyncio.CancelledError:
            pass
        except Exception as error:
            if opened.done():
                _log.warning(
                    "this process takes no part in the DHT any more: %s: %s", type(error).__name__, error
                )
            else:
                opened.set_exception(error)

    async def _serve(self, opened: Future[int]) -> None:
        self._task = asyncio.current_task()
        try:
            opened.set_result(await self._node.listen(self._bind, self.port))
            while True:
                self._due.clear()
                self._node.bootstrap = await self._names.resolve()
                await self._node.publish(self.key, WALK_S)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._republish_s * random.uniform(0.8, 1.0)):
                        await self._due.wait()
        finally:
            self._node.close()

    async def _find(self, within_s: float) -> Record | None:
        clock = MonotonicClock()
        deadline_s = clock.now_s() + within_s
        before = self._node.store.newest(self.key)
        while (remaining_s := deadline_s - clock.now_s()) > 0:
            self._node.bootstrap = await self._names.resolve()
            record = await self._node.look_up(self.key, min(WALK_S, remaining_s))
            if record is not None:
                if record != before:
                    self._due.set()  # others have an older one, or none
                return record
            await asyncio.sleep(min(PAUSE_S, max(0.0, deadline_s - clock.now_s())))
        return None

    def _take(self, record: bytes) -> None:
        if self._node.store.offer(self.key, record):
            self._due.set()
            return
        newest = self._node.store.newest(self.key)
        _log.warning(
            "the DHT has a newer record of run %s, of term %s; peers will look for that coordinator, not for this one",
            self.run,
            newest.term if newest else "?",
        )

    def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _ask(self, asked: Coroutine[Any, Any, _T]) -> Future[_T]:
        assert self._loop is not None, "open() first"
        try:
            return asyncio.run_coroutine_threadsafe(asked, self._loop)
        except RuntimeError:  # it is closed
            asked.close()
            ended: Future[_T] = Future()
            ended.cancel()
            return ended

    def _silence(self) -> str:
        """What a look-up without a result met."""
        if wrong := dict(self._node.store.ignored):
            return "what it said was ignored: " + ", ".join(
                f"{why} {count} x" for why, count in wrong.items()
            )
        return "nobody answered" if not len(self._node.protocol.router) else "nobody had a record"
