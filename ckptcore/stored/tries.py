"""Tries: reading a checkpoint until it was not replaced meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from ckptcore.commits.occupants import root_bytes
from ckptcore.context import Context
from ckptcore.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    InvalidLocationError,
    ObjectNotFoundError,
)
from ckptcore.locations import resolve_location
from ckptcore.stored.opened import Opened, Source, naming_arrays
from ckptcore.stored.opening import ATTEMPTS, expect_committed, open_root, replaced_too_often, root_mark

if TYPE_CHECKING:
    from ckptcore.roots.known_roots import KnownRoots

__all__ = ["Tries", "while_unchanged"]

T = TypeVar("T")


def while_unchanged(location: Source, context: Context, attempt: Callable[[Opened], T]) -> T:
    """Open and read a checkpoint; begin again if it was replaced meanwhile, so that the result is of one save.

    One that is open already is read as it was opened: who opened it looks whether it was replaced.

    Raises:
        What `open_checkpoint` and `attempt` do, with errors about bytes naming the arrays that lie there.
    """
    tries = Tries(location, context)
    while True:
        opened = tries.open()
        if opened is None:
            continue
        try:
            with naming_arrays(opened):
                made = attempt(opened)
        except CheckpointError:
            if tries.stands():
                raise
            continue
        if tries.is_unchanged():
            return made


class Tries:
    """Tries to read a checkpoint, each of which opens it, until it was not replaced from its opening to its end.

    What is open already is opened once, as it is, and taken to stand.
    """

    def __init__(self, location: Source, context: Context, known: KnownRoots | None = None) -> None:
        """Open nothing yet; `known` is as for `ckptcore.stored.opening.open_root`."""
        self._known = known
        self._location = location
        self._context = context
        self._left = ATTEMPTS
        self._failed_at: tuple[object, object] | None = None
        self._now: tuple[Opened, bytes | None] | None = None

    def open(self) -> Opened | None:
        """Begin a try; None where it was exchanged as it was opened, so that another one is to begin.

        Raises:
            CorruptCheckpointError: also if it was replaced too often.
            What `open_checkpoint` does.
        """
        if isinstance(self._location, Opened):
            return self._location
        if not self._left:
            raise replaced_too_often(self._location)
        self._left -= 1
        # Opened anew each time: a storage may keep objects open by name.
        context = self._context
        resolved = resolve_location(self._location, context.registry, durable=False, config=context.storage)
        self._now = None
        try:
            before = root_bytes(resolved.store)
            self._now = open_root(resolved, before, context, self._known), before
        except (CorruptCheckpointError, CheckpointNotFoundError, InvalidLocationError, ObjectNotFoundError):
            # A member is not of the composite around it while that is exchanged: who finds the same twice has found it.
            now = root_mark(resolved.store), root_mark(resolved.parent)
            if now in ((None, None), self._failed_at):
                raise
            self._failed_at = now
            return None
        return self._now[0]

    def stands(self) -> bool:
        """Whether what was opened last is there still, so that an error about it is one of the checkpoint."""
        return self._now is None or _still_stands(*self._now)

    def is_unchanged(self) -> bool:
        """Whether what was opened last is there still, so that what was read is of one save."""
        return self._now is None or root_mark(self._now[0].location.store) == self._now[1]

    @property
    def root(self) -> bytes | None:
        """The bytes of the root of what was opened last; None where it has none, or was open already."""
        return None if self._now is None else self._now[1]


def _still_stands(opened: Opened, before: bytes | None) -> bool:
    """Whether a checkpoint, and the composite that it is a member of, are those that were opened."""
    if root_mark(opened.location.store) != before:
        return False
    if opened.root is not None and opened.root.member:
        try:
            expect_committed(opened.location, opened.root)
        except CheckpointError:
            return False
    return True
