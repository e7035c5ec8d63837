"""Two checkpoints compared: structure, dtypes, shapes and elements, with a bounded amount of both in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ckptcore.model import JSON, ArrayRecord, Box, LeafRecord, Node, Skeleton, TreeMetadata, TreePath, format_path
from ckptcore_tools.cli.console import json_number
from ckptcore_tools.cli.documents import DifferenceDocument
from ckptcore_tools.cli.elements import SAME, Distance, Tolerance, distance
from ckptcore_tools.cli.keys import key_documents
from ckptcore_tools.cli.windows import BoxReader, boxes_within

__all__ = ["Comparison", "Side"]

_BATCH_BYTES = 64 << 20
"""The most that is read of each side at a time, in bytes as it is stored."""

DifferenceKind = Literal["only_in_a", "only_in_b", "structure", "kind", "dtype", "shape", "values"]


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

    def of_trees(self, *, with_dtypes: bool) -> Iterator[DifferenceDocument]:
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

    def of_contents(self, progress: Callable[[int, int], None]) -> Iterator[DifferenceDocument]:
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
            difference = (
                _difference(pair.path, "values", None, None)
                if spec_a.dtype == spec_b.dtype
                else _difference(pair.path, "dtype", spec_a.dtype, spec_b.dtype)
            )
            difference["differing"] = apart.differing
            difference["elements"] = spec_a.size
            difference["max_absolute_error"] = None if apart.largest is None else json_number(apart.largest)
            yield difference

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


def _record_differences(
    path: TreePath, a: LeafRecord, b: LeafRecord, *, with_dtypes: bool
) -> Iterator[DifferenceDocument]:
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
            difference["max_absolute_error"] = json_number(abs(a.value - b.value))  # type: ignore[operator]  # numbers
        yield difference


def _difference(path: TreePath, kind: DifferenceKind, a: JSON, b: JSON) -> DifferenceDocument:
    return {"path": format_path(path), "keys": key_documents(path), "kind": kind, "a": a, "b": b}


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
