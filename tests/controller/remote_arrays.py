"""Arrays whose elements are in worker processes, as leaves for tests of a single controller."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from ckptcore.model.arrays import ArraySpec, Box, HostArray
from ckptcore.model.metadata import ArrayRecord, LeafRecord
from ckptcore.model.transfer import Pending
from ckptcore.planning import cuts_of
from ckptcore.protocols import HostMemory, LeafHandler, Priority


@dataclass(frozen=True, slots=True)
class RemoteArray:
    """An array that worker processes hold. An abstract one requests boxes for each worker.

    Attributes:
        spec: the spec of the whole array.
        boxes: for each worker, the boxes that it holds.
        number: the number by which the workers identify the array, or None for an abstract array.
    """

    spec: ArraySpec
    boxes: tuple[tuple[Box, ...], ...]
    number: int | None = None


class RemoteArrayHandler(LeafHandler):
    """The handler of `RemoteArray`. It fails a test that requests elements from the controller."""

    @property
    def priority(self) -> int:
        """Return the priority of handlers of a single type."""
        return Priority.EXACT

    def describe(self, leaf: RemoteArray) -> LeafRecord:
        """Return the shape and dtype, with cuts at the borders of all boxes."""
        return ArrayRecord(leaf.spec, cuts=cuts_of(leaf.spec.shape, [box for boxes in leaf.boxes for box in boxes]))

    def abstract(self, leaf: RemoteArray) -> RemoteArray:
        """Return an abstract array with the same boxes."""
        return leaf if leaf.number is None else RemoteArray(leaf.spec, leaf.boxes)

    def identity(self, leaf: RemoteArray) -> Hashable | None:
        """Return the number of the array."""
        return leaf.number

    def shards(self, leaf: RemoteArray, rank: int, size: int) -> NoReturn:
        """Fail, because only workers have elements."""
        self._refuse()

    def copy_to_host(self, leaf: RemoteArray, boxes: Sequence[Box], memory: HostMemory) -> Sequence[Pending[HostArray]]:
        """Fail, because only workers have elements."""
        self._refuse()

    def view_on_host(self, leaf: RemoteArray, boxes: Sequence[Box]) -> Sequence[Pending[HostArray]]:
        """Fail, because only workers have elements."""
        self._refuse()

    def wanted(self, abstract: RemoteArray, stored: ArrayRecord) -> Sequence[Box]:
        """Fail, because only workers have elements."""
        self._refuse()

    def destination(self, abstract: RemoteArray, stored: ArrayRecord, box: Box) -> HostArray | None:
        """Fail, because only workers have elements."""
        self._refuse()

    def build(self, abstract: RemoteArray, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]) -> object:
        """Fail, because only workers have elements."""
        self._refuse()

    def fill(self, target: Any, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]) -> bool:
        """Fail, because only workers have elements."""
        self._refuse()

    def memory_to_fill(self, target: Any) -> None:
        """Return None: workers create the array."""

    def _refuse(self) -> NoReturn:
        raise AssertionError("the controller was asked for elements that its workers hold")
