"""Comparison of trees and files of two checkpoints, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from ckptcore.errors import CorruptCheckpointError
from ckptcore.loading.checkpoint import Checkpoint
from ckptcore.loading.opening import ConsistentRead, open_files
from ckptcore.model import (
    JSON,
    ArrayRecord,
    ArraySpec,
    Box,
    HostArray,
    LeafRecord,
    Node,
    Shard,
    Skeleton,
    TreeMetadata,
    TreePath,
    format_path,
)
from ckptcore.protocols import ContainerHandler, Flattened, HostMemory, LeafHandler, Priority
from ckptcore_tools.cli.command import command_context
from ckptcore_tools.cli.elements import SAME, Distance, Tolerance, distance
from ckptcore_tools.cli.output import UNSET, Unset

if TYPE_CHECKING:
    from ckptcore.model import Pending

__all__ = ["BoxReader", "Difference", "FilesComparison", "Side", "TreeComparison", "boxes_within"]


def boxes_within(spec: ArraySpec, max_bytes: int) -> Iterator[Box]:
    """Divide an array into boxes of at most `max_bytes`, but at least one element each, in C order."""
    if spec.nbytes <= max_bytes or not spec.shape:
        yield Box.whole(spec.shape)
        return
    yield from _boxes(spec.shape, (), (), spec.numpy_dtype.itemsize, max_bytes)


def _boxes(
    shape: tuple[int, ...], start: tuple[int, ...], stop: tuple[int, ...], itemsize: int, max_bytes: int
) -> Iterator[Box]:
    """Divide the part of an array at fixed indices of the leading axes. `shape` is the shape of the other axes."""
    row = ArraySpec(shape[1:], "uint8").size * itemsize
    rows = max_bytes // row if row else shape[0]
    if rows or len(shape) == 1:
        step = max(1, rows)
        for first in range(0, shape[0], step):
            last = min(first + step, shape[0])
            yield Box((*start, first, *(0,) * (len(shape) - 1)), (*stop, last, *shape[1:]))
        return
    for index in range(shape[0]):
        yield from _boxes(shape[1:], (*start, index), (*stop, index + 1), itemsize, max_bytes)


class BoxReader:
    """Reads boxes of the arrays of one checkpoint."""

    def __init__(self, location: str, tree: TreeMetadata) -> None:
        self._location = location
        self._tree = tree
        context = command_context()
        plugins = replace(context.plugins, handlers={_BoxRequest: _BoxHandler(), _BoxRequests: _BoxesHandler()})
        self._context = replace(context, plugins=plugins)

    def read(self, boxes: Mapping[int, Box]) -> dict[int, HostArray]:
        """Read one box of each of these arrays. Keys are leaf numbers."""
        from ckptcore import PLACEHOLDER, load

        abstract = self._abstract(self._tree.skeleton, iter(range(len(self._tree.leaves))), boxes)
        if abstract is PLACEHOLDER:
            return {}
        found: dict[int, HostArray] = {}
        pending = [load(self._location, abstract, context=self._context)]
        while pending:
            node = pending.pop()
            if isinstance(node, _LoadedBox):
                found[node.number] = node.elements
            elif isinstance(node, list):
                pending.extend(node)
        return found

    def _abstract(self, node: Skeleton, numbers: Iterator[int], boxes: Mapping[int, Box]) -> object:
        from ckptcore import PLACEHOLDER

        if not isinstance(node, Node):
            number = next(numbers)
            return _BoxRequest(number, self._tree.leaves[number], boxes[number]) if number in boxes else PLACEHOLDER
        children = [self._abstract(child, numbers, boxes) for child in node.children]
        return PLACEHOLDER if all(child is PLACEHOLDER for child in children) else _BoxRequests(node, children)


@dataclass(frozen=True, slots=True)
class _BoxRequest:
    """An abstract leaf that requests one box of an array."""

    number: int
    record: LeafRecord
    box: Box


@dataclass(frozen=True, slots=True)
class _LoadedBox:
    number: int
    elements: HostArray


@dataclass(frozen=True, slots=True)
class _BoxRequests:
    """An abstract container of box requests."""

    node: Node
    children: Sequence[object]


class _BoxesHandler(ContainerHandler):
    """Flattens `_BoxRequests` like the stored container. The loaded container is a list."""

    priority = Priority.EXACT

    def flatten(self, value: Any) -> Flattened:
        return Flattened(value.node.kind, value.node.keys, value.children, value.node.type)

    def unflatten(self, like: Any, children: Sequence[object]) -> object:
        return list(children)


class _BoxHandler(LeafHandler):
    """Requests the box of a `_BoxRequest`, which is always abstract and is never saved."""

    priority = Priority.EXACT

    def describe(self, leaf: Any) -> LeafRecord:
        record: LeafRecord = leaf.record
        return record

    def abstract(self, leaf: Any) -> object:
        return leaf

    def shards(self, leaf: Any, rank: int, size: int) -> Sequence[Shard]:
        return ()

    def copy_to_host(self, leaf: Any, boxes: Sequence[Box], memory: HostMemory) -> Sequence[Pending[HostArray]]:
        return ()

    def view_on_host(self, leaf: Any, boxes: Sequence[Box]) -> Sequence[Pending[HostArray]]:
        return ()

    def wanted(self, abstract: Any, stored: ArrayRecord) -> Sequence[Box]:
        return (abstract.box,)

    def build(self, abstract: Any, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]) -> object:
        ((_, elements),) = boxes
        return _LoadedBox(abstract.number, elements)


_BATCH_BYTES = 64 << 20
"""Largest number of bytes that are read from each side at a time, in the stored dtype."""

DifferenceKind: TypeAlias = Literal[
    "only_in_a", "only_in_b", "structure", "kind", "dtype", "shape", "values", "size", "bytes"
]


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference between two checkpoints.

    Attributes:
        path, keys: the path as text and as keys.
        kind: what differs. "size" and "bytes" are differences of files.
        a, b: the content of each side.
        checkpointable: directory of the checkpointable, if there are several.
        differing, elements: number of differing elements of an array, or bytes of a file, and their total number.
        max_absolute_error: NaN if an element is NaN in one array only; None if the elements are not numbers.
    """

    path: str
    keys: TreePath
    kind: DifferenceKind
    a: JSON = None
    b: JSON = None
    checkpointable: str | Unset = UNSET
    differing: int | Unset = UNSET
    elements: int | Unset = UNSET
    max_absolute_error: float | None | Unset = UNSET


