"""The layout of files that objects wrote themselves: they lie in the checkpoint as they are, and hold no array of ours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from ckptcore.builtin.keys import check_key
from ckptcore.errors import CorruptCheckpointError, InvalidLocationError, UnsupportedLeafError
from ckptcore.model import HostArray, ReadPlan, Receipt, TreeMetadata
from ckptcore.model.tree import JSON
from ckptcore.protocols import Inspection, ReadStore, Snapshot, WriteStore

__all__ = ["FilesLayout", "empty_directories", "state_of_files"]

_EMPTY: Final = "empty_directories"

_MOST_PARTS: Final = 1 << 17
"""Directories on the ways to all empty ones: a few bytes of a hostile root make one on the disk of who loads it."""

_MOST_DEEP: Final = 200


class FilesLayout:
    """Stores no tree. The core chooses it for objects that write files of their own; nobody asks for it by name."""

    name = "files"

    def check(self, tree: TreeMetadata, size: int) -> None:
        """Refuse every leaf."""
        if tree.leaves:
            raise UnsupportedLeafError(
                "files of an object hold no arrays and no values of a tree; choose another layout"
            )

    def write(self, snapshot: Snapshot, store: WriteStore) -> JSON:
        """Nothing is left to write."""
        return None

    def finish(self, tree: TreeMetadata, receipts: Sequence[Receipt], store: WriteStore) -> JSON:
        """Nothing is left to write: what `state_of_files` gave to the one process that wrote is kept."""
        return receipts[0].state

    def read(self, plan: ReadPlan, buffers: Sequence[HostArray], store: ReadStore) -> Iterator[int]:
        """There are no boxes to read."""
        yield from ()

    def extents(self, tree: TreeMetadata, state: JSON) -> Iterator[tuple[int, str, int, int]]:
        """There are no arrays."""
        yield from ()

    def inspect(self, store: ReadStore, entry: str | None) -> Inspection | None:
        """Files without a root of ours can be anything."""
        return None


def state_of_files(empty: Sequence[str]) -> JSON:
    """The state of files among which there are these empty directories: no file tells of them.

    Raises:
        UnsupportedLeafError: if they are too many, or too deep.
    """
    if not empty:
        return None
    if (problem := _problem(empty)) is not None:
        raise UnsupportedLeafError(
            f"the object wrote empty directories, and {problem}; write fewer, or a file into each"
        )
    return {_EMPTY: list(empty)}


def empty_directories(state: JSON) -> Sequence[str]:
    """The empty directories that a state tells of. It may be hostile.

    Raises:
        CorruptCheckpointError: if it is no such state.
    """
    if state is None:
        return ()
    found = state.get(_EMPTY, []) if isinstance(state, dict) else None
    if not isinstance(found, list):
        raise CorruptCheckpointError(f"the state of the layout 'files' is {str(state)[:80]!r}; load another checkpoint")
    keys = []
    for key in found:
        if not isinstance(key, str):
            raise CorruptCheckpointError(f"an empty directory is called {str(key)[:80]!r}; load another checkpoint")
        try:
            keys.append(check_key(key))
        except InvalidLocationError as error:
            raise CorruptCheckpointError(f"an empty directory is listed that cannot be: {error}") from error
    if (problem := _problem(keys)) is not None:
        raise CorruptCheckpointError(f"empty directories are listed, and {problem}; load another checkpoint")
    return keys


def _problem(empty: Sequence[str]) -> str | None:
    depths = [key.count("/") + 1 for key in empty]
    if max(depths, default=0) > _MOST_DEEP:
        return f"one of them is {max(depths)} directories deep, where {_MOST_DEEP} are allowed"
    if sum(depths) > _MOST_PARTS:
        return f"there are {sum(depths)} directories on the ways to them, where {_MOST_PARTS} are allowed"
    return None
