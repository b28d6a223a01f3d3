"""A peer's way to the coordinator that leads: which addresses to try, in which order, how often and for how long."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from msgspec.structs import replace

from atoll import log
from atoll.addresses import split_addresses
from atoll.clock import MonotonicClock
from atoll.errors import Refused, Unreachable
from atoll.membership.link import Credentials, Link, NotReachedError, open_link
from atoll.membership.settings import Timeouts

BACKOFF_S = (0.1, 1.0)
LOOK_UP_AFTER_S = 3.0
"""Without a coordinator for so long, it is asked where one is by now, and then again after each such time."""
MOST_ADDRESSES = 16

Find = Callable[[], Awaitable[tuple[str, ...]]]
"""Where the coordinator is by now, as `host:port`; () if nobody knows. It bounds its own wait."""

_log = log.get(__name__)


class Search:
    """Remembers where the last coordinator was found. For one event loop."""

    def __init__(
        self, who: Credentials, *, connect_s: float, reach_s: float, find: Find | None = None
    ) -> None:
        """`connect_s` is for one try, `reach_s` for the first search as a whole; `find` knows of others than those of
        `who`."""
        self._who, self._find = who, find
        self._asked = False  # whether `find` has answered
        self._addresses = split_addresses(who.address)  # the last good one first
        self.shown = ", ".join(self._addresses)
        self._connect_s, self._reach_s = connect_s, reach_s
        self._clock = MonotonicClock()
        self._jitter = random.Random()  # not the global generator: that one belongs to the user's training
        self.missed = ""  # what the last try met, "" once one was found

    def come_as(self, who: Credentials) -> None:
        """Another certificate from now on."""
        self._who = who

    @property
    def who(self) -> Credentials:
        return replace(self._who, address=self._addresses[0])

    def others_first(self) -> None:
        """The one found last is tried last."""
        self._addresses = (*self._addresses[1:], self._addresses[0])

    async def first(self) -> Link:
        deadline_s = self._clock.now_s() + self._reach_s
        async with self._asking():
            async for pause_s in self._attempts():
                remaining_s = deadline_s - self._clock.now_s()
                try:
                    return await self._reach_any(max(0.05, min(self._connect_s, remaining_s)))
                except NotReachedError as why:
                    self.missed = str(why)
                except Refused as refusal:  # by somebody who has the address by now, perhaps
                    if self._find is None or self._asked:
                        raise
                    self.missed = str(refusal)
                if self._clock.now_s() + pause_s >= deadline_s:
                    break
        raise Unreachable(
            f"no coordinator at {self.shown} in {self._reach_s:.3g} s ({self.missed}); start one "
            "with `atoll coordinator`, check the address, or start before it with --wait"
        )

    async def again(self, timeouts: Timeouts) -> Link:
        """For as long as the machine waits for a lost coordinator: its Fail ends this. A try a heartbeat, at least: the
        round that a new coordinator makes first waits for the last peer that comes back."""
        async with self._asking():
            async for _ in self._attempts(min(BACKOFF_S[1], timeouts.heartbeat_s)):
                try:
                    return await self._reach_any(timeouts.connect_s)
                except NotReachedError as why:
                    missed = str(why)
                except Refused as refusal:  # without proof of the token: perhaps not our coordinator at all
                    missed = str(refusal)
                if missed != self.missed:
                    _log.warning("cannot reach the coordinator at %s: %s; trying again", self.shown, missed)
                self.missed = missed
        raise AssertionError("attempts never end")

    async def _reach_any(self, within_s: float) -> Link:
        """The first coordinator that admits this peer: each is tried once, with a fair share of the time.

        Raises Refused if one refuses and none admits, else NotReachedError with what each answered.
        """
        deadline_s = self._clock.now_s() + within_s
        missed: list[str] = []
        refused: list[str] = []
        addresses = self._addresses  # others may be found meanwhile: for the next time
        for index, address in enumerate(addresses):
            share_s = (deadline_s - self._clock.now_s()) / (len(addresses) - index)
            at = f"{address}: " if len(addresses) > 1 else ""
            try:
                link = await open_link(replace(self._who, address=address), max(0.05, share_s))
            except NotReachedError as why:
                missed.append(f"{at}{why}")
            except Refused as refusal:
                refused.append(f"{at}{refusal}")
            else:
                self._addresses = tuple(dict.fromkeys((address, *self._addresses)))
                self.missed = ""
                return link
        if refused:
            raise Refused("; ".join(refused))
        raise NotReachedError("; ".join(missed))

    @contextlib.asynccontextmanager
    async def _asking(self) -> AsyncGenerator[None]:
        """Meanwhile, ask where the coordinator is by now."""
        task = asyncio.create_task(self._ask_again_and_again(self._find)) if self._find is not None else None
        try:
            yield
        finally:
            if task is not None:
                task.cancel()

    async def _ask_again_and_again(self, find: Find) -> None:
        while True:
            await asyncio.sleep(LOOK_UP_AFTER_S)
            found = await find()
            self._asked = True
            if new := [address for address in found if address not in self._addresses]:
                _log.warning("the coordinator is said to be at %s by now; trying there too", ", ".join(new))
            self._addresses = tuple(dict.fromkeys((*found, *self._addresses)))[:MOST_ADDRESSES]
            self.shown = ", ".join(self._addresses)

    async def _attempts(self, longest_s: float = BACKOFF_S[1]) -> Any:
        """Endless, with growing and jittered pauses between; yields the next pause in seconds."""
        pause_s = min(BACKOFF_S[0], longest_s)
        while True:
            jittered_s = pause_s * self._jitter.uniform(0.5, 1.0)
            yield jittered_s
            await asyncio.sleep(jittered_s)
            pause_s = min(2 * pause_s, longest_s)
