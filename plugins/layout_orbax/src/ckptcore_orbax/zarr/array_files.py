"""The files ``.zarray`` and ``zarr.json``: metadata of an array of zarr 2 or 3, parsed and encoded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Final, Literal

from ckptcore.errors import CorruptCheckpointError, UnsupportedLeafError
from ckptcore.model import JSON, ArraySpec
from ckptcore_orbax.zarr.codecs import chunk_codecs, codecs_to_json
from ckptcore_orbax.zarr.documents import check_sizes, expect, parse_chunk_shape, parse_document, parse_shape
from ckptcore_orbax.zarr.dtypes import STORED_DTYPES, ZarrFormat, dtype_of_version2, version2_of_dtype
from ckptcore_orbax.zarr.fills import parse_fill_version2, parse_fill_version3, zero_of_version3
from ckptcore_orbax.zarr.formats import ArrayFormat, ChunkKeys, Compression

_MEMBERS: Final = frozenset(
    [
        "attributes", "chunk_grid", "chunk_key_encoding", "codecs", "data_type", "dimension_names", "fill_value",
        "node_type", "shape", "storage_transformers", "zarr_format",
    ]
)  # fmt: skip
_CACHED_BYTES: Final = 2048
"""Maximum size of a file whose parsed content is cached, in bytes."""


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
    return _parse(2, data, key)


def zarr2_array(spec: ArraySpec, chunk: tuple[int, ...], *, compression: Compression | None = None) -> ArrayFormat:
    """Return the format of a new array: C order, little endian, with chunk keys like ``0.1``, as in Orbax.

    Args:
        spec: a result of `stored_spec`.
        chunk: shape of a chunk; at least 1 along each axis.
        compression: compression of each chunk; None for raw elements.

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


def parse_zarr3(data: bytes, key: str) -> ArrayFormat:
    """Parse the ``zarr.json`` of an array, which may be hostile.

    Follows the zarr 3.0 specification and accepts what TensorStore 0.1.86 accepts. Results for
    small files are cached by content.

    Args:
        data: the whole file.
        key: key of the file, for errors.

    Raises:
        CorruptCheckpointError: the file is not the metadata of an array.
        UnsupportedLeafError: the array has a dtype or a feature that is not supported.
    """
    return _parse(3, data, key)


def zarr3_array(
    spec: ArraySpec,
    chunk: tuple[int, ...],
    inner: tuple[int, ...],
    *,
    checksum: bool,
    compression: Compression | None = None,
    dimension_names: Sequence[str] | None = None,
) -> ArrayFormat:
    """Return the format of a new array: C order, little endian, sharded if `inner` is smaller than `chunk`.

    Args:
        spec: a result of `stored_spec`.
        chunk: shape of a write chunk; at least 1 along each axis.
        inner: shape of a read chunk; divides the write chunk.
        checksum: store the CRC32C of each inner chunk after it.
        compression: compression of each inner chunk; None for raw elements.
        dimension_names: names of all axes, or None.

    Raises:
        UnsupportedLeafError: zarr 3 does not have the dtype.
        ValueError: the chunk shapes are invalid for the array.
    """
    if spec.dtype not in STORED_DTYPES[3]:
        raise UnsupportedLeafError(f"zarr 3 has no dtype {spec.dtype}; use the result of `stored_spec`")
    if not len(spec.shape) == len(chunk) == len(inner) or not all(
        0 < part <= size and size % part == 0 for size, part in zip(chunk, inner, strict=True)
    ):
        raise ValueError(
            f"chunk shape {chunk} with inner chunk shape {inner} is invalid for array {spec}: expected one size per "
            "axis, at least 1, and chunk sizes that are multiples of the inner chunk sizes"
        )
    itemsize = spec.numpy_dtype.itemsize
    sharded = inner != chunk
    codecs = codecs_to_json(chunk, inner, itemsize, checksum=checksum, compression=compression)
    document: dict[str, JSON] = {
        "chunk_grid": {"configuration": {"chunk_shape": list(chunk)}, "name": "regular"},
        "chunk_key_encoding": {"name": "default"},
        "codecs": codecs,
        "data_type": spec.dtype,
        "fill_value": zero_of_version3(spec.dtype),
        "node_type": "array",
        "shape": list(spec.shape),
        "zarr_format": 3,
    }
    if dimension_names is not None:
        document["dimension_names"] = list(dimension_names)
    return ArrayFormat(
        zarr_format=3,
        spec=spec,
        chunk=chunk,
        inner=inner,
        sharded=sharded,
        index_at="end",
        index_checksum=sharded,
        direct=compression is None,
        checksum=checksum and compression is None,
        fill=bytes(itemsize),
        keys=ChunkKeys("default", "/"),
        document=document,
    )


