"""Ready-made transforms between the weights of model families in different libraries.

Each function returns the transforms from Hugging Face's names; `ckptcore_transforms.inverse` returns the reverse
transforms. Unknown leaves outside of the model, such as classification heads, do not change. Unknown leaves of the
model itself are an error in both directions. For this, each list ends with a `Refuse`, and has another one near its
start, which is near the end of the inverse.

Hugging Face's names are those of modules of ``transformers``, with kernels as ``[outputs,
inputs]``, as in PyTorch. *Scanned* is a tree of Flax NNX with layers run by ``jax.lax.scan``: one
array for all layers, with layers as the first axis, ``kernel`` as ``[inputs, outputs]``,
``embedding`` and ``scale``.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

from ckptcore.errors import TransformError
from ckptcore.protocols import Transform
from ckptcore_transforms.array_transforms import MergeAxes, Scale, SplitAxis, Transpose
from ckptcore_transforms.joins import Stack
from ckptcore_transforms.paths import Refuse, Rename
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
"""Values of ``rope_type`` in the configuration of MaxText."""

_MAXTEXT: Final = "params/params"
"""Path of the weights in a checkpoint of MaxText: the parameters of its train state, and a Flax collection."""


def bert_to_scanned(prefix: str = "") -> list[Transform]:
    """Return transforms of BERT encoders from Hugging Face to a scanned tree.

    For ``BertModel``, also MiniLM, BGE, E5 and RoBERTa. Results have paths such as
    ``encoder/layers/attention/query/kernel``, ``encoder/layers/intermediate/kernel`` or
    ``embeddings/word_embeddings/embedding``.

    Args:
        prefix: prefix of the encoder's names, such as ``"bert."`` for a model with a head. The tree
            gets the same prefix. Heads do not change.

    Raises:
        TransformError: for a prefix that does not end with a dot.
    """
    own, to = _prefixes(prefix)
    layer, layers = f"{own}encoder.layer.{{i}}", f"{to}encoder/layers"
    dense = {"attention.output": "attention/output", "intermediate": "intermediate", "output": "output"}
    norms = {"attention.output.LayerNorm": "attention/norm", "output.LayerNorm": "norm"}
    stacks: list[Transform] = []
    for stored, new in (("weight", "kernel"), ("bias", "bias")):
        stacks.append(Stack(f"{layer}.attention.self.{{part}}.{stored}", f"{layers}/attention/{{part}}/{new}"))
        stacks.extend(
            [Stack(f"{layer}.{name}.dense.{stored}", f"{layers}/{path}/{new}") for name, path in dense.items()]
        )
        stacks.append(IfPresent(Rename(f"{own}pooler.dense.{stored}", f"{to}pooler/{new}")))
    for stored, new in (("weight", "scale"), ("bias", "bias")):
        stacks.extend([Stack(f"{layer}.{name}.{stored}", f"{layers}/{path}/{new}") for name, path in norms.items()])
        stacks.append(Rename(f"{own}embeddings.LayerNorm.{stored}", f"{to}embeddings/norm/{new}"))
    return [
        Refuse(f"{to}encoder/**"),
        *stacks,
        Rename(f"{own}embeddings.{{table}}_embeddings.weight", f"{to}embeddings/{{table}}_embeddings/embedding"),
        IfPresent(Rename(f"{own}embeddings.position_ids", f"{to}embeddings/position_ids")),
        Transpose(f"{to}{{module...}}/kernel"),
        Refuse(f"{own}encoder.**"),
    ]


def llama_to_scanned(prefix: str = "") -> list[Transform]:
    """Return transforms of Llama and similar models (Mistral, Qwen 2 and 3) from Hugging Face to a scanned tree.

    Results have paths such as ``layers/self_attn/q_proj/kernel``,
    ``layers/mlp/gate_proj/kernel`` or ``embed_tokens/embedding``. ``lm_head`` is missing in models
    with tied weights.

    Args:
        prefix: prefix before ``model`` and ``lm_head``, such as ``"language_model."``. The tree
            gets the same prefix.

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
    """Return transforms of Llama 2 and 3 and Mistral from Hugging Face to MaxText, with scanned
    layers and ``param_scan_axis`` 1.

    Results have paths such as ``params/params/decoder/layers/self_attention/query/kernel`` or
    ``params/params/token_embedder/embedding``. ``lm_head`` is missing in models with tied weights.

    MaxText stores query kernels divided by the square root of `head_dim`, instead of dividing
    queries at run time. The inverse restores equal bits if the root is a power of two. Otherwise
    each direction rounds once, as MaxText's ``to_maxtext`` and ``to_huggingface`` do. Source:
    AI-Hypercomputer/maxtext, ``checkpoint_conversion``.

    Args:
        head_dim: number of elements of a head; even. A load fails if a ``config.json`` of the model
            has another value.
        rope_type: ``rope_type`` of MaxText's configuration. It determines the order of a head's elements, which are
            rotated in pairs. ``"llama3.1"`` stores the two elements of a pair next to each other. MaxText also uses
            this order if its ``model_name`` starts with ``llama3.1``. ``"default"``, for Llama 2 and 3 and Mistral,
            stores the first elements of all pairs before the second elements, as Hugging Face does. With the wrong
            type the load succeeds, but the model computes wrong results.
        prefix: prefix before ``model`` and ``lm_head``, such as ``"language_model."``. The names of
            MaxText have no prefix.

    Raises:
        TransformError: if `head_dim` is odd, `rope_type` is unknown, or the prefix does not end
            with a dot.
    """
    if rope_type not in get_args(RopeType):
        raise TransformError(
            f"llama_to_maxtext(rope_type={rope_type!r}): expected 'default' or 'llama3.1', as "
            "in MaxText's configuration"
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
    """Return transforms of Qwen 2, 2.5 and 3 without experts from Hugging Face to MaxText, with
    biases and norms of heads.

    See `llama_to_maxtext`. For these models MaxText divides queries at run time, and keeps
    Hugging Face's order of elements in a head. So the inverse restores equal bits.

    Args:
        head_dim: number of elements of a head; even.
        prefix: see `llama_to_maxtext`.

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
    """Return the transforms that all decoders share, with `further` for one model family.

    Raises:
        TransformError: if `head_dim` is not an even positive number, or the prefix is invalid.
    """
    own, _ = _prefixes(prefix)
    if head_dim < 2 or head_dim % 2:
        raise TransformError(f"{name}(head_dim={head_dim}): expected an even positive number")
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
    """Return transforms that move rotated pairs of a head's elements next to each other."""
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
    """Raise an error if the config.json of the model has another head size.

    A wrong size that divides the extents of the kernels would fit, but result in another model.

    Attributes:
        head_dim: number of elements of a head. Not checked without a config.json.
    """

    head_dim: int

    def rewrite(self, tree: TreeRewriter) -> None:
        """Check the config.json."""
        try:
            config = tree.read_config("config.json")
        except TransformError:  # there is no config.json
            return
        nested = config.get("text_config")
        settings = nested if isinstance(nested, dict) else config
        head_dim, heads, embedding = (settings.get(key) for key in ("head_dim", "num_attention_heads", "hidden_size"))
        if head_dim is None and isinstance(heads, int) and isinstance(embedding, int) and heads > 0:
            head_dim = embedding // heads  # the default of transformers
        if head_dim is not None and head_dim != self.head_dim:
            raise TransformError(
                f"the config.json of the model has heads of {head_dim!r:.100} elements: set head_dim to that"
            )

    def describe(self) -> str:
        """Describe the check."""
        return f"expect heads of {self.head_dim} elements, if there is a config.json"

    def inverse(self) -> Transform:
        """Return the transform itself."""
        return self


def _prefixes(prefix: str) -> tuple[str, str]:
    """Return the prefix of Hugging Face's names in a template, and the same prefix as a path.

    Raises:
        TransformError: if a nonempty prefix does not end with a dot, or contains an empty name or
            one of ``*{}/``.
    """
    if prefix and (not prefix.endswith(".") or "" in prefix[:-1].split(".") or set(prefix) & set("*{}/")):
        raise TransformError(
            f"{prefix!r} is not a prefix of names: expected text that ends with a dot, such as 'bert.'"
        )
    return prefix, prefix.replace(".", "/")


@dataclass(frozen=True, slots=True)
class NamedMap:
    """A map with a name, for the command line.

    Attributes:
        make: returns the transforms. Called with the keyword arguments ``prefix`` and those in
            `needs`.
        needs: names of the required options: ``head_dim``, ``rope_type``.
    """

    make: Callable[..., list[Transform]]
    needs: tuple[str, ...] = ()


MAPS: Mapping[str, NamedMap] = {
    "bert-to-scanned": NamedMap(bert_to_scanned),
    "llama-to-scanned": NamedMap(llama_to_scanned),
    "llama-to-maxtext": NamedMap(llama_to_maxtext, ("head_dim", "rope_type")),
    "qwen-to-maxtext": NamedMap(qwen_to_maxtext, ("head_dim",)),
}
"""Maps by name. The name of the inverse has the two sides exchanged: ``scanned-to-bert``."""

_OPTION_HINTS: Final = {
    "head_dim": "the number of elements of a head, as in the model's config.json",
    "rope_type": "'default' or 'llama3.1', as in MaxText's configuration",
}
"""For each required option of maps, its description in an error."""


def find_map(
    name: str, head_dim: int | None = None, prefix: str = "", rope_type: RopeType | None = None
) -> list[Transform]:
    """Return the transforms of a map or its inverse.

    Args:
        name: a name in `MAPS`, or of an inverse, such as ``scanned-to-bert``.
        head_dim: number of elements of a head, for maps that require it, else None.
        prefix: prefix of Hugging Face's names, such as ``"bert."``.
        rope_type: as in MaxText's configuration, for maps that require it, else None; see
            `llama_to_maxtext`.

    Raises:
        TransformError: for an unknown name, a missing option, or an option that is not used.
    """
    first, _, second = name.partition("-to-")
    back = f"{second}-to-{first}"
    named_map = MAPS.get(name) or MAPS.get(back)
    if named_map is None:
        names = [*MAPS, *["-to-".join(reversed(known.split("-to-"))) for known in MAPS]]
        near = difflib.get_close_matches(name[:100], names, 1, 0.9)
        meant = f"; did you mean {near[0]!r}?" if near else "."
        raise TransformError(f"unknown map {name!r:.100}{meant} Maps: {', '.join(names)}")
    given: Mapping[str, int | str | None] = {"head_dim": head_dim, "rope_type": rope_type}
    for option, value in given.items():
        if value is None and option in named_map.needs:
            raise TransformError(f"the map {name!r} requires {option}: set {_OPTION_HINTS[option]}")
        if value is not None and option not in named_map.needs:
            raise TransformError(f"the map {name!r} does not use {option}={value!r}: remove it")
    transforms = named_map.make(prefix=prefix, **{option: given[option] for option in named_map.needs})
    return transforms if name in MAPS else inverse(transforms)
