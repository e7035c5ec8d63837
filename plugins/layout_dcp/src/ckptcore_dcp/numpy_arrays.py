"""NumPy arrays and scalars in pickles: their bytes are a text or bytes of the pickle, and are read from there.

Source: ``array_reduce``, ``array_reduce_ex_picklebuffer`` and ``arraydescr_reduce`` of NumPy's
``methods.c`` and ``descriptor.c``, and `numpy._core.numeric._frombuffer`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ckptcore.errors import CorruptCheckpointError, UnsupportedLeafError
from ckptcore.model import PLAIN_ARRAY, dtype_from_name, name_of_dtype
from ckptcore_dcp.pickles import Call, Global, Places, Value, brief, builtin_value
from ckptcore_dcp.stored_tensors import PickledBytes, StoredTensor, c_strides

__all__ = ["NumpyReader"]

_SCALAR: Final = "numpy.scalar"
"""Kind of the records of NumPy scalars, as the core saves them."""

_PACKAGES: Final = ("numpy.core", "numpy._core")
"""Packages of NumPy 1 and 2."""
_RECONSTRUCT: Final = frozenset(Global(f"{package}.multiarray", "_reconstruct") for package in _PACKAGES)
_FROM_BUFFER: Final = frozenset(Global(f"{package}.numeric", "_frombuffer") for package in _PACKAGES)
_MAKE_SCALAR: Final = frozenset(Global(f"{package}.multiarray", "scalar") for package in _PACKAGES)
_ARRAY: Final = Global("numpy", "ndarray")
_DTYPE: Final = Global("numpy", "dtype")
_ENCODE: Final = Global("_codecs", "encode")
_BYTE_ARRAYS: Final = frozenset(Global(module, "bytearray") for module in ("builtins", "__builtin__"))
_LATIN_1: Final = ("latin1", "latin-1")
_BYTES: Final = frozenset(Global(module, "bytes") for module in ("builtins", "__builtin__"))
_MAX_AXES: Final = 64
_MAX_COUNT: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class NumpyReader:
    """Recognises NumPy arrays and scalars among the values of one pickle.

    Attributes:
        key: the object that contains the pickle, for errors.
        places: where the pickle has its bytes; None if these have no byte range in the object, because
            the pickle is compressed.
    """

    key: str
    places: Places | None

    def read(self, call: Call, path: str) -> StoredTensor | bool | int | float | complex | list[Value] | None:
        """Return the array or scalar that a call makes.

        An array of objects becomes nested lists. Without places, and in pickles of protocol 0, a scalar
        is a number, and an array cannot be read from the file. Returns None then, for arrays of
        structures, and for other calls.

        Raises:
            CorruptCheckpointError: the array is invalid.
        """
        function, arguments, state = call.function, call.arguments, call.state
        if function in _MAKE_SCALAR and len(arguments) == 2:
            return self._scalar(arguments[0], arguments[1], path)
        if function in _RECONSTRUCT and arguments and arguments[0] == _ARRAY and isinstance(state, tuple):
            # NumPy before 1.0 wrote no version.
            if not 4 <= len(state) <= 5:
                raise self._corrupt(path, f"a NumPy array with {brief(state)}")
            shape, dtype, fortran, data = state[-4:]
            return self._array(shape, dtype, data, "F" if fortran is True else "C", None, path)
        if function in _FROM_BUFFER:
            match arguments:
                case (data, dtype, shape, str() as order, *axes):
                    return self._array(shape, dtype, data, order, axes[0] if axes else None, path)
        return None

    def _array(
        self, shape: Value, dtype: Value, data: Value, order: str, axes: Value, path: str
    ) -> StoredTensor | list[Value] | None:
        extents = self._naturals(shape, path)
        if (kind := _dtype(dtype)) is None:
            return _nested_lists(data, extents, order) if isinstance(data, list) else None
        strides = c_strides(extents)
        if order == "F":
            strides = c_strides(extents[::-1])[::-1]
        elif order == "K":  # elements in C order, then a transposition
            permutation = self._naturals(axes, path)
            if sorted(permutation) != list(range(len(extents))):
                raise self._corrupt(path, "the axes of a NumPy array have an invalid order")
            extents, strides = (tuple([row[axis] for axis in permutation]) for row in (extents, strides))
        elif order not in ("C", "A"):
            raise self._corrupt(path, f"a NumPy array in the order {order[:40]!r}")
        return self._stored(extents, strides, kind, data, PLAIN_ARRAY, path)

    def _scalar(self, dtype: Value, data: Value, path: str) -> StoredTensor | bool | int | float | complex | None:
        if (kind := _dtype(dtype)) is None:
            return None
        found = _plain_bytes(data)
        if found is None or len(found) != kind.itemsize:
            return None  # it only looks like a scalar
        if (stored := self._stored((), (), kind, data, _SCALAR, path)) is not None:
            return stored
        number: object = np.frombuffer(found, kind)[0].item()
        return number if isinstance(number, bool | int | float | complex) else None

    def _stored(
        self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any], data: Value, kind: str, path: str
    ) -> StoredTensor | None:
        found = self._place(data, dtype.byteorder == ">")
        if found is None:
            return None
        if found.size != math.prod(shape) * dtype.itemsize:
            raise self._corrupt(path, f"an array of {dtype} of shape {shape} has {found.size} bytes")
        return StoredTensor(
            "", name_of_dtype(dtype), shape, strides, 0, kind, found.size, framework=None, pickled=found
        )

    def _place(self, data: Value, big_endian: bool) -> PickledBytes | None:
        is_text = False
        if isinstance(data, Call) and data.function in _BYTE_ARRAYS and len(data.arguments) == 1:
            (data,) = data.arguments
        if isinstance(data, Call) and data.function == _ENCODE and len(data.arguments) == 2:
            data, encoding = data.arguments
            is_text = encoding in _LATIN_1
        elif isinstance(data, Call) and data.function in _BYTES and not data.arguments:
            return PickledBytes(0, 0, 0, False, big_endian)
        found = self.places.find(data) if self.places is not None and isinstance(data, str | bytes) else None
        if found is None:
            return None
        start, stop = found
        assert isinstance(data, str | bytes)  # it has a place
        return PickledBytes(start, stop - start, len(data) if is_text else stop - start, is_text, big_endian)

    def _naturals(self, value: Value, path: str) -> tuple[int, ...]:
        if isinstance(value, tuple | list) and len(value) <= _MAX_AXES:
            numbers = [number for number in value if type(number) is int and 0 <= number < _MAX_COUNT]
            if len(numbers) == len(value) and math.prod(max(number, 1) for number in numbers) < _MAX_COUNT:
                return tuple(numbers)
        raise self._corrupt(path, f"the shape or the axes of a NumPy array are a {brief(value)}")

    def _corrupt(self, path: str, reason: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            f"{path} in {self.key!r} cannot be read: {reason}; restore the file from a copy, or load another "
            "checkpoint",
            key=self.key,
        )


def _dtype(value: Value) -> np.dtype[Any] | None:
    """Return a dtype in the byte order of the file, or None if its elements have no fixed size or are structures.

    The call is ``dtype("f8", False, True)`` with a state that has a version and ``<``, ``>`` or
    ``|``. Times have their unit in the state. The argument of dtypes of other libraries is a class.
    """
    if not isinstance(value, Call) or value.function != _DTYPE or not value.arguments:
        return None
    code, state = value.arguments[0], value.state if isinstance(value.state, tuple) else ()
    order = state[1] if len(state) > 1 else "|"
    try:
        if isinstance(code, Global):
            return dtype_from_name(code.name) if code.module == "ml_dtypes" and order != ">" else None
        if not isinstance(code, str) or order not in ("<", ">", "|"):
            return None
        found = np.dtype(f"{order}{code}{_unit(state) if code[:1] in ('M', 'm') else ''}")
        if order == ">" and found.kind == "U":
            return None  # bytes are swapped by element
        name_of_dtype(found)
        return found
    except (TypeError, ValueError, UnsupportedLeafError):
        return None


def _nested_lists(elements: list[Value], shape: tuple[int, ...], order: str) -> list[Value] | None:
    """Return the elements of an array of objects as lists in its shape, or None if the array is no list."""
    if not shape or len(elements) != math.prod(shape) or (order == "F" and len(shape) > 1):
        return None
    for extent in reversed(shape[1:]):
        elements = [elements[start : start + extent] for start in range(0, len(elements), max(extent, 1))]
    return elements


def _unit(state: tuple[Value, ...]) -> str:
    """Return the unit of a time, such as ``[25s]``, from ``(..., ({}, (b"s", 25, 1, 1)))``."""
    match state:
        case (*_, (_, (bytes() | Call() as unit, int() as count, *_))):
            name = _plain_bytes(unit)
            if name is not None and name.isalpha() and 0 < count < _MAX_COUNT:
                return f"[{count}{name.decode('ascii')}]"
    return ""


def _plain_bytes(data: Value) -> bytes | None:
    """Return bytes, also if they are written as a call that encodes text. None for other values."""
    if isinstance(data, Call):
        data = builtin_value(data)
    return data if isinstance(data, bytes) else None
