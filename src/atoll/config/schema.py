"""The settings of a run as pydantic models: what RUN.toml may say, with defaults, bounds and a sentence each.

Everything but `[local]` and `[dht]` belongs to the *run*: the coordinator holds it, newcomers receive it, and peers
that differ are refused. These two are each machine's own. Only `cli` and `train/build.py` read these objects.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from atoll.config.rates import Rate
from atoll.config.sizes import SIZES, ModelSize

Topology = Literal["auto", "direct", "ring", "two-level"]
Activations = Literal["none", "selective", "full"]
Codec = Literal["fp32", "bf16", "fp16", "int8", "int4", "e3m0", "stat2", "topk", "topk256"]


class Section(BaseModel):
    """A table of RUN.toml: frozen, and a key that it does not know is an error."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, validate_default=True, allow_inf_nan=False
    )


class RunSection(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] = "run"
    seed: Annotated[
        int, Field(ge=0, lt=2**63, description="start weights and data order; the same on all peers")
    ] = 0
    steps: Annotated[
        int, Field(gt=0, description="inner steps of the run; the last round may be shorter")
    ] = 1000
    max_seconds: Annotated[
        float, Field(ge=0, description="end with the first commit after so many seconds; 0: no limit")
    ] = 0.0


_OF_ANY_MODEL = ("hf", "lora_rank", "lora_alpha", "lora_targets")


