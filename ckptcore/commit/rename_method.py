"""RenameMethod: commits by rename, and locked directories. See `CommitMethod`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, TypeVar

from ckptcore.commit.clocks import SYSTEM_CLOCK, Clock
from ckptcore.commit.conditions import Conditions
from ckptcore.commit.holder import check_lease_seconds
from ckptcore.commit.occupants import (
    IsForeign,
    Overwrite,
    expect_no_nested,
    is_save_of,
    name_of_partial,
    name_of_save,
    none_is_foreign,
    refuse_to_replace,
    remove_debris,
)
from ckptcore.commit.rename import RenameTransaction
from ckptcore.commit.root import PARTIAL_KEY, ROOT_KEY, Claimed, PartialSave, new_save_id
from ckptcore.commit.root_json import encode_partial
from ckptcore.commit.subdirectory import subdirectory
from ckptcore.errors import CheckpointExistsError, ObjectNotFoundError, SaveLostError, StorageError
from ckptcore.io.background import wait_for_saves_to
from ckptcore.protocols import AtomicDirectories, StorageBackend, Transaction

if TYPE_CHECKING:
    from ckptcore.commit.location import Location
    from ckptcore.commit.locks import Locks, StepLocks
    from ckptcore.commit.sessions import PlannedSession

__all__ = ["RenameMethod"]

logger = logging.getLogger("ckptcore.commit")

T = TypeVar("T")


class RenameMethod:
    """The commit method of storage with real directories. A hidden directory beside the checkpoint has the objects of a save."""

    replaces_atomically = True
    claims_by_root = False

    def __init__(self, directory: StorageBackend, directories: AtomicDirectories) -> None:
        """Create the method; `directories` is the same storage."""
        self._directory = directory
        self._directories = directories

    def begin(
        self,
        location: Location,
        claim: Claimed,
        overwrite: Overwrite,
        conditions: Conditions,
        is_foreign: IsForeign = none_is_foreign,
        *,
        resume: bool = False,
    ) -> Transaction:
        """See `CommitMethod`."""
        wait_for_saves_to(location.identity)
        hidden = name_of_save(location.name, claim.save_id)
        replaces = refuse_to_replace(location, overwrite, is_foreign) == "checkpoint"
        _sweep_beside(location, self._directories, hidden if resume else None)
        transaction = RenameTransaction(location, self._directories, hidden, overwrite, is_foreign, claim)
        if replaces and overwrite != "non-atomic":
            try:
                transaction.probe_exchange()
            except BaseException:
                if resume:
                    transaction.leave()
                else:
                    transaction.abort()
                raise
        return transaction

    def begin_session(self, location: Location, planned: PlannedSession, conditions: Conditions) -> Transaction:
        """See `CommitMethod`."""
        from ckptcore.commit import sessions  # only partial saves need it

        transaction = self._resume(location)
        try:
            sessions.expect_no_checkpoint(location)  # the lock excludes a concurrent `finalize`
            if sessions.find_partial(location) != planned.before:
                raise sessions.changed(location)
            transaction.store.delete([ROOT_KEY])  # of a process that was killed in `finalize`
            if planned.before is None or planned.before.owner is not None:
                remove_debris(transaction.store, planned.kept)  # before anything is written: it may fill the disk
            transaction.store.put(PARTIAL_KEY, encode_partial(planned.partial))
        except BaseException:
            transaction.leave_if_empty()
            raise
        return transaction

    def resume_sessions(
        self, location: Location, examine: Callable[[PartialSave, StorageBackend], T], conditions: Conditions
    ) -> tuple[PartialSave, Transaction, T]:
        """See `CommitMethod`."""
        from ckptcore.commit import sessions  # only partial saves need it

        if sessions.find_partial(location) is None:
            raise sessions.nothing(location)
        sessions.expect_no_checkpoint(location)
        _sweep_beside(location, self._directories, name_of_partial(location.name))
        transaction = self._resume(location)
        try:
            partial = sessions.find_partial(location)  # again: the lock excludes changes
            if partial is not None:
                return partial, transaction, examine(partial, transaction.store)
        except BaseException:
            transaction.leave()
            raise
        transaction.abort()  # taking the lock created the directory again
        raise sessions.nothing(location)

    def _resume(self, location: Location) -> RenameTransaction:
        """Take over the hidden directory of a partial save."""
        from ckptcore.commit.sessions import running  # only partial saves need it

        try:
            return RenameTransaction(location, self._directories, name_of_partial(location.name))
        except SaveLostError as error:
            raise running(location) from error

    def store_of(
        self, location: Location, save_id: str, conditions: Conditions, *, owner: int | None = None
    ) -> StorageBackend:
        """See `CommitMethod`."""
        return (
            subdirectory(location.parent, name_of_save(location.name, save_id))
            if owner is None
            else _partial_store(location)
        )

    def session_store(self, location: Location) -> StorageBackend:
        """See `CommitMethod`."""
        return _partial_store(location)

    def read_table(self, location: Location) -> bytes | None:
        """See `CommitMethod`."""
        try:
            return _partial_store(location).get(PARTIAL_KEY)
        except ObjectNotFoundError:
            return None

    def is_committed(self, name: str) -> bool | None:
        """See `CommitMethod`. A claim never has the name of a checkpoint."""
        try:
            subdirectory(self._directory, name).size(ROOT_KEY)
        except ObjectNotFoundError:
            return None
        return True

    def remove(self, location: Location, save_id: str, conditions: Conditions) -> None:
        """See `CommitMethod`."""
        expect_no_nested(location)
        _remove_hidden(location, self._directories, location.name, save_id)

    def remove_unfinished(self, location: Location, save_id: str, conditions: Conditions) -> None:
        """See `CommitMethod`. Claims are hidden directories: see `sweep_names`."""

    def remove_sessions(self, location: Location, save_id: str) -> bool:
        """See `CommitMethod`."""
        transaction = self._resume(location)
        try:
            transaction.store.size(PARTIAL_KEY)
        except ObjectNotFoundError:
            transaction.leave_if_empty()
            return False
        except BaseException:
            transaction.leave()
            raise
        try:
            _remove_hidden(location, self._directories, name_of_partial(location.name), save_id)
        finally:
            transaction.leave()
        return True

    def sweep(self, location: Location) -> None:
        """See `CommitMethod`."""
        _sweep_beside(location, self._directories, name_of_partial(location.name))

    def sweep_names(self, names: Iterable[str]) -> None:
        """See `CommitMethod`."""
        _sweep_directories(self._directories, names)

    def is_changing(self, location: Location) -> bool:
        """See `CommitMethod`."""
        return _is_claimed_beside(location, self._directories)

    def announce_deletion(
        self, location: Location, locks: StepLocks, pin: str
    ) -> AbstractContextManager[object] | None:
        """See `CommitMethod`. A claim as that of a save: the next save removes it if this process is killed."""
        with ExitStack() as stack:
            stack.enter_context(_hold_beside(location, self._directories))
            return None if locks.is_pinned(pin) else stack.pop_all()

    def with_conditions(self, conditions: Conditions, url: str) -> StorageBackend:
        """See `CommitMethod`. Commits by rename put nothing conditionally."""
        return self._directory

    def locks(self, lease_seconds: float = 60.0, clock: Clock = SYSTEM_CLOCK) -> Locks:
        """See `CommitMethod`."""
        from ckptcore.commit.locks import DirectoryLocks  # plain saves and loads do not need it

        check_lease_seconds(lease_seconds)
        return DirectoryLocks(self._directory, self._directories, clock)


def _partial_store(location: Location) -> StorageBackend:
    """Return the hidden directory of a partial save to a location, as a storage."""
    return subdirectory(location.parent, name_of_partial(location.name))


def _remove_hidden(location: Location, directories: AtomicDirectories, name: str, save_id: str) -> None:
    """Remove a directory: rename it first, to a hidden name that the next save to the location removes.

    Args:
        location: the location of the checkpoint.
        directories: its storage.
        name: the name of the directory.
        save_id: a new save id.
    """
    hidden = name_of_save(location.name, save_id)
    directories.rename(name, hidden)
    directories.delete_directory(hidden)


@contextmanager
def _hold_beside(location: Location, directories: AtomicDirectories) -> Iterator[None]:
    """Claim a location as a save does, by an empty hidden directory, so that `_is_claimed_beside` is true."""
    lock = None
    while lock is None:  # a save that sweeps may hold a directory that was just created
        hidden = name_of_save(location.name, new_save_id())
        lock = directories.lock_directory(hidden)
    with lock:
        try:
            yield
        finally:
            directories.delete_directory(hidden)


def _is_claimed_beside(location: Location, directories: AtomicDirectories) -> bool:
    """Return whether a save to a location, or a deletion of it, is running. Remove the directories of killed ones."""
    names = [entry.removesuffix("/") for entry in location.parent.list_names() if entry.endswith("/")]
    alive = [name for name in names if is_save_of(location.name, name) and not _delete_if_dead(directories, name)]
    return bool(alive)


def _sweep_beside(location: Location, directories: AtomicDirectories, kept: str | None = None) -> None:
    """Delete the hidden directories of killed saves to a location, except `kept`.

    Raises:
        CheckpointExistsError: a partial save to the location is not finalized, and its directory is not `kept`.
    """
    partial = name_of_partial(location.name)
    for entry in location.parent.list_names():
        name = entry.removesuffix("/")
        if name in (entry, kept):
            continue
        if name == partial:
            _refuse_partial(location)
            _delete_if_dead(directories, partial)  # empty: the first session was killed as it began
        elif is_save_of(location.name, name):
            _delete_if_dead(directories, name)


def _refuse_partial(location: Location) -> None:
    try:
        _partial_store(location).size(PARTIAL_KEY)
    except ObjectNotFoundError:
        return
    raise CheckpointExistsError(
        f"{location.display} is being filled by a partial save that is not finalized, and nothing replaces that: call "
        "ckptcore.finalize, or ckptcore.delete, first"
    )


def _sweep_directories(directories: AtomicDirectories, names: Iterable[str]) -> None:
    """Delete hidden directories, except those of running saves.

    Raises:
        StorageError: one cannot be deleted; all others are.
    """
    failed: StorageError | None = None
    for name in names:
        try:
            _delete_if_dead(directories, name)
        except StorageError as error:
            logger.warning("cannot remove the directory of a killed save: %s", error)
            failed = failed or error
    if failed is not None:
        raise failed


def _delete_if_dead(directories: AtomicDirectories, name: str) -> bool:
    """Delete a hidden directory unless a process holds it. Return whether it was deleted."""
    lock = directories.lock_directory(name)
    if lock is None:
        return False
    with lock:
        logger.info("removing what a killed save left: %s", name)
        directories.delete_directory(name)
    return True
