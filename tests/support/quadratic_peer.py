"""One peer of the quadratic: loss (theta - c)^2 / 2, inner SGD 0.1, 5 inner steps a round, through the public API.

Every element of `theta` follows the same closed form, so a long vector makes transfers long enough to break. After
each round a line {"round", "version", "theta", "digest", "members", "step"} is appended to --results. With
--halt-in-round the peer writes --marker and stands still in that round's inner loop, heartbeats going, until a test
ends it or it has had to catch up; with --hold-in-round until the file --until is there. With --kill-self or
--stop-self it sends itself SIGKILL or SIGSTOP in the transfer of --fault-in-round, after writing to --marker how many
bytes it had sent; a peer with --begin-after stays out of that transfer until a file is there, so that the other can
not be done with it before its fault. With --say-no-rates on all peers, direct lanes have equal shares in every round,
whatever this machine was doing in the first.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import msgspec
import torch
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import atoll
from atoll.comm.native import NativeCommunicator
from atoll.config.environment import rank_environment
from atoll.errors import AtollError
from atoll.membership.client import Member
from atoll.values import TransferStats
from support.blocked import block

# Shares of what a peer sends as a contributor. Nothing goes to who has not begun: of three, half of one's half.
MOMENTS = {"half-sent": 0.25, "all-sent": 1.0}
BEGIN_WITHIN_S = 60.0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--peer", required=True)
    parser.add_argument("--center", type=float, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--numel", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--inner-steps", type=int, default=5)
    parser.add_argument(
        "--steps-made", type=int, default=None, help="fewer steps than the round's, every round"
    )
    parser.add_argument("--lr", type=float, default=0.7)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--codec", default="fp32")
    parser.add_argument("--weights", default="tokens")
    parser.add_argument("--steps-by-speed", action="store_true")
    parser.add_argument("--joiner", default="fresh", help='"donor": a late joiner copies inner momentum')
    parser.add_argument("--inner-momentum", type=float, default=0.5, help="with --joiner donor; else none")
    parser.add_argument("--halve-lr-at", type=int, default=None)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--advertise", default="")
    parser.add_argument("--authority", default="", help="the run's fingerprint: all is TLS")
    parser.add_argument("--token-file", type=Path, default=None)
    parser.add_argument("--bind", default="")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--marker", type=Path, default=None)
    parser.add_argument("--halt-in-round", type=int, default=None)
    parser.add_argument("--hold-in-round", type=int, default=None, help="until the file --until is there")
    parser.add_argument("--until", type=Path, default=None)
    parser.add_argument(
        "--block-in-round", type=int, default=None, help="as --halt-in-round, in one native call"
    )
    parser.add_argument(
        "--mark-reducing-in-round", type=int, default=None, help="write --marker in the transfer"
    )
    parser.add_argument("--flip-anchor-bit-in-round", type=int, default=None)
    parser.add_argument("--poison-in-round", type=str, default=None, help="ROUND:VALUE written into theta")
    parser.add_argument("--wait-for-freeze", action="store_true", help="after --steps-made, in every round")
    parser.add_argument("--mark-ready-in-round", type=int, default=None, help="write --marker when ready")
    parser.add_argument("--kill-self", choices=MOMENTS, default=None)
    parser.add_argument("--stop-self", choices=MOMENTS, default=None)
    parser.add_argument("--begin-after", type=Path, default=None)
    parser.add_argument("--fault-in-round", type=int, default=1)
    parser.add_argument("--say-no-rates", action="store_true", help="the coordinator learns no link's rate")
    parser.add_argument("--leave-after", type=int, default=None, help="leave politely after so many rounds")
    parser.add_argument("--step-s", type=float, default=0.0, help="make inner steps at least this long")
    parser.add_argument("--round-s", type=float, default=0.0, help="make rounds at least this long")
    parser.add_argument("--checkpoints", type=Path, default=None, help="folder to save in and to resume from")
    return parser.parse_args()


def hit_while_sending(args: argparse.Namespace, moment: str, number: signal.Signals) -> None:
    """In the transfer of the chosen round, wait until so many bytes left this process, then send it the signal."""
    original = NativeCommunicator.reduce

    def reduce(self: NativeCommunicator, plan, grid, contribution, result):
        if plan.op.round == args.fault_in_round + 1:  # rounds are counted from 1 on the wire
            before = self.stats()["sent_bytes"]
            # What this peer sends as a contributor: everything but the share it sums itself.
            goal = MOMENTS[moment] * 4 * args.numel * (len(plan.members) - 1) / len(plan.members)

            def watch() -> None:
                while (sent := self.stats()["sent_bytes"] - before) < goal:
                    pass
                write_marker(args, str(sent))
                os.kill(os.getpid(), number)

            threading.Thread(target=watch, daemon=True).start()
        return original(self, plan, grid, contribution, result)

    NativeCommunicator.reduce = reduce  # type: ignore[method-assign]


def begin_late(args: argparse.Namespace) -> None:
    """Stay out of the chosen round's transfers until the file is there."""
    original = NativeCommunicator.reduce

    def reduce(self: NativeCommunicator, plan, grid, contribution, result):
        deadline_s = time.monotonic() + BEGIN_WITHIN_S
        while plan.op.round == args.fault_in_round + 1 and not args.begin_after.exists():
            assert time.monotonic() < deadline_s, f"no {args.begin_after} within {BEGIN_WITHIN_S} s"
            time.sleep(0.005)
        return original(self, plan, grid, contribution, result)

    NativeCommunicator.reduce = reduce  # type: ignore[method-assign]


