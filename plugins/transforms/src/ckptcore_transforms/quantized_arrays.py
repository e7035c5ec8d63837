"""Derived arrays of quantised weights: block-scaled values, reinterpreted bytes, MXFP4."""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ckptcore.derivations import accepts_kind_of, copy_parts, reshape
from ckptcore.io.elements import copy_elements, plain
from ckptcore.model import ArraySpec, Box, HostArray, dtype_from_name
from ckptcore.protocols import DerivedArray, Part

_SCALES: Final = ("float32", "bfloat16", "float16", "float8_e8m0fnu")
"""Supported dtypes of scales. float32 represents all their values."""

_E8M0: Final = "float8_e8m0fnu"

_MX_BYTES: Final = 16
"""Bytes of a block of 32 4-bit numbers."""

_TILE_ELEMENTS: Final = 1 << 16
"""Elements computed at a time, so that intermediate data stays in a cache."""

_TRANSPOSED_TILE: Final = (512, 128)
"""Extents of a tile along the fastest axis of the result and the fastest axis of the stored array, if they differ."""

_E4M3FN: Final = dtype_from_name("float8_e4m3fn")

_E4M3FN_BITS: Final = np.int32(-0x7810_0000)
"""Mask 0x87F00000: the bits of a float32 that take sign (1), exponent (4) and mantissa (3) of a float8_e4m3fn."""

_E4M3FN_BIAS: Final = np.float32(2.0 ** (127 - 7))
"""Factor that corrects the exponent of such a float32: its bias is 127 instead of 7."""


_PIECE_BYTES: Final = 1 << 15
"""Bytes unpacked at a time, so that intermediate data stays in a cache."""

_UNPACKED_DTYPE: Final = "float8_e4m3fn"


@dataclass(frozen=True, slots=True)
class Reinterpreted:
    """An array whose bytes are reinterpreted as another dtype.

    Attributes:
        of: the input.
        dtype: name of the dtype, with the same item size.
    """

    of: DerivedArray
    dtype: str

    @property
    def spec(self) -> ArraySpec:
        """Spec of the result."""
        return ArraySpec(self.of.spec.shape, self.dtype)

    @property
    def inputs(self) -> Sequence[DerivedArray]:
        """The input."""
        return (self.of,)

    def needed(self, box: Box) -> Sequence[Part]:
        """Return the same box."""
        return (Part(0, box),)

    def views(self, box: Box, out: HostArray) -> Sequence[HostArray]:
        """Return `out` in the dtype of the input."""
        return (out.view(self.of.spec.numpy_dtype),)

    def make(self, box: Box, parts: Sequence[HostArray], out: HostArray) -> None:
        """Copy the bytes."""
        copy_parts(self.views(box, out), parts)


