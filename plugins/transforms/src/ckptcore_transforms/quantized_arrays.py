"""Derived arrays of quantised weights: values times the scales of their blocks, bytes as other elements, MXFP4."""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ckptcore.derivations import may_become, place, reshape
from ckptcore.io.elements import copy_elements, plain
from ckptcore.model import ArraySpec, Box, HostArray, dtype_from_name
from ckptcore.protocols import DerivedArray, Part

__all__ = [
    "BlockScaled",
    "Reinterpreted",
    "UnpackedFp4",
    "block_of",
    "block_scaled",
    "mxfp4",
    "reinterpret",
    "unpack_fp4",
]

_SCALES: Final = ("float32", "bfloat16", "float16", "float8_e8m0fnu")
"""The dtypes of scales: float32 has all their values."""

_E8M0: Final = "float8_e8m0fnu"

_MX_BYTES: Final = 16
"""Bytes of a block of 32 numbers of four bits."""

_TILE_ELEMENTS: Final = 1 << 16
"""How many elements are computed at a time: what is between the stored bytes and the result stays in a cache."""

_TURNED_TILE: Final = (512, 128)
"""Extents along the axis that lies in memory in the result, and along the one that lies so in what is stored, where these are two."""

_E4M3FN: Final = dtype_from_name("float8_e4m3fn")

_E4M3FN_BITS: Final = np.int32(-0x7810_0000)
"""Where in a float32 the sign (1 bit), the exponent (4 bits) and the mantissa (3 bits) go: 0x87F00000."""

_E4M3FN_BIAS: Final = np.float32(2.0 ** (127 - 7))
"""What a float32 of these bits lacks: its exponent is counted from -127, theirs from -7."""


_PIECE_BYTES: Final = 1 << 15
"""How many bytes are taken apart at a time: what NumPy makes of them on the way stays in a cache."""

_MADE: Final = "float8_e4m3fn"


@dataclass(frozen=True, slots=True)
class Reinterpreted:
    """An array whose bytes are elements of another dtype.

    Attributes:
        of: the array.
        dtype: the name of the dtype; its elements have as many bytes.
    """

    of: DerivedArray
    dtype: str

    @property
    def spec(self) -> ArraySpec:
        """The array that is made."""
        return ArraySpec(self.of.spec.shape, self.dtype)

    @property
    def inputs(self) -> Sequence[DerivedArray]:
        """The array."""
        return (self.of,)

    def needed(self, box: Box) -> Sequence[Part]:
        """The same box."""
        return (Part(0, box),)

    def views(self, box: Box, out: HostArray) -> Sequence[HostArray]:
        """All of it, as the array has it."""
        return (out.view(self.of.spec.numpy_dtype),)

    def make(self, box: Box, parts: Sequence[HostArray], out: HostArray) -> None:
        """Copy the bytes."""
        place(self.views(box, out), parts)


