"""ConditionalPutMethod: commits by conditional puts, and leases. See `CommitMethod`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, TypeVar

from ckptcore.commit.clocks import SYSTEM_CLOCK, Clock
from ckptcore.commit.conditional_put import ConditionalPutTransaction, find_root, new_claim
from ckptcore.commit.conditions import Conditions
from ckptcore.commit.fences import FencedStore
from ckptcore.commit.holder import check_lease_seconds
from ckptcore.commit.occupants import (
    IsForeign,
    Overwrite,
    expect_no_nested,
    find_occupant,
    none_is_foreign,
    parse_root,
    remove_debris,
)
from ckptcore.commit.root import ROOT_KEY, Claimed, PartialSave, new_save_id
from ckptcore.commit.root_json import HEAD_BYTES, is_claim, is_partial, read_head, summarize_root
from ckptcore.commit.subdirectory import subdirectory
from ckptcore.errors import AtomicityError, ObjectNotFoundError, SaveLostError
from ckptcore.io.background import wait_for_saves_to
from ckptcore.protocols import StorageBackend, Transaction

if TYPE_CHECKING:
    from ckptcore.commit.location import Location
    from ckptcore.commit.locks import Locks, StepLocks
    from ckptcore.commit.sessions import PlannedSession

__all__ = ["ConditionalPutMethod"]

T = TypeVar("T")


class ConditionalPutMethod:
    """The commit method of storage without real directories. The root is a claim until the commit replaces it."""

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

    def is_changing(self, location: Location) -> bool:
        """See `CommitMethod`. Pins wait for announced deletions."""
        return False

    def announce_deletion(
        self, location: Location, locks: StepLocks, pin: str
    ) -> AbstractContextManager[object] | None:
        """See `CommitMethod`."""
        return locks.intend_deletion(pin)

    def with_conditions(self, conditions: Conditions, url: str) -> StorageBackend:
        """See `CommitMethod`."""
        return conditions.storage(self._directory, url)

    def locks(self, lease_seconds: float = 60.0, clock: Clock = SYSTEM_CLOCK) -> Locks:
        """See `CommitMethod`."""
        from ckptcore.commit.leases import Leases  # plain saves and loads do not need it

        return Leases(self._directory, check_lease_seconds(lease_seconds), clock)
