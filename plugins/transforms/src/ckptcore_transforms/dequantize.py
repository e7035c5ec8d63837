"""Transforms that dequantise arrays with their scales, by patterns or by a config.json."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from ckptcore.errors import TransformError
from ckptcore.matching.adjustments import BLOCKS, SCALES, SCALES_OF_BLOCKS, WEIGHT, is_quantized, names_of_scales
from ckptcore.model.arrays import ArraySpec
from ckptcore.model.metadata import PLAIN_ARRAY
from ckptcore.model.tree import TreePath, format_path
from ckptcore.protocols import DerivedArray, Transform
from ckptcore_transforms.derived_arrays import permute
from ckptcore_transforms.patterns import Fields, Template, path_text
from ckptcore_transforms.quantization_config import Block, QuantizationConfig, format_problems, read_quantization
from ckptcore_transforms.quantized_arrays import block_scaled, mxfp4, reinterpret
from ckptcore_transforms.transform import DtypeName, Sizes, TreeTransform, not_invertible
from ckptcore_transforms.tree_rewriter import ArrayLeaf, Leaf, NothingMatches, TreeRewriter

ArrayFunction: TypeAlias = Callable[[DerivedArray, DerivedArray], DerivedArray]
"""Creates an array from values and scales. Raises `ValueError` if they do not fit."""


@dataclass(frozen=True, slots=True)
class _Quantized:
    """A quantised array with its scales.

    Attributes:
        values, scales: their paths.
        to: path of the result.
        make: creates the result.
    """

    values: TreePath
    scales: TreePath
    to: TreePath
    make: ArrayFunction


def _in_blocks(values: DerivedArray, scales: DerivedArray, block: Sequence[int] | None, dtype: str) -> DerivedArray:
    """Multiply values by the scales of their blocks.

    Scales of dtype uint8 are powers of two, stored as exponents (E8M0), as in MXFP8.

    Source: transformers' ``Fp8Dequantize`` (``integrations/finegrained_fp8.py``).

    Raises:
        ValueError: if values and scales do not fit together.
    """
    if not is_quantized(values.spec):
        raise ValueError(f"{values.spec} is not quantised, but has scales")
    if scales.spec.dtype == "uint8":
        scales = reinterpret(scales, "float8_e8m0fnu")
    return block_scaled(values, scales, block, dtype)


def _dequantize(
    tree: TreeRewriter, matches: Sequence[_Quantized], problems: Collection[str], dropped: Collection[TreePath] = ()
) -> None:
    """Replace arrays and their scales with the results.

    Args:
        tree: the tree.
        matches: the arrays.
        problems: problems found so far, with paths.
        dropped: leaves to remove together with the scales.

    Raises:
        TransformError: lists every array that cannot be dequantised, and the other problems.
    """
    all_problems = list(problems)
    replacements: dict[TreePath, Mapping[TreePath, Leaf]] = {path: {} for path in dropped}
    for match in matches:
        try:
            array = match.make(tree.array(match.values), tree.array(match.scales))
        except (ValueError, TransformError) as error:
            all_problems.append(f"{format_path(match.values)}: {error}")
            continue
        replacements[match.scales] = {}
        replacements[match.values] = {match.to: ArrayLeaf.of(array)}
    if all_problems:
        arrays = "1 array" if len(all_problems) == 1 else f"{len(all_problems)} arrays"
        raise TransformError(f"{arrays} cannot be dequantised:{format_problems(all_problems)}\nNothing was read")
    tree.replace(replacements)


_LOSSY_REASON: Final = (
    "because the original values and scales are unknown; quantise the result again with the tool of the format"
)


@dataclass(frozen=True, slots=True)
class Dequantize(TreeTransform):
    """Dequantise arrays: each value times the scale of its block, computed in float32 and then rounded.

    Scales are removed.

    ``Dequantize("{name...}", "{name}_scale_inv", block=(128, 128))`` is for checkpoints of
    DeepSeek-V3. A matching array that is not float4, float6, float8, int4 or int8 does not
    change if it has no scales. If it has scales, the transform raises an error. It also raises an
    error if the tree has further data for an array, under its name with ``_zero_point``,
    ``_g_idx``, ``_global_scale`` or ``_scale_2``, because such data changes the values.

    Attributes:
        pattern: template of the quantised arrays.
        scales: template of their scales, with the same fields. Scales are ``float32``,
            ``bfloat16`` or ``float16``, or bytes with exponents of two (E8M0).
        block: extents of a block along the last axes; the last block of an axis can be smaller.
            None: one scale per array, or for each axis either one scale or one scale per index.
        dtype: name of the dtype of the results.
    """

    pattern: str
    scales: str
    block: Sizes | None = None
    dtype: DtypeName = "bfloat16"

    def rewrite(self, tree: TreeRewriter) -> None:
        """Replace the arrays and their scales."""

        def make(values: DerivedArray, scales: DerivedArray) -> DerivedArray:
            return _in_blocks(values, scales, self.block, self.dtype)

        _apply(tree, self.pattern, self.scales, self.pattern, make, is_quantized)

    def describe(self) -> str:
        """Describe the arrays and scales."""
        blocks = "" if self.block is None else f" of blocks of {list(self.block)}"
        return f"dequantise {self.pattern!r} by the scales {self.scales!r}{blocks} to {self.dtype}"

    def inverse(self) -> Transform:
        """Raise an error, because quantisation loses information."""
        raise not_invertible(self, _LOSSY_REASON)


@dataclass(frozen=True, slots=True)
class DequantizeMxfp4(TreeTransform):
    """Dequantise MXFP4 arrays: two 4-bit numbers per byte, times a power of two for each 32 numbers.

    Scales are removed.

    ``DequantizeMxfp4("{name...}_blocks", "{name}_scales", "{name}")`` is for checkpoints of
    gpt-oss. The results have the axes of gpt-oss's own code: (experts, outputs, inputs).
    transformers swaps the last two axes; append a `Transpose` for that.

    Attributes:
        blocks: template of the arrays of bytes: (..., blocks, 16), or (..., 16 * blocks).
        scales: template of their scales, with the same fields: (..., blocks), bytes with exponents
            of two (E8M0).
        to: template of the paths of the results.
        dtype: name of the dtype of the results.
    """

    blocks: str
    scales: str
    to: str
    dtype: DtypeName = "bfloat16"

    def rewrite(self, tree: TreeRewriter) -> None:
        """Replace the arrays and their scales."""

        def make(blocks: DerivedArray, scales: DerivedArray) -> DerivedArray:
            return mxfp4(blocks, scales, self.dtype)

        _apply(tree, self.blocks, self.scales, self.to, make, lambda spec: spec.dtype in ("uint8", "int8"))

    def describe(self) -> str:
        """Describe the arrays and scales."""
        return f"dequantise MXFP4 {self.blocks!r} by the scales {self.scales!r} to {self.dtype} as {self.to!r}"

    def inverse(self) -> Transform:
        """Raise an error, because quantisation loses information."""
        raise not_invertible(self, _LOSSY_REASON)


def _apply(
    tree: TreeRewriter,
    pattern: str,
    scales: str,
    to: str,
    make: ArrayFunction,
    needs_scales: Callable[[ArraySpec], bool],
) -> None:
    """Dequantise the arrays that match a pattern, with the scales that match another one.

    Raises:
        TransformError: lists arrays without scales, scales without arrays, arrays that do not fit their scales, and
            arrays with further data that would change the result.
    """
    values, target = Template(pattern), Template(to)
    scales_template = Template(Template(scales).spanning_as(values))
    if values.fields != scales_template.fields or not values.is_exact or not scales_template.is_exact:
        raise TransformError(f"{values} and {scales_template} must have the same fields, and no '*'")
    of_scales = {_key(fields): (path, fields) for path, fields in tree.present(scales_template).items()}
    matches, problems = [], []
    names = {path_text(path) for path in tree.leaves} - {path_text(path) for path, _ in of_scales.values()}
    for path, fields in tree.present(values).items():
        scale, leaf = of_scales.pop(_key(fields), None), tree.leaves[path]
        if scale is not None:
            matches.append(_Quantized(path, scale[0], target.path(fields), make))
            if unknown := _unknown_data(path_text(path), names):
                problems.append(f"{format_path(path)}: {unknown}")
        elif isinstance(leaf, ArrayLeaf) and needs_scales(leaf.record.spec):
            expected = format_path(scales_template.path(fields))
            problems.append(f"{format_path(path)}: the scales {expected} of {leaf.record.spec} are missing")
    for path, fields in of_scales.values():
        problems.append(f"{format_path(path)}: the array {format_path(values.path(fields))} of these scales is missing")
    if not matches and not problems:
        tree.find(scales_template)  # raises NothingMatches, because there are no scales
    _dequantize(tree, matches, problems)


def _key(fields: Fields) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, field.text) for name, field in fields.items()))


_CONFIG: Final = "config.json"

_ACTIVATIONS: Final = ("input_scale", "activation_scale", "output_scale", "input_scale_ub", "qscale_act")
"""Names of scales for the activations of a quantised module.

