"""Batches: what is read of checkpoints, and then computed, to fill boxes of derived arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from ckptcore.derivations.derivation import Stored, WholeArray
from ckptcore.io.elements import copy_elements
from ckptcore.io.memory import allocate
from ckptcore.model.arrays import ArraySpec, Box, HostArray
from ckptcore.protocols import DerivedArray

__all__ = ["Batch", "Fill", "Place", "ReadAll", "StoredRead"]


@dataclass(frozen=True, slots=True)
class StoredRead:
    """A box of a stored array that is read.

    Attributes:
        array: which one.
        box: where in it.
        buffer: the memory to fill: C-contiguous, of the box's shape.
        fill: what waits for it.
    """

    array: Stored
    box: Box
    buffer: HostArray
    fill: Fill


ReadAll: TypeAlias = Callable[[Sequence[StoredRead]], Iterator[int]]
"""Reads boxes; gives the number of each as it is there."""


class Place(NamedTuple):
    """Where a box of a derived array goes.

    Attributes:
        owner: what it is for; its caller's own.
        box: which box.
        out: memory of its shape; of any strides.
    """

    owner: int
    box: Box
    out: HostArray


@dataclass(slots=True, eq=False)
class Fill:
    """Boxes of a derived array that are filled together: what several of them are made of is read and made once.

    Attributes:
        owners: of the boxes.
        reads: what is read for them.
        waiting: how many of these are still to come.
        steps: what is computed then, in this order.
        held_bytes: bytes of the memory that is needed beside their own.
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
        """Say what is to be done to fill places with their boxes; read nothing.

        Memory is reserved, and not used before it is read into.
        """
        fill = cls([place.owner for place in places])
        for _, box, out in places:
            if box.size:
                fill._place(derivation, box, out)
        fill._parts.clear()
        return fill

    @property
    def read_bytes(self) -> int:
        """Bytes of what is read; a box that several parts are is read once."""
        return sum({(read.array, read.box): read.buffer.nbytes for read in self.reads}.values())

    def compute(self) -> None:
        """Take the steps, when all is read."""
        steps, self.steps = self.steps, []
        self._results.clear()
        for step in steps:
            step()

    def _place(self, derivation: DerivedArray, box: Box, out: HostArray) -> None:
        """Let a box of an array be put into `out`."""
        if isinstance(derivation, Stored):
            if out.flags.c_contiguous:
                self.reads.append(StoredRead(derivation, box, out, self))
            else:
                # NumPy copies as it is read: no layout reads into memory with gaps.
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
        """What will hold all that a function gives, which is called once."""
        if (result := self._results.get(derivation)) is None:
            result = self._results[derivation] = []
            whole = Box.whole(derivation.spec.shape)
            parts = [self._made(derivation.inputs[part.number], part.box) for part in derivation.needed(whole)]
            self.held_bytes += derivation.spec.nbytes
            self.steps.append(lambda: result.append(derivation.compute(parts)))
        return result

    def _made(self, derivation: DerivedArray, box: Box) -> HostArray:
        """Memory of its own that will hold a box of an array; of what holds it already, the same."""
        if (out := self._parts.get((derivation, box))) is None:
            out = self._parts[derivation, box] = allocate(ArraySpec(box.shape, derivation.spec.dtype))
            self.held_bytes += out.nbytes
            self._place(derivation, box, out)
        return out


class Batch:
    """Fills that are read for together: of what several want the same box, it is read once. One thread."""

    def __init__(self) -> None:
        """Begin with none."""
        self._fills: list[Fill] = []
        self.held_bytes = 0
        """Memory that they need beside their own, in bytes."""

    def __len__(self) -> int:
        """How many there are."""
        return len(self._fills)

    def add(self, fill: Fill) -> None:
        """Take one more."""
        self._fills.append(fill)
        self.held_bytes += fill.held_bytes

    def run(self, read: ReadAll) -> Iterator[Fill]:
        """Read; gives each fill for which all is there, to be computed, and forgets it.

        Args:
            read: reads boxes.
        """
        fills, self._fills, self.held_bytes = self._fills, [], 0
        same: dict[tuple[Stored, Box], list[StoredRead]] = {}
        ready = [fill for fill in fills if not fill.reads]
        for fill in fills:
            fill.waiting = len(fill.reads)
            for one in fill.reads:
                same.setdefault((one.array, one.box), []).append(one)
            fill.reads = []
        del fills
        yield from ready
        wanted = list(same.values())
        del same
        for number in read([first for first, *_ in wanted]):
            first, *others = wanted[number]
            wanted[number] = []  # memory is given up as what it is for is complete
            for other in others:
                copy_elements(other.buffer, first.buffer)
            for one in (first, *others):
                one.fill.waiting -= 1
                if not one.fill.waiting:
                    yield one.fill
