"""Elements of arrays as bytes: little endian, in C order, as objects hold them."""

from __future__ import annotations

import functools
import sys
from typing import Any, Final

import numpy as np

from ckptcore.model import HostArray

__all__ = ["bytes_of", "copy_elements", "is_little", "little_dtype", "plain"]

_LITTLE_HOST: Final = sys.byteorder == "little"
"""Whether numbers in this host's memory have the byte order that objects use."""


@functools.lru_cache(maxsize=512)
def _plain_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """A dtype of the same size and byte order that NumPy copies without the interpreter lock.

    Dtypes of ml_dtypes become unsigned integers: NumPy copies those element by element through Python's C API.
    """
    if dtype.isbuiltin != 2 and dtype.kind in "biufcmMSU":
        return dtype
    if dtype.itemsize in (1, 2, 4, 8):
        return np.dtype(f"{'=' if dtype.isnative else '>' if _LITTLE_HOST else '<'}u{dtype.itemsize}")
    return np.dtype((np.void, dtype.itemsize))


@functools.lru_cache(maxsize=512)
def little_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The plain dtype of the elements as objects hold them."""
    return _plain_dtype(dtype).newbyteorder("<")


@functools.lru_cache(maxsize=512)
def is_little(dtype: np.dtype[Any]) -> bool:
    """Whether elements of this dtype lie in memory as objects hold them."""
    plain = _plain_dtype(dtype)
    return plain == plain.newbyteorder("<")


def plain(array: HostArray) -> HostArray:
    """The same memory and shape with a plain dtype."""
    dtype = _plain_dtype(array.dtype)
    return array if dtype is array.dtype else array.view(dtype)


def copy_elements(destination: HostArray, source: HostArray) -> None:
    """Copy between arrays of one shape and any strides and byte orders; without the interpreter lock if large."""
    np.copyto(plain(destination), plain(source))


def bytes_of(array: HostArray) -> memoryview:
    """The memory of a C-contiguous array, as bytes."""
    return memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]  # NumPy's stubs know it from Python 3.12 on