class Side:
    """One of two trees that are compared.

    Attributes:
        reader: reads the elements.
        tree: the tree.
        leaves: the number of each leaf, by path.
        containers: the kind of each container, by path.
    """

    def __init__(self, location: str, tree: TreeMetadata) -> None:
        self.reader = BoxReader(location, tree)
        self.tree = tree
        self.leaves: Mapping[TreePath, int] = {path: number for number, path in enumerate(tree.paths)}
        self.containers: Mapping[TreePath, str] = dict(_containers(tree.skeleton))

    def __contains__(self, path: TreePath) -> bool:
        return path in self.leaves or path in self.containers

    def __iter__(self) -> Iterator[TreePath]:
        yield from self.containers
        yield from self.leaves

    def describe(self, path: TreePath) -> str:
        """Return the kind of the container or leaf at a path, as text."""
        return self.containers[path] if path in self.containers else _leaf_text(self.tree.leaves[self.leaves[path]])

    def array(self, number: int) -> ArrayRecord:
        """Return the record of a leaf that is an array."""
        record = self.tree.leaves[number]
        assert isinstance(record, ArrayRecord)  # called for array pairs only
        return record


@dataclass(frozen=True, slots=True)
class _ArrayPair:
    """An array of the same shape in both trees: its first path, and its leaf number in each."""

    path: TreePath
    a: int
    b: int


@dataclass(slots=True)
class _Batch:
    """Boxes that are read together, at most one per array."""

    nbytes: int = 0
    boxes: list[tuple[_ArrayPair, Box]] = field(default_factory=list)


