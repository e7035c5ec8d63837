"""Maps: ready-made transforms between how libraries name, stack and turn the weights of one family of models.

Each function gives the transforms from Hugging Face's names; `ckptcore_transforms.inverse` of them is the way back. What stands beside the model, as
heads do, stays as it is; what a map does not know of the model itself is an error, either way.

Hugging Face's names are those of the modules of ``transformers``, and its kernels lie as ``[outputs, inputs]``, as PyTorch's. *Scanned* is a tree as
Flax NNX makes it of layers that are run by ``jax.lax.scan``: one array for all layers, the first axis of which counts them; ``kernel`` as ``[inputs,
outputs]``, ``embedding`` and ``scale``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

from ckptcore.errors import TransformError
from ckptcore.protocols import Transform
from ckptcore_transforms.arrays import MergeAxes, Scale, SplitAxis, Transpose
from ckptcore_transforms.paths import Refuse, Rename
from ckptcore_transforms.several import Stack
from ckptcore_transforms.transform import IfPresent, TreeTransform, inverse
from ckptcore_transforms.tree_rewriter import TreeRewriter

__all__ = [
    "MAPS",
    "NamedMap",
    "RopeType",
    "bert_to_scanned",
    "find_map",
    "llama_to_maxtext",
    "llama_to_scanned",
    "qwen_to_maxtext",
]

RopeType: TypeAlias = Literal["default", "llama3.1"]
"""What MaxText's configuration has as ``rope_type``."""

_MAXTEXT: Final = "params/params"
"""Where the weights stand in a checkpoint of MaxText: the parameters of its train state, and in them a collection of Flax."""


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
        Refuse(f"{to}encoder/**"),
        *stacks,
        Rename(f"{own}embeddings.{{table}}_embeddings.weight", f"{to}embeddings/{{table}}_embeddings/embedding"),
        IfPresent(Rename(f"{own}embeddings.position_ids", f"{to}embeddings/position_ids")),
        Transpose(f"{to}{{module...}}/kernel"),
        Refuse(f"{own}encoder.**"),
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
        Refuse(f"{layers}/**"),
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
        Refuse(f"{own}model.**"),
    ]


def llama_to_maxtext(head_dim: int, rope_type: RopeType, prefix: str = "") -> list[Transform]:
    """Llama 2 and 3 and Mistral from Hugging Face to a checkpoint of MaxText, with scanned layers and its ``param_scan_axis`` of 1.

    ``params/params/decoder/layers/self_attention/query/kernel``, ``params/params/token_embedder/embedding``; ``lm_head`` may be missing: it is tied then.

    MaxText does not divide queries by the root of `head_dim` as it runs: kernels are. They come back bit-equal where that is a power of two; else they are
    rounded once each way, as its ``to_maxtext`` and ``to_huggingface`` do. Source: AI-Hypercomputer/maxtext, ``checkpoint_conversion``.

    Args:
        head_dim: elements of a head; even. Where a ``config.json`` beside the arrays says otherwise, a load is an error.
        rope_type: of MaxText's configuration: ``"llama3.1"``, also where its ``model_name`` begins with that, keeps a rotated pair of a head's elements
            side by side; ``"default"``, of Llama 2 and 3 and Mistral, has all first ones before all second ones, as Hugging Face. The other one gives a
            model that loads and computes something else.
        prefix: what the names begin with before ``model`` and ``lm_head``, as ``"language_model."``; MaxText's have none.

    Raises:
        TransformError: if `head_dim` is odd, there is no such `rope_type`, or the prefix does not end with a dot.
    """
    if rope_type not in get_args(RopeType):
        raise TransformError(
            f"llama_to_maxtext(rope_type={rope_type!r}): expected 'default' or 'llama3.1', as MaxText's configuration has it"
        )
    root = math.sqrt(head_dim)
    return _to_maxtext(
        "llama_to_maxtext",
        head_dim,
        prefix,
        [
            *(_rotated_pairs(head_dim) if rope_type == "llama3.1" else []),
            Scale(f"{_MAXTEXT}/decoder/layers/self_attention/query/kernel", 1 / root, root),
        ],
    )


