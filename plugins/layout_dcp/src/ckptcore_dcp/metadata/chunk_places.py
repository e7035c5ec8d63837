"""Places of parts as columns, and which of them a chunk has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from ckptcore.model import HostArray

__all__ = ["PlaceTable", "keys_of_boxes", "places_of_chunks"]

_MOST_KEY: Final = 1 << 62


@dataclass(frozen=True, slots=True, eq=False)
class PlaceTable:
    """Where parts are, a column of int64 for each thing.

    Attributes:
        name: the number of the entry that a part is of, in `names`.
        axes: how many its offsets have; -1 where it has none.
        offsets: where the part begins, in elements along each axis, and zeros behind the axes it has.
        file: the number of its file, in `files`.
        offset, length: of its item, in bytes.
        names, files: numbers by text.
        transforms: of the items that went through some, by row.
    """

    name: HostArray
    axes: HostArray
    offsets: HostArray
    file: HostArray
    offset: HostArray
    length: HostArray
    names: dict[str, int] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    transforms: dict[int, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def empty(cls, count: int, axes: int) -> PlaceTable:
        """Rows that are not filled yet, for offsets along so many axes."""
        name, number, file, offset, length = np.zeros((5, count), np.int64)
        return cls(name, number, np.zeros((count, axes), np.int64), file, offset, length)

    def set(
        self, row: int, name: str, offset: tuple[int, ...] | None, place: tuple[str, int, int, tuple[str, ...]]
    ) -> None:
        """Fill a row."""
        path, start, length, transforms = place
        self.name[row] = self.names.setdefault(name, len(self.names))
        self.axes[row] = -1 if offset is None else len(offset)
        self.offsets[row, : len(offset or ())] = offset or ()
        self.file[row] = self.files.setdefault(path, len(self.files))
        self.offset[row], self.length[row] = start, length
        if transforms:
            self.transforms[row] = transforms

    def without_offsets(self) -> Mapping[str, int]:
        """By name, the last row that has no offsets."""
        names = list(self.names)
        (rows,) = np.nonzero(self.axes < 0)
        return dict(zip([names[number] for number in self.name[rows].tolist()], rows.tolist(), strict=True))


def keys_of_boxes(columns: Sequence[HostArray]) -> HostArray:
    """A number for each row of columns of numbers from 0 on, the same for the same row only; below 2**62."""
    keys: HostArray = np.zeros(len(columns[0]), np.int64)
    below = 1
    for column in columns:
        extent = int(column.max(initial=0)) + 1
        if below * extent > _MOST_KEY:
            _, keys = np.unique(keys, return_inverse=True)
            _, column = np.unique(column, return_inverse=True)
            below, extent = int(keys.max(initial=0)) + 1, int(column.max(initial=0)) + 1
        keys = keys * extent + column
        below *= extent
    return keys


def places_of_chunks(
    names: Sequence[str], ranks: HostArray, owner: HostArray, offsets: HostArray, places: PlaceTable
) -> HostArray:
    """For each chunk the row of its place, the last one that names its tensor and offsets; -1 where there is none.

    Args:
        names: of the tensors.
        ranks: how many axes each has.
        owner: the tensor of each chunk.
        offsets: where each chunk begins; zeros behind the axes that its tensor has.
        places: where parts are.
    """
    tensor_of: HostArray = np.full(len(places.names), -1, np.int64)
    for tensor, name in enumerate(names):
        number = places.names.get(name)
        if number is not None:
            tensor_of[number] = tensor
    found: HostArray = np.full(len(owner), -1, np.int64)
    if not len(places.name) or not len(owner):
        return found
    of_place = tensor_of[places.name]
    (rows,) = np.nonzero((of_place >= 0) & (places.axes == ranks[of_place]))
    columns = [np.concatenate([owner, of_place[rows]])]
    columns += [
        np.concatenate([offsets[:, axis], places.offsets[rows, axis]])
        for axis in range(min(offsets.shape[1], places.offsets.shape[1]))
    ]
    keys = keys_of_boxes(columns)
    of_chunks, of_rows = keys[: len(owner)], keys[len(owner) :]
    order = np.argsort(of_rows, kind="stable")
    in_order = of_rows[order]
    at = np.searchsorted(in_order, of_chunks, side="right") - 1
    (placed,) = np.nonzero(at >= 0)
    placed = placed[in_order[at[placed]] == of_chunks[placed]]
    found[placed] = rows[order[at[placed]]]
    return found
