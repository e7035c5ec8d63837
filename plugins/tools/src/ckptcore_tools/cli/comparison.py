"""Comparison of two checkpoints with bounded memory: structure, dtypes, shapes, elements, files."""

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

__all__ = ["BoxReader", "Comparison", "Difference", "FilesComparison", "Side", "boxes_within"]


def boxes_within(spec: ArraySpec, max_bytes: int) -> Iterator[Box]:
    """Boxes that make up an array, in C order, each of at most so many bytes, or of one element."""
    if spec.nbytes <= max_bytes or not spec.shape:
        yield Box.whole(spec.shape)
        return
    yield from _boxes(spec.shape, (), (), spec.numpy_dtype.itemsize, max_bytes)


def _boxes(
    shape: tuple[int, ...], start: tuple[int, ...], stop: tuple[int, ...], itemsize: int, max_bytes: int
) -> Iterator[Box]:
    """Boxes of what lies at one index of the leading axes; `shape` is that of the axes that are left."""
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
        plugins = replace(context.plugins, handlers={_Window: _WindowHandler(), _Windows: _WindowsHandler()})
        self._context = replace(context, plugins=plugins)

    def read(self, boxes: Mapping[int, Box]) -> dict[int, HostArray]:
        """The elements of one box each of some arrays, by number of the leaf."""
        from ckptcore import PLACEHOLDER, load

        abstract = self._abstract(self._tree.skeleton, iter(range(len(self._tree.leaves))), boxes)
        if abstract is PLACEHOLDER:
            return {}
        found: dict[int, HostArray] = {}
        pending = [load(self._location, abstract, context=self._context)]
        while pending:
            node = pending.pop()
            if isinstance(node, _Loaded):
                found[node.number] = node.elements
            elif isinstance(node, list):
                pending.extend(node)
        return found

    def _abstract(self, node: Skeleton, numbers: Iterator[int], boxes: Mapping[int, Box]) -> object:
        from ckptcore import PLACEHOLDER

        if not isinstance(node, Node):
            number = next(numbers)
            return _Window(number, self._tree.leaves[number], boxes[number]) if number in boxes else PLACEHOLDER
        children = [self._abstract(child, numbers, boxes) for child in node.children]
        return PLACEHOLDER if all(child is PLACEHOLDER for child in children) else _Windows(node, children)


@dataclass(frozen=True, slots=True)
class _Window:
    number: int
    record: LeafRecord
    box: Box


@dataclass(frozen=True, slots=True)
class _Loaded:
    number: int
    elements: HostArray


@dataclass(frozen=True, slots=True)
class _Windows:
    node: Node
    children: Sequence[object]


class _WindowsHandler(ContainerHandler):
    """Takes `_Windows` apart as what was saved was, and puts them together as a list."""

    priority = Priority.EXACT

    def flatten(self, value: Any) -> Flattened:
        return Flattened(value.node.kind, value.node.keys, value.children, value.node.type)

    def unflatten(self, like: Any, children: Sequence[object]) -> object:
        return list(children)


class _WindowHandler(LeafHandler):
    """Asks for the one box of a `_Window`. A `_Window` is only ever abstract: it has no elements to save."""

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
        return _Loaded(abstract.number, elements)


_BATCH_BYTES = 64 << 20
"""The most that is read of each side at a time, in bytes as it is stored."""

DifferenceKind: TypeAlias = Literal[
    "only_in_a", "only_in_b", "structure", "kind", "dtype", "shape", "values", "size", "bytes"
]


@dataclass(frozen=True, slots=True)
class Difference:
    """A way in which two checkpoints differ.

    Attributes:
        path, keys: where, for people and for programs.
        kind: of "size" and "bytes", a file that an object wrote.
        a, b: what is in each.
        checkpointable: the directory of the one it is in, where there are several.
        differing, elements: how many elements of an array differ, or bytes of a file, and of how many.
        max_absolute_error: "nan" where only one is not a number; None of elements that are no numbers.
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
    """One of the two checkpoints.

    Attributes:
        reader: reads its elements.
        tree: what is in it.
        leaves: the number of each leaf.
        containers: what kind each container is.
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
        """What stands at a path."""
        return self.containers[path] if path in self.containers else _leaf_text(self.tree.leaves[self.leaves[path]])

    def array(self, number: int) -> ArrayRecord:
        """The record of a leaf that is an array."""
        record = self.tree.leaves[number]
        assert isinstance(record, ArrayRecord)  # asked for pairs only, which have no others
        return record


@dataclass(frozen=True, slots=True)
class _Pair:
    """An array that both have, in one shape, by its first path and its number in each."""

    path: TreePath
    a: int
    b: int


@dataclass(slots=True)
class _Batch:
    """Boxes that are read together: at most one of each array."""

    nbytes: int = 0
    boxes: list[tuple[_Pair, Box]] = field(default_factory=list)


