"""Overwriting a checkpoint where no exchange of directories is possible, or where other files stay in its directory.

If directories cannot be exchanged and ``overwrite`` allows it, two renames replace a checkpoint. The first rename sets
the old checkpoint aside under a hidden name. The second rename moves the new checkpoint into its place. If this process
is killed between them, another process finds the old checkpoint by its hidden name and restores it. A process locks a
directory with such a name before it changes the directory.

In a directory with other files, the objects of the new checkpoint move into the directory of the old checkpoint. The
directory stays, so that other processes can write into it at any time. The names of the objects are unique. Nothing
refers to the objects until one rename replaces the root, which is the commit. Then the save replaces the index, by
which other software finds the objects, and deletes the objects of the old checkpoint.

Before it moves anything, a save writes a journal into its hidden directory. If the process is killed, another process
that finds the hidden directory unlocked completes the commit, or removes the objects of a save that is not committed.
The journal has a stamp of each file, so that a file that was written later is not deleted.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from typing import TYPE_CHECKING, Final

import xxhash

from ckptcore.commit.names import is_save_of, name_of_replaced, name_of_save
from ckptcore.commit.root import ROOT_KEY, CompositeRoot, Root, new_save_id
from ckptcore.commit.stored_root import read_root, root_bytes
from ckptcore.commit.subdirectory import subdirectory
from ckptcore.errors import (
    AtomicityError,
    CheckpointExistsError,
    ConditionFailedError,
    CorruptCheckpointError,
    InvalidLocationError,
    ObjectNotFoundError,
    SaveLostError,
    StorageError,
    UnsupportedVersionError,
)
from ckptcore.events import logger_named
from ckptcore.model.metadata import check_key
from ckptcore.protocols import AtomicDirectories, StorageBackend
from ckptcore.records import NamedTuple

if TYPE_CHECKING:
    from ckptcore.commit.rename import RenameMethod

logger = logger_named("ckptcore.commit")

_REPLACES: Final = "checkpoint.replaces"
"""Key of an empty object in a new checkpoint. The new checkpoint waits for the deletion of the old checkpoint, which
cannot be renamed."""


class AsideCheckpoint:
    """The old checkpoint that a save sets aside under a hidden name."""

    def __init__(self, directory: StorageBackend, method: RenameMethod, name: str) -> None:
        """Remember the names. Changes nothing.

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
        """Replace the checkpoint by a new checkpoint. Return the hidden directory to delete, if any.

        This process locks an empty directory with the hidden name, because a rename can replace an empty directory. It
        also locks the old checkpoint. A rename keeps this lock.

        Args:
            store: the storage of the new checkpoint.
            hidden: the name of its hidden directory.

        Raises:
            ConditionFailedError: another process replaces it, or has replaced it.
            ObjectNotFoundError: it was deleted.
        """
        name, aside = self._name, self._aside
        with ExitStack() as stack:
            lock = self._method.lock_hidden(aside)
            if lock is None:
                raise ConditionFailedError(f"cannot replace {name}: another process is replacing it")
            stack.enter_context(lock.lock)
            if self._set_aside.list_names():  # set aside by a killed save: older than the checkpoint in place
                self._method.discard(name, aside)
                raise ConditionFailedError(f"cannot replace {name}: an older checkpoint was named {aside}")
            stack.enter_context(self._lock_of_kernel())
            # If the old checkpoint was deleted, locking it created an empty directory, which another save can replace.
            if not self._in_place.list_names():
                raise ObjectNotFoundError(f"cannot replace {name}: it was deleted")
            lock.check()
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
            unneeded = name_of_save(name, new_save_id())  # no process restores a checkpoint with such a name
            try:
                self._directories.rename(aside, unneeded)
            except StorageError as error:
                logger.warning("%s is saved, but the old checkpoint stays as %s: %s", name, aside, error)
                return None
        return unneeded

    def _replace_by_deletion(self, store: StorageBackend, hidden: str) -> None:
        """Replace a directory that cannot be renamed, such as a directory in a lower layer of overlayfs.

        First the new checkpoint gets the hidden name, from which it is restored if this process is killed. Then the old
        checkpoint is deleted.
        """
        store.put(_REPLACES, b"")
        try:
            self._directories.rename(hidden, self._aside)
        except BaseException:
            store.delete([_REPLACES])
            raise
        self._complete_deletion()

    def _complete_deletion(self) -> None:
        # The root first: if this process is killed after that, `restore` completes the replacement.
        self._in_place.delete([ROOT_KEY])
        self._directories.delete_directory(self._name)
        self._set_aside.delete([_REPLACES])
        self._directories.rename(self._aside, self._name)

    def _lock_of_kernel(self) -> AbstractContextManager[object]:
        """Lock the old checkpoint. Without kernel locks, the lease of the hidden name is enough."""
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
        """Delete the checkpoint that a killed save has set aside. It is outdated, so it must not be restored later."""
        lock = self._method.lock_hidden(self._aside)
        if lock is not None:  # otherwise the process that has locked it removes it
            with lock.lock:
                self._method.discard(self._name, self._aside)

    def restore(self) -> bool:
        """Rename the old checkpoint back. Or complete a replacement by deletion, if a killed save had begun one.

        The caller has locked the hidden name.

        Returns:
            False if the directory with the hidden name can be deleted, because it is empty or a newer checkpoint is in
            its place; otherwise True.
        """
        names = self._set_aside.list_names()
        if not names or self._method.is_committed(self._name):
            return False
        with suppress(ConditionFailedError, ObjectNotFoundError):  # a save has committed meanwhile
            if _REPLACES in names:
                self._complete_deletion()
            elif not self._in_place.list_names():
                logger.info("restoring %s, which a killed save was replacing", self._name)
                self._directories.rename(self._aside, self._name)
        return True


