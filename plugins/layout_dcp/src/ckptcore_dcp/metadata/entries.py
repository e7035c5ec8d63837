"""Entries of a ``.metadata``: tensors with their chunks, and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["DcpChunk", "DcpMetadata", "DcpPath", "DcpPlace", "DcpTensor", "DcpValue"]

DcpPath: TypeAlias = tuple[str | int, ...]
"""The keys that lead to an entry: a str key of a mapping, an int index of a list."""
DcpPlace: TypeAlias = tuple[str, int, int, tuple[str, ...]]
"""The relative path, offset, length and transforms of a `DcpChunk` or `DcpValue`."""


@dataclass(frozen=True, slots=True)
class DcpChunk:
    """A box of a tensor, and the item that holds its elements.

    Attributes:
        offsets: where it begins in the tensor, in elements along each axis.
        sizes: elements along each axis.
        relative_path: the file.
        offset: where the item begins in the file, in bytes.
        length: how long the item is in the file, in bytes.
        transforms: what was done to the item, in the order in which a reader undoes it (``stream.zstd/1``).
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
        dtype: of torch, as `ckptcore_dcp.dtypes.known_dtype` names it.
        shape: elements along each axis.
        chunks: its parts; none twice.
        requires_grad: whether it was trained.
    """

    dtype: str
    shape: tuple[int, ...]
    chunks: Sequence[DcpChunk]
    requires_grad: bool = False


@dataclass(frozen=True, slots=True)
class DcpValue:
    """A value that is no tensor; its item is what ``torch.save`` writes of it. The attributes are those of a `DcpChunk`."""

    relative_path: str
    offset: int
    length: int
    transforms: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DcpMetadata:
    """What ``.metadata`` says.

    Attributes:
        tensors, values: by name; no name is in both.
        paths: by name, the keys that it was joined from; None where nothing is said of that. Some may be missing.
        save_id: of the save that wrote it, or None.
        checkpoint_id: the location it was written to, or None.
    """

    tensors: Mapping[str, DcpTensor]
    values: Mapping[str, DcpValue]
    paths: Mapping[str, DcpPath] | None = None
    save_id: str | None = None
    checkpoint_id: str | None = None

    @property
    def names(self) -> Sequence[str]:
        """All names, in the order of the paths; those without a path behind them."""
        known = [name for name in self.paths or () if name in self.tensors or name in self.values]
        listed = set(known)
        return [*known, *[name for name in (*self.tensors, *self.values) if name not in listed]]
