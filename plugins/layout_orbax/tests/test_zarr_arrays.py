"""Formats of arrays of zarr 2 and 3. tensorstore reads and writes arrays of each format."""

from __future__ import annotations

import itertools
from math import prod
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
from ckptcore_orbax.crc32c import CRC32C, crc32c_of
from ckptcore_orbax.zarr.array_files import inner_array, parse_zarr2, parse_zarr3, zarr2_array, zarr3_array
from ckptcore_orbax.zarr.chunking import iter_chunks
from ckptcore_orbax.zarr.dtypes import STORED_DTYPES, stored_spec
from ckptcore_orbax.zarr.formats import ArrayFormat, Compression, encode_metadata
from ckptcore_orbax.zarr.shard_index import (
    MISSING,
    decode_index,
    dense_index,
    encode_index,
    index_range,
    inner_offsets,
)
from ckptcore_testing.arrays import same_bits

from ckptcore.errors import UnsupportedLeafError
from ckptcore.model import ArraySpec, Box, dtype_from_name
from plugins.layout_orbax.tests.foreign_arrays import KNOWN_DTYPES

ALL_DTYPES = sorted(STORED_DTYPES[3])
assert STORED_DTYPES[2] == STORED_DTYPES[3]
OTHER_DTYPES = [
    "datetime64[ns]", "timedelta64[25s]", "datetime64", "S1", "S7", "U1", "U5", "float8_e4m3", "float6_e2m3fn",
    "uint4", "int1", "uint2", "complex32", "bcomplex32",
]  # fmt: skip


def is_dtype(name: str) -> bool:
    """Return False if the installed ml_dtypes lacks the dtype."""
    try:
        dtype_from_name(name)
    except UnsupportedLeafError:
        return False
    return True


class Kept:
    """An array in the memory storage of tensorstore."""

    def __init__(self) -> None:
        self.context = ts.Context()
        self.objects: Any = ts.KvStore.open("memory://", context=self.context).result()

    def open(self, format: ArrayFormat) -> Any:
        """Open the array with its stored metadata."""
        driver = "zarr3" if format.zarr_format == 3 else "zarr"
        spec = {
            "driver": driver,
            "kvstore": "memory://",
            "fill_missing_data_reads": False,
            "store_data_equal_to_fill_value": True,
        }
        # Use a new context, which has no cached chunks.
        return ts.open(spec, open=True, context=ts.Context({}, parent=self.context)).result()

    def create(self, driver: str, metadata: dict[str, Any], **more: Any) -> Any:
        """Create the array with tensorstore."""
        spec = {"driver": driver, "kvstore": "memory://", "metadata": metadata, **more}
        return ts.open(spec, create=True, context=self.context).result()

    def parse(self) -> ArrayFormat:
        """Parse the stored metadata."""
        if b"zarr.json" in self.objects.list().result():
            return parse_zarr3(self.objects["zarr.json"], "zarr.json")
        return parse_zarr2(self.objects[".zarray"], ".zarray")


def filled(spec: ArraySpec) -> np.ndarray[Any, Any]:
    """Return an array of random bits that are valid for the dtype."""
    bits = np.random.default_rng(3).integers(0, 256, max(1, spec.nbytes), np.uint8)
    if spec.dtype == "bool":
        bits &= 1
    if spec.dtype in ("int4", "float4_e2m1fn"):
        bits &= 15
    if spec.dtype == "int2":
        bits &= 3
    return bits[: spec.nbytes].view(spec.numpy_dtype).reshape(spec.shape)


def padded(array: np.ndarray[Any, Any], box: Box) -> bytes:
    """Return the bytes of a chunk. Elements beyond the edge of the array are zeros."""
    chunk = np.zeros(box.shape, array.dtype)
    inside = array[box.slices]
    chunk[tuple(slice(extent) for extent in inside.shape)] = inside
    return chunk.tobytes()


