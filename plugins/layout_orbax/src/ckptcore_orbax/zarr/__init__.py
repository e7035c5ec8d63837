"""Arrays and groups of zarr 2 and 3: their metadata, and the locations of chunks and inner chunks."""

from __future__ import annotations

from ckptcore_orbax.zarr.blosc import expect_blosc_size, is_blosc
from ckptcore_orbax.zarr.documents import encode_document
from ckptcore_orbax.zarr.dtypes import STORED_DTYPES, ZarrFormat, stored_spec
from ckptcore_orbax.zarr.formats import ArrayFormat, ChunkKeys, Compression, CompressionName
from ckptcore_orbax.zarr.groups import encode_group, groups_around
from ckptcore_orbax.zarr.shard_index import (
    MISSING,
    ShardIndex,
    decode_index,
    dense_index,
    encode_index,
    index_range,
    inner_offsets,
)
from ckptcore_orbax.zarr.version2 import parse_zarr2, zarr2_array
from ckptcore_orbax.zarr.version3 import inner_array, parse_zarr3, zarr3_array

__all__ = [
    "MISSING",
    "STORED_DTYPES",
    "ArrayFormat",
    "ChunkKeys",
    "Compression",
    "CompressionName",
    "ShardIndex",
    "ZarrFormat",
    "decode_index",
    "dense_index",
    "encode_group",
    "encode_index",
    "encode_metadata",
    "expect_blosc_size",
    "groups_around",
    "index_range",
    "inner_array",
    "inner_offsets",
    "is_blosc",
    "parse_zarr2",
    "parse_zarr3",
    "stored_spec",
    "zarr2_array",
    "zarr3_array",
]


def encode_metadata(format: ArrayFormat) -> bytes:
    """The bytes of the array's ``zarr.json`` or ``.zarray``."""
    return encode_document(format.document)