@dataclass(frozen=True, slots=True)
class UnpackedFp4:
    """Numbers of four bits (E2M1), unpacked from two per byte along the last axis.

    The low half of a byte is the first number, as in Hugging Face's checkpoints (openai/gpt-oss,
    ``gpt_oss/torch/weights.py``). A number has a sign, two bits of exponent and one of mantissa: 0,
    0.5, 1, 1.5, 2, 3, 4, 6 and their negatives (OCP Microscaling Formats 1.0, 5.3.3). The result is
    ``float8_e4m3fn``, which represents them all.

    Attributes:
        of: the input, ``uint8``.
    """

    of: DerivedArray

    @property
    def spec(self) -> ArraySpec:
        """Spec of the result, twice as long along the last axis."""
        *before, last = self.of.spec.shape
        return ArraySpec((*before, 2 * last), _UNPACKED_DTYPE)

    @property
    def inputs(self) -> Sequence[DerivedArray]:
        """The input."""
        return (self.of,)

    def needed(self, box: Box) -> Sequence[Part]:
        """Return the bytes that contain the box."""
        return (Part(0, Box((*box.start[:-1], box.start[-1] // 2), (*box.stop[:-1], -(-box.stop[-1] // 2)))),)

    def views(self, box: Box, out: HostArray) -> Sequence[HostArray] | None:
        """Return None, because elements are computed."""
        return None

    def make(self, box: Box, parts: Sequence[HostArray], out: HostArray) -> None:
        """Unpack the bytes."""
        (part,) = parts
        first, count = box.start[-1] % 2, box.shape[-1]
        unpacked: HostArray = plain(out) if out.flags.c_contiguous else np.empty(out.shape, np.uint8)
        rows, numbers = part.reshape(-1, part.shape[-1]), unpacked.reshape(-1, count)
        step = max(1, _PIECE_BYTES // rows.shape[1])
        for start in range(0, rows.shape[0], step):
            pairs = np.take(_pairs(), rows[start : start + step], mode="wrap")
            numbers[start : start + step] = pairs.view(np.uint8)[:, first : first + count]
        if not out.flags.c_contiguous:
            plain(out)[...] = unpacked


@functools.cache
def _pairs() -> HostArray:
    """Return a table from each byte to the bits of its two numbers in the result's dtype, in memory order."""
    codes = np.arange(16, dtype=np.uint8).view(dtype_from_name("float4_e2m1fn"))
    numbers = codes.astype(np.float32).astype(dtype_from_name(_UNPACKED_DTYPE)).view(np.uint8)
    both = np.stack([np.tile(numbers, 16), np.repeat(numbers, 16)], axis=1)
    pairs: HostArray = np.ascontiguousarray(both).view(np.uint16)[:, 0]
    return pairs


def reinterpret(of: DerivedArray, dtype: str) -> DerivedArray:
    """Reinterpret the bytes of an array as another dtype.

    Args:
        of: the input.
        dtype: a name that `ckptcore.model.dtype_from_name` supports.

    Raises:
        ValueError: if the item size differs.
    """
    if of.spec.dtype == dtype:
        return of
    made = ArraySpec(of.spec.shape, dtype)
    if made.numpy_dtype.itemsize != of.spec.numpy_dtype.itemsize:
        raise ValueError(f"cannot reinterpret {of.spec} as {dtype}: the item sizes differ")
    return Reinterpreted(of, dtype)


def unpack_fp4(of: DerivedArray) -> DerivedArray:
    """Unpack 4-bit numbers, two per byte. See `UnpackedFp4`.

    Raises:
        ValueError: if the input is not an array of bytes with an axis.
    """
    if of.spec.dtype not in ("uint8", "int8") or not of.spec.shape:
        raise ValueError(f"{of.spec} is not an array of bytes with an axis, which packed 4-bit numbers need")
    return UnpackedFp4(reinterpret(of, "uint8"))


@dataclass(frozen=True, slots=True)
class BlockScaled:
    """Each element times the scale of its block, computed in float32 and then rounded to `dtype`.

    Overflow is not an error. The result is infinity if the dtype can represent it.

    Attributes:
        values: the elements.
        scales: one for each block; the last block of an axis can be smaller.
        block: extents of a block, in elements.
        dtype: name of the dtype of the result.
    """

    values: DerivedArray
    scales: DerivedArray
    block: tuple[int, ...]
    dtype: str

    @property
    def spec(self) -> ArraySpec:
        """Spec of the result."""
        return ArraySpec(self.values.spec.shape, self.dtype)

    @property
    def inputs(self) -> Sequence[DerivedArray]:
        """Elements and scales."""
        return (self.values, self.scales)

    def needed(self, box: Box) -> Sequence[Part]:
        """Return the box of the elements, and the scales of all blocks that overlap it."""
        start = tuple([low // extent for low, extent in zip(box.start, self.block, strict=True)])
        stop = tuple([-(-high // extent) for high, extent in zip(box.stop, self.block, strict=True)])
        return (Part(0, box), Part(1, Box(start, stop)))

    def views(self, box: Box, out: HostArray) -> Sequence[HostArray] | None:
        """Return None, because elements are computed."""
        return None

    def make(self, box: Box, parts: Sequence[HostArray], out: HostArray) -> None:
        """Multiply."""
        values, scales = parts
        start, block = box.start, self.block
        if not values.ndim:  # NumPy returns scalars, not arrays, for arrays without axes
            values, scales, out, start, block = values[None], scales[None], out[None], (0,), (1,)
        first = [low % extent for low, extent in zip(start, block, strict=True)]
        tile, is_transposed = _tile(out)
        cuts = [
            list(itertools.pairwise(_cuts(*of_axis))) for of_axis in zip(values.shape, tile, block, first, strict=True)
        ]
        with np.errstate(all="ignore"):
            scales = scales.astype(np.float32)
            for bounds in itertools.product(*cuts):
                slices = tuple([slice(low, high) for low, high in bounds])
                product = _in_float32(values[slices])
                np.multiply(product, _factors(scales, bounds, block, first), out=product)
                if is_transposed:  # ml_dtypes casts strided memory much slower than NumPy copies it
                    copy_elements(out[slices], product.astype(out.dtype, copy=False))
                else:
                    np.copyto(out[slices], product, casting="unsafe")


def _tile(out: HostArray) -> tuple[Sequence[int], bool]:
    """Return the extents of a tile, and True if the last axis is not the fastest in the result."""
    tile, left = [1] * out.ndim, _TILE_ELEMENTS
    axes = list(reversed(range(out.ndim)))
    fast = min(axes, key=lambda axis: abs(out.strides[axis]) if out.shape[axis] > 1 else sys.maxsize)
    is_transposed = fast != axes[0] and out.shape[axes[0]] > 1
    if is_transposed:
        for axis, max_extent in zip((fast, axes[0]), _TRANSPOSED_TILE, strict=True):
            tile[axis] = min(out.shape[axis], max_extent)
            left //= tile[axis]
        axes = [axis for axis in axes[1:] if axis != fast]
    for axis in axes:
        tile[axis] = min(out.shape[axis], left)
        left = max(1, left // tile[axis])
    return tile, is_transposed


def _factors(
    scales: HostArray, bounds: Sequence[tuple[int, int]], block: Sequence[int], first: Sequence[int]
) -> HostArray:
    """Return the scales of the elements of a tile, with extent 1 along axes that need only one scale.

    Args:
        scales: scales of the blocks that overlap the box.
        bounds: range of the tile in the box, by axis.
        block: extents of a block.
        first: offset of the box in its first block, by axis.
    """
    for axis, (low, high) in enumerate(bounds):
        before, size = (slice(None),) * axis, block[axis]
        start, stop = (low + first[axis]) // size, (high + first[axis] - 1) // size + 1
        scales = scales[(*before, slice(start, stop))]
        if stop - start > 1 and size > 1:
            offset = low + first[axis] - start * size
            scales = np.repeat(scales, size, axis)[(*before, slice(offset, offset + high - low))]
    return scales


def _cuts(extent: int, max_size: int, block: int, first: int) -> list[int]:
    """Return the boundaries of tiles along an axis, at block boundaries if blocks are large."""
    if block < max_size:
        return [*range(0, extent, max_size), extent]
    cuts = [0]
    while cuts[-1] < extent:
        left = block - (cuts[-1] + first) % block
        cuts.append(min(cuts[-1] + min(max_size, left), extent))
    return cuts


@functools.lru_cache(maxsize=32)
def _table(dtype: np.dtype[Any]) -> HostArray:
    """Return the float32 values of all bytes as elements of a one-byte dtype."""
    table: HostArray = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    return table


def _in_float32(values: HostArray) -> HostArray:
    """Convert elements to float32, in new memory.

    float8_e4m3fn without NaN, the most frequent case, is converted by its bits. Other one-byte
    dtypes of ml_dtypes are converted with a table. A cast of ml_dtypes takes twenty times as long.
    """
    if values.dtype.itemsize > 1 or values.dtype.isbuiltin == 1:
        return values.astype(np.float32)
    if values.dtype == _E4M3FN and np.bitwise_and(values.view(np.uint8), 0x7F).max(initial=0) < 0x7F:  # NaN is 0x7F
        bits = values.view(np.int8).astype(np.int32)  # the sign fills the upper bits
        np.left_shift(bits, 20, out=bits)
        np.bitwise_and(bits, _E4M3FN_BITS, out=bits)
        numbers: HostArray = bits.view(np.float32)
        np.multiply(numbers, _E4M3FN_BIAS, out=numbers)
        return numbers
    return np.take(_table(values.dtype), values.view(np.uint8), mode="wrap")


def block_of(values: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the extents of a block, if the shape of the scales determines them; else None.

    The shape determines them if there is a single scale, or if each axis has either one scale or
    one scale per index. Other numbers of scales are ambiguous: two scales for 192 rows can mean
    blocks of 96 rows, or blocks of 128 and 64 rows.

    Args:
        values, scales: shapes. A single scale can have any shape.
    """
    if math.prod(scales) == 1:
        return tuple([max(extent, 1) for extent in values])
    if len(values) != len(scales) or any(many not in (1, extent) for extent, many in zip(values, scales, strict=True)):
        return None
    return tuple([max(extent, 1) if many == 1 else 1 for extent, many in zip(values, scales, strict=True)])


def block_scaled(
    values: DerivedArray, scales: DerivedArray, block: Sequence[int] | None, dtype: str = "float32"
) -> DerivedArray:
    """Multiply an array by the scales of its blocks. See `BlockScaled`.

    Args:
        values: the elements, real numbers.
        scales: one for each block, or a single one, of dtype ``float32``, ``bfloat16``,
            ``float16`` or ``float8_e8m0fnu``. The last block of an axis can be smaller.
        block: extents of a block along the last axes, 1 along the others; None for the
            result of `block_of`.
        dtype: float dtype of the result.

    Raises:
        ValueError: if a dtype is not supported, or if the shapes of values, scales and blocks do not
            fit together.
        UnsupportedLeafError: for an unknown dtype.
    """
    spec, of_scales = values.spec, scales.spec
    if not _is_real(spec.dtype) or not (_is_real(dtype) and accepts_kind_of(dtype, "float32")):
        raise ValueError(f"cannot scale {spec} to {dtype}: expected real numbers, and a float dtype")
    if of_scales.dtype not in _SCALES:
        raise ValueError(f"the scales are {of_scales}; expected one of {', '.join(_SCALES)}")
    extents = block_of(spec.shape, of_scales.shape)
    if block is not None:
        if len(block) > len(spec.shape) or min(block, default=1) < 1:
            raise ValueError(f"{spec} cannot have blocks of {list(block)}")
        given = (1,) * (len(spec.shape) - len(block)) + tuple(block)
        extents = tuple([min(size, max(extent, 1)) for extent, size in zip(spec.shape, given, strict=True)])
        expected = tuple([-(-extent // size) for extent, size in zip(spec.shape, extents, strict=True)])
        if of_scales.shape != expected and not math.prod(expected) == of_scales.size == 1:
            raise ValueError(
                f"the scales are {of_scales}; expected {list(expected)}, for {spec} in blocks of {list(extents)}"
            )
    if extents is None:
        raise ValueError(
            f"the scales are {of_scales}, which do not determine the blocks of {spec}: "
            "expected one scale, or along each axis 1 or its extent; set the extents of a "
            "block"
        )
    of_blocks = tuple([-(-extent // size) for extent, size in zip(spec.shape, extents, strict=True)])
    if spec.size:
        scales = reshape(scales, of_blocks)
    return BlockScaled(values, scales, extents, dtype)


def _is_real(dtype: str) -> bool:
    return dtype != "bool" and accepts_kind_of("float32", dtype)


def mxfp4(blocks: DerivedArray, scales: DerivedArray, dtype: str = "float32") -> DerivedArray:
    """Dequantise MXFP4: multiply 4-bit numbers by one scale for each block of 32 along the last axis.

    A byte contains two numbers, as in `UnpackedFp4`.

    A scale is a power of two with its exponent in a byte (E8M0): 2 ** (byte - 127), and NaN for 255
    (OCP Microscaling Formats 1.0, 5.4.1). The code of gpt-oss returns infinity for 255, but its
    checkpoints do not contain it.

    Args:
        blocks: bytes of shape (..., blocks, 16), as in gpt-oss, or (..., 16 * blocks).
        scales: ``uint8`` or ``float8_e8m0fnu``, of shape (..., blocks).
        dtype: float dtype of the result.

    Raises:
        ValueError: if a dtype is not supported, or if the shapes do not fit together.
    """
    of_blocks, of_scales = blocks.spec, scales.spec
    *before, last = of_scales.shape or (0,)
    packed = (*before, last * _MX_BYTES)
    if not of_scales.shape or of_blocks.shape not in (packed, (*before, last, _MX_BYTES)):
        raise ValueError(
            f"blocks {of_blocks} and scales {of_scales} do not fit: expected {_MX_BYTES} bytes "
            "for each scale, along a separate last axis or merged into it"
        )
    if of_scales.dtype not in ("uint8", _E8M0):
        raise ValueError(f"the scales are {of_scales}; expected uint8 or {_E8M0}")
    values = unpack_fp4(reshape(blocks, packed))
    return block_scaled(values, reinterpret(scales, _E8M0), (2 * _MX_BYTES,), dtype)
