"""Consistent reads: every reader reads a checkpoint again if it was replaced meanwhile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Final, Generic, TypeVar

from ckptcore.commit.location import Place, resolve_location
from ckptcore.commit.mark import read_mark
from ckptcore.context import Context
from ckptcore.errors import CheckpointError, CorruptCheckpointError
from ckptcore.loading.checkpoint import Checkpoint, CompositeCheckpoint, Source, naming_arrays
from ckptcore.loading.opening import Known, Opener, open_tree
from ckptcore.runtime import runtime_of

__all__ = [
    "ATTEMPTS",
    "ConsistentRead",
    "open_checkpoint",
    "replaced_too_often",
    "tree_read",
]

Found = TypeVar("Found", bound=Checkpoint | CompositeCheckpoint)
T = TypeVar("T")

ATTEMPTS: Final = 20
"""Attempts to read a checkpoint that is replaced during each of them."""


class ConsistentRead(Generic[Found]):
    """Attempts to read a checkpoint. Each opens it; the last one is not interrupted by a replacement."""

    def __init__(self, location: Place, context: Context, opener: Opener[Found]) -> None:
        """Open nothing yet."""
        self._location = location
        self._context = context
        self._opener = opener
        self._left = ATTEMPTS
        self._found: Found | None = None

    def open(self) -> Found:
        """Begin an attempt. The result is of one save.

        Raises:
            CorruptCheckpointError: also if it was replaced too often.
            What the opener does.
        """
        context = self._context
        while self._left:
            self._left -= 1
            # Opened anew each time: a storage may keep objects open by name.
            resolved = resolve_location(
                self._location, runtime_of(context).registry, durable=False, config=context.storage
            )
            mark = read_mark(resolved)
            self._found = None
            try:
                found = self._opener(resolved, mark, context)
            except CheckpointError:
                if mark.is_at(resolved):
                    raise
                continue
            # Without a root, the opener has looked at files, which a save may have committed meanwhile.
            if mark.root is not None or mark.is_part_of(resolved):
                self._found = found
                return found
        raise replaced_too_often(self._location)

    def retry_if_replaced(self, attempt: Callable[[Found], T]) -> T:
        """Open and read a checkpoint; begin again if it was replaced meanwhile, so that the result is of one save.

        Raises:
            What the opener and `attempt` do. Errors about bytes of a tree name the arrays that have them.
        """
        while True:
            found = self.open()
            try:
                with naming_arrays(found) if isinstance(found, Checkpoint) else nullcontext():
                    made = attempt(found)
            except CheckpointError:
                if self.is_current():
                    raise
                continue
            if self.is_unchanged():
                return made

    def is_current(self) -> bool:
        """Return True if the last opened checkpoint was not replaced: an error is about the checkpoint itself."""
        return self._found is None or self._found.mark.is_at(self._found.location)

    def is_unchanged(self) -> bool:
        """Return True if all data read without an error since the last `open` is of one save."""
        if self._found is None:
            return True
        mark, location = self._found.mark, self._found.location
        return mark.is_part_of(location) if mark.root is None else mark.has_stayed_at(location)


class _OpenAlready(ConsistentRead[Checkpoint]):
    """A single attempt with an open checkpoint. The caller that opened it checks for replacement."""

    def __init__(self, opened: Checkpoint) -> None:
        self._opened = opened

    def open(self) -> Checkpoint:
        return self._opened

    def is_current(self) -> bool:
        return True

    def is_unchanged(self) -> bool:
        return True


def tree_read(source: Source, context: Context, known: Known | None = None) -> ConsistentRead[Checkpoint]:
    """Return attempts to read a tree; a single one for an open checkpoint.

    Args:
        source: a place, or what is open already.
        context: options.
        known: cache of parsed roots, for callers that return no mutable part of a root.
    """
    if isinstance(source, Checkpoint):
        return _OpenAlready(source)
    opener: Opener[Checkpoint] = open_tree if known is None else functools.partial(open_tree, known=known)
    return ConsistentRead(source, context, opener)


def open_checkpoint(location: Place, context: Context) -> Checkpoint:
    """Open the tree at a location. The caller checks for replacement after reading.

    Raises:
        What `open_tree` does.
    """
    return ConsistentRead(location, context, open_tree).open()


def replaced_too_often(location: Place) -> CorruptCheckpointError:
    """The error for a checkpoint that was replaced in every one of `ATTEMPTS`."""
    return CorruptCheckpointError(
        f"{location} was replaced {ATTEMPTS} times while it was read; load it when it is saved less often"
    )
