"""CommitMethod: how checkpoints in a directory are begun, committed, removed and locked.

`commit_method` is the only code that asks what kind of storage a directory is in. Storage with real directories commits by
rename and has locks; other storage commits by conditional puts and has leases.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

from ckptcore.commit.conditional_put import ConditionalPutTransaction, find_root, new_claim
from ckptcore.commit.conditions import Conditions
from ckptcore.commit.fences import FencedStore
from ckptcore.commit.occupants import (
    IsForeign,
    Overwrite,
    expect_no_nested,
    find_occupant,
    name_of_partial,
    name_of_save,
    none_is_foreign,
    parse_root,
    refuse_to_replace,
    remove_debris,
)
from ckptcore.commit.rename import (
    RenameTransaction,
    partial_store,
    remove_hidden,
    sweep_beside,
    sweep_directories,
)
from ckptcore.commit.root import PARTIAL_KEY, ROOT_KEY, Claimed, PartialSave, new_save_id
from ckptcore.commit.root_json import HEAD_BYTES, encode_partial, is_claim, is_partial, read_head, summarize_root
from ckptcore.commit.subdirectory import subdirectory
from ckptcore.errors import AtomicityError, ObjectNotFoundError, SaveLostError
from ckptcore.io.background import wait_for_saves_to
from ckptcore.protocols import AtomicDirectories, StorageBackend, Transaction

if TYPE_CHECKING:
    from ckptcore.commit.location import Location
    from ckptcore.commit.sessions import PlannedSession

__all__ = ["CommitMethod", "commit_method"]

T = TypeVar("T")


class CommitMethod(Protocol):
    """How checkpoints in one directory are begun, committed, removed and locked. Any thread.

    Every location that is given to it is in the directory.

    Attributes:
        replaces_atomically: True if a commit can replace a checkpoint, so that one of the two always exists.
        claims_by_root: True if the claim of a save, and the session table of a partial save, are in the place of the root.
    """

    replaces_atomically: bool
    claims_by_root: bool

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
        """Claim a location, and remove what failed saves left. Waits for earlier background saves of this process.

        Args:
            location: the location of the checkpoint.
            claim: the save.
            overwrite: whether a checkpoint is replaced.
            conditions: of the Context.
            is_foreign: recognises checkpoints of other software, which are replaced like ours.
            resume: keep the objects that a process has written under this save id. Without locks such a process may still
                be running, so every process must write the same bytes under the save id.

        Raises:
            CheckpointExistsError: the location has something that is not to be replaced.
            AtomicityError: the storage cannot replace a checkpoint atomically, or has no conditional puts.
            SaveLostError: another process claimed the location.
        """
        ...

    def begin_session(self, location: Location, planned: PlannedSession, conditions: Conditions) -> Transaction:
        """Begin or resume the transaction of a partial save, for one session.

        Raises:
            CheckpointExistsError: the location has something else than a partial save.
            SaveLostError: a session is running, or began or ended since this one was planned.
            AtomicityError: the storage has no conditional puts.
        """
        ...

    def resume_sessions(
        self, location: Location, examine: Callable[[PartialSave, StorageBackend], T], conditions: Conditions
    ) -> tuple[PartialSave, Transaction, T]:
        """Resume the transaction of a partial save, to commit it.

        Args:
            location: the location of the partial save.
            examine: checks the session table and the store of the sessions. An error stops this. Without locks it runs
                before the claim, so that a check that fails disturbs no running session.
            conditions: of the Context.

        Raises:
            CheckpointNotFoundError: there is no partial save.
            CheckpointExistsError: a checkpoint is in its place.
            SaveLostError: a session is running, or began or ended meanwhile.
        """
        ...

    def store_of(
        self, location: Location, save_id: str, conditions: Conditions, *, owner: int | None = None
    ) -> StorageBackend:
        """Return the store of a transaction of another process of the job; `owner` as in `PartialSave`, for a session."""
        ...

    def session_store(self, location: Location) -> StorageBackend:
        """Return the store of the sessions of a partial save, to read."""
        ...

    def read_table(self, location: Location) -> bytes | None:
        """Return the session table of a partial save; None if there is none."""
        ...

    def is_committed(self, name: str) -> bool | None:
        """Return whether a name, or "" for the directory itself, is a committed checkpoint of ours; None without a root.

        One small request. The root is not verified.
        """
        ...

    def remove(self, location: Location, save_id: str, conditions: Conditions) -> None:
        """Remove the checkpoint of ours at a location, so that it never exists in part.

        Args:
            location: the location of the checkpoint.
            save_id: a new save id, for a hidden name or a claim.
            conditions: of the Context.

        Raises:
            CheckpointExistsError: another checkpoint is in its directory. Nothing was removed.
            SaveLostError: it was replaced meanwhile. The new checkpoint stays.
        """
        ...

    def remove_unfinished(self, location: Location, save_id: str, conditions: Conditions) -> None:
        """Remove a claim that is in the place of the root, with its objects, unless it was committed. Arguments as `remove`."""
        ...

    def remove_sessions(self, location: Location, save_id: str) -> bool:
        """Remove a partial save that is beside its location. Return whether it existed; False if `claims_by_root`.

        Raises:
            SaveLostError: a session is running.
        """
        ...

    def sweep(self, location: Location) -> None:
        """Delete the hidden directories of failed saves to a location, and of deletions of it. Lists the directory."""
        ...

    def sweep_names(self, names: Iterable[str]) -> None:
        """Delete hidden directories by name, except those of running saves.

        Raises:
            StorageError
        """
        ...


@functools.lru_cache(maxsize=64)
def _has_directories(kind: type[StorageBackend]) -> bool:
    """Return whether a type of storage has real directories. Cached: the check is slow."""
    return issubclass(kind, AtomicDirectories)


def commit_method(directory: StorageBackend) -> CommitMethod:
    """Return the commit method of a directory of checkpoints.

    Args:
        directory: a storage, opened at the directory.
    """
    if _has_directories(type(directory)):
        return _ByRename(directory, cast(AtomicDirectories, directory))
    return _ByConditionalPut(directory)


class _ByRename:
    """See `CommitMethod`. A hidden directory beside the checkpoint has the objects of a save."""

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
        sweep_beside(location, self._directories, hidden if resume else None)
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
        sweep_beside(location, self._directories, name_of_partial(location.name))
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
            else partial_store(location)
        )

    def session_store(self, location: Location) -> StorageBackend:
        """See `CommitMethod`."""
        return partial_store(location)

    def read_table(self, location: Location) -> bytes | None:
        """See `CommitMethod`."""
        try:
            return partial_store(location).get(PARTIAL_KEY)
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
        remove_hidden(location, self._directories, location.name, save_id)

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
            remove_hidden(location, self._directories, name_of_partial(location.name), save_id)
        finally:
            transaction.leave()
        return True

    def sweep(self, location: Location) -> None:
        """See `CommitMethod`."""
        sweep_beside(location, self._directories, name_of_partial(location.name))

    def sweep_names(self, names: Iterable[str]) -> None:
        """See `CommitMethod`."""
        sweep_directories(self._directories, names)


class _ByConditionalPut:
    """See `CommitMethod`. The root is a claim until the commit replaces it."""

    replaces_atomically = False
    claims_by_root = True

    def __init__(self, directory: StorageBackend) -> None:
        """Create the method."""
        self._directory = directory

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
        location = conditions.open(location)
        found = find_root(location.store)  # with its tag: the claim fails if the root changes after the checks
        replaces = find_occupant(location, None if found is None else found[0], overwrite, is_foreign)
        if replaces == "checkpoint" and overwrite != "non-atomic":
            raise AtomicityError(
                f"{location.display} holds a checkpoint, and this storage cannot replace it atomically; "
                "save to another location, or pass overwrite='non-atomic'. Nothing was changed"
            )
        if replaces == "nothing":
            return ConditionalPutTransaction(location, claim, found, conditions)
        if not resume:
            transaction = ConditionalPutTransaction(location, claim, found, conditions)
            transaction.clear()
            return transaction
        if found is not None and is_claim(found[0]) and summarize_root(found[0]).save_id == claim.save_id:
            return ConditionalPutTransaction(location, claim, found, conditions)
        # Objects of other saves are removed under another claim: this save id never has objects of another save.
        other = ConditionalPutTransaction(location, Claimed(new_save_id(), claim.created), found, conditions)
        other.clear()
        return ConditionalPutTransaction(location, claim, other.root, conditions)

    def begin_session(self, location: Location, planned: PlannedSession, conditions: Conditions) -> Transaction:
        """See `CommitMethod`."""
        from ckptcore.commit import sessions  # only partial saves need it

        location = conditions.open(location)
        found = find_root(location.store)
        data = None if found is None else found[0]
        before = sessions.parse_table(location, data) if data is not None and is_partial(data) else None
        if before != planned.before:
            raise sessions.changed(location)
        left = "nothing" if before is not None else find_occupant(location, data, True)
        if left == "checkpoint":
            raise sessions.occupied(location)
        transaction = ConditionalPutTransaction(location, planned.partial, found, conditions)
        if left != "nothing":
            transaction.clear()
        elif planned.before is not None and planned.before.owner is not None:
            transaction.store.abort_uploads()
            remove_debris(transaction.store, planned.kept)
        return transaction

    def resume_sessions(
        self, location: Location, examine: Callable[[PartialSave, StorageBackend], T], conditions: Conditions
    ) -> tuple[PartialSave, Transaction, T]:
        """See `CommitMethod`."""
        from ckptcore.commit import sessions  # only partial saves need it

        location = conditions.open(location)
        found = find_root(location.store)
        before = None if found is None else parse_root(location.store, found[0], location.display)
        if not isinstance(before, PartialSave):
            raise sessions.nothing(location)
        with sessions.read_unchanged(location, before):
            examined = examine(before, location.store)
        owned = before.own_by_next(1)
        try:
            transaction = ConditionalPutTransaction(location, owned, found, conditions)
        except SaveLostError as error:
            raise sessions.changed(location) from error
        if before.owner is not None:
            transaction.store.abort_uploads()
        return owned, transaction, examined

    def store_of(
        self, location: Location, save_id: str, conditions: Conditions, *, owner: int | None = None
    ) -> StorageBackend:
        """See `CommitMethod`."""
        return FencedStore(conditions.open(location), save_id, owner=owner)

    def session_store(self, location: Location) -> StorageBackend:
        """See `CommitMethod`."""
        return location.store

    def read_table(self, location: Location) -> bytes | None:
        """See `CommitMethod`."""
        found = find_root(location.store)
        return None if found is None or not is_partial(found[0]) else found[0]

    def is_committed(self, name: str) -> bool | None:
        """See `CommitMethod`."""
        try:
            head = read_head(subdirectory(self._directory, name).get(ROOT_KEY, 0, HEAD_BYTES))
        except ObjectNotFoundError:
            return None
        return head is None or head.state == "committed"

    def remove(self, location: Location, save_id: str, conditions: Conditions) -> None:
        """See `CommitMethod`."""
        expect_no_nested(location)
        location = conditions.open(location)
        # Replaced by a claim first: objects without a root may look like a checkpoint of other software.
        ConditionalPutTransaction(location, new_claim(save_id), find_root(location.store), conditions).give_up()

    def remove_unfinished(self, location: Location, save_id: str, conditions: Conditions) -> None:
        """See `CommitMethod`."""
        expect_no_nested(location)
        location = conditions.open(location)
        found = find_root(location.store)
        if found is not None and is_claim(found[0]):
            ConditionalPutTransaction(location, new_claim(save_id), found, conditions).give_up()

    def remove_sessions(self, location: Location, save_id: str) -> bool:
        """See `CommitMethod`. The table is in the place of the root: `remove` removes it."""
        return False

    def sweep(self, location: Location) -> None:
        """See `CommitMethod`. There are no hidden directories."""

    def sweep_names(self, names: Iterable[str]) -> None:
        """See `CommitMethod`. There are no hidden directories."""
