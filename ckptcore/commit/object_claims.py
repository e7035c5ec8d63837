"""A claim in a storage without real directories: the root itself, replaced by the committed root if it is still the claim.

Every change of the root is on condition of what stood there, so of two that change it one fails. Who is told that its change
failed reads the root: it may have been done, and the answer lost.
"""

from __future__ import annotations

import dataclasses
import datetime
import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Final

from ckptcore.commit.conditions import Conditions, refuse_conditions
from ckptcore.commit.fences import FencedStore
from ckptcore.commit.location import Location
from ckptcore.commit.occupants import IsForeign, Occupant, Overwrite, find_occupant, none_is_foreign
from ckptcore.commit.root import ROOT_KEY, Claimed, PartialSave, new_save_id
from ckptcore.commit.root_json import encode_claim, encode_partial, is_claim, summarize_root
from ckptcore.errors import (
    AtomicityError,
    CommitUnknownError,
    ConditionFailedError,
    ObjectNotFoundError,
    SaveLostError,
    StorageError,
    StorageFullError,
)
from ckptcore.protocols import IF_ABSENT, IfTag, StorageBackend

__all__ = [
    "ObjectClaim",
    "claim_objects",
    "continue_objects",
    "find_debris",
    "find_root",
    "remove_dead_save",
    "remove_objects",
]

logger = logging.getLogger("ckptcore.commit")

_ATTEMPTS: Final = 5
"""How often a root is put that the storage says to be another one than it is."""


def claim_objects(
    location: Location,
    claimed: Claimed,
    overwrite: Overwrite,
    conditions: Conditions,
    is_foreign: IsForeign = none_is_foreign,
) -> ObjectClaim:
    """Claim a location, and remove what dead saves left there; raises what `ckptcore.commit.commit.claim_location` does."""
    location = conditions.open(location)
    found = find_root(location.store)  # with its tag: if it is another one after it was looked at, the claim fails
    replaces = _expect_replaceable(location, found, overwrite, is_foreign)
    claim = ObjectClaim(location, claimed, found, conditions)
    if replaces != "nothing":
        claim.clear()
    return claim


def continue_objects(
    location: Location, claimed: Claimed, overwrite: Overwrite, conditions: Conditions, is_foreign: IsForeign
) -> ObjectClaim:
    """Claim a location, where objects stay that were written under this save id; see `ckptcore.commit.commit.continue_claim`."""
    location = conditions.open(location)
    found = find_root(location.store)
    replaces = _expect_replaceable(location, found, overwrite, is_foreign)
    begun = found is not None and is_claim(found[0]) and summarize_root(found[0]).save_id == claimed.save_id
    if replaces == "nothing" or begun:
        return ObjectClaim(location, claimed, found, conditions)
    # What others left goes under a claim of its own: under this save id stands nothing else, ever.
    first = ObjectClaim(location, Claimed(new_save_id(), claimed.created), found, conditions)
    first.clear()
    return ObjectClaim(location, claimed, first.root, conditions)


def _expect_replaceable(
    location: Location, found: tuple[bytes, str] | None, overwrite: Overwrite, is_foreign: IsForeign
) -> Occupant:
    replaces = find_occupant(location, None if found is None else found[0], overwrite, is_foreign)
    if replaces == "checkpoint" and overwrite != "non-atomic":
        raise AtomicityError(
            f"{location.display} holds a checkpoint, and this storage cannot replace it atomically; "
            "save to another location, or pass overwrite='non-atomic'. Nothing was changed"
        )
    return replaces


def remove_objects(location: Location, save_id: str, conditions: Conditions) -> None:
    """Remove the checkpoint at a location; see `ckptcore.commit.commit.remove_checkpoint`."""
    location = conditions.open(location)
    # Turned into a claim first: objects without a root may look like a checkpoint of other software.
    ObjectClaim(location, Claimed(save_id, _now()), find_root(location.store), conditions).give_up()


def remove_dead_save(location: Location, save_id: str, conditions: Conditions) -> None:
    """Remove what a dead save left at a location, unless it has committed after all."""
    location = conditions.open(location)
    found = find_root(location.store)
    if found is not None and is_claim(found[0]):
        ObjectClaim(location, Claimed(save_id, _now()), found, conditions).give_up()


