"""Commits by conditional puts: create the root as a claim, and replace it by the committed root.

Every put of the root is conditional on the tag that was read, or on the absence of a root. So one of two concurrent
puts fails. After a failed put the root is read again, because the put may have succeeded although its response was
lost.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from ckptcore.commit.contents import expect_removable, warn_of_other_files
from ckptcore.commit.fenced_store import FencedStore, save_lost
from ckptcore.commit.method import CommitMethod
from ckptcore.commit.put_conditions import creates_missing, find_object, refuse_storage, try_conditional_puts
from ckptcore.commit.root import ROOT_KEY, Claim, PartialSave, new_save_id
from ckptcore.commit.root_json import (
    HEAD_BYTES,
    encode_claim,
    is_claim,
    is_partial,
    read_head,
)
from ckptcore.commit.stored_root import FindForeign, Overwrite, find_existing, is_claimed_by, none_foreign
from ckptcore.commit.subdirectory import subdirectory
from ckptcore.errors import (
    AtomicityError,
    CommitUnknownError,
    ConditionFailedError,
    ObjectNotFoundError,
    ObjectUnavailableError,
    SaveLostError,
    StorageError,
    StorageFullError,
)
from ckptcore.events import logger_named
from ckptcore.io.background import wait_for_saves_to
from ckptcore.protocols import IF_ABSENT, IfTag, PutCondition, StorageBackend, Transaction

if TYPE_CHECKING:
    from ckptcore.commit.leases import Clock
    from ckptcore.commit.location import Location
    from ckptcore.commit.locks import Lock, Locks
    from ckptcore.commit.single_file import FileTransaction

logger = logger_named("ckptcore.commit")

_ATTEMPTS: Final = 5
"""Maximum attempts to replace the claim if the storage refuses its tag, and to remove objects if listings are stale."""


class ConditionalPutTransaction:
    """A transaction whose claim is stored under the key of the root. See `Transaction`.

    Attributes:
        ended: True if it was committed, left or aborted.
    """

    def __init__(
        self,
        location: Location,
        claim: Claim | PartialSave,
        current: tuple[bytes, str] | None,
    ) -> None:
        """Put the claim under the key of the root.

        Args:
            location: the location of the checkpoint.
            claim: the claim; for a partial save, the session table with this process as its owner.
            current: the bytes and the tag of the current root; None if there is none.

        Raises:
            SaveLostError: the root has changed.
            AtomicityError: the storage does not support conditional puts. Nothing was changed.
            StorageError: the claim may have been stored. If so, later saves treat it as the claim of a failed save.
        """
        self.ended = False
        self._claim = claim
        self._claim_bytes = encode_claim(claim)
        self._location = location
        self._roots = location.store
        owner = claim.owner if isinstance(claim, PartialSave) else None
        self.store = FencedStore(location, claim.save_id, owner=owner)
        if current is not None:
            self._tag = self._put_claim(IfTag(try_conditional_puts(location, *current)))
            return
        self._tag = self._put_claim(IF_ABSENT)
        try:
            # The test of conditional puts needs a root, which did not exist before.
            self._tag = try_conditional_puts(location, self._claim_bytes, self._tag)
        except (AtomicityError, StorageError):
            with suppress(StorageError):  # the first error says why; the next save removes the claim
                self.abort()
            raise

    def _put_claim(self, condition: PutCondition) -> str:
        try:
            return self._roots.put(ROOT_KEY, self._claim_bytes, condition=condition)
        except AtomicityError as error:
            raise refuse_storage(self._location, f"its storage has no conditional puts: {error}") from error
        except StorageError as error:
            with suppress(StorageError):
                current = find_object(self._roots, ROOT_KEY)
                if current is not None and current[0] == self._claim_bytes:
                    return current[1]  # the put has succeeded, but its response was lost
            if not isinstance(error, ConditionFailedError | ObjectNotFoundError):
                raise
            raise save_lost(self._location) from error

    @property
    def root(self) -> tuple[bytes, str]:
        """The bytes and the tag of the claim."""
        return self._claim_bytes, self._tag

    def show_claim(self) -> None:
        """See `Transaction`. The claim is visible from the start."""

    def expect_distinct(self, keys: Callable[[], Iterable[str]]) -> None:
        """See `Transaction`. Object stores compare the bytes of keys."""

    def clear(self) -> tuple[bool, bool]:
        """Remove all objects and unfinished uploads except the claim.

        Returns whether the listing contained the claim (a listing without it is stale), and whether no object had to be
        removed.

        Raises:
            StorageError: the storage failed.
            SaveLostError: another save has the claim.
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
            # A checkpoint in the format of other software has no root. It is complete once the claim is deleted. The
            # store checks the claim before it deletes it, but not atomically.
            self.store.delete([ROOT_KEY])
            self.ended = True
            return
        self.replace(root)

    def replace(self, root: bytes) -> None:
        """Replace the claim by a root or a session table, and release the claim.

        Raises:
            SaveLostError: another save took over the location, or the claim was removed.
            CommitUnknownError: the storage failed, and `root` may have replaced the claim.
            StorageError: the claim was not replaced, and a delayed put cannot replace it later.
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
                f"cannot commit {self._location.display}: {_ATTEMPTS} times the storage refused to replace the root by "
                "the tag that it had just returned. Check if other software writes there, and save again"
            )
        self.ended = True
        if creates_missing(self._location):
            self._expect_objects(root)

    def _expect_objects(self, root: bytes) -> None:
        """Check that no deletion removed the objects and the claim before the root was put.

        Only needed if the storage accepts the tag of a missing object. A deletion removes the claim last. So if the
        claim is gone, at least one object of this save is gone, too.

        Raises:
            SaveLostError: the root is removed again.
        """
        try:
            # Listings may miss objects, so each missing key is checked by a request.
            gone = [key for key in set(self.store.written).difference(self.store.list()) if not self._exists(key)]
        except StorageError as error:
            logger.warning(
                "%s is committed, but it is unknown whether another process deleted it during the save: %s",
                self._location.display, error,
            )  # fmt: skip
            return
        if gone:
            current = find_object(self._roots, ROOT_KEY)
            if current is not None and current[0] == root:
                self._roots.delete([ROOT_KEY])
            raise SaveLostError(
                f"{self._location.display}: another process deleted it during the save, with {len(gone)} objects that "
                "were written. Save again"
            )

    def _exists(self, key: str) -> bool:
        try:
            self.store.size(key)
        except ObjectNotFoundError:
            return False
        return True

    def _has_committed(self, root: bytes, error: StorageError) -> bool:
        """Return True if the root was committed although its put failed with an error; False if it can be put again.

        Raises:
            SaveLostError: the root belongs to another save, or was removed.
            CommitUnknownError: the root cannot be read, or delayed puts cannot be excluded.
            StorageError: the error of the put. The root was not stored, and a delayed put cannot store it later.
        """
        try:
            current = find_object(self._roots, ROOT_KEY)
            if current is not None and current[0] == root:
                return True
            if current is None or current[0] != self._claim_bytes:
                self.ended = True  # the objects belong to the other save now
                raise save_lost(self._location) from error
            self._tag = current[1]
            if isinstance(error, ConditionFailedError | ObjectNotFoundError):
                return False
            # With these errors, the put has no effect, not even later: see `StorageBackend.put`.
            refused = isinstance(error, StorageFullError | PermissionError)
            if not refused and self._arrived_before_another_claim(root):
                return True
        except StorageError as failure:
            self.ended = True
            raise CommitUnknownError(
                f"{self._location.display}: the storage failed during the commit, and the root cannot be read, so the "
                f"commit may have succeeded: {error}. Check the location before saving again"
            ) from failure
        raise error

    def _arrived_before_another_claim(self, root: bytes) -> bool:
        """Replace the claim by an equivalent claim, so that a delayed put of the root fails.

        Return True if the put of the root had succeeded before that.
        """
        claim = encode_claim(_equivalent(self._claim))
        try:
            self._tag = self._roots.put(ROOT_KEY, claim, condition=IfTag(self._tag))
        except StorageError:
            current = find_object(self._roots, ROOT_KEY)
            if current is not None and current[0] == root:
                return True
            if current is None or current[0] != claim:
                raise
            self._tag = current[1]
        self._claim_bytes = claim
        return False

    def abort(self) -> None:
        """See `Transaction`."""
        if self.ended:
            return
        self.ended = True
        with suppress(SaveLostError):  # the objects belong to another save now
            self.give_up()

    def leave(self) -> None:
        """See `Transaction`. The claim stays in the storage, for a save that resumes."""
        self.ended = True

    def give_up(self) -> None:
        """Remove all objects, the claim last: objects without a claim could look like a checkpoint of other software.

        Raises:
            SaveLostError: another save took over the location and its objects.
            StorageError: the storage failed, or its listings are stale. The claim stays.
        """
        self.store.expect_claim()
        was_listed = False
        for _ in range(_ATTEMPTS):
            # A listing may be stale. Once the claim is removed, an unlisted object could look like a checkpoint.
            lists_claim, was_empty = self.clear()
            was_listed |= lists_claim
            if lists_claim and was_empty:
                break
        if not was_listed:
            self.store.expect_claim()  # another process may have removed it
            raise StorageError(
                f"cannot check that all objects of {self._location.display} are removed: {_ATTEMPTS} times the storage "
                "returned an old listing. A claim stays there, so that the remaining objects are not mistaken for a "
                "checkpoint. Delete it again later, or save there"
            )
        self.store.delete([ROOT_KEY])


def _equivalent(claim: Claim | PartialSave) -> Claim | PartialSave:
    """Return a claim of the same save and owner with other bytes."""
    if isinstance(claim, PartialSave):
        return claim._replace(ranks=claim.ranks + 1)  # a rank that no session uses
    return new_claim(claim.save_id)


def new_claim(save_id: str) -> Claim:
    """Return a new claim of a save. The time has microseconds, so that it differs from the replaced claim."""
    return Claim(save_id, datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds"))


class ConditionalPutMethod(CommitMethod):
    """The commit method of storage without real directories: the root is a claim until the commit replaces it."""

    replaces_atomically = False
    claims_by_root = True

    def __init__(self, directory: StorageBackend) -> None:
        """Create the method of a directory; `directory` is the storage, opened at the directory."""
        self._directory = directory

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
        # Read the tag too: the claim must fail if the root changes after the checks.
        current = find_object(location.store, ROOT_KEY)
        if overwrite == "keep-other-files":
            overwrite = True  # other files are refused, because a failed save removes all objects of its directory
        if resume and current is not None and is_claimed_by(current[0], claim.save_id):
            find_existing(location, current[0], "with-other-files")  # accept all files: the killed copy wrote them
            return ConditionalPutTransaction(location, claim, current)
        replaces = find_existing(location, None if current is None else current[0], overwrite, find_foreign)
        if replaces == "checkpoint" and overwrite not in ("non-atomic", "with-other-files"):
            raise AtomicityError(
                f"{location.display} holds a checkpoint, and this storage cannot replace it atomically; "
                "save to another location, or pass overwrite='non-atomic'. Nothing was changed"
            )
        if replaces == "nothing":
            return ConditionalPutTransaction(location, claim, current)
        if overwrite == "with-other-files":
            warn_of_other_files(location, find_foreign)
        if not resume:
            transaction = ConditionalPutTransaction(location, claim, current)
            transaction.clear()
            return transaction
        # Remove the objects of other saves under a temporary claim with a new save id. A process that resumes this save
        # finds the claim with its own save id only after they are gone.
        other = ConditionalPutTransaction(location, Claim(new_save_id(), claim.created), current)
        other.clear()
        return ConditionalPutTransaction(location, claim, other.root)

    def begin_file(self, location: Location, claim: Claim, *, replaces: bool) -> FileTransaction:
        """See `CommitMethod`."""
        from ckptcore.commit.single_file import FileTransaction, OneObject  # only files need them

        wait_for_saves_to(location.identity)
        return FileTransaction(OneObject(location, replaces=replaces))

    def store_of(self, location: Location, save_id: str, *, is_new: bool = False) -> StorageBackend:
        """See `CommitMethod`."""
        return FencedStore(location, save_id)

    def read_table(self, location: Location) -> bytes | None:
        """See `CommitMethod`."""
        current = find_object(location.store, ROOT_KEY)
        return None if current is None or not is_partial(current[0]) else current[0]

    def is_committed(self, name: str) -> bool | None:
        """See `CommitMethod`."""
        try:
            head = read_head(subdirectory(self._directory, name).get(ROOT_KEY, 0, HEAD_BYTES))
        except ObjectNotFoundError:
            return None
        return head is None or head.state == "committed"

    def remove(self, location: Location, *, other_files: bool = False) -> None:
        """See `CommitMethod`."""
        expect_removable(location, other_files=other_files)
        # The root is replaced by a claim first: objects without a root may look like a checkpoint of other software.
        claim = new_claim(new_save_id())
        try:
            current = find_object(location.store, ROOT_KEY)
        except ObjectUnavailableError:  # in archive storage: it cannot be read, but it can be replaced
            data = encode_claim(claim)
            current = data, location.store.put(ROOT_KEY, data)
        ConditionalPutTransaction(location, claim, current).give_up()

    def remove_unfinished(self, location: Location) -> None:
        """See `CommitMethod`."""
        expect_removable(location, other_files=True)
        current = find_object(location.store, ROOT_KEY)
        if current is not None and is_claim(current[0]):
            ConditionalPutTransaction(location, new_claim(new_save_id()), current).give_up()

    def announce_deletion(self, location: Location, locks: Locks, pin: str) -> Lock | None:
        """See `CommitMethod`."""
        return locks.intend_deletion(pin)

    def locks(self, display: str = "", lease_seconds: float = 60.0, clock: Clock | None = None) -> Locks:
        """See `CommitMethod`."""
        from ckptcore.commit.leased_locks import LeasedLocks  # plain saves and loads do not need it

        return LeasedLocks(self._directory, display, lease_seconds, clock)
