"""What the root keeps of a checkpoint, or an inspection finds: where the chunks of each array are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import numpy as np

from ckptcore.errors import CorruptCheckpointError
from ckptcore.model import JSON, ArrayRecord, ArraySpec, Box, HostArray, TreeMetadata
from ckptcore.planning import uncovered

__all__ = ["Chunk", "ChunkColumns", "ChunkTable", "Content", "KnownTables"]

Content = Literal["elements", "items"]
"""What a chunk is in its file: its elements in C order, little endian, or an item of torch.save around them."""

_MOST_BYTES: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of an array, and where it is.

    Attributes:
        box: where in the array.
        key: the object it is in.
        offset: where its elements or its item begin in the object, in bytes.
        nbytes: how long an item is as it is stored, in bytes; of elements -1, because their box tells it.
        transforms: what was done to an item after another, as torch names it (``stream.zstd/1``).
    """

    box: Box
    key: str
    offset: int
    nbytes: int = -1
    transforms: tuple[str, ...] = ()


class ChunkColumns:
    """Chunks as they are collected, a column for each thing."""

    def __init__(self, content: Content) -> None:
        """Begin without chunks."""
        self._content: Final = content
        self._files: dict[str, int] = {}
        self._leaf: list[int] = []
        self._file: list[int] = []
        self._offset: list[int] = []
        self._nbytes: list[int] = []
        self._box: list[int] = []
        self._transforms: dict[str, Sequence[str]] = {}

    def add(self, leaf: int, chunk: Chunk) -> None:
        """One more chunk of a leaf."""
        if chunk.transforms:
            self._transforms[str(len(self._leaf))] = chunk.transforms
        self._leaf.append(leaf)
        self._file.append(self._files.setdefault(chunk.key, len(self._files)))
        self._offset.append(chunk.offset)
        self._nbytes.append(chunk.nbytes)
        self._box.extend(chunk.box.start)
        self._box.extend(chunk.box.stop)

    def to_json(self) -> JSON:
        """For `ChunkTable.from_json`."""
        encoded: dict[str, JSON] = {
            "content": self._content,
            "files": list(self._files),
            "leaf": self._leaf,
            "file": self._file,
            "offset": self._offset,
            "box": self._box,
        }
        if self._content == "items":
            encoded["nbytes"] = self._nbytes
            encoded["transforms"] = self._transforms
        return encoded


