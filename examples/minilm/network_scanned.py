"""The sentence encoder in JAX with weights as in Flax: stacked layers, and kernels as ``[inputs, outputs]``."""

# mypy: allow-untyped-calls

from __future__ import annotations

from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from examples.minilm.pretrained import Sizes
from examples.minilm.tokens import Tokens

Weights: TypeAlias = Any
"""The tree that `ckptcore_transforms.maps.bert_to_scanned` creates: nested dicts of arrays."""

_SPLIT_OUTPUTS = ("query", "key", "value", "intermediate")


def sharding(mesh: Mesh, path: tuple[str, ...]) -> NamedSharding:
    """Return the sharding of an array on a mesh with the axis ``model``.

    Layers are sharded as in `examples.minilm.network_jax`. Arrays outside of layers are replicated.
    """
    axes: tuple[str | None, ...] = ()
    if path[-1] == "kernel" and "layers" in path:
        axes = (None, None, "model") if path[-2] in _SPLIT_OUTPUTS else (None, "model", None)
    elif path[-1] == "bias" and path[-2] in _SPLIT_OUTPUTS:
        axes = (None, "model")
    return NamedSharding(mesh, PartitionSpec(*axes))


def embed(weights: Weights, tokens: Tokens, sizes: Sizes) -> jax.Array:
    """Return the vector of each sentence, normalised to length 1: an array ``[sentences, hidden]``."""
    vectors: jax.Array = _embed(weights, tokens.numbers, tokens.mask, sizes)
    return vectors


@partial(jax.jit, static_argnames="sizes")
def _embed(weights: Weights, numbers: jax.Array, mask: jax.Array, sizes: Sizes) -> jax.Array:
    tables = weights["embeddings"]
    hidden = tables["word_embeddings"]["embedding"][numbers]
    hidden += tables["token_type_embeddings"]["embedding"][0]
    hidden += tables["position_embeddings"]["embedding"][: numbers.shape[1]]
    hidden = _normed(tables["norm"], hidden, sizes)
    hidden, _ = jax.lax.scan(
        lambda hidden, layer: (_layer(layer, hidden, mask, sizes), None), hidden, weights["encoder"]["layers"]
    )
    places = mask[..., None].astype(hidden.dtype)
    mean = (hidden * places).sum(1) / places.sum(1)
    vectors: jax.Array = mean / jnp.linalg.norm(mean, axis=-1, keepdims=True)
    return vectors


def _layer(layer: Weights, hidden: jax.Array, mask: jax.Array, sizes: Sizes) -> jax.Array:
    attention, by_head = layer["attention"], (*hidden.shape[:-1], sizes.heads, -1)
    query, key, value = (_linear(attention[part], hidden).reshape(by_head) for part in ("query", "key", "value"))
    mixed = jax.nn.dot_product_attention(query, key, value, mask=mask[:, None, None, :].astype(bool))
    mixed = _linear(attention["output"], mixed.reshape(hidden.shape))
    hidden = _normed(attention["norm"], mixed + hidden, sizes)
    expanded = jax.nn.gelu(_linear(layer["intermediate"], hidden), approximate=False)
    return _normed(layer["norm"], _linear(layer["output"], expanded) + hidden, sizes)


def _linear(weights: Weights, inputs: jax.Array) -> jax.Array:
    result: jax.Array = inputs @ weights["kernel"] + weights["bias"]
    return result


def _normed(weights: Weights, inputs: jax.Array, sizes: Sizes) -> jax.Array:
    centred = inputs - inputs.mean(-1, keepdims=True)
    scale = jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + sizes.epsilon)
    result: jax.Array = centred * scale * weights["scale"] + weights["bias"]
    return result
