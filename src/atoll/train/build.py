"""The only file that knows every class: from a RunConfig to a peer that trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from atoll.clock import MonotonicClock
from atoll.config.schema import InnerSection, ModelSection, OuterSection, RunConfig
from atoll.config.shared import flatten, settings_digest
from atoll.data.corpus import Corpus, read_corpus
from atoll.data.reader import Reader, held_out_sequences
from atoll.data.slots import Slots, static_assignment
from atoll.data.tokenizer import load_tokenizer
from atoll.diloco.joining import default_peer_name, open_session
from atoll.diloco.schedule import OuterSchedule
from atoll.diloco.session import Session
from atoll.errors import ConfigError
from atoll.events import RowsSkipped, Sink
from atoll.network.addresses import engine_address
from atoll.state.tensors import ModelTensors
from atoll.train.adamw import make_adamw
from atoll.train.batches import Batches
from atoll.train.evaluate import validation_loss
from atoll.train.init import initialize
from atoll.train.inner import InnerStep
from atoll.train.llama import Llama, LlamaConfig
from atoll.train.loop import train
from atoll.train.lr_schedule import LRSchedule
from atoll.train.model import LanguageModel
from atoll.train.observer import Observer

PIECE_SEQUENCES = 4
"""Long enough that most of a piece has its context, short enough that a peer sees many files in a round."""


def run_peer(config: RunConfig, *, token: bytes, wait_s: float = 0.0, sinks: Sequence[Sink] = ()) -> str:
    """Train one peer of the run that `config` describes, until it is over; returns the reason in a sentence.

    Blocks. Raises AtollError for everything that ends it early; what was committed by then stays committed.
    """
    skipped: list[RowsSkipped] = []
    corpus = load_corpus(config, skipped.append)
    train_part, held_out = corpus.split(config.data.val_fraction)
    model = build_model(config)
    settings = {**flatten(config), "data.digest": corpus.digest()}
    local = config.local
    with open_session(
        local.coordinator,
        run=config.run.name,
        peer=local.peer or default_peer_name(),
        token=token,
        engine=engine_address(local.coordinator, local.bind, local.port, local.advertise),
        out=run_folder(config),
        total_steps=config.run.steps,
        wait_s=wait_s,
        settings_digest=settings_digest(settings),
        sinks=sinks,
    ) as session:
        for event in skipped:
            session.events.emit(event)
        tensors = ModelTensors(model.named_parameters(remove_duplicate=False))
        inner = build_inner(model, config)
        outer = session.open_rounds(
            outer_schedule(config.outer, config.run.steps),
            codec=config.outer.codec,
            settings=settings,
            tensors=tensors,
            inner=inner.optimizer,
        )
        observer = _observer(session, model, held_out, config)
        observer.started()
        train(session, inner, _batches(session, train_part, config), outer, observer)
        path = run_folder(config) / "model.safetensors" if local.save_model else None
        observer.finished(dict(model.named_parameters()), path)
        return outer.ended or f"all {config.run.steps} steps are committed"


def run_folder(config: RunConfig) -> Path:
    """Where a run leaves its events, its resolved settings and the final model."""
    return Path(config.local.out) / config.run.name


def build_model(config: RunConfig) -> Llama:
    """The run's model with the run's start weights, on this peer's device."""
    _prepare_torch(config)
    model = Llama(llama_config(config.model))
    initialize(model, config.run.seed)
    return model.to(config.local.device)


def llama_config(section: ModelSection) -> LlamaConfig:
    return LlamaConfig(**section.model_dump())


def build_inner(model: Llama, config: RunConfig) -> InnerStep:
    section: InnerSection = config.inner
    optimizer = make_adamw(
        model, lr=section.lr, betas=section.betas, eps=section.eps, weight_decay=section.weight_decay
    )
    return InnerStep(
        model,
        optimizer,
        lr_schedule(section, config.run.steps),
        clip_norm=section.clip_norm,
        micro_batch=config.local.micro_batch,
        device=config.local.device,
        autocast=config.local.autocast,
        compile=config.local.compile,
    )


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


def cut_slots(corpus: Corpus, config: RunConfig) -> Slots:
    """The training text in slots; long documents are shuffled in pieces of `PIECE_SEQUENCES` sequences."""
    piece_tokens = PIECE_SEQUENCES * config.data.seq_len
    return Slots.cut(corpus, config.data.slots, config.run.seed, piece_tokens=piece_tokens)


def _batches(session: Session, corpus: Corpus, config: RunConfig) -> Batches:
    """This peer's slots: every n-th, by the order of the members' ids as the run started."""
    members = session.start_members
    slots = cut_slots(corpus, config)
    held = static_assignment(slots, members.index(session.peer), len(members))
    return Batches(Reader(slots, held, config.data.seq_len), config.inner.batch_size)


def load_corpus(config: RunConfig, report: Callable[[RowsSkipped], None] = lambda event: None) -> Corpus:
    """The run's text as tokens. Raises ConfigError or DataError; `report` is told of rows that were skipped."""
    data = config.data
    tokenizer = load_tokenizer(data.tokenizer, config.model.vocab_size)
    corpus = read_corpus(
        data.sources, tokenizer, field=data.field, max_bad_rows=data.max_bad_rows, report=report
    )
    if corpus.empty_documents:
        report(
            RowsSkipped(path=", ".join(data.sources), count=corpus.empty_documents, example="", empty=True)
        )
    return corpus


def evaluation(model: LanguageModel, held_out: Corpus, config: RunConfig) -> tuple[Callable[[], float], int]:
    """A function that gives the validation loss (nats per token) of the weights as they are, and its tokens."""
    batch = held_out_sequences(held_out, config.data.seq_len, config.eval.sequences)
    sequences = torch.cat([torch.from_numpy(batch.inputs), torch.from_numpy(batch.targets[:, -1:])], dim=1)
    local = config.local

    def evaluate() -> float:
        return validation_loss(model, sequences, micro_batch=16, device=local.device, autocast=local.autocast)

    return evaluate, batch.tokens


def _observer(session: Session, model: Llama, held_out: Corpus, config: RunConfig) -> Observer:
    evaluate, eval_tokens = evaluation(model, held_out, config)
    return Observer(
        session,
        evaluate=evaluate,
        eval_tokens=eval_tokens,
        every_rounds=config.eval.every_rounds,
        log_every=config.local.log_every,
        clock=MonotonicClock(),
    )
