"""Elements of arrays as bytes (little endian, in C order), and boxes as runs of elements in C order."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Iterator
from math import prod
from typing import Any, Final

import numpy as np

from ckptcore.model import Box, HostArray

_LITTLE_HOST: Final = sys.byteorder == "little"
"""True if this host has the byte order of objects."""


@functools.lru_cache(maxsize=512)
def _plain_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return a dtype of the same size and byte order that NumPy copies without the interpreter lock.

    Dtypes of ml_dtypes become unsigned integers, because NumPy copies ml_dtypes element by element through Python's C
    API.
    """
    if dtype.isbuiltin != 2 and dtype.kind in "biufcmMSU":
        return dtype
    if dtype.itemsize in (1, 2, 4, 8):
        return np.dtype(f"{'=' if dtype.isnative else '>' if _LITTLE_HOST else '<'}u{dtype.itemsize}")
    return np.dtype((np.void, dtype.itemsize))


@functools.lru_cache(maxsize=512)
def little_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the plain dtype of the elements in objects."""
    return _plain_dtype(dtype).newbyteorder("<")


@functools.lru_cache(maxsize=512)
def is_little(dtype: np.dtype[Any]) -> bool:
    """Return True if elements of this dtype have the same bytes in memory and in objects."""
    plain = _plain_dtype(dtype)
    return plain == plain.newbyteorder("<")


def plain(array: HostArray) -> HostArray:
    """Return the same memory and shape with a plain dtype."""
    dtype = _plain_dtype(array.dtype)
    return array if dtype is array.dtype else array.view(dtype)


def copy_elements(destination: HostArray, source: HostArray) -> None:
    """Copy between arrays of equal shape, with any strides and byte orders. Large copies release the GIL."""
    np.copyto(plain(destination), plain(source))


def new_bytes(nbytes: int) -> memoryview:
    """Return `nbytes` of new memory, which is not initialised."""
    # NumPy's stubs declare the buffer protocol only for Python 3.12 and later.
    return memoryview(np.empty(nbytes, np.uint8))  # type: ignore[arg-type]


def bytes_of(array: HostArray) -> memoryview:
    """Return the memory of a C-contiguous array, as bytes.

    Raises:
        ValueError: the array is not C-contiguous, or its elements are Python objects.
    """
    if not array.flags.c_contiguous or array.dtype.hasobject:
        raise ValueError(f"expected a C-contiguous array of numbers, found {array.dtype} with strides {array.strides}")
    # NumPy's stubs declare the buffer protocol only for Python 3.12 and later.
    return memoryview(np.ndarray(array.nbytes, np.uint8, array))  # type: ignore[arg-type]


def c_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the distance between neighbours along each axis in C order, in elements."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 1, 0, -1):
        strides[axis - 1] = strides[axis] * shape[axis]
    return tuple(strides)


def run_axis(shape: tuple[int, ...], box: Box) -> int:
    """Return the axis at which the runs of a box start: for each index of the axes before it, the box is one run."""
    start, stop = box
    axis = len(shape)
    while axis > 0:
        axis -= 1
        if stop[axis] - start[axis] != shape[axis]:
            return axis
    return 0


def flat_range(shape: tuple[int, ...], box: Box) -> tuple[int, int] | None:
    """Return the half-open range of a box among the elements of an array in C order; None if it is not contiguous."""
    if not box.size:
        return (0, 0)
    if prod(box.shape[: run_axis(shape, box)]) != 1:
        return None
    first = sum(map(int.__mul__, box.start, c_strides(shape)))
    return first, first + box.size


def runs(shape: tuple[int, ...], box: Box, axis: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield the start of each run of a box, as an index and as a number of elements in C order.

    Args:
        shape: the shape of the array.
        box: the box; not empty.
        axis: the `run_axis` of the box, or a later axis.
    """
    start, stop = box
    strides = c_strides(shape)
    tail = sum(map(int.__mul__, start[axis:], strides[axis:]))
    for index in itertools.product(*map(range, start[:axis], stop[:axis])):
        yield (*index, *start[axis:]), sum(map(int.__mul__, index, strides)) + tail


def spans(shape: tuple[int, ...], box: Box, most_gap: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of elements in C order that together cover a box. The box must not be empty.

    Ranges are in ascending order and do not touch. Gaps of up to `most_gap` elements outside the box are covered too.
    """
    start, stop = box
    strides = c_strides(shape)
    # `inner` counts the elements from the first to the last element of the box, along the axes from `axis` on.
    inner = 1
    axis = len(shape)
    while axis > 0:
        count = stop[axis - 1] - start[axis - 1]
        # Gaps never become smaller towards the outer axes, so all outer axes are cut too.
        if count > 1 and strides[axis - 1] - inner > most_gap:
            break
        inner += (count - 1) * strides[axis - 1]
        axis -= 1
    for _, flat in runs(shape, box, axis):
        yield flat, flat + inner
