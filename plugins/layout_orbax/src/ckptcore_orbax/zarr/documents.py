"""JSON of zarr metadata. It is untrusted, so each part is checked before use."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Final, TypeVar

from ckptcore.errors import CorruptCheckpointError, UnsupportedLeafError
from ckptcore.model import JSON, ArraySpec
from ckptcore.model.file_kinds import kind_in_place_of
from ckptcore_orbax.zarr.dtypes import ZarrFormat

T = TypeVar("T")

_MAX_AXES: Final = 32
"""Limit of TensorStore, and of NumPy before version 2."""

_MAX_EXTENT: Final = 1 << 62

_MAX_DEPTH: Final = 64
"""Maximum nesting of lists and objects; code that walks a document can recurse this deep."""


def is_group(data: bytes) -> bool:
    """Return True if a metadata file of zarr 3 describes a group of arrays."""
    try:
        return parse_document(data).get("node_type") == "group"
    except CorruptCheckpointError:
        return False


def parse_document(data: bytes) -> dict[str, JSON]:
    """Return the JSON object in a metadata file.

    Raises:
        CorruptCheckpointError: it is not JSON, not an object, too deep, or has a duplicate member.
    """

    def unique(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
        made = dict(pairs)
        if len(made) != len(pairs):
            raise ValueError("an object has one member twice")
        return made

    try:
        document: JSON = json.loads(data, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        kind = kind_in_place_of(data)
        raise CorruptCheckpointError(f"it is {kind or f'not JSON: {error}'}") from error
    level: list[JSON] = [document]
    for _ in range(_MAX_DEPTH):
        level = [
            member
            for value in level
            if isinstance(value, dict | list)
            for member in (value.values() if isinstance(value, dict) else value)
        ]
    if level:
        raise CorruptCheckpointError(f"it is nested more than {_MAX_DEPTH} levels deep")
    return expect(document, dict, "the metadata")


def encode_document(document: Mapping[str, JSON]) -> bytes:
    """Return the bytes of a metadata file, compact and sorted, as TensorStore writes them."""
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def expect(value: object, kind: type[T], what: str) -> T:
    """Return a part of a document after checking its type.

    Raises:
        CorruptCheckpointError: it is missing or has another type.
    """
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise CorruptCheckpointError(f"{what} is {str(value)[:80]!r}; expected a {kind.__name__}")
    return value


def parse_shape(value: JSON) -> tuple[int, ...]:
    """Return the shape of an array, in elements.

    Raises:
        CorruptCheckpointError: it is not a list of sizes.
        UnsupportedLeafError: it has too many axes.
    """
    shape = tuple([expect(extent, int, "an extent of its shape") for extent in expect(value, list, "its shape")])
    if len(shape) > _MAX_AXES:
        raise UnsupportedLeafError(f"it has {len(shape)} axes; at most {_MAX_AXES} are supported")
    if any(not 0 <= extent < _MAX_EXTENT for extent in shape):
        raise CorruptCheckpointError(
            f"its shape is {str(shape)[:80]}; expected extents of at least 0 and less than 2**62"
        )
    return shape


def parse_chunk_shape(value: JSON, whole: tuple[int, ...], what: str) -> tuple[int, ...]:
    """Return the shape of a chunk, with as many axes as `whole` and at least one element along each.

    Raises:
        CorruptCheckpointError: it is not such a shape.
    """
    chunk = tuple([expect(extent, int, what) for extent in expect(value, list, what)])
    if len(chunk) != len(whole) or any(not 1 <= extent < _MAX_EXTENT for extent in chunk):
        raise CorruptCheckpointError(f"{what} is {str(chunk)[:80]}; expected {len(whole)} sizes of at least 1")
    return chunk


def check_sizes(spec: ArraySpec, chunk: tuple[int, ...]) -> None:
    """Check that the array, and one chunk of it, fit into the address space.

    Raises:
        CorruptCheckpointError: one of them does not.
    """
    if not spec.is_possible:
        raise CorruptCheckpointError(f"its shape and dtype, {spec}, exceed the address space")
    if prod(chunk) * spec.numpy_dtype.itemsize > sys.maxsize // 2:
        raise CorruptCheckpointError(f"a chunk of {chunk} elements exceeds the address space")


def encode_group(zarr_format: ZarrFormat) -> tuple[str, bytes]:
    """Return the name and content of the object that makes a directory a group without attributes.

    From the specifications: zarr 3, "Group metadata"; zarr 2, "Groups".
    """
    if zarr_format == 3:
        return "zarr.json", encode_document({"zarr_format": 3, "node_type": "group", "attributes": {}})
    return ".zgroup", encode_document({"zarr_format": 2})


def enclosing_groups(names: Iterable[str]) -> Sequence[str]:
    """Return the paths of all groups that contain arrays, ``""`` for the outermost one.

    Returns no groups if an array has no name, because the outermost directory is then that array.

    Args:
        names: the paths of the arrays; none is inside another.
    """
    groups = {""}
    for name in names:
        if not name:
            return ()
        parts = name.split("/")
        groups.update(["/".join(parts[:count]) for count in range(1, len(parts))])
    return sorted(groups)
