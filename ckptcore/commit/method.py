"""CommitMethod: how checkpoints in a directory are begun, committed, removed and locked.

Storage with real directories commits by rename and has locks (`RenameMethod`). Other storage commits by conditional
puts and has leases (`ConditionalPutMethod`). `ckptcore.commit.location.commit_method` chooses one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from ckptcore.commit.root import PARTIAL_KEY, Claim, PartialSave
from ckptcore.commit.stored_root import FindForeign, Overwrite, none_foreign, parse_root
from ckptcore.errors import CorruptCheckpointError
from ckptcore.protocols import PlaceLimits, StorageBackend, Transaction

if TYPE_CHECKING:
    from ckptcore.commit.leases import Clock
    from ckptcore.commit.location import Location
    from ckptcore.commit.locks import Lock, Locks
    from ckptcore.commit.single_file import FileTransaction


class CommitMethod(ABC):
    """The way to begin, commit, remove and lock checkpoints in one directory. Thread-safe.

    All locations that are passed to its methods must be in this directory.

    Attributes:
        replaces_atomically: True if a commit can replace a checkpoint so that the old or the new one always exists.
        claims_by_root: True if claims and session tables are stored under the key of the root.
    """

    replaces_atomically: ClassVar[bool]
    claims_by_root: ClassVar[bool]

    def refuse_place(self, location: Location) -> PlaceLimits:
        """Refuse a location that no commit can reach, such as a mount point. Changes nothing.

        Returns:
            What limits a checkpoint there.

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
            overwrite: whether a checkpoint is replaced.
            find_foreign: recognises checkpoints of other software, which are replaced like ours.
            resume: keep the objects that another process wrote with this save id. On storage without locks that process
                may still be running, so all processes must write the same bytes for one save id.

        Raises:
            CheckpointExistsError: the location has files that must not be replaced.
            AtomicityError: the storage cannot replace a checkpoint atomically, or has no conditional puts.
            SaveLostError: another process claimed the location.
        """

    @abstractmethod
    def begin_file(self, location: Location, claim: Claim, *, replaces: bool) -> FileTransaction:
        """Begin to write one file, which is no checkpoint of ckptcore. The caller has checked the location.

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
            is_new: True if the transaction does not resume an earlier one, so that no object replaces another one.
        """

    @abstractmethod
    def read_table(self, location: Location) -> bytes | None:
        """Return the session table of a partial save; None if there is none."""

    @abstractmethod
    def is_committed(self, name: str) -> bool | None:
        """Return True for a committed checkpoint, False for a claim or session table, None without a root.

        The name "" is the directory itself. One small request. The root is not verified.
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
        """Remove the claim of a failed save with its objects, unless it was committed. Only with `claims_by_root`."""

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
