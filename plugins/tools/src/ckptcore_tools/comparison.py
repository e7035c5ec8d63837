"""Comparison of the trees and files of two checkpoints, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from ckptcore.commit.location import LocationLike
from ckptcore.context import Context, default_context
from ckptcore.errors import CorruptCheckpointError
from ckptcore.model import (
    JSON,
    ArrayRecord,
    Box,
    LeafRecord,
    Node,
    Skeleton,
    TreePath,
    column_array,
    column_summary,
    format_path,
)
from ckptcore.on_demand.open_state import OpenState
from ckptcore.opening.checkpoint import Checkpoint
from ckptcore.opening.open_checkpoints import ConsistentRead, open_files
from ckptcore.progress import ByteProgress, ProgressCallback
from ckptcore.results import CheckpointMetadata
from ckptcore.runtime import runtime_of
from ckptcore_tools.differences import Difference, DifferenceKind, Differences
from ckptcore_tools.elements import SAME, BoxReader, Distance, Tolerance, boxes_within, distance
from ckptcore_tools.formatting import format_leaf_type
from ckptcore_tools.locations import describe_directories

_FILE_SLICE_BYTES: Final = 1 << 24


class FilesComparison:
    """Comparison of the files of two checkpointables."""

    def __init__(self, a: str, b: str, context: Context) -> None:
        """Open two checkpointables.

        Args:
            a, b: the locations of two checkpointables that are stored as files.
            context: options.

        Raises:
            CheckpointError: see `ckptcore.metadata`.
        """
        self._a, self._b = (ConsistentRead(location, context, open_files).open() for location in (a, b))

    @property
    def files(self) -> int:
        """Number of files that both have."""
        return sum(key in self._b.objects for key in self._a.objects)

    @property
    def nbytes(self) -> int:
        """Number of bytes of `a` that `content_differences` compares."""
        return sum(self._a.objects[key].size for key in self._comparable())

    def structure_differences(self) -> Iterator[Difference]:
        """Yield files that only one side has, and files of different sizes."""
        for key, record in self._a.objects.items():
            other = self._b.objects.get(key)
            if other is None:
                yield Difference(key, (key,), "only_in_a", a="file")
            elif other.size != record.size:
                yield Difference(key, (key,), "size", record.size, other.size)
        for key in self._b.objects:
            if key not in self._a.objects:
                yield Difference(key, (key,), "only_in_b", b="file")

    def content_differences(self, add_progress: Callable[[int], None]) -> Iterator[Difference]:
        """Yield files of equal size with different bytes.

        Args:
            add_progress: called with the bytes of `a` that were compared.

        Raises:
            CorruptCheckpointError: if a file is damaged.
        """
        for key in self._comparable():
            differing, nbytes = 0, self._a.objects[key].size
            for start in range(0, nbytes, _FILE_SLICE_BYTES):
                stop = min(start + _FILE_SLICE_BYTES, nbytes)
                differing += int(
                    np.count_nonzero(_bytes(self._a, key, start, stop) != _bytes(self._b, key, start, stop))
                )
                add_progress(stop - start)
            if differing:
                yield Difference(key, (key,), "bytes", elements=nbytes, distance=Distance(differing, None))

    def _comparable(self) -> list[str]:
        theirs = self._b.objects
        return [key for key, own in self._a.objects.items() if key in theirs and theirs[key].size == own.size]


def _bytes(checkpoint: Checkpoint, key: str, start: int, stop: int) -> npt.NDArray[np.uint8]:
    data = np.frombuffer(checkpoint.store.get(key, start, stop), np.uint8)
    if data.size != stop - start:
        raise CorruptCheckpointError(
            f"{checkpoint.location.display}: {key} ends at byte {start + data.size}, expected at least {stop} bytes",
            key=key, start=start + data.size, stop=stop,
        )  # fmt: skip
    return data


def diff(
    a: LocationLike,
    b: LocationLike,
    *,
    absolute: float = 0.0,
    relative: float = 0.0,
    values: bool = True,
    progress: bool | ProgressCallback = False,
    context: Context | None = None,
) -> Differences:
    """Compare two checkpoints: structure, dtypes, shapes and elements. Checkpointables are compared by name.

    The checkpoints may have different layouts, and arrays of different frameworks. About 64 MiB of each are in memory
    at a time.

    Args:
        a, b: paths or URLs.
        absolute, relative: elements are equal if they differ by at most ``absolute + relative * |b|``. If both are 0,
            the bits are compared.
        values: False to compare only structure, dtypes and shapes. No array is read.
        progress: True for a bar on stderr, or a function that is called with the compared and the total bytes of `a`.
        context: options.

    Raises:
        CheckpointNotFoundError: a location has no checkpoint.
        CorruptCheckpointError: a checkpoint is damaged.
    """
    context = context or default_context()
    comparison = _CheckpointComparison(
        describe_directories(str(a), context),
        describe_directories(str(b), context),
        Tolerance(absolute, relative),
        context,
    )
    differences = list(comparison.structure_differences(with_dtypes=not values))
    with runtime_of(context).show_progress(progress, "comparing") as report:
        counted = ByteProgress(report)
        if values:
            counted.plan(comparison.nbytes)
            differences.extend(comparison.content_differences(counted.complete))
        counted.end()
    nbytes = comparison.nbytes if values else 0
    return Differences(str(a), str(b), tuple(differences), comparison.leaves, comparison.files, nbytes)


_BATCH_BYTES = 64 << 20
"""Largest number of bytes that are read from each side at a time, in the stored dtype."""


class Side:
    """One of two trees that are compared.

    Attributes:
        reader: reads the elements.
        tree: the tree.
    """

    def __init__(self, state: OpenState) -> None:
        """Describe the tree of an open checkpoint. Reads no array."""
        self.reader = BoxReader(state)
        self.tree = state.checkpoint.tree

    @cached_property
    def leaves(self) -> Mapping[TreePath, int]:
        """The number of each leaf, by path."""
        return {path: number for number, path in enumerate(self.tree.paths)}

    @cached_property
    def containers(self) -> Mapping[TreePath, str]:
        """The kind of each container, by path."""
        return dict(_containers(self.tree.skeleton))

    def __contains__(self, path: TreePath) -> bool:
        return path in self.leaves or path in self.containers

    def __iter__(self) -> Iterator[TreePath]:
        yield from self.containers
        yield from self.leaves

    def describe(self, path: TreePath) -> str:
        """Return the kind of the container or leaf at a path, as text."""
        return (
            self.containers[path] if path in self.containers else format_leaf_type(self.tree.leaves[self.leaves[path]])
        )

    def array(self, number: int) -> ArrayRecord:
        """Return the record of a leaf that is an array."""
        record = self.tree.leaves[number]
        assert isinstance(record, ArrayRecord)  # called for array pairs only
        return record


class ArrayPair(NamedTuple):
    """An array of the same shape in both trees: its first path, and its leaf number in each."""

    path: TreePath
    a: int
    b: int


@dataclass(slots=True)
class _Batch:
    """Boxes that are read together, at most one per array."""

    nbytes: int = 0
    boxes: list[tuple[ArrayPair, Box]] = field(default_factory=list)


class TreeComparison:
    """Comparison of two trees."""

    def __init__(self, a: Side, b: Side, tolerance: Tolerance) -> None:
        self._a = a
        self._b = b
        self._tolerance = tolerance

    @property
    def leaves(self) -> int:
        """Number of leaves that both have."""
        return sum(path in self._b.leaves for path in self._a.leaves)

    @property
    def nbytes(self) -> int:
        """Number of bytes of `a` that `content_differences` compares."""
        return sum(self._a.array(pair.a).spec.nbytes for pair in self.pairs)

    @cached_property
    def pairs(self) -> Sequence[ArrayPair]:
        """The arrays that exist in both trees with equal shapes. Tied arrays are included once."""
        return list(self._paired_arrays())

    def structure_differences(self, *, with_dtypes: bool) -> Iterator[Difference]:
        """Yield the differences that can be found without reading arrays.

        Args:
            with_dtypes: include different dtypes of arrays with equal shapes, which `content_differences` also reports.
        """
        a, b = self._a, self._b
        for path in a:
            if path not in b:
                if _parent_exists(path, b):
                    yield _difference(path, "only_in_a", a.describe(path), None)
            elif path in a.containers or path in b.containers:
                if a.describe(path) != b.describe(path):
                    yield _difference(path, "structure", a.describe(path), b.describe(path))
            else:
                record_a, record_b = a.tree.leaves[a.leaves[path]], b.tree.leaves[b.leaves[path]]
                yield from _record_differences(path, record_a, record_b, with_dtypes=with_dtypes)
        for path in b:
            if path not in a and _parent_exists(path, a):
                yield _difference(path, "only_in_b", None, b.describe(path))

    def content_differences(self, add_progress: Callable[[int], None]) -> Iterator[Difference]:
        """Yield the differences of dtypes and elements between arrays of one shape.

        Args:
            add_progress: called with the bytes of `a` that were compared.
        """
        distances = self._distances(self.pairs, add_progress)
        for pair in self.pairs:
            spec_a, spec_b = self._a.array(pair.a).spec, self._b.array(pair.b).spec
            total_distance = distances.get(pair, SAME)
            if not total_distance.differing and spec_a.dtype == spec_b.dtype:
                continue
            kinds: tuple[DifferenceKind, JSON, JSON] = ("dtype", spec_a.dtype, spec_b.dtype)
            if spec_a.dtype == spec_b.dtype:
                kinds = ("values", None, None)
            yield replace(_difference(pair.path, *kinds), elements=spec_a.size, distance=total_distance)

    def distance_of(self, pair: ArrayPair, add_progress: Callable[[int], None]) -> Distance:
        """Read one array of both trees, and return how its elements differ. See `content_differences`."""
        return self._distances([pair], add_progress).get(pair, SAME)

    def _distances(
        self, pairs: Sequence[ArrayPair], add_progress: Callable[[int], None]
    ) -> Mapping[ArrayPair, Distance]:
        distances: dict[ArrayPair, Distance] = {}
        for batch in self._batches(pairs):
            elements_a = self._a.reader.read({pair.a: box for pair, box in batch.boxes})
            elements_b = self._b.reader.read({pair.b: box for pair, box in batch.boxes})
            for pair, box in batch.boxes:
                box_distance = distance(elements_a[pair.a], elements_b[pair.b], self._tolerance)
                distances[pair] = distances.get(pair, SAME) + box_distance.within(box)
                add_progress(box.size * self._a.array(pair.a).spec.numpy_dtype.itemsize)
        return distances

    def _paired_arrays(self) -> Iterator[ArrayPair]:
        a, b = self._a, self._b
        seen: set[tuple[int, int]] = set()
        for path, number_a in a.leaves.items():
            number_b = b.leaves.get(path)
            if number_b is None:
                continue
            record_a, record_b = a.tree.leaves[number_a], b.tree.leaves[number_b]
            if not isinstance(record_a, ArrayRecord) or not isinstance(record_b, ArrayRecord):
                continue
            numbers = (a.tree.aliases.get(number_a, number_a), b.tree.aliases.get(number_b, number_b))
            if record_a.spec.shape == record_b.spec.shape and numbers not in seen:
                seen.add(numbers)
                yield ArrayPair(path, *numbers)

    def _batches(self, pairs: Sequence[ArrayPair]) -> Iterator[_Batch]:
        batch = _Batch()
        taken_a: set[int] = set()
        taken_b: set[int] = set()
        for pair in pairs:
            spec_a, spec_b = self._a.array(pair.a).spec, self._b.array(pair.b).spec
            wider = spec_a if spec_a.nbytes >= spec_b.nbytes else spec_b
            for box in boxes_within(wider, _BATCH_BYTES):
                nbytes = box.size * wider.numpy_dtype.itemsize
                full = batch.nbytes + nbytes > _BATCH_BYTES
                if batch.boxes and (full or pair.a in taken_a or pair.b in taken_b):
                    yield batch
                    batch, taken_a, taken_b = _Batch(), set(), set()
                batch.boxes.append((pair, box))
                batch.nbytes += nbytes
                taken_a.add(pair.a)
                taken_b.add(pair.b)
        if batch.boxes:
            yield batch


def _record_differences(path: TreePath, a: LeafRecord, b: LeafRecord, *, with_dtypes: bool) -> Iterator[Difference]:
    if isinstance(a, ArrayRecord) and isinstance(b, ArrayRecord):
        if a.kind != b.kind:
            yield _difference(path, "kind", a.kind, b.kind)
        if a.spec.shape != b.spec.shape:
            yield _difference(path, "shape", list(a.spec.shape), list(b.spec.shape))
        if a.spec.dtype != b.spec.dtype and (with_dtypes or a.spec.shape != b.spec.shape):
            yield _difference(path, "dtype", a.spec.dtype, b.spec.dtype)
    elif isinstance(a, ArrayRecord) or isinstance(b, ArrayRecord) or a.kind != b.kind:
        yield _difference(path, "kind", format_leaf_type(a), format_leaf_type(b))
    elif (summary := column_summary(a)) is not None and a.value != b.value:
        difference = _difference(path, "values", summary, column_summary(b))
        numbers_a, numbers_b = column_array(a), column_array(b)
        if numbers_a is not None and numbers_b is not None and numbers_a.shape == numbers_b.shape:
            measured = distance(numbers_a, numbers_b, Tolerance())
            difference = replace(difference, elements=numbers_a.size, distance=measured)
        yield difference
    elif a.value != b.value:
        difference = _difference(path, "values", a.value, b.value)
        if type(a.value) in (int, float) and type(b.value) in (int, float):
            error = abs(a.value - b.value)  # type: ignore[operator]  # numbers
            difference = replace(difference, distance=Distance(1, error, error * error))
        yield difference


def _difference(path: TreePath, kind: DifferenceKind, a: JSON, b: JSON) -> Difference:
    return Difference(format_path(path), path, kind, a, b)


def _parent_exists(path: TreePath, side: Side) -> bool:
    """Return True if a side has the parent container of a path. If not, only the missing container is reported."""
    return not path or path[:-1] in side.containers


def _containers(skeleton: Skeleton) -> Iterator[tuple[TreePath, str]]:
    """Yield the containers in the order of their leaves. A loop is faster than nested generators, one per level."""
    left: list[tuple[TreePath, Skeleton]] = [((), skeleton)]
    while left:
        path, node = left.pop()
        if isinstance(node, Node):
            yield path, node.kind if node.type is None else f"{node.kind} {node.type}"
            inner = [((*path, key), child) for key, child in zip(node.keys, node.children, strict=True)]
            left += [entry for entry in reversed(inner) if isinstance(entry[1], Node)]


class _CheckpointComparison:
    """Comparison of two checkpoints, each of one tree or of several checkpointables."""

    def __init__(
        self,
        a: Mapping[str, tuple[str, CheckpointMetadata]],
        b: Mapping[str, tuple[str, CheckpointMetadata]],
        tolerance: Tolerance,
        context: Context,
    ) -> None:
        self._a = {directory: metadata for directory, (_, metadata) in a.items()}
        self._b = {directory: metadata for directory, (_, metadata) in b.items()}
        self._trees: dict[str, TreeComparison] = {}
        self._files: dict[str, FilesComparison] = {}
        for directory in a.keys() & b.keys():
            (location_a, metadata_a), (location_b, metadata_b) = a[directory], b[directory]
            if metadata_a.is_files and metadata_b.is_files:
                self._files[directory] = FilesComparison(location_a, location_b, context)
            elif not (metadata_a.is_files or metadata_b.is_files):
                sides = Side(OpenState(location_a, context)), Side(OpenState(location_b, context))
                self._trees[directory] = TreeComparison(*sides, tolerance)

    @property
    def leaves(self) -> int:
        """Number of leaves that both have."""
        return sum(comparison.leaves for comparison in self._trees.values())

    @property
    def files(self) -> int:
        """Number of files that both have."""
        return sum(comparison.files for comparison in self._files.values())

    @property
    def nbytes(self) -> int:
        """Number of bytes of `a` that `content_differences` compares."""
        return sum(comparison.nbytes for _, comparison in self._comparisons())

    def structure_differences(self, *, with_dtypes: bool) -> Iterator[Difference]:
        """Yield the differences that can be found without reading arrays or files."""
        a, b = self._a, self._b
        if ("" in a) != ("" in b):
            yield _root_difference("structure", _kind_of_checkpoint(a), _kind_of_checkpoint(b))
            return
        for directory, metadata in a.items():
            if directory not in b:
                yield _in_checkpointable(directory, _root_difference("only_in_a", _kind(metadata), None))
            elif directory in self._trees:
                for difference in self._trees[directory].structure_differences(with_dtypes=with_dtypes):
                    yield _in_checkpointable(directory, difference)
            elif directory in self._files:
                for difference in self._files[directory].structure_differences():
                    yield _in_checkpointable(directory, difference)
            else:
                kinds = _kind(metadata), _kind(b[directory])
                yield _in_checkpointable(directory, _root_difference("structure", *kinds))
        for directory, metadata in b.items():
            if directory not in a:
                yield _in_checkpointable(directory, _root_difference("only_in_b", None, _kind(metadata)))

    def content_differences(self, add_progress: Callable[[int], None]) -> Iterator[Difference]:
        """Yield the differences between elements and between the bytes of files.

        Args:
            add_progress: called with the bytes of `a` that were compared.
        """
        for directory, comparison in self._comparisons():
            for difference in comparison.content_differences(add_progress):
                yield _in_checkpointable(directory, difference)

    def _comparisons(self) -> Iterator[tuple[str, TreeComparison | FilesComparison]]:
        for directory in self._a:
            if directory in self._trees:
                yield directory, self._trees[directory]
            elif directory in self._files:
                yield directory, self._files[directory]


def _kind_of_checkpoint(directories: Mapping[str, object]) -> str:
    return "one tree" if "" in directories else f"checkpointables {', '.join(directories)}"


def _kind(metadata: CheckpointMetadata) -> str:
    return "files" if metadata.is_files else "tree"


def _root_difference(kind: Literal["structure", "only_in_a", "only_in_b"], a: JSON, b: JSON) -> Difference:
    return Difference(format_path(()), (), kind, a, b)


def _in_checkpointable(directory: str, difference: Difference) -> Difference:
    return replace(difference, checkpointable=directory) if directory else difference
