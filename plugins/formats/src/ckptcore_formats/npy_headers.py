"""Headers of ``.npy`` files, versions 1 to 3: the dtype, the order and the shape of an array.

Source: ``numpy/lib/_format_impl.py``. The text of a header is a Python literal, and is parsed as one.
"""

from __future__ import annotations

import ast
import math
import re
from typing import Any, Final, NamedTuple

import numpy as np

from ckptcore.errors import CorruptCheckpointError

MAGIC: Final = b"\x93NUMPY"
HEAD_BYTES: Final = 256
"""Bytes that have the header of most files: NumPy aligns arrays to 64 bytes."""
_MAX_TEXT: Final = 10_000
"""NumPy reads no longer text either, unless told to trust the file: its parser can crash."""
_MAX_AXES: Final = 64
_MAX_COUNT: Final = 1 << 62
_MAX_DEPTH: Final = 8
"""Most nested structures in a dtype."""
_LONG: Final = re.compile(r"(?<=\d)L\b")
"""The suffix of long integers of Python 2."""
_CODE: Final = re.compile(r"[<>|=]?([?bBhHiIlLqQefdFDgGpP]|[biufcmMSUVO]\d{0,9})(\[\d{0,9}[A-Za-z]{1,7}\])?")


class NpyHeader(NamedTuple):
    """The header of a file.

    Attributes:
        dtype: dtype of the elements, in their byte order.
        shape: extents.
        is_fortran: True if elements are in Fortran order.
        nbytes: length of the header, after which the elements follow.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    is_fortran: bool
    nbytes: int

    @property
    def array_bytes(self) -> int:
        """Length of the elements, in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(data: bytes, name: str, key: str) -> NpyHeader | int:
    """Return the header at the beginning of a file, or the number of bytes that are needed to read it.

    Args:
        data: the first bytes of the file.
        name: the file or member, for errors.
        key: the object, for errors.

    Raises:
        CorruptCheckpointError: the header is invalid.
    """
    if len(data) < 12:
        return HEAD_BYTES
    major, minor = data[6], data[7]
    if data[:6] != MAGIC or major not in (1, 2, 3) or minor:
        raise _invalid(name, key, f"it begins with {data[:8]!r}; expected \\x93NUMPY and version 1, 2 or 3")
    start = 10 if major == 1 else 12
    length = int.from_bytes(data[8:start], "little")
    if length > _MAX_TEXT:
        raise _invalid(name, key, f"its header has {length} characters, and NumPy reads at most {_MAX_TEXT}")
    if len(data) < start + length:
        return start + length
    try:
        text = data[start : start + length].decode("utf-8" if major == 3 else "latin-1")
        header = _literal(text, may_be_python2=major < 3)
        if not isinstance(header, dict) or header.keys() != {"descr", "fortran_order", "shape"}:
            raise ValueError("expected the keys descr, fortran_order and shape")
        shape, is_fortran = header["shape"], header["fortran_order"]
        if not isinstance(shape, tuple) or len(shape) > _MAX_AXES or type(is_fortran) is not bool:
            raise ValueError("the shape or the order is invalid")
        if not all(type(extent) is int and 0 <= extent < _MAX_COUNT for extent in shape):
            raise ValueError("an extent of the shape is invalid")
        if math.prod([max(extent, 1) for extent in shape]) >= _MAX_COUNT:
            raise ValueError("the shape has too many elements")
        return NpyHeader(_dtype(header["descr"], 0), shape, is_fortran, start + length)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError, OverflowError) as error:
        raise _invalid(name, key, f"its header cannot be read: {str(error)[:200]}") from error


def _literal(text: str, *, may_be_python2: bool) -> Any:
    try:
        return ast.literal_eval(text)
    except SyntaxError:
        if not may_be_python2:
            raise
        return ast.literal_eval(_LONG.sub("", text))


def _dtype(descr: Any, depth: int) -> np.dtype[Any]:
    """Return the dtype of a description, as `numpy.lib.format.descr_to_dtype` does."""
    if depth > _MAX_DEPTH:
        raise ValueError("the dtype is nested too deeply")
    if isinstance(descr, str):
        if not _CODE.fullmatch(descr):
            raise ValueError(f"{descr[:80]!r} is not a dtype")
        return np.dtype(descr)
    if isinstance(descr, tuple) and len(descr) == 2:
        return np.dtype((_dtype(descr[0], depth + 1), descr[1]))
    if not isinstance(descr, list):
        raise TypeError("the dtype is neither text nor a list of fields")
    names: list[str] = []
    formats: list[np.dtype[Any]] = []
    offsets: list[int] = []
    offset = 0
    for name, of_field, *shapes in descr:
        field = _dtype(of_field, depth + 1)
        if shapes:
            field = np.dtype((field, shapes[0]))
        name = name[1] if isinstance(name, tuple) else name  # a title and a name
        if name != "" or field.kind != "V" or field.names is not None:  # else padding
            names.append(name)
            formats.append(field)
            offsets.append(offset)
        offset += field.itemsize
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": offset})


def _invalid(name: str, key: str, reason: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{name!r} is not an array of numpy.save that can be read: {reason}. Restore it from a copy, or load another "
        "checkpoint",
        key=key,
        start=0,
        stop=HEAD_BYTES,
    )