class Comparison:
    """What two checkpoints have in common, and how they differ."""

    def __init__(self, a: Side, b: Side, tolerance: Tolerance) -> None:
        self._a = a
        self._b = b
        self._tolerance = tolerance
        self._pairs = list(self._paired_arrays())

    @property
    def leaves(self) -> int:
        """How many leaves both have."""
        return sum(path in self._b.leaves for path in self._a.leaves)

    @property
    def nbytes(self) -> int:
        """How many bytes of `a` `of_contents` compares."""
        return sum(self._a.array(pair.a).spec.nbytes for pair in self._pairs)

    def of_trees(self, *, with_dtypes: bool) -> Iterator[Difference]:
        """Every difference that shows without reading an array.

        Args:
            with_dtypes: also those of dtypes of arrays of one shape, of which `of_contents` tells more.
        """
        a, b = self._a, self._b
        for path in a:
            if path not in b:
                if _container_is_in(path, b):
                    yield _difference(path, "only_in_a", a.describe(path), None)
            elif path in a.containers or path in b.containers:
                if a.describe(path) != b.describe(path):
                    yield _difference(path, "structure", a.describe(path), b.describe(path))
            else:
                record_a, record_b = a.tree.leaves[a.leaves[path]], b.tree.leaves[b.leaves[path]]
                yield from _record_differences(path, record_a, record_b, with_dtypes=with_dtypes)
        for path in b:
            if path not in a and _container_is_in(path, a):
                yield _difference(path, "only_in_b", None, b.describe(path))

    def of_contents(self, progress: Callable[[int, int], None]) -> Iterator[Difference]:
        """Every difference of dtypes and elements between arrays of one shape.

        Args:
            progress: called with bytes of `a` compared and bytes in all.
        """
        found: dict[_Pair, Distance] = {}
        done, total = 0, self.nbytes
        for batch in self._batches():
            elements_a = self._a.reader.read({pair.a: box for pair, box in batch.boxes})
            elements_b = self._b.reader.read({pair.b: box for pair, box in batch.boxes})
            for pair, box in batch.boxes:
                apart = distance(elements_a[pair.a], elements_b[pair.b], self._tolerance)
                found[pair] = found.get(pair, SAME) + apart
                done += box.size * self._a.array(pair.a).spec.numpy_dtype.itemsize
                progress(done, total)
        for pair in self._pairs:
            spec_a, spec_b = self._a.array(pair.a).spec, self._b.array(pair.b).spec
            apart = found.get(pair, SAME)
            if not apart.differing and spec_a.dtype == spec_b.dtype:
                continue
            kinds: tuple[DifferenceKind, JSON, JSON] = ("dtype", spec_a.dtype, spec_b.dtype)
            if spec_a.dtype == spec_b.dtype:
                kinds = ("values", None, None)
            yield replace(
                _difference(pair.path, *kinds),
                differing=apart.differing,
                elements=spec_a.size,
                max_absolute_error=apart.largest,
            )

    def _paired_arrays(self) -> Iterator[_Pair]:
        """The arrays whose elements can be compared; one whose bytes others share stands for them."""
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
                yield _Pair(path, *numbers)

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


def _container_is_in(path: TreePath, side: Side) -> bool:
    """Whether the container that a path is in is there: else that container is the difference."""
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


_PIECE_BYTES: Final = 1 << 24


class FilesComparison:
    """What the files of two checkpointables have in common, and how they differ."""

    def __init__(self, a: str, b: str) -> None:
        """Open both.

        Args:
            a, b: the locations of two checkpointables that are stored as files.

        Raises:
            What `ckptcore.metadata` does.
        """
        self._a, self._b = (ConsistentRead(place, command_context(), open_files).open() for place in (a, b))

    @property
    def files(self) -> int:
        """How many files both have."""
        return sum(key in self._b.objects for key in self._a.objects)

    @property
    def nbytes(self) -> int:
        """How many bytes of `a` `of_contents` compares."""
        return sum(self._a.objects[key].size for key in self._comparable())

    def of_names(self) -> Iterator[Difference]:
        """Files that only one has, and those of another size."""
        for key, record in self._a.objects.items():
            other = self._b.objects.get(key)
            if other is None:
                yield Difference(key, (key,), "only_in_a", a="file")
            elif other.size != record.size:
                yield Difference(key, (key,), "size", record.size, other.size)
        for key in self._b.objects:
            if key not in self._a.objects:
                yield Difference(key, (key,), "only_in_b", b="file")

    def of_contents(self, progress: Callable[[int, int], None]) -> Iterator[Difference]:
        """Files of one size with other bytes.

        Args:
            progress: called with bytes of `a` compared and bytes in all.

        Raises:
            CorruptCheckpointError: if a file is not what was written.
        """
        done, total = 0, self.nbytes
        for key in self._comparable():
            differing, nbytes = 0, self._a.objects[key].size
            for start in range(0, nbytes, _PIECE_BYTES):
                stop = min(start + _PIECE_BYTES, nbytes)
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
            f"{opened.location.display}: {key} ends at byte {start + data.size}, where {stop} are expected",
            key=key, start=start + data.size, stop=stop,
        )  # fmt: skip
    return data
