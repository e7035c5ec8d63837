"""Differences between two checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, overload

from ckptcore.distributions import ShownInNotebooks
from ckptcore.model import JSON, TreePath
from ckptcore_tools.elements import Distance

__all__ = ["Difference", "DifferenceKind", "Differences"]

DifferenceKind: TypeAlias = Literal[
    "only_in_a", "only_in_b", "structure", "kind", "dtype", "shape", "values", "size", "bytes"
]


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference between two checkpoints.

    Attributes:
        path, keys: the path as text and as keys.
        kind: what differs. "size" and "bytes" are differences of files.
        a, b: the content of each side.
        checkpointable: directory of the checkpointable; empty if the checkpoint is one tree.
        elements: number of elements of the array, or bytes of the file; 0 if no elements were compared.
        distance: how the elements differ; None if no elements were compared.
    """

    path: str
    keys: TreePath
    kind: DifferenceKind
    a: JSON = None
    b: JSON = None
    checkpointable: str = ""
    elements: int = 0
    distance: Distance | None = None


@dataclass(frozen=True, slots=True)
class Differences(ShownInNotebooks, Sequence[Difference]):
    """All differences between two checkpoints: a sequence that is empty, and so false, if the checkpoints are the same.

    Attributes:
        a, b: the locations.
        found: the differences.
        leaves, files: number of leaves and of files that both checkpoints have.
        nbytes: bytes of `a` that were compared.
    """

    a: str
    b: str
    found: Sequence[Difference]
    leaves: int
    files: int
    nbytes: int

    @overload
    def __getitem__(self, index: int) -> Difference: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Difference]: ...

    def __getitem__(self, index: int | slice) -> Difference | Sequence[Difference]:
        """Return a difference, or a tuple of differences for a slice."""
        return self.found[index]

    def __len__(self) -> int:
        """Return the number of differences."""
        return len(self.found)
