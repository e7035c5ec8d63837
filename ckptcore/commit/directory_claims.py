"""A claim in a storage with real directories: a hidden sibling directory, which is renamed or exchanged as the commit.

It is held by a lock that dies with its process, so what dead saves left is told from what living ones write, and removed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Final

from ckptcore.commit.location import Location
from ckptcore.commit.occupants import (
    IsForeign,
    Overwrite,
    is_save_of,
    name_of_partial,
    name_of_save,
    none_is_foreign,
    refuse_to_replace,
    root_bytes,
)
from ckptcore.commit.root import ROOT_KEY, new_save_id
from ckptcore.errors import (
    AtomicityError,
    CheckpointExistsError,
    CommitUnknownError,
    ConditionFailedError,
    ObjectNotFoundError,
    SaveLostError,
    StorageError,
)
from ckptcore.protocols import AtomicDirectories, StorageBackend

__all__ = [
    "PARTIAL_KEY",
    "DirectoryClaim",
    "hidden_store",
    "hold_beside",
    "is_claimed_beside",
    "partial_name",
    "partial_store",
    "remove_hidden",
    "sweep_beside",
    "sweep_directories",
]

logger = logging.getLogger("ckptcore.commit")

_PUBLISH_TRIES: Final = 100
"""Attempts to commit while other processes delete the old checkpoint."""

PARTIAL_KEY: Final = "checkpoint.partial.json"
"""What says in the hidden directory of a partial save which sessions there are. Elsewhere it stands in the place of the root."""


def partial_name(location: Location) -> str:
    """The hidden directory in which sessions of a partial save to a location write."""
    return name_of_partial(location.name)


def partial_store(location: Location) -> StorageBackend:
    """The hidden directory in which sessions of a partial save to a location write, as a storage."""
    return Location(location.display, location.parent, partial_name(location)).store


def hidden_store(location: Location, save_id: str) -> StorageBackend:
    """The hidden directory in which a save to a location writes, as a storage."""
    return Location(location.display, location.parent, name_of_save(location.name, save_id)).store


def remove_hidden(location: Location, directories: AtomicDirectories, name: str, save_id: str) -> None:
    """Remove a directory: rename it first, to a hidden name that the next save to the location removes.

    Args:
        location: where it is.
        directories: its storage.
        name: of the directory.
        save_id: a new one.
    """
    hidden = name_of_save(location.name, save_id)
    directories.rename(name, hidden)
    directories.delete_directory(hidden)


@contextmanager
def hold_beside(location: Location, directories: AtomicDirectories) -> Iterator[None]:
    """Claim a location as a save does, by an empty hidden directory, so that `is_claimed_beside` is true."""
    lock = None
    while lock is None:  # a save that sweeps may hold a directory that was just created
        hidden = name_of_save(location.name, new_save_id())
        lock = directories.lock_directory(hidden)
    with lock:
        try:
            yield
        finally:
            directories.delete_directory(hidden)


def is_claimed_beside(location: Location, directories: AtomicDirectories) -> bool:
    """Return whether a save to a location, or a deletion of it, is running. Remove the directories of killed ones."""
    names = [entry.removesuffix("/") for entry in location.parent.list_names() if entry.endswith("/")]
    alive = [name for name in names if is_save_of(location.name, name) and not _delete_if_dead(directories, name)]
    return bool(alive)


def sweep_beside(location: Location, directories: AtomicDirectories, continued: str | None = None) -> None:
    """Delete the hidden directories of saves to this location that died, but for one that is continued.

    Raises:
        CheckpointExistsError: a partial save to the location is not finalized.
    """
    partial = partial_name(location)
    kept = None if continued is None else name_of_save(location.name, continued)
    for entry in location.parent.list_names():
        name = entry.removesuffix("/")
        if name == entry:
            continue
        if name == partial and continued != partial:
            _refuse_partial(location)
            _delete_if_dead(directories, partial)  # a session that died as it began: there is nothing in it
        elif is_save_of(location.name, name) and name != kept:
            _delete_if_dead(directories, name)


def _refuse_partial(location: Location) -> None:
    try:
        partial_store(location).size(PARTIAL_KEY)
    except ObjectNotFoundError:
        return
    raise CheckpointExistsError(
        f"{location.display} is being filled by a partial save that is not finalized, and nothing replaces that: call "
        "ckptcore.partial(...).finalize, or ckptcore.delete, first"
    )


def sweep_directories(directories: AtomicDirectories, names: Iterable[str]) -> None:
    """Delete those of these hidden directories that no living save holds.

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
        logger.info("removing what a dead save left: %s", name)
        directories.delete_directory(name)
    return True