class ModelSection(Section):
    """A Llama: RMSNorm, RoPE, grouped-query attention, SwiGLU. Names are those of HF LlamaForCausalLM. Or, with `hf`, a
    model of `transformers`."""

    size: Annotated[
        ModelSize,
        Field(
            description="a shape by name: fills the keys up to tie_embeddings that are not given; docs/models.md"
        ),
    ] = ""
    vocab_size: Annotated[
        int, Field(gt=1, description="at least the tokenizer's; 256 suffices for bytes")
    ] = 256
    dim: Annotated[int, Field(gt=0)] = 128
    num_layers: Annotated[int, Field(gt=0)] = 4
    num_heads: Annotated[int, Field(gt=0)] = 4
    num_kv_heads: Annotated[int, Field(gt=0, description="must divide num_heads")] = 2
    ffn_dim: Annotated[int, Field(gt=0)] = 352
    max_seq_len: Annotated[int, Field(gt=1)] = 128
    rope_theta: Annotated[float, Field(gt=0)] = 10000.0
    norm_eps: Annotated[float, Field(gt=0)] = 1e-5
    tie_embeddings: bool = False
    init_from: Annotated[
        str,
        Field(
            description="folder with the start weights, as `atoll checkpoints import` writes it; empty: by seed"
        ),
    ] = ""
    hf: Annotated[
        str,
        Field(
            description="in place of the Llama, a causal LM of `transformers`: a folder with weights, or a config.json "
            "(extra [hf])"
        ),
    ] = ""
    lora_rank: Annotated[
        int, Field(ge=0, description="train adapters of this rank over frozen start weights; 0: train all")
    ] = 0
    lora_alpha: Annotated[float, Field(gt=0, description="adapters are scaled by lora_alpha / lora_rank")] = (
        16.0
    )
    lora_targets: Annotated[
        tuple[str, ...], Field(min_length=1, description="last names of the linear layers that are adapted")
    ] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

    @model_validator(mode="after")
    def _shape_is_of_one_model(self) -> ModelSection:
        if not self.hf:
            return self
        for name, field in type(self).model_fields.items():
            if name not in _OF_ANY_MODEL and getattr(self, name) != field.default:
                raise ValueError(
                    f"{name} = {getattr(self, name)!r} is of the built-in Llama, and hf is another model: "
                    "leave out one of them"
                )
        return self

    @model_validator(mode="after")
    def _adapters_have_a_base(self) -> ModelSection:
        if self.lora_rank and not self.init_from and (not self.hf or self.hf.endswith(".json")):
            raise ValueError(
                f"lora_rank = {self.lora_rank} trains adapters over weights that stay as they are: give init_from, or "
                "hf with a folder that has weights"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _size_fills(cls, values: Any) -> Any:
        size = values.get("size") if isinstance(values, dict) else ""
        return {**SIZES[size], **values} if isinstance(size, str) and size in SIZES else values

    @model_validator(mode="after")
    def _heads_divide(self) -> ModelSection:
        if self.dim % self.num_heads:
            raise ValueError(f"dim = {self.dim} is not a multiple of num_heads = {self.num_heads}")
        if (self.dim // self.num_heads) % 2:
            raise ValueError(
                f"dim / num_heads = {self.dim // self.num_heads} must be even for rotary embeddings"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads = {self.num_heads} is not a multiple of num_kv_heads = {self.num_kv_heads}"
            )
        return self


class DataSection(Section):
    sources: Annotated[
        tuple[str, ...],
        Field(
            min_length=1,
            description='text files, folders, globs, .jsonl, .parquet; or "python-stdlib", the sources here',
        ),
    ] = ("python-stdlib",)
    shards: Annotated[
        tuple[str, ...],
        Field(
            description="folders, or https:// or s3:// addresses, that `atoll data prep` has made; in place of sources"
        ),
    ] = ()
    weights: Annotated[
        tuple[Annotated[float, Field(gt=0)], ...],
        Field(description="the share of each of shards in what is read; empty: by size"),
    ] = ()
    cache: Annotated[str, Field(description="folder for shards that are fetched; empty: ~/.cache/atoll")] = ""
    field: Annotated[str, Field(description="the text column of jsonl and parquet rows")] = "text"
    tokenizer: Annotated[
        str, Field(description='"bytes", or the path of a tokenizer.json (extra [data])')
    ] = "bytes"
    scope: Annotated[
        Literal["shared", "own"],
        Field(description="all peers share one text, in slots that are leased; or each reads its own"),
    ] = "shared"
    seq_len: Annotated[int, Field(gt=0, description="tokens per training sequence")] = 128
    slots: Annotated[
        int, Field(gt=0, le=1 << 20, description="parts of the corpus; independent of the peers")
    ] = 64
    val_fraction: Annotated[float, Field(gt=0, lt=1, description="share of the documents held out")] = 0.05
    max_bad_rows: Annotated[
        int, Field(ge=0, description="unreadable rows that are skipped before it is an error")
    ] = 100


class InnerSection(Section):
    """The inner optimizer, by each peer for itself."""

    optimizer: Annotated[
        Literal["adamw", "muon"],
        Field(description="muon: for hidden matrices, with AdamW for embeddings, output head and vectors"),
    ] = "adamw"
    lr: Annotated[float, Field(gt=0, description="AdamW's peak rate")] = 3e-3
    muon_lr: Annotated[
        float, Field(gt=0, description="Muon's peak rate; the schedule is the same for both")
    ] = 0.02
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.99)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0, description="not on norms and embeddings")] = 0.1
    clip_norm: Annotated[
        float, Field(ge=0, description="gradient norm above which it is scaled down; 0: never")
    ] = 1.0
    z_loss: Annotated[
        float,
        Field(
            ge=0,
            description="training adds so many times the mean squared log of the softmax's sum; e.g. 1e-4",
        ),
    ] = 0.0
    batch_size: Annotated[int, Field(gt=0, description="sequences per peer and inner step")] = 8
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup_steps: Annotated[int, Field(ge=0)] = 50
    rewarm_steps: Annotated[
        int, Field(ge=0, description="a peer that joins late raises its learning rate over so many steps")
    ] = 20
    joiner: Annotated[
        Literal["fresh", "donor"],
        Field(description="a peer that joins late begins with fresh optimizer moments, or with a member's"),
    ] = "fresh"
    decay_fraction: Annotated[
        float, Field(ge=0, le=1, description="wsd: the share of the steps that decays")
    ] = 0.2
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.05


class StageSection(Section):
    """A stretch of the run with its own round length. All but the last stage average (lr 1, no momentum)."""

    until: Annotated[
        int, Field(ge=0, description="this stage ends at this inner step; 0 only in the last stage")
    ] = 0
    inner_steps: Annotated[int, Field(gt=0)]
    lr: Annotated[float | None, Field(gt=0)] = None
    momentum: Annotated[float | None, Field(ge=0, lt=1)] = None