def write_by_hand(kept: Kept, format: ArrayFormat, array: np.ndarray[Any, Any]) -> None:
    """Write the bytes of each chunk in the way that the format describes, without tensorstore."""
    kept.objects[format.metadata_key] = encode_metadata(format)
    for index, box in iter_chunks(format.chunk, Box.whole(format.spec.shape)):
        inner_chunks = []
        for _, inner in iter_chunks(format.inner, box):
            payload = (
                padded(array, inner) if all(map(int.__lt__, inner.start, array.shape)) else bytes(format.inner_bytes)
            )
            assert len(payload) == format.inner_bytes
            inner_chunks.append(payload + CRC32C.encode(crc32c_of(payload)) if format.checksum else payload)
        data = b"".join(inner_chunks) + (encode_index(format, dense_index(format)) if format.sharded else b"")
        assert len(data) == format.chunk_bytes
        kept.objects[format.chunk_key(index)] = data


def read_by_hand(kept: Kept, format: ArrayFormat) -> np.ndarray[Any, Any]:
    """Read the elements of each chunk at the offsets of the format, without tensorstore."""
    assert format.direct
    array: np.ndarray[Any, Any] = np.empty(
        tuple(a * b for a, b in zip(format.grid, format.chunk, strict=True)), format.spec.numpy_dtype
    )
    for index, box in iter_chunks(format.chunk, Box.whole(format.spec.shape)):
        data = kept.objects[format.chunk_key(index)]
        offsets = np.zeros(1, np.int64)
        if format.sharded:
            start, stop = index_range(format, len(data), "chunk")
            offsets = decode_index(format, data[start:stop], len(data), "chunk").offsets
        for offset, (_, inner) in zip(offsets, iter_chunks(format.inner, box), strict=True):
            if offset == MISSING:
                assert format.fill is not None
                payload = format.fill * prod(format.inner)
            else:
                payload = data[offset : offset + format.inner_bytes]
                if format.checksum:
                    trailer = data[offset + format.inner_bytes : offset + format.inner_stored_bytes]
                    assert CRC32C.encode(crc32c_of(payload)) == trailer
            array[inner.slices] = np.frombuffer(payload, format.spec.numpy_dtype).reshape(format.inner)
    return array[Box.whole(format.spec.shape).slices]


SHAPES = [
    ((), (), ()),
    ((0,), (1,), (1,)),
    ((3, 0), (3, 1), (3, 1)),
    ((7,), (3,), (3,)),
    ((5, 6), (4, 6), (2, 3)),
    ((4, 4), (4, 4), (1, 4)),
]


@pytest.mark.parametrize("dtype", KNOWN_DTYPES)
def test_tensorstore_reads_and_overwrites_chunks_of_each_format(dtype: str) -> None:
    for shape, chunk, inner in SHAPES:
        spec = ArraySpec(shape, dtype)
        array = filled(spec)
        formats = [zarr3_array(spec, chunk, inner, checksum=checksum) for checksum in (True, False)]
        for format in [*formats, zarr2_array(spec, chunk)]:
            kept = Kept()
            write_by_hand(kept, format, array)
            stored = kept.open(format)
            assert (stored.shape, stored.dtype.name) == (shape, dtype)
            assert (stored.chunk_layout.write_chunk.shape or ()) == chunk
            assert (stored.chunk_layout.read_chunk.shape or ()) == format.inner
            assert same_bits(np.asarray(stored.read().result()), array)
            assert kept.parse() == format
            if not array.size:
                continue
            # tensorstore overwrites the same keys, and the chunks have the same elements.
            before = {key: kept.objects[key] for key in kept.objects.list().result()}
            stored.write(array).result()
            assert set(kept.objects.list().result()) == before.keys()
            assert same_bits(read_by_hand(kept, format), array)


@pytest.mark.parametrize("inner", [(4, 6), (2, 3)])
def test_tensorstore_detects_every_damaged_byte(inner: tuple[int, int]) -> None:
    spec = ArraySpec((4, 6), "float32")
    format = zarr3_array(spec, (4, 6), inner, checksum=True)
    kept = Kept()
    write_by_hand(kept, format, filled(spec))
    whole = kept.objects["c/0/0"]
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 16
        kept.objects["c/0/0"] = bytes(damaged)
        with pytest.raises(ValueError, match="c/0/0"):
            kept.open(format).read().result()


