"""Transforms of stored trees, and derived arrays, which are computed from stored ones while they are read."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from ckptcore.model.arrays import ArraySpec, Box, HostArray
from ckptcore.model.metadata import TreeMetadata
from ckptcore.model.tree import JSON
from ckptcore.protocols.values import LeafHandler


class Part(NamedTuple):
    """A box of an input from which a box of a derived array is computed.

    Attributes:
        number: the number of the input.
        box: the box of the input, in elements; never empty.
    """

    number: int
    box: Box


class DerivedArray(Protocol):
    """An array that is computed from other arrays. Immutable, hashable, picklable if its attributes are. Thread-safe.

    No method is called for a box without elements.
    """

    @property
    def spec(self) -> ArraySpec:
        """Shape and dtype of the array."""

    @property
    def inputs(self) -> Sequence[DerivedArray]:
        """The arrays from which it is computed."""

    def needed(self, box: Box) -> Sequence[Part]:
        """Return the boxes of inputs from which a box of the array is computed: as few elements as possible."""

    def views(self, box: Box, out: HostArray) -> Sequence[HostArray] | None:
        """Return the views of `out` into which the parts are copied unchanged, so that they are read in place.

        One view for each part of `needed`, of its shape; together they cover `out`. None if the elements are computed,
        or if there are no such views of this memory.

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


class TransformSource(Protocol):
    """Resources for a transform besides the tree that it changes."""

    def open(self, location: str | os.PathLike[str]) -> DerivedTree:
        """Open another checkpoint. Its arrays can be combined with those of the tree.

        Raises:
            CheckpointError: it cannot be opened.
        """

    def read_json(self, name: str) -> Mapping[str, JSON] | None:
        """Read a JSON file of other software next to the arrays, such as ``config.json``; None if it does not exist.

        Raises:
            CorruptCheckpointError: the file is not a JSON object.
        """

    def leaf_handler(self, value: object) -> LeafHandler | None:
        """Return the handler of a leaf; None if no installed plugin handles its type."""


class DerivedTree(NamedTuple):
    """A tree, and how each of its arrays is derived from stored ones.

    Attributes:
        tree: paths and records; shape and dtype of each array are those of its derived array.
        arrays: by leaf number, the derived array. Has no aliases.
        values: by leaf number, the leaf number of each value in the loaded checkpoint.
        source: further checkpoints, files and handlers.
    """

    tree: TreeMetadata
    arrays: Mapping[int, DerivedArray]
    values: Mapping[int, int]
    source: TransformSource

    def finish(self) -> DerivedTree:
        """Return this tree, which is complete."""
        return self


class TransformedTree(Protocol):
    """A tree between transforms: `DerivedTree`, or a mutable object that transforms of one package share."""

    @property
    def source(self) -> TransformSource:
        """Further checkpoints, files and handlers."""

    def finish(self) -> DerivedTree:
        """Return the tree as it is now.

        Raises:
            TransformError: it is not a tree, because there are leaves below a leaf.
        """


class Transform(Protocol):
    """A change of a stored tree while it is loaded. Immutable; reads no elements."""

    __slots__ = ()

    def apply(self, tree: TransformedTree) -> TransformedTree:
        """Return the changed tree: a new one, or the given one if that can be changed in place.

        Raises:
            TransformError, ValueError: the tree lacks the leaves to change, or they do not fit.
        """

    def describe(self) -> str:
        """Describe the transform in one line. Equal on every process of a job."""


Transforms: TypeAlias = Sequence[Transform]
"""Transforms in the order in which a load applies them."""
