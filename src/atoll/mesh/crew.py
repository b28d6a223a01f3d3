"""`Crew`: the ranks of one peer as they decide and report together. Rank 0 leads: it alone talks to the coordinator.

Except where noted its methods are for the training thread, and collective: all ranks make the same calls in the same
order. What travels is MessagePack in tensors, over a gloo group of the crew's own; beside it the watch (`mesh.watch`)
keeps the ranks informed of each other whatever their training threads are busy with. A crew of one rank has neither,
and its calls cost nothing: the code above always has a crew.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn, TypeVar

import msgspec
import numpy as np

from atoll import errors
from atoll.errors import AtollError, LocalError
from atoll.values import OpId

if TYPE_CHECKING:
    from atoll.mesh.channel import Channel, Table
    from atoll.mesh.group import RankGroup
    from atoll.mesh.watch import Watch

T = TypeVar("T")

DEAD_S = 5.0
STALL_S = 600.0
"""How long a rank may keep its siblings waiting while it is alive: rank 0 may itself wait for the coordinator."""


LONG_S = 24 * 3600.0
"""The same where rank 0 works alone while its siblings wait: it may be fetching a whole state."""


class _Outcome(msgspec.Struct, frozen=True, array_like=True):
    """What came of something that a rank tried: a value, or an error by its class's name."""

    value: bytes = b""
    error: str = ""
    message: str = ""


