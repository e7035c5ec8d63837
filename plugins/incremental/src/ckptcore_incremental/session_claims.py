"""Claims of partial saves: one session at a time changes the session table, or all sessions are finalized.

On storage with real directories, the session table is in the hidden directory of the partial save. The lock of this
directory excludes other sessions. On other storage, the table is stored under the key of the root and replaced by
compare-and-swap, so that a new session can take over from a failed one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from typing import NamedTuple, TypeVar

from ckptcore.commit.conditional_put import ConditionalPutTransaction
from ckptcore.commit.fenced_store import FencedStore
from ckptcore.commit.location import Location
from ckptcore.commit.method import find_partial
from ckptcore.commit.names import name_of_partial, naming_place
from ckptcore.commit.put_conditions import find_object
from ckptcore.commit.rename import RenameMethod, RenameTransaction
from ckptcore.commit.root import PARTIAL_KEY, ROOT_KEY, PartialSave, Session
from ckptcore.commit.root_json import encode_claim, is_partial
from ckptcore.commit.stored_root import find_existing, parse_root, refuse_to_replace
from ckptcore.commit.subdirectory import subdirectory
from ckptcore.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    SaveLostError,
    converts_errors,
)
from ckptcore.protocols import StorageBackend, Transaction

T = TypeVar("T")


class PlannedSession(NamedTuple):
    """A session that can begin.

    Attributes:
        before: the session table that was read; None if there was none. Only on the leader.
        partial: the session table while the session writes.
        kept: the keys of the objects of complete sessions. Only on the leader.
    """

    before: PartialSave | None
    partial: PartialSave
    kept: frozenset[str]


class OpenSession(ABC):
    """A session with a claim. It ends with `complete` or `abort`.

    Attributes:
        transaction: the transaction of the partial save, begun or resumed.
    """

    transaction: RenameTransaction | ConditionalPutTransaction

    def __init__(self, location: Location, planned: PlannedSession) -> None:
        self._location = location
        self._planned = planned

    def complete(self, session: Session) -> None:
        """Add the session to the session table. The change is durable if the storage was opened durable.

        Raises:
            CheckpointExistsError: another save, which is not a session, has committed a checkpoint at the location.
            SaveLostError: another session or a deletion took over. The session is not added.
            CommitUnknownError: the session may have been added.
        """
        expect_no_checkpoint(self._location, self._planned.partial)
        partial = self._planned.partial
        self._replace(encode_claim(partial._replace(owner=None, sessions=(*partial.sessions, session))))
        self.transaction.leave()

    def abort(self) -> None:
        """Remove the objects of the session, or the whole partial save if no other session is complete."""
        partial = self._planned.partial
        if not partial.sessions:
            self.transaction.abort()
        elif not self.transaction.ended:
            self._restore(encode_claim(partial._replace(owner=None)))

    @abstractmethod
    def _replace(self, table: bytes) -> None:
        """Replace the session table."""

    @abstractmethod
    def _restore(self, table: bytes) -> None:
        """Remove the objects of this session, restore the session table and release the claim."""


class _DirectorySession(OpenSession):
    """A session that has locked the hidden directory of the partial save."""

    def __init__(self, location: Location, planned: PlannedSession, method: RenameMethod) -> None:
        super().__init__(location, planned)
        self._directories = method.directories
        method.refuse_place(location)
        method.restore(location.name)
        with naming_place(location):
            self.transaction: RenameTransaction = method.lock_partial(location)
        try:
            self._begin()
        except BaseException:
            self.transaction.leave_if_empty()
            raise

    def _begin(self) -> None:
        location, planned, store = self._location, self._planned, self.transaction.store
        self._directories.hide_from_others(location.name, name_of_partial(location.name))
        expect_no_checkpoint(location)  # the lock excludes a concurrent `finalize`
        if find_partial(location) != planned.before:
            raise _sessions_changed(location)
        store.delete([ROOT_KEY])  # left by a process that was killed in `finalize`
        if planned.before is None or planned.before.owner is not None:
            remove_unneeded(store, planned.kept)  # first, because the disk may be full
        store.put(PARTIAL_KEY, encode_claim(planned.partial))

    def _replace(self, table: bytes) -> None:
        self._directories.sync_directory(name_of_partial(self._location.name))
        self.transaction.store.put(PARTIAL_KEY, table)

    def _restore(self, table: bytes) -> None:
        try:
            remove_unneeded(self.transaction.store, self._planned.kept)  # first, because the disk may be full
            self.transaction.store.put(PARTIAL_KEY, table)
        finally:
            self.transaction.leave()


class _ObjectSession(OpenSession):
    """A session whose claim is the session table under the key of the root."""

    def __init__(self, location: Location, planned: PlannedSession) -> None:
        super().__init__(location, planned)
        root_object = find_object(location.store, ROOT_KEY)
        data = None if root_object is None else root_object[0]
        before = parse_root(location.store, data, location.display) if data is not None and is_partial(data) else None
        if before != planned.before:
            raise _sessions_changed(location)
        left = "nothing" if before is not None else find_existing(location, data, True)
        if left == "checkpoint":
            raise _checkpoint_exists(location)
        self.transaction: ConditionalPutTransaction = ConditionalPutTransaction(location, planned.partial, root_object)
        if left != "nothing":
            self.transaction.clear()
        elif planned.before is not None and planned.before.owner is not None:
            self.transaction.store.abort_uploads()
            remove_unneeded(self.transaction.store, planned.kept)

    def _replace(self, table: bytes) -> None:
        self.transaction.replace(table)

    def _restore(self, table: bytes) -> None:
        store = self.transaction.store
        self.transaction.leave()
        with suppress(SaveLostError):  # the objects belong to another session now
            store.expect_claim()  # without the claim, the uploads belong to another session
            store.abort_uploads()
            remove_unneeded(store, self._planned.kept, store.written)  # a listing may miss new objects
            self.transaction.replace(table)


def begin_session(location: Location, planned: PlannedSession) -> OpenSession:
    """Begin or resume the transaction of a partial save, for one session.

    Raises:
        CheckpointExistsError: the location has files that do not belong to a partial save.
        SaveLostError: another session is running, or began or ended after this one was planned.
        AtomicityError: the storage has no conditional puts.
    """
    method = location.commit_method
    if isinstance(method, RenameMethod):
        return _DirectorySession(location, planned, method)
    return _ObjectSession(location, planned)


def resume_sessions(
    location: Location, examine: Callable[[PartialSave, StorageBackend], T]
) -> tuple[PartialSave, Transaction, T]:
    """Resume the transaction of a partial save, to commit it.

    Args:
        location: the location of the partial save.
        examine: checks the session table and the store of the sessions. Its errors propagate. On storage without
            locks it runs before the claim, so that a failed check does not stop a running session.

    Raises:
        CheckpointNotFoundError: there is no partial save.
        CheckpointExistsError: the location has a checkpoint.
        SaveLostError: a session is running, or began or ended meanwhile.
    """
    method = location.commit_method
    if isinstance(method, RenameMethod):
        return _resume_in_directory(location, method, examine)
    root_object = find_object(location.store, ROOT_KEY)
    before = None if root_object is None else parse_root(location.store, root_object[0], location.display)
    if not isinstance(before, PartialSave):
        raise _no_sessions(location)
    with read_unchanged(location, before):
        examined = examine(before, location.store)
    owned = before.with_next_owner(1)
    try:
        transaction = ConditionalPutTransaction(location, owned, root_object)
    except SaveLostError as error:
        raise _sessions_changed(location) from error
    if before.owner is not None:
        transaction.store.abort_uploads()
    return owned, transaction, examined


def _resume_in_directory(
    location: Location, method: RenameMethod, examine: Callable[[PartialSave, StorageBackend], T]
) -> tuple[PartialSave, Transaction, T]:
    if find_partial(location) is None:
        raise _no_sessions(location)
    expect_no_checkpoint(location)
    method.sweep(location)
    transaction = method.lock_partial(location)
    try:
        partial = find_partial(location)  # read again: nothing changes it while this process has the lock
        if partial is not None:
            return partial, transaction, examine(partial, transaction.store)
    except BaseException:
        transaction.leave()
        raise
    transaction.abort()  # removes the directory that `lock_partial` has created again
    raise _no_sessions(location)


def session_store(location: Location) -> StorageBackend:
    """Return the store of the sessions of a partial save, for reading."""
    if isinstance(location.commit_method, RenameMethod):
        return subdirectory(location.parent, name_of_partial(location.name))
    return location.store


def store_of_session(location: Location, partial: PartialSave) -> StorageBackend:
    """Return the store of a session that another process of the job began.

    Args:
        location: the location of the partial save.
        partial: the session table while the session writes.
    """
    if isinstance(location.commit_method, RenameMethod):
        return session_store(location)
    return FencedStore(location, partial.save_id, owner=partial.owner)


@converts_errors
def read_unchanged(location: Location, partial: PartialSave | None) -> Iterator[None]:
    """Raise `SaveLostError` instead of `CorruptCheckpointError` if the partial save changed while it was read.

    Args:
        location: the location of the partial save, which is read without a claim.
        partial: the session table that was read before.

    Raises:
        SaveLostError: the table has changed, so missing objects do not mean damage.
    """
    try:
        yield
    except CorruptCheckpointError as error:
        if find_partial(location) != partial:
            raise _sessions_changed(location) from error
        raise


def expect_no_checkpoint(location: Location, partial: PartialSave | None = None) -> None:
    """Refuse to write or finalize sessions at the location of a checkpoint.

    Args:
        location: the location of the partial save.
        partial: the session table; None if there is none. If it is stored under the key of the root, there is no
            checkpoint.

    Raises:
        CheckpointExistsError
    """
    if partial is not None and not isinstance(location.commit_method, RenameMethod):
        return
    if refuse_to_replace(location, True) == "checkpoint":
        raise _checkpoint_exists(location)


def remove_unneeded(store: StorageBackend, kept: Collection[str], unlisted: Collection[str] = ()) -> None:
    """Remove the objects of a partial save, except `kept`, the root and the session table.

    Objects of nested checkpoints stay. Only the owner of the partial save may call this.

    Args:
        store: the store of the sessions.
        kept: the keys of objects that must stay.
        unlisted: keys that a listing may miss.
    """
    keys = {*store.list(), *unlisted}
    below = tuple([key.removesuffix(ROOT_KEY) for key in keys if key.endswith(f"/{ROOT_KEY}")])
    kept = {*kept, ROOT_KEY, PARTIAL_KEY}
    if unneeded := sorted([key for key in keys if key not in kept and not key.startswith(below)]):
        store.delete(unneeded)


def _checkpoint_exists(location: Location) -> CheckpointExistsError:
    return CheckpointExistsError(
        f"{location.display} holds a checkpoint, which a partial save cannot replace: save to another location, or "
        "delete the checkpoint with ckptcore.delete first. Nothing was changed"
    )


def _sessions_changed(location: Location) -> SaveLostError:
    return SaveLostError(
        f"{location.display}: the partial save was changed at the same time: another session began or ended, or it "
        "was finalized or deleted. Check the location and call again. Nothing was written"
    )


def _no_sessions(location: Location) -> CheckpointNotFoundError:
    return CheckpointNotFoundError(
        f"there is no partial save to finalize at {location.display}: it was finalized already, or has no session yet"
    )
