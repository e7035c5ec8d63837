"""RenameTransaction: write into a hidden sibling directory, and commit by renaming it or exchanging it with the old one.

A lock that ends with the process holds the directory. So the directories of killed saves can be found and removed.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final

from ckptcore.commit.occupants import (
    IsForeign,
    Overwrite,
    name_of_save,
    none_is_foreign,
    refuse_to_replace,
    remove_debris,
    root_bytes,
)
from ckptcore.commit.root import PARTIAL_KEY, ROOT_KEY, Claimed
from ckptcore.commit.root_json import encode_claim
from ckptcore.commit.subdirectory import subdirectory
from ckptcore.errors import (
    AtomicityError,
    CheckpointExistsError,
    CommitUnknownError,
    ConditionFailedError,
    ObjectNotFoundError,
    SaveLostError,
    StorageError,
)
from ckptcore.protocols import AtomicDirectories

if TYPE_CHECKING:
    from ckptcore.commit.location import Location

__all__ = ["RenameTransaction"]

logger = logging.getLogger("ckptcore.commit")

_PUBLISH_TRIES: Final = 100
"""Attempts to commit while other processes delete the old checkpoint."""


class RenameTransaction:
    """A transaction in a hidden sibling directory, whose lock ends with this process. See `Transaction`."""

    def __init__(
        self,
        location: Location,
        directories: AtomicDirectories,
        hidden: str,
        overwrite: Overwrite = False,
        is_foreign: IsForeign = none_is_foreign,
        claim: Claimed | None = None,
    ) -> None:
        """Lock the hidden directory; create it if it does not exist.

        Args:
            location: the location of the checkpoint.
            directories: its storage.
            hidden: the name of the hidden directory.
            overwrite: whether the commit replaces a checkpoint.
            is_foreign: recognises checkpoints of other software.
            claim: the save; None for a partial save.

        Raises:
            SaveLostError: another process holds the directory.
        """
        self._location = location
        self._directories = directories
        self._hidden = hidden
        self._overwrite = overwrite
        self._is_foreign = is_foreign
        self._claim = claim
        self._done = False
        lock = directories.lock_directory(hidden)
        if lock is None:
            raise SaveLostError(f"another process holds {hidden} beside {location.display}; save again")
        self._lock: AbstractContextManager[None] = lock
        self._lock.__enter__()
        self.store = subdirectory(location.parent, hidden)

    def probe_exchange(self) -> None:
        """Check before anything is written that the file system can exchange directories.

        Raises:
            AtomicityError: it cannot.
        """
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

    def show_claim(self) -> None:
        """See `Transaction`. A hidden directory is found by its content; the commit replaces this root."""
        assert self._claim is not None, "sessions of a partial save find the session table"
        self.store.put(ROOT_KEY, encode_claim(self._claim))

    def commit(self, root: bytes | None, parts: Mapping[str, bytes]) -> None:
        """See `Transaction`."""
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
            self.leave()
            raise CommitUnknownError(
                f"the save to {self._location.display} is in place, or may be, but its commit was interrupted: "
                f"{str(error) or type(error).__name__}. It may not survive a loss of power; look at the location before saving again"
            ) from error
        self.leave()
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

    def replace(self, table: bytes) -> None:
        """See `Transaction`. The lock excludes other sessions."""
        self._directories.sync_directory(self._hidden)
        self.store.put(PARTIAL_KEY, table)

    def abort(self) -> None:
        """See `Transaction`."""
        if not self._done:
            try:
                self._directories.delete_directory(self._hidden)
            finally:
                self.leave()

    def leave(self) -> None:
        """See `Transaction`."""
        if not self._done:
            self._done = True
            self._lock.__exit__(None, None, None)

    def leave_if_empty(self) -> None:
        """Release the claim, and remove a directory that was created only for its lock."""
        try:
            if not self.store.list_names():
                self._directories.delete_directory(self._hidden)
        finally:
            self.leave()

    def restore(self, table: bytes, kept: Collection[str]) -> None:
        """See `Transaction`."""
        if not self._done:
            try:
                remove_debris(self.store, kept)  # first: nothing can be put on a full disk
                self.store.put(PARTIAL_KEY, table)
            finally:
                self.leave()


def _holds_other_root(location: Location, root: bytes | None) -> bool:
    """Return whether a location certainly has another root; without a root, nothing. False if it cannot be read."""
    try:
        if root is None:
            return not location.store.list_names()
        return root_bytes(location.store) != root
    except StorageError:
        return False
