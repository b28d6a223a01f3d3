"""`atoll checkpoints import`: a model from elsewhere as the start of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from atoll.cli.output import deliver


def import_(
    folder: Annotated[
        Path, Parameter(help="A folder with config.json and model.safetensors.", show_default=False)
    ],
    /,
) -> int:
    """Check a Llama that `transformers` has saved, and print the [model] section that starts a run from it.

    Every tensor is compared with the shape that config.json describes, and must be finite. Nothing is copied: the run
    reads the folder where it is. Each peer that is there at the start needs it; who joins later gets the weights from
    other peers.

    Try:

        atoll checkpoints import SmolLM2-135M >> run.toml

    Exit codes: 0 done; 2 not a Llama that Atoll can train, with the reason.
    """
    from atoll.train.llama import Llama  # torch is slow to import
    from atoll.train.pretrained import load_weights, read_llama_config

    config = read_llama_config(folder)
    load_weights(Llama(config), folder)
    tokenizer = folder / "tokenizer.json"
    lines = [
        f"# {config.num_parameters():,} parameters",
        "[model]",
        f'init_from = "{folder.resolve().as_posix()}"',
        f"vocab_size = {config.vocab_size}",
        f"dim = {config.dim}",
        f"num_layers = {config.num_layers}",
        f"num_heads = {config.num_heads}",
        f"num_kv_heads = {config.num_kv_heads}",
        f"ffn_dim = {config.ffn_dim}",
        f"max_seq_len = {config.max_seq_len}",
        f"rope_theta = {config.rope_theta}",
        f"norm_eps = {config.norm_eps}",
        f"tie_embeddings = {str(config.tie_embeddings).lower()}",
    ]
    if tokenizer.is_file():
        lines.append(f'# for [data]: tokenizer = "{tokenizer.resolve().as_posix()}"')
    deliver("\n".join(lines) + "\n")
    return 0