@dataclass(frozen=True, slots=True)
class UnpackedFp4:
    """The numbers of four bits (E2M1) of which an array has two in each byte, along its last axis.

    The low half of a byte is the first, as Hugging Face's checkpoints have them (openai/gpt-oss, ``gpt_oss/torch/weights.py``). A
    number is a sign, two bits of exponent and one of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and the same below zero (OCP Microscaling
    Formats 1.0, 5.3.3). They are made as elements of ``float8_e4m3fn``, which has them all.

    Attributes:
        of: the array; of ``uint8``.
    """

    of: DerivedArray

    @property
    def spec(self) -> ArraySpec:
        """The array that is made: twice as long along the last axis."""
        *before, last = self.of.spec.shape
        return ArraySpec((*before, 2 * last), _MADE)

    @property
    def inputs(self) -> Sequence[DerivedArray]:
        """The array."""
        return (self.of,)

    def needed(self, box: Box) -> Sequence[Part]:
        """The bytes that have some of it."""
        return (Part(0, Box((*box.start[:-1], box.start[-1] // 2), (*box.stop[:-1], -(-box.stop[-1] // 2)))),)

    def views(self, box: Box, out: HostArray) -> Sequence[HostArray] | None:
        """None: the elements are others."""
        return None

    def make(self, box: Box, parts: Sequence[HostArray], out: HostArray) -> None:
        """Take the bytes apart."""
        (part,) = parts
        first, count = box.start[-1] % 2, box.shape[-1]
        made: HostArray = plain(out) if out.flags.c_contiguous else np.empty(out.shape, np.uint8)
        rows, numbers = part.reshape(-1, part.shape[-1]), made.reshape(-1, count)
        step = max(1, _PIECE_BYTES // rows.shape[1])
        for start in range(0, rows.shape[0], step):
            pairs = np.take(_pairs(), rows[start : start + step], mode="wrap")
            numbers[start : start + step] = pairs.view(np.uint8)[:, first : first + count]
        if not out.flags.c_contiguous:
            plain(out)[...] = made


@functools.cache
def _pairs() -> HostArray:
    """By byte, the two numbers in it: of each the bits that it has in the dtype that is made, in the order of memory."""
    codes = np.arange(16, dtype=np.uint8).view(dtype_from_name("float4_e2m1fn"))
    numbers = codes.astype(np.float32).astype(dtype_from_name(_MADE)).view(np.uint8)
    both = np.stack([np.tile(numbers, 16), np.repeat(numbers, 16)], axis=1)
    pairs: HostArray = np.ascontiguousarray(both).view(np.uint16)[:, 0]
    return pairs


def reinterpret(of: DerivedArray, dtype: str) -> DerivedArray:
    """An array whose bytes are elements of another dtype.

    Args:
        of: the array.
        dtype: a name that `ckptcore.model.dtype_from_name` knows.

    Raises:
        ValueError: if its elements have another number of bytes.
    """
    if of.spec.dtype == dtype:
        return of
    made = ArraySpec(of.spec.shape, dtype)
    if made.numpy_dtype.itemsize != of.spec.numpy_dtype.itemsize:
        raise ValueError(f"{of.spec} does not have elements of as many bytes as {dtype}")
    return Reinterpreted(of, dtype)


def unpack_fp4(of: DerivedArray) -> DerivedArray:
    """The numbers of four bits of which an array has two in each byte: see `UnpackedFp4`.

    Raises:
        ValueError: if it is no array of bytes with an axis.
    """
    if of.spec.dtype not in ("uint8", "int8") or not of.spec.shape:
        raise ValueError(f"{of.spec} is no array of bytes with an axis, each of two numbers of four bits")
    return UnpackedFp4(reinterpret(of, "uint8"))


@dataclass(frozen=True, slots=True)
class BlockScaled:
    """Each element times the scale of its block, computed in float32 and rounded once; what is too large becomes infinite.

    Attributes:
        values: the elements.
        scales: one for each block, along every axis in their order; the last block of an axis may be cut off by its end.
        block: extents of a block, in elements.
        dtype: the name of the dtype of the result.
    """

    values: DerivedArray
    scales: DerivedArray
    block: tuple[int, ...]
    dtype: str

    @property
    def spec(self) -> ArraySpec:
        """The array that is made."""
        return ArraySpec(self.values.spec.shape, self.dtype)

    @property
    def inputs(self) -> Sequence[DerivedArray]:
        """Elements and scales."""
        return (self.values, self.scales)

    def needed(self, box: Box) -> Sequence[Part]:
        """The same box of the elements, and the scales of the blocks that it touches."""
        start = tuple([low // extent for low, extent in zip(box.start, self.block, strict=True)])
        stop = tuple([-(-high // extent) for high, extent in zip(box.stop, self.block, strict=True)])
        return (Part(0, box), Part(1, Box(start, stop)))

    def views(self, box: Box, out: HostArray) -> Sequence[HostArray] | None:
        """None: the elements are others."""
        return None

    def make(self, box: Box, parts: Sequence[HostArray], out: HostArray) -> None:
        """Multiply."""
        values, scales = parts
        start, block = box.start, self.block
        if not values.ndim:  # NumPy gives an element of what has no axes, and no array
            values, scales, out, start, block = values[None], scales[None], out[None], (0,), (1,)
        first = [low % extent for low, extent in zip(start, block, strict=True)]
        tile, is_turned = _tile(out)
        cuts = [
            list(itertools.pairwise(_cuts(*of_axis))) for of_axis in zip(values.shape, tile, block, first, strict=True)
        ]
        with np.errstate(all="ignore"):
            scales = scales.astype(np.float32)
            for bounds in itertools.product(*cuts):
                place = tuple([slice(low, high) for low, high in bounds])
                product = _in_float32(values[place])
                np.multiply(product, _factors(scales, bounds, block, first), out=product)
                if is_turned:  # ml_dtypes casts what lies apart much slower than NumPy copies it
                    copy_elements(out[place], product.astype(out.dtype, copy=False))
                else:
                    np.copyto(out[place], product, casting="unsafe")


def _tile(out: HostArray) -> tuple[Sequence[int], bool]:
    """The extents of what is computed at a time, and whether the last axis is not that along which the result lies in memory."""
    tile, left = [1] * out.ndim, _TILE_ELEMENTS
    axes = list(reversed(range(out.ndim)))
    fast = min(axes, key=lambda axis: abs(out.strides[axis]) if out.shape[axis] > 1 else sys.maxsize)
    is_turned = fast != axes[0] and out.shape[axes[0]] > 1
    if is_turned:
        for axis, most in zip((fast, axes[0]), _TURNED_TILE, strict=True):
            tile[axis] = min(out.shape[axis], most)
            left //= tile[axis]
        axes = [axis for axis in axes[1:] if axis != fast]
    for axis in axes:
        tile[axis] = min(out.shape[axis], left)
        left = max(1, left // tile[axis])
    return tile, is_turned


def _factors(
    scales: HostArray, bounds: Sequence[tuple[int, int]], block: Sequence[int], first: Sequence[int]
) -> HostArray:
    """By element of a tile its scale; along an axis one alone where all are equal.

    Args:
        scales: of the blocks that the box touches.
        bounds: by axis, from where to where the tile is in the box.
        block: extents of a block.
        first: by axis, where in its block the first element of the box is.
    """
    for axis, (low, high) in enumerate(bounds):
        before, size = (slice(None),) * axis, block[axis]
        start, stop = (low + first[axis]) // size, (high + first[axis] - 1) // size + 1
        scales = scales[(*before, slice(start, stop))]
        if stop - start > 1 and size > 1:
            offset = low + first[axis] - start * size
            scales = np.repeat(scales, size, axis)[(*before, slice(offset, offset + high - low))]
    return scales


def _cuts(extent: int, most: int, block: int, first: int) -> list[int]:
    """Where tiles begin along an axis, and where the last one ends: at ends of blocks where these are large."""
    if block < most:
        return [*range(0, extent, most), extent]
    cuts = [0]
    while cuts[-1] < extent:
        left = block - (cuts[-1] + first) % block
        cuts.append(min(cuts[-1] + min(most, left), extent))
    return cuts


@functools.lru_cache(maxsize=32)
def _table(dtype: np.dtype[Any]) -> HostArray:
    """By byte, the value in float32 of an element of a dtype of one byte."""
    table: HostArray = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    return table


def _in_float32(values: HostArray) -> HostArray:
    """Elements in float32, in memory of their own.

    Those of the dtype that nearly all quantised weights have are made of their bits, and other ones of a byte by a table: ml_dtypes casts
    them one by one, which takes twenty times as long.
    """
    if values.dtype.itemsize > 1 or values.dtype.isbuiltin == 1:
        return values.astype(np.float32)
    if values.dtype == _E4M3FN and np.bitwise_and(values.view(np.uint8), 0x7F).max(initial=0) < 0x7F:  # NaN is 0x7F
        bits = values.view(np.int8).astype(np.int32)  # the sign is in all bits before
        np.left_shift(bits, 20, out=bits)
        np.bitwise_and(bits, _E4M3FN_BITS, out=bits)
        numbers: HostArray = bits.view(np.float32)
        np.multiply(numbers, _E4M3FN_BIAS, out=numbers)
        return numbers
    return np.take(_table(values.dtype), values.view(np.uint8), mode="wrap")


def block_of(values: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, ...] | None:
    """The extents of a block where scales tell them: one scale is for all of an axis, or for each index; None where they do not.

    Other numbers tell nothing: of 192 rows two scales are for blocks of 96, and of 128 and what is left.

    Args:
        values, scales: shapes; one scale alone may have any shape.
    """
    if math.prod(scales) == 1:
        return tuple([max(extent, 1) for extent in values])
    if len(values) != len(scales) or any(many not in (1, extent) for extent, many in zip(values, scales, strict=True)):
        return None
    return tuple([max(extent, 1) if many == 1 else 1 for extent, many in zip(values, scales, strict=True)])


def block_scaled(
    values: DerivedArray, scales: DerivedArray, block: Sequence[int] | None, dtype: str = "float32"
) -> DerivedArray:
    """An array times the scales of its blocks: see `BlockScaled`.

    Args:
        values: the elements; of real numbers.
        scales: of floats that float32 has; one for each block, the last ones of an axis cut off, or one alone for all.
        block: extents of a block along the last axes; along the others it is 1. None: what `block_of` tells.
        dtype: of the result; of floats.

    Raises:
        ValueError: if these do not fit.
        UnsupportedLeafError: if there is no such dtype.
    """
    spec, of_scales = values.spec, scales.spec
    if not _is_real(spec.dtype) or not (_is_real(dtype) and may_become(dtype, "float32")):
        raise ValueError(
            f"{spec} does not become {dtype} times scales: expected real numbers, and floats as the result"
        )
    if of_scales.dtype not in _SCALES:
        raise ValueError(f"scales are {of_scales}, and {', '.join(_SCALES)} were expected")
    extents = block_of(spec.shape, of_scales.shape)
    if block is not None:
        if len(block) > len(spec.shape) or min(block, default=1) < 1:
            raise ValueError(f"{spec} has no blocks of {list(block)}")
        given = (1,) * (len(spec.shape) - len(block)) + tuple(block)
        extents = tuple([min(size, max(extent, 1)) for extent, size in zip(spec.shape, given, strict=True)])
        expected = tuple([-(-extent // size) for extent, size in zip(spec.shape, extents, strict=True)])
        if of_scales.shape != expected and not math.prod(expected) == of_scales.size == 1:
            raise ValueError(
                f"scales are {of_scales}, and {list(expected)} were expected: {spec} in blocks of {list(extents)}"
            )
    if extents is None:
        raise ValueError(
            f"scales are {of_scales}, which do not tell the blocks of {spec}: expected one scale, or along each axis 1 or its extent; give the "
            "extents of a block"
        )
    of_blocks = tuple([-(-extent // size) for extent, size in zip(spec.shape, extents, strict=True)])
    if spec.size:
        scales = reshape(scales, of_blocks)
    return BlockScaled(values, scales, extents, dtype)


def _is_real(dtype: str) -> bool:
    return dtype != "bool" and may_become("float32", dtype)


def mxfp4(blocks: DerivedArray, scales: DerivedArray, dtype: str = "float32") -> DerivedArray:
    """Numbers of MXFP4: in blocks of 32 along the last axis, two in each byte (`UnpackedFp4`), times one scale for each block.

    A scale is a power of two, of which a byte has the exponent (E8M0): 2 ** (byte - 127), and no number for 255 (OCP Microscaling Formats
    1.0, 5.4.1). gpt-oss's own code, which meets no such byte, would make infinite numbers of it.

    Args:
        blocks: bytes; (..., blocks, 16) as gpt-oss has them, or (..., 16 * blocks).
        scales: bytes, or ``float8_e8m0fnu``; (..., blocks).
        dtype: of the result; of floats.

    Raises:
        ValueError: if these do not fit.
    """
    of_blocks, of_scales = blocks.spec, scales.spec
    *before, last = of_scales.shape or (0,)
    packed = (*before, last * _MX_BYTES)
    if not of_scales.shape or of_blocks.shape not in (packed, (*before, last, _MX_BYTES)):
        raise ValueError(
            f"{of_blocks} and scales of {of_scales} do not fit: expected {_MX_BYTES} bytes for each scale, along a last axis of their own or with it"
        )
    if of_scales.dtype not in ("uint8", _E8M0):
        raise ValueError(f"scales are {of_scales}, and uint8 or {_E8M0} was expected")
    values = unpack_fp4(reshape(blocks, packed))
    return block_scaled(values, reinterpret(scales, _E8M0), (2 * _MX_BYTES,), dtype)