class ObjectClaim:
    """A root that says that a save is under way, and the tag by which it is replaced. See `ckptcore.commit.commit.Claim`."""

    def __init__(
        self,
        location: Location,
        claimed: Claimed | PartialSave,
        found: tuple[bytes, str] | None,
        conditions: Conditions,
    ) -> None:
        """Put the claim in the place of what was found there: the bytes of a root and its tag, or None for none.

        The claim of a partial save has an owner, who is thought to be this one.

        Raises:
            SaveLostError: something else stands there by now.
            AtomicityError: the storage has no conditions; nothing was changed.
            StorageError: it failed. The claim may be there, and then is a dead save's.
        """
        self._done = False
        self._claimed = claimed
        self._claim = _encode(claimed)
        if found is not None:
            tried = conditions.try_out(location, *found)
            if tried is not location:
                location, found = tried, (found[0], tried.store.get_with_tag(ROOT_KEY)[1])
        self._open(location)
        self._tag = self._put_claim(found)
        if found is None:
            # Only now is there a root to try it with.
            try:
                tried = conditions.try_out(location, self._claim, self._tag)
            except (AtomicityError, StorageError):
                self.abort()
                raise
            if tried is not location:
                self._open(tried)
                self._tag = self._roots.get_with_tag(ROOT_KEY)[1]

    def _open(self, location: Location) -> None:
        self._location = location
        self._roots = location.store
        owner = self._claimed.owner if isinstance(self._claimed, PartialSave) else None
        self.store = FencedStore(location, self._claimed.save_id, owner=owner)

    def _put_claim(self, found: tuple[bytes, str] | None) -> str:
        try:
            return self._roots.put(ROOT_KEY, self._claim, condition=IF_ABSENT if found is None else IfTag(found[1]))
        except AtomicityError as error:
            raise refuse_conditions(self._location, f"its storage cannot put on conditions: {error}") from error
        except StorageError as error:
            # It may have been done, and be said to have failed.
            tag = self._own_tag(self._claim)
            if tag is not None:
                return tag
            if not isinstance(error, ConditionFailedError | ObjectNotFoundError):
                raise
            raise SaveLostError(
                f"another save claimed {self._location.display} at the same time; save again"
            ) from error

    def _own_tag(self, root: bytes) -> str | None:
        """The tag of the root if it is this one; None if it is another one, or cannot be read."""
        try:
            found = find_root(self._roots)
        except StorageError:
            return None
        return found[1] if found is not None and found[0] == root else None

    @property
    def root(self) -> tuple[bytes, str]:
        """The bytes of the claim, and its tag."""
        return self._claim, self._tag

    def clear(self) -> tuple[bool, bool]:
        """Remove what dead saves left, and what this one wrote: uploads that nobody finished, and objects.

        Returns whether it listed the claim, so that the list is none of before; and whether nothing else was there.

        Raises:
            StorageError, SaveLostError
        """
        aborted = self.store.abort_uploads()
        if aborted:
            logger.info("gave up %d unfinished uploads of dead saves at %s", aborted, self._location.display)
        listed = set(self.store.list())
        keys = sorted((listed | set(self.store.written)) - {ROOT_KEY})
        if keys:
            logger.info("removing %d objects of dead saves or deletions at %s", len(keys), self._location.display)
            self.store.delete(keys)
        return ROOT_KEY in listed, not keys

    def commit(self, root: bytes | None, parts: Mapping[str, bytes]) -> None:
        """See `ckptcore.commit.commit.Claim`."""
        for key, data in parts.items():
            self.store.put(key, data)
        if root is None:
            # Nothing makes the look at the claim and its end one step; what a format of others needs is there by now.
            self.store.delete([ROOT_KEY])
            self._done = True
            return
        self.replace(root)

    def replace(self, root: bytes) -> None:
        """Put a root, or another claim, in the place of this claim, and let go of it.

        Raises:
            SaveLostError: another save took the location over.
            CommitUnknownError: whether it is there cannot be told.
            StorageError: it is not there and never will be.
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
                f"cannot commit {self._location.display}: its storage says {_ATTEMPTS} times that the root has another tag than it "
                "said just before; look whether something else writes there, and save again"
            )
        self._done = True

    def _has_committed(self, root: bytes, error: StorageError) -> bool:
        """Whether the root is there although putting it is said to have failed; if not, it can be put again.

        Raises:
            SaveLostError: another save's is.
            CommitUnknownError: that cannot be told.
            StorageError: the error, where the root is not there and never will be.
        """
        try:
            found = find_root(self._roots)
            if found is not None and found[0] == root:
                return True
            if found is None or found[0] != self._claim:
                self._done = True  # what is there now belongs to the other save
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
                f"the storage failed as the save to {self._location.display} was committed, and whether it is cannot be read: "
                f"{error}; look at the location before saving again"
            ) from failure
        raise error

    def _arrived_before_another_claim(self, root: bytes) -> bool:
        """Put another claim of this save, which a root that is on its way yet does not expect; whether it was there before that."""
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
        """See `ckptcore.commit.commit.Claim`."""
        if self._done:
            return
        self._done = True
        with suppress(SaveLostError):  # what is there then belongs to the other save
            self.give_up()

    def leave(self) -> None:
        """See `ckptcore.commit.commit.Claim`."""
        self._done = True

    def give_back(self, kept: Collection[str], root: bytes) -> None:
        """Remove all that is there but some, and put another claim in the place of this one. Does nothing once it is done.

        Raises:
            SaveLostError: another save has taken the location over.
            StorageError: it failed; some may be removed.
        """
        if self._done:
            return
        self._done = True
        self.store.expect_claim()  # else the uploads are another's
        self.store.abort_uploads()
        debris = find_debris({*self.store.list(), *self.store.written}, {*kept, ROOT_KEY})
        if debris:
            self.store.delete(debris)
        self.replace(root)

    def give_up(self) -> None:
        """Remove all that is there, the root last: until then it is a claim, so that nothing takes the rest for a checkpoint.

        Raises:
            SaveLostError: another save has taken the location over; what is there belongs to it.
            StorageError: also where no list shows the claim; then it stays.
        """
        self.store.expect_claim()
        was_listed = False
        for _ in range(_ATTEMPTS):
            # A list may be an old one. What it does not show would be a checkpoint that nobody committed, once the root is gone.
            lists_claim, was_empty = self.clear()
            was_listed |= lists_claim
            if lists_claim and was_empty:
                break
        if not was_listed:
            self.store.expect_claim()  # another one may have removed it
            raise StorageError(
                f"cannot tell whether all that was at {self._location.display} is removed: its storage lists what was there before, "
                f"{_ATTEMPTS} times. A claim stays there, so that nothing takes the rest for a checkpoint; delete it again later, or "
                "save there"
            )
        self.store.delete([ROOT_KEY])


def find_debris(keys: Collection[str], kept: Collection[str]) -> Sequence[str]:
    """The keys of what nobody needs at a location; not those in a checkpoint below it, which another save put there.

    Args:
        keys: all that are there, and those that a list may not show.
        kept: those that are needed.
    """
    below = tuple([key.removesuffix(ROOT_KEY) for key in keys if key.endswith(f"/{ROOT_KEY}")])
    return sorted([key for key in keys if key not in kept and not key.startswith(below)])


def find_root(store: StorageBackend) -> tuple[bytes, str] | None:
    """The bytes of the root and its tag; None where there is none."""
    try:
        return store.get_with_tag(ROOT_KEY)
    except ObjectNotFoundError:
        return None


def _encode(claimed: Claimed | PartialSave) -> bytes:
    return encode_partial(claimed) if isinstance(claimed, PartialSave) else encode_claim(claimed)


def _another(claimed: Claimed | PartialSave) -> Claimed | PartialSave:
    """A claim of the same save, and the same owner, with other bytes."""
    if isinstance(claimed, PartialSave):
        return dataclasses.replace(claimed, ranks=claimed.ranks + 1)
    return Claimed(claimed.save_id, _now())


def _now() -> str:
    """To the microsecond: a claim that takes another one's place must have other bytes."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")
