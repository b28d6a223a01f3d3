"""`atoll checkpoints export`: a model for other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from atoll.checkpoint.choosing import choose
from atoll.cli.checkpoints.ls import size_text
from atoll.cli.checkpoints.options import Checkpoint
from atoll.cli.output import deliver
from atoll.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")


def export(
    checkpoint: Checkpoint,
    /,
    *,
    out: Annotated[Path, Parameter(help="The folder to write.", show_default=False)],
    format_: Annotated[str, Parameter(name="--format", help="hf: what `transformers` opens.")] = "hf",
    dtype: Annotated[str, Parameter(help="float32, bfloat16 or float16.")] = "float32",
    tokenizer: Annotated[
        str, Parameter(help="A tokenizer.json in place of the run's.", show_default=False)
    ] = "",
    base: Annotated[
        str,
        Parameter(
            help="Of adapters: the folder whose weights they were trained over, if it is elsewhere here.",
            show_default=False,
        ),
    ] = "",
    force: Annotated[bool, Parameter(help="Replace a folder that is there.", negative="")] = False,
) -> int:
    """Write the weights of a checkpoint as a folder with model.safetensors, config.json and the tokenizer.

    It is opened by `transformers.AutoModelForCausalLM.from_pretrained(FOLDER)`, with equal logits, and as start weights
    by `model.init_from`. Adapters (`model.lora_rank`) are merged. The anchor is compared with the run's digest first.

    Try:

        atoll checkpoints export runs/laptop --format hf --out laptop-hf

    Exit codes: 0 done; 2 usage, no config, or the tokenizer is not here; 3 damaged, or no space.
    """
    if format_ != "hf":
        raise ConfigError(f"--format {format_}: only hf is known")
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype}: it is one of {', '.join(DTYPES)}")
    from atoll.checkpoint.export import export as export_folder  # torch is slow to import

    chosen = choose(checkpoint)
    size_bytes = export_folder(chosen, out, dtype=dtype, tokenizer=tokenizer, base=base, force=force)
    deliver(f"version {chosen.manifest.version} of {chosen.manifest.run}: {size_text(size_bytes)} in {out}\n")
    return 0
