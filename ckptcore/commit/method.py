"""CommitMethod: begin, commit, remove and lock the checkpoints in a directory. Also a record of features of storages.

Storage with real directories commits by rename and has locks (`RenameMethod`). Other storage commits by conditional
puts and has leases (`ConditionalPutMethod`). `ckptcore.commit.location.commit_method` chooses the method.
`StorageSupport` remembers what each storage supports.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar, Final, TypeAlias, TypeVar, cast

from ckptcore.commit.names import INTERNAL_DIRECTORY
from ckptcore.commit.root import PARTIAL_KEY, Claim, PartialSave
from ckptcore.commit.stored_root import FindForeign, Overwrite, none_foreign, parse_root
from ckptcore.errors import CorruptCheckpointError, StorageError
from ckptcore.events import logger_named
from ckptcore.io.threads import reset_in_children
from ckptcore.protocols import AtomicDirectories, DirectoryFeatures, PlaceLimits, StorageBackend, Transaction

if TYPE_CHECKING:
    from ckptcore.commit.leased_locks import LeasedLocks
    from ckptcore.commit.leases import Clock
    from ckptcore.commit.location import Location
    from ckptcore.commit.locks import Lock, Locks
    from ckptcore.commit.single_file import FileTransaction
    from ckptcore.context import WithoutConditions

logger = logger_named("ckptcore.commit")


class CommitMethod(ABC):
    """The way to begin, commit, remove and lock checkpoints in one directory. Thread-safe.

    All locations that are passed to its methods must be in this directory.

    Attributes:
        replaces_atomically: True if a commit can replace a checkpoint so that the old or the new checkpoint always
            exists.
        claims_by_root: True if claims and session tables are stored under the key of the root.
    """

    replaces_atomically: ClassVar[bool]
    claims_by_root: ClassVar[bool]

    def refuse_place(self, location: Location) -> PlaceLimits:
        """Refuse a location that no commit can reach, such as a mount point. Changes nothing.

        Returns:
            The limits of a checkpoint there.

        Raises:
            InvalidLocationError
            StorageError
        """
        return PlaceLimits()

    @abstractmethod
    def begin(
        self,
        location: Location,
        claim: Claim,
        overwrite: Overwrite,
        find_foreign: FindForeign = none_foreign,
        *,
        resume: bool = False,
    ) -> Transaction:
        """Claim a location, and remove the files of failed saves. Waits for earlier background saves of this process.

        Args:
            location: the location of the checkpoint.
            claim: the claim of the save.
            overwrite: how an existing checkpoint is replaced, if at all: see `Overwrite`.
            find_foreign: recognises checkpoints of other software. They are replaced like checkpoints of ckptcore.
            resume: keep the objects that another process wrote with this save id. On storage without locks that process
                may still be running, so all processes must write the same bytes for one save id.

        Raises:
            CheckpointExistsError: the location has files that must not be replaced.
            AtomicityError: the storage cannot replace a checkpoint atomically, or has no conditional puts.
            SaveLostError: another process claimed the location.
        """

    @abstractmethod
    def begin_file(self, location: Location, claim: Claim, *, replaces: bool) -> FileTransaction:
        """Begin to write one file, which is not a checkpoint of ckptcore. The caller has checked the location.

        Args:
            location: the location of the file.
            claim: the claim of the save.
            replaces: True if the commit may replace a file.

        Raises:
            SaveLostError: another process uses the same save id.
        """

    @abstractmethod
    def store_of(self, location: Location, save_id: str, *, is_new: bool = False) -> StorageBackend:
        """Return the store of a transaction that another process of the job began.

        Args:
            location: the location of the checkpoint.
            save_id: the save id of the transaction.
            is_new: True if the transaction does not resume an earlier transaction, so that no object replaces another
                object.
        """

    @abstractmethod
    def read_table(self, location: Location) -> bytes | None:
        """Return the session table of a partial save; None if there is none."""

    @abstractmethod
    def is_committed(self, name: str) -> bool | None:
        """Return True for a committed checkpoint, False for a claim or session table, None without a root.

        The name "" is the directory itself. Sends one small request. Does not verify the root.
        """

    @abstractmethod
    def remove(self, location: Location, *, other_files: bool = False) -> None:
        """Remove a checkpoint of ckptcore. No process sees a partly removed checkpoint.

        Args:
            location: the location of the checkpoint.
            other_files: True to remove also files that no checkpoint wrote.

        Raises:
            CheckpointExistsError: its directory contains another checkpoint, or such files. Nothing was removed.
            CheckpointNotFoundError: another process removed it.
            SaveLostError: if `claims_by_root`: it was replaced meanwhile. The new checkpoint stays.
        """

    def remove_unfinished(self, location: Location) -> None:
        """Remove the claim of a failed save and its objects, if the claim exists. Only if `claims_by_root`."""

    def remove_sessions(self, location: Location) -> bool:
        """Remove the hidden directory of a partial save. Return whether it existed; False if `claims_by_root`.

        Raises:
            SaveLostError: a session is running.
        """
        return False

    def restore(self, name: str) -> bool:
        """Restore the old checkpoint that a killed process was replacing by two renames. Return whether it did.

        Raises:
            StorageError
        """
        return False

    def sweep(self, location: Location) -> None:
        """Delete hidden directories that failed saves and deletions of a location left. Lists the parent directory."""

    def sweep_names(self, names: Iterable[str]) -> None:
        """Delete hidden directories by name, except those of running saves.

        Raises:
            StorageError
        """

    def is_changing(self, location: Location) -> bool:
        """Return True if a save to a location or a deletion of it is running. False if `claims_by_root`."""
        return False

    @abstractmethod
    def announce_deletion(self, location: Location, locks: Locks, pin: str) -> Lock | None:
        """Announce the deletion of a checkpoint until the result is closed. Return None if a pin named `pin` exists.

        Call `check` of the result right before the deletion.

        Raises:
            StorageError
        """

    @abstractmethod
    def locks(self, display: str = "", lease_seconds: float = 60.0, clock: Clock | None = None) -> Locks:
        """Return the locks in the directory. Writes nothing.

        Args:
            display: the directory as the user passed it, for errors.
            lease_seconds: how long this process may be suspended without losing a lease.
            clock: the clock; None: the system's.

        Raises:
            ValueError: a lease cannot be that long.
        """


def find_partial(location: Location) -> PartialSave | None:
    """Return the session table of the partial save to a location; None if there is none.

    Raises:
        CorruptCheckpointError, UnsupportedVersionError: it cannot be read.
    """
    data = location.commit_method.read_table(location)
    if data is None:
        return None
    partial = parse_root(location.store, data, location.display)
    if not isinstance(partial, PartialSave):
        raise CorruptCheckpointError(
            f"{location.display}: {PARTIAL_KEY} is not the session table of a partial save", key=PARTIAL_KEY
        )
    return partial


_MAX_REMEMBERED: Final = 1024
"""Maximum number of remembered directories. If there are more, some are tested again."""

T = TypeVar("T")

_Place: TypeAlias = tuple[str, bytes]
"""The address of a directory, and its mount: another file system may be mounted there later."""


class StorageSupport:
    """A record of what each storage supports. One object for each Context. Thread-safe.

    Attributes:
        without: what a save does on a storage without conditional puts: see `IOOptions.without_conditions`.
        conditional_puts: by tested service (scheme and host): True if it supports them, False if it ignores conditions.
        creates_missing: by tested service: True if a put succeeds on the condition of a tag, although no object exists.
        lacks_locks: True once a directory without locks was found.
    """

    def __init__(self, without: WithoutConditions = "refuse", clock: Clock | None = None) -> None:
        """Create an empty record. `clock` is the clock of leases; None: the system's."""
        self.without: Final = without
        self._clock = clock
        self.conditional_puts: dict[str, bool] = {}
        self.creates_missing: dict[str, bool] = {}
        self.lacks_locks = False
        self._leases: dict[_Place, LeasedLocks | None] = {}
        self._features: dict[_Place, DirectoryFeatures] = {}
        self._said: set[str] = set()
        self._lock = threading.Lock()
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        """Replace the lock in a forked child, because a thread of the parent may have held it."""
        self._lock = threading.Lock()

    def features(self, directory: StorageBackend, own: str, mount: bytes) -> DirectoryFeatures:
        """Return what the file system of a directory supports. Tested once; features that it lacks are logged once.

        Args:
            directory: a storage with `AtomicDirectories`, opened at a directory of checkpoints.
            own: a directory in it that exists, and that this process has locked.
            mount: see `PlaceLimits`.

        Raises:
            StorageError
        """
        key = _url(directory), mount
        known = self._features.get(key)
        if known is not None:
            return known
        features = _remember(self._features, key, cast(AtomicDirectories, directory).probe(own))
        weaker = [] if features.exchanges else ["cannot exchange directories, so no checkpoint is replaced atomically"]
        if features.merges:
            weaker.append(
                f"treats names as equal that differ in {', '.join(sorted(features.merges))}; saves refuse such names"
            )
        if weaker:
            logger.info("%s: this file system %s", key[0], ", and ".join(weaker))
        return features

    def say_once(self, directory: StorageBackend, weaker: str) -> None:
        """Log a warning about a weakness of a storage, once for each directory. Adds the address of the directory."""
        text = f"{_url(directory)}: {weaker}"
        with self._lock:
            if text in self._said:
                return
            if len(self._said) >= _MAX_REMEMBERED:
                self._said.clear()
            self._said.add(text)
        logger.warning("%s", text)

    def leases(self, directory: StorageBackend) -> LeasedLocks | None:
        """Return the leases that replace the locks of a file system without locks.

        Returns None if the file system has locks, or if the test for locks fails.

        Returns the same object for the same directory, because only an object that has observed the leases of other
        processes for some time can find expired leases.

        Args:
            directory: a storage with `AtomicDirectories`, opened at a directory of checkpoints.
        """
        directories = cast(AtomicDirectories, directory)
        try:
            key = _url(directory), directories.limits(INTERNAL_DIRECTORY).mount
            with self._lock:
                if key in self._leases:
                    return self._leases[key]
            has_locks = directories.has_locks()  # outside of the lock, because a mount may not answer
        except StorageError:
            return None  # the operation that needs a lock fails with the reason
        with self._lock:
            if key in self._leases:  # another thread was faster
                return self._leases[key]
            self.lacks_locks = self.lacks_locks or not has_locks
            return _remember(self._leases, key, None if has_locks else self._new_leases(directory))

    def _new_leases(self, directory: StorageBackend) -> LeasedLocks:
        from ckptcore.commit.leased_locks import LeasedLocks  # only file systems without locks need it here

        display = _url(directory)
        logger.warning(
            "%s: other hosts may not see the locks (flock) of this file system, so ckptcore uses leases. "
            "After a process is killed, the files of its save and its ownership of a run remain until another process "
            "has seen its lease unchanged for more than a minute; Checkpointer(if_in_use='take over') waits for that. "
            "On Lustre, the mount option flock avoids this",
            display,
        )
        return LeasedLocks(directory, display, clock=self._clock)


def _remember(known: dict[_Place, T], place: _Place, value: T) -> T:
    """Remember the result of a test of a directory, if the directory has an address. Return the result."""
    if len(known) >= _MAX_REMEMBERED:
        known.clear()
    if place[0]:
        known[place] = value
    return value


def _url(directory: StorageBackend) -> str:
    """Return the address of a directory; empty if it has none."""
    address = directory.address
    return "" if address is None else address.url
