"""Reading some boxes of a checkpoint's arrays through the public API, so that memory stays bounded.

An abstract tree may hold leaves and containers of one's own types: here a `_Window`, which asks for one box of an array
where a framework's leaf would ask for its shards, in `_Windows`, which has the very structure that was saved.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ckptcore.model import ArrayRecord, ArraySpec, Box, HostArray, LeafRecord, Node, Shard, Skeleton, TreeMetadata
from ckptcore.protocols import Flattened, HostMemory, Priority
from ckptcore_tools.cli.options import command_context

if TYPE_CHECKING:
    from ckptcore.model import Pending

__all__ = ["BoxReader", "boxes_within"]


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
        self._context = replace(command_context(), handlers={_Window: _WindowHandler(), _Windows: _WindowsHandler()})

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


class _WindowsHandler:
    """Takes `_Windows` apart as what was saved was, and puts them together as a list."""

    priority = Priority.EXACT

    def flatten(self, value: Any) -> Flattened:
        return Flattened(value.node.kind, value.node.keys, value.children, value.node.type)

    def unflatten(self, like: Any, children: Sequence[object]) -> object:
        return list(children)


class _WindowHandler:
    """Asks for the one box of a `_Window`. A `_Window` is only ever abstract: it has no elements to save."""

    priority = Priority.EXACT

    def describe(self, leaf: Any) -> LeafRecord:
        record: LeafRecord = leaf.record
        return record

    def abstract(self, leaf: Any) -> object:
        return leaf

    def identity(self, leaf: Any) -> Hashable | None:
        return None

    def shards(self, leaf: Any, rank: int, size: int) -> Sequence[Shard]:
        return ()

    def copy_to_host(self, leaf: Any, boxes: Sequence[Box], memory: HostMemory) -> Sequence[Pending[HostArray]]:
        return ()

    def view_on_host(self, leaf: Any, boxes: Sequence[Box]) -> Sequence[Pending[HostArray]]:
        return ()

    def wanted(self, abstract: Any, stored: ArrayRecord) -> Sequence[Box]:
        return (abstract.box,)

    def destination(self, abstract: Any, stored: ArrayRecord, box: Box) -> HostArray | None:
        return None

    def build(self, abstract: Any, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]) -> object:
        ((_, elements),) = boxes
        return _Loaded(abstract.number, elements)

    def fill(self, target: Any, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]) -> bool:
        return False

    def memory_to_fill(self, target: Any) -> None:
        return None