def say_no_rates() -> None:
    """Report every transfer without what its links were seen to carry, and measure none."""
    original = NativeCommunicator.reduce

    def probe(self: NativeCommunicator, *link: object) -> tuple[float, float, str]:
        return 0.0, 0.0, "this peer says no rates"

    def reduce(self: NativeCommunicator, plan, grid, contribution, result):
        return msgspec.structs.replace(
            original(self, plan, grid, contribution, result), stats=TransferStats()
        )

    NativeCommunicator.probe = probe  # type: ignore[method-assign]
    NativeCommunicator.reduce = reduce  # type: ignore[method-assign]


def mark_when_ready(args: argparse.Namespace) -> None:
    """Write the marker when this peer's update is encoded and it has begun to wait for the others."""
    original = Member.ready

    def ready(self: Member, message) -> None:
        original(self, message)
        if message.round == args.mark_ready_in_round + 1:
            write_marker(args, "ready")

    Member.ready = ready  # type: ignore[method-assign]


def mark_reducing(args: argparse.Namespace) -> None:
    """Write the marker when the transfer of the chosen round has begun here."""
    original = NativeCommunicator._wait

    def wait(self: NativeCommunicator, op):
        if op[1] == args.mark_reducing_in_round + 1:
            write_marker(args, "reducing")
        return original(self, op)

    NativeCommunicator._wait = wait  # type: ignore[method-assign]


def write_marker(args: argparse.Namespace, text: str) -> None:
    """Whole or not at all: who sees the file can read it."""
    whole = args.marker.with_suffix(".part")
    whole.write_text(text)
    whole.rename(args.marker)