These scales do not change weights, and a dequantised module does not use them.
"""

_CACHE: Final = (".k_scale", ".v_scale", ".q_scale")
"""Suffixes of the names of scales for a key-value cache."""

_UNKNOWN: Final = ("_zero_point", "_g_idx", "_global_scale", "_scale_2")
"""Suffixes of the names of unsupported data that changes the results: zero points, column orders, second scales."""


def _unknown_data(text: str, names: Collection[str]) -> str:
    """Return the reason if further data prevents the dequantisation of an array; else an empty text.

    Args:
        text: path of the array, as text.
        names: paths of the tree, as text.
    """
    unknown = [text + name for name in _UNKNOWN if text + name in names]
    return f"unsupported data for this array: {', '.join(map(repr, unknown))}" if unknown else ""


@dataclass(frozen=True, slots=True)
class DequantizeAsConfigured(TreeTransform):
    """Dequantise the weights of a Hugging Face model, by the ``quantization_config`` in its config.json.

    Supports the methods ``fp8``, ``mxfp8``, ``fbgemm_fp8`` and ``mxfp4``, and
    ``compressed-tensors`` with values in the shape of the weight. The results have the names and
    axes of transformers, which swaps axes in the experts of gpt-oss. Scales of the dequantised
    weights and of their activations are removed. Scales of key-value caches are removed only if a
    compressed-tensors config declares a ``kv_cache_scheme``. Modules that the config excludes do
    not change.

    Attributes:
        dtype: name of the dtype of the results.
    """

    dtype: DtypeName = "bfloat16"

    def rewrite(self, tree: TreeRewriter) -> None:
        """Replace the arrays and their scales."""
        config = read_quantization(tree.read_config(_CONFIG))
        if config is None:
            raise NothingMatches(f"{_CONFIG} has no quantization_config")
        search = _Search(config, self.dtype, {path_text(path): path for path in tree.leaves})
        quantized, problems, dropped = [], [], dict[TreePath, None]()
        for text, path in search.by_text.items():
            leaf = tree.leaves[path]
            if not isinstance(leaf, ArrayLeaf) or leaf.record.kind != PLAIN_ARRAY:
                continue
            try:
                array = search.quantized(text, leaf)
            except ValueError as error:
                problems.append(f"{format_path(path)}: {error}")
                continue
            if array is not None:
                quantized.append(array)
                dropped.update(dict.fromkeys(search.of_activations(text)))
        scales = {array.scales for array in quantized}
        if config.has_cache_scales:
            dropped.update({path: None for text, path in search.by_text.items() if text.endswith(_CACHE)})
        if not quantized and not problems:
            raise NothingMatches(f"{_CONFIG} has the method {config.method}, but no array is quantised")
        _dequantize(tree, quantized, problems, [path for path in dropped if path not in scales])

    def describe(self) -> str:
        """Describe the transform."""
        return f"dequantise to {self.dtype} by the quantization_config of {_CONFIG}"

    def inverse(self) -> Transform:
        """Raise an error, because quantisation loses information."""
        raise not_invertible(self, _LOSSY_REASON)


@dataclass(frozen=True, slots=True)
class _Search:
    """Finds quantised arrays and their scales.

    Attributes:
        config: the quantisation.
        dtype: dtype of the results.
        by_text: paths of the leaves, by their text.
    """

    config: QuantizationConfig
    dtype: str
    by_text: Mapping[str, TreePath]

    def quantized(self, text: str, leaf: ArrayLeaf) -> _Quantized | None:
        """Return an array with its scales, or None if it is not quantised.

        Raises:
            ValueError: if its scales are missing or do not fit.
        """
        if self.config.method == "mxfp4":
            return self._of_experts(text, leaf)
        spec = leaf.record.spec
        scales = [name for name in names_of_scales(text) if name in self.by_text]
        if not is_quantized(spec):
            for end in SCALES:
                if text.endswith(WEIGHT + end) and text.removesuffix(end) not in self.by_text:
                    raise ValueError(f"the array {text.removesuffix(end)!r} of these scales is missing")
                if text.endswith(WEIGHT) and text + end in self.by_text:
                    raise ValueError(f"{spec} is not quantised, but has the scales {text + end!r}")
            return None
        if not scales and spec.dtype == "int8" and not text.endswith(WEIGHT):
            return None  # an integer table or mask
        module = text.removesuffix(WEIGHT)
        if self.config.excludes(module):
            if scales:
                raise ValueError(f"{module!r} is listed as not converted, but has the scales {scales[0]!r}")
            return None
        if len(scales) != 1:
            expected = ", ".join(map(repr, names_of_scales(text)))
            raise ValueError(f"expected one of the scales {expected} for {spec}, found {len(scales) or 'none'}")
        if unknown := _unknown_data(text, self.by_text):
            raise ValueError(unknown)
        return _Quantized(
            self.by_text[text], self.by_text[scales[0]], self.by_text[text], self._array_function(spec.dtype)
        )

    def of_activations(self, text: str) -> Iterator[TreePath]:
        """Iterate over the paths of the activation scales in the module of a quantised array."""
        module = text.removesuffix(WEIGHT)
        for name in _ACTIVATIONS:
            for joined in (f"{module}.{name}", f"{text}_{name}"):
                if joined in self.by_text:
                    yield self.by_text[joined]

    def _of_experts(self, text: str, leaf: ArrayLeaf) -> _Quantized | None:
        """Find experts of gpt-oss: ``gate_up_proj_blocks`` and ``gate_up_proj_scales``."""
        stem, scales = text.removesuffix(BLOCKS), text.removesuffix(BLOCKS) + SCALES_OF_BLOCKS
        if stem == text or leaf.record.spec.dtype != "uint8" or self.config.excludes(stem):
            return None
        if scales not in self.by_text:
            raise ValueError(f"the scales {scales!r} of {leaf.record.spec} are missing")
        path = self.by_text[text]
        to = (*path[:-1], str(path[-1]).removesuffix(BLOCKS))
        return _Quantized(path, self.by_text[scales], to, functools.partial(_in_transformers_axes, dtype=self.dtype))

    def _array_function(self, dtype: str) -> ArrayFunction:
        if dtype == "int8" and self.config.packing == "fp4":
            return functools.partial(mxfp4, dtype=self.dtype)
        return functools.partial(_in_one_of, blocks=self.config.blocks, dtype=self.dtype)


def _in_one_of(values: DerivedArray, scales: DerivedArray, blocks: tuple[Block, ...], dtype: str) -> DerivedArray:
    """Multiply values by the scales of their blocks, with the block size that fits.

    Raises:
        ValueError: if no block size fits, or if several fit with different results.
    """
    results: dict[DerivedArray, Block] = {}
    refused: list[str] = []
    for block in blocks:
        try:
            results.setdefault(_in_blocks(values, scales, block, dtype), block)
        except ValueError as error:
            refused.append(str(error))
    if not results:
        raise ValueError("; or ".join(refused))
    if len(results) > 1:
        options = " or ".join(["by its shape" if block is None else str(list(block)) for block in results.values()])
        raise ValueError(f"config.json does not determine the block size: {options}")
    return next(iter(results))


def _in_transformers_axes(blocks: DerivedArray, scales: DerivedArray, dtype: str) -> DerivedArray:
    """Return experts with the axes of transformers: (experts, inputs, outputs).

    Source: ``convert_moe_packed_tensors`` in transformers' ``integrations/mxfp4.py``.
    """
    experts = mxfp4(blocks, scales, dtype)
    axes = range(len(experts.spec.shape))
    if len(axes) != 3:
        raise ValueError(f"expected experts with three axes, found {experts.spec}")
    return permute(experts, (0, 2, 1))