def qwen_to_maxtext(head_dim: int, prefix: str = "") -> list[Transform]:
    """Qwen 2, 2.5 and 3 without experts from Hugging Face to a checkpoint of MaxText, as `llama_to_maxtext`; biases and norms of heads go with them.

    MaxText divides the queries of these as it runs, and rotates halves: all comes back bit-equal. Source: as there.

    Args:
        head_dim: elements of a head; even.
        prefix: as there.

    Raises:
        TransformError: if `head_dim` is odd, or the prefix does not end with a dot.
    """
    own, _ = _prefixes(prefix)
    layer, attention = f"{own}model.layers.{{i}}.self_attn", f"{_MAXTEXT}/decoder/layers/self_attention"
    transforms: list[Transform] = []
    for part in ("query", "key", "value"):
        bias = f"{attention}/{part}/bias"
        transforms += [
            IfPresent(Stack(f"{layer}.{part[0]}_proj.bias", bias)),
            IfPresent(SplitAxis(bias, 1, (-1, head_dim))),
            IfPresent(Transpose(bias, (1, 0, 2))),
        ]
    for part in ("query", "key"):
        transforms.append(IfPresent(Stack(f"{layer}.{part[0]}_norm.weight", f"{attention}/{part}_norm/scale", axis=1)))
    return _to_maxtext("qwen_to_maxtext", head_dim, prefix, transforms)


def _to_maxtext(name: str, head_dim: int, prefix: str, further: list[Transform]) -> list[Transform]:
    """What all decoders have in common, and what one family has besides.

    Raises:
        TransformError
    """
    own, _ = _prefixes(prefix)
    if head_dim < 2 or head_dim % 2:
        raise TransformError(f"{name}(head_dim={head_dim}): give an even number above 0")
    decoder, layer = f"{_MAXTEXT}/decoder", f"{own}model.layers.{{i}}"
    layers, attention = f"{decoder}/layers", f"{decoder}/layers/self_attention"
    kernels = {
        f"{attention}/query/kernel": "self_attn.q_proj",
        f"{attention}/key/kernel": "self_attn.k_proj",
        f"{attention}/value/kernel": "self_attn.v_proj",
        f"{attention}/out/kernel": "self_attn.o_proj",
        f"{layers}/mlp/wi_0/kernel": "mlp.gate_proj",
        f"{layers}/mlp/wi_1/kernel": "mlp.up_proj",
        f"{layers}/mlp/wo/kernel": "mlp.down_proj",
    }
    transforms: list[Transform] = [
        _ExpectHeads(head_dim),
        Refuse(f"{_MAXTEXT}/**"),
        Rename(f"{own}model.embed_tokens.weight", f"{_MAXTEXT}/token_embedder/embedding"),
        Rename(f"{own}model.norm.weight", f"{decoder}/decoder_norm/scale"),
        IfPresent(Rename(f"{own}lm_head.weight", f"{decoder}/logits_dense/kernel")),
        IfPresent(Transpose(f"{decoder}/logits_dense/kernel")),
        Stack(f"{layer}.input_layernorm.weight", f"{layers}/pre_self_attention_layer_norm/scale", axis=1),
        Stack(f"{layer}.post_attention_layernorm.weight", f"{layers}/post_self_attention_layer_norm/scale", axis=1),
    ]
    for path, stored in kernels.items():
        transforms += [Stack(f"{layer}.{stored}.weight", path), Transpose(path, (2, 0, 1))]
    transforms += [SplitAxis(f"{attention}/{part}/kernel", 2, (-1, head_dim)) for part in ("query", "key", "value")]
    return [
        *transforms,
        SplitAxis(f"{attention}/out/kernel", 0, (-1, head_dim)),
        Transpose(f"{attention}/out/kernel", (0, 2, 1, 3)),
        *further,
        Refuse(f"{own}model.**"),
    ]