@pytest.mark.parametrize("dtype", [*KNOWN_DTYPES, *filter(is_dtype, OTHER_DTYPES)])
@pytest.mark.parametrize("zarr_format", [2, 3])
def test_every_dtype_is_stored_with_its_own_size(dtype: str, zarr_format: Any) -> None:
    spec = ArraySpec((3, 2), dtype)
    stored = stored_spec(spec, zarr_format)
    assert stored.nbytes == spec.nbytes
    assert stored.dtype in ALL_DTYPES
    assert (stored == spec) == (dtype in ALL_DTYPES)
    element = stored.shape[2:]
    assert element in ((), (dtype_from_name(dtype).itemsize,)) and element != (1,)
    array = filled(spec)
    chunk = (2, 2, *element)
    format = zarr3_array(stored, chunk, chunk, checksum=True) if zarr_format == 3 else zarr2_array(stored, chunk)
    kept = Kept()
    write_by_hand(
        kept, format, array.view(stored.dtype if stored.dtype == "int64" else stored.numpy_dtype).reshape(stored.shape)
    )
    assert np.asarray(kept.open(format).read().result()).tobytes() == array.tobytes()


def test_dtypes_that_zarr_lacks_are_refused() -> None:
    spec = ArraySpec((3,), "uint4")
    with pytest.raises(UnsupportedLeafError, match="stored_spec"):
        zarr3_array(spec, (3,), (3,), checksum=True)
    with pytest.raises(UnsupportedLeafError, match="stored_spec"):
        zarr2_array(spec, (3,))


@pytest.mark.parametrize(
    ("chunk", "inner"), [((0, 2), (0, 2)), ((2,), (2,)), ((4, 4), (3, 4)), ((4, 4), (8, 4)), ((4, 4), (4, 0))]
)
def test_invalid_shapes_of_chunks_are_refused(chunk: tuple[int, ...], inner: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="is invalid for array"):
        zarr3_array(ArraySpec((4, 4), "int8"), chunk, inner, checksum=True)


@pytest.mark.parametrize(
    "compression",
    [
        Compression("zstd"),
        Compression("zstd", -5),
        Compression("gzip"),
        Compression("gzip", 9),
        Compression("blosc"),
        Compression("blosc", 1),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "uint8", "complex128"])
def test_tensorstore_writes_compressed_arrays_of_each_format(compression: Compression, dtype: str) -> None:
    spec = ArraySpec((5, 6), dtype)
    array = np.arange(30).reshape(5, 6).astype(spec.numpy_dtype)
    for format in (
        zarr3_array(spec, (4, 6), (4, 6), checksum=True, compression=compression),
        zarr3_array(spec, (4, 6), (2, 3), checksum=False, compression=compression),
        zarr3_array(spec, (4, 6), (2, 3), checksum=True, compression=compression),
        zarr2_array(spec, (4, 6), compression=compression),
    ):
        assert not format.direct and not format.checksum
        kept = Kept()
        kept.objects[format.metadata_key] = encode_metadata(format)
        kept.open(format).write(array).result()
        assert same_bits(np.asarray(kept.open(format).read().result()), array)
        assert kept.parse() == format
        # An inner chunk can be decoded alone, with the metadata of `inner_array`.
        data = kept.objects[format.chunk_key((0, 0))]
        piece = data
        if format.sharded:
            start, stop = index_range(format, len(data), "chunk")
            index = decode_index(format, data[start:stop], len(data), "chunk")
            piece = data[index.offsets[0] : index.offsets[0] + index.lengths[0]]
        single = inner_array(format)
        alone = Kept()
        alone.objects[single.metadata_key] = encode_metadata(single)
        alone.objects[single.chunk_key((0, 0))] = piece
        inner = Box.whole(format.inner).slices
        assert same_bits(np.asarray(alone.open(single).read().result()), np.ascontiguousarray(array[inner]))
        assert alone.parse() == single


@pytest.mark.parametrize(
    ("name", "level"), [("zstd", 23), ("gzip", -1), ("blosc", 10), ("zstd", True), ("zstd", 1.5), ("lz4", None)]
)
def test_invalid_compressions_are_refused(name: Any, level: Any) -> None:
    with pytest.raises(ValueError, match="give"):
        Compression(name, level)


LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
BIG = {"name": "bytes", "configuration": {"endian": "big"}}
CRC = {"name": "crc32c"}
ZSTD = {"name": "zstd", "configuration": {"level": 1, "checksum": False}}


def sharding(codecs: list[Any], **more: Any) -> list[Any]:
    """Return the codec ``sharding_indexed`` as a chain. Its inner chunks have the shape (2, 3)."""
    configuration = {"chunk_shape": [2, 3], "codecs": codecs, "index_codecs": [LITTLE, CRC], **more}
    return [{"name": "sharding_indexed", "configuration": configuration}]


