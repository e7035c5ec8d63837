"""Scanned trees load into modules of Flax NNX, which compute the same logits as the models of Hugging Face."""

# mypy: allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ckptcore_transforms.maps import llama_to_scanned
from flax import nnx

import ckptcore
from tests.transforms.published import EPSILON, HEAD_DIM, TOKENS, logits, publish

EMBED, MLP, HEADS, KV_HEADS, LAYERS, VOCABULARY = 24, 40, 4, 2, 3, 66


class _Attention(nnx.Module):
    def __init__(self, kind: str, biases: bool, rngs: nnx.Rngs) -> None:
        linear = partial(nnx.Linear, rngs=rngs)
        self.q_proj = linear(EMBED, HEADS * HEAD_DIM, use_bias=biases or kind == "Qwen2")
        self.k_proj = linear(EMBED, KV_HEADS * HEAD_DIM, use_bias=biases or kind == "Qwen2")
        self.v_proj = linear(EMBED, KV_HEADS * HEAD_DIM, use_bias=biases or kind == "Qwen2")
        self.o_proj = linear(HEADS * HEAD_DIM, EMBED, use_bias=biases)
        if kind == "Qwen3":
            self.q_norm = nnx.RMSNorm(HEAD_DIM, epsilon=EPSILON, rngs=rngs)
            self.k_norm = nnx.RMSNorm(HEAD_DIM, epsilon=EPSILON, rngs=rngs)
        self.kind = kind

    def __call__(self, x: Any) -> Any:
        query, key, value = (
            projection(x).reshape(len(x), -1, HEAD_DIM) for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.kind == "Qwen3":
            query, key = self.q_norm(query), self.k_norm(key)
        mixed = jax.nn.dot_product_attention(_rotated(query)[None], _rotated(key)[None], value[None], is_causal=True)
        return self.o_proj(mixed.reshape(len(x), -1))


def _rotated(x: Any) -> Any:
    angles = jnp.arange(len(x))[:, None, None] / 10000 ** (2 * jnp.arange(HEAD_DIM // 2) / HEAD_DIM)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate(
        [first * jnp.cos(angles) - second * jnp.sin(angles), second * jnp.cos(angles) + first * jnp.sin(angles)], -1
    )


class _Mlp(nnx.Module):
    def __init__(self, biases: bool, rngs: nnx.Rngs) -> None:
        self.gate_proj = nnx.Linear(EMBED, MLP, use_bias=biases, rngs=rngs)
        self.up_proj = nnx.Linear(EMBED, MLP, use_bias=biases, rngs=rngs)
        self.down_proj = nnx.Linear(MLP, EMBED, use_bias=biases, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.down_proj(nnx.silu(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nnx.Module):
    def __init__(self, kind: str, biases: bool, rngs: nnx.Rngs) -> None:
        self.input_layernorm = nnx.RMSNorm(EMBED, epsilon=EPSILON, rngs=rngs)
        self.post_attention_layernorm = nnx.RMSNorm(EMBED, epsilon=EPSILON, rngs=rngs)
        self.self_attn = _Attention(kind, biases, rngs)
        self.mlp = _Mlp(biases, rngs)

    def __call__(self, x: Any) -> Any:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class _Decoder(nnx.Module):
    """A decoder whose layers run in one scan. Each array of the layers has an additional first axis."""

    def __init__(self, kind: str, biases: bool, tied: bool, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def layers(rngs: nnx.Rngs) -> _Layer:
            return _Layer(kind, biases, rngs)

        self.embed_tokens = nnx.Embed(VOCABULARY, EMBED, rngs=rngs)
        self.layers = layers(rngs)
        self.norm = nnx.RMSNorm(EMBED, epsilon=EPSILON, rngs=rngs)
        if not tied:
            self.lm_head = nnx.Linear(EMBED, VOCABULARY, use_bias=False, rngs=rngs)
        self.tied = tied

    def __call__(self, tokens: Any) -> Any:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x: Any, layer: _Layer) -> Any:
            return layer(x)

        x = self.norm(run(self.embed_tokens(tokens), self.layers))
        return self.embed_tokens.attend(x) if self.tied else self.lm_head(x)


@pytest.mark.parametrize(
    ("kind", "biases", "tied"),
    [("Llama", False, False), ("Llama", True, True), ("Qwen2", False, True), ("Qwen3", False, False)],
)  # fmt: skip
def test_modules_of_nnx_and_transformers_compute_equal_logits(
    kind: str, biases: bool, tied: bool, tmp_path: Path
) -> None:
    model = publish(tmp_path, kind, biases=biases, tied=tied)
    decoder = nnx.eval_shape(lambda: _Decoder(kind, biases, tied, nnx.Rngs(0)))
    asked = nnx.to_pure_dict(nnx.state(decoder, nnx.Param))
    loaded = ckptcore.load(
        tmp_path, asked, transforms=llama_to_scanned()
    )  # no array is missing, unexpected or of another shape
    nnx.update(decoder, loaded)
    with jax.default_matmul_precision("float32"):
        actual = np.asarray(nnx.jit(lambda module: module(TOKENS))(decoder))
    assert np.allclose(actual, logits(model), rtol=1e-3, atol=1e-3)