class ChunkTable:
    """The chunks of every array of a tree. Any thread."""

    __slots__ = (
        "_begin",
        "_bounds",
        "_box",
        "_columns",
        "_file",
        "_files",
        "_leaf",
        "_nbytes",
        "_offset",
        "_reasons",
        "_rows",
        "_transforms",
        "content",
    )

    def __init__(self, tree: TreeMetadata, state: JSON) -> None:
        """Read the JSON of `ChunkColumns`, which may be hostile.

        Raises:
            CorruptCheckpointError: it does not fit the tree.
        """
        try:
            self._read(tree, state)
        except CorruptCheckpointError:
            raise
        except (TypeError, KeyError, IndexError, ValueError, OverflowError, AttributeError) as error:
            raise CorruptCheckpointError(
                f"the layout dcp cannot read where arrays are: {error!r} where a table of chunks should be"
            ) from error

    def _read(self, tree: TreeMetadata, state: JSON) -> None:
        columns: Any = state  # what is caught above is what a hostile one raises
        self.content: Content = columns["content"]
        self._files = [_text(name) for name in _list(columns["files"])]
        self._leaf = _numbers(columns["leaf"], len(tree.leaves))
        self._file = _numbers(columns["file"], len(self._files))
        self._offset = _numbers(columns["offset"], _MOST_BYTES)
        self._box = _numbers(columns["box"], _MOST_BYTES)
        count = len(self._leaf)
        self._nbytes = np.full(count, -1)
        self._transforms: Mapping[str, Sequence[str]] = {}
        if self.content == "items":
            self._nbytes = _numbers(columns["nbytes"], _MOST_BYTES)
            found: dict[str, Any] = columns["transforms"]
            self._transforms = {
                str(number): tuple([_text(name) for name in _list(names)]) for number, names in found.items()
            }
        axes = np.array(
            [len(record.spec.shape) if isinstance(record, ArrayRecord) else 0 for record in tree.leaves], int
        )
        widths = 2 * axes[self._leaf] if count else np.zeros(0, int)
        if self.content not in get_args(Content) or not (
            len(self._file) == len(self._offset) == len(self._nbytes) == count and len(self._box) == widths.sum()
        ):
            raise ValueError("columns of different lengths")
        self._begin = np.concatenate([np.zeros(1, int), np.cumsum(widths)])
        order = np.argsort(self._leaf, kind="stable")
        bounds = np.searchsorted(self._leaf[order], np.arange(len(tree.leaves) + 1))
        self._rows = (order, bounds.tolist())
        # As Python's own numbers, as the state has them, for single chunks; and as an array to look for boxes among many.
        sizes: Sequence[int] = columns["nbytes"] if self.content == "items" else [-1] * count
        self._columns = (columns["file"], columns["offset"], sizes, self._begin.tolist())
        self._bounds: Sequence[int] = columns["box"]
        self._reasons: dict[int, str | None] = {}

    def chunks(self, leaf: int, within: Box | None = None) -> Sequence[Chunk]:
        """The chunks of a leaf; with a box, those that have elements of it."""
        order, bounds = self._rows
        rows = order[bounds[leaf] : bounds[leaf + 1]]
        if within is not None and len(within.start) and len(rows) > 1:
            width = 2 * len(within.start)
            boxes = self._box[self._begin[rows][:, None] + np.arange(width)]
            starts, stops = boxes[:, : width // 2], boxes[:, width // 2 :]
            touched = ((starts < np.array(within.stop)) & (stops > np.array(within.start))).all(axis=1)
            rows = rows[touched]
        return [self._chunk(row) for row in rows.tolist()]

    def uncovered(self, leaf: int, spec: ArraySpec) -> str | None:
        """Return the reason why the chunks of a leaf do not cover an array, for errors; None if they do. Cached."""
        order, bounds = self._rows
        first, last = bounds[leaf], bounds[leaf + 1]
        if last - first == 1:
            begins = self._columns[3]
            row = order[first]
            if list(self._bounds[begins[row] : begins[row + 1]]) == [0] * len(spec.shape) + list(spec.shape):
                return None
        if leaf not in self._reasons:
            self._reasons[leaf] = uncovered(spec, [chunk.box for chunk in self.chunks(leaf)])
        return self._reasons[leaf]

    def _chunk(self, row: int) -> Chunk:
        files, offsets, sizes, begins = self._columns
        begin, stop = begins[row], begins[row + 1]
        half = (begin + stop) // 2
        box = Box(tuple(self._bounds[begin:half]), tuple(self._bounds[half:stop]))
        transforms = self._transforms.get(str(row), ()) if self._transforms else ()
        return Chunk(box, self._files[files[row]], offsets[row], sizes[row], tuple(transforms))


class KnownTables:
    """The table that was read last: a load asks for the same one several times. Any thread."""

    def __init__(self) -> None:
        """Know none."""
        self._last: tuple[TreeMetadata, JSON, ChunkTable] | None = None

    def table(self, tree: TreeMetadata, state: JSON) -> ChunkTable:
        """See `ChunkTable`."""
        last = self._last
        if last is None or last[0] is not tree or last[1] is not state:
            last = self._last = (tree, state, ChunkTable(tree, state))
        return last[2]


def _list(found: Any) -> list[Any]:
    if not isinstance(found, list | tuple):
        raise TypeError("a list is expected")
    return list(found)


def _text(found: Any) -> str:
    if not isinstance(found, str):
        raise TypeError("a text is expected")
    return found


def _numbers(found: Any, below: int) -> HostArray:
    """Whole numbers from 0 on, as an array."""
    column = _list(found)
    if not {int}.issuperset(map(type, column)):
        raise TypeError("a whole number is expected")
    numbers: HostArray = np.array(column, np.int64)
    if len(numbers) and not (0 <= numbers.min() and numbers.max() < below):
        raise IndexError(f"expected numbers from 0 to {below - 1}, found {numbers.min()} to {numbers.max()}")
    return numbers
