"""One peer of the quadratic: loss (theta - c)^2 / 2, inner SGD 0.1, 5 inner steps a round, through the public API.

Every element of `theta` follows the same closed form, so a long vector makes transfers long enough to break. After
each round a line {"round", "version", "theta", "digest", "members", "step"} is appended to --results. With
--halt-in-round the peer writes --marker and stands still in that round's inner loop, heartbeats going, until a test
ends it. With --kill-self or --stop-self it sends itself SIGKILL or SIGSTOP in the transfer of --fault-in-round, after
writing to --marker how many bytes it had sent; a peer with --begin-after stays out of that transfer until a file is
there, so that the other can not be done with it before its fault.
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

import torch

import atoll
from atoll.comm.native import NativeCommunicator
from atoll.errors import AtollError
from atoll.membership.client import Member

MOMENTS = {"half-sent": 0.5, "all-sent": 1.0}  # shares of what a peer sends as a contributor
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
    parser.add_argument("--halve-lr-at", type=int, default=None)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--marker", type=Path, default=None)
    parser.add_argument("--halt-in-round", type=int, default=None)
    parser.add_argument("--flip-anchor-bit-in-round", type=int, default=None)
    parser.add_argument("--poison-in-round", type=str, default=None, help="ROUND:VALUE written into theta")
    parser.add_argument("--wait-for-freeze", action="store_true", help="after --steps-made, in every round")
    parser.add_argument("--mark-ready-in-round", type=int, default=None, help="write --marker when ready")
    parser.add_argument("--kill-self", choices=MOMENTS, default=None)
    parser.add_argument("--stop-self", choices=MOMENTS, default=None)
    parser.add_argument("--begin-after", type=Path, default=None)
    parser.add_argument("--fault-in-round", type=int, default=1)
    parser.add_argument("--leave-after", type=int, default=None, help="leave politely after so many rounds")
    parser.add_argument("--round-s", type=float, default=0.0, help="make rounds at least this long")
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


def mark_when_ready(args: argparse.Namespace) -> None:
    """Write the marker when this peer's update is encoded and it has begun to wait for the others."""
    original = Member.ready

    def ready(self: Member, message) -> None:
        original(self, message)
        if message.round == args.mark_ready_in_round + 1:
            write_marker(args, "ready")

    Member.ready = ready  # type: ignore[method-assign]


def write_marker(args: argparse.Namespace, text: str) -> None:
    """Whole or not at all: who sees the file can read it."""
    whole = args.marker.with_suffix(".part")
    whole.write_text(text)
    whole.rename(args.marker)


def main() -> None:
    args = parse()
    torch.set_num_threads(1)
    model = torch.nn.Module()
    model.theta = torch.nn.Parameter(torch.zeros(args.numel))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    if args.kill_self:
        hit_while_sending(args, args.kill_self, signal.SIGKILL)
    if args.stop_self:
        hit_while_sending(args, args.stop_self, signal.SIGSTOP)
    if args.begin_after:
        begin_late(args)
    if args.mark_ready_in_round is not None:
        mark_when_ready(args)
    total = args.rounds * args.inner_steps
    with atoll.join(
        args.address, run="quadratic", model=model, optimizer=inner, steps=total, peer=args.peer, out=args.out
    ) as session:
        optimizer = atoll.DiLoCoOptimizer(
            session,
            inner_steps=args.inner_steps,
            lr=args.lr,
            momentum=args.momentum,
            codec=args.codec,
            weights=args.weights,
        )
        scheduler = None
        if args.halve_lr_at is not None:
            at = args.halve_lr_at
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < at else 0.5)
            session.follow(scheduler)
        while not session.finished() and optimizer.local_epoch != args.leave_after:
            run_round(args, session, model, optimizer, scheduler)


def run_round(args, session, model, optimizer, scheduler) -> None:
    round_ = optimizer.local_epoch
    started_s = time.monotonic()
    made = args.inner_steps if args.steps_made is None else args.steps_made
    for step in range(made):
        if round_ == args.halt_in_round and step == 1:
            write_marker(args, "halted")
            while True:
                session.safe_point()
                time.sleep(0.01)
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
    if args.wait_for_freeze:
        while not session._member.freeze_requested(round_ + 1):
            session.safe_point()
            time.sleep(0.005)
    if made < args.inner_steps:
        optimizer.finish_round()
    theta = model.theta.detach()
    assert (theta == theta[0]).all(), "all elements follow the same closed form"
    line = {
        "round": round_,
        "version": session.version,
        "theta": theta[0].item(),
        "digest": optimizer.outer.state.digest(),
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
