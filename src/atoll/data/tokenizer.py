"""Tokenizers: bytes, built in, or a `tokenizer.json` through the `tokenizers` package (extra `[data]`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from atoll.errors import ConfigError

if TYPE_CHECKING:
    import tokenizers

Tokens = npt.NDArray[np.unsignedinteger]
"""One axis, uint16 where the vocabulary allows, else uint32."""

BYTES = "bytes"

SEPARATOR_NAMES = (
    "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<|im_end|>", "[SEP]",
)  # fmt: skip
"""Tokens that end a document, in the order in which they are looked for in a tokenizer.json."""


class Tokenizer(Protocol):
    """Text to token ids, all below `vocab_size`, and back. `separator_id` stands after every document."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def separator_id(self) -> int: ...

    def encode_batch(self, texts: Sequence[str]) -> tuple[Tokens, list[int]]:
        """Ids of all texts, one after the other without separators, and the number of ids of each text."""
        ...

    def decode(self, tokens: Sequence[int] | npt.NDArray[np.integer]) -> str: ...


class ByteTokenizer:
    """UTF-8 bytes as tokens.

    The separator is byte 0: text does not contain it, and it needs no 257th id, so a vocabulary of 256
    suffices.
    """

    vocab_size = 256
    separator_id = 0

    def encode_batch(self, texts: Sequence[str]) -> tuple[Tokens, list[int]]:
        encoded = [text.encode() for text in texts]
        return np.frombuffer(b"".join(encoded), dtype=np.uint8).astype(np.uint16), list(map(len, encoded))

    def decode(self, tokens: Sequence[int] | npt.NDArray[np.integer]) -> str:
        """The text; bytes that are no UTF-8 (a model can write them) become U+FFFD."""
        return bytes(np.asarray(tokens, dtype=np.uint8)).decode(errors="replace")


class JsonTokenizer:
    """A Hugging Face `tokenizer.json`, read once. Raises ConfigError if it cannot be used."""

    def __init__(self, path: Path) -> None:
        self._tokenizer = _load(path)
        # Exported files often carry a training-time limit (512, say): it would cut documents without a word.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(ids.values(), default=-1) + 1
        self.separator_id = _separator(path, ids)
        self._dtype = np.uint16 if self.vocab_size <= 1 << 16 else np.uint32

    def encode_batch(self, texts: Sequence[str]) -> tuple[Tokens, list[int]]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        ids = [np.array(encoding.ids, dtype=self._dtype) for encoding in encodings]
        return np.concatenate(ids), list(map(len, ids))

    def decode(self, tokens: Sequence[int] | npt.NDArray[np.integer]) -> str:
        return self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=False)


def load_tokenizer(name: str, model_vocab_size: int) -> Tokenizer:
    """The tokenizer called `name`: "bytes", or the path of a tokenizer.json.

    Raises ConfigError if it cannot be loaded, or has ids that a model of `model_vocab_size` rows does not
    know.
    """
    tokenizer: Tokenizer = ByteTokenizer() if name == BYTES else JsonTokenizer(Path(name).expanduser())
    if tokenizer.vocab_size > model_vocab_size:
        raise ConfigError(
            f"data.tokenizer {name!r} has {tokenizer.vocab_size} tokens, but model.vocab_size is "
            f"{model_vocab_size}; set model.vocab_size to at least {tokenizer.vocab_size}"
        )
    return tokenizer


def _load(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise ConfigError(
            f'data.tokenizer: {str(path)!r} does not exist; give "{BYTES}" or the path of a tokenizer.json'
        )
    try:
        from tokenizers import Tokenizer as HubTokenizer
    except ImportError:
        raise ConfigError(
            f'data.tokenizer {str(path)!r} needs tokenizers: pip install "atoll-train[data]"'
        ) from None
    try:
        return HubTokenizer.from_file(str(path))
    except Exception as error:  # the package raises bare Exception for every kind of damage
        raise ConfigError(f"data.tokenizer: {str(path)!r} is no tokenizer.json: {error}") from error


def _separator(path: Path, ids: dict[str, int]) -> int:
    for name in SEPARATOR_NAMES:
        if name in ids:
            return ids[name]
    raise ConfigError(
        f"data.tokenizer: {str(path)!r} has no end-of-document token; add one of {', '.join(SEPARATOR_NAMES)}"
    )