class OuterSection(Section):
    """DiLoCo: every `inner_steps` the peers' updates are averaged and a Nesterov step is taken."""

    inner_steps: Annotated[int, Field(gt=0)] | tuple[StageSection, ...] = 100
    lr: Annotated[float, Field(gt=0)] = 0.7
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    nesterov: bool = True
    codec: Codec = "int8"
    error_feedback: Annotated[
        Annotated[float, Field(ge=0, le=1)] | Literal["auto"],
        Field(
            description='share of what the codec dropped that is sent again; "auto": 0.95 for stat2 and topk, else 0'
        ),
    ] = "auto"
    weights: Literal["tokens", "equal"] = "tokens"
    steps_by_speed: Annotated[
        bool, Field(description="a slower peer makes fewer inner steps a round, so that nobody waits for it")
    ] = False

    @model_validator(mode="after")
    def _weights_fit_speed(self) -> OuterSection:
        if self.steps_by_speed and self.weights != "tokens":
            raise ValueError(
                'steps_by_speed = true goes with weights = "tokens": peers do different work, and count by it'
            )
        return self

    @model_validator(mode="after")
    def _stages_in_order(self) -> OuterSection:
        if isinstance(self.inner_steps, tuple):
            if not self.inner_steps:
                raise ValueError("inner_steps has no stage; give a number or at least one stage")
            ends = [stage.until for stage in self.inner_steps[:-1]]
            if any(b <= a for a, b in zip([0, *ends], ends, strict=False)):
                raise ValueError(f"the stages' `until` must rise from above 0; they are {ends}")
            if self.inner_steps[-1].until:
                raise ValueError("the last stage lasts to the end of the run; leave out its `until`")
        return self


class MembershipSection(Section):
    """When rounds start, and how long anything is waited for. Seconds are the coordinator's own."""

    start_peers: Annotated[
        int, Field(gt=0, description="the run begins when so many peers have declared")
    ] = 1
    min_peers: Annotated[int, Field(gt=0, description="with fewer living peers the run waits, then ends")] = 1
    policy: Annotated[
        Literal["wait", "deadline"],
        Field(description="wait for all members, or close the round after grace_s"),
    ] = "wait"
    heartbeat_s: Annotated[float, Field(ge=0.05)] = 1.0
    dead_s: Annotated[float, Field(gt=0, description="no heartbeat for so long: the peer is lost")] = 5.0
    stall_s: Annotated[float, Field(gt=0, description="an inner step that takes longer counts as frozen")] = (
        600.0
    )
    ready_wait_s: Annotated[float, Field(gt=0, description="wait: the longest wait for a slow member")] = (
        1800.0
    )
    grace_s: Annotated[
        float, Field(ge=0, description="deadline: time for the rest once a quorum is ready")
    ] = 10.0
    freeze_s: Annotated[float, Field(gt=0, description="deadline: time to answer a closed round")] = 30.0
    attempt_s: Annotated[float, Field(gt=0, description="the longest that one attempt may take")] = 600.0
    vote_s: Annotated[float, Field(gt=0, description="time for votes after the first one")] = 60.0
    max_attempts: Annotated[int, Field(gt=0, le=20, description="then the round is skipped")] = 5
    connect_s: Annotated[float, Field(gt=0, description="the longest that a peer tries to reach someone")] = (
        10.0
    )
    quorum_wait_s: Annotated[float, Field(gt=0, description="below min_peers for so long: the run ends")] = (
        600.0
    )
    coordinator_lost_s: Annotated[
        float, Field(gt=0, description="peers wait so long for a lost coordinator")
    ] = 120.0
    relearn_s: Annotated[
        float,
        Field(gt=0, description="if nobody holds the journal's newest version for so long: roll back"),
    ] = 30.0
    late: Annotated[
        Literal["drop", "carry"],
        Field(description="work that a round did not wait for: dropped, or part of the next update"),
    ] = "drop"
    lease_s: Annotated[
        float, Field(ge=2, description="journal in etcd: a leader silent for so long may be replaced")
    ] = 5.0
    norm_limit: Annotated[
        float, Field(gt=1, description="updates above this x the median norm are left out")
    ] = 100.0

    @model_validator(mode="after")
    def _deadlines_agree(self) -> MembershipSection:
        if self.min_peers > self.start_peers:
            raise ValueError(f"min_peers = {self.min_peers} is above start_peers = {self.start_peers}")
        if self.dead_s < 2 * self.heartbeat_s:
            raise ValueError(
                f"dead_s = {self.dead_s} is below 2 x heartbeat_s = {2 * self.heartbeat_s}: raise it"
            )
        if self.coordinator_lost_s <= self.dead_s:
            raise ValueError(
                f"coordinator_lost_s = {self.coordinator_lost_s} must be above dead_s = {self.dead_s}"
            )
        if self.relearn_s < self.dead_s:
            raise ValueError(
                f"relearn_s = {self.relearn_s} is below dead_s = {self.dead_s}: a run would be rolled back while who "
                "holds its newest version may still be a member; raise it"
            )
        if self.stall_s < 2 * self.heartbeat_s:
            raise ValueError(
                f"stall_s = {self.stall_s} is below 2 x heartbeat_s = {2 * self.heartbeat_s}: heartbeats tell of "
                "progress, so every peer would count as frozen; raise it"
            )
        if self.vote_s < self.heartbeat_s:
            raise ValueError(
                f"vote_s = {self.vote_s} is below heartbeat_s = {self.heartbeat_s}: an attempt would fail before a "
                "closed connection may be back; raise it"
            )
        if self.policy == "deadline" and self.grace_s >= self.ready_wait_s:
            raise ValueError(
                f"grace_s = {self.grace_s} must be below ready_wait_s = {self.ready_wait_s}, which closes the round "
                "whatever the grace time is"
            )
        return self


