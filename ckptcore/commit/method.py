"""CommitMethod: how checkpoints in a directory are begun, committed, removed and locked.

Storage with real directories commits by rename and has locks (`RenameMethod`). Other storage commits by conditional
puts and has leases (`ConditionalPutMethod`). `ckptcore.commit.location.commit_method` chooses one.

With real directories the session table of a partial save is in its hidden directory, whose lock excludes other
sessions. Other storage stores the table under the key of the root and replaces it by compare-and-swap, so a session can
take over from one that failed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeVar

from ckptcore.commit.root import PARTIAL_KEY, Claim, PartialSave
from ckptcore.commit.target import FindForeign, Overwrite, none_foreign, parse_root, refuse_to_replace
from ckptcore.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    SaveLostError,
    converts_errors,
)
from ckptcore.protocols import PlaceLimits, StorageBackend, Transaction

if TYPE_CHECKING:
    from ckptcore.commit.leases import Clock
    from ckptcore.commit.location import Location
    from ckptcore.commit.locks import Lock, Locks
    from ckptcore.commit.single_file import FileTransaction

__all__ = [
    "CommitMethod",
    "PlannedSession",
    "checkpoint_exists",
    "expect_no_checkpoint",
    "find_partial",
    "no_sessions",
    "parse_table",
    "read_unchanged",
    "session_running",
    "sessions_changed",
]

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


class CommitMethod(ABC):
    """How checkpoints in one directory are begun, committed, removed and locked. Thread-safe.

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
    def begin_session(self, location: Location, planned: PlannedSession) -> Transaction:
        """Begin or resume the transaction of a partial save, for one session.

        Raises:
            CheckpointExistsError: the location has files that are not of a partial save.
            SaveLostError: another session is running, or began or ended after this one was planned.
            AtomicityError: the storage has no conditional puts.
        """

    @abstractmethod
    def resume_sessions(
        self, location: Location, examine: Callable[[PartialSave, StorageBackend], T]
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

    @abstractmethod
    def store_of(
        self, location: Location, save_id: str, *, owner: int | None = None, is_new: bool = False
    ) -> StorageBackend:
        """Return the store of a transaction that another process of the job began.

        Args:
            location: the location of the checkpoint.
            save_id: the save id of the transaction.
            owner: the owner of a session; None: the transaction is not a session.
            is_new: True if the transaction does not resume an earlier one, so that no object replaces another one.
        """

    @abstractmethod
    def session_store(self, location: Location) -> StorageBackend:
        """Return the store of the sessions of a partial save, for reading."""

    @abstractmethod
    def read_table(self, location: Location) -> bytes | None:
        """Return the session table of a partial save; None if there is none."""

    @abstractmethod
    def is_committed(self, name: str) -> bool | None:
        """Return True for a committed checkpoint, False for a claim or session table, None without a root.

        The name "" is the directory itself. One small request. The root is not verified.
        """

    @abstractmethod
    def remove(self, location: Location, save_id: str, *, other_files: bool = False) -> None:
        """Remove a checkpoint of ckptcore. No process sees a partly removed checkpoint.

        Args:
            location: the location of the checkpoint.
            save_id: a new save id, for a hidden name or a claim.
            other_files: True to remove also files that no checkpoint wrote.

        Raises:
            CheckpointExistsError: its directory contains another checkpoint, or such files. Nothing was removed.
            CheckpointNotFoundError: another process removed it.
            SaveLostError: if `claims_by_root`: it was replaced meanwhile. The new checkpoint stays.
        """

    def remove_unfinished(self, location: Location, save_id: str) -> None:
        """Remove the claim of a failed save with its objects, unless it was committed. Only with `claims_by_root`."""

    def remove_sessions(self, location: Location, save_id: str) -> bool:
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
    data = location.commits.read_table(location)
    return None if data is None else parse_table(location, data)


def parse_table(location: Location, data: bytes) -> PartialSave:
    """Parse a session table.

    Raises:
        CorruptCheckpointError, UnsupportedVersionError
    """
    partial = parse_root(location.store, data, location.display)
    if not isinstance(partial, PartialSave):
        raise CorruptCheckpointError(
            f"{location.display}: {PARTIAL_KEY} is not the session table of a partial save", key=PARTIAL_KEY
        )
    return partial


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
            raise sessions_changed(location) from error
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
    if partial is not None and location.commits.claims_by_root:
        return
    if refuse_to_replace(location, True) == "checkpoint":
        raise checkpoint_exists(location)


def checkpoint_exists(location: Location) -> CheckpointExistsError:
    """Return the error for a partial save at the location of a checkpoint."""
    return CheckpointExistsError(
        f"{location.display} holds a checkpoint, which a partial save cannot replace: save to another location, or "
        "delete the checkpoint with ckptcore.delete first. Nothing was changed"
    )


def session_running(location: Location) -> SaveLostError:
    """Return the error for a partial save that is locked by another process."""
    return SaveLostError(
        f"{location.display}: another process is writing a session of this partial save, or finalizes or deletes it. "
        "Only one session can run at a time: wait for it and call again. Nothing was changed"
    )


def sessions_changed(location: Location) -> SaveLostError:
    """Return the error for a session table that changed since it was read."""
    return SaveLostError(
        f"{location.display}: the partial save was changed at the same time: another session began or ended, or it "
        "was finalized or deleted. Check the location and call again. Nothing was written"
    )


def no_sessions(location: Location) -> CheckpointNotFoundError:
    """Return the error for a location without a partial save."""
    return CheckpointNotFoundError(
        f"there is no partial save to finalize at {location.display}: it was finalized already, or has no session yet"
    )
