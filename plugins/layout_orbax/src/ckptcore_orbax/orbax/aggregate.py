"""Trees in msgpack, with arrays or references to arrays.

Flax writes such files (``flax.serialization.to_bytes``, and ``flax.training.checkpoints`` without Orbax). Orbax wrote
a file `checkpoint` in this format before it introduced `_METADATA`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgpack  # type: ignore[import-untyped]  # it has no types
import numpy as np

from ckptcore.errors import CorruptCheckpointError, UnsupportedLeafError
from ckptcore.model import ArraySpec, HostArray, dtype_from_name, unreadable_leaf
from ckptcore_orbax.orbax.json_files import unexpected
from ckptcore_orbax.orbax.trees import MAX_DEPTH, OrbaxTree, TreeLeaf, plain_tree

AGGREGATE_FILE: Final = "checkpoint"

_PLACEHOLDERS: Final = ("PLACEHOLDER://", "AGGREGATED://", "//GDAPlaceholder:")
"""Prefixes of strings that refer to an array outside the file. The name of the array follows. Flax writes the last."""

OTHER_PROCESSES: Final = "_gda"
"""Suffix of the directory in which Flax stores arrays that several processes hold, next to its file."""

_SUFFIX: Final = ".msgpack"
_MAX_INLINE: Final = 4096
"""Maximum size of an array whose elements are kept when the file is inspected, in bytes."""

_CHUNKED: Final = "__msgpack_chunked_array__"
"""Key that marks a dict as an array that is too large for one value.

Its ``shape`` and ``chunks`` are dicts with keys 0, 1, ...
"""

_ARRAY, _COMPLEX, _SCALAR, _TUPLE = 1, 2, 3, 4
"""Extension types of Flax.

