"""Quantized: an array of a tree with the scales that it is to be multiplied by, and what is made of both."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from ckptcore.errors import TransformError
from ckptcore.loading.quantized_names import is_quantized
from ckptcore.model.tree import TreePath, format_path
from ckptcore.protocols import DerivedArray
from ckptcore_transforms.quantized_arrays import block_scaled, reinterpret
from ckptcore_transforms.tree_rewriter import ArrayLeaf, Leaf, TreeRewriter

__all__ = ["Making", "Quantized", "dequantize", "in_blocks", "listed"]

_SHOWN: Final = 30
"""How many problems an error lists."""

Making: TypeAlias = Callable[[DerivedArray, DerivedArray], DerivedArray]
"""Makes an array of values and scales; a `ValueError` says what does not fit."""


@dataclass(frozen=True, slots=True)
class Quantized:
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


def in_blocks(values: DerivedArray, scales: DerivedArray, block: Sequence[int] | None, dtype: str) -> DerivedArray:
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


def dequantize(
    tree: TreeRewriter, found: Sequence[Quantized], problems: Collection[str], dropped: Collection[TreePath] = ()
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


def listed(problems: Sequence[str]) -> str:
    """Lines of an error: as many problems as a person reads."""
    lines = [f"\n  {problem}" for problem in _bounded(problems)]
    return "".join(lines)


def _bounded(problems: Sequence[str]) -> Iterator[str]:
    yield from problems[:_SHOWN]
    if len(problems) > _SHOWN:
        yield f"and {len(problems) - _SHOWN} more"
