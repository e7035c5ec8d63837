"""Columns: whole numbers, and the items of plans, without a Python object for each of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np

from ckptcore.model.arrays import ArraySpec, Box, HostArray
from ckptcore.model.metadata import ArrayRecord, LeafRecord
from ckptcore.model.transfer import WriteItem

__all__ = ["IntegerColumn", "ItemColumns", "list_of_column"]


class IntegerColumn(Sequence[int]):
    """Whole numbers of up to 64 bits. What iterates over it gets `int`; `numpy.asarray` gets int64 at once.

    Attributes:
        array: the numbers, of any integer dtype; not to be changed.
    """

    __slots__ = ("array",)

    def __init__(self, array: HostArray) -> None:
        """Hold an array of one axis."""
        self.array = array

    def __len__(self) -> int:
        """How many."""
        return len(self.array)

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[int]: ...
    def __getitem__(self, place: int | slice) -> int | Sequence[int]:
        """One of them, or a list of some."""
        found: int | list[int] = self.array[place].tolist()
        return found

    def __iter__(self) -> Iterator[int]:
        """All of them."""
        numbers: list[int] = self.array.tolist()
        return iter(numbers)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> HostArray:
        """For NumPy, which calls it."""
        return np.array(self.array, dtype or np.int64, copy=copy)

    def __eq__(self, other: object) -> bool:
        """Whether another sequence has the same numbers."""
        if not isinstance(other, Sequence) or isinstance(other, str | bytes):
            return NotImplemented
        return list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # as of a list

    def __repr__(self) -> str:
        return f"IntegerColumn({list(self)!r})"

    def __reduce__(self) -> tuple[type[IntegerColumn], tuple[HostArray]]:
        return IntegerColumn, (self.array,)


def list_of_column(found: object) -> list[int]:
    """A column as the list that JSON has for it: for the argument `default` of `json.dumps`.

    Raises:
        TypeError: it is none.
    """
    if isinstance(found, IntegerColumn):
        return list(found)
    raise TypeError(f"{type(found).__qualname__} is not JSON")


class ItemColumns(Sequence[WriteItem]):
    """Items of a plan, made where they are asked for.

    Attributes:
        leaves: by number, what the leaves of the tree are.
        leaf: of each item.
        counts: how many boxes each item has.
        bounds: of the boxes in turn, the starts then the stops along each axis of its array, in elements.
    """

    __slots__ = ("bounds", "counts", "leaf", "leaves")

    def __init__(self, leaves: Sequence[LeafRecord], leaf: HostArray, counts: HostArray, bounds: HostArray) -> None:
        """Hold columns, of integer dtypes and one axis each."""
        self.leaves = leaves
        self.leaf = leaf
        self.counts = counts
        self.bounds = bounds

    @classmethod
    def of(cls, leaves: Sequence[LeafRecord], items: Sequence[WriteItem]) -> ItemColumns:
        """Columns of items; themselves, if they are."""
        if isinstance(items, ItemColumns):
            return items
        bounds = [bound for item in items for box in item.boxes for bound in (*box.start, *box.stop)]
        return cls(
            leaves,
            np.array([item.leaf for item in items], np.int64),
            np.array([len(item.boxes) for item in items], np.int64),
            np.array(bounds, np.int64),
        )

    def __len__(self) -> int:
        """How many items."""
        return len(self.leaf)

    @overload
    def __getitem__(self, place: int) -> WriteItem: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[WriteItem]: ...
    def __getitem__(self, place: int | slice) -> WriteItem | Sequence[WriteItem]:
        """One of them, or some."""
        return tuple(self)[place]

    def __iter__(self) -> Iterator[WriteItem]:
        """All of them."""
        bounds: list[int] = self.bounds.tolist()
        position = 0
        for leaf, count in zip(self.leaf.tolist(), self.counts.tolist(), strict=True):
            spec = self._spec(leaf)
            axes = len(spec.shape)
            boxes = []
            for _ in range(count):
                start, stop = bounds[position : position + axes], bounds[position + axes : position + 2 * axes]
                boxes.append(Box(tuple(start), tuple(stop)))
                position += 2 * axes
            yield WriteItem(leaf, spec, tuple(boxes))

    def _spec(self, leaf: int) -> ArraySpec:
        record = self.leaves[leaf]
        assert isinstance(record, ArrayRecord)  # plans have no other items
        return record.spec

    def __reduce__(self) -> tuple[Any, ...]:
        return ItemColumns, (self.leaves, self.leaf, self.counts, self.bounds)