Array: ``(shape, dtype, bytes)`` in nested msgpack; complex: ``(real, imaginary)``; scalar: like an
array; tuple: a list.
"""

_FIRST_BYTES: Final = 64
"""Number of leading bytes of an array that are searched for first."""

_TRIPLE: Final = 0x93
"""The first byte of a list of three values, which is the form of a stored array."""

_MAX_NESTED: Final = 16
"""Maximum nesting of extension values, each of which takes much stack space."""


def parse_aggregate(data: bytes, key: str) -> OrbaxTree:
    """Parse the file, which may be hostile. Takes memory in proportion to the file.

    Raises:
        CorruptCheckpointError: the file is not msgpack, or does not contain a valid tree.
    """
    return plain_tree(_replace_arrays(unpack(data, key, _Extensions(data, key)), data, key, 0), key)


def is_aggregate(head: bytes, name: str) -> bool:
    """Return whether a file is a tree in msgpack, by its first bytes and its name.

    Such files have no magic number. A file with any name counts if it begins like a mapping with text as keys, or like
    an array of Flax, because texts and common file formats begin differently.
    """
    if name.endswith(_SUFFIX):
        return True
    match head[:1]:
        case b"\xde" | b"\xdf":
            rest = head[3 if head[0] == 0xDE else 5 :]
        case b"\xc7" | b"\xc8" | b"\xc9" | b"\xd8":  # an extension: length (none if 16 bytes), type, data
            rest = head[{0xC7: 2, 0xC8: 3, 0xC9: 5, 0xD8: 1}[head[0]] :]
            return rest[:2] in (bytes([_ARRAY, _TRIPLE]), bytes([_SCALAR, _TRIPLE]))
        case _:
            if not head or not 0x81 <= head[0] <= 0x8F:
                return False
            rest = head[1:]
    return _is_text(rest)


def _is_text(head: bytes) -> bool:
    """Return whether a value of msgpack is printable text of at least one character."""
    if not head:
        return False
    if 0xA1 <= head[0] <= 0xBF:
        text = head[1 : 1 + (head[0] & 31)]
    elif head[0] in (0xD9, 0xDA, 0xDB):
        text = head[{0xD9: 2, 0xDA: 3, 0xDB: 5}[head[0]] :][:32]
    else:
        return False
    return text.decode("utf-8", "ignore").isprintable() and bool(text)


def unpack(data: bytes, key: str, extension: Callable[[int, bytes], object]) -> object:
    """Return a msgpack value: None, numbers, str, bytes, lists and dicts, and results of `extension`.

    Raises:
        CorruptCheckpointError: the data is not msgpack. Errors of `extension` are raised unchanged.
    """
    try:
        return msgpack.unpackb(data, ext_hook=extension, raw=False, strict_map_key=False)
    except (CorruptCheckpointError, UnsupportedLeafError):
        raise
    except (ValueError, TypeError, RecursionError, OverflowError, msgpack.UnpackException) as error:
        raise CorruptCheckpointError(
            f"{key}: expected msgpack, found {len(data)} bytes that are not msgpack: {error!r:.200}. "
            "The file is damaged or incomplete",
            key=key,
        ) from error


class _Extensions:
    """Decodes extension types, in the order of the file."""

    def __init__(self, whole: bytes, key: str) -> None:
        self._whole = whole
        self._key = key
        self._depth = 0
        self._position = 0
        """The elements of all further arrays are after this byte."""

    def __call__(self, code: int, data: bytes) -> object:
        self._depth += 1
        try:
            if self._depth > _MAX_NESTED:
                raise unexpected(self._key, f"at most {_MAX_NESTED} nested values", self._depth)
            return self._decode(code, data)
        finally:
            self._depth -= 1

    def _decode(self, code: int, data: bytes) -> object:
        inner = unpack(data, self._key, self) if code in (_ARRAY, _COMPLEX, _SCALAR, _TUPLE) else None
        match code, inner:
            case ((1 | 3), [list() as shape, str() as dtype, bytes() as elements]):
                try:
                    array = _array(shape, dtype, elements, self._key)
                except UnsupportedLeafError as error:
                    return TreeLeaf("", value=unreadable_leaf(error))
                kind = "numpy.scalar" if code == _SCALAR and not shape else None
                spec = ArraySpec(array.shape, dtype)
                extent = self._extent(elements)
                if len(elements) > _MAX_INLINE:
                    return TreeLeaf("", "np.ndarray", extent=extent, spec=spec, kind=kind)
                return TreeLeaf("", "np.ndarray", embedded=array, spec=spec, kind=kind)
            case 2, [float() | int() as real, float() | int() as imaginary]:
                return complex(real, imaginary)
            case 4, list():
                return tuple(inner)
        raise unexpected(self._key, "an array, a complex number or a tuple", f"extension type {code}")

    def _extent(self, elements: bytes) -> tuple[str, int, int]:
        """Return the byte range of the next elements in the file.

        The decoder does not report the range, so the file is searched for the elements. A range with equal bytes is as
        good.
        """
        start = self._whole.find(elements[:_FIRST_BYTES], self._position)
        if not self._whole.startswith(elements, start):
            start = self._whole.index(elements, self._position)  # slower: preparing the search takes time for each byte
        self._position = start + len(elements)
        return self._key, start, self._position


def _array(shape: list[Any], dtype: str, elements: bytes, key: str) -> HostArray:
    if len(shape) > 64 or any(type(extent) is not int or extent < 0 for extent in shape):
        raise unexpected(key, "the shape of an array", shape)
    element = dtype_from_name(dtype)
    if math.prod(shape) * element.itemsize != len(elements):
        raise unexpected(key, f"the elements of {dtype}{shape}", f"{len(elements)} bytes")
    return _elements(elements, element).reshape(shape)


def _elements(data: bytes | memoryview, dtype: np.dtype[Any]) -> HostArray:
    """Return little-endian elements."""
    return np.frombuffer(data, dtype.newbyteorder("<")).astype(dtype, copy=False)


def _replace_arrays(value: object, whole: bytes, key: str, depth: int) -> object:
    """Replace chunked arrays, and references to arrays outside the file, by leaves."""
    if depth > MAX_DEPTH:
        raise unexpected(key, "a tree", "one that is too deep")
    if isinstance(value, str) and value.startswith(_PLACEHOLDERS):
        prefix = next(prefix for prefix in _PLACEHOLDERS if value.startswith(prefix))
        return TreeLeaf(value.removeprefix(prefix))
    if isinstance(value, dict):
        if value.get(_CHUNKED) is True:
            return _join_chunks(value, whole, key)
        return {name: _replace_arrays(child, whole, key, depth + 1) for name, child in value.items()}
    if isinstance(value, list):
        return [_replace_arrays(child, whole, key, depth + 1) for child in value]
    return (
        tuple([_replace_arrays(child, whole, key, depth + 1) for child in value]) if isinstance(value, tuple) else value
    )


def _join_chunks(value: Mapping[str, Any], data: bytes, key: str) -> TreeLeaf:
    shape, chunks = value.get("shape"), value.get("chunks")
    if not isinstance(shape, dict) or not isinstance(chunks, dict) or not chunks:
        raise unexpected(key, "the shape and the chunks of an array", value)
    extents = [shape.get(str(number)) for number in range(len(shape))]
    parts: list[HostArray] = []
    for number in range(len(chunks)):
        part = chunks.get(str(number))
        if isinstance(part, TreeLeaf) and part.value is not None:
            return part  # its dtype is unknown
        if isinstance(part, TreeLeaf) and part.extent is not None and part.spec is not None:
            elements = memoryview(data)[part.extent[1] : part.extent[2]]
            parts.append(_elements(elements, part.spec.numpy_dtype))
        elif isinstance(part, TreeLeaf) and part.embedded is not None:
            parts.append(part.embedded.reshape(-1))
        else:
            raise unexpected(key, "a chunk of an array", part)
    joined = np.concatenate(parts) if len({part.dtype for part in parts}) == 1 else None
    if joined is None or any(type(extent) is not int or extent < 0 for extent in extents):
        raise unexpected(key, "chunks of one dtype, and a shape", extents)
    if len(extents) > 64 or math.prod(extents) != joined.size:  # type: ignore[arg-type]  # ints, checked above
        raise unexpected(key, f"{extents} elements in chunks", joined.size)
    try:
        whole = joined.reshape(extents)  # type: ignore[arg-type]  # ints, checked above
    except ValueError as error:  # NumPy does not support this shape, even though it has no elements
        raise unexpected(key, "a valid shape", extents) from error
    return TreeLeaf("", "np.ndarray", embedded=whole, spec=ArraySpec(whole.shape, whole.dtype.name))
