"""Entries of ``.metadata``: tensors with their chunks, and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["DcpChunk", "DcpMetadata", "DcpPath", "DcpPlace", "DcpTensor", "DcpValue"]

DcpPath: TypeAlias = tuple[str | int, ...]
"""The keys that lead to an entry: str for a key of a mapping, int for an index of a list."""
DcpPlace: TypeAlias = tuple[str, int, int, tuple[str, ...]]
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
        paths: keys of each name. None if the file has no paths. Some names may be missing.
        save_id: id of the save that wrote it, or None.
        checkpoint_id: location it was written to, or None.
    """

    tensors: Mapping[str, DcpTensor]
    values: Mapping[str, DcpValue]
    paths: Mapping[str, DcpPath] | None = None
    save_id: str | None = None
    checkpoint_id: str | None = None

    @property
    def names(self) -> Sequence[str]:
        """All names, in the order of `paths`, followed by names without a path."""
        known = [name for name in self.paths or () if name in self.tensors or name in self.values]
        listed = set(known)
        return [*known, *[name for name in (*self.tensors, *self.values) if name not in listed]]
