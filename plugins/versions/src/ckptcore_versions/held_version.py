"""The elements of the version before, against which a publisher encodes the next."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

from ckptcore.model.arrays import ArraySpec, Box, HostArray
from ckptcore.model.metadata import TreeMetadata
from ckptcore.model.tree import TreePath
from ckptcore.protocols import BaseReference, Layout
from ckptcore.step_names import StepNames


class BaseVersion(NamedTuple):
    """A committed version that a delta is relative to.

    Attributes:
        name: the name of its directory, a sibling of that of the delta.
        save_id: its save id; empty if other software wrote it.
        digest: SHA-256 of its root, in hex digits; empty if it has no root.
        number: its version number.
    """

    name: str
    save_id: str
    digest: str
    number: int

    @property
    def reference(self) -> BaseReference:
        """The version as the base that a delta states."""
        return BaseReference(self.name, self.save_id, self.digest)


class HeldVersion(Protocol):
    """The boxes of a committed version that this process holds, in host memory or mapped. Thread-safe."""

    @property
    def version(self) -> BaseVersion:
        """The version."""

    def elements(self, path: TreePath, spec: ArraySpec, box: Box) -> HostArray | None:
        """Return a view of the elements of a box; None if the version lacks the array, or not all of it is held.

        The view is valid until the layout releases the item of the snapshot that has the box: then the new elements
        replace the old.

        Args:
            path: the path of the array in the tree.
            spec: the shape and dtype of the new array. An array of another shape or dtype is another array.
            box: the elements.
        """


@runtime_checkable
class VersionLayout(Layout, Protocol):
    """A layout of versions: writes full versions, and deltas against a held version."""

    def against(self, held: HeldVersion | None) -> Layout:
        """Return this layout, writing a delta against a version; None: a full version."""

    @property
    def version_names(self) -> StepNames | None:
        """The names of directories that readers of the format expect; None, the default, if they accept any."""
        return None

    def numbered(self, number: int) -> VersionLayout:
        """Return this layout for a version with a number; by default the same layout, for formats without numbers."""
        return self

    def accepts_base(self, base: int, number: int) -> bool:
        """Return True if a version can be relative to another, by their numbers; by default to any older one."""
        return True

    def accepts_arrays(self, base: TreeMetadata, tree: TreeMetadata) -> bool:
        """Return True if a version with a tree can be relative to one with the tree `base`; by default always."""
        return True
