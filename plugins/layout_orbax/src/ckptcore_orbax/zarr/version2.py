"""The file ``.zarray``: metadata of a zarr 2 array, parsed and encoded."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from ckptcore.errors import CorruptCheckpointError, UnsupportedLeafError
from ckptcore.model import JSON, ArraySpec
from ckptcore_orbax.zarr.documents import check_sizes, expect, parse_chunk_shape, parse_document, parse_shape
from ckptcore_orbax.zarr.dtypes import STORED_DTYPES, dtype_of_version2, version2_of_dtype
from ckptcore_orbax.zarr.fills import parse_fill_version2
from ckptcore_orbax.zarr.formats import ArrayFormat, ChunkKeys, Compression

_CACHED_BYTES: Final = 2048


def parse_zarr2(data: bytes, key: str) -> ArrayFormat:
    """Parse the ``.zarray`` of an array, which may be hostile.

    Follows the zarr 2 specification and accepts what TensorStore 0.1.86 accepts. Raw chunks (see
    `ArrayFormat.direct`) may also have NumPy dtypes that TensorStore lacks, such as dates. Results
    are cached by content.

    Args:
        data: the whole file.
        key: its name, for errors.

    Raises:
        CorruptCheckpointError: it is not the metadata of an array.
        UnsupportedLeafError: it has a dtype that is not supported.
    """
    try:
        return _parse_again(data) if len(data) <= _CACHED_BYTES else _parse(data)
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"the array metadata in {key} cannot be read: {error}", key=key) from error
    except UnsupportedLeafError as error:
        raise UnsupportedLeafError(f"the array of {key} cannot be read: {error}; other arrays can") from error


def zarr2_array(spec: ArraySpec, chunk: tuple[int, ...], *, compression: Compression | None = None) -> ArrayFormat:
    """Return the format of a new array: C order, little endian, with chunk keys like ``0.1``, as in Orbax.

    Args:
        spec: a result of `stored_spec`.
        chunk: shape of a chunk; at least 1 along each axis.
        compression: compression of each chunk; None: raw elements.

    Raises:
        UnsupportedLeafError: zarr 2 does not have the dtype.
        ValueError: the chunk shape is invalid for the array.
    """
    if spec.dtype not in STORED_DTYPES[2]:
        raise UnsupportedLeafError(f"zarr 2 has no dtype {spec.dtype}; use the result of `stored_spec`")
    if len(spec.shape) != len(chunk) or not all(size > 0 for size in chunk):
        raise ValueError(f"chunk shape {chunk} is invalid for array {spec}: expected one size per axis, at least 1")
    document: dict[str, JSON] = {
        "chunks": list(chunk),
        "compressor": None if compression is None else _compressor(compression),
        "dimension_separator": ".",
        "dtype": version2_of_dtype(spec.dtype),
        "fill_value": None,
        "filters": None,
        "order": "C",
        "shape": list(spec.shape),
        "zarr_format": 2,
    }
    return _array_format(spec, chunk, ChunkKeys("v2", "."), document, direct=compression is None, fill=None)


def _compressor(compression: Compression) -> JSON:
    level = compression.level
    if compression.name == "blosc":
        return {"id": "blosc", "cname": "lz4", "clevel": 5 if level is None else level, "shuffle": 1, "blocksize": 0}
    return {"id": compression.name, "level": 1 if level is None else level}


def _array_format(
    spec: ArraySpec,
    chunk: tuple[int, ...],
    keys: ChunkKeys,
    document: dict[str, JSON],
    *,
    direct: bool,
    fill: bytes | None,
) -> ArrayFormat:
    return ArrayFormat(
        zarr_format=2,
        spec=spec,
        chunk=chunk,
        inner=chunk,
        sharded=False,
        index_at="end",
        index_checksum=False,
        direct=direct,
        checksum=False,
        fill=fill,
        keys=keys,
        document=document,
    )


def _parse(data: bytes) -> ArrayFormat:
    document = parse_document(data)
    found = expect(document.get("zarr_format"), int, "its zarr_format")
    if found != 2:
        raise CorruptCheckpointError(f"its zarr_format is {found}; expected 2")
    for member in ("compressor", "dtype", "fill_value", "filters"):
        if member not in document:
            raise CorruptCheckpointError(f"it has no {member}")
    shape = parse_shape(document.get("shape"))
    dtype = document["dtype"]
    if not isinstance(dtype, str | list):
        raise CorruptCheckpointError(f"its dtype is {str(dtype)[:80]!r}; expected a name")
    name, endian = dtype_of_version2(dtype)
    spec = ArraySpec(shape, name)
    chunk = parse_chunk_shape(document.get("chunks"), shape, "its chunk")
    check_sizes(spec, chunk)
    if document["compressor"] is not None:
        codec = expect(document["compressor"], dict, "its compressor")
        expect(codec.get("id"), str, "the id of its compressor")
    filters = document["filters"]
    if filters is not None:
        expect(filters, list, "its list of filters")
    order = document.get("order")
    if order not in ("C", "F"):
        raise CorruptCheckpointError(f"its order is {str(order)[:80]!r}; expected 'C' or 'F'")
    separator = document.get("dimension_separator", ".")
    if separator not in ("/", "."):
        raise CorruptCheckpointError(f"its dimension_separator is {str(separator)[:80]!r}; expected / or .")
    direct = document["compressor"] is None and not filters and endian == "little" and (order == "C" or len(shape) < 2)
    if not direct and name not in STORED_DTYPES[2]:
        raise UnsupportedLeafError(f"its dtype {str(dtype)[:80]!r} is supported only for raw chunks")
    fill = parse_fill_version2(document["fill_value"], name)
    return _array_format(
        spec, chunk, ChunkKeys("v2", "/" if separator == "/" else "."), document, direct=direct, fill=fill
    )


_parse_again = lru_cache(maxsize=256)(_parse)
