"""What `atoll demo` says at its end, for people and for programs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from atoll.config.schema import ModelSection
from atoll.dashboard.summary import Summary, saves_text
from atoll.dashboard.words import bytes_text, clock_text, number_text

PROMPT = "def "
SAMPLE_BYTES = 200


def json_report(summary: Summary, folder: Path) -> dict[str, Any]:
    """The documented keys of `atoll demo --json`."""
    return {
        "val_loss_before": summary.val_loss_before,
        "val_loss_after": summary.val_loss_after,
        "tokens": summary.tokens,
        "rounds": summary.rounds,
        "peers_lost": [loss.peer for loss in summary.lost],
        "bytes_sent_per_peer": summary.bytes_sent_per_peer,
        "bytes_data_parallel": summary.bytes_data_parallel,
        "compute_utilisation": summary.compute_utilisation,
        "digests_equal": summary.digests_equal,
        "saves_done": summary.saves.done,
        "saves_skipped": summary.saves.skipped,
        "saves_failed": summary.saves.failed,
        "saved_version": summary.saves.newest,
        "run_dir": str(folder),
    }


def text_report(summary: Summary, folder: Path, sample_text: str) -> str:
    """The same for a newcomer, with what the numbers mean."""
    rows = [
        ("validation loss", _loss_line(summary)),
        (
            "trained",
            f"{number_text(summary.tokens)} bytes of text, in {summary.rounds} rounds that all agreed on",
        ),
        *(("lost", f"{loss.peer} after {clock_text(loss.after_s)}: {loss.reason}") for loss in summary.lost),
        ("sent per peer", _bytes_line(summary)),
        ("time", f"{summary.compute_utilisation or 0:.0%} of it was spent computing"),
        ("saves", saves_text(summary.saves) or "none"),
        ("same bits", "yes, on every peer after every round" if summary.digests_equal else "NO"),
    ]
    lines = ["", *(f"{label:>16}  {text}" for label, text in rows), ""]
    lines += ["what the model writes by now:", "", *(f"    {line}" for line in sample_text.splitlines()), ""]
    lines += [
        f"run folder: {folder}",
        "            events.jsonl  config.toml  loss.svg  model.safetensors  *.log",
    ]
    return "\n".join(lines)


def _loss_line(summary: Summary) -> str:
    before, after = summary.val_loss_before, summary.val_loss_after
    if before is None or after is None:
        return "was not measured"
    guesses = (
        f"as unsure as a choice among {math.exp(after):.0f} bytes, at first among {math.exp(before):.0f}"
    )
    return f"{before:.3f} -> {after:.3f} nats per byte ({guesses})"


def _bytes_line(summary: Summary) -> str:
    sent, plain = summary.bytes_sent_per_peer, summary.bytes_data_parallel
    if not sent:
        return "nothing: there was one peer"
    return (
        f"{bytes_text(sent)}; plain data-parallel training of the same steps sends {bytes_text(plain)}, "
        f"{plain / sent:.0f} times as much"
    )


def num_parameters(model: Path) -> int:
    """Elements of all tensors in a safetensors file, from its header."""
    from safetensors import safe_open

    with safe_open(model, framework="np") as file:
        return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118


def sample(model: Path, section: ModelSection) -> str:
    """A short text by the saved model. Takes a few seconds: torch is imported here."""
    import torch
    from safetensors.torch import load_file

    from atoll.train.llama import Llama
    from atoll.train.models import llama_config
    from atoll.train.sample import sample_text

    torch.set_num_threads(1)  # for a model this small, threads wait for each other more than they work
    llama = Llama(llama_config(section))
    llama.load_state_dict(load_file(model), strict=not section.tie_embeddings)
    return sample_text(
        llama,
        list(PROMPT.encode()),
        lambda ids: bytes(ids).decode("utf-8", errors="replace"),
        max_new_tokens=SAMPLE_BYTES,
        temperature=0.7,
    )
