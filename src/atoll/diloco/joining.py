"""Taking a seat in a run: `atoll.join(...)`."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from atoll.checkpoint.saver import Keeping
from atoll.config.environment import run_token
from atoll.config.rates import parse_rate
from atoll.diloco.badge import Badge, enrol
from atoll.diloco.engine_slot import EngineSlot
from atoll.diloco.exchange import Shelf
from atoll.diloco.ranked_member import AnyMember, RankedMember
from atoll.diloco.safekeeping import Safekeeping
from atoll.diloco.session import Session
from atoll.errors import ConfigError, SiblingLost
from atoll.events import EventLog, JsonLinesSink, RunStarted, Sink
from atoll.membership.client import Member
from atoll.mesh.crew import Crew
from atoll.mesh.elastic import ElasticDeviceMesh
from atoll.mesh.ranks import open_ranks
from atoll.network.addresses import EngineAddress, engine_address
from atoll.network.dht import FIND_S, Discovery
from atoll.network.line import Line
from atoll.signals import leave_politely
from atoll.state.tensors import ModelTensors
from atoll.values import OpId


def join(
    address: str,
    *,
    run: str,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    steps: int | None = None,
    peer: str = "",
    token_file: str | Path | None = None,
    authority: str = "",
    wait_s: float = 0.0,
    bind: str = "",
    port: int = 0,
    advertise: str = "",
    sidecar_port: int = 0,
    max_up: str = "",
    max_down: str = "",
    out: str | Path | None = "runs",
    checkpoints: str | Path | Keeping | None = None,
    fresh: bool = False,
    mesh: ElasticDeviceMesh | None = None,
) -> Session:
    """Take a seat in a run: connect to the coordinator at `address` ("host:port") and prove the run's token.

    Where several coordinators may lead, `address` names them all, separated by commas: "east:7070,west:7070". Or it is
    "dht:east:7071,west:7071": then these bootstrap peers of the DHT are asked (extra [dht]; any one alive is enough),
    and asked again if the coordinator moves; only what the run's `authority` (its fingerprint) signed is believed.
    The token comes from `token_file` or the environment (ATOLL_TOKEN, ATOLL_TOKEN_FILE), never from an argument.
    `authority` is the fingerprint in the run's join line: everything is TLS then, and this peer's key and certificate
    are kept in `out/<run>/identity`, so that it needs no token when it starts again.
    `steps` is the run's length in inner steps (None: until the data ends). `peer` is this peer's name in the run
    (default: host name and pid). `wait_s` waits for a coordinator that is not up yet. `bind`, `port` and `advertise`
    are the engine's own addresses, or interfaces, several separated by commas in `advertise` (default: loopback for a
    coordinator on loopback, else every interface and the one that reaches the coordinator); `sidecar_port` is where
    state is fetched from, 0 for any free one. `max_up` and `max_down` cap what it moves ("200 Mbit/s"; "": no limit).
    Events go to `out/<run>/<peer>.jsonl`; None writes none.

    `checkpoints` is a folder: versions that the coordinator names are saved there while training goes on, and the
    newest is gone on from when the optimizer is made, unless `fresh`. Saves are taken in `session.safe_point()`, which
    `session.batches` calls; `session.hold` adds what else belongs to the state (a GradScaler, a sampler).

    A peer of several ranks (torchrun) is one peer: all of its ranks call this. `mesh` is the one whose `mesh.local` the
    model was sharded over, if it was; parameters may be plain tensors, or DTensors with `Shard(0)` or `Replicate`.

    While the session is open, SIGTERM ends the program as politely as Ctrl-C does, by an exception (`atoll.signals`);
    handlers of the program's own stay in place.

    Blocks until connected. Raises Refused, Unreachable (within about 15 s, or `wait_s`), or ConfigError.
    """
    token = run_token(token_file, needed=not authority)
    discovery = Discovery.wanted(address, run, authority)
    line = Line(_rate("max_up", max_up), _rate("max_down", max_down))
    crew, own_mesh = open_ranks(mesh.device_type if mesh is not None else _device_type(model))
    mesh = mesh or own_mesh
    try:
        named = model.named_parameters(remove_duplicate=False) if model is not None else None
        if discovery is not None:
            address = agreed_address(discovery, address, crew, wait_s)
        engine = engine_address(address, bind, port, advertise, sidecar_port)
        return open_session(
            address,
            run=run,
            peer=peer or default_peer_name(),
            token=token,
            authority=authority,
            tensors=tensors_of(named, crew, mesh) if named is not None else None,
            inner=optimizer,
            total_steps=steps,
            wait_s=wait_s,
            engine=engine,
            line=line,
            out=Path(out) / run if out is not None else None,
            keeping=Keeping(Path(checkpoints)) if isinstance(checkpoints, str | Path) else checkpoints,
            fresh=fresh,
            model=model,
            crew=crew,
            mesh=mesh,
            discovery=discovery,
        )
    except BaseException as error:
        if discovery is not None:
            discovery.close()
        crew.close(error)
        # Or the next try would take its process group for the program's own.
        own_mesh.close(lost=isinstance(error, SiblingLost))
        raise


def agreed_address(discovery: Discovery, address: str, crew: Crew, wait_s: float) -> str:
    """The coordinator's address for all ranks of a peer: rank 0 opens `discovery`, and asks the DHT if `address` is
    `dht:...`. Blocks. Raises as `Discovery.coordinator`."""
    within_s = max(FIND_S, wait_s) + FIND_S
    return crew.decide(str, lambda: discovery.coordinator(address, wait_s), within_s=within_s)


def tensors_of(
    named_parameters: Iterable[tuple[str, torch.Tensor]], crew: Crew, mesh: ElasticDeviceMesh
) -> ModelTensors:
    """The model as this rank of the peer reads and writes it."""
    if crew.num_ranks == 1:
        return ModelTensors(named_parameters)
    return ModelTensors(named_parameters, mesh=mesh.local, sum_tables=crew.sum_tables)


def _device_type(model: torch.nn.Module | None) -> str:
    first = next(model.parameters(), None) if model is not None else None
    return first.device.type if first is not None else "cpu"


def open_session(
    address: str,
    *,
    run: str,
    peer: str,
    token: bytes,
    engine: EngineAddress,
    out: Path | None,
    authority: str = "",
    tensors: ModelTensors | None = None,
    inner: torch.optim.Optimizer | None = None,
    total_steps: int | None = None,
    wait_s: float = 0.0,
    line: Line | None = None,
    shelf: Shelf | None = None,
    settings_digest: str = "",
    sinks: Sequence[Sink] = (),
    keeping: Keeping | None = None,
    fresh: bool = False,
    model: torch.nn.Module | None = None,
    crew: Crew | None = None,
    mesh: ElasticDeviceMesh | None = None,
    discovery: Discovery | None = None,
) -> Session:
    """`join` with everything spelled out: connects, and opens the event file `out/<peer>.jsonl`. With several ranks
    (`crew`) all of them call it: rank 0 connects and tells events, the others hear of what it hears. `discovery`, open
    on rank 0, finds a coordinator that has moved; it is closed with the session."""
    crew = crew or Crew.alone()
    slot = EngineSlot()
    wished = peer
    peer = crew.decide(str, lambda: wished)
    lead: Member | None = None
    badge = _enrol(crew, address, run, peer, token, authority, out, wait_s) if authority else None
    if crew.is_lead:
        lead = Member(
            address=address,
            run=run,
            peer=peer,
            token=token,
            on_abort=lambda op: _abort(slot, crew, op),
            on_session_key=slot.renew_key,
            on_serve=slot.serve,
            on_probe=slot.probe,
            wait_s=wait_s,
            secure=badge.secure if badge else None,
            renew=badge.renew if badge else None,
            find=discovery.look_up if discovery is not None else None,
        )
    member: AnyMember = lead if lead and crew.num_ranks == 1 else RankedMember(crew, lead, slot.renew_key)
    manners = leave_politely(lead.leave_for if lead is not None else (lambda reason: None))
    crew.listen(on_abort=slot.abort, goodbye=_goodbye_of(lead))
    file: JsonLinesSink | None = None
    closing = contextlib.ExitStack()
    if discovery is not None:
        closing.callback(discovery.close)
    try:
        admission = member.connect()
        crew.set_timeout(admission.timeouts.dead_s, admission.timeouts.stall_s)
        file = JsonLinesSink(out / f"{peer}.jsonl") if out is not None and crew.is_lead else None
        if file is not None:
            closing.callback(file.close)
        events = EventLog(peer, *([file] if file else []), *(sinks if crew.is_lead else ()))
        events.emit(RunStarted(role="peer", run=run, settings_digest=settings_digest, pid=os.getpid()))
    except BaseException as error:
        crew.close(error)
        member.close()
        closing.close()
        manners.close()
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
        line=line,
        shelf=shelf or Shelf(fallback=out) if out is not None else shelf,
        safekeeping=Safekeeping(keeping, run=run, peer=peer, emit=events.emit, fresh=fresh, crew=crew),
        model=model,
        manners=manners,
        close_sinks=closing.close,
        crew=crew,
        mesh=mesh,
        badge=badge,
    )


def _enrol(
    crew: Crew,
    address: str,
    run: str,
    peer: str,
    token: bytes,
    authority: str,
    out: Path | None,
    wait_s: float,
) -> Badge:
    """All ranks get a certificate, or all raise."""
    badges: list[Badge] = []

    def attempt() -> bool:
        badge = enrol(
            address,
            run=run,
            peer=peer,
            rank=crew.rank,
            token=token,
            fingerprint=authority,
            folder=out,
            wait_s=wait_s,
        )
        badges.append(badge)
        return True

    crew.agree(bool, attempt)
    return badges[0]


def _goodbye_of(lead: Member | None) -> Callable[[str], None] | None:
    """How the watch over the ranks says goodbye in a training thread's place, which is stuck."""
    return None if lead is None else lambda reason: lead.leave(reason, done=False)


def _abort(slot: EngineSlot, crew: Crew, op: OpId) -> None:
    slot.abort(op)
    crew.tell_abort(op)


def _rate(name: str, text: str) -> int:
    try:
        return parse_rate(text)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None


def default_peer_name() -> str:
    """Host name and pid: unique among the peers of one run, and readable."""
    return f"{socket.gethostname().split('.')[0]}-{os.getpid()}"
