"""Commits by conditional puts: create the root as a claim, and replace it if it is still the claim.

Every change of the root has the tag of the previous one as its condition, so one of two concurrent changes fails.
After a failed change the root is read: the change may have happened, and its answer been lost.
"""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Final, TypeVar

from ckptcore.commit.conditions import Conditions, refuse_conditions
from ckptcore.commit.fences import FencedStore
from ckptcore.commit.method import (
    CommitMethod,
    PlannedSession,
    checkpoint_exists,
    no_sessions,
    parse_table,
    read_unchanged,
    sessions_changed,
)
from ckptcore.commit.root import ROOT_KEY, Claimed, PartialSave, new_save_id
from ckptcore.commit.root_json import (
    HEAD_BYTES,
    encode_claim,
    encode_partial,
    is_claim,
    is_partial,
    read_head,
)
from ckptcore.commit.subdirectory import subdirectory
from ckptcore.commit.target import (
    IsForeign,
    Overwrite,
    expect_no_nested,
    find_debris,
    find_existing,
    is_claimed_by,
    none_is_foreign,
    parse_root,
    remove_debris,
)
from ckptcore.errors import (
    AtomicityError,
    CommitUnknownError,
    ConditionFailedError,
    ObjectNotFoundError,
    SaveLostError,
    StorageError,
    StorageFullError,
)
from ckptcore.io.background import wait_for_saves_to
from ckptcore.protocols import IF_ABSENT, IfTag, PutCondition, StorageBackend, Transaction

if TYPE_CHECKING:
    from ckptcore.commit.leases import Clock
    from ckptcore.commit.location import Location
    from ckptcore.commit.locks import Locks

__all__ = ["ConditionalPutMethod", "ConditionalPutTransaction", "find_root", "new_claim"]

logger = logging.getLogger("ckptcore.commit")

T = TypeVar("T")

_ATTEMPTS: Final = 5
"""Attempts to put a root while the storage reports another tag than it has."""


