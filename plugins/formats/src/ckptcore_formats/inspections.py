"""Tree of a single file, and its conversion to an inspection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckptcore_dcp.reading import Leaf, LocationColumns, StoredBytes, StoredTensor, leaf_record

from ckptcore.errors import CorruptCheckpointError
from ckptcore.model import LeafRecord, Skeleton, TreeMetadata, ValueRecord, format_path, unreadable_leaf
from ckptcore.protocols import Inspection


@dataclass(frozen=True, slots=True)
class FileTree:
    """The tree of a file, without its elements.

    Attributes:
        key: the object.
        skeleton, leaves: the tree. A damaged leaf is replaced with the record of its error.
        storages: byte range of each storage, by `StoredTensor.storage`.
    """

    key: str
    skeleton: Skeleton
    leaves: Sequence[Leaf | ValueRecord]
    storages: Mapping[str, StoredBytes]


def first_member(head: bytes) -> str:
    """Return the name of the first member of a zip, from the first bytes of the file; empty if the file is not a zip.

    This name distinguishes most kinds of zip without reading the zip's directory (APPNOTE.TXT 4.3.7).
    """
    if head[:4] != b"PK\x03\x04":
        return ""
    return head[30 : 30 + int.from_bytes(head[26:28], "little")].decode("utf-8", "replace")


def inspection_of(file: FileTree, writer: str) -> Inspection:
    """Return the tree with the locations of its arrays. An array that exceeds its storage cannot be loaded."""
    columns = LocationColumns()
    records: list[LeafRecord] = [leaf if isinstance(leaf, ValueRecord) else leaf_record(leaf) for leaf in file.leaves]
    paths = TreeMetadata(file.skeleton, tuple(records)).paths
    for number, leaf in enumerate(file.leaves):
        if isinstance(leaf, StoredTensor):
            path = format_path(paths[number])
            try:
                records[number] = columns.add(number, leaf, file.storages, key=file.key, path=path)
            except CorruptCheckpointError as error:
                records[number] = unreadable_leaf(error)
    tree = TreeMetadata(file.skeleton, tuple(records), columns.aliases)
    return Inspection(tree, columns.to_json(), writer)
