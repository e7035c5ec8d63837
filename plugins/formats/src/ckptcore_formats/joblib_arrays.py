"""Arrays in files of joblib: their bytes follow the object that describes them, between two opcodes of the pickle.

Source: ``NumpyArrayWrapper`` of ``joblib/numpy_pickle.py``, from joblib 0.10 on.
"""

from __future__ import annotations

import math
from typing import Final

from ckptcore_dcp.pickle_reading import Call, Global, OutOfLine, Places, Value, Window, numpy_dtype, read_pickle

from ckptcore.errors import CorruptCheckpointError

_WRAPPER: Final = Global("joblib.numpy_pickle", "NumpyArrayWrapper")
_DTYPE: Final = Global("numpy", "dtype")
_FROM_BUFFER: Final = Global("numpy._core.numeric", "_frombuffer")
_OBJECT_CODES: Final = ("O", "O8", "O4")
_MAX_NESTED: Final = 20
_MAX_AXES: Final = 64
_MAX_BYTES: Final = 1 << 62


class JoblibArrays:
    """Finds the bytes of arrays in one file. Each becomes a call that makes an array of bytes."""

    def __init__(self, data: bytes | Window, key: str, places: Places, depth: int = 0) -> None:
        """Find arrays in a file.

        Args:
            data: the file.
            key: the object, for errors.
            places: receives where pickles inside the file have texts and bytes.
            depth: how many arrays of objects this pickle is in.
        """
        self._data = data
        self._key = key
        self._places = places
        self._depth = depth

    def __call__(self, call: Call, position: int) -> tuple[Value, int] | None:
        """Return the array that an object describes, and the offset after it. None for other objects.

        Raises:
            CorruptCheckpointError: the description is invalid, or bytes are missing.
        """
        state = call.state
        if call.function != _WRAPPER or not isinstance(state, dict):
            return None
        shape, dtype, order = state.get("shape"), state.get("dtype"), state.get("order")
        if isinstance(dtype, Call) and dtype.function == _DTYPE and dtype.arguments[:1] and _is_object(dtype):
            if self._depth == _MAX_NESTED:
                raise self._invalid(position, "arrays of objects are nested too deeply")
            nested = JoblibArrays(self._data, self._key, self._places, self._depth + 1)
            return read_pickle(self._data, key=self._key, start=position, places=self._places, raw=nested)
        try:
            kind = numpy_dtype(dtype)
        except OverflowError as error:
            raise self._invalid(position, str(error)) from error
        if kind is None or not isinstance(shape, tuple) or len(shape) > _MAX_AXES or order not in ("C", "F"):
            raise self._invalid(position, "an array has no dtype, shape or order that is known")
        extents = [extent for extent in shape if type(extent) is int and 0 <= extent < _MAX_BYTES]
        if len(extents) != len(shape):
            raise self._invalid(position, "the shape of an array is invalid")
        if state.get("numpy_array_alignment_bytes") is not None:  # joblib 1.2 and later pad
            position += 1 + int(self._data[position])
        stop = position + math.prod(extents) * kind.itemsize
        if stop > len(self._data):
            raise self._invalid(position, f"an array ends at byte {stop} of {len(self._data)}")
        elements = OutOfLine(position, stop, False, self._fetch)
        return Call(_FROM_BUFFER, (elements, dtype, shape, order)), stop

    def _fetch(self, start: int, stop: int) -> bytes:
        raise self._invalid(start, "an array is used as bytes")

    def _invalid(self, position: int, reason: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            f"{self._key} contains a file of joblib that cannot be read, near byte {position}: {reason}; the file is "
            "cut short or damaged; restore it from a copy",
            key=self._key,
            start=position,
        )


def _is_object(dtype: Call) -> bool:
    return dtype.arguments[0] in _OBJECT_CODES