class ConditionalPutTransaction:
    """A transaction whose claim is in the place of the root, with the tag that replaces it. See `Transaction`."""

    def __init__(
        self,
        location: Location,
        claimed: Claimed | PartialSave,
        found: tuple[bytes, str] | None,
        conditions: Conditions,
    ) -> None:
        """Put the claim in the place of the root.

        Args:
            location: the location of the checkpoint, as `Conditions.open` returned it.
            claimed: the save; of a partial save, the session table with this process as its owner.
            found: the bytes and the tag of the present root; None if there is none.
            conditions: of the Context.

        Raises:
            SaveLostError: the root has changed.
            AtomicityError: the storage does not support conditional puts; nothing was changed.
            StorageError: the claim may have been put; then it is the claim of a failed save.
        """
        self._done = False
        self._claimed = claimed
        self._claim = _encode(claimed)
        if found is not None:
            location, tag = conditions.try_out(location, *found)
            self._open(location)
            self._tag = self._put_claim(IfTag(tag))
            return
        self._open(location)
        self._tag = self._put_claim(IF_ABSENT)
        try:
            # Only now does a root exist to try conditions with.
            location, self._tag = conditions.try_out(location, self._claim, self._tag)
        except (AtomicityError, StorageError):
            self.abort()
            raise
        self._open(location)

    def _open(self, location: Location) -> None:
        self._location = location
        self._roots = location.store
        owner = self._claimed.owner if isinstance(self._claimed, PartialSave) else None
        self.store = FencedStore(location, self._claimed.save_id, owner=owner)

    def _put_claim(self, condition: PutCondition) -> str:
        try:
            return self._roots.put(ROOT_KEY, self._claim, condition=condition)
        except AtomicityError as error:
            raise refuse_conditions(self._location, f"its storage cannot put on conditions: {error}") from error
        except StorageError as error:
            # The put may have succeeded, and its answer been lost.
            tag = self._own_tag(self._claim)
            if tag is not None:
                return tag
            if not isinstance(error, ConditionFailedError | ObjectNotFoundError):
                raise
            raise SaveLostError(
                f"another save claimed {self._location.display} at the same time; save again"
            ) from error

    def _own_tag(self, root: bytes) -> str | None:
        """Return the tag of the root if it has these bytes; None if it has others, or cannot be read."""
        try:
            found = find_root(self._roots)
        except StorageError:
            return None
        return found[1] if found is not None and found[0] == root else None

    @property
    def root(self) -> tuple[bytes, str]:
        """The bytes and the tag of the claim."""
        return self._claim, self._tag

    def show_claim(self) -> None:
        """See `Transaction`. The claim is visible from the start."""

    def clear(self) -> tuple[bool, bool]:
        """Remove all objects and unfinished uploads but the claim.

        Returns whether the list showed the claim, so that it is not an old list; and whether nothing else existed.

        Raises:
            StorageError, SaveLostError
        """
        aborted = self.store.abort_uploads()
        if aborted:
            logger.info("aborted %d unfinished uploads of failed saves at %s", aborted, self._location.display)
        listed = set(self.store.list())
        keys = sorted((listed | set(self.store.written)) - {ROOT_KEY})
        if keys:
            logger.info("removing %d objects of failed saves or deletions at %s", len(keys), self._location.display)
            self.store.delete(keys)
        return ROOT_KEY in listed, not keys

    def commit(self, root: bytes | None, parts: Mapping[str, bytes]) -> None:
        """See `Transaction`."""
        for key, data in parts.items():
            self.store.put(key, data)
        if root is None:
            # The checkpoint of the other format is complete now. The check of the claim and its deletion are two steps.
            self.store.delete([ROOT_KEY])
            self._done = True
            return
        self.replace(root)

    def replace(self, root: bytes) -> None:
        """Replace the claim by a root or a session table, and release it. See `Transaction`.

        Raises:
            SaveLostError: another save took the location over.
            CommitUnknownError: it may have been replaced.
            StorageError: it was not replaced and never will be.
        """
        for _ in range(_ATTEMPTS):
            try:
                self._roots.put(ROOT_KEY, root, condition=IfTag(self._tag))
            except StorageError as error:
                if self._has_committed(root, error):
                    break
            else:
                break
        else:
            raise StorageError(
                f"cannot commit {self._location.display}: its storage says {_ATTEMPTS} times that the root has "
                "another tag than it said just before; look whether something else writes there, and save again"
            )
        self._done = True

    def _has_committed(self, root: bytes, error: StorageError) -> bool:
        """Return True if the root was committed although the put was reported as failed; False if it can be put again.

        Raises:
            SaveLostError: the root is that of another save.
            CommitUnknownError: the root cannot be read.
            StorageError: the error; the root was not put and never will be.
        """
        try:
            found = find_root(self._roots)
            if found is not None and found[0] == root:
                return True
            if found is None or found[0] != self._claim:
                self._done = True  # the objects belong to the other save now
                raise SaveLostError(
                    f"another save took {self._location.display} over before this one committed; this one is lost"
                ) from error
            self._tag = found[1]
            if isinstance(error, ConditionFailedError | ObjectNotFoundError):
                return False
            refused = isinstance(error, StorageFullError | PermissionError)
            if not refused and self._arrived_before_another_claim(root):
                return True
        except StorageError as failure:
            self._done = True
            raise CommitUnknownError(
                f"the storage failed as the save to {self._location.display} was committed, and whether it is cannot "
                f"be read: {error}; look at the location before saving again"
            ) from failure
        raise error

    def _arrived_before_another_claim(self, root: bytes) -> bool:
        """Replace the claim, so that a delayed put of the root fails. Return True if the root arrived before."""
        claim = _encode(_another(self._claimed))
        try:
            self._tag = self._roots.put(ROOT_KEY, claim, condition=IfTag(self._tag))
        except StorageError:
            found = find_root(self._roots)
            if found is not None and found[0] == root:
                return True
            if found is None or found[0] != claim:
                raise
            self._tag = found[1]
        self._claim = claim
        return False

    def abort(self) -> None:
        """See `Transaction`."""
        if self._done:
            return
        self._done = True
        with suppress(SaveLostError):  # then the objects belong to the other save
            self.give_up()

    def leave(self) -> None:
        """See `Transaction`."""
        self._done = True

    def restore(self, table: bytes, kept: Collection[str]) -> None:
        """See `Transaction`."""
        if self._done:
            return
        self._done = True
        with suppress(SaveLostError):  # the objects belong to another session by now
            self.store.expect_claim()  # else the uploads are another session's
            self.store.abort_uploads()
            debris = find_debris({*self.store.list(), *self.store.written}, {*kept, ROOT_KEY})
            if debris:
                self.store.delete(debris)
            self.replace(table)

    def give_up(self) -> None:
        """Remove all objects, the claim last: without it, the rest could look like a checkpoint of other software.

        Raises:
            SaveLostError: another save took the location over, and owns the objects.
            StorageError: also if no list shows the claim; then it stays.
        """
        self.store.expect_claim()
        was_listed = False
        for _ in range(_ATTEMPTS):
            # A list may be old. An object that it misses could look like a checkpoint once the claim is gone.
            lists_claim, was_empty = self.clear()
            was_listed |= lists_claim
            if lists_claim and was_empty:
                break
        if not was_listed:
            self.store.expect_claim()  # another process may have removed it
            raise StorageError(
                f"cannot tell whether all that was at {self._location.display} is removed: its storage lists what was "
                f"there before, {_ATTEMPTS} times. A claim stays there, so that nothing takes the rest for a "
                "checkpoint; delete it again later, or save there"
            )
        self.store.delete([ROOT_KEY])


