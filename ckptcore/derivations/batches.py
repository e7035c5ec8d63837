"""Batches: the reads and the computations that fill boxes of derived arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from ckptcore.derivations.arrays import Stored, WholeArray
from ckptcore.io.elements import copy_elements
from ckptcore.io.memory import allocate
from ckptcore.model.arrays import ArraySpec, Box, HostArray
from ckptcore.protocols import DerivedArray

__all__ = ["Fill", "Place", "ReadAll", "StoredRead", "read_fills"]


@dataclass(frozen=True, slots=True)
class StoredRead:
    """A box of a stored array that is read.

    Attributes:
        array: the array.
        box: the box.
        buffer: the memory to fill: C-contiguous, of the box's shape.
        fill: the fill that needs it.
    """

    array: Stored
    box: Box
    buffer: HostArray
    fill: Fill


ReadAll: TypeAlias = Callable[[Sequence[StoredRead]], Iterator[int]]
"""Reads boxes; yields the number of each once it is complete."""


class Place(NamedTuple):
    """The destination of a box of a derived array.

    Attributes:
        owner: a number of the caller.
        box: the box.
        out: memory of its shape; of any strides.
    """

    owner: int
    box: Box
    out: HostArray


@dataclass(slots=True, eq=False)
class Fill:
    """Boxes of a derived array that are filled together. Inputs that several of them share are read and computed once.

    Attributes:
        owners: the owners of the boxes.
        reads: the boxes of stored arrays to read.
        waiting: the number of reads that are not complete.
        steps: the computations after the reads, in order.
        held_bytes: bytes of memory needed in addition to that of the boxes.
    """

    owners: Sequence[int]
    reads: list[StoredRead] = field(default_factory=list)
    waiting: int = 0
    steps: list[Callable[[], None]] = field(default_factory=list)
    held_bytes: int = 0
    _parts: dict[tuple[DerivedArray, Box], HostArray] = field(default_factory=dict)
    _results: dict[WholeArray, list[HostArray]] = field(default_factory=dict)

    @classmethod
    def of(cls, derivation: DerivedArray, places: Sequence[Place]) -> Fill:
        """Plan how to fill places with their boxes; read nothing.

        Memory is allocated, but not touched before it is read into.
        """
        fill = cls([place.owner for place in places])
        for _, box, out in places:
            if box.size:
                fill._place(derivation, box, out)
        fill._parts.clear()
        return fill

    @property
    def read_bytes(self) -> int:
        """Bytes that are read. Equal boxes are counted once."""
        return sum({(read.array, read.box): read.buffer.nbytes for read in self.reads}.values())

    def compute(self) -> None:
        """Run the steps, after all reads."""
        steps, self.steps = self.steps, []
        self._results.clear()
        for step in steps:
            step()

    def _place(self, derivation: DerivedArray, box: Box, out: HostArray) -> None:
        """Plan to put a box of an array into `out`."""
        if isinstance(derivation, Stored):
            if out.flags.c_contiguous:
                self.reads.append(StoredRead(derivation, box, out, self))
            else:
                # Read into memory of its own and copy: no layout reads into memory with gaps.
                self.steps.append(functools.partial(copy_elements, out, self._made(derivation, box)))
            return
        if isinstance(derivation, WholeArray):
            result = self._result(derivation)
            self.steps.append(lambda: copy_elements(out, result[0][box.slices]))
            return
        needed, views = derivation.needed(box), derivation.views(box, out)
        if views is not None:
            for part, view in zip(needed, views, strict=True):
                self._place(derivation.inputs[part.number], part.box, view)
            return
        parts = [self._made(derivation.inputs[part.number], part.box) for part in needed]
        self.steps.append(functools.partial(derivation.make, box, parts, out))

    def _result(self, derivation: WholeArray) -> list[HostArray]:
        """Return the list that will have the whole array, which is computed once."""
        if (result := self._results.get(derivation)) is None:
            result = self._results[derivation] = []
            whole = Box.whole(derivation.spec.shape)
            parts = [self._made(derivation.inputs[part.number], part.box) for part in derivation.needed(whole)]
            self.held_bytes += derivation.spec.nbytes
            self.steps.append(lambda: result.append(derivation.compute(parts)))
        return result

    def _made(self, derivation: DerivedArray, box: Box) -> HostArray:
        """Return new memory that will have a box of an array; the same memory for the same box."""
        if (out := self._parts.get((derivation, box))) is None:
            out = self._parts[derivation, box] = allocate(ArraySpec(box.shape, derivation.spec.dtype))
            self.held_bytes += out.nbytes
            self._place(derivation, box, out)
        return out


def read_fills(fills: list[Fill], read: ReadAll) -> Iterator[Fill]:
    """Read for several fills together: a box that several of them need is read once.

    Args:
        fills: the fills; the list is emptied, so that their memory is released one by one.
        read: reads boxes.

    Yields:
        Each fill once its reads are complete. The caller computes it.
    """
    same: dict[tuple[Stored, Box], list[StoredRead]] = {}
    ready = [fill for fill in fills if not fill.reads]
    for fill in fills:
        fill.waiting = len(fill.reads)
        for one in fill.reads:
            same.setdefault((one.array, one.box), []).append(one)
        fill.reads = []
    fills.clear()
    yield from ready
    wanted = list(same.values())
    del same
    for number in read([first for first, *_ in wanted]):
        first, *others = wanted[number]
        wanted[number] = []  # release memory as soon as its fill is complete
        for other in others:
            copy_elements(other.buffer, first.buffer)
        for one in (first, *others):
            one.fill.waiting -= 1
            if not one.fill.waiting:
                yield one.fill
