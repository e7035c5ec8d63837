"""Tables of raw chunks: the columns that a layout keeps in its state, and the chunk index that reads them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from ckptcore.errors import CheckpointError, CorruptCheckpointError
from ckptcore.model.arrays import ArraySpec, Box, HostArray
from ckptcore.model.metadata import ArrayRecord, TreeMetadata
from ckptcore.model.transfer import Checksum, Chunk, ChunkLocations, IntegerColumn
from ckptcore.model.tree import JSON, format_path
from ckptcore.planning.partition import covers_exactly, uncovered
from ckptcore.protocols.layouts import ChunkIndex, ReadStore

_MAX_OFFSET: Final = 1 << 62


class ChunkColumns:
    """Raw chunks as a layout writes them, one column for each property."""

    def __init__(self) -> None:
        """Start without chunks."""
        self._files: dict[str, int] = {}
        self._leaf: list[int] = []
        self._file: list[int] = []
        self._offset: list[int] = []
        self._box: list[int] = []

    def __len__(self) -> int:
        """Number of chunks."""
        return len(self._leaf)

    def add(self, leaf: int, key: str, offset: int, box: Box) -> None:
        """Add the chunk of a leaf that starts at a byte of an object."""
        self._leaf.append(leaf)
        self._file.append(self._files.setdefault(key, len(self._files)))
        self._offset.append(offset)
        self._box.extend(box.start)
        self._box.extend(box.stop)

    @staticmethod
    def merged(states: Sequence[JSON], tree: TreeMetadata, without: Collection[int] = ()) -> dict[str, JSON]:
        """Return the state of the chunks that all processes of a save wrote, except those of the leaves in `without`.

        In arrays: a large job has millions of chunks, and the leader would take 3 us of Python for each.

        Raises:
            TypeError, ValueError, IndexError, OverflowError: the columns of a process are inconsistent.
        """
        axes = np.zeros(len(tree.leaves), np.int64)
        for leaf, record in tree.arrays.items():
            axes[leaf] = len(record.spec.shape)
        left_out = np.array(sorted(without), np.int64)
        files: dict[str, int] = {}
        merged: dict[str, list[HostArray]] = {name: [] for name in ("leaf", "file", "offset", "box")}
        for state in states:
            columns: Any = state
            leaves = natural_column(columns["leaf"], len(axes))
            parts: dict[str, HostArray] = {
                "leaf": leaves,
                "file": natural_column(columns["file"], len(columns["files"]), len(leaves)),
                "offset": natural_column(columns["offset"], _MAX_OFFSET, len(leaves)),
                "box": natural_column(columns["box"], _MAX_OFFSET, 2 * int(axes[leaves].sum())),
            }
            if len(left_out):
                kept = ~np.isin(leaves, left_out)
                kept_bounds = np.repeat(kept, 2 * axes[leaves])
                parts = {name: part[kept_bounds if name == "box" else kept] for name, part in parts.items()}
            number_of: HostArray = np.zeros(len(columns["files"]), np.int64)
            # `numpy.unique` takes longer for the chunks of a process.
            for number in sorted({*parts["file"].tolist()}):
                number_of[number] = files.setdefault(columns["files"][number], len(files))
            parts["file"] = number_of[parts["file"]]
            for name, part in parts.items():
                merged[name].append(part)
        none = np.zeros(0, np.int64)  # `concatenate` refuses an empty list
        columns = {name: np.concatenate([none, *parts]).tolist() for name, parts in merged.items()}
        return {"files": list(files), **columns}

    def to_json(self) -> dict[str, JSON]:
        """Return the state that `ChunkTable` reads."""
        return {
            "files": list(self._files),
            "leaf": self._leaf,
            "file": self._file,
            "offset": self._offset,
            "box": self._box,
        }


class ChunkTable(ChunkIndex):
    """A chunk index of raw chunks: elements in C order, little endian, uncompressed. Thread-safe.

    The state has the columns of `ChunkColumns`. Without the column ``box``, each row is a whole array. Such a state may
    have a second table, ``slices``, for the arrays that are stored in several boxes.
    """

    def __init__(self, tree: TreeMetadata, state: JSON, checksum: Checksum | None = None) -> None:
        """Parse and check a state. It may be hostile.

        Args:
            tree: the tree that was saved.
            state: JSON of `ChunkColumns`.
            checksum: the checksum that follows each chunk in its object; None if there is none.

        Raises:
            CorruptCheckpointError: the state does not fit the tree.
        """
        self._tree = tree
        self._checksum = checksum
        self._whole: dict[int, tuple[str, int]] = {}
        self._sliced: _SlicedArrays | None = None
        self._reasons: dict[int, str | None] = {}
        try:
            columns: Any = state  # a hostile state raises an error that is caught below
            cut = columns
            if "box" not in columns:
                leaves, keys, offsets = _whole_columns(tree, columns)
                self._whole = dict(zip(leaves, zip(keys, offsets, strict=True), strict=True))
                cut = columns.get("slices")
            if cut is not None:
                self._sliced = _SlicedArrays(tree, cut)
                if self._whole and not self._whole.keys().isdisjoint(self._sliced.leaves()):
                    raise ValueError("a leaf has both a whole array and slices")
        except (TypeError, KeyError, IndexError, ValueError, OverflowError, AttributeError) as error:
            raise CorruptCheckpointError(
                f"the table of chunks is damaged: {error!r}; restore the checkpoint from a copy, or load another one"
            ) from error

    def boxes(self, leaf: int, box: Box) -> Iterable[Chunk]:
        """See `ChunkIndex.boxes`. Refuses incomplete arrays."""
        location = self._whole.get(leaf) or self._whole_array(leaf)
        if location is None:
            if (reason := self.uncovered(leaf)) is not None:
                raise self.not_whole(leaf, reason)
            return self._chunks(leaf, _spec(self._tree, leaf), box)
        shape = _spec(self._tree, leaf).shape
        whole = box if box.stop == shape and not any(box.start) else Box.whole(shape)
        return (Chunk(location[0], location[1], whole, True, self._checksum is None, leaf),)

    def _whole_array(self, leaf: int) -> tuple[str, int] | None:
        """Return the key and offset of an array that is a single chunk, and cache them; None for any other array."""
        location = None if self._sliced is None else self._sliced.whole_array(leaf, _spec(self._tree, leaf).shape)
        if location is not None:
            self._whole[leaf] = location
        return location

    def _chunks(self, leaf: int, spec: ArraySpec, within: Box | None = None) -> list[Chunk]:
        return [] if self._sliced is None else self._sliced.chunks(leaf, spec, within, self._checksum is None)

    def locate(self, chunks: Sequence[Chunk], store: ReadStore) -> ChunkLocations:
        """See `ChunkIndex.locate`. Adds the inline checksums."""
        checksums = {} if self._checksum is None else dict.fromkeys(range(len(chunks)), self._checksum)
        return super().locate(chunks, store)._replace(checksums=checksums)

    @property
    def stored_specs(self) -> Mapping[int, ArraySpec]:
        """See `ChunkIndex.stored_specs`. Arrays are stored as they are."""
        return {}

    def extents(self, leaf: int) -> Iterator[tuple[str, int, int]]:
        """See `ChunkIndex.extents`."""
        record = self._tree.leaves[leaf]
        if not isinstance(record, ArrayRecord):
            return
        if (location := self._whole.get(leaf)) is not None:
            yield *location, location[1] + record.spec.nbytes
        else:
            itemsize = record.spec.numpy_dtype.itemsize
            for chunk in self._chunks(leaf, record.spec):
                yield chunk.key, chunk.offset, chunk.offset + chunk.box.size * itemsize

    def check(self, leaves: Collection[int]) -> None:
        """See `ChunkIndex.check`."""
        for leaf in leaves:
            if self._whole.get(leaf) or self._whole_array(leaf):
                continue
            if (reason := self.uncovered(leaf)) is not None:
                raise self.not_whole(leaf, reason)

    def uncovered(self, leaf: int) -> str | None:
        """Return the reason why the chunks of a leaf do not cover its array, or None if they do. Cached."""
        if leaf not in self._reasons:
            spec = _spec(self._tree, leaf)
            self._reasons[leaf] = uncovered(spec, ()) if self._sliced is None else self._sliced.uncovered(leaf, spec)
        return self._reasons[leaf]

    def not_whole(self, leaf: int, reason: str) -> CheckpointError:
        """Return the error for an array that its chunks do not cover."""
        return CorruptCheckpointError(
            f"{format_path(self._tree.paths[leaf])} ({_spec(self._tree, leaf)}) is incomplete: the stored boxes do not "
            f"cover it exactly: {reason}; restore the checkpoint from a copy, or load another one"
        )


class _SlicedArrays:
    """Columns of chunks with explicit bounds. An array has one chunk or several."""

    def __init__(self, tree: TreeMetadata, columns: Any) -> None:
        self._files: Sequence[str] = columns["files"]
        if not isinstance(self._files, list | tuple) or {*map(type, self._files)} - {str}:
            raise TypeError("expected file names")
        leaf = natural_column(columns["leaf"], len(tree.leaves))
        count = len(leaf)
        natural_column(columns["file"], len(self._files), count)
        natural_column(columns["offset"], _MAX_OFFSET, count)
        axes = np.array(
            [len(record.spec.shape) if isinstance(record, ArrayRecord) else -1 for record in tree.leaves], int
        )
        widths = 2 * axes[leaf] if count else np.zeros(0, int)
        if (widths < 0).any():
            raise TypeError("a leaf is not an array")
        self._box = natural_column(columns["box"], _MAX_OFFSET, int(widths.sum()))
        self._begins: HostArray = np.cumsum(widths) - widths
        # Rows by leaf. A stable sort keeps the order of the state within a leaf.
        self._order: HostArray = np.argsort(leaf, kind="stable")
        self._rows_of: list[int] = np.searchsorted(leaf[self._order], np.arange(len(tree.leaves) + 1)).tolist()
        # Single rows are read from the lists of the state: NumPy takes several times as long for one number.
        self._lists: tuple[Sequence[int], ...] = (
            columns["file"], columns["offset"], columns["box"], self._begins.tolist(),
        )  # fmt: skip

    def leaves(self) -> Iterator[int]:
        """Return the leaves that have chunks."""
        return (leaf for leaf in range(len(self._rows_of) - 1) if self._rows_of[leaf] < self._rows_of[leaf + 1])

    def whole_array(self, leaf: int, shape: tuple[int, ...]) -> tuple[str, int] | None:
        """Return the file and offset of an array that is a single chunk; None for any other array."""
        first = self._rows_of[leaf]
        if self._rows_of[leaf + 1] - first != 1:
            return None
        files, offsets, bounds, begins = self._lists
        row, axes = self._order[first], len(shape)
        half = begins[row] + axes
        if tuple(bounds[half : half + axes]) != shape or any(bounds[half - axes : half]):
            return None
        return self._files[files[row]], offsets[row]

    def _bounds(self, rows: HostArray, axes: int) -> tuple[HostArray, HostArray]:
        """Return the starts and the stops of boxes, with a row for each."""
        bounds = self._box[self._begins[rows][:, None] + np.arange(2 * axes)]
        return bounds[:, :axes], bounds[:, axes:]

    def uncovered(self, leaf: int, spec: ArraySpec) -> str | None:
        """Return the reason why the chunks of a leaf do not cover an array, or None if they do."""
        rows = self._order[self._rows_of[leaf] : self._rows_of[leaf + 1]]
        axes = len(spec.shape)
        if len(rows) > 1 and axes and covers_exactly(spec.shape, *self._bounds(rows, axes)):
            return None
        return uncovered(spec, [chunk.box for chunk in self.chunks(leaf, spec)])

    def chunks(self, leaf: int, spec: ArraySpec, within: Box | None = None, is_exact: bool = True) -> list[Chunk]:
        """Return the chunks of a leaf that are not outside of `within`. The only chunk of a leaf is always returned."""
        rows = self._order[self._rows_of[leaf] : self._rows_of[leaf + 1]]
        axes = len(spec.shape)
        if within is not None and axes and len(rows) > 1:
            starts, stops = self._bounds(rows, axes)
            rows = rows[((starts < np.array(within.stop)) & (stops > np.array(within.start))).all(axis=1)]
        files, offsets, bounds, begins = self._lists
        chunks = []
        for row in rows.tolist():
            begin = begins[row]
            half = begin + axes
            box = Box(tuple(bounds[begin:half]), tuple(bounds[half : half + axes]))
            chunks.append(Chunk(self._files[files[row]], offsets[row], box, True, is_exact, leaf, row))
        return chunks


def natural_column(column: Any, below: int, count: int | None = None) -> HostArray:
    """Check a column of integers from 0 to `below` - 1, and return it as an array. The column may be hostile.

    Raises:
        TypeError, ValueError, IndexError, OverflowError: the column is neither a list of ints nor an `IntegerColumn`,
            has another length, or has a number out of range.
    """
    is_list = isinstance(column, list | tuple) and {int}.issuperset(map(type, column))
    if not is_list and not isinstance(column, IntegerColumn):
        raise TypeError("expected a column of whole numbers")
    if count is not None and len(column) != count:
        raise ValueError("the columns have different lengths")
    numbers: HostArray = np.asarray(column, np.int64)
    if len(numbers) and not (0 <= numbers.min() and numbers.max() < below):
        raise IndexError(f"expected numbers from 0 to {below - 1}, found {numbers.min()} to {numbers.max()}")
    return numbers


def _whole_columns(tree: TreeMetadata, columns: Any) -> tuple[Sequence[int], Sequence[str], Sequence[int]]:
    """Return the leaf, file and offset of each whole array. Checks whole columns, because they may have 100,000 rows.

    Raises:
        TypeError, IndexError, KeyError: the columns are damaged or hostile.
    """
    files, leaves, numbers, offsets = (columns[name] for name in ("files", "leaf", "file", "offset"))
    if {*map(type, leaves), *map(type, numbers), *map(type, offsets)} - {int}:
        raise TypeError("expected whole numbers")
    if leaves and not (0 <= min(leaves) and max(leaves) < len(tree.leaves)):
        raise IndexError(f"expected leaves below {len(tree.leaves)}, found {min(leaves)} to {max(leaves)}")
    if min(numbers, default=0) < 0 or min(offsets, default=0) < 0:
        raise IndexError("a file number or an offset is below 0")
    keys = {number: files[number] for number in set(numbers)}
    if {*map(type, keys.values())} - {str}:
        raise TypeError("expected file names")
    return leaves, [*map(keys.__getitem__, numbers)], offsets


def _spec(tree: TreeMetadata, leaf: int) -> ArraySpec:
    record = tree.leaves[leaf]
    if not isinstance(record, ArrayRecord):
        raise TypeError(f"leaf {leaf} is not an array")
    return record.spec
