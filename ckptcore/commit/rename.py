"""Commits by rename: write into a hidden sibling directory, and rename it or exchange it with the old checkpoint.

The process locks the hidden directory. The kernel releases the lock when the process ends, so the directories of killed
saves can be recognised and removed. On a file system without locks, the process takes a lease instead, and other
processes can see when it expires.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import TYPE_CHECKING, Final, NamedTuple, cast

from ckptcore.commit.method import CommitMethod
from ckptcore.commit.names import (
    INTERNAL_DIRECTORY,
    expect_distinct,
    expect_place,
    is_save_of,
    name_of_partial,
    name_of_replaced,
    name_of_save,
    naming_place,
    no_exchange,
    refuse_other_spelling,
    save_of_hidden,
    saved_to,
)
from ckptcore.commit.root import PARTIAL_KEY, ROOT_KEY, Claim, Root, new_save_id
from ckptcore.commit.root_json import encode_claim
from ckptcore.commit.stored_root import (
    FindForeign,
    Overwrite,
    none_foreign,
    partial_exists,
    read_root,
    refuse_to_replace,
    root_bytes,
)
from ckptcore.commit.subdirectory import NewDirectory, make_directory, subdirectory
from ckptcore.errors import (
    AtomicityError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CommitUnknownError,
    ConditionFailedError,
    ObjectNotFoundError,
    SaveLostError,
    StorageError,
    StorageFullError,
)
from ckptcore.events import logger_named
from ckptcore.io.background import wait_for_saves_to
from ckptcore.protocols import AtomicDirectories, DirectoryFeatures, PlaceLimits, StorageBackend, Transaction

if TYPE_CHECKING:
    from ckptcore.commit.leases import Clock
    from ckptcore.commit.location import Location
    from ckptcore.commit.locks import Lock, Locks
    from ckptcore.commit.method import StorageSupport
    from ckptcore.commit.overwriting import AsideCheckpoint, PlacedObjects
    from ckptcore.commit.single_file import FileTransaction

logger = logger_named("ckptcore.commit")

_DENIED: Final = frozenset({errno.EACCES, errno.EPERM})

_TWO_RENAMES: Final = (
    "this file system cannot exchange directories, so a checkpoint is replaced by two renames. Between them it "
    "does not exist. If the process is killed there, the next load or save restores the old one"
)

_PROBE: Final = ".probe"
"""Name of the directory in which a save tests what the file system supports."""

_PUBLISH_TRIES: Final = 100
"""Maximum number of attempts to commit while other processes delete the old checkpoint."""


class _HiddenLock(NamedTuple):
    """The lock of a hidden directory.

    Attributes:
        lock: context manager that releases the lock on exit.
        check: raises `SaveLostError` if another process has taken the directory. Does nothing for a kernel lock,
            because the kernel releases it only when the process ends.
    """

    lock: AbstractContextManager[object]
    check: Callable[[], None] = lambda: None


class RenameTransaction:
    """A transaction in a hidden sibling directory that this process has locked. See `Transaction`.

    Attributes:
        ended: True after a commit, `leave` or `abort`.
        check: see `_HiddenLock`.
    """

    def __init__(
        self,
        location: Location,
        method: RenameMethod,
        hidden: str,
        lock: _HiddenLock,
        limits: PlaceLimits,
        overwrite: Overwrite = False,
        find_foreign: FindForeign = none_foreign,
        claim: Claim | None = None,
        *,
        is_new: bool = False,
    ) -> None:
        """Enter the lock of the hidden directory.

        Args:
            location: the location of the checkpoint.
            method: the commit method of the parent directory.
            hidden: the name of the hidden directory, which exists.
            lock: its lock.
            limits: the limits of the location.
            overwrite: how the commit replaces an existing checkpoint, if at all: see `Overwrite`.
            find_foreign: recognises checkpoints of other software.
            claim: the claim of the save; None for a partial save.
            is_new: True if the directory is empty, so that no object may replace another object.
        """
        self._location = location
        self._method = method
        self._directories = method.directories
        self._hidden = hidden
        self._limits = limits
        self._overwrite = overwrite
        self._find_foreign = find_foreign
        self._claim = claim
        self.ended = False
        self.check: Final = lock.check
        self._held = ExitStack()
        self._held.enter_context(lock.lock)
        if claim is not None:  # `commit` syncs each directory once, instead of with each object
            self._held.enter_context(location.parent.defer_names(hidden))
        self._own = subdirectory(location.parent, hidden)
        self.store: StorageBackend = NewDirectory(location.parent, hidden, location.display) if is_new else self._own

    def expect_exchange(self) -> None:
        """Check, before anything is written, that the commit can exchange the old and the new checkpoint.

        Raises:
            AtomicityError
        """
        if not self._method.features(self._hidden, self._limits).exchanges:
            raise no_exchange(self._location)
        inside = f"{self._hidden}/{_PROBE}"
        # Put something into the hidden directory: `can_move` tries a rename onto it, which must fail because it is not
        # empty.
        make_directory(self._location.parent, inside)
        try:
            if not self._directories.can_move(self._location.name, self._hidden):
                raise no_exchange(self._location)
        finally:
            self._directories.delete_directory(inside)

    def expect_distinct(self, keys: Callable[[], Iterable[str]]) -> None:
        """See `Transaction`."""
        features = self._method.features(self._hidden, self._limits)
        expect_distinct(self._location, self._limits.name_bytes, features, self._is_one, keys)

    def _is_one(self, first: str, second: str) -> bool:
        """Return True if the file system treats two keys as the same name."""
        inside = subdirectory(self._own, _PROBE)
        inside.put(first, b"")
        try:
            inside.size(second)
        except ObjectNotFoundError:
            return False
        finally:
            self._directories.delete_directory(f"{self._hidden}/{_PROBE}")
        return True

    def show_claim(self) -> None:
        """See `Transaction`. Writes a claim into the hidden directory; the commit replaces it."""
        assert self._claim is not None, "sessions of a partial save read the session table instead"
        self._own.put(ROOT_KEY, encode_claim(self._claim))

    def commit(self, root: bytes | None, parts: Mapping[str, bytes]) -> None:
        """See `Transaction`."""
        for key, data in parts.items():
            self.store.put(key, data)
        if root is not None:
            self._own.put(ROOT_KEY, root)  # not `store`, which may refuse to replace the claim
        # A file system may store a rename before the entries of the renamed directory. Without this sync, a power loss
        # could leave an empty checkpoint.
        self._directories.sync_directory(self._hidden)
        try:
            replaced = self._publish(root)
        except (CheckpointExistsError, SaveLostError, AtomicityError):
            raise
        except BaseException as error:
            # If the exchange succeeded, the hidden directory contains the old checkpoint, so it is not deleted here.
            if _has_other_root(self._location, root):
                raise
            self.leave()
            raise CommitUnknownError(
                f"{self._location.display}: the commit was interrupted, and may have succeeded: "
                f"{str(error) or type(error).__name__}. The checkpoint may not survive a loss of power. Check the "
                "location before saving again"
            ) from error
        try:
            if self._overwrite == "keep-other-files":
                self.objects.complete()
            self.leave()
            if replaced is not None:
                self._directories.delete_directory(replaced)
        except (OSError, CheckpointError) as error:
            # Only a warning, because the new checkpoint is committed. The next save tries the cleanup again.
            self.leave()
            logger.warning(
                "%s is saved, but %s: %s. The next save there tries again",
                self._location.display,
                "its index for other software may be missing, and files of the old checkpoint may be left"
                if self._overwrite == "keep-other-files"
                else "the old checkpoint cannot be removed",
                error,
            )

    def _publish(self, root: bytes | None) -> str | None:
        """Rename the hidden directory, exchange it with the old checkpoint, or move its objects into the old directory.

        The rename fails if an old checkpoint exists, and the exchange fails if it does not. Both are tried again if
        another process deletes the old checkpoint between them.

        Returns:
            The name of the hidden directory to delete, which after an exchange contains the old checkpoint. None if
            no directory has to be deleted.
        """
        name = self._location.name
        for left in reversed(range(_PUBLISH_TRIES)):
            # After this process lost its lease, another process may have removed files from the hidden directory.
            self.check()
            try:
                # With "keep-other-files", do not set attributes here: `PlacedObjects.commit` sets those of each file.
                # Until then, other users must not be able to read the new files.
                if self._overwrite != "keep-other-files" or not self._location.store.list_names():
                    self._directories.keep_attributes(name, self._hidden)
                self._directories.rename(self._hidden, name)
                return None
            except ConditionFailedError as error:
                if refuse_to_replace(self._location, self._overwrite, self._find_foreign) == "nothing":
                    if left:
                        continue
                    raise SaveLostError(
                        f"cannot commit {self._location.display}: its path has an entry that is neither a file nor a "
                        "directory, such as a named pipe; remove it and save again"
                    ) from error
            except ObjectNotFoundError as error:
                raise SaveLostError(
                    f"{self._hidden}, next to {self._location.display}, was removed during the save; save again"
                ) from error
            try:
                return self._replace(root)
            except (ObjectNotFoundError, ConditionFailedError) as error:
                if not left:
                    raise SaveLostError(
                        f"cannot replace {self._location.display}: other processes deleted or replaced it "
                        f"{_PUBLISH_TRIES} times during the commit; save again when no other process changes it"
                    ) from error
        raise AssertionError("the last attempt returns or raises")

    def _replace(self, root: bytes | None) -> str | None:
        """Replace the old checkpoint by the new checkpoint. Return the hidden directory to delete, if any.

        If the file system cannot exchange directories, ``overwrite="non-atomic"``, ``"best-effort"`` and
        ``"with-other-files"`` allow two renames instead.

        Raises:
            ConditionFailedError, ObjectNotFoundError: another process deleted or replaces the old checkpoint.
        """
        name = self._location.name
        if self._overwrite == "keep-other-files":
            self._place(root)
            return self._hidden
        try:
            self._directories.exchange(self._hidden, name)
            return self._hidden
        except AtomicityError as error:
            if self._overwrite not in ("non-atomic", "best-effort", "with-other-files"):
                raise no_exchange(self._location) from error
        return self._method.aside(name).replace(self.store, self._hidden)

    def _place(self, root: bytes | None) -> None:
        """Move the objects into the directory of the old checkpoint, whose other files stay."""
        display, new = self._location.display, read_root(self.store)
        if root is None or self._claim is None:
            raise CheckpointExistsError(
                f"{display} has other files, and a checkpoint without checkpoint.json cannot be committed next to "
                "them: copy it to another location, or with a layout"
            )
        foreign: Collection[str] = ()
        if root_bytes(self._location.store) is None and (owns := self._find_foreign(self._location)) is not None:
            # The commit removes these files, because the other software would still load the old values from them.
            foreign = owns(list(self._location.store.list()))
        index = new.index if isinstance(new, Root) else ""
        self.objects.commit(root, index, self._claim.save_id, display, foreign)

    @property
    def objects(self) -> PlacedObjects:
        """The objects of this save, to be moved into the directory of the old checkpoint."""
        return self._method.placed_objects(self._location.name, self._hidden)

    def abort(self) -> None:
        """See `Transaction`."""
        if not self.ended:
            try:
                self.objects.settle()
                self._directories.delete_directory(self._hidden)
            finally:
                self.leave()

    def leave(self) -> None:
        """See `Transaction`."""
        if not self.ended:
            self.ended = True
            try:
                self._held.close()
            except StorageError as error:
                # Only a warning, because the save may have committed. The lock ends with this process.
                logger.warning("the directory of the save to %s cannot be unlocked: %s", self._location.display, error)

    def leave_if_empty(self) -> None:
        """Release the lock. Remove the directory if it is empty, because it was created only to be locked."""
        try:
            if not self.store.list_names():
                self._directories.delete_directory(self._hidden)
        finally:
            self.leave()


def _has_other_root(location: Location, root: bytes | None) -> bool:
    """Return True if a location certainly has another root than `root`, or has no files if `root` is None."""
    try:
        if root is None:
            return not location.store.list_names()
        return root_bytes(location.store) != root
    except StorageError:
        return False


class RenameMethod(CommitMethod):
    """The commit method of storage with real directories."""

    replaces_atomically = True
    claims_by_root = False

    def __init__(self, directory: StorageBackend, support: StorageSupport) -> None:
        """Create the method of a directory.

        Args:
            directory: the storage, opened at the directory.
            support: remembers what each storage supports.
        """
        self._directory = directory
        self._support = support
        self.directories = cast(AtomicDirectories, directory)

    def refuse_place(self, location: Location) -> PlaceLimits:
        """See `CommitMethod`."""
        limits = self.directories.limits(location.name)
        expect_place(location, limits)
        return limits

    def begin(
        self,
        location: Location,
        claim: Claim,
        overwrite: Overwrite,
        find_foreign: FindForeign = none_foreign,
        *,
        resume: bool = False,
    ) -> Transaction:
        """See `CommitMethod`."""
        wait_for_saves_to(location.identity)
        limits = self.refuse_place(location)
        self.restore(location.name)  # first, because the check below must see the old checkpoint
        hidden = name_of_save(location.name, claim.save_id)
        replaces = refuse_to_replace(location, overwrite, find_foreign) == "checkpoint"
        if replaces:
            refuse_other_spelling(location, "save to")
            if overwrite == "with-other-files":
                from ckptcore.commit.contents import warn_of_other_files  # other saves do not need it

                warn_of_other_files(location, find_foreign)
        self._sweep_except(location, hidden if resume else None)
        lock = self._lock_for(location, hidden, waits=resume)
        transaction = RenameTransaction(
            location, self, hidden, lock, limits, overwrite, find_foreign, claim, is_new=not resume
        )
        try:
            if resume:
                # A killed process with this save id may have begun to move objects.
                transaction.objects.settle()
            # The new files must not be readable by users who may not read the old files.
            self.directories.hide_from_others(location.name, hidden)
            features = self.features(hidden, limits)
            if replaces and overwrite is True:
                transaction.expect_exchange()
            elif replaces and overwrite in ("best-effort", "with-other-files") and not features.exchanges:
                self._support.say_once(self._directory, _TWO_RENAMES)
        except BaseException:
            if resume:
                transaction.leave()
            else:
                transaction.abort()
            raise
        return transaction

    def begin_file(self, location: Location, claim: Claim, *, replaces: bool) -> FileTransaction:
        """See `CommitMethod`."""
        from ckptcore.commit.single_file import PlacedFile  # only files need it

        wait_for_saves_to(location.identity)
        limits = self.refuse_place(location)
        hidden = name_of_save(location.name, claim.save_id)
        self._sweep_except(location)
        lock = self._lock_for(location, hidden)
        inner = RenameTransaction(location, self, hidden, lock, limits, claim=claim, is_new=True)
        try:
            return PlacedFile(location, self, hidden, inner, replaces=replaces)
        except BaseException:
            inner.abort()
            raise

    def _lock_for(self, location: Location, hidden: str, *, waits: bool = False) -> _HiddenLock:
        """Lock the hidden directory of a save to a location. See `lock_hidden`.

        Raises:
            SaveLostError: another process has locked it.
        """
        with naming_place(location):
            lock = self.lock_hidden(hidden, waits=waits)
        if lock is None:
            raise SaveLostError(
                f"cannot save to {location.display}: another process is writing there, because it has locked {hidden}; "
                "try again when it has ended"
            )
        return lock

    def features(self, hidden: str, limits: PlaceLimits) -> DirectoryFeatures:
        """Return what the file system supports. `hidden` is a directory that this process has locked."""
        return self._support.features(self._directory, hidden, limits.mount)

    def lock_hidden(self, name: str, *, waits: bool = False) -> _HiddenLock | None:
        """Lock a hidden directory, and create it if needed. Return None if another process has locked it.

        Args:
            name: the name of the directory.
            waits: without locks, wait until the lease of a killed process has expired.
        """
        leases = self._support.leases(self._directory) if self._support.lacks_locks else None
        if leases is None:
            try:
                locked = self.directories.lock_directory(name)
            except AtomicityError:
                leases = self._support.leases(self._directory)
                if leases is None:
                    raise
            else:
                if locked is None:
                    return None
                with ExitStack() as stack:
                    stack.enter_context(locked)
                    # A host that mounts this file system without locks may have a lease of the same directory.
                    entries = self._directory.list_names(f"{INTERNAL_DIRECTORY}/saving")
                    if any(entry.startswith(f"{save_of_hidden(name)}.") for entry in entries):
                        return self._with_lease(name, stack.pop_all(), waits=waits)
                    return _HiddenLock(stack.pop_all())
        leased = leases.lock_directory(name, waits=waits)
        if leased is None:
            return None
        try:
            make_directory(self._directory, name)  # after the lease: a sweep deletes a directory without a lease
        except BaseException:
            leased.close()
            raise
        return _HiddenLock(leased, leased.check)

    def _with_lease(self, name: str, locked: ExitStack, *, waits: bool) -> _HiddenLock | None:
        """Add a lease to the kernel lock of a hidden directory, for hosts that may not see the lock.

        Such a host has, or had, a lease of the directory. Returns None if its lease is still valid.
        """
        from ckptcore.commit.leased_locks import LeasedLocks  # plain saves do not need it

        with locked as stack:
            leased = LeasedLocks(self._directory, name).lock_directory(name, waits=waits)
            if leased is None:
                return None
            stack.enter_context(leased)
            return _HiddenLock(stack.pop_all(), leased.check)

    def lock_partial(self, location: Location) -> RenameTransaction:
        """Lock the hidden directory of a partial save, and return its transaction. Creates the directory if necessary.

        Raises:
            SaveLostError: another process has locked it.
        """
        hidden = name_of_partial(location.name)
        limits = self.directories.limits(location.name)
        lock = self.lock_hidden(hidden, waits=True)
        if lock is None:
            raise SaveLostError(
                f"{location.display}: another process is writing a session of this partial save, or finalizes or "
                "deletes it. Only one session can run at a time: wait for it and call again. Nothing was changed"
            )
        return RenameTransaction(location, self, hidden, lock, limits)

    def store_of(self, location: Location, save_id: str, *, is_new: bool = False) -> StorageBackend:
        """See `CommitMethod`."""
        hidden = name_of_save(location.name, save_id)
        return (
            NewDirectory(location.parent, hidden, location.display) if is_new else subdirectory(location.parent, hidden)
        )

    def read_table(self, location: Location) -> bytes | None:
        """See `CommitMethod`."""
        try:
            return subdirectory(location.parent, name_of_partial(location.name)).get(PARTIAL_KEY)
        except ObjectNotFoundError:
            return None

    def is_committed(self, name: str) -> bool | None:
        """See `CommitMethod`. Claims are in hidden directories, so a root is never a claim."""
        try:
            subdirectory(self._directory, name).size(ROOT_KEY)
        except ObjectNotFoundError:
            return None
        return True

    def remove(self, location: Location, *, other_files: bool = False) -> None:
        """See `CommitMethod`."""
        from ckptcore.commit.contents import expect_removable  # only deletions need it

        self.refuse_place(location)
        expect_removable(location, other_files=other_files)
        if subdirectory(self._directory, name_of_replaced(location.name)).list_names():
            self.aside(location.name).discard()
        try:
            self.discard(location.name, location.name)
        except ObjectNotFoundError as error:
            raise CheckpointNotFoundError(
                f"there is nothing at {location.display} to delete: another process deleted it at the same time"
            ) from error

    def remove_sessions(self, location: Location) -> bool:
        """See `CommitMethod`."""
        transaction = self.lock_partial(location)
        try:
            transaction.store.size(PARTIAL_KEY)
            self.discard(location.name, name_of_partial(location.name))
        except ObjectNotFoundError:
            transaction.leave_if_empty()
            return False
        finally:
            transaction.leave()
        return True

    def discard(self, name: str, directory: str) -> None:
        """Rename a directory to a new hidden name, and delete it. No process restores or commits this name.

        If the process is killed, the next save deletes the rest. A directory in a lower layer of overlayfs cannot be
        renamed (``EXDEV``). Then the root is deleted first, so that a partly deleted directory is not a checkpoint.

        Args:
            name: the name of the checkpoint.
            directory: the name of the directory.

        Raises:
            ObjectNotFoundError: it does not exist.
        """
        hidden = name_of_save(name, new_save_id())
        try:
            self.directories.rename(directory, hidden)
        except StorageError as error:
            if error.errno != errno.EXDEV:
                raise
            subdirectory(self._directory, directory).delete([PARTIAL_KEY, ROOT_KEY])
            hidden = directory
        self.directories.delete_directory(hidden)

    def restore(self, name: str) -> bool:
        """See `CommitMethod`."""
        aside = name_of_replaced(name)
        if not subdirectory(self._directory, aside).list_names() or self.is_committed(name):
            return False
        before = subdirectory(self._directory, name).list_names()
        self._delete_unlocked(aside)
        return subdirectory(self._directory, name).list_names() not in (before, [])

    def sweep(self, location: Location) -> None:
        """See `CommitMethod`."""
        self._sweep_except(location, name_of_partial(location.name))

    def sweep_names(self, names: Iterable[str]) -> None:
        """See `CommitMethod`. Tries to delete all directories, and then raises the first error."""
        failed: StorageError | None = None
        for name in names:
            try:
                self._delete_unlocked(name)
            except StorageError as error:
                logger.warning("cannot remove the directory of a killed save: %s", error)
                failed = failed or error
        if failed is not None:
            raise failed

    def is_changing(self, location: Location) -> bool:
        """See `CommitMethod`. Removes the directories of killed saves."""
        names = [entry.removesuffix("/") for entry in location.parent.list_names() if entry.endswith("/")]
        locked = [name for name in names if is_save_of(location.name, name) and not self._sweep(name)]
        return bool(locked)

    def announce_deletion(self, location: Location, locks: Locks, pin: str) -> Lock | None:
        """See `CommitMethod`. Claims the location with an empty hidden directory, as a save does."""
        from ckptcore.commit.locks import Lock  # plain saves and loads do not need it

        held = None
        while held is None:  # a save that sweeps may have locked the directory that was just created
            hidden = name_of_save(location.name, new_save_id())
            try:
                held = self.lock_hidden(hidden)
            except StorageFullError:
                return None if locks.pinned(pin) else locks.unannounced_deletion(pin)
        with ExitStack() as stack:
            stack.enter_context(held.lock)
            stack.callback(self.directories.delete_directory, hidden)
            if locks.pinned(pin):
                return None
            return Lock(f"the deletion of {location.display}", check=held.check, release=stack.pop_all().close)

    def locks(self, display: str = "", lease_seconds: float = 60.0, clock: Clock | None = None) -> Locks:
        """See `CommitMethod`."""
        # Plain saves and loads need neither.
        from ckptcore.commit.directory_locks import DirectoryLocks
        from ckptcore.commit.leased_locks import LeasedLocks

        has_locks = self._support.leases(self._directory) is None
        return (DirectoryLocks if has_locks else LeasedLocks)(self._directory, display, lease_seconds, clock)

    def _sweep_except(self, location: Location, kept: str | None = None) -> None:
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
                if self.read_table(location) is None:
                    self._sweep(partial)  # without a table: the first session was killed
                if self.read_table(location) is not None:  # read again, because a session may have begun meanwhile
                    raise partial_exists(location)
            elif is_save_of(location.name, name):
                self._sweep(name)

    def _sweep(self, name: str) -> bool:
        """Delete a hidden directory, unless a process has locked it. Return False if it is locked.

        A directory of another user stays if this user may not change it. The result is then True.
        """
        try:
            return self._delete_unlocked(name)
        except StorageError as error:
            if error.errno not in _DENIED:
                raise
            logger.warning("%s, the directory of a save by another user, stays: %s", name, error)
            return True

    def _delete_unlocked(self, name: str) -> bool:
        """Delete a hidden directory, unless a process has locked it. Return False if it is locked.

        An old checkpoint that a killed process was replacing is renamed back instead, if its original name is free. It
        is deleted only if another checkpoint has been committed under that name. A partial save with a session table
        stays.
        """
        try:
            held = self.lock_hidden(name)
        except StorageFullError:
            if (leases := self._support.leases(self._directory)) is None:
                raise
            lock = leases.unannounced_directory(name)
            held = None if lock is None else _HiddenLock(lock, lock.check)
        if held is None:
            return False
        checkpoint = saved_to(name)
        assert checkpoint is not None, "hidden directories have this form"
        with held.lock:
            if name == name_of_replaced(checkpoint):
                if self.aside(checkpoint).restore():
                    return True
            elif name == name_of_partial(checkpoint):
                with suppress(ObjectNotFoundError):
                    subdirectory(self._directory, name).size(PARTIAL_KEY)
                    return True  # a session has begun and ended before this process had the lock
            else:
                self.placed_objects(checkpoint, name).settle()
            logger.info("removing the directory of a killed save: %s", name)
            # The save may still run: its lease expired, or its lock was lost with a mount. `discard` renames the
            # directory first, so that no process can commit or restore it while it is incomplete.
            with suppress(ObjectNotFoundError):  # the save has committed, and so renamed the directory
                self.discard(checkpoint, name)
        return True

    def placed_objects(self, name: str, hidden: str) -> PlacedObjects:
        """Return the objects of a save that move into the directory of the checkpoint."""
        from ckptcore.commit.overwriting import PlacedObjects  # plain saves do not need it

        return PlacedObjects(self._directory, self.directories, name, hidden)

    def aside(self, name: str) -> AsideCheckpoint:
        """Return the checkpoint that a save with two renames sets aside."""
        from ckptcore.commit.overwriting import AsideCheckpoint  # plain saves do not need it

        return AsideCheckpoint(self._directory, self, name)
