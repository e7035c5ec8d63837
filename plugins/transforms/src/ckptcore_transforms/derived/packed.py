"""Arrays whose stored bytes are read as other elements: of another dtype of that size, or two numbers of four bits in each."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ckptcore.derivations.derivation import Derivation, Part, place
from ckptcore.io.elements import plain
from ckptcore.model.arrays import ArraySpec, Box, HostArray, dtype_from_name

__all__ = ["Reinterpreted", "UnpackedFp4", "reinterpret", "unpack_fp4"]

_PIECE_MADE: Final = "float8_e4m3fn"


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

    of: Derivation
    dtype: str

    @property
    def spec(self) -> ArraySpec:
        """The array that is made."""
        return ArraySpec(self.of.spec.shape, self.dtype)

    @property
    def inputs(self) -> Sequence[Derivation]:
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

    of: Derivation

    @property
    def spec(self) -> ArraySpec:
        """The array that is made: twice as long along the last axis."""
        *before, last = self.of.spec.shape
        return ArraySpec((*before, 2 * last), _MADE)

    @property
    def inputs(self) -> Sequence[Derivation]:
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


def reinterpret(of: Derivation, dtype: str) -> Derivation:
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


def unpack_fp4(of: Derivation) -> Derivation:
    """The numbers of four bits of which an array has two in each byte: see `UnpackedFp4`.

    Raises:
        ValueError: if it is no array of bytes with an axis.
    """
    if of.spec.dtype not in ("uint8", "int8") or not of.spec.shape:
        raise ValueError(f"{of.spec} is no array of bytes with an axis, each of two numbers of four bits")
    return UnpackedFp4(reinterpret(of, "uint8"))
