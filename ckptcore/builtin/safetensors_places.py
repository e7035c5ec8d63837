"""Places of arrays in safetensors files: what the root keeps of them."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptcore.errors import CorruptCheckpointError
from ckptcore.model.arrays import Box
from ckptcore.model.metadata import ArrayRecord, TreeMetadata
from ckptcore.model.tree import JSON, format_path
from ckptcore.planning import uncovered

__all__ = ["KnownPlaces", "Places", "SliceColumns", "StoredSlice"]


@dataclass(frozen=True, slots=True)
class StoredSlice:
    """A box of an array, and where it is.

    Attributes:
        key: the file.
        offset: where its first element is in the file, in bytes; they follow each other in C order.
        box: where in the array.
    """

    key: str
    offset: int
    box: Box


class SliceColumns:
    """Slices as they are collected, a column for each thing."""

    def __init__(self) -> None:
        self._files: dict[str, int] = {}
        self._leaf: list[int] = []
        self._file: list[int] = []
        self._offset: list[int] = []
        self._box: list[int] = []

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._leaf)

    def add(self, leaf: int, stored: StoredSlice) -> None:
        """One more slice of a leaf."""
        self._leaf.append(leaf)
        self._file.append(self._files.setdefault(stored.key, len(self._files)))
        self._offset.append(stored.offset)
        self._box.extend((*stored.box.start, *stored.box.stop))

    def extend(self, encoded: JSON, tree: TreeMetadata, without: Container[int]) -> None:
        """The slices of another one, as `to_json` gave them in a process of this job, but those of some leaves."""
        columns: Any = encoded
        bounds = iter(columns["box"])
        for leaf, key, offset in _rows(tree, columns):
            box = _box(bounds, _shape(tree, leaf))
            if leaf not in without:
                self.add(leaf, StoredSlice(key, offset, box))

    def to_json(self) -> dict[str, JSON]:
        """For `Places`."""
        return {
            "files": list(self._files),
            "leaf": self._leaf,
            "file": self._file,
            "offset": self._offset,
            "box": self._box,
        }


@dataclass(frozen=True, slots=True)
class Places:
    """Where the arrays of a tree are.

    Attributes:
        whole: by leaf, the file and the offset of its first element, in bytes.
        slices: by leaf, what there is of an array that is in several places; they may not make it up.
    """

    whole: Mapping[int, tuple[str, int]]
    slices: Mapping[int, Sequence[StoredSlice]] = field(default_factory=dict)

    @classmethod
    def from_json(cls, tree: TreeMetadata, state: JSON) -> Places:
        """The places in the state of a checkpoint, which may be hostile.

        Raises:
            CorruptCheckpointError: it does not fit the tree.
        """
        try:
            columns: Any = state  # what is caught below is what a hostile one raises
            leaves, keys, offsets = _columns(tree, columns)
            whole = dict(zip(leaves, zip(keys, offsets, strict=True), strict=True))
            slices: dict[int, list[StoredSlice]] = {}
            cut: Any = columns.get("slices")
            if cut is not None:
                bounds = iter(cut["box"])
                for leaf, key, offset in _rows(tree, cut):
                    if leaf in whole:
                        raise ValueError(f"leaf {leaf} is in two places")
                    slices.setdefault(leaf, []).append(StoredSlice(key, offset, _box(bounds, _shape(tree, leaf))))
                if next(bounds, None) is not None:
                    raise ValueError("columns of different lengths")
            return cls(whole, slices)
        except (TypeError, KeyError, IndexError, ValueError, AttributeError) as error:
            raise CorruptCheckpointError(f"the safetensors layout cannot read where arrays are: {error}") from error

    def of(self, tree: TreeMetadata, leaf: int) -> Sequence[StoredSlice]:
        """What makes up an array.

        Raises:
            CorruptCheckpointError: nothing says where it is, or not where all of it is.
        """
        record = tree.leaves[leaf]
        assert isinstance(record, ArrayRecord)  # a plan has no other items
        place = self.whole.get(leaf)
        if place is not None:
            return (StoredSlice(*place, Box.whole(record.spec.shape)),)
        slices = self.slices.get(leaf, ())
        if not slices and record.spec.size:
            raise CorruptCheckpointError(f"the checkpoint does not say where leaf {leaf} is stored")
        reason = uncovered(record.spec, [part.box for part in slices])
        if reason is not None:
            raise CorruptCheckpointError(
                f"{format_path(tree.paths[leaf])} ({record.spec}) is not stored whole: {reason}"
            )
        return slices

    def check(self, tree: TreeMetadata, leaves: Collection[int]) -> None:
        """Refuse arrays whose slices do not cover them exactly. See `ckptcore.protocols.ChecksArrays`."""
        for leaf in leaves:
            if leaf not in self.whole:
                self.of(tree, leaf)

    def extents(self, tree: TreeMetadata) -> Iterator[tuple[int, str, int, int]]:
        """Where arrays lie: (leaf, key, start, stop), in bytes."""
        for leaf, record in enumerate(tree.leaves):
            if not isinstance(record, ArrayRecord):
                continue
            if (place := self.whole.get(leaf)) is not None:
                yield leaf, *place, place[1] + record.spec.nbytes
            for part in self.slices.get(leaf, ()):
                yield leaf, part.key, part.offset, part.offset + part.box.size * record.spec.numpy_dtype.itemsize


class KnownPlaces:
    """The places that were read from a state last: a load asks for the same ones several times. Any thread."""

    def __init__(self) -> None:
        self._last: tuple[TreeMetadata, JSON, Places] | None = None

    def __reduce__(self) -> tuple[type[KnownPlaces], tuple[()]]:
        """None: a layout that goes to another process takes along what it is, and not what it has read."""
        return KnownPlaces, ()

    def places(self, tree: TreeMetadata, state: JSON) -> Places:
        """See `Places.from_json`."""
        last = self._last
        if last is None or last[0] is not tree or last[1] is not state:
            last = self._last = (tree, state, Places.from_json(tree, state))
        return last[2]


def _rows(tree: TreeMetadata, columns: Any) -> Iterator[tuple[int, str, int]]:
    return zip(*_columns(tree, columns), strict=True)


def _columns(tree: TreeMetadata, columns: Any) -> tuple[Sequence[int], Sequence[str], Sequence[int]]:
    """By row the leaf, the file and the offset. Whole columns are looked at, for a checkpoint may have hundreds of thousands of rows.

    Raises:
        TypeError, IndexError: if they cannot be.
    """
    files, leaves, numbers, offsets = (columns[name] for name in ("files", "leaf", "file", "offset"))
    if {*map(type, leaves), *map(type, numbers), *map(type, offsets)} - {int}:
        raise TypeError("a number is expected")
    if leaves and not (0 <= min(leaves) and max(leaves) < len(tree.leaves)):
        raise IndexError(f"leaves {min(leaves)} to {max(leaves)} of {len(tree.leaves)}")
    if min(numbers, default=0) < 0 or min(offsets, default=0) < 0:
        raise IndexError("a file or an offset below 0")
    keys = {number: files[number] for number in set(numbers)}
    if {*map(type, keys.values())} - {str}:
        raise TypeError("a file name is expected")
    return leaves, [*map(keys.__getitem__, numbers)], offsets


def _shape(tree: TreeMetadata, leaf: int) -> tuple[int, ...]:
    record = tree.leaves[leaf]
    if not isinstance(record, ArrayRecord):
        raise TypeError(f"leaf {leaf} is no array")
    return record.spec.shape


def _box(bounds: Iterator[Any], shape: tuple[int, ...]) -> Box:
    found = list(itertools.islice(bounds, 2 * len(shape)))
    if len(found) != 2 * len(shape):
        raise ValueError("columns of different lengths")
    start, stop = tuple(found[: len(shape)]), tuple(found[len(shape) :])
    for extent, first, last in zip(shape, start, stop, strict=True):
        if type(first) is not int or type(last) is not int or not 0 <= first <= last <= extent:
            raise ValueError(f"a slice from {first!r} to {last!r} of {extent}")
    return Box(start, stop)
