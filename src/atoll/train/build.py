"""The only file that knows every class (with `train.models`): from a RunConfig to a peer that trains."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from atoll.checkpoint.remote import RemotePlace
from atoll.checkpoint.saver import Keeping
from atoll.clock import MonotonicClock
from atoll.config.environment import rank_environment
from atoll.config.rates import parse_rate
from atoll.config.schema import OuterSection, RunConfig
from atoll.config.shared import flatten, settings_digest
from atoll.data.corpus import Documents, read_corpus
from atoll.data.opening import open_prepared, shard_cache
from atoll.data.preparing import identity_of
from atoll.data.reader import held_out_sequences
from atoll.data.slots import Slots
from atoll.data.tokenizer import load_tokenizer
from atoll.diloco.exchange import Shelf
from atoll.diloco.joining import agreed_address, default_peer_name, open_session, tensors_of
from atoll.diloco.schedule import OuterSchedule
from atoll.diloco.session import Session
from atoll.errors import ConfigError
from atoll.events import Event, RowsSkipped, Sink, StartWeightsMissed
from atoll.mesh.crew import Crew
from atoll.mesh.elastic import ElasticDeviceMesh
from atoll.network.addresses import engine_address
from atoll.network.dht import Discovery
from atoll.network.line import Line
from atoll.train.batches import Batches, Leaser
from atoll.train.causal import config_digest, read_hub_config, vocab_size
from atoll.train.evaluate import EVAL_MICRO_BATCH, validation_loss
from atoll.train.leases_here import OwnSlots
from atoll.train.loop import train
from atoll.train.model import LanguageModel
from atoll.train.models import Model, build_inner, build_model, lower_precision, told_of, weights_of
from atoll.train.observer import Observer
from atoll.train.rank_batches import RankBatches
from atoll.train.ranks import ALONE, Ranks
from atoll.train.room import check_room
from atoll.train.sizes import peer_sizes

Evaluation = tuple[Callable[[], float], int]
PIECE_SEQUENCES = 4
"""Long enough that most of a piece has its context, short enough that a peer sees many files in a round."""


def run_peer(
    config: RunConfig,
    *,
    token: bytes,
    wait_s: float = 0.0,
    sinks: Sequence[Sink] = (),
    fresh: bool = False,
    joins: bool = False,
    crew: Crew | None = None,
    mesh: ElasticDeviceMesh | None = None,
) -> str:
    """Train one peer of the run that `config` describes, until it is over; returns the reason in a sentence. It goes on
    from the newest checkpoint that it finds, unless `fresh`. A peer that `joins` by the run's join line needs no start
    weights of its own (`model.init_from`): where the folder is not here, others give it the state.

    With several ranks (`crew`, and `mesh` over them) all of them call it, and the model is cut among them.

    Blocks. Raises AtollError for everything that ends it early; what was committed by then stays committed.
    """
    crew, mesh = crew or Crew.alone(), mesh or ElasticDeviceMesh()
    discovery = _discovery(config)
    if crew.is_lead and not config.model.hf:  # whose sizes are not known before
        _check_room(config, crew.num_ranks)
    skipped: list[RowsSkipped] = []
    corpus = load_corpus(config, skipped.append)
    train_part, held_out = corpus.split(config.data.val_fraction)
    start = config.model.init_from
    travels = not config.model.lora_rank  # else what was started from is frozen, and no peer sends it
    missed = start if joins and start and travels and not Path(start).exists() else ""
    several = crew.num_ranks > 1
    model = build_model(config, with_weights=not missed, mesh=mesh.local if several else None)
    ranks = Ranks.of(mesh.local) if several else ALONE
    settings = flatten(config)
    if config.model.hf:
        settings["model.hf_digest"] = config_digest(read_hub_config(Path(config.model.hf)))
    if config.data.scope == "shared":
        settings["data.digest"] = corpus.digest()
    local = config.local
    address = local.coordinator
    if discovery is not None:
        address = agreed_address(discovery, address, crew, wait_s)
    with (
        contextlib.ExitStack() as closing,  # after the goodbye: a fetch that is under way may hold it up
        discovery or contextlib.nullcontext(),
        open_session(
            address,
            run=config.run.name,
            peer=local.peer or default_peer_name(),
            token=token,
            authority=local.authority,
            engine=engine_address(address, local.bind, local.port, local.advertise, local.sidecar_port),
            line=Line(parse_rate(config.net.max_up), parse_rate(config.net.max_down), config.net.congestion),
            out=run_folder(config),
            total_steps=config.run.steps,
            wait_s=wait_s,
            settings_digest=settings_digest(settings),
            sinks=sinks,
            shelf=Shelf(fallback=run_folder(config), ram=Path(config.checkpoint.staging)),
            keeping=keeping(config, model),
            fresh=fresh,
            crew=crew,
            mesh=mesh,
            discovery=discovery,
        ) as session,
        crew.explaining(),
    ):
        for event in skipped:
            session.events.emit(event)
        if missed:
            session.events.emit(StartWeightsMissed(path=missed))
        tensors = tensors_of(model.named_parameters(remove_duplicate=False), crew, mesh)
        inner = build_inner(model, config, ranks)
        # Before the thread that reads ahead begins: one thread at a time reads the text.
        evaluated = evaluation(model, held_out, config, ranks)
        batches, own = _batches(session, train_part, config) if crew.is_lead else (None, None)
        if batches is not None:
            closing.enter_context(contextlib.closing(batches))
        outer = session.open_rounds(
            outer_schedule(config.outer, config.run.steps),
            codec=config.outer.codec,
            error_feedback=config.outer.error_feedback,
            late=config.membership.late,
            joiner=config.inner.joiner,
            holds_start=not missed,
            settings=settings,
            tensors=tensors,
            inner=inner.optimizer,
            data=batches,
        )
        lower_precision(model, tensors, inner, config)
        if own is not None:
            assert batches is not None
            session.hold("data", own)
            batches.begin()
        kept = session.safekeeping.has_own_part or session.took_inner_state
        if (session.joined_late or session.version) and not kept:
            inner.rewarm(config.inner.rewarm_steps)
        session.hold("inner_step", inner)
        session.hold_buffers(model)
        observer = _observer(session, evaluated, config)
        observer.started()
        source = batches if batches is not None and not several else RankBatches(crew, batches)
        train(session, inner, source, outer, observer)
        if not outer.finished():  # in the middle of a round the weights are this peer's own: nothing to save
            return session.asked_to_leave
        path = run_folder(config) / "model.safetensors" if local.save_model else None
        observer.finished(weights_of(model, inner), path)
        return outer.ended or f"all {config.run.steps} steps are committed"


def _discovery(config: RunConfig) -> Discovery | None:
    """This machine's part in the DHT, to be opened; None if it is to take none."""
    local, dht = config.local, config.dht
    return Discovery.wanted(
        local.coordinator,
        config.run.name,
        local.authority,
        enabled=dht.enabled,
        port=dht.port,
        bootstrap=dht.bootstrap,
    )


