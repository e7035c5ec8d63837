"""Claims of sessions: who may write into a checkpoint that is filled in several sessions, one after the other.

Storage with real directories: a hidden sibling directory, with a name that says that it is to stay, is held by a lock while a
session writes; an object in it says which sessions there are. Other storage: the same stands in the place of the root, and each change
of it is on condition of what was there. There the next session takes over from one that is not complete, as a save does from a dead one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Final, Protocol, TypeVar

from ckptcore.commit.commit import Claim
from ckptcore.commit.conditions import Conditions
from ckptcore.commit.directory_claims import (
    PARTIAL_KEY,
    DirectoryClaim,
    partial_name,
    partial_store,
    remove_hidden,
)
from ckptcore.commit.fences import FencedStore
from ckptcore.commit.location import Location
from ckptcore.commit.object_claims import ObjectClaim, find_debris, find_root
from ckptcore.commit.occupants import find_occupant, parse_root, refuse_to_replace
from ckptcore.commit.root import ROOT_KEY, PartialSave, Session
from ckptcore.commit.root_json import encode_partial, is_partial
from ckptcore.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    ObjectNotFoundError,
    SaveLostError,
)
from ckptcore.protocols import AtomicDirectories, StorageBackend

__all__ = [
    "PlannedSession",
    "SessionClaim",
    "claim_session",
    "claim_to_finalize",
    "expect_no_checkpoint",
    "find_partial",
    "read_unchanged",
    "remove_debris",
    "remove_partial",
    "session_store",
    "sessions_store",
]

_OWN_KEYS: Final = (ROOT_KEY, PARTIAL_KEY)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PlannedSession:
    """A session that can go ahead.

    Attributes:
        before: what stood in the place of the root when it was looked at; None: nothing. The leader has it.
        partial: what is to stand there while the session writes.
        kept: the keys of what complete sessions wrote. The leader has them.
    """

    before: PartialSave | None
    partial: PartialSave
    kept: frozenset[str]


class SessionClaim(Protocol):
    """A session's right to write."""

    @property
    def store(self) -> StorageBackend:
        """Where its objects go."""
        ...

    def complete(self, session: Session) -> None:
        """Make what was written count; durable where the storage was opened so.

        Raises:
            SaveLostError: another session, or a deletion, took the place over. Nothing of this one counts.
            CommitUnknownError: whether it counts cannot be told.
        """
        ...

    def abort(self) -> None:
        """Remove what was written; all of the partial save, where no session is complete. Does nothing once it is complete."""
        ...


def find_partial(location: Location) -> PartialSave | None:
    """The partial save at a location that is not finalized; None where there is none.

    Raises:
        CorruptCheckpointError, UnsupportedVersionError: it cannot be read.
    """
    store = location.store
    if isinstance(location.parent, AtomicDirectories):
        store = partial_store(location)
        try:
            data = store.get(PARTIAL_KEY)
        except ObjectNotFoundError:
            return None
    else:
        found = find_root(store)
        if found is None or not is_partial(found[0]):
            return None
        data = found[0]
    partial = parse_root(store, data, location.display)
    if not isinstance(partial, PartialSave):
        raise CorruptCheckpointError(
            f"{PARTIAL_KEY} beside {location.display} is none of a partial save", key=PARTIAL_KEY
        )
    return partial


def sessions_store(location: Location) -> StorageBackend:
    """Where sessions write, to read what they wrote."""
    return partial_store(location) if isinstance(location.parent, AtomicDirectories) else location.store


def session_store(location: Location, partial: PartialSave, conditions: Conditions) -> StorageBackend:
    """Where the owner of a partial save writes that another process of the job claimed."""
    if isinstance(location.parent, AtomicDirectories):
        return partial_store(location)
    return FencedStore(conditions.open(location), partial.save_id, owner=partial.owner)


