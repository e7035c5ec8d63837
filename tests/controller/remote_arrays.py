"""Arrays whose elements are in worker processes: leaves for tests of what a single controller does."""

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
    """An array that worker processes hold; also what a load asks for, where it says who is to hold what.

    Attributes:
        spec: the whole array.
        boxes: by worker, what it holds.
        number: under which the workers hold it; None for an abstract array.
    """

    spec: ArraySpec
    boxes: tuple[tuple[Box, ...], ...]
    number: int | None = None


class RemoteArrayHandler(LeafHandler):
    """Describes a `RemoteArray`, and fails a test in which anything asks the controller for its elements."""

    @property
    def priority(self) -> int:
        """Has a type of its own."""
        return Priority.EXACT

    def describe(self, leaf: RemoteArray) -> LeafRecord:
        """Its shape and dtype, cut where any worker's box ends."""
        return ArrayRecord(leaf.spec, cuts=cuts_of(leaf.spec.shape, [box for boxes in leaf.boxes for box in boxes]))

    def abstract(self, leaf: RemoteArray) -> RemoteArray:
        """The same boxes, of no array that is there."""
        return leaf if leaf.number is None else RemoteArray(leaf.spec, leaf.boxes)

    def identity(self, leaf: RemoteArray) -> Hashable | None:
        """Its number."""
        return leaf.number

    def shards(self, leaf: RemoteArray, rank: int, size: int) -> NoReturn:
        """Not here."""
        self._refuse()

    def copy_to_host(self, leaf: RemoteArray, boxes: Sequence[Box], memory: HostMemory) -> Sequence[Pending[HostArray]]:
        """Not here."""
        self._refuse()

    def view_on_host(self, leaf: RemoteArray, boxes: Sequence[Box]) -> Sequence[Pending[HostArray]]:
        """Not here."""
        self._refuse()

    def wanted(self, abstract: RemoteArray, stored: ArrayRecord) -> Sequence[Box]:
        """Not here."""
        self._refuse()

    def destination(self, abstract: RemoteArray, stored: ArrayRecord, box: Box) -> HostArray | None:
        """Not here."""
        self._refuse()

    def build(self, abstract: RemoteArray, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]) -> object:
        """Not here."""
        self._refuse()

    def fill(self, target: Any, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]) -> bool:
        """Not here."""
        self._refuse()

    def memory_to_fill(self, target: Any) -> None:
        """Return None: workers create the array."""

    def _refuse(self) -> NoReturn:
        raise AssertionError("the controller was asked for elements that its workers hold")