def find_root(store: StorageBackend) -> tuple[bytes, str] | None:
    """Return the bytes and the tag of the root; None if there is none."""
    try:
        return store.get_with_tag(ROOT_KEY)
    except ObjectNotFoundError:
        return None


def _encode(claimed: Claimed | PartialSave) -> bytes:
    return encode_partial(claimed) if isinstance(claimed, PartialSave) else encode_claim(claimed)


def _another(claimed: Claimed | PartialSave) -> Claimed | PartialSave:
    """Return a claim of the same save and owner with other bytes."""
    if isinstance(claimed, PartialSave):
        return claimed._replace(ranks=claimed.ranks + 1)
    return new_claim(claimed.save_id)


def new_claim(save_id: str) -> Claimed:
    """Return a claim of a save. The time is to the microsecond: a claim must differ from the claim that it replaces."""
    return Claimed(save_id, datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds"))


class ConditionalPutMethod(CommitMethod):
    """The commit method of storage without real directories. The root is a claim until the commit replaces it."""

    replaces_atomically = False
    claims_by_root = True

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
        replaces = find_existing(location, None if found is None else found[0], overwrite, is_foreign)
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
        if found is not None and is_claimed_by(found[0], claim.save_id):
            return ConditionalPutTransaction(location, claim, found, conditions)
        # Objects of other saves are removed under another claim: this save id never has objects of another save.
        other = ConditionalPutTransaction(location, Claimed(new_save_id(), claim.created), found, conditions)
        other.clear()
        return ConditionalPutTransaction(location, claim, other.root, conditions)

    def begin_session(self, location: Location, planned: PlannedSession, conditions: Conditions) -> Transaction:
        """See `CommitMethod`."""
        location = conditions.open(location)
        found = find_root(location.store)
        data = None if found is None else found[0]
        before = parse_table(location, data) if data is not None and is_partial(data) else None
        if before != planned.before:
            raise sessions_changed(location)
        left = "nothing" if before is not None else find_existing(location, data, True)
        if left == "checkpoint":
            raise checkpoint_exists(location)
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
        location = conditions.open(location)
        found = find_root(location.store)
        before = None if found is None else parse_root(location.store, found[0], location.display)
        if not isinstance(before, PartialSave):
            raise no_sessions(location)
        with read_unchanged(location, before):
            examined = examine(before, location.store)
        owned = before.own_by_next(1)
        try:
            transaction = ConditionalPutTransaction(location, owned, found, conditions)
        except SaveLostError as error:
            raise sessions_changed(location) from error
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

    def announce_deletion(self, location: Location, locks: Locks, pin: str) -> AbstractContextManager[object] | None:
        """See `CommitMethod`."""
        return locks.intend_deletion(pin)

    def with_conditions(self, conditions: Conditions, url: str) -> StorageBackend:
        """See `CommitMethod`."""
        return conditions.storage(self._directory, url)

    def locks(self, display: str = "", lease_seconds: float = 60.0, clock: Clock | None = None) -> Locks:
        """See `CommitMethod`."""
        from ckptcore.commit.locks import LeasedLocks  # plain saves and loads do not need it

        return LeasedLocks(self._directory, display, lease_seconds, clock)
