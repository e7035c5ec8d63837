"""Conversion of sentences to token numbers, with the tokenizer of the checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class Tokens:
    """A batch of sentences, padded to the longest.

    Attributes:
        numbers: the token at each position, ``[sentences, positions]``.
        mask: 1 for a token, 0 for padding; the same shape.
    """

    numbers: npt.NDArray[np.int32]
    mask: npt.NDArray[np.int32]


def tokenise(sentences: Sequence[str], directory: Path) -> Tokens:
    """Return the tokens of sentences, with the ``tokenizer.json`` of a Hugging Face directory."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.enable_truncation(max_length=256)
    tokenizer.enable_padding()
    encodings = tokenizer.encode_batch(list(sentences))
    return Tokens(
        np.array([encoding.ids for encoding in encodings], np.int32),
        np.array([encoding.attention_mask for encoding in encodings], np.int32),
    )
