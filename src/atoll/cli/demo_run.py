"""The run that `atoll demo` shows: a small Llama, sized for a minute on two cores."""

from __future__ import annotations

from atoll.config.schema import (
    DataSection,
    EvalSection,
    InnerSection,
    LocalSection,
    MembershipSection,
    ModelSection,
    OuterSection,
    RunConfig,
    RunSection,
    StageSection,
)

SHORT_ROUND = 4  # inner steps
SEQ_LEN = 64  # short: a batch then has rows from more files, which counts for more here than a long context
MANY_STEPS = 1_000_000  # more than any machine does: the demo ends by time


def demo_config(name: str, peers: int, seconds: float, out: str) -> RunConfig:
    """Settings that fit the few rounds of a demo, whatever the machine's speed.

    How many steps fit is not known beforehand, so the learning rate is constant after a short warm-up. The
    run starts *tight*: short rounds that only average, because from random weights outer momentum does
    harm. Later rounds are longer, with a momentum that pays for itself within a dozen rounds.
    """
    tight_steps = SHORT_ROUND * max(2, round(seconds / 6))
    long_round = min(30, max(5, round(seconds / 3)))
    return RunConfig(
        run=RunSection(name=name, steps=MANY_STEPS, max_seconds=seconds),
        model=ModelSection(
            dim=96, num_layers=3, num_heads=4, num_kv_heads=2, ffn_dim=256, max_seq_len=SEQ_LEN
        ),
        data=DataSection(sources=("python-stdlib",), seq_len=SEQ_LEN),
        inner=InnerSection(lr=3e-3, batch_size=8, schedule="constant", warmup_steps=min(20, tight_steps)),
        outer=OuterSection(
            inner_steps=(
                StageSection(until=tight_steps, inner_steps=SHORT_ROUND),
                StageSection(inner_steps=long_round),
            ),
            lr=0.7,
            momentum=0.6,
            codec="int8",
        ),
        membership=MembershipSection(
            start_peers=peers,
            heartbeat_s=0.5,
            dead_s=3.0,
            stall_s=60.0,
            ready_wait_s=60.0,
            attempt_s=30.0,
            vote_s=15.0,
            quorum_wait_s=20.0,
            coordinator_lost_s=15.0,
        ),
        eval=EvalSection(every_rounds=4, sequences=32),
        local=LocalSection(out=out, threads=1, log_every=2),
    )
