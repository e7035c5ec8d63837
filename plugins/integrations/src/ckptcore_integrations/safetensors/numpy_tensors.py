"""NumPy and JAX arrays as tensors of safetensors files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
from safetensors import SafetensorError

from ckptcore.model import dtype_from_name
from ckptcore.plain_safetensors import DTYPES, TensorEntry
from ckptcore_integrations.safetensors.reading import Backend, OpenFile, TensorBytes, checked_index

_DTYPES: Final = {stored: dtype_from_name(name) for name, stored in DTYPES.items()}


def _array_bytes(name: str, array: np.ndarray[Any, Any]) -> TensorBytes:
    """Return the bytes of an array. Copies an array that is not contiguous or not little endian.

    Raises:
        SafetensorError: the format has no such dtype.
    """
    dtype = DTYPES.get(array.dtype.name)
    if dtype is None:
        raise SafetensorError(f"Unknown dtype {array.dtype.name!r} of {name!r}. Supported dtypes: {', '.join(DTYPES)}")
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    return TensorBytes(dtype, array.shape, np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def array_of(entry: TensorEntry, data: memoryview, start: int) -> np.ndarray[Any, Any]:
    """Return an array that views bytes from a position.

    Raises:
        SafetensorError: NumPy has no such dtype.
    """
    count = -1 if entry.stop > entry.start else 0
    stop = start + entry.stop - entry.start
    return np.frombuffer(data[start:stop], _dtype_of(entry), count).reshape(entry.shape)


def _dtype_of(entry: TensorEntry) -> np.dtype[Any]:
    dtype = _DTYPES.get(entry.dtype)
    if dtype is None:
        raise SafetensorError(f"Dtype not understood: {entry.dtype}. NumPy has no such dtype")
    return dtype


class NumpyReader:
    """Reads arrays as copies."""

    def __init__(self, file: OpenFile, backend: Backend) -> None:
        """Read from an open file."""
        self._file = file
        self._mapping = file.map() if backend == "mmap" else None

    def whole(self, entry: TensorEntry) -> np.ndarray[Any, Any]:
        """Return an array. Reads with a system call, which is faster than copying from mapped memory."""
        dtype = _dtype_of(entry)
        data = np.empty(entry.stop - entry.start, np.uint8)
        self._file.read_into(entry.start, data.data)
        return data.view(dtype).reshape(entry.shape)

    def every(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return all arrays by name."""
        tensors = self._file.header.tensors
        dtypes = [_dtype_of(entry) for entry in tensors.values()]
        data = [np.empty(entry.stop - entry.start, np.uint8) for entry in tensors.values()]
        self._file.read_elements([array.data for array in data])
        return {
            name: array.view(dtype).reshape(entry.shape)
            for (name, entry), array, dtype in zip(tensors.items(), data, dtypes, strict=True)
        }

    def view(self, entry: TensorEntry) -> np.ndarray[Any, Any]:
        """Return an array that the caller copies: a view of the mapped file, if it is mapped."""
        return self.whole(entry) if self._mapping is None else array_of(entry, self._mapping, entry.start)

    def slicer(self, entry: TensorEntry) -> Callable[[Any], np.ndarray[Any, Any]]:
        """Return a function that returns the slice for an index."""
        mapped = None if self._mapping is None else array_of(entry, self._mapping, entry.start)

        def part(index: Any) -> np.ndarray[Any, Any]:
            checked = checked_index(index, entry.shape)
            return np.array((self.whole(entry) if mapped is None else mapped)[checked], order="C")

        return part


class FlaxReader:
    """Reads arrays of JAX."""

    def __init__(self, file: OpenFile, backend: Backend) -> None:
        """Read from an open file."""
        import jax.numpy as jnp  # imported here, because not every program has JAX

        self._tensors = file.header.tensors
        self._arrays = NumpyReader(file, backend)
        self._array = jnp.array

    def whole(self, entry: TensorEntry) -> Any:
        """Return an array."""
        return self._array(self._arrays.view(entry))

    def every(self) -> dict[str, Any]:
        """Return all arrays by name."""
        return {name: self.whole(entry) for name, entry in self._tensors.items()}

    def slicer(self, entry: TensorEntry) -> Callable[[Any], Any]:
        """Return a function that returns the slice for an index."""
        part = self._arrays.slicer(entry)
        return lambda index: self._array(part(index))


def arrays_bytes(tensors: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, TensorBytes]:
    """Return the bytes of arrays by name."""
    return {name: _array_bytes(name, array) for name, array in tensors.items()}
