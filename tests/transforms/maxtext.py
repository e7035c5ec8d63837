"""MaxText's conversion of Hugging Face decoders, and its model, written in NumPy, one layer at a time.

Sources in AI-Hypercomputer/maxtext:

- ``checkpoint_conversion/utils/param_mapping.py``: reshapes, the order of elements in a head, the scale of queries.
- ``checkpoint_conversion/to_maxtext.py``: layers are stacked along ``param_scan_axis``, which is 1.
- ``checkpoint_conversion/standalone_scripts/llama_or_mistral_ckpt.py``: only Llama 3.1 has another order in heads.
- ``layers/embeddings.py``: both rotary embeddings.
- ``models/llama2.py``, ``mistral.py``, ``qwen2.py`` and ``qwen3.py``: only Qwen divides queries at run time.
- ``common/checkpointing.py``: the path ``params/params`` in checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

SCAN_AXIS = 1


@dataclass(frozen=True)
class Family:
    """The format of one family of models in MaxText.

    Attributes:
        pairs: True if the two elements of a rotated pair are adjacent in a head.
        scaled: True if the kernels of queries, and not the queries, are divided by the root of `head_dim`.
    """

    pairs: bool
    scaled: bool


def maxtext_tree(state: Mapping[str, Any], head_dim: int, family: Family) -> dict[str, Any]:
    """Return the tree of a MaxText checkpoint, from arrays by their Hugging Face names."""
    layers = 1 + max(int(name.split(".")[2]) for name in state if name.startswith("model.layers."))

    def stacked(name: str, of_one: Any) -> Any:
        return np.stack([of_one(state[f"model.layers.{layer}.{name}"]) for layer in range(layers)], axis=SCAN_AXIS)

    def heads(kernel: Any) -> Any:
        return kernel.T.reshape(kernel.shape[1], -1, head_dim)

    def rotated(kernel: Any) -> Any:
        if not family.pairs:
            return kernel
        half = head_dim // 2
        return np.stack([kernel[..., :half], kernel[..., half:]], axis=-1).reshape(kernel.shape)

    def queries(kernel: Any) -> Any:
        factor = np.float32(1 / np.sqrt(head_dim)) if family.scaled else np.float32(1)
        return rotated(heads(kernel).astype(np.float32) * factor).astype(kernel.dtype)

    def present(name: str) -> bool:
        return f"model.layers.0.{name}" in state

    attention: dict[str, Any] = {
        "query": {"kernel": stacked("self_attn.q_proj.weight", queries)},
        "key": {"kernel": stacked("self_attn.k_proj.weight", lambda kernel: rotated(heads(kernel)))},
        "value": {"kernel": stacked("self_attn.v_proj.weight", heads)},
        "out": {
            "kernel": stacked("self_attn.o_proj.weight", lambda kernel: kernel.T.reshape(-1, head_dim, kernel.shape[0]))
        },
    }
    for part in ("query", "key", "value"):
        if present(f"self_attn.{part[0]}_proj.bias"):
            attention[part]["bias"] = stacked(f"self_attn.{part[0]}_proj.bias", lambda bias: bias.reshape(-1, head_dim))
        if present(f"self_attn.{part[0]}_norm.weight"):
            attention[f"{part}_norm"] = {"scale": stacked(f"self_attn.{part[0]}_norm.weight", lambda scale: scale)}
    names = {"wi_0": "gate", "wi_1": "up", "wo": "down"}
    decoder: dict[str, Any] = {
        "layers": {
            "self_attention": attention,
            "mlp": {
                own: {"kernel": stacked(f"mlp.{name}_proj.weight", lambda kernel: kernel.T)}
                for own, name in names.items()
            },
            "pre_self_attention_layer_norm": {"scale": stacked("input_layernorm.weight", lambda scale: scale)},
            "post_self_attention_layer_norm": {
                "scale": stacked("post_attention_layernorm.weight", lambda scale: scale)
            },
        },
        "decoder_norm": {"scale": state["model.norm.weight"]},
    }
    if "lm_head.weight" in state:
        decoder["logits_dense"] = {"kernel": state["lm_head.weight"].T}
    weights = {"decoder": decoder, "token_embedder": {"embedding": state["model.embed_tokens.weight"]}}
    return {"params": {"params": weights}}


def maxtext_logits(tree: Mapping[str, Any], tokens: Any, head_dim: int, family: Family, epsilon: float) -> Any:
    """Return the logits of MaxText's decoder. Rotary embeddings are those of Llama, unscaled, with base 10,000."""
    weights = tree["params"]["params"]
    decoder, embedding = weights["decoder"], weights["token_embedder"]["embedding"]
    x = embedding[tokens]
    for layer in range(decoder["layers"]["mlp"]["wo"]["kernel"].shape[SCAN_AXIS]):
        own = _layer(decoder["layers"], layer)
        x = x + _attention(own, _normed(x, own["pre_self_attention_layer_norm"], epsilon), head_dim, family, epsilon)
        hidden = _normed(x, own["post_self_attention_layer_norm"], epsilon)
        gate = hidden @ own["mlp"]["wi_0"]["kernel"]
        x = x + (gate / (1 + np.exp(-gate)) * (hidden @ own["mlp"]["wi_1"]["kernel"])) @ own["mlp"]["wo"]["kernel"]
    x = _normed(x, decoder["decoder_norm"], epsilon)
    return x @ decoder["logits_dense"]["kernel"] if "logits_dense" in decoder else x @ embedding.T


def _layer(node: Any, layer: int) -> Any:
    if isinstance(node, dict):
        return {key: _layer(below, layer) for key, below in node.items()}
    return np.take(node, layer, axis=SCAN_AXIS)


def _normed(x: Any, norm: Mapping[str, Any], epsilon: float) -> Any:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * norm["scale"]


def _attention(own: Any, x: Any, head_dim: int, family: Family, epsilon: float) -> Any:
    def projected(part: str) -> Any:
        made = np.einsum("td,dhk->thk", x, own["self_attention"][part]["kernel"])
        made = made + own["self_attention"][part].get("bias", 0)
        norm = own["self_attention"].get(f"{part}_norm")
        return made if norm is None else _normed(made, norm, epsilon)

    query, key = (_turned(projected(part), family.pairs) for part in ("query", "key"))
    value = projected("value")
    if not family.scaled:
        query = query * head_dim**-0.5
    groups = query.shape[1] // key.shape[1]
    scores = np.einsum("qhk,thk->hqt", query, np.repeat(key, groups, axis=1))
    scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = np.einsum("hqt,thk->qhk", shares / shares.sum(-1, keepdims=True), np.repeat(value, groups, axis=1))
    return np.einsum("thk,hkd->td", mixed, own["self_attention"]["out"]["kernel"])


def _turned(x: Any, pairs: bool) -> Any:
    """Apply rotary embeddings: ``RotaryEmbedding`` to halves, or ``LLaMARotaryEmbedding`` to pairs."""
    head_dim = x.shape[-1]
    angles = np.arange(len(x))[:, None, None] / 10000 ** (2 * np.arange(head_dim // 2) / head_dim)
    first, second = (x[..., ::2], x[..., 1::2]) if pairs else np.split(x, 2, axis=-1)
    made = (first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles))
    return np.stack(made, axis=-1).reshape(x.shape) if pairs else np.concatenate(made, axis=-1)
