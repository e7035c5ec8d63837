"""Damaged and hostile metadata and shard indexes of zarr arrays."""

from __future__ import annotations

import json
import random
import struct
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
from ckptcore_orbax.crc32c import CRC32C, crc32c_of
from ckptcore_orbax.zarr.array_files import parse_zarr2, parse_zarr3, zarr2_array, zarr3_array
from ckptcore_orbax.zarr.formats import ArrayFormat, Compression, encode_metadata
from ckptcore_orbax.zarr.shard_index import decode_index, dense_index, encode_index, index_range
from ckptcore_testing.hostile_json import tampered

from ckptcore.errors import CheckpointError, ChecksumError, CorruptCheckpointError, UnsupportedLeafError
from ckptcore.model import ArraySpec

SPEC = ArraySpec((8, 6), "float32")
VERSION3 = [
    zarr3_array(SPEC, (4, 6), (4, 6), checksum=True),
    zarr3_array(SPEC, (4, 6), (2, 3), checksum=True),
    zarr3_array(SPEC, (4, 6), (2, 3), checksum=False, compression=Compression("zstd")),
]
VERSION2 = [zarr2_array(SPEC, (4, 6)), zarr2_array(SPEC, (4, 6), compression=Compression("gzip"))]


def document(format: ArrayFormat, **changes: Any) -> bytes:
    """Return the metadata of an array with changed members. The value ``...`` removes a member."""
    changed = {**json.loads(encode_metadata(format)), **changes}
    return json.dumps({member: value for member, value in changed.items() if value is not ...}).encode()


def parse(data: bytes, zarr_format: int) -> ArrayFormat | None:
    """Parse the metadata. Return None if it is refused with an error that names the file."""
    try:
        return parse_zarr3(data, "a/zarr.json") if zarr_format == 3 else parse_zarr2(data, "a/.zarray")
    except CheckpointError as error:
        assert "a/zarr.json" in str(error) or "a/.zarray" in str(error)
        return None


@pytest.mark.parametrize("format", [*VERSION3, *VERSION2])
def test_tampered_metadata_is_refused_or_read_as_by_tensorstore(format: ArrayFormat) -> None:
    seen = compared = 0
    for changed in tampered(json.loads(encode_metadata(format)), 600):
        try:
            data = json.dumps(changed).encode()
        except UnicodeEncodeError:
            continue
        parsed = parse(data, format.zarr_format)
        seen += 1
        if parsed is None:
            continue
        assert parsed.index_bytes >= 0 and len(parsed.grid) == len(parsed.inner_grid) == len(parsed.spec.shape)
        assert parsed.fill is None or len(parsed.fill) == parsed.spec.numpy_dtype.itemsize
        stored = tensorstore_opens(data, format.zarr_format)
        if stored is not None:
            compared += 1
            assert stored.chunk_layout.write_chunk.shape == parsed.chunk
            assert stored.dtype.name == parsed.spec.dtype
            assert stored.domain.exclusive_max == parsed.spec.shape or max(parsed.spec.shape) >= 1 << 61
    assert seen > 300 and compared > 5


def tensorstore_opens(data: bytes, zarr_format: int) -> Any:
    """Open the array with tensorstore. Return None if tensorstore refuses the metadata."""
    context = ts.Context()
    objects: Any = ts.KvStore.open("memory://", context=context).result()
    objects["zarr.json" if zarr_format == 3 else ".zarray"] = data
    try:
        driver = "zarr3" if zarr_format == 3 else "zarr"
        return ts.open({"driver": driver, "kvstore": "memory://"}, open=True, context=context).result()
    except ValueError:
        return None


def test_random_damage_raises_only_checkpoint_errors() -> None:
    choices = random.Random(5)
    for format in [*VERSION3, *VERSION2]:
        whole = encode_metadata(format)
        for _ in range(400):
            data = bytearray(whole)
            for _ in range(choices.randint(1, 3)):
                data[choices.randrange(len(data))] = choices.randrange(256)
            parse(bytes(data[: choices.choice((len(data), choices.randrange(len(data) + 1)))]), format.zarr_format)


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": ...}, {"shape": [8]}, {"shape": [8, -1]}, {"shape": [8, True]}, {"shape": [8, 6.0]},
        {"shape": [2**61, 2**61]}, {"shape": [2**62, 1]}, {"zarr_format": 2}, {"zarr_format": True},
        {"node_type": "group"}, {"node_type": ...}, {"codecs": []}, {"codecs": [3]}, {"codecs": ...},
        {"codecs": [{"name": 3}]}, {"codecs": [{"name": "bytes", "configuration": 1}]}, {"data_type": 3},
        {"data_type": ...}, {"chunk_grid": "regular"}, {"fill_value": "a"}, {"fill_value": ...}, {"fill_value": True},
        {"fill_value": [0, 0]}, {"fill_value": "0x100000000"}, {"fill_value": 10**400},
        {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [0, 6]}}},
        {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4]}}},
        {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2**40, 2**40]}}},
        {"chunk_key_encoding": {"name": "default", "configuration": {"separator": "../"}}},
        {"dimension_names": None}, {"dimension_names": "ab"}, {"dimension_names": {"a": 1, "b": 2}},
        {"dimension_names": []}, {"dimension_names": ["a"]}, {"dimension_names": ["a", "b", "c"]},
        {"dimension_names": ["a", 1]}, {"dimension_names": [["a"], "b"]}, {"dimension_names": [False, "b"]},
    ],
)  # fmt: skip
def test_invalid_metadata_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(CorruptCheckpointError, match=r"a/zarr\.json") as caught:
        parse_zarr3(document(VERSION3[0], **changes), "a/zarr.json")
    assert caught.value.key == "a/zarr.json"