class Crew:
    """See the module. Made by `alone` or `open`; ends with `close`."""

    def __init__(
        self, rank: int, num_ranks: int, channel: Channel | None = None, watch: Watch | None = None
    ) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self._channel = channel
        self._watch = watch

    @classmethod
    def alone(cls) -> Crew:
        """One rank: every call is trivial. Imports no torch."""
        return cls(0, 1)

    @classmethod
    def open(
        cls,
        group: RankGroup,
        *,
        dead_s: float = DEAD_S,
        connect_s: float = 60.0,
    ) -> Crew:
        """The crew of these ranks, all of which call this; blocks at most about twice `connect_s`.

        `dead_s` is the watch's (see there). Raises SiblingLost.
        """
        if group.num_ranks == 1:
            return cls.alone()
        from atoll.mesh.channel import Channel
        from atoll.mesh.links import connect
        from atoll.mesh.watch import Watch

        links = connect(group, connect_s)
        watch = Watch(group.rank, group.num_ranks, links, dead_s=dead_s)
        try:
            channel = Channel(group, watch, connect_s=connect_s, wait_s=STALL_S)
        except BaseException as error:
            watch.close(error)
            raise
        return cls(group.rank, group.num_ranks, channel, watch)

    @property
    def is_lead(self) -> bool:
        """Whether this is rank 0, which talks to the coordinator."""
        return self.rank == 0

    def set_timeout(self, dead_s: float, stall_s: float = STALL_S) -> None:
        """A sibling is lost after `dead_s` without a sign of life; a collective call waits at most `stall_s` for ranks
        that are alive. Not collective."""
        if self._watch is not None:
            self._watch.set_dead_s(dead_s)
        if self._channel is not None:
            self._channel.set_wait(stall_s)

    # ---- together -----------------------------------------------------------------------------------------

    def decide(self, kind: type[T], choose: Callable[[], T], *, within_s: float | None = None) -> T:
        """What `choose` gives on rank 0, where alone it is called, on all ranks. `kind` is its type.

        An AtollError of `choose` is raised on all ranks alike; of another exception, which rank 0 raises as it is, the
        others hear by a LocalError. Siblings wait `within_s` at most, if that is given, instead of `stall_s`: `choose`
        may itself wait for the coordinator. Raises SiblingLost.
        """
        if self._channel is None:
            return choose()
        if not self.is_lead:
            outcome = msgspec.msgpack.decode(self._channel.tell(None, within_s), type=_Outcome)
            if outcome.error:
                raise _error_of(outcome)
            return msgspec.msgpack.decode(outcome.value, type=kind)
        try:
            value = choose()
            outcome = _Outcome(msgspec.msgpack.encode(value))
        except Exception as error:
            self._channel.tell(msgspec.msgpack.encode(_outcome_of(error, "rank 0: ")))
            raise
        except BaseException as error:  # a signal: the siblings may be far from here
            self.tell_end(error)
            raise
        self._channel.tell(msgspec.msgpack.encode(outcome))
        return value

    def hear(self, kind: type[T], *, within_s: float) -> T:
        """`decide` of a rank that is not rank 0 and has nothing to choose from."""
        return self.decide(kind, _never, within_s=within_s)

    def share(self, kind: type[T], value: T) -> list[T]:
        """Everybody's value, by rank, on all ranks. Raises SiblingLost."""
        if self._channel is None:
            return [value]
        shared = self._channel.share(msgspec.msgpack.encode(value))
        return [msgspec.msgpack.decode(each, type=kind) for each in shared]

    def agree(self, kind: type[T], attempt: Callable[[], T]) -> list[T]:
        """Every rank makes an attempt; all get what came of each, by rank, or all raise.

        If ranks failed, all raise the error of the lowest that did, and name it: its AtollError, or LocalError for
        another exception, which the rank itself raises as it is. Raises SiblingLost.
        """
        if self._channel is None:
            return [attempt()]
        failure: Exception | None = None
        try:
            outcome = _Outcome(msgspec.msgpack.encode(attempt()))
        except Exception as error:
            failure, outcome = error, _outcome_of(error)
        except BaseException as error:
            self.tell_end(error)
            raise
        outcomes = [
            msgspec.msgpack.decode(each, type=_Outcome)
            for each in self._channel.share(msgspec.msgpack.encode(outcome))
        ]
        if failure is not None and not isinstance(failure, AtollError):
            raise failure
        for rank, each in enumerate(outcomes):
            if each.error:
                raise _error_of(each, f"rank {rank}: ") from failure
        return [msgspec.msgpack.decode(each.value, type=kind) for each in outcomes]

    def sum_tables(self, tables: Sequence[Table]) -> list[Table]:
        """The sum of each table over the ranks, modulo 2^64, on all ranks. Shapes are the same everywhere.

        Raises SiblingLost. The tables given stay as they are.
        """
        if self._channel is None:
            return list(tables)
        flat = np.concatenate([np.ravel(each) for each in tables]) if tables else np.empty(0, np.uint64)
        assert flat.dtype == np.uint64
        if flat.size:
            self._channel.sum(flat)
        ends = np.cumsum([each.size for each in tables])[:-1]
        return (
            [part.reshape(each.shape) for part, each in zip(np.split(flat, ends), tables, strict=True)]
            if tables
            else []
        )

    def meet(self) -> None:
        """Wait until all ranks are here. Raises SiblingLost."""
        if self._channel is not None:
            self._channel.share(b"")

    # ---- the watch ----------------------------------------------------------------------------------------

    def listen(
        self,
        *,
        on_abort: Callable[[OpId], None] | None = None,
        goodbye: Callable[[str], None] | None = None,
    ) -> None:
        """`on_abort(op)` is called, on the watch's thread, when a sibling gives up `op`; it must only tell the engine.
        `goodbye(reason)` is called, on a thread of its own and for at most 2 s, before the watch ends this process."""
        if self._watch is not None:
            self._watch.listen(on_abort=on_abort, goodbye=goodbye)

    def tell_abort(self, op: OpId) -> None:
        """Have all other ranks give up `op`: it was aborted, or failed on this rank. Any thread; does not wait."""
        if self._watch is not None:
            self._watch.tell_abort(op)

    def tell_end(self, error: BaseException) -> None:
        """Have all other ranks end because of `error`, which ends this one. Any thread; does not wait."""
        if self._watch is not None:
            self._watch.tell_end(error)

    @contextmanager
    def explaining(self) -> Generator[None]:
        """Inside, the RuntimeError of a torch collective that a lost sibling broke becomes SiblingLost."""
        if self._watch is None:
            yield
            return
        with self._watch.explaining():
            yield

    def close(self, error: BaseException | None = None) -> None:
        """This rank is done, or ends because of `error`, with which its siblings then end too. Idempotent; does not
        raise. Without an error it waits at most 2 s for the others to be done."""
        if self._watch is not None:
            self._watch.close(error)
        if self._channel is not None:
            self._channel.close()


def _never() -> NoReturn:
    raise AssertionError("rank 0 chooses")


def _outcome_of(error: Exception, where: str = "") -> _Outcome:
    """By the nearest class of `atoll.errors`, which every rank knows; LocalError, saying `where`, for all others."""
    if not isinstance(error, AtollError):
        return _Outcome(error="LocalError", message=f"{where}{type(error).__name__}: {error}")
    known = next(each for each in type(error).__mro__ if each.__module__ == errors.__name__)
    return _Outcome(error=known.__name__, message=str(error))


def _error_of(outcome: _Outcome, prefix: str = "") -> AtollError:
    kind = getattr(errors, outcome.error, None)
    if not (isinstance(kind, type) and issubclass(kind, AtollError)):
        return LocalError(prefix + outcome.message)
    return kind(prefix + outcome.message)
