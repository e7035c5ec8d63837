"""Entries of ``.metadata``: tensors with their chunks, and values."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from ckptcore.model import ValueRecord
from ckptcore_dcp.pickles import Global

DcpPath: TypeAlias = tuple[str | int, ...]
"""The keys that lead to an entry: str for a key of a mapping, int for an index of a list."""
ItemRange: TypeAlias = tuple[str, int, int, tuple[str, ...]]
"""The relative path, offset, length and transforms of a `DcpChunk` or `DcpValue`."""


@dataclass(frozen=True, slots=True)
class DcpChunk:
    """A box of a tensor, and the item with its elements.

    Attributes:
        offsets: start of the box, in elements along each axis.
        sizes: shape of the box.
        relative_path: the file.
        offset: offset of the item in the file, in bytes.
        length: length of the item in the file, in bytes.
        transforms: transforms of the item, in the order in which a reader reverses them
            (``stream.zstd/1``).
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    relative_path: str
    offset: int
    length: int
    transforms: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DcpTensor:
    """A tensor.

    Attributes:
        dtype: torch dtype, as named by `ckptcore_dcp.dtypes.known_dtype`.
        shape: elements along each axis.
        chunks: its chunks, without duplicates.
        requires_grad: torch's ``requires_grad``.
    """

    dtype: str
    shape: tuple[int, ...]
    chunks: Sequence[DcpChunk]
    requires_grad: bool = False


@dataclass(frozen=True, slots=True)
class DcpValue:
    """A value that is not a tensor, stored as an item of ``torch.save``. Attributes as in `DcpChunk`."""

    relative_path: str
    offset: int
    length: int
    transforms: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DcpMetadata:
    """The contents of ``.metadata``.

    Attributes:
        tensors, values: by name; no name is in both.
        paths: path of each name. None if the file has no paths. Some names may have no path.
        save_id: id of the save that wrote it, or None.
        checkpoint_id: location it was written to, or None.
        unreadable: the records of entries that cannot be loaded, by name. They are not in `tensors` or `values`.
        files: the files that it lists.
        unlisted: by file, the names of items that it locates and does not describe, so that they are not loaded.
    """

    tensors: Mapping[str, DcpTensor]
    values: Mapping[str, DcpValue]
    paths: Mapping[str, DcpPath] | None = None
    save_id: str | None = None
    checkpoint_id: str | None = None
    unreadable: Mapping[str, ValueRecord] = field(default_factory=dict)
    files: frozenset[str] = field(default=frozenset(), compare=False)
    unlisted: Mapping[str, Sequence[str]] = field(default_factory=dict, compare=False)

    @property
    def names(self) -> Sequence[str]:
        """All names, in the order of `paths`, followed by names without a path."""
        entries = {**self.tensors, **self.values, **self.unreadable}
        known = [name for name in self.paths or () if name in entries]
        listed = set(known)
        return [*known, *[name for name in entries if name not in listed]]


_METADATA: Final = "torch.distributed.checkpoint.metadata"
_FILES: Final = "torch.distributed.checkpoint.filesystem"
_CLASS_MODULES: Final[Mapping[str, Collection[str]]] = {
    **dict.fromkeys(
        ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "MetadataIndex", "StorageMeta"),
        (_METADATA, "torch.distributed._shard.checkpoint.metadata"),
    ),
    **dict.fromkeys(
        ("ChunkStorageMetadata", "TensorProperties"),
        (
            _METADATA,
            "torch.distributed._shard.checkpoint.metadata",
            "torch.distributed._shard.sharded_tensor.metadata",
            "torch.distributed._shard.metadata",
        ),
    ),
    "_StorageInfo": (_FILES, "torch.distributed._shard.checkpoint.filesystem"),
}
"""Modules that contained each class, since torch 1.13."""


def torch_class_name(function: Global) -> str:
    """Return the name of the ``.metadata`` class that a global refers to, or "" for other globals."""
    return function.name if function.module in _CLASS_MODULES.get(function.name, ()) else ""