def main() -> None:
    args = parse()
    torch.set_num_threads(1)
    model = torch.nn.Module()
    ranks = rank_environment()
    mesh = atoll.ElasticDeviceMesh() if ranks.num_ranks > 1 else None
    theta = torch.zeros(args.numel)
    if mesh is not None:
        theta = distribute_tensor(theta, mesh.local, [Shard(0)])
        args.marker = args.marker.with_stem(f"{args.marker.stem}.{ranks.rank}") if ranks.rank else args.marker
    model.theta = torch.nn.Parameter(theta)
    inner = torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=args.inner_momentum if args.joiner == "donor" else 0.0
    )
    if args.kill_self:
        hit_while_sending(args, args.kill_self, signal.SIGKILL)
    if args.stop_self:
        hit_while_sending(args, args.stop_self, signal.SIGSTOP)
    if args.begin_after:
        begin_late(args)
    if args.say_no_rates:
        say_no_rates()
    if args.mark_ready_in_round is not None:
        mark_when_ready(args)
    if args.mark_reducing_in_round is not None:
        mark_reducing(args)
    total = args.rounds * args.inner_steps
    with atoll.join(
        args.address,
        run="quadratic",
        model=model,
        optimizer=inner,
        steps=total,
        peer=args.peer,
        authority=args.authority,
        token_file=args.token_file,
        advertise=args.advertise,
        bind=args.bind,
        port=args.port,
        out=args.out,
        checkpoints=args.checkpoints,
        mesh=mesh,
    ) as session:
        optimizer = atoll.DiLoCoOptimizer(
            session,
            inner_steps=args.inner_steps,
            lr=args.lr,
            momentum=args.momentum,
            codec=args.codec,
            weights=args.weights,
            steps_by_speed=args.steps_by_speed,
            joiner=args.joiner,
        )
        scheduler = None
        if args.halve_lr_at is not None:
            at = args.halve_lr_at
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < at else 0.5)
            session.follow(scheduler)
        while not session.finished() and optimizer.local_epoch != args.leave_after:
            run_round(args, session, model, optimizer, scheduler)


def hold(args: argparse.Namespace, session: atoll.Session) -> None:
    """Stand still in the inner loop, as a slow machine would, until a test says to go on."""
    deadline_s = time.monotonic() + BEGIN_WITHIN_S
    while not session.crew.decide(bool, args.until.exists):
        assert time.monotonic() < deadline_s, f"no {args.until} within {BEGIN_WITHIN_S} s"
        session.safe_point()
        time.sleep(0.005)


def run_round(args, session, model, optimizer, scheduler) -> None:
    if args.checkpoints is not None:
        session.safe_point()
    round_ = optimizer.local_epoch
    started_s = time.monotonic()
    version, before = session.version, optimizer.last_round
    made = args.inner_steps if args.steps_made is None else args.steps_made
    for step in range(made):
        if round_ == args.halt_in_round and step == 1:
            write_marker(args, "halted")
            while session.version == version:
                session.safe_point()
                time.sleep(0.01)
        if round_ == args.hold_in_round and step == 1:
            hold(args, session)
        if round_ == args.block_in_round and step == 1:
            block(lambda: write_marker(args, "blocked"))
        if session.asked_to_leave:
            return
        time.sleep(args.step_s)
        optimizer.zero_grad()
        loss = 0.5 * (model.theta - args.center).square().sum()
        loss.backward()
        if round_ == args.flip_anchor_bit_in_round and step == 0:
            optimizer.outer.state.anchor.view("uint32")[0] ^= 1
        if args.poison_in_round and int(args.poison_in_round.split(":")[0]) == round_ and step == made - 1:
            with torch.no_grad():
                model.theta.fill_(float(args.poison_in_round.split(":")[1]))
            model.theta.grad.zero_()
        if step == made - 1:
            while time.monotonic() - started_s < args.round_s:
                session.safe_point()
                time.sleep(0.005)
        optimizer.step(tokens=args.tokens)
        if scheduler is not None:
            scheduler.step()
        if optimizer.local_epoch > round_:  # the round was closed before its time
            break
    if args.wait_for_freeze:
        while not session._member.freeze_requested(round_ + 1):
            session.safe_point()
            time.sleep(0.005)
    if made < args.inner_steps:
        optimizer.finish_round()
    if optimizer.last_round is before or optimizer.last_round.missed:
        return  # it had to catch up, and is somewhere in a later round now
    theta = model.theta.detach()
    if isinstance(theta, DTensor):
        theta = theta.to_local()
    assert (theta == theta[:1]).all(), "all elements follow the same closed form"
    digest = optimizer.outer.state.digest()
    if not session.crew.is_lead:
        return
    line = {
        "round": round_,
        "version": session.version,
        "theta": theta[0].item(),
        "digest": digest,
        "members": list(optimizer.last_round.members),
        "contributors": list(optimizer.last_round.contributors),
        "step": session.step,
    }
    with args.results.open("a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    try:
        main()
    except AtollError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
