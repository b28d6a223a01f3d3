"""The only file that knows every class: from a RunConfig to a peer that trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from atoll.checkpoint.remote import RemotePlace
from atoll.checkpoint.saver import Keeping
from atoll.clock import MonotonicClock
from atoll.config.rates import parse_rate
from atoll.config.schema import InnerSection, ModelSection, OuterSection, RunConfig
from atoll.config.shared import flatten, settings_digest
from atoll.data.corpus import Documents, read_corpus
from atoll.data.opening import open_prepared, shard_cache
from atoll.data.preparing import identity_of
from atoll.data.reader import held_out_sequences
from atoll.data.slots import Slots
from atoll.data.tokenizer import load_tokenizer
from atoll.diloco.exchange import Shelf
from atoll.diloco.joining import default_peer_name, open_session
from atoll.diloco.schedule import OuterSchedule
from atoll.diloco.session import Session
from atoll.errors import ConfigError
from atoll.events import Event, RowsSkipped, Sink, StartWeightsMissed
from atoll.network.addresses import engine_address
from atoll.network.line import Line
from atoll.state.tensors import ModelTensors
from atoll.train.adamw import make_adamw
from atoll.train.batches import Batches, Leaser
from atoll.train.causal import (
    CausalLM,
    config_digest,
    max_tokens,
    names_elsewhere,
    open_causal_lm,
    plain_config,
    read_hub_config,
    vocab_size,
)
from atoll.train.evaluate import validation_loss
from atoll.train.init import initialize
from atoll.train.inner import InnerStep
from atoll.train.leases_here import OwnSlots
from atoll.train.llama import Llama, LlamaConfig
from atoll.train.loop import train
from atoll.train.lora import adapters_of, add_adapters
from atoll.train.lr_schedule import LRSchedule
from atoll.train.masters import Masters
from atoll.train.model import LanguageModel
from atoll.train.muon import make_muon
from atoll.train.observer import Observer
from atoll.train.pretrained import load_weights

Model = Llama | CausalLM

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
) -> str:
    """Train one peer of the run that `config` describes, until it is over; returns the reason in a sentence. It goes on
    from the newest checkpoint that it finds, unless `fresh`. A peer that `joins` by the run's join line needs no start
    weights of its own (`model.init_from`): where the folder is not here, others give it the state.

    Blocks. Raises AtollError for everything that ends it early; what was committed by then stays committed.
    """
    skipped: list[RowsSkipped] = []
    corpus = load_corpus(config, skipped.append)
    train_part, held_out = corpus.split(config.data.val_fraction)
    start = config.model.init_from
    travels = not config.model.lora_rank  # else what was started from is frozen, and no peer sends it
    missed = start if joins and start and travels and not Path(start).exists() else ""
    model = build_model(config, with_weights=not missed)
    settings = flatten(config)
    if config.model.hf:
        settings["model.hf_digest"] = config_digest(read_hub_config(Path(config.model.hf)))
    if config.data.scope == "shared":
        settings["data.digest"] = corpus.digest()
    local = config.local
    with open_session(
        local.coordinator,
        run=config.run.name,
        peer=local.peer or default_peer_name(),
        token=token,
        engine=engine_address(local.coordinator, local.bind, local.port, local.advertise),
        line=Line(parse_rate(config.net.max_up), parse_rate(config.net.max_down), config.net.congestion),
        out=run_folder(config),
        total_steps=config.run.steps,
        wait_s=wait_s,
        settings_digest=settings_digest(settings),
        sinks=sinks,
        shelf=Shelf(fallback=run_folder(config), ram=Path(config.checkpoint.staging)),
        keeping=keeping(config, model),
        fresh=fresh,
    ) as session:
        for event in skipped:
            session.events.emit(event)
        if missed:
            session.events.emit(StartWeightsMissed(path=missed))
        tensors = ModelTensors(model.named_parameters(remove_duplicate=False))
        inner = build_inner(model, config)
        batches, own = _batches(session, train_part, config)
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
            session.hold("data", own)
            batches.begin()
        kept = session.safekeeping.has_own_part or session.took_inner_state
        if (session.joined_late or session.version) and not kept:
            inner.rewarm(config.inner.rewarm_steps)
        session.hold("inner_step", inner)
        session.hold_buffers(model)
        observer = _observer(session, model, held_out, config)
        observer.started()
        train(session, inner, batches, outer, observer)
        if not outer.finished():  # in the middle of a round the weights are this peer's own: nothing to save
            return session.asked_to_leave
        path = run_folder(config) / "model.safetensors" if local.save_model else None
        observer.finished(_weights(model, inner), path)
        return outer.ended or f"all {config.run.steps} steps are committed"


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
    if model is None:
        return keeping
    is_hub = isinstance(model, CausalLM)
    base = config.model.hf or config.model.init_from
    return replace(
        keeping,
        config=plain_config(model) if is_hub else model.config.hf_config(),
        names=names_elsewhere(model) if is_hub else {},
        adapters=adapters_of(model, base) if config.model.lora_rank else None,
    )


def build_model(config: RunConfig, *, with_weights: bool = True) -> Model:
    """The run's model with the run's start weights, on this peer's device. Without them it has any."""
    _prepare_torch(config)
    section, seed = config.model, config.run.seed
    model = _hub_model(config) if section.hf else _llama(config, with_weights=with_weights)
    if section.lora_rank:
        rank, alpha, targets = section.lora_rank, section.lora_alpha, section.lora_targets
        add_adapters(model, rank=rank, alpha=alpha, targets=targets, seed=seed)
    return model.to(config.local.device)