def transposed(order: Any) -> dict[str, Any]:
    """Return a transpose codec."""
    return {"name": "transpose", "configuration": {"order": order}}


CHAINS: list[tuple[list[Any], tuple[bool, bool, bool]]] = [
    # The codecs, and the expected values of `direct`, `checksum` and `sharded`.
    ([LITTLE], (True, False, False)),
    ([LITTLE, CRC], (True, True, False)),
    ([BIG], (False, False, False)),
    ([LITTLE, ZSTD], (False, False, False)),
    ([LITTLE, ZSTD, CRC], (False, False, False)),
    ([LITTLE, CRC, ZSTD], (False, False, False)),
    ([LITTLE, CRC, CRC], (False, False, False)),
    ([transposed([0, 1]), LITTLE, CRC], (True, True, False)),
    ([transposed("C"), LITTLE], (True, False, False)),
    ([transposed([1, 0]), LITTLE], (False, False, False)),
    ([transposed("F"), LITTLE], (False, False, False)),
    (sharding([LITTLE]), (True, False, True)),
    (sharding([LITTLE, CRC]), (True, True, True)),
    (sharding([LITTLE, CRC], index_location="start"), (True, True, True)),
    (sharding([LITTLE], index_codecs=[LITTLE]), (True, False, True)),
    (sharding([LITTLE], index_codecs=[LITTLE], index_location="start"), (True, False, True)),
    (sharding([LITTLE], index_codecs=[BIG, CRC]), (False, False, False)),
    (sharding([transposed([0, 1]), LITTLE]), (True, False, True)),
    (sharding([transposed([1, 0]), LITTLE]), (False, False, True)),
    (sharding([LITTLE, ZSTD]), (False, False, True)),
    ([transposed([0, 1]), *sharding([LITTLE])], (True, False, True)),
    ([transposed([1, 0]), *sharding([LITTLE], chunk_shape=[3, 2])], (False, False, False)),
    (sharding(sharding([LITTLE], chunk_shape=[1, 3])), (False, False, True)),
]


@pytest.mark.parametrize(("codecs", "expected"), CHAINS)
def test_formats_of_chains_of_codecs(codecs: list[Any], expected: tuple[bool, bool, bool]) -> None:
    kept = Kept()
    metadata = {
        "shape": [5, 6],
        "data_type": "float32",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4, 6]}},
        "codecs": codecs,
        "fill_value": "NaN",
    }
    stored = kept.create("zarr3", metadata)
    array = np.arange(30, dtype=np.float32).reshape(5, 6)
    stored.write(array).result()
    format = kept.parse()
    assert (format.direct, format.checksum, format.sharded) == expected
    if format.sharded:
        assert stored.chunk_layout.read_chunk.shape[0] in (1, *format.inner)
    if format.direct:
        assert same_bits(read_by_hand(kept, format), array)


@pytest.mark.parametrize(
    ("change", "direct"),
    [
        ({}, True),
        ({"dtype": ">f4"}, False),
        ({"order": "F"}, False),
        ({"compressor": {"id": "zlib", "level": 1}}, False),
        ({"dimension_separator": "/"}, True),
    ],
)
def test_formats_of_arrays_of_zarr_2(change: dict[str, Any], direct: bool) -> None:
    kept = Kept()
    metadata = {"shape": [5, 6], "dtype": "<f4", "chunks": [4, 6], "compressor": None, "order": "C", **change}
    array = np.arange(30, dtype=np.float32).reshape(5, 6)
    kept.create("zarr", metadata).write(array).result()
    format = kept.parse()
    assert (format.direct, format.spec, format.chunk, format.fill) == (
        direct,
        ArraySpec((5, 6), "float32"),
        (4, 6),
        None,
    )
    keys = {format.chunk_key(index).encode() for index in itertools.product(*map(range, format.grid))}
    assert set(kept.objects.list().result()) == {b".zarray", *keys}
    if direct:
        assert same_bits(read_by_hand(kept, format), array)


