"""Versions of fine-tuned weights: all-MiniLM-L6-v2 after each step of masked language modelling, as bfloat16.

The output layer shares the word embeddings, as in many language models, so that every weight gets a gradient.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from typing import Final

import safetensors.torch
import torch
from torch.nn import functional

from examples.minilm.network_torch import SentenceEncoder
from examples.minilm.pretrained import Sizes, model_directory
from examples.minilm.tokens import tokenise

Weights = Mapping[str, torch.Tensor]

_LAYERS: Final = 6
_SENTENCES: Final = 4
"""Sentences of a step."""

_TOKENS: Final = 32
"""Maximum tokens of a sentence."""

_MASK: Final = 103
_MASKED: Final = 0.15
"""The share of the tokens that the network predicts."""

_WARM_UP: Final = 5
"""Steps before the first version, in which AdamW estimates its moments."""


def fine_tuned(learning_rate: float, versions: int, layers: int = _LAYERS) -> Sequence[Weights]:
    """Train on the texts of scikit-learn, and return the weights after each step.

    Args:
        learning_rate: that of AdamW. Its master weights are float32.
        versions: the number of steps after the warm-up.
        layers: the layers of the network.
    """
    torch.manual_seed(0)
    directory = model_directory()
    encoder = SentenceEncoder(replace(Sizes.of(directory), layers=layers))
    stored = safetensors.torch.load_file(directory / "model.safetensors")
    encoder.load_state_dict({name: stored[name] for name in encoder.state_dict()})
    optimizer = torch.optim.AdamW(encoder.parameters(), learning_rate, weight_decay=0.01)
    tokens = tokenise(_sentences(), directory)
    numbers, mask = torch.from_numpy(tokens.numbers)[:, :_TOKENS], torch.from_numpy(tokens.mask)[:, :_TOKENS]
    made: list[Weights] = []
    for step in range(_WARM_UP + versions):
        chosen = torch.randint(len(numbers), (_SENTENCES,))
        loss = _loss(encoder, numbers[chosen].long(), mask[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step >= _WARM_UP:
            weights = encoder.state_dict()
            del weights["embeddings.position_ids"]  # it is not trained
            made.append({name: tensor.to(torch.bfloat16) for name, tensor in weights.items()})
    return made


def repeated(weights: Weights, times: int) -> Weights:
    """Return a model with `times` as many arrays. They do not share memory."""
    return {
        f"{number}.{name}": tensor.clone() for number in range(times) for name, tensor in weights.items()
    }  # fmt: skip


def _loss(encoder: SentenceEncoder, numbers: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    is_masked = (torch.rand(numbers.shape) < _MASKED) & mask.bool()
    is_masked[:, 1] = True  # at least one token of each sentence
    hidden: torch.Tensor = encoder.embeddings(numbers.masked_fill(is_masked, _MASK))
    allowed = mask[:, None, None, :].bool()
    for layer in encoder.encoder["layer"]:  # type: ignore[attr-defined]  # a ModuleList: ModuleDict types it as Module
        hidden = layer(hidden, allowed)
    # The pooler takes part, so that all weights are trained.
    pooled = torch.tanh(encoder.pooler["dense"](hidden[:, 0]))[:, None]
    scores = (hidden + pooled)[is_masked] @ encoder.embeddings.word_embeddings.weight.T
    return functional.cross_entropy(scores, numbers[is_masked])


def _sentences() -> Sequence[str]:
    """Return the paragraphs of the descriptions of scikit-learn's data sets."""
    texts = [
        file.read_text(encoding="utf-8")
        for file in sorted(files("sklearn.datasets.descr").iterdir(), key=lambda file: file.name)
        if file.name.endswith(".rst")
    ]
    paragraphs = [" ".join(paragraph.split()) for text in texts for paragraph in text.split("\n\n")]
    return [paragraph for paragraph in paragraphs if len(paragraph) > 40]
