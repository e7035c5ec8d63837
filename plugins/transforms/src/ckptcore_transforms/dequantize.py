"""Transforms that make numbers of quantised arrays and their scales: by patterns, or by a config.json."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from ckptcore.errors import TransformError
from ckptcore.loading.quantized_names import BLOCKS, SCALES, SCALES_OF_BLOCKS, WEIGHT, is_quantized, names_of_scales
from ckptcore.model.arrays import ArraySpec
from ckptcore.model.metadata import PLAIN_ARRAY
from ckptcore.model.tree import TreePath, format_path
from ckptcore.protocols import DerivedArray, Transform
from ckptcore_transforms.arguments import expect_dtype, expect_ints, expect_text
from ckptcore_transforms.derived_arrays import permute
from ckptcore_transforms.patterns import Fields, Template, path_text
from ckptcore_transforms.quantization_config import Block, QuantizationConfig, listed, read_quantization
from ckptcore_transforms.quantized_arrays import block_scaled, mxfp4, reinterpret
from ckptcore_transforms.transform import TreeTransform, not_invertible
from ckptcore_transforms.tree_rewriter import ArrayLeaf, Leaf, NothingMatches, TreeRewriter

__all__ = ["Dequantize", "DequantizeAsConfigured", "DequantizeMxfp4"]

Making: TypeAlias = Callable[[DerivedArray, DerivedArray], DerivedArray]
"""Makes an array of values and scales; a `ValueError` says what does not fit."""


@dataclass(frozen=True, slots=True)
class _Quantized:
    """An array with its scales.

    Attributes:
        values, scales: where they are.
        to: where what is made of them goes.
        make: makes it.
    """

    values: TreePath
    scales: TreePath
    to: TreePath
    make: Making


def _in_blocks(values: DerivedArray, scales: DerivedArray, block: Sequence[int] | None, dtype: str) -> DerivedArray:
    """Values times the scales of their blocks; scales that are bytes are exponents of powers of two (E8M0), as MXFP8's are.

    Source: transformers' ``Fp8Dequantize`` (``integrations/finegrained_fp8.py``).

    Raises:
        ValueError: if they do not fit.
    """
    if not is_quantized(values.spec):
        raise ValueError(f"it is {values.spec}, which is not quantised, and scales stand beside it")
    if scales.spec.dtype == "uint8":
        scales = reinterpret(scales, "float8_e8m0fnu")
    return block_scaled(values, scales, block, dtype)


def _dequantize(
    tree: TreeRewriter, found: Sequence[_Quantized], problems: Collection[str], dropped: Collection[TreePath] = ()
) -> None:
    """Put what is made of arrays and their scales in their place.

    Args:
        tree: the tree.
        found: the arrays.
        problems: what is wrong already, told by path.
        dropped: leaves that go with the scales.

    Raises:
        TransformError: lists every array that cannot be made, with the other problems.
    """
    told = list(problems)
    made: dict[TreePath, Mapping[TreePath, Leaf]] = {path: {} for path in dropped}
    for one in found:
        try:
            array = one.make(tree.array(one.values), tree.array(one.scales))
        except (ValueError, TransformError) as error:
            told.append(f"{format_path(one.values)}: {error}")
            continue
        made[one.scales] = {}
        made[one.values] = {one.to: ArrayLeaf.of(array)}
    if told:
        arrays = "1 array" if len(told) == 1 else f"{len(told)} arrays"
        raise TransformError(f"{arrays} cannot be dequantised:{listed(told)}\nNothing was read")
    tree.replace(made)


NO_WAY_BACK: Final = "for the numbers do not tell what they were rounded to, and by which scales; quantise them again with the tool of the format"


@dataclass(frozen=True, slots=True)
class Dequantize(TreeTransform):
    """Quantised arrays as numbers: each value times the scale of its block, computed in float32 and rounded once. The scales are taken away.

    ``Dequantize("{name...}", "{name}_scale_inv", block=(128, 128))`` is for DeepSeek-V3's checkpoints. Arrays that match and are
    not quantised stay as they are: those of other dtypes than float8 and int8.

    Attributes:
        pattern: a template of the quantised arrays.
        scales: a template of their scales, with the same fields; of floats, or bytes that are exponents of powers of two (E8M0).
        block: the extents of a block along the last axes; the last block of an axis may be cut off. None: there is one scale for an array, or
            along each axis one for all of it or for each index.
        dtype: the name of the dtype of the result.
    """

    pattern: str
    scales: str
    block: Sequence[int] | None = None
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        expect_text(self, "pattern")
        expect_text(self, "scales")
        if self.block is not None:
            expect_ints(self, "block", least=1)
        object.__setattr__(self, "dtype", expect_dtype(self, "dtype"))

    def rewrite(self, tree: TreeRewriter) -> None:
        """See `Transform`."""

        def make(values: DerivedArray, scales: DerivedArray) -> DerivedArray:
            return _in_blocks(values, scales, self.block, self.dtype)

        _apply(tree, self.pattern, self.scales, self.pattern, make, is_quantized)

    def describe(self) -> str:
        """See `Transform`."""
        blocks = "" if self.block is None else f" of blocks of {list(self.block)}"
        return f"dequantise {self.pattern!r} by the scales {self.scales!r}{blocks} to {self.dtype}"

    def inverse(self) -> Transform:
        """See `Transform`."""
        raise not_invertible(self, NO_WAY_BACK)


@dataclass(frozen=True, slots=True)
class DequantizeMxfp4(TreeTransform):
    """Arrays of MXFP4 as numbers: two of four bits in each byte, times a power of two for each 32 of them. The scales are taken away.

    ``DequantizeMxfp4("{name...}_blocks", "{name}_scales", "{name}")`` is for gpt-oss's checkpoints, and gives the arrays as gpt-oss's own
    code has them: (experts, outputs, inputs). transformers turns the last two axes; so does `Transpose` behind it.

    Attributes:
        blocks: a template of the arrays of bytes: (..., blocks, 16), or (..., 16 * blocks).
        scales: a template of their scales, with the same fields: (..., blocks), bytes that are exponents of powers of two (E8M0).
        to: a template of where the results go.
        dtype: the name of the dtype of the result.
    """

    blocks: str
    scales: str
    to: str
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for name in ("blocks", "scales", "to"):
            expect_text(self, name)
        object.__setattr__(self, "dtype", expect_dtype(self, "dtype"))

    def rewrite(self, tree: TreeRewriter) -> None:
        """See `Transform`."""

        def make(blocks: DerivedArray, scales: DerivedArray) -> DerivedArray:
            return mxfp4(blocks, scales, self.dtype)

        _apply(tree, self.blocks, self.scales, self.to, make, lambda spec: spec.dtype in ("uint8", "int8"))

    def describe(self) -> str:
        """See `Transform`."""
        return f"dequantise MXFP4 {self.blocks!r} by the scales {self.scales!r} to {self.dtype} as {self.to!r}"

    def inverse(self) -> Transform:
        """See `Transform`."""
        raise not_invertible(self, NO_WAY_BACK)


def _apply(
    tree: TreeRewriter, pattern: str, scales: str, to: str, make: Making, needs_scales: Callable[[ArraySpec], bool]
) -> None:
    """Make numbers of what matches a pattern and the scales that match another one.

    Raises:
        TransformError: lists what lacks the other, and what does not fit.
    """
    values, target = Template(pattern), Template(to)
    beside = Template(Template(scales).spanning_as(values))
    if values.fields != beside.fields or not values.is_exact or not beside.is_exact:
        raise TransformError(f"{values} and {beside} are to have the same fields, and no '*'")
    of_scales = {_key(fields): (path, fields) for path, fields in tree.present(beside).items()}
    found, problems = [], []
    for path, fields in tree.present(values).items():
        scale, leaf = of_scales.pop(_key(fields), None), tree.leaves[path]
        if scale is not None:
            found.append(_Quantized(path, scale[0], target.path(fields), make))
        elif isinstance(leaf, ArrayLeaf) and needs_scales(leaf.record.spec):
            expected = format_path(beside.path(fields))
            problems.append(
                f"{format_path(path)}: it is {leaf.record.spec}, and {expected} is not there to be its scales"
            )
    for path, fields in of_scales.values():
        problems.append(
            f"{format_path(path)}: it is there, and {format_path(values.path(fields))} is not, for which it would be the scales"
        )
    if not found and not problems:
        tree.find(beside)
    _dequantize(tree, found, problems)


def _key(fields: Fields) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, found.text) for name, found in fields.items()))


_CONFIG: Final = "config.json"

_ACTIVATIONS: Final = ("input_scale", "activation_scale", "output_scale", "input_scale_ub", "qscale_act")
"""Scales for what runs through a quantised module: they say nothing of its weights, and a module of numbers has none."""

_CACHE: Final = (".k_scale", ".v_scale", ".q_scale")
"""Scales for a cache of keys and values."""

_UNKNOWN: Final = ("_zero_point", "_g_idx", "_global_scale", "_scale_2")
"""What makes other numbers of values and scales than their products: zero points, orders of columns, a second scale."""


@dataclass(frozen=True, slots=True)
class DequantizeAsConfigured(TreeTransform):
    """The quantised weights of a Hugging Face model as numbers, by the ``quantization_config`` of the config.json that stands beside them.

    Of the methods ``fp8``, ``mxfp8``, ``fbgemm_fp8``, ``mxfp4`` and, where values lie in the shape of the weight, ``compressed-tensors``. The
    results have the names and axes that transformers gives them: the experts of gpt-oss are turned. Scales of weights, of activations
    and of caches are taken away; modules that are listed as not converted stay as they are.

    Attributes:
        dtype: the name of the dtype of the results.
    """

    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", expect_dtype(self, "dtype"))

    def rewrite(self, tree: TreeRewriter) -> None:
        """See `Transform`."""
        config = read_quantization(tree.config_beside(_CONFIG))
        if config is None:
            raise NothingMatches(f"{_CONFIG} has no quantization_config")
        search = _Search(config, self.dtype, {path_text(path): path for path in tree.leaves})
        found, problems, dropped = [], [], dict[TreePath, None]()
        for text, path in search.by_text.items():
            leaf = tree.leaves[path]
            if not isinstance(leaf, ArrayLeaf) or leaf.record.kind != PLAIN_ARRAY:
                continue
            try:
                one = search.quantized(text, leaf)
            except ValueError as error:
                problems.append(f"{format_path(path)}: {error}")
                continue
            if one is not None:
                found.append(one)
                dropped.update(dict.fromkeys(search.of_activations(text)))
        scales = {one.scales for one in found}
        if config.has_cache_scales:
            dropped.update({path: None for text, path in search.by_text.items() if text.endswith(_CACHE)})
        if not found and not problems:
            raise NothingMatches(f"{_CONFIG} says {config.method}, and no array is quantised so")
        _dequantize(tree, found, problems, [path for path in dropped if path not in scales])

    def describe(self) -> str:
        """See `Transform`."""
        return f"dequantise what {_CONFIG} says is quantised to {self.dtype}"

    def inverse(self) -> Transform:
        """See `Transform`."""
        raise not_invertible(self, NO_WAY_BACK)


@dataclass(frozen=True, slots=True)
class _Search:
    """The search for what belongs to arrays.

    Attributes:
        config: how they are quantised.
        dtype: of the results.
        by_text: the leaves, by the text of their paths.
    """

    config: QuantizationConfig
    dtype: str
    by_text: Mapping[str, TreePath]

    def quantized(self, text: str, leaf: ArrayLeaf) -> _Quantized | None:
        """An array with its scales; None if it is not quantised.

        Raises:
            ValueError: if it is, and that does not fit.
        """
        if self.config.method == "mxfp4":
            return self._of_experts(text, leaf)
        spec = leaf.record.spec
        scales = [name for name in names_of_scales(text) if name in self.by_text]
        if not is_quantized(spec):
            for end in SCALES:
                if text.endswith(WEIGHT + end) and text.removesuffix(end) not in self.by_text:
                    raise ValueError(f"{text.removesuffix(end)!r} is not there, for which it would be the scales")
                if text.endswith(WEIGHT) and text + end in self.by_text:
                    raise ValueError(f"it is {spec}, which is not quantised, and {text + end!r} stands beside it")
            return None
        if not scales and spec.dtype == "int8" and not text.endswith(WEIGHT):
            return None  # a table or a mask of whole numbers
        module = text.removesuffix(WEIGHT)
        if self.config.keeps(module):
            if scales:
                raise ValueError(f"{module!r} is listed as not converted, and {scales[0]!r} stands beside it")
            return None
        if len(scales) != 1:
            expected = ", ".join(map(repr, names_of_scales(text)))
            raise ValueError(f"it is {spec}, and of {expected} {len(scales) or 'none'} are there; one was expected")
        unknown = [text + name for name in _UNKNOWN if text + name in self.by_text]
        if unknown:
            raise ValueError(f"{', '.join(map(repr, unknown))} belong to it, which are not known")
        return _Quantized(self.by_text[text], self.by_text[scales[0]], self.by_text[text], self._making(spec.dtype))

    def of_activations(self, text: str) -> Iterator[TreePath]:
        """The scales for what runs through the module of a quantised array."""
        module = text.removesuffix(WEIGHT)
        for name in _ACTIVATIONS:
            for joined in (f"{module}.{name}", f"{text}_{name}"):
                if joined in self.by_text:
                    yield self.by_text[joined]

    def _of_experts(self, text: str, leaf: ArrayLeaf) -> _Quantized | None:
        """The experts of gpt-oss: ``gate_up_proj_blocks`` and ``gate_up_proj_scales``."""
        stem, scales = text.removesuffix(BLOCKS), text.removesuffix(BLOCKS) + SCALES_OF_BLOCKS
        if stem == text or leaf.record.spec.dtype != "uint8" or self.config.keeps(stem):
            return None
        if scales not in self.by_text:
            raise ValueError(f"it is {leaf.record.spec}, and {scales!r} is not there to be its scales")
        path = self.by_text[text]
        to = (*path[:-1], str(path[-1]).removesuffix(BLOCKS))
        return _Quantized(path, self.by_text[scales], to, functools.partial(_turned, dtype=self.dtype))

    def _making(self, dtype: str) -> Making:
        if dtype == "int8" and self.config.packing == "fp4":
            return functools.partial(mxfp4, dtype=self.dtype)
        return functools.partial(_in_one_of, blocks=self.config.blocks, dtype=self.dtype)


def _in_one_of(values: DerivedArray, scales: DerivedArray, blocks: tuple[Block, ...], dtype: str) -> DerivedArray:
    """Values times the scales of the blocks that fit; where several do, they are the same ones.

    Raises:
        ValueError: if none does, or they differ.
    """
    made: dict[DerivedArray, Block] = {}
    refused: list[str] = []
    for block in blocks:
        try:
            made.setdefault(_in_blocks(values, scales, block, dtype), block)
        except ValueError as error:
            refused.append(str(error))
    if not made:
        raise ValueError("; or ".join(refused))
    if len(made) > 1:
        told = " or ".join(["by its shape" if block is None else str(list(block)) for block in made.values()])
        raise ValueError(f"config.json does not tell of which blocks it is: {told}")
    return next(iter(made))


def _turned(blocks: DerivedArray, scales: DerivedArray, dtype: str) -> DerivedArray:
    """Experts with the axes that transformers gives them: (experts, inputs, outputs).

    Source: ``convert_moe_packed_tensors`` in transformers' ``integrations/mxfp4.py``.
    """
    made = mxfp4(blocks, scales, dtype)
    axes = range(len(made.spec.shape))
    if len(axes) != 3:
        raise ValueError(f"it would be {made.spec}, and experts of matrices were expected")
    return permute(made, (0, 2, 1))