_JOURNAL: Final = "checkpoint.journal.json"

_SHOWN: Final = 5


class _Journal(NamedTuple):
    """The record of a commit.

    Attributes:
        hidden: the name of the hidden directory, which contains the random save id. An old checkpoint cannot contain a
            journal with this name.
        root: a digest of the new root.
        index_key: the index that other software reads; empty if there is none.
        index_stamp: the stamp of the old index; None if there was none.
        added: the stamps of the new objects, by key.
        removed: the stamps of the files that the commit deletes after it replaced the root, by key, in this order.
    """

    hidden: str
    root: str
    index_key: str
    index_stamp: str | None
    added: Mapping[str, str]
    removed: Mapping[str, str]


class PlacedObjects:
    """The objects of a save in a hidden directory, and the directory of the checkpoint that they replace."""

    def __init__(self, parent: StorageBackend, directories: AtomicDirectories, name: str, hidden: str) -> None:
        """Remember the names. Changes nothing.

        Args:
            parent: the storage, opened at the parent directory.
            directories: the same storage.
            name: the name of the checkpoint.
            hidden: the name of the hidden directory of the save, which this process has locked.
        """
        self._parent = parent
        self._directories = directories
        self._name = name
        self._hidden = hidden
        self._old = subdirectory(parent, name)
        self._new = subdirectory(parent, hidden)

    def commit(self, root: bytes, index: str, save_id: str, display: str, foreign: Collection[str] = ()) -> None:
        """Move the objects, and replace the root.

        Args:
            root: the new root.
            index: the key of the index of the layout; empty if it has none.
            save_id: the save id, which is part of the names of the new objects.
            display: the location, for errors.
            foreign: the files of a checkpoint of other software, which `complete` deletes.

        Raises:
            CheckpointExistsError: a file has the name of an object. Nothing was changed.
            SaveLostError: another save replaced the root, or the directory was removed. Nothing was committed.
            StorageError: nothing was committed.
        """
        # The save that wrote the current root may not have replaced the index yet. Complete that save before stamping
        # the index: otherwise its index could arrive later, and would name objects that this save deletes.
        before = self._stamps(self._name, [ROOT_KEY])
        self._complete_others()
        before.update(self._stamps(self._name, [index] if index else []))
        keys = [key for key in self._new.list() if key not in (ROOT_KEY, _JOURNAL, index)]
        existing = sorted(self._stamps(self._name, keys))
        if existing:
            raise fixed_names(display, existing)
        # Keys of the new objects, by the usual keys without the save id.
        replaced = {ROOT_KEY: ROOT_KEY, **{key.replace(f".{save_id}", ""): key for key in keys}}
        owned = _own_files(self._old)
        # Keep the attributes of replaced files, also of other software, so that a private file stays private.
        for key in sorted(self._stamps(self._name, sorted(replaced.keys() - {ROOT_KEY, index}))):
            self._directories.keep_attributes(f"{self._name}/{key}", f"{self._hidden}/{replaced[key]}")
        removed = (owned | replaced.keys() | {*foreign}) - {ROOT_KEY, index}
        journal = _Journal(
            self._hidden,
            _digest(root),
            index,
            before.get(index),
            self._stamps(self._hidden, keys),
            # Other software must not find an index of files that are gone, so metadata is deleted first.
            self._stamps(
                self._name,
                sorted(removed, key=lambda key: (key[0] not in "._" and not key.endswith((".json", ".ocdbt")), key)),
            ),
        )
        self._new.put(_JOURNAL, json.dumps(journal._asdict()).encode())
        try:
            self._directories.place(self._hidden, self._name, keys)
            self._directories.replace(f"{self._hidden}/{ROOT_KEY}", f"{self._name}/{ROOT_KEY}", before.get(ROOT_KEY))
        except (ConditionFailedError, ObjectNotFoundError) as error:
            raise SaveLostError(
                f"cannot commit {display}: another process saved there or removed it during the commit; save again. "
                f"Other files were kept: {error}"
            ) from error

    def complete(self) -> None:
        """Complete the commit of this process after it has replaced the root.

        Does nothing if another save has completed the commit. That save may have replaced the root again.

        Raises:
            StorageError
        """
        journal = self._journal()
        if journal is not None:
            self._complete(journal)

    def settle(self) -> None:
        """Complete the commit if the root is in its place. Otherwise remove the objects that were moved.

        If the process of the save has lost its lock, it may still run. After this call it can no longer commit.

        Raises:
            StorageError
        """
        journal = self._journal()
        if journal is None:
            return
        # Delete the new root: if the save still runs and has not moved its root yet, its commit will fail.
        self._new.delete([ROOT_KEY])
        if self._is_committed(journal):
            self._complete(journal)
        elif self._journal() is not None:  # otherwise another save has completed it, and then replaced the root
            self._delete(journal.added)

    def _complete_others(self) -> None:
        """Complete the commit of the save that wrote the current root, if its process has not."""
        for entry in self._parent.list_names():
            hidden = entry.removesuffix("/")
            if hidden in (entry, self._hidden) or not is_save_of(self._name, hidden):
                continue
            other = PlacedObjects(self._parent, self._directories, self._name, hidden)
            journal = other._journal()
            if journal is not None and other._is_committed(journal):
                other._complete(journal)
                # Delete the journal before the root is replaced again. Afterwards, the root would not match the
                # journal, so the other commit would seem not to have happened, and its objects would be removed.
                other._new.delete([_JOURNAL])

    def _journal(self) -> _Journal | None:
        try:
            journal = _decode(self._new.get(_JOURNAL))
        except ObjectNotFoundError:
            return None
        return None if journal is None or journal.hidden != self._hidden else journal

    def _is_committed(self, journal: _Journal) -> bool:
        root = root_bytes(self._old)
        return root is not None and _digest(root) == journal.root

    def _complete(self, journal: _Journal) -> None:
        """Replace the index, and delete the old objects. Does neither if other software has changed the index."""
        if journal.index_key:
            try:
                self._directories.replace(
                    f"{self._hidden}/{journal.index_key}", f"{self._name}/{journal.index_key}", journal.index_stamp
                )
            except ObjectNotFoundError:
                pass  # the index was replaced before
            except ConditionFailedError as error:
                if self._stamps(self._hidden, [journal.index_key]):  # otherwise another process has just replaced it
                    logger.warning(
                        "other software has replaced or removed an index meanwhile. It stays, with the objects of the "
                        "old checkpoint, which it may name: %s",
                        error,
                    )
                    return
        self._delete(journal.removed)

    def _delete(self, stamps: Mapping[str, str]) -> None:
        """Delete the files whose stamps have not changed, except files that the root names."""
        owned = _own_files(self._old)
        unowned = {f"{self._name}/{key}": stamp for key, stamp in stamps.items() if key not in owned}
        if unowned:
            self._directories.delete_unchanged(unowned)
            # The journal is deleted next. If the power failed, these files could return, and nothing would name them.
            with suppress(ObjectNotFoundError):  # another process has removed the checkpoint
                self._directories.sync_directory(self._name)

    def _stamps(self, directory: str, keys: Sequence[str]) -> dict[str, str]:
        stamps = self._directories.stamps([f"{directory}/{key}" for key in keys])
        return {key.removeprefix(f"{directory}/"): stamp for key, stamp in stamps.items()}


