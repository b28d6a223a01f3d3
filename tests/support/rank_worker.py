"""One rank of a peer in a scene, for tests: `python -m support.rank_worker SCENE [CONNECT_S]`, as launchers do."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from atoll.config.environment import rank_environment
from atoll.errors import AtollError, DataError, QuorumLost, SiblingLost
from atoll.mesh.crew import Crew
from atoll.mesh.elastic import ElasticDeviceMesh
from atoll.mesh.group import open_group
from atoll.values import OpId

DEAD_S = 2.0


class Order(msgspec.Struct, frozen=True):
    version: int
    note: str


def say(text: object) -> None:
    print(text, flush=True)


def together(crew: Crew) -> None:
    """Everything that does not fail."""
    small = crew.decide(Order, lambda: Order(7, "seven"))
    large = crew.decide(bytes, lambda: b"x" * 100_000)
    assert (small, large) == (Order(7, "seven"), b"x" * 100_000)
    assert crew.share(str, f"rank {crew.rank}") == [f"rank {rank}" for rank in range(crew.num_ranks)]
    lengths = crew.share(bytes, b"y" * 5_000 * crew.rank)
    assert [len(each) for each in lengths] == [5_000 * rank for rank in range(crew.num_ranks)]
    assert crew.agree(int, lambda: crew.rank * 2) == [rank * 2 for rank in range(crew.num_ranks)]
    most = np.full((2, 3), 2**64 - 1, np.uint64)
    own = np.array([crew.rank, 2**63], np.uint64)
    first, empty, second = crew.sum_tables([most, np.empty(0, np.uint64), own])
    assert (first == np.uint64(2**64 - crew.num_ranks)).all()
    assert (first.shape, empty.shape) == ((2, 3), (0,))
    assert second.tolist() == [sum(range(crew.num_ranks)), (2**63 * crew.num_ranks) % 2**64]
    assert most[0, 0] == 2**64 - 1, "what was given stays"
    assert crew.sum_tables([]) == []
    crew.meet()
    say("together")


def errors(crew: Crew) -> None:
    """Errors of one rank are everybody's, and the crew lives on."""

    def refuse() -> int:
        raise QuorumLost("too few peers")

    def slip() -> int:
        raise KeyError("slip")

    def stumble() -> int:
        if crew.rank == crew.num_ranks - 1:
            raise DataError("bad row")
        return 0

    def tumble() -> int:
        if crew.rank == crew.num_ranks - 1:
            raise ZeroDivisionError("none")
        return 0

    for together_ in (
        lambda: crew.decide(int, refuse),
        lambda: crew.decide(int, slip),
        lambda: crew.agree(int, stumble),
        lambda: crew.agree(int, tumble),
    ):
        try:
            together_()
        except Exception as error:
            say(f"{type(error).__name__}|{error}")
    assert crew.decide(int, lambda: 3) == 3


def stuck(crew: Crew) -> None:
    """Rank 0 is inside a collective of the default group that rank 1 never comes to."""
    crew.listen(goodbye=lambda reason: say(f"goodbye: {reason}"))
    crew.meet()
    say("ready")
    if crew.rank == 0:
        dist.all_reduce(torch.ones(4))
    time.sleep(600.0)


def blocked(crew: Crew) -> None:
    """Nobody is in a collective."""
    crew.listen(goodbye=lambda reason: say(f"goodbye: {reason}"))
    crew.meet()
    say("ready")
    time.sleep(600.0)


def deciding(crew: Crew) -> None:
    """The siblings wait in the crew's own collective."""
    crew.meet()
    say("ready")
    if crew.is_lead:
        time.sleep(600.0)
    crew.decide(int, lambda: 0)


def aborting(crew: Crew) -> None:
    """The last rank gives up an operation while the main threads of the others sleep in C."""
    crew.listen(on_abort=lambda op: say(f"aborted {op}"))
    crew.meet()
    if crew.rank == crew.num_ranks - 1:
        say("told")
        crew.tell_abort(OpId(1, 2, 0, 3))
    time.sleep(5.0)
    say("woke")


def failing(crew: Crew) -> None:
    """One rank ends with an error while the others are busy."""
    crew.meet()
    say("ready")
    if crew.rank == 1:
        raise DataError("bad row 17")
    time.sleep(600.0)


def interrupted(crew: Crew) -> None:
    """Rank 0 is told to stop while it chooses and the others wait."""

    def choose() -> int:
        raise KeyboardInterrupt("stopped by SIGINT")

    crew.meet()
    crew.decide(int, choose)


def lagging(crew: Crew) -> None:
    """Rank 0 lives, but does not come."""
    crew.meet()
    crew.set_timeout(DEAD_S, 0.2)
    if crew.is_lead:
        time.sleep(1.5)
    assert crew.decide(int, lambda: 3, within_s=60.0) == 3
    if crew.is_lead:
        time.sleep(600.0)
    crew.decide(int, lambda: 3)


def sharded(crew: Crew) -> None:
    """The default group carries the mesh's collectives beside the crew's."""
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == crew.num_ranks
    say("sharded")


def late(crew: Crew) -> None:
    """Ranks are done at different times."""
    crew.meet()
    time.sleep(0.5 * crew.rank)


SCENES: dict[str, Callable[[Crew], None]] = {
    each.__name__: each
    for each in (
        together,
        errors,
        stuck,
        blocked,
        deciding,
        aborting,
        failing,
        interrupted,
        lagging,
        sharded,
        late,
    )
}


def main() -> int:
    """As a program does it: an error is one line and its code."""
    mesh, crew = None, Crew.alone()
    try:
        group = open_group(rank_environment(), "cpu", float(sys.argv[2]) if len(sys.argv) > 2 else 60.0)
        mesh = ElasticDeviceMesh("cpu", group)
        crew = Crew.open(group, dead_s=DEAD_S)
        assert mesh.local.size() == crew.num_ranks
        with crew.explaining():
            SCENES[sys.argv[1]](crew)
    except AtollError as error:
        crew.close(error)
        if mesh is not None:
            mesh.close(lost=isinstance(error, SiblingLost))
        print(f"atoll: error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt as error:
        crew.close(error)
        return 130
    crew.close()
    if mesh is not None:
        mesh.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