def _llama(config: RunConfig, *, with_weights: bool) -> Llama:
    model = Llama(llama_config(config.model))
    if config.model.init_from and with_weights:
        load_weights(model, Path(config.model.init_from))
    else:
        initialize(model, config.run.seed)
    return model


def _hub_model(config: RunConfig) -> CausalLM:
    path = Path(config.model.hf)
    longest = max_tokens(read_hub_config(path))
    if longest is not None and config.data.seq_len > longest:
        raise ConfigError(
            f"data.seq_len = {config.data.seq_len} is above the {longest} tokens that the model of {path} takes"
        )
    return open_causal_lm(path, seed=config.run.seed)


def llama_config(section: ModelSection) -> LlamaConfig:
    return LlamaConfig(**section.model_dump(include=set(LlamaConfig.__slots__)))


def build_inner(model: Model, config: RunConfig) -> InnerStep:
    section: InnerSection = config.inner
    return InnerStep(
        model,
        _optimizer(model, section),
        lr_schedule(section, config.run.steps),
        clip_norm=section.clip_norm,
        micro_batch=config.local.micro_batch,
        device=config.local.device,
        autocast=config.local.autocast,
        compile=config.local.compile,
    )


def lower_precision(model: Model, tensors: ModelTensors, inner: InnerStep, config: RunConfig) -> None:
    """Let the model compute in bf16, if the peer wishes so; what is trained and synchronised stays fp32. Not before
    peers have compared what is frozen: that is rounded for good."""
    if config.local.param_dtype == "bf16":
        inner.masters = Masters(model)
        tensors.written = inner.weights_changed


def _weights(model: Model, inner: InnerStep) -> dict[str, torch.Tensor]:
    """All that was trained by name, as precise as it is here."""
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    return {name: inner.masters.of(each) if inner.masters else each for name, each in trained.items()}


def _optimizer(model: Model, section: InnerSection) -> torch.optim.Optimizer:
    lr, betas, eps, weight_decay = section.lr, section.betas, section.eps, section.weight_decay
    if section.optimizer == "muon":
        muon_lr = section.muon_lr
        return make_muon(model, lr=lr, muon_lr=muon_lr, betas=betas, eps=eps, weight_decay=weight_decay)
    return make_adamw(model, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


def lr_schedule(section: InnerSection, total_steps: int) -> LRSchedule:
    return LRSchedule(
        kind=section.schedule,
        peak_lr=section.lr,
        total_steps=total_steps,
        warmup_steps=section.warmup_steps,
        decay_fraction=section.decay_fraction,
        min_lr_ratio=section.min_lr_ratio,
    )


def outer_schedule(section: OuterSection, total_steps: int) -> OuterSchedule:
    stages = section.inner_steps
    if isinstance(stages, int):
        return OuterSchedule.constant(stages, section.lr, section.momentum, section.nesterov, total_steps)
    rows = [(stage.until, stage.inner_steps, stage.lr, stage.momentum) for stage in stages]
    return OuterSchedule.of(rows, section.lr, section.momentum, section.nesterov, total_steps)


def _prepare_torch(config: RunConfig) -> None:
    if config.local.threads:
        torch.set_num_threads(config.local.threads)
    try:
        torch.empty(0, device=config.local.device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"local.device = {config.local.device!r} can not be used here: {reason}") from None


def cut_slots(corpus: Documents, config: RunConfig) -> Slots:
    """The training text in slots; long documents are shuffled in pieces of `PIECE_SEQUENCES` sequences."""
    piece_tokens = PIECE_SEQUENCES * config.data.seq_len
    return Slots.cut(corpus, config.data.slots, config.run.seed, piece_tokens=piece_tokens)


def _batches(session: Session, corpus: Documents, config: RunConfig) -> tuple[Batches, OwnSlots | None]:
    """What this peer reads: slots that the coordinator leases to it, or those of its own data."""
    slots = cut_slots(corpus, config)
    if config.data.scope == "shared":
        return batches_of(slots, config, session.peer, session, session.events.emit), None
    text = corpus.digest()
    own = OwnSlots(slots.count, config.run.seed, session.peer, text)
    batches = batches_of(slots, config, session.peer, own, session.events.emit, own_data=text)
    return batches, own


def batches_of(
    slots: Slots,
    config: RunConfig,
    peer: str,
    leaser: Leaser,
    emit: Callable[[Event], None] = lambda event: None,
    *,
    own_data: str = "",
) -> Batches:
    return Batches(
        slots,
        config.data.seq_len,
        config.inner.batch_size,
        peer=peer,
        leaser=leaser,
        emit=emit,
        own_data=own_data,
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
    model: LanguageModel, held_out: Documents, config: RunConfig
) -> tuple[Callable[[], float], int]:
    """A function that gives the validation loss (nats per token) of the weights as they are, and its tokens."""
    batch = held_out_sequences(held_out, config.data.seq_len, config.eval.sequences)
    sequences = torch.cat([torch.from_numpy(batch.inputs), torch.from_numpy(batch.targets[:, -1:])], dim=1)
    local = config.local

    def evaluate() -> float:
        return validation_loss(model, sequences, micro_batch=16, device=local.device, autocast=local.autocast)

    return evaluate, batch.tokens


def _observer(session: Session, model: Model, held_out: Documents, config: RunConfig) -> Observer:
    evaluate, eval_tokens = evaluation(model, held_out, config)
    return Observer(
        session,
        evaluate=evaluate,
        eval_tokens=eval_tokens,
        every_rounds=config.eval.every_rounds,
        log_every=config.local.log_every,
        clock=MonotonicClock(),
    )
