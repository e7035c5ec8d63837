"""Transforms that make numbers of quantised arrays and the scales that stand beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from ckptcore.errors import TransformError
from ckptcore.loading.quantized_names import is_quantized
from ckptcore.model.arrays import ArraySpec
from ckptcore.model.tree import format_path
from ckptcore.protocols import DerivedArray, Transform
from ckptcore_transforms.arguments import expect_dtype, expect_ints, expect_text
from ckptcore_transforms.patterns import Fields, Template
from ckptcore_transforms.quantized import Making, Quantized, dequantize, in_blocks
from ckptcore_transforms.quantized_arrays import mxfp4
from ckptcore_transforms.transform import TreeTransform, not_invertible
from ckptcore_transforms.tree_rewriter import ArrayLeaf, TreeRewriter

__all__ = ["NO_WAY_BACK", "Dequantize", "DequantizeMxfp4"]

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
            return in_blocks(values, scales, self.block, self.dtype)

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
            found.append(Quantized(path, scale[0], target.path(fields), make))
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
    dequantize(tree, found, problems)


def _key(fields: Fields) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, found.text) for name, found in fields.items()))