def claim_session(location: Location, planned: PlannedSession, conditions: Conditions) -> SessionClaim:
    """Claim a location for a session.

    Raises:
        CheckpointExistsError: if something is there that is no partial save.
        SaveLostError: another session began or ended since the place was looked at, or is under way where that can be told.
        AtomicityError: if the storage keeps no conditions.
    """
    if isinstance(location.parent, AtomicDirectories):
        return _DirectorySession(location, location.parent, planned)
    return _ObjectSession(location, planned, conditions)


def claim_to_finalize(
    location: Location, examine: Callable[[PartialSave, StorageBackend], T], conditions: Conditions
) -> tuple[PartialSave, Claim, T]:
    """The partial save at a location, the right to commit it, and what was found in it. To leave the claim leaves the sessions.

    Args:
        location: where it is.
        examine: is given what stands in the place of the root, and where sessions wrote. What it raises ends this, and where nobody can
            tell whether a session is under way none is disturbed: the claim comes after it, if nothing changed since.
        conditions: what is known of those of storages.

    Raises:
        CheckpointNotFoundError: there is none.
        CheckpointExistsError: a checkpoint stands in its place.
        SaveLostError: a session is under way, or began or ended meanwhile.
    """
    if isinstance(location.parent, AtomicDirectories):
        name = partial_name(location)
        if find_partial(location) is None:
            raise _nothing(location)
        expect_no_checkpoint(location)
        claim = DirectoryClaim(location, location.parent, name, False, continued=name)
        try:
            partial = find_partial(location)  # again, now that nobody else changes it
            if partial is not None:
                return partial, claim, examine(partial, claim.store)
        except BaseException:
            claim.leave()
            raise
        claim.abort()  # the lock made the directory again
        raise _nothing(location)
    location = conditions.open(location)
    found = find_root(location.store)
    before = None if found is None else parse_root(location.store, found[0], location.display)
    if not isinstance(before, PartialSave):
        raise _nothing(location)
    with read_unchanged(location, before):
        examined = examine(before, location.store)
    owned = before.own_by_next(1)
    try:
        claimed = ObjectClaim(location, owned, found, conditions)
    except SaveLostError as error:
        raise _changed(location) from error
    if before.owner is not None:
        claimed.store.abort_uploads()
    return owned, claimed, examined


@contextmanager
def read_unchanged(location: Location, partial: PartialSave | None) -> Iterator[None]:
    """Let what is missing be no damage where sessions go on, or are finalized or deleted, while they are read without a claim.

    Args:
        location: where they are.
        partial: what was found there before.

    Raises:
        SaveLostError: something else stands there by now.
    """
    try:
        yield
    except CorruptCheckpointError as error:
        if find_partial(location) != partial:
            raise _changed(location) from error
        raise


def expect_no_checkpoint(location: Location) -> None:
    """Do nothing where sessions may write, or be finalized.

    Raises:
        CheckpointExistsError: something stands there; on object stores also a partial save.
    """
    if refuse_to_replace(location, True) == "checkpoint":
        raise _occupied(location)


def remove_partial(location: Location, save_id: str) -> bool:
    """Remove a partial save from a storage with real directories; elsewhere it goes as any checkpoint does.

    Args:
        location: where it is.
        save_id: a new one, for the name under which it is hidden first.

    Returns whether it was there: it may have been finalized or deleted since somebody looked.

    Raises:
        SaveLostError: a session is under way.
    """
    if not isinstance(location.parent, AtomicDirectories):
        return False
    name = partial_name(location)
    lock = location.parent.lock_directory(name)
    if lock is None:
        raise _under_way(location)
    with lock:
        store = partial_store(location)
        try:
            store.size(PARTIAL_KEY)
        except ObjectNotFoundError:
            _remove_empty(location.parent, store, name)
            return False
        remove_hidden(location, location.parent, name, save_id)
    return True


def remove_debris(store: StorageBackend, kept: Collection[str]) -> None:
    """Remove what no complete session wrote; the claim on the store is this process's."""
    debris = find_debris(list(store.list()), {*kept, *_OWN_KEYS})
    if debris:
        store.delete(debris)