class NetSection(Section):
    """How updates travel. Topology, connections and the timeout are the coordinator's, the rest each peer's own."""

    topology: Annotated[
        Topology, Field(description='which way sums go; "auto": the fastest on the rates that were measured')
    ] = "auto"
    connections: Annotated[
        Literal["auto"] | Annotated[int, Field(gt=0, le=64)],
        Field(description='TCP connections between two peers; "auto": by rate and round trip'),
    ] = "auto"
    max_up: Annotated[
        Rate, Field(description='the most this peer sends, e.g. "200 Mbit/s"; empty: no limit')
    ] = ""
    max_down: Annotated[Rate, Field(description="the most it takes in; empty: no limit")] = ""
    congestion: Annotated[
        str, Field(description='TCP congestion control of this peer, e.g. "bbr"; empty: the system\'s')
    ] = ""
    security: Annotated[
        Literal["auto", "tls", "off"],
        Field(
            description='"auto": TLS if the run has an authority; "tls": it is made; "off": loopback, or a VPN'
        ),
    ] = "auto"
    vpn: Annotated[
        str, Field(description="with security off: the interface of the VPN that everything goes through")
    ] = ""
    progress_timeout_s: Annotated[
        float, Field(gt=0, description="in an attempt, nothing heard for so long: the link is broken")
    ] = 5.0


class CheckpointSection(Section):
    """Saving while training goes on. When, where remotely, and what is kept is the run's; the path is each peer's."""

    path: Annotated[
        str, Field(description="folder for this peer's checkpoints; empty: checkpoints in the run folder")
    ] = ""
    every_rounds: Annotated[int, Field(ge=0, description="save every n-th version; 0: by time only")] = 0
    every_s: Annotated[
        float, Field(ge=0, description="save with the first commit after so many seconds; 0: by rounds only")
    ] = 300.0
    keep_last: Annotated[int, Field(ge=1, description="how many of the newest are kept")] = 3
    keep_every: Annotated[
        int, Field(ge=0, description="versions that this divides are kept for good; 0: none")
    ] = 0
    remote: Annotated[
        str, Field(description="object store for copies, e.g. s3://bucket/prefix; empty: none")
    ] = ""
    staging: Annotated[
        str, Field(description="RAM-backed folder that the state is copied into at a save")
    ] = "/dev/shm"


class EvalSection(Section):
    every_rounds: Annotated[
        int, Field(ge=0, description="evaluate the anchor at every n-th round; 0: only at the ends")
    ] = 1
    sequences: Annotated[int, Field(gt=0, description="held-out sequences per evaluation")] = 64


