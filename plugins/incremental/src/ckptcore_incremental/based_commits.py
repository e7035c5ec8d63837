"""BasedCommit: the commit of a checkpoint that needs other checkpoints, its bases. No base is deleted meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final

from ckptcore.commit.delete import base_locks, note_bases, pin_name
from ckptcore.commit.leases import SYSTEM_CLOCK
from ckptcore.commit.location import Location
from ckptcore.commit.root import Base, CompositeRoot, Root
from ckptcore.errors import CorruptCheckpointError, SaveLostError, StorageError, UnsupportedVersionError
from ckptcore.opening.bases import read_base
from ckptcore.saving.requests import Save
from ckptcore.saving.writing import PlainCommit

_CHANGE_SECONDS: Final = 180.0
"""Maximum seconds that a save waits for a save or a deletion that changes its base."""


class BasedCommit(PlainCommit):
    """Commit of a checkpoint with bases. Pins the bases until the checkpoint is committed. See `SaveCommit`.

    Updates and deltas use it. Their strategies call `import_locks` in `SaveStrategy.prepare`.
    """

    def __init__(self, save: Save, bases: Sequence[Base], locations: Sequence[Location]) -> None:
        """Create the commit of a save. Claims nothing yet.

        Args:
            save: the save.
            bases: the checkpoints that it needs.
            locations: their locations.
        """
        super().__init__(save)
        self._bases = bases
        self._locations = locations
        self._pins = ExitStack()

    def _begin_transaction(self) -> None:
        self._pins.enter_context(_pinned_bases(self._locations))
        note_bases(self._save.target.location, self._bases)
        super()._begin_transaction()

    def _expect_bases(self) -> None:
        """Check nothing: the strategy has read the bases, and `_completed` checks them."""

    def _completed(self, root: Root | CompositeRoot) -> Root | CompositeRoot:
        """Return the root to commit, after a check that the bases are unchanged. Strategies override it.

        Raises:
            SaveLostError: if a base was deleted or replaced.
            StorageError: if the storage failed, so that the bases could not be checked.
        """
        display = self._save.target.location.display
        for at, base in zip(self._locations, self._bases, strict=True):
            try:
                read_base(display, at, base.save_id)
            except (CorruptCheckpointError, UnsupportedVersionError) as error:
                raise SaveLostError(
                    f"{display}: its base {at.display} was deleted or replaced during the save; save with another "
                    f"base, or save all arrays: {error}"
                ) from error
        return root

    def settle(self, error: Exception | None) -> None:
        """Settle the save, then unpin the bases."""
        with self._pins:
            super().settle(error)

    def abort(self) -> None:
        """Remove the written objects, then unpin the bases."""
        with self._pins:
            super().abort()


def import_locks(bases: Sequence[Location]) -> None:
    """Import the modules that lock bases on this thread, before a thread of a background save needs them.

    A process that is forked while another thread imports a module hangs at its own import of that module.
    """
    for base in bases:
        base_locks(base)


@contextmanager
def _pinned_bases(bases: Sequence[Location]) -> Iterator[None]:
    """Pin bases, so that they cannot be deleted. Skips bases whose storage refuses the pin.

    Args:
        bases: the locations. The caller must check inside the block that each base still exists.

    Raises:
        CheckpointNotFoundError, SaveLostError: if a base is being deleted or replaced.
    """
    with ExitStack() as pins:
        for base in bases:
            locks = base_locks(base)
            try:
                for name in (base.name, pin_name(base)):
                    pins.enter_context(locks.pin(name))
                _wait_until_unchanging(base)
            except StorageError:
                continue  # without a pin, only the check before the commit detects a deletion
        yield


def _wait_until_unchanging(base: Location) -> None:
    """Wait while a save to a base or a deletion of the base is running.

    Raises:
        SaveLostError: if it still runs after `_CHANGE_SECONDS`.
    """
    for _ in SYSTEM_CLOCK.attempts(_CHANGE_SECONDS):
        if not base.commit_method.is_changing(base):
            return
    raise SaveLostError(
        f"the base {base.display} is being deleted or replaced (waited {_CHANGE_SECONDS:.0f} s); save with another "
        "base, or save all arrays. Nothing was written"
    )