def _check_room(config: RunConfig, num_ranks: int) -> None:
    """Raises LocalError if this machine has no room for those of the ranks that are on it, and ConfigError if the model
    has nothing for one of them."""
    try:
        sizes = peer_sizes(config, num_ranks=num_ranks)
    except ValueError as error:
        raise ConfigError(f"{num_ranks} ranks: {error}; start fewer") from None
    check_room(
        sizes,
        staging=Path(config.checkpoint.staging),
        fallback=run_folder(config),
        ranks_here=rank_environment().local_ranks,
    )


def run_folder(config: RunConfig) -> Path:
    """Where a run leaves its events, its resolved settings and the final model."""
    return Path(config.local.out) / config.run.name


def keeping(config: RunConfig, model: Model | None = None) -> Keeping:
    """Where this peer's checkpoints are, and how many; with what tells of `model`, if it is there."""
    section = config.checkpoint
    remote = f"{section.remote.rstrip('/')}/{config.run.name}" if section.remote else ""
    if remote:
        RemotePlace.at(remote)  # an address that is none, or a missing extra, is told now
    path = Path(section.path) if section.path else run_folder(config) / "checkpoints"
    keeping = Keeping(path, section.keep_last, section.keep_every, remote, tokenizer=config.data.tokenizer)
    return replace(keeping, **told_of(model, config)) if model is not None else keeping


