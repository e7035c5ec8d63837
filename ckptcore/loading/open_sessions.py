"""Sessions: a checkpoint that stays open, and is noticed to have been replaced."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final, NoReturn, TypeVar

from ckptcore.commit.location import Place
from ckptcore.context import Context
from ckptcore.errors import CheckpointError, CheckpointNotFoundError
from ckptcore.io.held_objects import HeldObject
from ckptcore.loading.checkpoint import Checkpoint, naming_arrays
from ckptcore.loading.consistent_read import tree_read
from ckptcore.loading.reading import unread
from ckptcore.model.arrays import Box, HostArray
from ckptcore.planning import plan_read
from ckptcore.runtime import runtime_of

__all__ = ["Session"]

T = TypeVar("T")

_MOST_HELD: Final = 150
"""Objects that are held open: each takes a file descriptor, and another one where it is mapped; many systems give a process 1024."""


class Session:
    """A checkpoint that was opened, for who reads parts of it now and then. Any thread.

    All that is read is of the save that was opened: objects that are held open are those of it, and after any other read its root is
    looked at again.

    Attributes:
        is_closed: whether nothing can be read any more.
    """

    def __init__(self, location: Place, context: Context) -> None:
        """Open it; reads its root and no array.

        Raises:
            What `ckptcore.loading.opening.open_tree` does.
        """
        self.context = context
        self.is_closed = False
        self._now: Checkpoint | None = tree_read(location, context, runtime_of(context).known_roots).open()
        self._held: dict[str, HeldObject | None] = {}
        self._lock = threading.Lock()

    @property
    def opened(self) -> Checkpoint:
        """The checkpoint.

        Raises:
            ValueError: if it was closed.
        """
        now = self._now
        if now is None:
            raise ValueError("the checkpoint is closed; open it again, or read before the end of its with block")
        return now

    def close(self) -> None:
        """Let go of it, and of its objects once nobody reads them."""
        with self._lock:
            self._now = None
            self.is_closed = True
            self._held.clear()

    def attempt(self, read: Callable[[Checkpoint], T]) -> T:
        """Do something that reads only what is held open, or nothing.

        Raises:
            CheckpointNotFoundError: if the checkpoint was replaced or deleted, where `read` raises something for it.
            What `read` does, with errors about bytes naming the arrays that lie there.
        """
        try:
            return read(self.opened)
        except CheckpointError as error:
            self.explain(error)

    def explain(self, error: CheckpointError) -> NoReturn:
        """Raise what an error of a read becomes.

        Raises:
            CheckpointNotFoundError: if the checkpoint was replaced or deleted.
            CheckpointError: else the error, naming the arrays that lie where bytes are wrong.
            ValueError: if the checkpoint was closed.
        """
        opened = self.opened
        if not opened.mark.is_at(opened.location):
            raise _replaced(opened) from error
        with naming_arrays(opened):
            raise error

    def guard(self, read: Callable[[Checkpoint], T]) -> T:
        """Do something that reads.

        Raises:
            CheckpointNotFoundError: if the checkpoint was replaced or deleted, whatever `read` raises or gives then.
            What `read` does, with errors about bytes naming the arrays that lie there.
        """
        opened = self.opened
        made = self.attempt(read)
        if not opened.mark.has_stayed_at(opened.location):
            raise _replaced(opened)
        return made

    def expect_there(self) -> None:
        """Check after reading that the checkpoint was not replaced.

        Raises:
            CheckpointNotFoundError: if it was replaced or deleted.
        """
        opened = self.opened
        if not opened.mark.is_part_of(opened.location):
            raise _replaced(opened)

    def hold(self, key: str) -> HeldObject | None:
        """An object of the checkpoint, open; None where its storage does not hold objects open, or so many are that no more should be.

        Raises:
            CheckpointNotFoundError, CorruptCheckpointError: as `guard` does.
        """
        with self._lock:
            if key in self._held:
                return self._held[key]
            if len(self._held) >= _MOST_HELD:
                return None
        held = self.guard(lambda opened: opened.store.hold(key))
        with self._lock:
            return self._held.setdefault(key, held) if self._now is not None else held

    def read(self, leaf: int, boxes: Sequence[Box], buffers: Sequence[HostArray]) -> None:
        """Fill a buffer with each box of an array.

        Raises:
            CorruptCheckpointError: where bytes are missing or wrong.
            CheckpointNotFoundError: as `guard` does.
        """

        def fill(opened: Checkpoint) -> None:
            count = sum(1 for _ in opened.read(plan_read(opened.tree, [(leaf, boxes)]), buffers))
            if count != len(boxes):
                raise unread(opened, leaf)

        self.guard(fill)


def _replaced(opened: Checkpoint) -> CheckpointNotFoundError:
    return CheckpointNotFoundError(
        f"{opened.location.display} was replaced or deleted after it was opened, and what is there now is another checkpoint or none; "
        "open it again"
    )
