"""Claiming a location for a save, and turning the claim into a committed checkpoint.

Storage with real directories: everything is written into a hidden sibling directory, which is renamed (or exchanged with what
it replaces) as the commit. Other storage: the root is created as a claim, and replaced by the committed root if it is still
the claim. Either way a checkpoint is there whole or not at all, and what dead saves left is removed by the next save.
"""

from __future__ import annotations

import datetime
import logging
import re
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from typing import Final, Literal, Protocol, TypeAlias

from ckptcore.errors import (
    AtomicityError,
    CheckpointExistsError,
    CommitUnknownError,
    ConditionFailedError,
    CorruptCheckpointError,
    ObjectNotFoundError,
    SaveLostError,
    StorageError,
)
from ckptcore.fences import FencedStore
from ckptcore.locations import Location
from ckptcore.protocols import IF_ABSENT, AtomicDirectories, IfTag, PutCondition, StorageBackend
from ckptcore.root import ROOT_KEY, Claimed, Composite, Root, new_save_id
from ckptcore.root_json import decode_root, encode_claim, is_claim, summarize_root

__all__ = [
    "Claim",
    "Overwrite",
    "claim_location",
    "claimed_store",
    "continue_claim",
    "holds_members",
    "is_claimed_by",
    "is_committed",
    "is_hidden_name",
    "parse_root",
    "read_root",
    "refuse_to_replace",
    "remove_checkpoint",
    "root_bytes",
    "sweep_leftovers",
    "sweep_location",
]

logger = logging.getLogger("ckptcore.commit")

Overwrite: TypeAlias = bool | Literal["non-atomic"]
"""Whether a save replaces the checkpoint at its location: no; yes, atomically; yes, also where that cannot be atomic."""

Occupant: TypeAlias = Literal["nothing", "claim", "checkpoint", "other"]

_MOST_MEMBERS: Final = 1000
"""How many directories are looked into; a checkpoint has a handful."""

_HEAD_BYTES: Final = 1 << 12
"""In so many bytes a root says what it is; its tables come later."""

_HIDDEN: Final = re.compile(r"\.(.+)\.([0-9a-f]{16})\.ckptcore", re.DOTALL)


def is_hidden_name(name: str) -> bool:
    """Whether this is the name of a directory in which a save is under way, or was when it died."""
    return _HIDDEN.fullmatch(name) is not None


class Claim(Protocol):
    """A save's right to write a checkpoint at a location."""

    @property
    def store(self) -> StorageBackend:
        """Where its objects go."""
        ...

    def commit(self, root: bytes | None, parts: Mapping[str, bytes]) -> None:
        """Make what was written the checkpoint at the location; durable where the storage was opened so.

        Args:
            root: its root; None of a checkpoint that other software wrote and that has none.
            parts: by key, what the root names beside objects.

        Raises:
            CheckpointExistsError, SaveLostError: nothing was committed.
        """
        ...

    def abort(self) -> None:
        """Remove what was written. Does nothing after a commit."""
        ...

    def leave(self) -> None:
        """Let go of the claim and leave what was written, for `continue_claim`. Does nothing after a commit."""
        ...


def claim_location(location: Location, save_id: str, created: str, overwrite: Overwrite) -> Claim:
    """Claim a location and remove what dead saves left there.

    Raises:
        CheckpointExistsError: if something is there that is not to be replaced.
        AtomicityError: if replacing it atomically was asked for and the storage cannot.
    """
    if isinstance(location.parent, AtomicDirectories):
        return _DirectoryClaim(location, location.parent, save_id, overwrite)
    return _ObjectClaim(location, save_id, created, overwrite)


def continue_claim(location: Location, save_id: str, created: str, overwrite: Overwrite) -> Claim:
    """Claim a location as `claim_location` does; what a process that died or left had written under this save id stays.

    Where there are no locks, nobody can tell that such a process is dead: while it lives, both write, so under one save id must
    stand the same bytes, whoever writes them.

    Raises:
        SaveLostError: another process is at it; where there are locks.
        What `claim_location` does.
    """
    if isinstance(location.parent, AtomicDirectories):
        return _DirectoryClaim(location, location.parent, save_id, overwrite, continued=save_id)
    return _ObjectClaim(location, save_id, created, overwrite, continued=save_id)


def is_claimed_by(location: Location, save_id: str) -> bool:
    """Whether the root at a location is the claim of a save; never where directories are renamed, which claim by their names."""
    data = root_bytes(location.store)
    return data is not None and is_claim(data) and summarize_root(data).save_id == save_id


