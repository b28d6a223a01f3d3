"""The events of a run that never was: three peers, the last one killed half-way."""

from __future__ import annotations

import math

from atoll import events
from atoll.dashboard.view import Seen

BEGAN_S = 1_700_000_000.0
STEPS_PER_ROUND = 10
STEP_S = 0.25


def made_up_run(rounds: int = 24, kill_at_round: int | None = 12, peers: int = 3) -> list[Seen]:
    """Events in order of time, as a tail over all files gives them."""
    names = [f"peer-{index}" for index in range(peers)]
    seen = [_at(0, "coordinator", events.CoordinatorListening("127.0.0.1:7070", 1, restarted=False))]
    for index, name in enumerate(names):
        seen.append(_at(1, name, events.RunStarted("peer", "made-up", "d" * 8, 100 + index)))
        seen.append(_at(2, "coordinator", events.PeerJoined(name, 0, tuple(names[: index + 1]))))
    seen.append(_at(3, names[0], events.AnchorEvaluated(0, 0, 5.6, 4096)))
    for number in range(rounds):
        if number == kill_at_round:
            seen.append(_at(_time(number) + 0.5, "demo", events.PeerKilled(names[-1], "SIGKILL")))
            lost = names.pop()
            reason = "no heartbeat for 3.0 s"
            seen.append(_at(_time(number) + 1.5, "coordinator", events.PeerLost(lost, reason, tuple(names))))
        seen += _round(number, tuple(names))
    seen.append(_at(_time(rounds) + 1, names[0], events.ModelSaved("model.safetensors", rounds, "f" * 8)))
    seen += [_at(_time(rounds) + 1, name, events.RunEnded("all done", 0)) for name in names]
    return sorted(seen, key=lambda each: each.wall_time_s)


def loss_at(step: int) -> float:
    return 1.9 + 3.7 * math.exp(-step / 60)


def _round(number: int, names: tuple[str, ...]) -> list[Seen]:
    seen = []
    step = number * STEPS_PER_ROUND
    for index, name in enumerate(names):
        for inner in range(1, STEPS_PER_ROUND + 1, 2):
            wiggle = 0.12 * math.sin(7.1 * (step + inner) + 2 * index) + 0.02 * index
            event = events.TrainingStep(step + inner, loss_at(step + inner) + wiggle, 512, 2100.0, 3e-3, 0.8)
            seen.append(_at(_time(number) + inner * STEP_S, name, event))
        seen.append(_at(_time(number + 1), name, applied(number, names)))
    step += STEPS_PER_ROUND
    if number % 3 == 2:
        validation = events.AnchorEvaluated(step, number + 1, loss_at(step) - 0.1, 4096)
        seen.append(_at(_time(number + 1) + 0.01, names[0], validation))
    return seen


def applied(
    number: int, names: tuple[str, ...], digest: str = "", sent_bytes: int = 480_000
) -> events.RoundApplied:
    step = (number + 1) * STEPS_PER_ROUND
    return events.RoundApplied(
        round=number,
        version=number + 1,
        step=step,
        inner_steps=STEPS_PER_ROUND,
        members=names,
        contributors=names,
        tokens=512 * STEPS_PER_ROUND,
        mean_loss=loss_at(step),
        compute_s=2.5,
        wait_s=0.2,
        encode_s=0.01,
        wire_s=0.05,
        vote_s=0.02,
        apply_s=0.02,
        sent_bytes=sent_bytes,
        received_bytes=sent_bytes,
        delta_norm=1.0,
        outer_lr=0.7,
        outer_momentum=0.6,
        digest=digest or f"digest-{number}",
    )


def _time(number: int) -> float:
    return 3 + number * STEPS_PER_ROUND * STEP_S * 1.1


def _at(seconds: float, source: str, event: events.Event) -> Seen:
    return Seen(BEGAN_S + seconds, source, event)
