"""The file `checkpoint` used before `_METADATA`: a msgpack tree with small arrays, or references to arrays."""

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

__all__ = ["AGGREGATE_FILE", "parse_aggregate", "unpack"]

AGGREGATE_FILE: Final = "checkpoint"

_PLACEHOLDERS: Final = ("PLACEHOLDER://", "AGGREGATED://")
"""Prefixes of strings that refer to an array outside the file. The name of the array follows."""

_CHUNKED: Final = "__msgpack_chunked_array__"
"""Key of a dict that is an array too large for one value: ``shape`` and ``chunks`` are dicts with keys 0, 1, ..."""

_ARRAY, _COMPLEX, _SCALAR, _TUPLE = 1, 2, 3, 4
"""Extension types of Flax.

Array: ``(shape, dtype, bytes)`` in nested msgpack; complex: ``(real, imaginary)``; scalar: like an
array; tuple: a list.
"""

_MAX_NESTED: Final = 16
"""Maximum nesting of extension values, each of which takes much stack space."""


def parse_aggregate(data: bytes, key: str) -> OrbaxTree:
    """Parse the file, which may be hostile. Takes memory in proportion to the file.

    Raises:
        CorruptCheckpointError: the file is not msgpack, or does not contain a valid tree.
    """
    return plain_tree(_replace_arrays(unpack(data, key, _Extensions(key)), key, 0), key)


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
    """Decodes extension types."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._depth = 0

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
                return TreeLeaf("", "np.ndarray", embedded=array, spec=ArraySpec(array.shape, dtype), kind=kind)
            case 2, [float() | int() as real, float() | int() as imaginary]:
                return complex(real, imaginary)
            case 4, list():
                return tuple(inner)
        raise unexpected(self._key, "an array, a complex number or a tuple", f"extension type {code}")


def _array(shape: list[Any], dtype: str, elements: bytes, key: str) -> HostArray:
    if len(shape) > 64 or any(type(extent) is not int or extent < 0 for extent in shape):
        raise unexpected(key, "the shape of an array", shape)
    element = dtype_from_name(dtype)
    if math.prod(shape) * element.itemsize != len(elements):
        raise unexpected(key, f"the elements of {dtype}{shape}", f"{len(elements)} bytes")
    return np.frombuffer(elements, element.newbyteorder("<")).astype(element, copy=False).reshape(shape)


def _replace_arrays(value: object, key: str, depth: int) -> object:
    """Replace chunked arrays, and references to arrays outside the file, by leaves."""
    if depth > MAX_DEPTH:
        raise unexpected(key, "a tree", "one that is too deep")
    if isinstance(value, str) and value.startswith(_PLACEHOLDERS):
        return TreeLeaf(value.partition("://")[2])
    if isinstance(value, dict):
        if value.get(_CHUNKED) is True:
            return _join_chunks(value, key)
        return {name: _replace_arrays(child, key, depth + 1) for name, child in value.items()}
    if isinstance(value, list):
        return [_replace_arrays(child, key, depth + 1) for child in value]
    return tuple([_replace_arrays(child, key, depth + 1) for child in value]) if isinstance(value, tuple) else value


def _join_chunks(value: Mapping[str, Any], key: str) -> TreeLeaf:
    shape, chunks = value.get("shape"), value.get("chunks")
    if not isinstance(shape, dict) or not isinstance(chunks, dict) or not chunks:
        raise unexpected(key, "the shape and the chunks of an array", value)
    extents = [shape.get(str(number)) for number in range(len(shape))]
    parts: list[HostArray] = []
    for number in range(len(chunks)):
        part = chunks.get(str(number))
        if isinstance(part, TreeLeaf) and part.value is not None:
            return part  # its dtype is unknown
        if not isinstance(part, TreeLeaf) or part.embedded is None:
            raise unexpected(key, "a chunk of an array", part)
        parts.append(part.embedded.reshape(-1))
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