@pytest.mark.parametrize(
    "configuration",
    [
        {"chunk_shape": [3, 3]}, {"chunk_shape": [2]}, {"chunk_shape": [0, 3]}, {"chunk_shape": [8, 6]},
        {"codecs": []}, {"codecs": 1}, {"index_codecs": []}, {"index_location": "middle"}, {"index_location": 1},
    ],
)  # fmt: skip
def test_invalid_inner_chunks_are_refused(configuration: dict[str, Any]) -> None:
    changed = json.loads(encode_metadata(VERSION3[1]))
    changed["codecs"][0]["configuration"].update(configuration)
    with pytest.raises(CorruptCheckpointError):
        parse_zarr3(json.dumps(changed).encode(), "a/zarr.json")


@pytest.mark.parametrize(
    "changes",
    [
        {"data_type": "float6_e2m3fn"}, {"data_type": "r16"}, {"data_type": "string"},
        {"data_type": {"name": "numpy.datetime64", "configuration": {"unit": "ns"}}}, {"data_type": [["x", "float32"]]},
        {"chunk_grid": {"name": "rectangular", "configuration": {}}}, {"chunk_key_encoding": {"name": "fancy"}},
        {"storage_transformers": [{"name": "a"}]}, {"new": 1}, {"new": {"must_understand": True}},
        {"shape": [1] * 33},
    ],
)  # fmt: skip
def test_metadata_of_unsupported_arrays_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedLeafError, match=r"a/zarr\.json"):
        parse_zarr3(document(VERSION3[0], **changes), "a/zarr.json")


@pytest.mark.parametrize(
    "changes",
    [
        {"attributes": {"a": [1]}}, {"dimension_names": ["x", None]}, {"dimension_names": ["", "x"]},
        {"dimension_names": ["x", "x"]}, {"storage_transformers": []},
        {"new": {"must_understand": False}}, {"codecs": ["bytes"]}, {"codecs": [{"name": "other", "more": 1}]},
        {"chunk_key_encoding": "default"},
    ],
)  # fmt: skip
def test_additional_metadata_is_ignored(changes: dict[str, Any]) -> None:
    parsed = parse_zarr3(document(VERSION3[0], **changes), "a/zarr.json")
    assert (parsed.spec, parsed.chunk, parsed.direct) == (SPEC, (4, 6), "codecs" not in changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": [8]}, {"chunks": [0, 6]}, {"chunks": ...}, {"dtype": 3}, {"dtype": ...}, {"compressor": ...},
        {"compressor": 1}, {"compressor": {}}, {"filters": ...}, {"filters": 1}, {"order": "A"}, {"order": ...},
        {"fill_value": "a"}, {"fill_value": ...}, {"dimension_separator": "../"}, {"zarr_format": 3},
        {"dtype": "|S5", "fill_value": "!"}, {"dtype": "|S5", "fill_value": "AAAA"},
        {"dtype": "<U2", "fill_value": "abc"},
        {"dtype": "<U2", "fill_value": "\ud800"}, {"dtype": "<c8", "fill_value": 1},
    ],
)  # fmt: skip
def test_invalid_metadata_of_zarr_2_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(CorruptCheckpointError, match=r"a/\.zarray"):
        parse_zarr2(document(VERSION2[0], **changes), "a/.zarray")


@pytest.mark.parametrize(
    ("dtype", "ours"),
    [
        ("|b1", "bool"), ("<i1", "int8"), (">u1", "uint8"), ("<f4", "float32"), ("bfloat16", "bfloat16"),
        ("int4", "int4"), ("|S5", "S5"), ("<U3", "U3"), ("<M8[ns]", "datetime64[ns]"), ("<m8[25s]", "timedelta64[25s]"),
        ("<M8", None), ("|V4", None), ("|O", None), ("<f3", None), ("|f4", None), ("=f4", None), ("f4", None),
        ([["x", "<f4"]], None), ("uint4", None), ("<S0", None), ("|U3", None), ("<U9999999", None), ("<M8[xy]", None),
    ],
)  # fmt: skip
def test_dtypes_of_zarr_2(dtype: Any, ours: str | None) -> None:
    data = document(VERSION2[0], dtype=dtype)
    if ours is None:
        with pytest.raises(UnsupportedLeafError, match=r"a/\.zarray"):
            parse_zarr2(data, "a/.zarray")
    else:
        parsed = parse_zarr2(data, "a/.zarray")
        assert (parsed.spec.dtype, parsed.direct) == (ours, True)