def claimed_store(location: Location, save_id: str) -> StorageBackend:
    """Where the objects of a save go that another process of the job claimed the location for."""
    if isinstance(location.parent, AtomicDirectories):
        return Location(location.display, location.parent, _hidden_name(location, save_id)).store
    return FencedStore(location, save_id)


def _hidden_name(location: Location, save_id: str) -> str:
    return f".{location.name}.{save_id}.ckptcore"


def refuse_to_replace(location: Location, overwrite: Overwrite) -> Occupant:
    """Look whether a save may go to a location, and at what it replaces there.

    Raises:
        CheckpointExistsError: if it may not.
        ValueError: if `overwrite` is none of its values.
    """
    if overwrite not in (True, False, "non-atomic"):
        raise ValueError(f"overwrite={overwrite!r}: expected True, False or 'non-atomic'")
    if location.is_object:
        raise CheckpointExistsError(
            f"{location.display} is a file; a checkpoint is a directory: save to another location, or remove the file"
        )
    occupant = _occupant(location.store)
    if occupant == "checkpoint" and not overwrite:
        raise CheckpointExistsError(
            f"{location.display} holds a checkpoint already; save to another location, or pass overwrite=True"
        )
    if occupant == "other":
        names = ", ".join(location.store.list_names()[:5])
        raise CheckpointExistsError(
            f"{location.display} holds files that are no checkpoint of ckptcore ({names}), and they are not replaced; "
            "save to another location, or remove them"
        )
    return occupant


def remove_checkpoint(location: Location, save_id: str) -> None:
    """Remove the checkpoint of ours at a location, so that it is never there in part.

    Args:
        location: where it is.
        save_id: a new one, for the name under which it is hidden first, or for the claim that replaces it.
    """
    if isinstance(location.parent, AtomicDirectories):
        hidden = _hidden_name(location, save_id)
        location.parent.rename(location.name, hidden)
        location.parent.delete_directory(hidden)
        return
    # Turned into a claim first: objects without a root may look like a checkpoint of other software.
    store = FencedStore(location, save_id)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    location.store.put(ROOT_KEY, encode_claim(Claimed(save_id, now)))
    _delete_all_but_root(store)
    store.delete([ROOT_KEY])


def _occupant(store: StorageBackend) -> Occupant:
    data = root_bytes(store)
    if data is None:
        if holds_members(store):
            return "checkpoint"  # of several checkpointables, that lost its root
        return "other" if store.list_names() else "nothing"
    # One that cannot be read counts as a checkpoint: it is replaced only when asked.
    return "claim" if is_claim(data) else "checkpoint"


def holds_members(store: StorageBackend) -> bool:
    """Whether directories in a directory are members of a checkpoint of several checkpointables. For one without a root."""
    for entry in store.list_names()[:_MOST_MEMBERS]:
        if not entry.endswith("/") or entry.startswith("."):
            continue
        try:
            if b'"member":true' in store.get(f"{entry}{ROOT_KEY}", 0, _HEAD_BYTES):
                return True
        except StorageError:
            continue  # it has no root, or none that can be read
    return False


def read_root(store: StorageBackend) -> Root | Composite | Claimed | None:
    """The root of a checkpoint, or None if there is none.

    Raises:
        CorruptCheckpointError: if it or a part of it is not what was written.
        UnsupportedVersionError: if a newer version wrote it.
    """
    data = root_bytes(store)
    return None if data is None else parse_root(store, data)


def root_bytes(store: StorageBackend) -> bytes | None:
    """The bytes of the root of a checkpoint, which no two saves share; None if there is none."""
    try:
        return store.get(ROOT_KEY)
    except ObjectNotFoundError:
        return None


def is_committed(store: StorageBackend) -> bool | None:
    """Whether a checkpoint of ours is there; None where there is no root. One small request; the root is not checked."""
    if isinstance(store, AtomicDirectories):
        try:
            store.size(ROOT_KEY)  # a claim never stands under the name of a checkpoint
        except ObjectNotFoundError:
            return None
        return True
    try:
        return b'"state":"claimed"' not in store.get(ROOT_KEY, 0, 128)
    except ObjectNotFoundError:
        return None


def sweep_location(location: Location) -> None:
    """Delete what dead saves to a location and deletions of it left beside it. Lists the directory that it is in."""
    if isinstance(location.parent, AtomicDirectories):
        _sweep(location, location.parent)


def sweep_leftovers(store: StorageBackend, names: Iterable[str]) -> None:
    """Delete what dead saves and deletions left in a directory of checkpoints.

    Args:
        store: the storage, opened at the directory.
        names: hidden directories in it; those that a living save holds stay.

    Raises:
        StorageError
    """
    if isinstance(store, AtomicDirectories):
        for name in names:
            _delete_if_dead(store, name)