@pytest.mark.parametrize("encoding", ["default", "v2"])
@pytest.mark.parametrize("separator", ["/", ".", None])
@pytest.mark.parametrize("shape", [(), (3,), (3, 4)])
def test_keys_of_chunks_equal_those_of_tensorstore(
    encoding: str, separator: str | None, shape: tuple[int, ...]
) -> None:
    kept = Kept()
    metadata: dict[str, Any] = {
        "shape": list(shape),
        "data_type": "int16",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2] * len(shape)}},
        "chunk_key_encoding": {"name": encoding, "configuration": {"separator": separator}},
        "codecs": [LITTLE],
    }
    if separator is None:
        del metadata["chunk_key_encoding"]["configuration"]
    array = np.full(shape, 3, np.int16)
    kept.create("zarr3", metadata).write(array).result()
    format = kept.parse()
    keys = {format.chunk_key(index).encode() for index in itertools.product(*map(range, format.grid))}
    assert set(kept.objects.list().result()) == {b"zarr.json", *keys}
    assert same_bits(read_by_hand(kept, format), array)


def test_unwritten_inner_chunks_are_missing_in_the_index() -> None:
    kept = Kept()
    metadata = {
        "shape": [4, 6],
        "data_type": "float32",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4, 6]}},
        "codecs": sharding([LITTLE, CRC]),
        "fill_value": 2.5,
    }
    kept.create("zarr3", metadata)[2:, 3:].write(np.ones((2, 3), np.float32)).result()
    format = kept.parse()
    data = kept.objects["c/0/0"]
    start, stop = index_range(format, len(data), "chunk")
    index = decode_index(format, data[start:stop], len(data), "chunk")
    assert index.offsets.tolist() == [MISSING, MISSING, MISSING, 0]
    assert index.lengths.tolist() == [0, 0, 0, 28]
    assert encode_index(format, index) == data[start:stop]
    array = read_by_hand(kept, format)
    assert array[2:, 3:].tolist() == [[1.0] * 3] * 2 and array[:2].tolist() == [[2.5] * 6] * 2


def test_offsets_of_inner_chunks_after_an_index_at_the_start() -> None:
    kept = Kept()
    format = zarr3_array(ArraySpec((4, 6), "int16"), (4, 6), (2, 3), checksum=True)
    assert inner_offsets(format).tolist() == [0, 16, 32, 48]
    metadata = {
        "shape": [4, 6],
        "data_type": "int16",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4, 6]}},
        "codecs": sharding([LITTLE, CRC], index_location="start"),
        "fill_value": 0,
    }
    kept.create("zarr3", metadata)
    assert inner_offsets(kept.parse()).tolist() == [68, 84, 100, 116]


FILLS: list[tuple[str, Any]] = [
    ("float32", 1.5), ("float32", "NaN"), ("float32", "-Infinity"), ("float32", "0x7fc00001"), ("float32", "0x1"),
    ("float32", 1e39), ("float32", -0.0), ("float64", 3), ("bfloat16", 1.5), ("bfloat16", "0x7fc1"),
    ("float16", "Infinity"), ("float8_e4m3fn", 2.0), ("float8_e8m0fnu", 0), ("uint8", 255), ("int8", -128),
    ("uint8", 1.0), ("int4", -8), ("int2", 1), ("int64", -(2**63)), ("uint64", 2**64 - 1), ("bool", True),
    ("complex64", [1, "NaN"]), ("complex128", ["0x7ff8000000000001", -2.5]),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "fill"), [(dtype, fill) for dtype, fill in FILLS if dtype in KNOWN_DTYPES])
def test_fill_values_equal_those_of_tensorstore(dtype: str, fill: Any) -> None:
    kept = Kept()
    metadata = {
        "shape": [2],
        "data_type": dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2]}},
        "codecs": [LITTLE if dtype_from_name(dtype).itemsize > 1 else {"name": "bytes"}],
        "fill_value": fill,
    }
    stored = kept.create("zarr3", metadata)
    parsed = np.frombuffer((kept.parse().fill or b"") * 2, dtype_from_name(dtype))
    expected = np.asarray(stored.read().result())
    if isinstance(fill, str) and not fill.startswith("0x"):
        assert str(parsed) == str(expected)  # all NaNs are equal as text
    elif "NaN" in np.array(fill, object).ravel().tolist():
        assert str(parsed) == str(expected)
    elif dtype.startswith("int"):
        assert parsed.tolist() == expected.tolist()  # the upper bits of an int4 byte are unused
    else:
        assert same_bits(parsed, expected)