def _decode(data: bytes) -> _Journal | None:
    """Return a journal; None if the file is something else, such as a file of a hostile checkpoint."""
    try:
        journal = _Journal(**json.loads(data))
        texts = [journal.hidden, journal.root, journal.index_key, journal.index_stamp or ""]
        texts += [*journal.added.values(), *journal.removed.values()]
        for key in (*journal.added, *journal.removed, *filter(None, [journal.index_key])):
            check_key(key)
    except (AttributeError, TypeError, ValueError, RecursionError, InvalidLocationError):
        return None
    return journal if all(isinstance(text, str) for text in texts) else None


def _digest(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def _own_files(store: StorageBackend) -> set[str]:
    """Return the files of the checkpoint in a directory; only the root if it cannot be read."""
    try:
        root = read_root(store)
    except (CorruptCheckpointError, UnsupportedVersionError):
        root = None
    files = {ROOT_KEY}
    if isinstance(root, Root | CompositeRoot):
        files.update(root.parts)
    if isinstance(root, CompositeRoot):
        files.update(root.files)
    if isinstance(root, Root):
        files.update(root.objects, filter(None, [root.index]))
    elif isinstance(root, CompositeRoot):
        for entry in filter(root.has_directory, store.list_names()):
            files.update([entry + key for key in _own_files(subdirectory(store, entry.removesuffix("/")))])
    return files


def fixed_names(display: str, names: Sequence[str]) -> CheckpointExistsError:
    """Return the error for files that a save cannot replace while other files stay."""
    return CheckpointExistsError(
        f"{display} has files or directories with the names of the new checkpoint ({', '.join(names[:_SHOWN])}), which "
        "overwrite='keep-other-files' cannot replace: other software reads them by these names, so no single rename "
        "replaces all of them. Save one tree with the layout dcp or safetensors, save elsewhere, or pass "
        "overwrite='with-other-files' to delete the other files too. Nothing was changed"
    )