def inner_array(format: ArrayFormat) -> ArrayFormat:
    """Return the format of an array of one inner chunk, for decoding such a chunk by itself.

    The key of the only chunk is ``inner_array(format).chunk_key((0,) * axes)``.
    """
    document = dict(format.document)
    document["shape"] = list(format.inner)
    if format.zarr_format == 2:
        document["chunks"] = list(format.inner)
    else:
        document["chunk_grid"] = {"configuration": {"chunk_shape": list(format.inner)}, "name": "regular"}
        itemsize = format.spec.numpy_dtype.itemsize
        document["codecs"] = chunk_codecs(document["codecs"], format.chunk, itemsize).inner_codecs
        document.pop("dimension_names", None)
    return replace(
        format,
        spec=ArraySpec(format.inner, format.spec.dtype),
        chunk=format.inner,
        sharded=False,
        index_at="end",
        index_checksum=False,
        document=document,
    )


def _parse(version: ZarrFormat, data: bytes, key: str) -> ArrayFormat:
    parse = _parse_version2 if version == 2 else _parse_version3
    try:
        return _parse_again(parse, data) if len(data) <= _CACHED_BYTES else parse(data)
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"the array metadata in {key} cannot be read: {error}", key=key) from error
    except UnsupportedLeafError as error:
        raise UnsupportedLeafError(f"the array of {key} cannot be read: {error}; other arrays can") from error


@lru_cache(maxsize=512)
def _parse_again(parse: Callable[[bytes], ArrayFormat], data: bytes) -> ArrayFormat:
    return parse(data)


def _parse_version2(data: bytes) -> ArrayFormat:
    document = parse_document(data)
    _check_version(document, 2)
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


def _parse_version3(data: bytes) -> ArrayFormat:
    document = parse_document(data)
    _check_version(document, 3)
    node = expect(document.get("node_type"), str, "its node_type")
    if node != "array":
        raise CorruptCheckpointError(f"it describes a {node[:40]!r}; expected an array")
    for member in document.keys() - _MEMBERS:
        value = document[member]
        if not isinstance(value, dict) or value.get("must_understand") is not False:
            raise UnsupportedLeafError(f"its member {member[:80]!r} must be understood, but is not supported")
    if document.get("storage_transformers"):
        raise UnsupportedLeafError("its storage transformers are not supported")
    shape = parse_shape(document.get("shape"))
    spec = ArraySpec(shape, _dtype(document.get("data_type")))
    chunk = _chunk(document.get("chunk_grid"), shape)
    check_sizes(spec, chunk)
    if "dimension_names" in document:
        _check_dimension_names(document["dimension_names"], len(shape))
    codecs = chunk_codecs(document.get("codecs"), chunk, spec.numpy_dtype.itemsize)
    return ArrayFormat(
        zarr_format=3,
        spec=spec,
        chunk=chunk,
        inner=codecs.inner,
        sharded=codecs.sharded,
        index_at=codecs.index_at,
        index_checksum=codecs.index_checksum,
        direct=codecs.direct,
        checksum=codecs.checksum,
        fill=parse_fill_version3(document.get("fill_value"), spec.dtype),
        keys=_keys(document.get("chunk_key_encoding")),
        document=document,
    )


def _check_version(document: Mapping[str, JSON], expected: ZarrFormat) -> None:
    version = expect(document.get("zarr_format"), int, "its zarr_format")
    if version != expected:
        raise CorruptCheckpointError(f"its zarr_format is {version}; expected {expected}")


def _dtype(value: JSON) -> str:
    if isinstance(value, str) and value in STORED_DTYPES[3]:
        return value
    if not isinstance(value, str | dict | list):
        raise CorruptCheckpointError(f"its data_type is {str(value)[:80]!r}; expected a name")
    raise UnsupportedLeafError(f"its data_type {str(value)[:80]!r} is not supported by ckptcore")


def _chunk(value: JSON, shape: tuple[int, ...]) -> tuple[int, ...]:
    grid = expect(value, dict, "its chunk_grid")
    name = expect(grid.get("name"), str, "the name of its chunk_grid")
    if name != "regular":
        raise UnsupportedLeafError(f"its chunk_grid is {name[:80]!r}; only regular grids are supported")
    configuration = expect(grid.get("configuration"), dict, "the configuration of its chunk_grid")
    return parse_chunk_shape(configuration.get("chunk_shape"), shape, "its chunk")


def _check_dimension_names(value: JSON, axes: int) -> None:
    names = expect(value, list, "its dimension_names")
    if len(names) != axes or not all(name is None or isinstance(name, str) for name in names):
        raise CorruptCheckpointError(f"its dimension_names are {str(names)[:80]}; expected {axes} strings or nulls")


def _keys(value: JSON) -> ChunkKeys:
    encoding = {"name": value} if isinstance(value, str) else expect(value, dict, "its chunk_key_encoding")
    name = expect(encoding.get("name"), str, "the name of its chunk_key_encoding")
    if name not in ("default", "v2"):
        raise UnsupportedLeafError(f"its chunk_key_encoding is {name[:80]!r}; only 'default' and 'v2' are supported")
    configuration = expect(encoding.get("configuration", {}), dict, "the configuration of its chunk_key_encoding")
    separator = configuration.get("separator", "/" if name == "default" else ".")
    if separator not in ("/", "."):
        raise CorruptCheckpointError(f"the separator of its chunk keys is {str(separator)[:80]!r}; expected / or .")
    kind: Literal["default", "v2"] = "default" if name == "default" else "v2"
    return ChunkKeys(kind, "/" if separator == "/" else ".")
