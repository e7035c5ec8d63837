"""Commits by two renames: the old checkpoint is set aside, and the new one is renamed into its place.

This is how ``overwrite="non-atomic"`` replaces a checkpoint where directories cannot be exchanged. While the old
checkpoint is set aside it has a name of its own, from which another process restores it if this one is killed.

What has that name is only changed by a process that has locked it.
"""

from __future__ import annotations

import errno
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from typing import TYPE_CHECKING, Final

from ckptcore.commit.names import name_of_replaced, name_of_save
from ckptcore.commit.root import ROOT_KEY, new_save_id
from ckptcore.commit.subdirectory import subdirectory
from ckptcore.errors import AtomicityError, ConditionFailedError, ObjectNotFoundError, StorageError
from ckptcore.events import logger_named
from ckptcore.protocols import StorageBackend

if TYPE_CHECKING:
    from ckptcore.commit.rename import RenameMethod

logger = logger_named("ckptcore.commit")

_REPLACES: Final = "checkpoint.replaces"
"""Empty file of a new checkpoint that waits for the deletion of the old one, which could not be renamed."""


class AsideCheckpoint:
    """The checkpoint that a save has set aside, or will set aside."""

    def __init__(self, directory: StorageBackend, method: RenameMethod, name: str) -> None:
        """Change nothing.

        Args:
            directory: the storage, opened at the parent directory.
            method: the commit method of that directory.
            name: the name of the checkpoint that is replaced.
        """
        self._method = method
        self._directories = method.directories
        self._name = name
        self._aside = name_of_replaced(name)
        self._in_place = subdirectory(directory, name)
        self._set_aside = subdirectory(directory, self._aside)

    def replace(self, store: StorageBackend, hidden: str) -> str | None:
        """Replace the checkpoint by a new one. Return the hidden directory to delete, if any.

        This process locks an empty directory at the name aside, which a rename can replace, and the old checkpoint: its
        lock follows it.

        Args:
            store: the storage of the new checkpoint.
            hidden: the name of its hidden directory.

        Raises:
            ConditionFailedError: another process replaces it, or has replaced it.
            ObjectNotFoundError: it was deleted.
        """
        name, aside = self._name, self._aside
        with ExitStack() as stack:
            held = self._method.lock_hidden(aside)
            if held is None:
                raise ConditionFailedError(f"cannot replace {name}: another process is replacing it")
            stack.enter_context(held.lock)
            if self._set_aside.list_names():  # of a killed save; the checkpoint that is there now is newer
                self._method.discard(name, aside)
                raise ConditionFailedError(f"cannot replace {name}: an older checkpoint was named {aside}")
            stack.enter_context(self._lock_of_kernel())
            if not self._in_place.list_names():  # then another save can replace the locked directory
                raise ObjectNotFoundError(f"cannot replace {name}: it was deleted")
            if held.check is not None:
                held.check()
            try:
                self._directories.rename(name, aside)
            except StorageError as error:
                if error.errno != errno.EXDEV:
                    raise
                self._replace_by_deletion(store, hidden)
                return None
            try:
                self._directories.rename(hidden, name)
            except BaseException:
                with suppress(ConditionFailedError, ObjectNotFoundError):  # another save has committed meanwhile
                    self._directories.rename(aside, name)
                raise
            unneeded = name_of_save(name, new_save_id())
            try:
                self._directories.rename(aside, unneeded)
            except StorageError as error:
                logger.warning("%s is saved, but the old checkpoint stays as %s: %s", name, aside, error)
                return None
        return unneeded

    def _replace_by_deletion(self, store: StorageBackend, hidden: str) -> None:
        """Replace a directory that cannot be renamed, such as one of a lower layer of overlayfs.

        The new checkpoint gets the name from which it is restored before the old one is deleted.
        """
        store.put(_REPLACES, b"")
        try:
            self._directories.rename(hidden, self._aside)
        except BaseException:
            store.delete([_REPLACES])
            raise
        self._complete_deletion()

    def _complete_deletion(self) -> None:
        self._in_place.delete([ROOT_KEY])
        self._directories.delete_directory(self._name)
        self._set_aside.delete([_REPLACES])
        self._directories.rename(self._aside, self._name)

    def _lock_of_kernel(self) -> AbstractContextManager[object]:
        """Lock the old checkpoint. A file system without locks has the lease of the name aside instead."""
        try:
            locked = self._directories.lock_directory(self._name)
        except AtomicityError:
            return nullcontext()
        if locked is None:
            raise ConditionFailedError(
                f"cannot replace {self._name}: the process that saved it has not ended its commit"
            )
        return locked

    def discard(self) -> None:
        """Delete what a killed save has set aside: it is older than what is deleted now, and must not come back."""
        held = self._method.lock_hidden(self._aside)
        if held is not None:  # otherwise the process that has locked it removes it
            with held.lock:
                self._method.discard(self._name, self._aside)

    def restore(self) -> bool:
        """Rename the old checkpoint back, or a new one into the place of a deleted one.

        The caller has locked the name aside.

        Returns:
            True if what is set aside must stay; False if it can be deleted, because a newer checkpoint is in its place.
        """
        found = self._set_aside.list_names()
        if not found or self._method.is_committed(self._name):
            return False
        with suppress(ConditionFailedError, ObjectNotFoundError):  # a save has committed meanwhile
            if _REPLACES in found:
                self._complete_deletion()
            elif not self._in_place.list_names():
                logger.info("restoring %s, which a killed save was replacing", self._name)
                self._directories.rename(self._aside, self._name)
        return True
