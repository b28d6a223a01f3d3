"""Taking a seat in a run: `atoll.join(...)`."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path

import torch

from atoll.config.environment import run_token
from atoll.diloco.session import EngineSlot, Session
from atoll.events import EventLog, JsonLinesSink, RunStarted, Sink
from atoll.membership.client import Member
from atoll.network.addresses import EngineAddress, engine_address
from atoll.state.tensors import ModelTensors


def join(
    address: str,
    *,
    run: str,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    steps: int | None = None,
    peer: str = "",
    token_file: str | Path | None = None,
    wait_s: float = 0.0,
    bind: str = "",
    port: int = 0,
    advertise: str = "",
    out: str | Path | None = "runs",
) -> Session:
    """Take a seat in a run: connect to the coordinator at `address` ("host:port") and prove the run's token.

    The token comes from `token_file` or the environment (ATOLL_TOKEN, ATOLL_TOKEN_FILE), never from an argument.
    `steps` is the run's length in inner steps (None: until the data ends). `peer` is this peer's name in the run
    (default: host name and pid). `wait_s` waits for a coordinator that is not up yet. `bind`, `port` and `advertise`
    are the engine's own address (default: loopback for a coordinator on loopback, else every interface and the one
    that reaches the coordinator). Events go to `out/<run>/<peer>.jsonl`; None writes none.

    Blocks until connected. Raises Refused, Unreachable (within about 15 s, or `wait_s`), or ConfigError.
    """
    return open_session(
        address,
        run=run,
        peer=peer or default_peer_name(),
        token=run_token(token_file),
        tensors=ModelTensors(model.named_parameters(remove_duplicate=False)) if model is not None else None,
        inner=optimizer,
        total_steps=steps,
        wait_s=wait_s,
        engine=engine_address(address, bind, port, advertise),
        out=Path(out) / run if out is not None else None,
    )


def open_session(
    address: str,
    *,
    run: str,
    peer: str,
    token: bytes,
    engine: EngineAddress,
    out: Path | None,
    tensors: ModelTensors | None = None,
    inner: torch.optim.Optimizer | None = None,
    total_steps: int | None = None,
    wait_s: float = 0.0,
    settings_digest: str = "",
    sinks: Sequence[Sink] = (),
) -> Session:
    """`join` with everything spelled out: connects, and opens the event file `out/<peer>.jsonl`."""
    slot = EngineSlot()
    member = Member(
        address=address,
        run=run,
        peer=peer,
        token=token,
        on_abort=slot.abort,
        on_session_key=slot.renew_key,
        wait_s=wait_s,
    )
    file: JsonLinesSink | None = None
    try:
        admission = member.connect()
        file = JsonLinesSink(out / f"{peer}.jsonl") if out is not None else None
        events = EventLog(peer, *([file] if file else []), *sinks)
        events.emit(RunStarted(role="peer", run=run, settings_digest=settings_digest, pid=os.getpid()))
    except BaseException:
        member.close()
        if file is not None:
            file.close()
        raise
    return Session(
        run=run,
        peer=peer,
        member=member,
        admission=admission,
        slot=slot,
        engine=engine,
        tensors=tensors,
        inner=inner,
        total_steps=total_steps,
        events=events,
        close_sinks=file.close if file else (lambda: None),
    )


def default_peer_name() -> str:
    """Host name and pid: unique among the peers of one run, and readable."""
    return f"{socket.gethostname().split('.')[0]}-{os.getpid()}"
