"""The sentence encoder in NumPy, for a service without a framework."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from examples.minilm.pretrained import Sizes
from examples.minilm.tokens import Tokens

Array: TypeAlias = npt.NDArray[np.float32]

Weights: TypeAlias = Mapping[str, npt.NDArray[Any]]
"""The arrays of the network, by the names of Hugging Face."""

_erf = np.vectorize(math.erf, otypes=[np.float32])


def embed(weights: Weights, tokens: Tokens, sizes: Sizes) -> Array:
    """Return the vector of each sentence, ``[sentences, hidden]``, of length 1."""
    hidden = weights["embeddings.word_embeddings.weight"][tokens.numbers]
    hidden = hidden + weights["embeddings.token_type_embeddings.weight"][0]
    hidden += weights["embeddings.position_embeddings.weight"][: tokens.numbers.shape[1]]
    hidden = _layer_norm(weights, "embeddings.LayerNorm", hidden, sizes)
    for number in range(sizes.layers):
        hidden = _layer(weights, f"encoder.layer.{number}", hidden, tokens, sizes)
    places = tokens.mask[..., None].astype(np.float32)
    mean = (hidden * places).sum(1) / places.sum(1)
    vectors: Array = mean / np.linalg.norm(mean, axis=-1, keepdims=True)
    return vectors


def _layer(weights: Weights, prefix: str, hidden: Array, tokens: Tokens, sizes: Sizes) -> Array:
    mixed = _attention(weights, f"{prefix}.attention.self", hidden, tokens, sizes)
    mixed = _linear(weights, f"{prefix}.attention.output.dense", mixed)
    hidden = _layer_norm(weights, f"{prefix}.attention.output.LayerNorm", mixed + hidden, sizes)
    expanded = _gelu(_linear(weights, f"{prefix}.intermediate.dense", hidden))
    result = _linear(weights, f"{prefix}.output.dense", expanded)
    return _layer_norm(weights, f"{prefix}.output.LayerNorm", result + hidden, sizes)


def _attention(weights: Weights, prefix: str, hidden: Array, tokens: Tokens, sizes: Sizes) -> Array:
    by_head = (*hidden.shape[:-1], sizes.heads, -1)
    query, key, value = (
        _linear(weights, f"{prefix}.{part}", hidden).reshape(by_head).swapaxes(1, 2)
        for part in ("query", "key", "value")
    )
    scores = query @ key.swapaxes(-1, -2) / np.float32(math.sqrt(query.shape[-1]))
    scores = np.where(tokens.mask[:, None, None, :], scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    mixed: Array = (shares @ value).swapaxes(1, 2).reshape(hidden.shape)
    return mixed


def _linear(weights: Weights, prefix: str, inputs: Array) -> Array:
    return inputs @ weights[f"{prefix}.weight"].T + weights[f"{prefix}.bias"]


def _layer_norm(weights: Weights, prefix: str, inputs: Array, sizes: Sizes) -> Array:
    centred = inputs - inputs.mean(-1, keepdims=True)
    scale = 1 / np.sqrt((centred**2).mean(-1, keepdims=True) + np.float32(sizes.epsilon))
    normed: Array = centred * scale * weights[f"{prefix}.weight"] + weights[f"{prefix}.bias"]
    return normed


def _gelu(inputs: Array) -> Array:
    result: Array = inputs * (1 + _erf(inputs / np.float32(math.sqrt(2)))) / 2
    return result
