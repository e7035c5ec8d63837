"""Derivation: how a box of an array is made of boxes of other arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ckptcore.io.elements import copy_elements
from ckptcore.model.arrays import ArraySpec, Box, HostArray

__all__ = ["Derivation", "OfNothing", "Part", "Stored", "place", "walk"]


class Part(NamedTuple):
    """A box of an input that a box of a derived array is made of.

    Attributes:
        number: of the input.
        box: where in the input, in elements; never empty.
    """

    number: int
    box: Box


class Derivation(Protocol):
    """How an array is made of others. Immutable, and pickled where its values can be. Any thread.

    No method is called for a box without elements.
    """

    @property
    def spec(self) -> ArraySpec:
        """The array that is made."""
        ...

    @property
    def inputs(self) -> Sequence[Derivation]:
        """What it is made of."""
        ...

    def needed(self, box: Box) -> Sequence[Part]:
        """What a box of the array is made of: as little as can be."""
        ...

    def views(self, box: Box, out: HostArray) -> Sequence[HostArray] | None:
        """Where in `out` the parts go as they are, so that they are read into place; by part, of the part's shape.

        Together they are all of `out`. None where the parts are not elements of the box, or do not lie so in this memory.

        Args:
            box: what `out` is to hold.
            out: memory of the box's shape; of any strides.
        """
        ...

    def make(self, box: Box, parts: Sequence[HostArray], out: HostArray) -> None:
        """Fill `out` with a box of the array.

        Args:
            box: which one.
            parts: the elements of what `needed` said, in its order; not to be changed.
            out: memory of the box's shape and the dtype of the array; of any strides.
        """
        ...


class OfNothing:
    """What is made of no other array."""

    __slots__ = ()

    @property
    def inputs(self) -> Sequence[Derivation]:
        """None."""
        return ()

    def needed(self, box: Box) -> Sequence[Part]:
        """Nothing."""
        return ()

    def views(self, box: Box, out: HostArray) -> Sequence[HostArray] | None:
        """None: nothing is put in its place."""
        return None


@dataclass(frozen=True, slots=True)
class Stored(OfNothing):
    """An array of a checkpoint as it is stored: it is read, and not made.

    Attributes:
        spec: what is stored.
        leaf: its number in the tree of the checkpoint.
        checkpoint: which one, where arrays of several are put together: 0 is the one that is loaded.
    """

    spec: ArraySpec
    leaf: int
    checkpoint: int = 0

    def make(self, box: Box, parts: Sequence[HostArray], out: HostArray) -> None:
        """Never called: it is read."""
        raise NotImplementedError("a stored array is read, and not made")


def walk(derivation: Derivation) -> Iterator[Derivation]:
    """A derivation and all that it is made of."""
    stack = [derivation]
    while stack:
        one = stack.pop()
        yield one
        stack.extend(one.inputs)


def place(views: Sequence[HostArray], parts: Sequence[HostArray]) -> None:
    """Copy parts to where they go."""
    for view, part in zip(views, parts, strict=True):
        copy_elements(view, part)
