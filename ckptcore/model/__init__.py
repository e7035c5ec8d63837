"""Frozen data that the stages hand to each other; no I/O, no plugin."""

from ckptcore.model.arrays import AbstractArray, ArraySpec, Box, HostArray, Shard, dtype_from_name, name_of_dtype
from ckptcore.model.columns import IntegerColumn, ItemColumns
from ckptcore.model.keys import check_directory_key, check_key
from ckptcore.model.memory import StridedMemory
from ckptcore.model.metadata import PLAIN_ARRAY, ArrayRecord, LeafRecord, TreeMetadata, ValueRecord
from ckptcore.model.numbers import float_from_json, float_to_json
from ckptcore.model.objects import BLOCK_BYTES, ObjectRecord
from ckptcore.model.transfer import (
    ArraySegment,
    BytesSegment,
    Checksum,
    ChecksumSegment,
    Pending,
    ReadItem,
    ReadPlan,
    Ready,
    Receipt,
    Segment,
    StoredTile,
    TileRead,
    WriteItem,
    WritePlan,
)
from ckptcore.model.tree import JSON, LEAF, Attribute, Key, Node, Skeleton, TreePath, format_path

__all__ = [
    "BLOCK_BYTES",
    "JSON",
    "LEAF",
    "PLAIN_ARRAY",
    "AbstractArray",
    "ArrayRecord",
    "ArraySegment",
    "ArraySpec",
    "Attribute",
    "Box",
    "BytesSegment",
    "Checksum",
    "ChecksumSegment",
    "HostArray",
    "IntegerColumn",
    "ItemColumns",
    "Key",
    "LeafRecord",
    "Node",
    "ObjectRecord",
    "Pending",
    "ReadItem",
    "ReadPlan",
    "Ready",
    "Receipt",
    "Segment",
    "Shard",
    "Skeleton",
    "StoredTile",
    "StridedMemory",
    "TileRead",
    "TreeMetadata",
    "TreePath",
    "ValueRecord",
    "WriteItem",
    "WritePlan",
    "check_directory_key",
    "check_key",
    "dtype_from_name",
    "float_from_json",
    "float_to_json",
    "format_path",
    "name_of_dtype",
]
