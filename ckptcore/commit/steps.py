"""Steps that readers pin, and steps that are being deleted.

A reader pins a step, then looks whether somebody is deleting it. Who deletes says so, then looks whether somebody pins it::

    pin                                       delete
    1. write the pin                          1. write the intent
    2. look for intents:                      2. look for pins:
       wait until there is none                  one is there: take the intent back, and leave the step
    3. look whether the step is there         3. delete the step
    4. read; remove the pin                   4. remove the intent

No step is deleted while it is pinned and read. Say that a step is deleted in spite of a pin. Then 2 of the deletion did
not see the pin, so it came before 1 of the pin, and so did 1 of the deletion. Then 2 of the pin comes after the intent was
written, sees it, and waits until it is gone. It is gone after 4 of the deletion, so 3 of the pin finds no step, and nothing
is read. All this needs of a storage is that what was written is seen by who looks afterwards.

Neither waits for the other for ever: who deletes never waits, and who pins waits only for a deletion that will end.

The intent or pin of a dead process counts for nothing; its death is certain (a lock) or taken for certain (a lease that was
not renewed for a whole lease time). A process that only stood still finds its lease broken when it checks: who deletes
calls `check` before it does, and who reads has read for so long that the step may vanish, which a load notices.
"""

from __future__ import annotations

from typing import Final

from ckptcore.commit.clocks import SYSTEM_CLOCK, Clock
from ckptcore.commit.holding import Hold, HoldsOfSteps, check_lease_seconds
from ckptcore.commit.leases import LeasedSteps
from ckptcore.commit.locks import LockedSteps
from ckptcore.errors import AtomicityError, CheckpointNotFoundError, StorageError
from ckptcore.protocols import AtomicDirectories, StorageBackend

__all__ = ["StepHolds"]

_FIRST_POLL_SECONDS: Final = 0.01
_LAST_POLL_SECONDS: Final = 2.0


class StepHolds:
    """The holds of the steps of one directory. Any thread.

    To be kept as long as the directory is used: on storage without locks it remembers what it saw of others' holds, and
    so tells which are dead. A new one takes all for alive.
    """

    def __init__(
        self, store: StorageBackend, display: str, *, lease_seconds: float = 60.0, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        """Look after the steps of a directory; writes nothing yet.

        Args:
            store: the storage, opened at the directory of steps.
            display: the directory as the user knows it.
            lease_seconds: how long this process may stand still without losing its holds; where there are no locks.
            clock: the time.

        Raises:
            ValueError
        """
        check_lease_seconds(lease_seconds)
        self._display = display
        self._clock = clock
        self._holds: HoldsOfSteps = (
            LockedSteps(store, store)
            if isinstance(store, AtomicDirectories)
            else LeasedSteps(store, lease_seconds, clock)
        )

    def pin(self, name: str, *, wait_seconds: float = 180.0) -> Hold:
        """Keep a step from being deleted until the result is closed; look whether it is there only after this returns.

        Waits while the step is being deleted, and on storage without locks also if that died: about a lease time.

        Args:
            name: the step's directory.
            wait_seconds: how long to wait for that.

        Raises:
            CheckpointNotFoundError: it is still being deleted.
            StorageError: the storage failed, or cannot be written.
        """
        _check_name(name)
        try:
            pin = self._holds.take("pins", name)
        except (StorageError, AtomicityError) as error:
            failed = StorageError(
                f"cannot pin the step {name} in {self._display}: {error}. A pin is written beside the steps; where you may "
                "not write, read without one, and see to it that the step is not deleted meanwhile"
            )
            failed.errno = getattr(error, "errno", None)
            raise failed from error
        try:
            self._await_deletion(name, wait_seconds)
        except BaseException:
            pin.close()
            raise
        return pin

    def _await_deletion(self, name: str, wait_seconds: float) -> None:
        deadline = self._clock.now() + wait_seconds
        pause = _FIRST_POLL_SECONDS
        while self._holds.living("deleting", name):
            if self._clock.now() >= deadline:
                raise CheckpointNotFoundError(
                    f"the step {name} in {self._display} has been in deletion for {wait_seconds:.0f} seconds; "
                    "use another step"
                )
            self._clock.sleep(pause)
            pause = min(2 * pause, _LAST_POLL_SECONDS)

    def pinned(self) -> frozenset[str]:
        """The names of the steps that somebody pins who is alive, or may be.

        Raises:
            StorageError
        """
        return self._holds.living("pins")

    def is_pinned(self, name: str) -> bool:
        """Whether somebody pins a step who is alive, or may be.

        Raises:
            StorageError
        """
        return bool(self._holds.living("pins", name))

    def is_pinned_here(self, name: str) -> bool:
        """Return whether this process pins a step by a lease.

        Raises:
            StorageError
        """
        return isinstance(self._holds, LeasedSteps) and self._holds.is_pinned_here(name)

    def intend_deletion(self, name: str) -> Hold | None:
        """Announce that a step is going to be deleted; None if it is pinned and must stay.

        The result is to be checked right before the step is deleted, and closed afterwards.

        Raises:
            StorageError
        """
        _check_name(name)
        intent = self._holds.take("deleting", name)
        try:
            is_pinned = bool(self._holds.living("pins", name))
        except BaseException:
            intent.close()
            raise
        if is_pinned:
            intent.close()
            return None
        return intent

    def sweep(self) -> None:
        """Remove the pins and intents of the dead; on storage without locks, of those that were seen dead by now.

        Raises:
            StorageError
        """
        self._holds.living("pins")
        self._holds.living("deleting")


def _check_name(name: str) -> None:
    if not name or "/" in name:
        raise ValueError(f"{name!r} is no name of a step: expected one name, without '/'")
