"""Classes of torch in ``.metadata``: each has one name and, since torch 1.13, several modules."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from ckptcore_dcp.pickles import Global

__all__ = ["class_of_torch"]

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


def class_of_torch(function: Global) -> str:
    """Return the name of the ``.metadata`` class that a global refers to, or "" for other globals."""
    return function.name if function.module in _CLASS_MODULES.get(function.name, ()) else ""