def parse_root(store: StorageBackend, data: bytes) -> Root | Composite | Claimed:
    """The root that these bytes are, its parts read from the storage; raises what `read_root` does."""

    def read_part(key: str, size: int) -> bytes:
        try:
            return store.get(key, 0, size)
        except ObjectNotFoundError as error:
            raise CorruptCheckpointError(f"{key}, a part of the root, is missing: {error}", key=key) from error

    return decode_root(data, read_part)


def _sweep(location: Location, directories: AtomicDirectories, continued: str | None = None) -> None:
    """Delete the hidden directories of saves to this location that died, but for one that is continued."""
    for entry in location.parent.list_names():
        matched = _HIDDEN.fullmatch(entry.removesuffix("/"))
        if matched is None or matched[1] != location.name or not entry.endswith("/") or matched[2] == continued:
            continue
        _delete_if_dead(directories, matched[0])


def _delete_if_dead(directories: AtomicDirectories, name: str) -> None:
    lock = directories.lock_directory(name)
    if lock is None:
        return  # a save that is alive
    with lock:
        logger.info("removing what a dead save left: %s", name)
        directories.delete_directory(name)


class _DirectoryClaim:
    """A hidden sibling directory, held by a lock that dies with this process."""

    def __init__(
        self,
        location: Location,
        directories: AtomicDirectories,
        save_id: str,
        overwrite: Overwrite,
        continued: str | None = None,
    ) -> None:
        self._location = location
        self._directories = directories
        self._overwrite = overwrite
        self._hidden = _hidden_name(location, save_id)
        self._done = False
        replaces = refuse_to_replace(location, overwrite) == "checkpoint"
        _sweep(location, directories, continued)
        lock = directories.lock_directory(self._hidden)
        if lock is None:
            raise SaveLostError(f"another process holds {self._hidden} beside {location.display}; save again")
        self._lock: AbstractContextManager[None] = lock
        self._lock.__enter__()
        self.store = Location(location.display, location.parent, self._hidden).store
        if replaces and overwrite != "non-atomic":
            try:
                self._probe_exchange()
            except BaseException:
                if continued is None:
                    self.abort()
                else:
                    self.leave()
                raise

    def _probe_exchange(self) -> None:
        """Find out before anything is written whether directories can be exchanged here."""
        first, second = f"{self._hidden}/.exchange-1", f"{self._hidden}/.exchange-2"
        for name in (first, second):
            lock = self._directories.lock_directory(name)
            if lock is not None:
                with lock:
                    pass
        try:
            self._directories.exchange(first, second)
        except AtomicityError as error:
            raise AtomicityError(
                f"{self._location.display} holds a checkpoint, and this file system cannot exchange it for another one "
                "atomically; save to another location, or pass overwrite='non-atomic'. Nothing was changed"
            ) from error
        finally:
            self._directories.delete_directory(first)
            self._directories.delete_directory(second)

    def commit(self, root: bytes | None, parts: Mapping[str, bytes]) -> None:
        for key, data in parts.items():
            self.store.put(key, data)
        if root is not None:
            self.store.put(ROOT_KEY, root)
        self._directories.sync_directory(self._hidden)
        try:
            replaced = self._publish()
        except (CheckpointExistsError, SaveLostError, AtomicityError):
            raise
        except BaseException as error:
            # What is under the hidden name may be the old checkpoint by now: nothing may be deleted on a guess.
            if _holds_other_root(self._location, root):
                raise
            self._done = True
            self._lock.__exit__(None, None, None)
            raise CommitUnknownError(
                f"the save to {self._location.display} is in place, or may be, but the storage failed as it was committed: "
                f"{error}. It may not survive a loss of power; look at the location before saving again"
            ) from error
        self._done = True
        self._lock.__exit__(None, None, None)
        if replaced is not None:
            try:
                self._directories.delete_directory(replaced)
            except OSError as error:
                # The new checkpoint is committed; the next save tries again to remove the old one.
                logger.warning("%s is saved, but what it replaced cannot be removed: %s", self._location.display, error)

    def _publish(self) -> str | None:
        """Rename or exchange; the hidden name under which a replaced checkpoint now is, or None."""
        name = self._location.name
        try:
            self._directories.rename(self._hidden, name)
            return None
        except ConditionFailedError as error:
            if refuse_to_replace(self._location, self._overwrite) == "nothing":
                raise SaveLostError(
                    f"something stands at {self._location.display} that is no file and was not there, or not seen, when the "
                    "save began (a broken link?); remove it and save again"
                ) from error
        except ObjectNotFoundError as error:
            raise SaveLostError(
                f"{self._hidden} was removed beside {self._location.display} while it was saved; save again"
            ) from error
        try:
            self._directories.exchange(self._hidden, name)
            return self._hidden
        except AtomicityError:
            if self._overwrite != "non-atomic":
                raise
        aside = _hidden_name(self._location, "0" * 16)
        self._directories.delete_directory(aside)
        self._directories.rename(name, aside)
        try:
            self._directories.rename(self._hidden, name)
        except BaseException:
            self._directories.rename(aside, name)
            raise
        return aside

    def abort(self) -> None:
        if self._done:
            return
        self._done = True
        try:
            self._directories.delete_directory(self._hidden)
        finally:
            self._lock.__exit__(None, None, None)

    def leave(self) -> None:
        if not self._done:
            self._done = True
            self._lock.__exit__(None, None, None)


