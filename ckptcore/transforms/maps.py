"""Maps: ready-made transforms between how libraries name, stack and turn the weights of one family of models.

Each function gives the transforms from Hugging Face's names; `ckptcore.transforms.inverse` of them is the way back. What a map does not know stays
as it is.

Hugging Face's names are those of the modules of ``transformers``, and its kernels lie as ``[outputs, inputs]``, as PyTorch's. *Scanned* is a tree as
Flax NNX makes it of layers that are run by ``jax.lax.scan``: one array for all layers, the first axis of which counts them; ``kernel`` as ``[inputs,
outputs]``, ``embedding`` and ``scale``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ckptcore.errors import TransformError
from ckptcore.transforms.applying import inverse
from ckptcore.transforms.axes import MergeAxes, SplitAxis, Transpose
from ckptcore.transforms.elements import Scale
from ckptcore.transforms.moves import Rename
from ckptcore.transforms.several import Stack
from ckptcore.transforms.transform import IfPresent, Transform

__all__ = ["MAPS", "NamedMap", "bert_to_scanned", "find_map", "llama_to_maxtext", "llama_to_scanned"]


def bert_to_scanned(prefix: str = "") -> list[Transform]:
    """BERT encoders (``BertModel``: also MiniLM, BGE, E5, RoBERTa) from Hugging Face to a scanned tree.

    ``encoder/layers/attention/query/kernel``, ``encoder/layers/intermediate/kernel``, ``embeddings/word_embeddings/embedding``.

    Args:
        prefix: what the names of the encoder begin with, as ``"bert."`` where it has a head; the tree stands under the same keys then. Heads stay
            as they are.

    Raises:
        TransformError: for a prefix that does not end with a dot.
    """
    own, to = _prefixes(prefix)
    layer, layers = f"{own}encoder.layer.{{i}}", f"{to}encoder/layers"
    dense = {"attention.output": "attention/output", "intermediate": "intermediate", "output": "output"}
    norms = {"attention.output.LayerNorm": "attention/norm", "output.LayerNorm": "norm"}
    stacks: list[Transform] = []
    for stored, made in (("weight", "kernel"), ("bias", "bias")):
        stacks.append(Stack(f"{layer}.attention.self.{{part}}.{stored}", f"{layers}/attention/{{part}}/{made}"))
        stacks.extend(
            [Stack(f"{layer}.{name}.dense.{stored}", f"{layers}/{path}/{made}") for name, path in dense.items()]
        )
        stacks.append(IfPresent(Rename(f"{own}pooler.dense.{stored}", f"{to}pooler/{made}")))
    for stored, made in (("weight", "scale"), ("bias", "bias")):
        stacks.extend([Stack(f"{layer}.{name}.{stored}", f"{layers}/{path}/{made}") for name, path in norms.items()])
        stacks.append(Rename(f"{own}embeddings.LayerNorm.{stored}", f"{to}embeddings/norm/{made}"))
    return [
        *stacks,
        Rename(f"{own}embeddings.{{table}}_embeddings.weight", f"{to}embeddings/{{table}}_embeddings/embedding"),
        IfPresent(Rename(f"{own}embeddings.position_ids", f"{to}embeddings/position_ids")),
        Transpose(f"{to}{{module...}}/kernel"),
    ]


def llama_to_scanned(prefix: str = "") -> list[Transform]:
    """Llama and what is built like it (Mistral, Qwen 2 and 3) from Hugging Face to a scanned tree.

    ``layers/self_attn/q_proj/kernel``, ``layers/mlp/gate_proj/kernel``, ``embed_tokens/embedding``. ``lm_head`` may be missing: it is tied then.

    Args:
        prefix: what the names begin with before ``model`` and ``lm_head``, as ``"language_model."``; the tree stands under the same keys then.

    Raises:
        TransformError: for a prefix that does not end with a dot.
    """
    own, to = _prefixes(prefix)
    layer, layers = f"{own}model.layers.{{i}}", f"{to}layers"
    return [
        Rename(f"{own}model.embed_tokens.weight", f"{to}embed_tokens/embedding"),
        Rename(f"{own}model.norm.weight", f"{to}norm/scale"),
        IfPresent(Rename(f"{own}lm_head.weight", f"{to}lm_head/kernel")),
        Stack(f"{layer}.self_attn.{{part}}_proj.weight", f"{layers}/self_attn/{{part}}_proj/kernel"),
        IfPresent(Stack(f"{layer}.self_attn.{{part}}_proj.bias", f"{layers}/self_attn/{{part}}_proj/bias")),
        IfPresent(Stack(f"{layer}.self_attn.{{part}}_norm.weight", f"{layers}/self_attn/{{part}}_norm/scale")),
        Stack(f"{layer}.mlp.{{part}}_proj.weight", f"{layers}/mlp/{{part}}_proj/kernel"),
        IfPresent(Stack(f"{layer}.mlp.{{part}}_proj.bias", f"{layers}/mlp/{{part}}_proj/bias")),
        Stack(f"{layer}.{{name}}_layernorm.weight", f"{layers}/{{name}}_layernorm/scale"),
        Transpose(f"{to}{{module...}}/kernel"),
    ]


def llama_to_maxtext(head_dim: int, prefix: str = "") -> list[Transform]:
    """Llama 2 and 3 from Hugging Face to the parameters of MaxText, with scanned layers and its ``param_scan_axis`` of 1.

    MaxText keeps a rotated pair of a head's elements side by side, where Hugging Face has all first ones before all second ones, and has queries
    divided by the root of `head_dim`: they come back bit-equal where that is a power of two, and else rounded. Source:
    AI-Hypercomputer/maxtext, ``ckpt_conversion/strategies/llama.py``.

    Args:
        head_dim: elements of a head; even.
        prefix: what the names begin with before ``model`` and ``lm_head``, as ``"language_model."``; MaxText's have none.

    Raises:
        TransformError: if `head_dim` is odd, or the prefix does not end with a dot.
    """
    own, _ = _prefixes(prefix)
    if head_dim < 2 or head_dim % 2:
        raise TransformError(f"llama_to_maxtext(head_dim={head_dim}): give an even number above 0")
    layer, layers = f"{own}model.layers.{{i}}", "params/decoder/layers"
    attention, pair = f"{layers}/self_attention", head_dim // 2
    transforms: list[Transform] = [
        Rename(f"{own}model.embed_tokens.weight", "params/token_embedder/embedding"),
        Rename(f"{own}model.norm.weight", "params/decoder/decoder_norm/scale"),
        IfPresent(Rename(f"{own}lm_head.weight", "params/decoder/logits_dense/kernel")),
        IfPresent(Transpose("params/decoder/logits_dense/kernel")),
        Stack(f"{layer}.input_layernorm.weight", f"{layers}/pre_self_attention_layer_norm/scale", axis=1),
        Stack(f"{layer}.post_attention_layernorm.weight", f"{layers}/post_self_attention_layer_norm/scale", axis=1),
    ]
    kernels = {
        f"{attention}/query/kernel": "self_attn.q_proj",
        f"{attention}/key/kernel": "self_attn.k_proj",
        f"{attention}/value/kernel": "self_attn.v_proj",
        f"{attention}/out/kernel": "self_attn.o_proj",
        f"{layers}/mlp/wi_0/kernel": "mlp.gate_proj",
        f"{layers}/mlp/wi_1/kernel": "mlp.up_proj",
        f"{layers}/mlp/wo/kernel": "mlp.down_proj",
    }
    for path, name in kernels.items():
        transforms += [Stack(f"{layer}.{name}.weight", path), Transpose(path, (2, 0, 1))]
    for part in ("query", "key"):
        path = f"{attention}/{part}/kernel"
        transforms += [
            SplitAxis(path, 2, (-1, 2, pair)),
            Transpose(path, (0, 1, 2, 4, 3)),
            MergeAxes(path, 3, (pair, 2)),
        ]
    scale = math.sqrt(head_dim)
    return [
        *transforms,
        SplitAxis(f"{attention}/value/kernel", 2, (-1, head_dim)),
        SplitAxis(f"{attention}/out/kernel", 0, (-1, head_dim)),
        Transpose(f"{attention}/out/kernel", (0, 2, 1, 3)),
        Scale(f"{attention}/query/kernel", 1 / scale, scale),
    ]


def _prefixes(prefix: str) -> tuple[str, str]:
    """What stands before Hugging Face's names in a template, and before the paths of a tree under the same keys.

    Raises:
        TransformError
    """
    if prefix and (not prefix.endswith(".") or "" in prefix[:-1].split(".") or set(prefix) & set("*{}/")):
        raise TransformError(f"{prefix!r} is no prefix of names: expected text that ends with a dot, such as 'bert.'")
    return prefix, prefix.replace(".", "/")


@dataclass(frozen=True, slots=True)
class NamedMap:
    """A map that has a name, for the command line.

    Attributes:
        make: gives its transforms, from `head_dim`, where it needs that, and a prefix of names.
        needs_head_dim: whether it does.
    """

    make: Callable[[int, str], list[Transform]]
    needs_head_dim: bool = False


MAPS: Mapping[str, NamedMap] = {
    "bert-to-scanned": NamedMap(lambda head_dim, prefix: bert_to_scanned(prefix)),
    "llama-to-scanned": NamedMap(lambda head_dim, prefix: llama_to_scanned(prefix)),
    "llama-to-maxtext": NamedMap(llama_to_maxtext, needs_head_dim=True),
}
"""The maps by name; with the two sides of a name exchanged it is the way back."""


def find_map(name: str, head_dim: int | None = None, prefix: str = "") -> list[Transform]:
    """The transforms of a map, or the way back.

    Args:
        name: as in `MAPS`, or with its sides exchanged, as ``scanned-to-bert``.
        head_dim: elements of a head, for the maps that need it.
        prefix: what Hugging Face's names begin with, as ``"bert."``.

    Raises:
        TransformError: if there is none of this name, or it lacks what it needs.
    """
    first, _, second = name.partition("-to-")
    back = f"{second}-to-{first}"
    found = MAPS.get(name) or MAPS.get(back)
    if found is None:
        raise TransformError(f"there is no map {name!r}; there are {', '.join(MAPS)}, and each the other way round")
    if found.needs_head_dim and head_dim is None:
        raise TransformError(
            f"the map {name!r} needs the elements of a head: give head_dim, as the model's config.json has it"
        )
    transforms = found.make(head_dim or 0, prefix)
    return transforms if name in MAPS else inverse(transforms)