def _rotated_pairs(head_dim: int) -> list[Transform]:
    """The elements of heads that are rotated together side by side, where all first ones were before all second ones."""
    transforms: list[Transform] = []
    for part in ("query", "key"):
        path = f"{_MAXTEXT}/decoder/layers/self_attention/{part}/kernel"
        transforms += [
            SplitAxis(path, 3, (2, head_dim // 2)),
            Transpose(path, (0, 1, 2, 4, 3)),
            MergeAxes(path, 3, (head_dim // 2, 2)),
        ]
    return transforms


@dataclass(frozen=True, slots=True)
class _ExpectHeads(TreeTransform):
    """An error where a ``config.json`` beside the arrays says that heads have another size: any that divides theirs would fit, and make another model.

    Attributes:
        head_dim: elements of a head. Without such a file nothing tells whether it is right.
    """

    head_dim: int

    def rewrite(self, tree: TreeRewriter) -> None:
        """See `Transform`."""
        try:
            config = tree.config_beside("config.json")
        except TransformError:  # there is none
            return
        nested = config.get("text_config")
        told = nested if isinstance(nested, dict) else config
        found, heads, embedding = (told.get(key) for key in ("head_dim", "num_attention_heads", "hidden_size"))
        if found is None and isinstance(heads, int) and isinstance(embedding, int) and heads > 0:
            found = embedding // heads  # as transformers has it where nothing is said
        if found is not None and found != self.head_dim:
            raise TransformError(
                f"the config.json beside the arrays says that a head has {found!r:.100} elements: give that as head_dim"
            )

    def describe(self) -> str:
        """See `Transform`."""
        return f"expect heads of {self.head_dim} elements, where a config.json tells"

    def inverse(self) -> Transform:
        """See `Transform`."""
        return self


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
        make: gives its transforms, from a prefix of names and what it needs, in that order.
        needs: what it needs besides a prefix: ``head_dim``, ``rope_type``.
    """

    make: Callable[..., list[Transform]]
    needs: tuple[str, ...] = ()


MAPS: Mapping[str, NamedMap] = {
    "bert-to-scanned": NamedMap(bert_to_scanned),
    "llama-to-scanned": NamedMap(llama_to_scanned),
    "llama-to-maxtext": NamedMap(llama_to_maxtext, ("head_dim", "rope_type")),
    "qwen-to-maxtext": NamedMap(qwen_to_maxtext, ("head_dim",)),
}
"""The maps by name; with the two sides of a name exchanged it is the way back."""

_TOLD: Final = {
    "head_dim": "the elements of a head, as the model's config.json has them",
    "rope_type": "'default' or 'llama3.1', as MaxText's configuration has it",
}
"""What a map may need."""


def find_map(
    name: str, head_dim: int | None = None, prefix: str = "", rope_type: RopeType | None = None
) -> list[Transform]:
    """The transforms of a map, or the way back.

    Args:
        name: as in `MAPS`, or with its sides exchanged, as ``scanned-to-bert``.
        head_dim: elements of a head, for the maps that need it; of the others None.
        prefix: what Hugging Face's names begin with, as ``"bert."``.
        rope_type: of MaxText's configuration, likewise; see `llama_to_maxtext`.

    Raises:
        TransformError: if there is none of this name, it lacks what it needs, or has no use for what is given.
    """
    first, _, second = name.partition("-to-")
    back = f"{second}-to-{first}"
    found = MAPS.get(name) or MAPS.get(back)
    if found is None:
        raise TransformError(f"there is no map {name!r}; there are {', '.join(MAPS)}, and each the other way round")
    given: Mapping[str, int | str | None] = {"head_dim": head_dim, "rope_type": rope_type}
    for option, value in given.items():
        if value is None and option in found.needs:
            raise TransformError(f"the map {name!r} needs {option}: give {_TOLD[option]}")
        if value is not None and option not in found.needs:
            raise TransformError(f"the map {name!r} has no use for {option}={value!r}: leave it out")
    transforms = found.make(prefix=prefix, **{option: given[option] for option in found.needs})
    return transforms if name in MAPS else inverse(transforms)
