"""Consistent reads: every reader reads a checkpoint again if it was replaced meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Final, Generic, TypeVar

from ckptcore.commit.location import Location, Place, resolve_location
from ckptcore.commit.mark import Mark, read_mark
from ckptcore.context import Context
from ckptcore.errors import CheckpointError, CorruptCheckpointError
from ckptcore.loading.opened import Opened, OpenedComposite, Source, naming_arrays
from ckptcore.loading.opening import Known, Opener, open_tree
from ckptcore.runtime import runtime_of

__all__ = [
    "ATTEMPTS",
    "Tries",
    "open_checkpoint",
    "replaced_too_often",
    "tries_of",
    "while_tree_unchanged",
    "while_unchanged",
]

Found = TypeVar("Found", bound=Opened | OpenedComposite)
T = TypeVar("T")

ATTEMPTS: Final = 20
"""Attempts to read a checkpoint that is replaced during each of them."""


class Tries(Generic[Found]):
    """Attempts to read a checkpoint. Each opens it; the last one is not interrupted by a replacement."""

    def __init__(self, location: Place, context: Context, opener: Opener[Found]) -> None:
        """Open nothing yet."""
        self._location = location
        self._context = context
        self._opener = opener
        self._left = ATTEMPTS
        self._found: Found | None = None

    def open(self) -> Found:
        """Begin a try. What was opened is of one save.

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

    def stands(self) -> bool:
        """Return True if the last opened checkpoint was not replaced: an error is about the checkpoint itself."""
        return self._found is None or self._found.mark.is_at(self._found.location)

    def is_unchanged(self) -> bool:
        """Return True if all data read without an error since the last `open` is of one save."""
        if self._found is None:
            return True
        mark, location = self._found.mark, self._found.location
        return mark.is_part_of(location) if mark.root is None else mark.has_stayed_at(location)


class _Standing(Tries[Opened]):
    """A single attempt with an open checkpoint. The caller that opened it checks for replacement."""

    def __init__(self, opened: Opened) -> None:
        self._opened = opened

    def open(self) -> Opened:
        return self._opened

    def stands(self) -> bool:
        return True

    def is_unchanged(self) -> bool:
        return True


def tries_of(source: Source, context: Context, known: Known | None = None) -> Tries[Opened]:
    """Return attempts to read a tree; a single one for an open checkpoint.

    Args:
        source: a place, or what is open already.
        context: options.
        known: cache of parsed roots, for callers that return no mutable part of a root.
    """
    if isinstance(source, Opened):
        return _Standing(source)

    def opener(location: Location, mark: Mark, context: Context) -> Opened:
        return open_tree(location, mark, context, known)

    return Tries(source, context, opener)


def while_unchanged(location: Place, context: Context, attempt: Callable[[Found], T], opener: Opener[Found]) -> T:
    """Open and read a checkpoint; begin again if it was replaced meanwhile, so that the result is of one save.

    Raises:
        What `opener` and `attempt` do, with errors about bytes naming the arrays that have them.
    """
    return _while_unchanged(Tries(location, context, opener), attempt)


def while_tree_unchanged(source: Source, context: Context, attempt: Callable[[Opened], T]) -> T:
    """Open and read a tree as `while_unchanged` does. What is open already is read as it was opened.

    Raises:
        What `open_tree` and `attempt` do, with errors about bytes naming the arrays that have them.
    """
    return _while_unchanged(tries_of(source, context), attempt)


def _while_unchanged(tries: Tries[Found], attempt: Callable[[Found], T]) -> T:
    while True:
        found = tries.open()
        try:
            with naming_arrays(found) if isinstance(found, Opened) else nullcontext():
                made = attempt(found)
        except CheckpointError:
            if tries.stands():
                raise
            continue
        if tries.is_unchanged():
            return made


def open_checkpoint(location: Place, context: Context) -> Opened:
    """Open the tree at a location. The caller checks for replacement after reading.

    Raises:
        What `open_tree` does.
    """
    return Tries(location, context, open_tree).open()


def replaced_too_often(location: Place) -> CorruptCheckpointError:
    """The error for a checkpoint that was replaced in every one of `ATTEMPTS`."""
    return CorruptCheckpointError(
        f"{location} was replaced {ATTEMPTS} times while it was read; load it when it is saved less often"
    )
