"""The sentence encoder in JAX: functions that take the weights as a dict, with tensor parallelism."""

# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from examples.minilm.pretrained import Sizes
from examples.minilm.tokens import Tokens

Weights: TypeAlias = Mapping[str, jax.Array]
"""The arrays of the network, by their names in the Hugging Face checkpoint."""

_SPLIT_OUTPUTS = ("query.weight", "key.weight", "value.weight", "intermediate.dense.weight")
_SPLIT_INPUTS = ("output.dense.weight", "word_embeddings.weight")
_SPLIT_BIASES = ("query.bias", "key.bias", "value.bias", "intermediate.dense.bias")


def mesh_over(devices: Sequence[jax.Device]) -> Mesh:
    """Return a mesh of these devices with one axis, ``model``."""
    return Mesh(np.array(devices), ("model",))


def sharding(mesh: Mesh, name: str) -> NamedSharding:
    """Return the sharding of an array on a mesh with the axis ``model``.

    Each device has some of the attention heads, and a part of each feed-forward layer, as in Megatron. The word
    embeddings are split along the hidden axis. Other arrays are replicated. Matrices are ``[outputs, inputs]``.
    """
    axes: tuple[str | None, ...] = ()
    if name.endswith(_SPLIT_OUTPUTS):
        axes = ("model", None)
    elif name.endswith(_SPLIT_INPUTS):
        axes = (None, "model")
    elif name.endswith(_SPLIT_BIASES):
        axes = ("model",)
    return NamedSharding(mesh, PartitionSpec(*axes))


def embed(weights: Weights, tokens: Tokens, sizes: Sizes) -> jax.Array:
    """Return a unit vector for each sentence, ``[sentences, hidden]``."""
    vectors: jax.Array = _embed(weights, tokens.numbers, tokens.mask, sizes)
    return vectors


@partial(jax.jit, static_argnames="sizes")
def _embed(weights: Weights, numbers: jax.Array, mask: jax.Array, sizes: Sizes) -> jax.Array:
    hidden = weights["embeddings.word_embeddings.weight"][numbers]
    hidden += weights["embeddings.token_type_embeddings.weight"][0]
    hidden += weights["embeddings.position_embeddings.weight"][: numbers.shape[1]]
    hidden = _layer_norm(weights, "embeddings.LayerNorm", hidden, sizes)
    for number in range(sizes.layers):
        hidden = _layer(weights, f"encoder.layer.{number}", hidden, mask, sizes)
    places = mask[..., None].astype(hidden.dtype)
    mean = (hidden * places).sum(1) / places.sum(1)
    vectors: jax.Array = mean / jnp.linalg.norm(mean, axis=-1, keepdims=True)
    return vectors


def _layer(weights: Weights, prefix: str, hidden: jax.Array, mask: jax.Array, sizes: Sizes) -> jax.Array:
    mixed = _attention(weights, f"{prefix}.attention.self", hidden, mask, sizes)
    mixed = _linear(weights, f"{prefix}.attention.output.dense", mixed)
    hidden = _layer_norm(weights, f"{prefix}.attention.output.LayerNorm", mixed + hidden, sizes)
    expanded = jax.nn.gelu(_linear(weights, f"{prefix}.intermediate.dense", hidden), approximate=False)
    result = _linear(weights, f"{prefix}.output.dense", expanded)
    return _layer_norm(weights, f"{prefix}.output.LayerNorm", result + hidden, sizes)


def _attention(weights: Weights, prefix: str, hidden: jax.Array, mask: jax.Array, sizes: Sizes) -> jax.Array:
    by_head = (*hidden.shape[:-1], sizes.heads, -1)
    query, key, value = (
        _linear(weights, f"{prefix}.{part}", hidden).reshape(by_head) for part in ("query", "key", "value")
    )
    mixed = jax.nn.dot_product_attention(query, key, value, mask=mask[:, None, None, :].astype(bool))
    return mixed.reshape(hidden.shape)


def _linear(weights: Weights, prefix: str, inputs: jax.Array) -> jax.Array:
    return inputs @ weights[f"{prefix}.weight"].T + weights[f"{prefix}.bias"]


def _layer_norm(weights: Weights, prefix: str, inputs: jax.Array, sizes: Sizes) -> jax.Array:
    centred = inputs - inputs.mean(-1, keepdims=True)
    scale = jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + sizes.epsilon)
    return centred * scale * weights[f"{prefix}.weight"] + weights[f"{prefix}.bias"]