class LocalSection(Section):
    """This peer's own: not compared with others."""

    coordinator: Annotated[
        str,
        Field(
            description="host:port; where several may lead, all of them, separated by commas; or dht:HOST:PORT,... to "
            "ask bootstrap peers of the DHT"
        ),
    ] = "127.0.0.1:7070"
    authority: Annotated[
        str,
        Field(description="fingerprint of the run's authority, from its join line; empty: the run has none"),
    ] = ""
    peer: Annotated[str, Field(description="this peer's name; empty: host name and pid")] = ""
    out: Annotated[str, Field(description="folder for events, config and the final model")] = "runs"
    bind: Annotated[
        str,
        Field(
            description="address or interface that the engine listens on; empty or auto: loopback if the coordinator "
            "is there, else all, IPv4 and IPv6"
        ),
    ] = ""
    port: Annotated[int, Field(ge=0, le=65535, description="the engine's port; 0: any free one")] = 0
    sidecar_port: Annotated[
        int, Field(ge=0, le=65535, description="where others fetch state from; 0: any free port")
    ] = 0
    advertise: Annotated[
        str,
        Field(
            description="addresses, host names or interfaces where others reach this peer, separated by commas; empty "
            "or auto: found out"
        ),
    ] = ""
    device: Annotated[str, Field(description='"cpu", "cuda", "cuda:1", "mps"')] = "cpu"
    threads: Annotated[int, Field(ge=0, description="torch threads; 0: torch's own choice")] = 0
    micro_batch: Annotated[
        int, Field(ge=0, description="sequences at once; 0: the whole batch; divides batch_size")
    ] = 0
    prefetch: Annotated[
        int,
        Field(
            ge=0,
            le=64,
            description="batches read ahead of the step, so that a slow disk or network stalls none",
        ),
    ] = 2
    autocast: Annotated[bool, Field(description="bf16 autocast where the device has it")] = False
    param_dtype: Annotated[
        Literal["fp32", "bf16"],
        Field(description="what the device computes with; bf16 has fp32 masters for optimizer and peers"),
    ] = "fp32"
    compile: Annotated[bool, Field(description="torch.compile the model")] = False
    reshard_after_forward: Annotated[
        bool,
        Field(description="several ranks: gather a layer's weights twice a step, to keep less in memory"),
    ] = True
    cpu_offload: Annotated[
        bool, Field(description="several ranks: weights and optimizer state rest in host memory")
    ] = False
    activation_checkpointing: Annotated[
        Activations,
        Field(
            description="what a layer computes again in the backward pass to save memory: nothing, all but matrix "
            "products and attention, or everything"
        ),
    ] = "none"
    checkpoint_every: Annotated[
        int, Field(gt=0, description="activation_checkpointing: only of every n-th layer")
    ] = 1
    loss_chunk_tokens: Annotated[
        int, Field(ge=0, description="logits of so many tokens exist at once in the loss; 0: of all")
    ] = 0
    log_every: Annotated[int, Field(gt=0, description="inner steps between two TrainingStep events")] = 10
    save_model: Annotated[bool, Field(description="write the final anchor as safetensors")] = True

    @model_validator(mode="after")
    def _ports_differ(self) -> LocalSection:
        if self.sidecar_port and self.sidecar_port == self.port:
            raise ValueError(f"sidecar_port = {self.sidecar_port} is the engine's port: choose another one")
        return self

    @model_validator(mode="after")
    def _every_has_a_mode(self) -> LocalSection:
        if self.checkpoint_every > 1 and self.activation_checkpointing == "none":
            raise ValueError(
                f'checkpoint_every = {self.checkpoint_every} does nothing with activation_checkpointing = "none": set '
                'that to "selective" or "full", or leave checkpoint_every out'
            )
        return self


class DhtSection(Section):
    """Finding the coordinator by a DHT of the peers (extra [dht]). Each machine's own: not compared with others."""

    enabled: Annotated[
        bool, Field(description="take part, also where the coordinator is not given as dht:...")
    ] = False
    port: Annotated[
        int, Field(ge=0, le=65535, description="UDP port; 0: any free one, which no join line can name")
    ] = 0
    bootstrap: Annotated[
        str, Field(description="HOST:PORT,HOST:PORT of others in the DHT; any one that is alive is enough")
    ] = ""


class RunConfig(Section):
    """A whole RUN.toml."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    inner: InnerSection = InnerSection()
    outer: OuterSection = OuterSection()
    membership: MembershipSection = MembershipSection()
    net: NetSection = NetSection()
    checkpoint: CheckpointSection = CheckpointSection()
    eval: EvalSection = EvalSection()
    local: LocalSection = LocalSection()
    dht: DhtSection = DhtSection()

    @model_validator(mode="after")
    def _parts_fit(self) -> RunConfig:
        if not self.model.hf and self.data.seq_len > self.model.max_seq_len:
            raise ValueError(
                f"data.seq_len = {self.data.seq_len} is above model.max_seq_len = {self.model.max_seq_len}"
            )
        if self.net.progress_timeout_s >= self.membership.attempt_s:
            raise ValueError(
                f"net.progress_timeout_s = {self.net.progress_timeout_s} must be below membership.attempt_s = "
                f"{self.membership.attempt_s}: a link that went silent would never be found in an attempt"
            )
        if self.local.micro_batch and self.inner.batch_size % self.local.micro_batch:
            raise ValueError(
                f"local.micro_batch = {self.local.micro_batch} does not divide "
                f"inner.batch_size = {self.inner.batch_size}"
            )
        return self