class DirectoryClaim:
    """A hidden sibling directory, held by a lock that dies with this process. See `ckptcore.commit.commit.Claim`."""

    def __init__(
        self,
        location: Location,
        directories: AtomicDirectories,
        save_id: str,
        overwrite: Overwrite,
        continued: str | None = None,
        is_foreign: IsForeign = none_is_foreign,
    ) -> None:
        """Claim a location, and remove what dead saves left beside it; raises what `ckptcore.commit.commit.claim_location` does.

        Args:
            location, save_id, overwrite, is_foreign: as there.
            directories: its storage.
            continued: the save id under which an earlier process wrote what is to stay, or `partial_name` for what sessions wrote;
                None if nothing is.
        """
        self._location = location
        self._directories = directories
        self._overwrite = overwrite
        self._is_foreign = is_foreign
        self._hidden = (
            partial_name(location) if continued == partial_name(location) else name_of_save(location.name, save_id)
        )
        self._done = False
        replaces = refuse_to_replace(location, overwrite, is_foreign) == "checkpoint"
        sweep_beside(location, directories, continued)
        lock = directories.lock_directory(self._hidden)
        if lock is None:
            raise SaveLostError(f"another process holds {self._hidden} beside {location.display}; save again")
        self._lock: AbstractContextManager[None] = lock
        self._lock.__enter__()
        self.store = Location(location.display, location.parent, self._hidden).store
        if replaces and overwrite != "non-atomic":
            try:
                self._probe_exchange()
            except BaseException:
                if continued is None:
                    self.abort()
                else:
                    self.leave()
                raise

    def _probe_exchange(self) -> None:
        """Find out before anything is written whether directories can be exchanged here."""
        first, second = f"{self._hidden}/.exchange-1", f"{self._hidden}/.exchange-2"
        for name in (first, second):
            lock = self._directories.lock_directory(name)
            if lock is not None:
                with lock:
                    pass
        try:
            self._directories.exchange(first, second)
        except AtomicityError as error:
            raise AtomicityError(
                f"{self._location.display} holds a checkpoint, and this file system cannot exchange it for another one "
                "atomically; save to another location, or pass overwrite='non-atomic'. Nothing was changed"
            ) from error
        finally:
            self._directories.delete_directory(first)
            self._directories.delete_directory(second)

    def commit(self, root: bytes | None, parts: Mapping[str, bytes]) -> None:
        """See `ckptcore.commit.commit.Claim`."""
        for key, data in parts.items():
            self.store.put(key, data)
        if root is not None:
            self.store.put(ROOT_KEY, root)
        self._directories.sync_directory(self._hidden)
        try:
            replaced = self._publish()
        except (CheckpointExistsError, SaveLostError, AtomicityError):
            raise
        except BaseException as error:
            # What is under the hidden name may be the old checkpoint by now: nothing may be deleted on a guess.
            if _holds_other_root(self._location, root):
                raise
            self._done = True
            self._lock.__exit__(None, None, None)
            raise CommitUnknownError(
                f"the save to {self._location.display} is in place, or may be, but its commit was interrupted: "
                f"{str(error) or type(error).__name__}. It may not survive a loss of power; look at the location before saving again"
            ) from error
        self._done = True
        self._lock.__exit__(None, None, None)
        if replaced is not None:
            try:
                self._directories.delete_directory(replaced)
            except OSError as error:
                # The new checkpoint is committed; the next save tries again to remove the old one.
                logger.warning("%s is saved, but what it replaced cannot be removed: %s", self._location.display, error)

    def _publish(self) -> str | None:
        """Rename or exchange; return the hidden name of the replaced checkpoint, or None.

        A deletion may remove the old checkpoint after the rename has failed because of it. Then both are tried again.
        """
        name = self._location.name
        for left in reversed(range(_PUBLISH_TRIES)):
            try:
                self._directories.rename(self._hidden, name)
                return None
            except ConditionFailedError as error:
                if refuse_to_replace(self._location, self._overwrite, self._is_foreign) == "nothing":
                    if left:
                        continue
                    raise SaveLostError(
                        f"cannot commit {self._location.display}: its path has an entry that is no file, and was not "
                        "found when the save began (a broken link?); remove it and save again"
                    ) from error
            except ObjectNotFoundError as error:
                raise SaveLostError(
                    f"{self._hidden}, next to {self._location.display}, was removed during the save; save again"
                ) from error
            try:
                return self._replace()
            except ObjectNotFoundError as error:
                if not left:
                    raise SaveLostError(
                        f"cannot replace {self._location.display}: other processes deleted it {_PUBLISH_TRIES} times "
                        "during the commit; save again when no other process deletes it"
                    ) from error
        raise AssertionError("the last try returns or raises")

    def _replace(self) -> str:
        """Exchange the old checkpoint for the new one; return the hidden name of the old one.

        Raises:
            ObjectNotFoundError: the old one was deleted.
        """
        name = self._location.name
        try:
            self._directories.exchange(self._hidden, name)
            return self._hidden
        except AtomicityError:
            if self._overwrite != "non-atomic":
                raise
        aside = name_of_save(self._location.name, "0" * 16)
        self._directories.delete_directory(aside)
        self._directories.rename(name, aside)
        try:
            self._directories.rename(self._hidden, name)
        except BaseException:
            self._directories.rename(aside, name)
            raise
        return aside

    def abort(self) -> None:
        """See `ckptcore.commit.commit.Claim`."""
        if self._done:
            return
        self._done = True
        try:
            self._directories.delete_directory(self._hidden)
        finally:
            self._lock.__exit__(None, None, None)

    def leave(self) -> None:
        """See `ckptcore.commit.commit.Claim`."""
        if not self._done:
            self._done = True
            self._lock.__exit__(None, None, None)


def _holds_other_root(location: Location, root: bytes | None) -> bool:
    """Whether a location certainly does not hold this root, or without one nothing; False where that cannot be read."""
    try:
        if root is None:
            return not location.store.list_names()
        return root_bytes(location.store) != root
    except StorageError:
        return False