@pytest.mark.parametrize(
    ("dtype", "fill", "expected"),
    [
        ("|S3", "YWJj", b"abc"), ("|S3", "", bytes(3)), ("|S3", 0, bytes(3)), ("<U2", "x", b"x" + bytes(7)),
        ("<c8", "AACAPwAAAEA=", struct.pack("<2f", 1, 2)), ("<M8[s]", 7, struct.pack("<q", 7)),
        ("<M8[s]", "NaT", struct.pack("<q", -(2**63))),
    ],
)  # fmt: skip
def test_fill_values_of_zarr_2(dtype: str, fill: Any, expected: bytes) -> None:
    assert parse_zarr2(document(VERSION2[0], dtype=dtype, fill_value=fill), "a/.zarray").fill == expected


def test_dtypes_that_tensorstore_lacks_are_read_only_from_raw_chunks() -> None:
    for changes in ({"compressor": {"id": "zstd", "level": 1}}, {"order": "F"}, {"dtype": ">M8[ns]"}):
        with pytest.raises(UnsupportedLeafError, match="raw chunks"):
            parse_zarr2(document(VERSION2[0], **{"dtype": "<M8[ns]", **changes}), "a/.zarray")


@pytest.mark.parametrize("member", ["attributes", "fill_value", "codecs", "data_type", "shape"])
def test_deep_nesting_is_refused(member: str) -> None:
    for depth in [30, 70, *range(900, 1000, 3), 100_000]:
        nested = b"[" * depth + b"]" * depth
        data = document(VERSION3[0], **{member: "nested"}).replace(b'"nested"', nested)
        if parse(data, 3) is not None:
            assert (member, depth) == ("attributes", 30)


def test_duplicate_members_are_refused() -> None:
    data = encode_metadata(VERSION3[0]).replace(b'"zarr_format":3', b'"zarr_format":3,"zarr_format":3')
    with pytest.raises(CorruptCheckpointError, match="twice"):
        parse_zarr3(data, "a/zarr.json")


def index_of(*entries: tuple[int, int]) -> bytes:
    """Return an index with a valid checksum."""
    data = b"".join(struct.pack("<2Q", *entry) for entry in entries)
    return data + CRC32C.encode(crc32c_of(data))


ABSENT = (2**64 - 1, 2**64 - 1)
SHARDED = VERSION3[1]


def test_an_encoded_index_is_decoded() -> None:
    index = dense_index(SHARDED)
    data = encode_index(SHARDED, index)
    decoded = decode_index(SHARDED, data, SHARDED.chunk_bytes, "c/0/0")
    assert decoded.offsets.tolist() == index.offsets.tolist() == [0, 28, 56, 84]
    assert decoded.lengths.tolist() == [28] * 4
    assert decoded.offsets.dtype == decoded.lengths.dtype == np.int64


@pytest.mark.parametrize(
    "entry",
    [
        (0, 27), (0, 0), (1000, 28), (170, 28), (2**63, 28), (2**64 - 28, 28), (2**64 - 1, 28), (0, 2**64 - 1),
        (2**64 - 1, 0), (2**63, 2**63), (0, 2**63 + 28),
    ],
)  # fmt: skip
def test_inner_chunks_outside_of_their_chunk_are_refused(entry: tuple[int, int]) -> None:
    data = index_of((0, 28), ABSENT, entry, (28, 28))
    with pytest.raises(CorruptCheckpointError, match="inner chunk 2") as caught:
        decode_index(SHARDED, data, SHARDED.chunk_bytes, "c/0/0")
    assert (caught.value.key, caught.value.start, caught.value.stop) == ("c/0/0", 112, 180)


def test_compressed_inner_chunks_may_have_any_length_within_their_chunk() -> None:
    data = index_of((0, 5), ABSENT, (5, 95), (100, 0))
    decoded = decode_index(VERSION3[2], data, 168, "c/0/0")
    assert decoded.lengths.tolist() == [5, 0, 95, 0]
    with pytest.raises(CorruptCheckpointError, match="inner chunk 0"):
        decode_index(VERSION3[2], index_of((0, 169), ABSENT, ABSENT, ABSENT), 168, "c/0/0")


def test_the_checksum_of_an_index_detects_damage() -> None:
    data = bytearray(encode_index(SHARDED, dense_index(SHARDED)))
    for position in range(len(data)):
        data[position] ^= 1
        with pytest.raises(ChecksumError, match="crc32c"):
            decode_index(SHARDED, bytes(data), SHARDED.chunk_bytes, "c/0/0")
        data[position] ^= 1


def test_an_index_of_a_wrong_length_is_refused() -> None:
    data = encode_index(SHARDED, dense_index(SHARDED))
    for wrong in (b"", data[:-1], data + b"a"):
        with pytest.raises(CorruptCheckpointError, match="expected 68"):
            decode_index(SHARDED, wrong, SHARDED.chunk_bytes, "c/0/0")
    with pytest.raises(CorruptCheckpointError, match="cut off"):
        index_range(SHARDED, 67, "c/0/0")