class _ObjectClaim:
    """A root that says that a save is under way, and the tag by which it is replaced."""

    def __init__(
        self, location: Location, save_id: str, created: str, overwrite: Overwrite, continued: str | None = None
    ) -> None:
        self._location = location
        self._done = False
        self._roots = location.store
        self.store = FencedStore(location, save_id)
        # The tag first: if what is there changes after it is looked at, the claim fails.
        unchanged = self._unchanged()
        begun = continued is not None and is_claimed_by(location, continued)
        replaces = refuse_to_replace(location, overwrite) == "checkpoint"
        if replaces and overwrite != "non-atomic":
            raise AtomicityError(
                f"{location.display} holds a checkpoint, and this storage cannot replace it atomically; "
                "save to another location, or pass overwrite='non-atomic'. Nothing was changed"
            )
        if begun:
            self._tag = self._claim(save_id, created, unchanged)
            return
        # What others left goes under a claim of its own where a save can be continued: under its save id stands nothing else, ever.
        first = save_id if continued is None else new_save_id()
        self._tag = self._claim(first, created, unchanged)
        _delete_all_but_root(FencedStore(location, first))
        if first != save_id:
            self._tag = self._claim(save_id, created, IfTag(self._tag))

    def _claim(self, save_id: str, created: str, condition: PutCondition) -> str:
        """Put the root that says that a save is under way; its tag."""
        try:
            return self._roots.put(ROOT_KEY, encode_claim(Claimed(save_id, created)), condition=condition)
        except ConditionFailedError as error:
            raise SaveLostError(
                f"another save claimed {self._location.display} at the same time; save again"
            ) from error

    def _unchanged(self) -> PutCondition:
        """What is true of the root as long as nobody changes it."""
        try:
            return IfTag(self._roots.get_with_tag(ROOT_KEY)[1])
        except ObjectNotFoundError:
            return IF_ABSENT

    def commit(self, root: bytes | None, parts: Mapping[str, bytes]) -> None:
        for key, data in parts.items():
            self.store.put(key, data)
        if root is None:
            # Nothing makes the look at the claim and its end one step; what a format of others needs is there by now.
            self.store.delete([ROOT_KEY])
            self._done = True
            return
        try:
            self._roots.put(ROOT_KEY, root, condition=IfTag(self._tag))
        except (ConditionFailedError, ObjectNotFoundError) as error:
            self._done = True  # what is there now belongs to the other save
            raise SaveLostError(
                f"another save took {self._location.display} over before this one committed; this one is lost"
            ) from error
        except StorageError as error:
            # The storage may have failed after it did what was asked.
            if _holds_other_root(self._location, root):
                raise
            self._done = True
            if self._is_committed(root):
                return
            raise CommitUnknownError(
                f"the storage failed as the save to {self._location.display} was committed, and whether it is cannot be read: "
                f"{error}; look at the location before saving again"
            ) from error
        self._done = True

    def _is_committed(self, root: bytes) -> bool:
        try:
            return root_bytes(self._roots) == root
        except StorageError:
            return False

    def abort(self) -> None:
        if self._done:
            return
        self._done = True
        with suppress(SaveLostError):  # what is there then belongs to the other save
            self.store.expect_claim()
            _delete_all_but_root(self.store)
            self.store.delete([ROOT_KEY])

    def leave(self) -> None:
        self._done = True


def _holds_other_root(location: Location, root: bytes | None) -> bool:
    """Whether a location certainly does not hold this root, or without one nothing; False where that cannot be read."""
    try:
        if root is None:
            return not location.store.list_names()
        return root_bytes(location.store) != root
    except StorageError:
        return False


def _delete_all_but_root(store: StorageBackend) -> None:
    keys = [key for key in store.list() if key != ROOT_KEY]
    if keys:
        store.delete(keys)
