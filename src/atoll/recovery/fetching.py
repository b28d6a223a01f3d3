"""The thread that fetches: all sources at once, on one event loop.

`Fetcher` owns the thread "atoll-fetch". The training thread says which sources there are and what is wanted, and waits
for news; what both use is in the ledger. The work on one source is in `recovery.tap`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any, Final

from atoll.network.authority import Identity
from atoll.network.tls import client_context
from atoll.recovery.ledger import Ledger
from atoll.recovery.pace import Pace
from atoll.recovery.source_link import SourceLink
from atoll.recovery.tap import Common, Tap
from atoll.recovery.targets import Source
from atoll.recovery.wanted import Wanted

MAX_SOURCES: Final = 32
_CONNECTIONS: Final = 5
"""So many to all sources together, at most 4 to one; but at least one to each. With more of them on one line some
starve: a piece then takes as long as all others together, and everybody waits for it at the end."""
_CLOSE_S: Final = 5.0


class Fetcher:
    """Fetches what is wanted from all sources that have it. Every method is for the training thread."""

    def __init__(
        self,
        *,
        run: str,
        session_key: Callable[[], bytes],
        progress_timeout_s: float,
        max_bytes_per_s: float = 0.0,
        identity: Identity | None = None,
    ) -> None:
        """`session_key` is called on the fetch thread. A source that is silent for `progress_timeout_s` has failed."""
        self.ledger = Ledger()
        self._pace = Pace(lambda: max_bytes_per_s)
        self._tls = client_context(identity.authority, identity) if identity else None
        self._run, self._session_key, self._silence_s = run, session_key, progress_timeout_s
        self._common = Common(ledger=self.ledger, open_link=self._open_link, lied=self._ban)
        self._tasks: dict[Source, list[asyncio.Task[None]]] = {}  # the loop's own, like the next
        self._banned: set[Source] = set()
        self._stopping = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._body, name="atoll-fetch", daemon=True)
        self._thread.start()

    def set_sources(self, sources: Sequence[Source]) -> None:
        """These and no others are asked from now on. One that lied stays out."""
        self._post(lambda: self._use(sources[:MAX_SOURCES]))

    def look(self, after: int, soon: bool) -> None:
        """What to ask for: updates above version `after`; `soon`, while there is nothing else to do."""
        self._common.after, self._common.soon = after, soon

    def look_now(self) -> None:
        self._post(self._common.look_now)

    def want(self, item: Wanted) -> None:
        self.ledger.want(item)
        self._post(self._common.there_is_work)

    def forget(self, item: Wanted) -> None:
        """Once this returned nothing of it is delivered any more."""
        off = self.ledger.forget(item)
        self._post(lambda: self._common.call_off(off))

    def ban(self, sources: Collection[Source], why: str) -> None:
        """They gave what is wrong: they are not asked again."""
        for source in sources:
            self._post(lambda source=source: self._ban(source, why))

    def close(self) -> None:
        """End the thread. Idempotent; nothing is delivered after this."""
        self._post(self._stopping.set)
        self._thread.join(_CLOSE_S)
        assert not self._thread.is_alive(), "every wait on the loop can be cancelled"

    def _post(self, call: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(call)

    # ---- on the loop -------------------------------------------------------------------------------------------

    def _body(self) -> None:
        """The thread's body."""
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._run_until_stopped())
        except BaseException as error:  # whatever it is, the training thread must hear of it
            self.ledger.fail(error)

    async def _run_until_stopped(self) -> None:
        await self._stopping.wait()
        tasks = [task for tasks in self._tasks.values() for task in tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _use(self, sources: Sequence[Source]) -> None:
        for source in [each for each in self._tasks if each not in sources]:
            self._close_tap(source)
        fresh = [each for each in sources if each not in self._tasks and each not in self._banned]
        workers = max(1, min(4, _CONNECTIONS // max(1, len(self._tasks) + len(fresh))))
        for source in fresh:
            tap = Tap(source, self._common)
            bodies = [tap.watch(), *(tap.work() for _ in range(workers))]
            self._tasks[source] = [self._start(body) for body in bodies]

    def _start(self, body: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(body)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.ledger.fail(error)

    def _ban(self, source: Source, why: str) -> None:
        self._banned.add(source)
        self.ledger.note(f"{source} gave what is wrong ({why}); it is not asked again")
        if source in self._tasks:
            self._close_tap(source)

    def _close_tap(self, source: Source) -> None:
        """Its tasks give back what they took, as they end."""
        for task in self._tasks.pop(source):
            task.cancel()
        self.ledger.tell_stock(source, None)

    def _open_link(self, source: Source) -> SourceLink:
        return SourceLink(
            source,
            run=self._run,
            session_key=self._session_key,
            silence_s=self._silence_s,
            pace=self._pace,
            tls=self._tls,
        )