class _DirectorySession:
    """See `SessionClaim`."""

    def __init__(self, location: Location, directories: AtomicDirectories, planned: PlannedSession) -> None:
        self._location = location
        self._directories = directories
        self._name = partial_name(location)
        self._planned = planned
        self._done = False
        lock = directories.lock_directory(self._name)
        if lock is None:
            raise _under_way(location)
        self._lock: AbstractContextManager[None] = lock
        self._lock.__enter__()
        try:
            self.store = partial_store(location)
            expect_no_checkpoint(location)  # now that nobody finalizes
            if find_partial(location) != planned.before:
                raise _changed(location)
            self.store.delete([ROOT_KEY])  # of one that died as it finalized
            if planned.before is None or planned.before.owner is not None:
                remove_debris(self.store, planned.kept)  # before anything is written: it may be what fills the disk
            self.store.put(PARTIAL_KEY, encode_partial(planned.partial))
        except BaseException:
            try:
                _remove_empty(directories, self.store, self._name)
            finally:
                self._lock.__exit__(None, None, None)
            raise

    def complete(self, session: Session) -> None:
        expect_no_checkpoint(self._location)  # a save that had begun before does not see sessions
        self._directories.sync_directory(self._name)
        self.store.put(PARTIAL_KEY, encode_partial(self._planned.partial.complete(session)))
        self._done = True
        self._lock.__exit__(None, None, None)

    def abort(self) -> None:
        if self._done:
            return
        self._done = True
        try:
            if not self._planned.partial.sessions:
                self._directories.delete_directory(self._name)
                return
            remove_debris(self.store, self._planned.kept)  # first: where the disk is full nothing can be put
            self.store.put(PARTIAL_KEY, encode_partial(replace(self._planned.partial, owner=None)))
        finally:
            self._lock.__exit__(None, None, None)


class _ObjectSession:
    """See `SessionClaim`."""

    def __init__(self, location: Location, planned: PlannedSession, conditions: Conditions) -> None:
        location = conditions.open(location)
        self._planned = planned
        found = find_root(location.store)
        before = None if found is None or not is_partial(found[0]) else parse_root(location.store, found[0])
        if before != planned.before:
            raise _changed(location)
        left = "nothing" if before is not None else find_occupant(location, None if found is None else found[0], True)
        if left == "checkpoint":
            raise _occupied(location)
        self._claim = ObjectClaim(location, planned.partial, found, conditions)
        self.store: StorageBackend = self._claim.store
        if left != "nothing":
            self._claim.clear()
        elif planned.before is not None and planned.before.owner is not None:
            self._claim.store.abort_uploads()
            remove_debris(self.store, planned.kept)

    def complete(self, session: Session) -> None:
        self._claim.replace(encode_partial(self._planned.partial.complete(session)))

    def abort(self) -> None:
        if not self._planned.partial.sessions:
            self._claim.abort()
            return
        with suppress(SaveLostError):  # what is there then belongs to another session
            self._claim.give_back(self._planned.kept, encode_partial(replace(self._planned.partial, owner=None)))


def _remove_empty(directories: AtomicDirectories, store: StorageBackend, name: str) -> None:
    """Remove a directory that nothing but its lock made; the lock is this process's."""
    if not store.list_names():
        directories.delete_directory(name)


def _occupied(location: Location) -> CheckpointExistsError:
    return CheckpointExistsError(
        f"{location.display} holds a checkpoint, and a partial save replaces none: save to another location, or remove the checkpoint "
        "with ckptcore.delete first. Nothing was changed"
    )


def _under_way(location: Location) -> SaveLostError:
    return SaveLostError(
        f"a session of the partial save to {location.display} is under way in another process, or it is being finalized or deleted: "
        "sessions come one after the other. Nothing was changed; wait for it and call again"
    )


def _changed(location: Location) -> SaveLostError:
    return SaveLostError(
        f"the partial save to {location.display} was changed at the same time: another session began or ended, or it was finalized or "
        "deleted. Look at what is there and call again. Nothing was written"
    )


def _nothing(location: Location) -> CheckpointNotFoundError:
    return CheckpointNotFoundError(
        f"there is no partial save to finalize at {location.display}; it may be finalized already, or never have begun"
    )