def outer_schedule(section: OuterSection, total_steps: int) -> OuterSchedule:
    stages = section.inner_steps
    if isinstance(stages, int):
        return OuterSchedule.constant(stages, section.lr, section.momentum, section.nesterov, total_steps)
    rows = [(stage.until, stage.inner_steps, stage.lr, stage.momentum) for stage in stages]
    return OuterSchedule.of(rows, section.lr, section.momentum, section.nesterov, total_steps)


def cut_slots(corpus: Documents, config: RunConfig) -> Slots:
    """The training text in slots; long documents are shuffled in pieces of `PIECE_SEQUENCES` sequences."""
    piece_tokens = PIECE_SEQUENCES * config.data.seq_len
    return Slots.cut(corpus, config.data.slots, config.run.seed, piece_tokens=piece_tokens)


def _batches(session: Session, corpus: Documents, config: RunConfig) -> tuple[Batches, OwnSlots | None]:
    """What this peer reads: slots that the coordinator leases to it, or those of its own data."""
    slots, ahead = cut_slots(corpus, config), config.local.prefetch
    if config.data.scope == "shared":
        return batches_of(slots, config, session.peer, session, session.events.emit, prefetch=ahead), None
    text = corpus.digest()
    own = OwnSlots(slots.count, config.run.seed, session.peer, text)
    batches = batches_of(slots, config, session.peer, own, session.events.emit, own_data=text, prefetch=ahead)
    return batches, own


def batches_of(
    slots: Slots,
    config: RunConfig,
    peer: str,
    leaser: Leaser,
    emit: Callable[[Event], None] = lambda event: None,
    *,
    own_data: str = "",
    prefetch: int = 0,
) -> Batches:
    return Batches(
        slots,
        config.data.seq_len,
        config.inner.batch_size,
        peer=peer,
        leaser=leaser,
        emit=emit,
        own_data=own_data,
        prefetch=prefetch,
    )


def load_corpus(config: RunConfig, report: Callable[[RowsSkipped], None] = lambda event: None) -> Documents:
    """The run's text as tokens. Raises ConfigError or DataError; `report` is told of rows that were skipped."""
    data = config.data
    hub = config.model.hf
    tokens = vocab_size(read_hub_config(Path(hub))) if hub else config.model.vocab_size
    tokenizer = load_tokenizer(data.tokenizer, tokens)
    if data.shards:
        prepared, _ = open_prepared(
            data.shards,
            data.weights,
            config.run.seed,
            identity=identity_of(data.tokenizer, tokenizer),
            cache=shard_cache(data.cache),
        )
        return prepared
    corpus = read_corpus(
        data.sources, tokenizer, field=data.field, max_bad_rows=data.max_bad_rows, report=report
    )
    if corpus.empty_documents:
        report(
            RowsSkipped(path=", ".join(data.sources), count=corpus.empty_documents, example="", empty=True)
        )
    return corpus


def evaluation(
    model: LanguageModel, held_out: Documents, config: RunConfig, ranks: Ranks = ALONE
) -> Evaluation:
    """A function that gives the validation loss (nats per token) of the weights as they are, and its tokens.

    All ranks of a peer call the function together.
    """
    batch = held_out_sequences(held_out, config.data.seq_len, config.eval.sequences)
    sequences = torch.cat([torch.from_numpy(batch.inputs), torch.from_numpy(batch.targets[:, -1:])], dim=1)
    local = config.local

    def evaluate() -> float:
        return validation_loss(
            model,
            sequences,
            micro_batch=EVAL_MICRO_BATCH,
            device=local.device,
            autocast=local.autocast,
            ranks=ranks,
        )

    return evaluate, batch.tokens


def _observer(session: Session, evaluated: Evaluation, config: RunConfig) -> Observer:
    evaluate, eval_tokens = evaluated
    return Observer(
        session,
        evaluate=evaluate,
        eval_tokens=eval_tokens,
        every_rounds=config.eval.every_rounds,
        log_every=config.local.log_every,
        clock=MonotonicClock(),
    )
