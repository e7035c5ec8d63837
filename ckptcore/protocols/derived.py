"""The protocol of derived arrays, which are computed from stored arrays during a read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ckptcore.model.arrays import ArraySpec, Box, HostArray
from ckptcore.records import NamedTuple


class Part(NamedTuple):
    """A box of an input that is needed to compute a box of a derived array.

    Attributes:
        number: the position of the input in `DerivedArray.inputs`.
        box: the box of the input, in elements; never empty.
    """

    number: int
    box: Box


class DerivedArray(Protocol):
    """An array that is computed from other arrays. Immutable, hashable, thread-safe; picklable if its attributes are.

    No method is called for a box without elements.
    """

    @property
    def spec(self) -> ArraySpec:
        """Shape and dtype of the array."""

    @property
    def inputs(self) -> Sequence[DerivedArray]:
        """The arrays from which it is computed."""

    def needed(self, box: Box) -> Sequence[Part]:
        """Return the boxes of inputs that are needed to compute a box of the array, with few elements."""

    def views(self, box: Box, out: HostArray) -> Sequence[HostArray | None] | None:
        """Return the views of `out` into which the parts are copied unchanged, so that they are read in place.

        There is one view for each part of `needed`, with the shape of the part. Together the views cover `out`. None if
        the elements are computed, or if this memory has no such views.

        None in place of a view: the part is read into other memory, and `make` then changes `out` in place. Its `parts`
        include the views.

        Args:
            box: the box of the array that `out` is for.
            out: memory of the box's shape; of any strides.
        """

    def make(self, box: Box, parts: Sequence[HostArray], out: HostArray) -> None:
        """Fill `out` with a box of the array.

        Args:
            box: the box.
            parts: the elements of the parts of `needed`, in its order; read-only.
            out: memory of the box's shape and the dtype of the array; of any strides.

        Raises:
            ValueError: an element cannot be computed; the load names the array.
        """