class TreeComparison:
    """Comparison of two trees."""

    def __init__(self, a: Side, b: Side, tolerance: Tolerance) -> None:
        self._a = a
        self._b = b
        self._tolerance = tolerance
        self._pairs = list(self._paired_arrays())

    @property
    def leaves(self) -> int:
        """Number of leaves that both have."""
        return sum(path in self._b.leaves for path in self._a.leaves)

    @property
    def nbytes(self) -> int:
        """Number of bytes of `a` that `content_differences` compares."""
        return sum(self._a.array(pair.a).spec.nbytes for pair in self._pairs)

    def structure_differences(self, *, with_dtypes: bool) -> Iterator[Difference]:
        """Yield the differences that can be found without reading arrays.

        Args:
            with_dtypes: include different dtypes of arrays of one shape, which `content_differences` also reports.
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

    def content_differences(self, progress: Callable[[int, int], None]) -> Iterator[Difference]:
        """Yield the differences of dtypes and elements between arrays of one shape.

        Args:
            progress: called with compared bytes of `a` and total bytes.
        """
        distances: dict[_ArrayPair, Distance] = {}
        done, total = 0, self.nbytes
        for batch in self._batches():
            elements_a = self._a.reader.read({pair.a: box for pair, box in batch.boxes})
            elements_b = self._b.reader.read({pair.b: box for pair, box in batch.boxes})
            for pair, box in batch.boxes:
                box_distance = distance(elements_a[pair.a], elements_b[pair.b], self._tolerance)
                distances[pair] = distances.get(pair, SAME) + box_distance
                done += box.size * self._a.array(pair.a).spec.numpy_dtype.itemsize
                progress(done, total)
        for pair in self._pairs:
            spec_a, spec_b = self._a.array(pair.a).spec, self._b.array(pair.b).spec
            total_distance = distances.get(pair, SAME)
            if not total_distance.differing and spec_a.dtype == spec_b.dtype:
                continue
            kinds: tuple[DifferenceKind, JSON, JSON] = ("dtype", spec_a.dtype, spec_b.dtype)
            if spec_a.dtype == spec_b.dtype:
                kinds = ("values", None, None)
            yield replace(
                _difference(pair.path, *kinds),
                differing=total_distance.differing,
                elements=spec_a.size,
                max_absolute_error=total_distance.largest,
            )

    def _paired_arrays(self) -> Iterator[_ArrayPair]:
        """Yield the arrays that exist in both trees with one shape. Tied arrays are yielded once."""
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
                yield _ArrayPair(path, *numbers)

    def _batches(self) -> Iterator[_Batch]:
        batch = _Batch()
        taken_a: set[int] = set()
        taken_b: set[int] = set()
        for pair in self._pairs:
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
        yield _difference(path, "kind", _leaf_text(a), _leaf_text(b))
    elif a.value != b.value:
        difference = _difference(path, "values", a.value, b.value)
        if type(a.value) in (int, float) and type(b.value) in (int, float):
            difference = replace(difference, max_absolute_error=abs(a.value - b.value))  # type: ignore[operator]  # numbers
        yield difference


def _difference(path: TreePath, kind: DifferenceKind, a: JSON, b: JSON) -> Difference:
    return Difference(format_path(path), path, kind, a, b)


def _parent_exists(path: TreePath, side: Side) -> bool:
    """Return True if a side has the parent container of a path. If not, only that container is reported."""
    return not path or path[:-1] in side.containers


def _containers(node: Skeleton, path: TreePath = ()) -> Iterator[tuple[TreePath, str]]:
    if isinstance(node, Node):
        yield path, node.kind if node.type is None else f"{node.kind} {node.type}"
        for key, child in zip(node.keys, node.children, strict=True):
            yield from _containers(child, (*path, key))


def _leaf_text(record: LeafRecord) -> str:
    if not isinstance(record, ArrayRecord):
        return record.kind
    return str(record.spec) if record.kind == "array" else f"{record.kind} {record.spec}"


_FILE_SLICE_BYTES: Final = 1 << 24


class FilesComparison:
    """Comparison of the files of two checkpointables."""

    def __init__(self, a: str, b: str) -> None:
        """Open both.

        Args:
            a, b: the locations of two checkpointables that are stored as files.

        Raises:
            CheckpointError: see `ckptcore.metadata`.
        """
        self._a, self._b = (ConsistentRead(location, command_context(), open_files).open() for location in (a, b))

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

    def content_differences(self, progress: Callable[[int, int], None]) -> Iterator[Difference]:
        """Yield files of equal size with different bytes.

        Args:
            progress: called with compared bytes of `a` and total bytes.

        Raises:
            CorruptCheckpointError: if a file is damaged.
        """
        done, total = 0, self.nbytes
        for key in self._comparable():
            differing, nbytes = 0, self._a.objects[key].size
            for start in range(0, nbytes, _FILE_SLICE_BYTES):
                stop = min(start + _FILE_SLICE_BYTES, nbytes)
                differing += int(
                    np.count_nonzero(_bytes(self._a, key, start, stop) != _bytes(self._b, key, start, stop))
                )
                done += stop - start
                progress(done, total)
            if differing:
                yield Difference(key, (key,), "bytes", differing=differing, elements=nbytes)

    def _comparable(self) -> list[str]:
        theirs = self._b.objects
        return [key for key, own in self._a.objects.items() if key in theirs and theirs[key].size == own.size]


def _bytes(opened: Checkpoint, key: str, start: int, stop: int) -> npt.NDArray[np.uint8]:
    data = np.frombuffer(opened.store.get(key, start, stop), np.uint8)
    if data.size != stop - start:
        raise CorruptCheckpointError(
            f"{opened.location.display}: {key} ends at byte {start + data.size}, expected at least {stop} bytes",
            key=key, start=start + data.size, stop=stop,
        )  # fmt: skip
    return data
