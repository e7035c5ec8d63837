"""Stored arrays, of which all derived arrays are made, and arrays that are computed only as a whole."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckptcore.io.elements import copy_elements
from ckptcore.model.arrays import ArraySpec, Box, HostArray
from ckptcore.protocols import DerivedArray, Part

__all__ = ["OfNothing", "Stored", "WholeArray", "place", "walk"]


class OfNothing:
    """A derived array without inputs."""

    __slots__ = ()

    @property
    def inputs(self) -> Sequence[DerivedArray]:
        """None."""
        return ()

    def needed(self, box: Box) -> Sequence[Part]:
        """Nothing."""
        return ()

    def views(self, box: Box, out: HostArray) -> Sequence[HostArray] | None:
        """None: no input is copied."""
        return None


@dataclass(frozen=True, slots=True)
class Stored(OfNothing):
    """An array of a checkpoint as it is stored. It is read, and not computed.

    Attributes:
        spec: shape and dtype as stored.
        leaf: its number in the tree of the checkpoint.
        checkpoint: 0 for the checkpoint that is loaded; 1 and up for further ones.
    """

    spec: ArraySpec
    leaf: int
    checkpoint: int = 0

    def make(self, box: Box, parts: Sequence[HostArray], out: HostArray) -> None:
        """Never called: it is read."""
        raise NotImplementedError("a stored array is read, and not made")


class WholeArray(ABC):
    """A derived array whose elements are all computed at once, from whole inputs: once for all boxes that are read.

    Attributes:
        inputs: the arrays that it is made of.
        spec: shape and dtype of the array.
    """

    __slots__ = ()

    inputs: tuple[DerivedArray, ...]
    spec: ArraySpec

    @abstractmethod
    def compute(self, parts: Sequence[HostArray]) -> HostArray:
        """Return the whole array.

        Args:
            parts: the inputs that have elements.
        """

    def needed(self, box: Box) -> Sequence[Part]:
        """Every input, whole."""
        wholes = [(number, Box.whole(one.spec.shape)) for number, one in enumerate(self.inputs)]
        return [Part(number, whole) for number, whole in wholes if whole.size]

    def views(self, box: Box, out: HostArray) -> Sequence[HostArray] | None:
        """None: the elements are computed."""
        return None

    def make(self, box: Box, parts: Sequence[HostArray], out: HostArray) -> None:
        """Compute the array and copy a box of it."""
        copy_elements(out, self.compute(parts)[box.slices])


def walk(array: DerivedArray) -> Iterator[DerivedArray]:
    """Yield a derived array and all that it is made of."""
    stack = [array]
    while stack:
        one = stack.pop()
        yield one
        stack.extend(one.inputs)


def place(views: Sequence[HostArray], parts: Sequence[HostArray]) -> None:
    """Copy parts to views."""
    for view, part in zip(views, parts, strict=True):
        copy_elements(view, part)
