"""Strided memory: where the elements of an array are, and whether two arrays share a byte. Reads no element."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ckptcore.model.arrays import HostArray

__all__ = ["StridedMemory"]

_MOST_WORK: Final = 1 << 16
"""Steps of an exact comparison, and elements that are listed. Beyond it memory counts as shared: only unusual strides get there."""


@dataclass(frozen=True, slots=True)
class StridedMemory:
    """The memory of the elements of an array.

    Attributes:
        space: the address space, such as a device; equal for memory of the same one. ``"host"``: this process.
        address: of the first element.
        shape: in elements.
        strides: between elements along each axis, in bytes; may be negative.
        itemsize: of an element, in bytes.
    """

    space: Hashable
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    @classmethod
    def of(cls, array: HostArray) -> StridedMemory:
        """The memory of a NumPy array."""
        return cls("host", array.__array_interface__["data"][0], array.shape, array.strides, array.itemsize)

    @property
    def extent(self) -> range:
        """The addresses from the first byte to the last. Empty if there are no elements."""
        if 0 in self.shape or not self.itemsize:
            return range(self.address, self.address)
        reaches = [stride * (length - 1) for stride, length in zip(self.strides, self.shape, strict=True)]
        first = self.address + sum([reach for reach in reaches if reach < 0])
        last = self.address + sum([reach for reach in reaches if reach > 0])
        return range(first, last + self.itemsize)

    def shares_bytes(self, other: StridedMemory) -> bool:
        """Return whether an element of each has a byte in common. Interleaved elements have none."""
        if self.space != other.space:
            return False
        own, others = self.extent, other.extent
        if max(own.start, others.start) >= min(own.stop, others.stop):
            return False
        try:
            bound: Any = _MOST_WORK  # NumPy's annotations know two bounds only, its documentation any
            return np.shares_memory(_addresses(self), _addresses(other), max_work=bound)
        except np.exceptions.TooHardError:
            return True

    def overlaps_itself(self) -> bool:
        """Return whether two of its elements share a byte, as in a broadcast array."""
        if not self.extent:
            return False
        axes = sorted(
            (abs(stride), length) for stride, length in zip(self.strides, self.shape, strict=True) if length > 1
        )
        reach = self.itemsize
        for stride, length in axes:
            if stride < reach:
                return self._repeats_an_offset(axes)
            reach += stride * (length - 1)
        return False

    def _repeats_an_offset(self, axes: list[tuple[int, int]]) -> bool:
        """Compare all elements, where the strides alone do not say that they are apart."""
        if any(stride < self.itemsize for stride, _ in axes):
            return True
        if math.prod([length for _, length in axes]) > _MOST_WORK:
            return True
        offsets = np.zeros(1, np.int64)
        for stride, length in axes:
            offsets = np.add.outer(offsets, stride * np.arange(length)).ravel()
        return bool((np.diff(np.sort(offsets)) < self.itemsize).any())


class _Interface:
    """An object that NumPy takes for an array at an address."""

    __slots__ = ("__array_interface__",)

    def __init__(self, interface: dict[str, Any]) -> None:
        self.__array_interface__ = interface


def _addresses(memory: StridedMemory) -> HostArray:
    """An array of the same addresses. No element of it may be read: the memory may be that of a device."""
    interface = {
        "version": 3,
        "data": (memory.address, True),
        "shape": memory.shape,
        "strides": memory.strides,
        "typestr": f"|V{memory.itemsize}",
    }
    return np.asarray(_Interface(interface))
