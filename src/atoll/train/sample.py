"""A short text written by the model, to look at."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from atoll.train.evaluate import evaluating
from atoll.train.llama import Llama


def sample_tokens(
    model: Llama, prompt: Sequence[int], *, max_new_tokens: int, temperature: float = 0.8, seed: int = 0
) -> list[int]:
    """`max_new_tokens` token ids that follow `prompt` (at least one id). `temperature` 0 takes the likeliest.

    The same weights, prompt and seed give the same text on one machine. The model sees the last `max_seq_len`
    tokens and runs once over them for each new one: fast enough for a few hundred from a small model.
    """
    if not prompt:
        raise ValueError("the prompt is empty; give at least one token id")
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    with evaluating(model):
        for _ in range(max_new_tokens):
            window = torch.tensor([tokens[-model.config.max_seq_len :]], device=device)
            logits = model(window)[0, -1].float().cpu()
            tokens.append(_choose(logits, temperature, generator))
    return tokens[len(prompt) :]


def sample_text(
    model: Llama,
    prompt: Sequence[int],
    decode: Callable[[Sequence[int]], str],
    *,
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    seed: int = 0,
) -> str:
    """The prompt and what follows it, as text."""
    new = sample_tokens(model, prompt, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
    return decode([*prompt, *new])


def _choose(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    probabilities = torch.softmax(logits / temperature, dim=-1)
    return int(torch.multinomial(probabilities, 1, generator=generator))
