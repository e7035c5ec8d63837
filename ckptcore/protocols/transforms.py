"""Transforms of stored trees, and derived arrays: arrays that are computed from stored ones while they are read."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from ckptcore.model.arrays import ArraySpec, Box, HostArray
from ckptcore.model.metadata import TreeMetadata
from ckptcore.model.tree import JSON
from ckptcore.protocols.values import LeafHandler

__all__ = ["DerivedArray", "DerivedTree", "Part", "Transform", "TransformSource", "TransformedTree", "Transforms"]


class Part(NamedTuple):
    """A box of an input that a box of a derived array is made of.

    Attributes:
        number: of the input.
        box: the box of the input, in elements; never empty.
    """

    number: int
    box: Box


class DerivedArray(Protocol):
    """An array that is made of other arrays. Immutable, hashable, pickled if its values can be. Any thread.

    No method is called for a box without elements.
    """

    @property
    def spec(self) -> ArraySpec:
        """Shape and dtype of the array."""
        ...

    @property
    def inputs(self) -> Sequence[DerivedArray]:
        """The arrays that it is made of."""
        ...

    def needed(self, box: Box) -> Sequence[Part]:
        """Return the boxes of inputs that a box of the array is made of: as few elements as possible."""
        ...

    def views(self, box: Box, out: HostArray) -> Sequence[HostArray] | None:
        """Return the views of `out` that the parts are copied to unchanged, so that they are read into place.

        One view for each part of `needed`, of its shape; together they cover `out`. None if the elements are
        computed, or are in no such views of this memory.

        Args:
            box: the box of the array that `out` is for.
            out: memory of the box's shape; of any strides.
        """
        ...

    def make(self, box: Box, parts: Sequence[HostArray], out: HostArray) -> None:
        """Fill `out` with a box of the array.

        Args:
            box: the box.
            parts: the elements of the parts of `needed`, in its order; read-only.
            out: memory of the box's shape and the dtype of the array; of any strides.

        Raises:
            ValueError: if an element cannot be computed; the load names the array.
        """
        ...


class TransformSource(Protocol):
    """What a transform may use besides the tree that it changes."""

    def open(self, location: str | os.PathLike[str]) -> DerivedTree:
        """Open another checkpoint. Its arrays can be combined with those of the tree.

        Raises:
            CheckpointError: if it cannot be opened.
        """
        ...

    def read_json(self, name: str) -> Mapping[str, JSON] | None:
        """Read a JSON file that other software wrote beside the arrays, such as ``config.json``; None if there is none.

        Raises:
            CorruptCheckpointError: if the file is not a JSON object.
        """
        ...

    def leaf_handler(self, value: object) -> LeafHandler | None:
        """Return the handler of a leaf; None if no installed plugin handles its type."""
        ...


class DerivedTree(NamedTuple):
    """A tree, and how each of its arrays is derived from stored ones.

    Attributes:
        tree: paths and records; shape and dtype of each array are those of its derived array.
        arrays: by leaf number, the derived array; of arrays that are no alias.
        values: by leaf number of each value that is stored in the checkpoint being loaded, its number there.
        source: further checkpoints, files and handlers.
    """

    tree: TreeMetadata
    arrays: Mapping[int, DerivedArray]
    values: Mapping[int, int]
    source: TransformSource

    def finish(self) -> DerivedTree:
        """Return itself: a tree that no transform is changing."""
        return self


class TransformedTree(Protocol):
    """A tree between transforms: `DerivedTree`, or a mutable object that transforms of one package share."""

    @property
    def source(self) -> TransformSource:
        """Further checkpoints, files and handlers."""
        ...

    def finish(self) -> DerivedTree:
        """Return the tree as it is now.

        Raises:
            TransformError: if it is no tree, because a leaf has others below it.
        """
        ...


class Transform(Protocol):
    """A change of a stored tree while it is loaded. Immutable; reads no elements."""

    __slots__ = ()

    def apply(self, tree: TransformedTree) -> TransformedTree:
        """Return the changed tree: a new one, or the given one if that can be changed in place.

        Raises:
            TransformError, ValueError: if the tree lacks what is changed, or it does not fit.
        """
        ...

    def describe(self) -> str:
        """Return what it does, in one line. Equal on every process of a job."""
        ...


Transforms: TypeAlias = Sequence[Transform]
"""Transforms in the order in which a load applies them."""
