"""CommitMethod: how checkpoints in a directory are begun, committed, removed and locked.

Storage with real directories commits by rename and has locks (`RenameMethod`). Other storage commits by conditional
puts and has leases (`ConditionalPutMethod`). `ckptcore.commit.location.commit_method` chooses. No other code asks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, ClassVar, TypeVar

from ckptcore.commit.occupants import IsForeign, Overwrite, none_is_foreign
from ckptcore.commit.root import Claimed, PartialSave
from ckptcore.protocols import StorageBackend, Transaction

if TYPE_CHECKING:
    from ckptcore.commit.clocks import Clock
    from ckptcore.commit.conditions import Conditions
    from ckptcore.commit.location import Location
    from ckptcore.commit.locks import Locks
    from ckptcore.commit.sessions import PlannedSession

__all__ = ["CommitMethod"]

T = TypeVar("T")


class CommitMethod(ABC):
    """How checkpoints in one directory are begun, committed, removed and locked. Any thread.

    Every location that is given to it is in the directory.

    Attributes:
        replaces_atomically: True if a commit can replace a checkpoint, so that one of the two always exists.
        claims_by_root: True if claims of saves and session tables of partial saves are in the place of the root.
    """

    replaces_atomically: ClassVar[bool]
    claims_by_root: ClassVar[bool]

    def __init__(self, directory: StorageBackend) -> None:
        """Create the method of a directory; `directory` is its storage, opened at it."""
        self._directory = directory

    @abstractmethod
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
        """Claim a location, and remove what failed saves left. Waits for earlier background saves of this process.

        Args:
            location: the location of the checkpoint.
            claim: the save.
            overwrite: whether a checkpoint is replaced.
            conditions: of the Context.
            is_foreign: recognises checkpoints of other software, which are replaced like ours.
            resume: keep the objects that a process has written under this save id. Without locks such a process may
                still be running, so every process must write the same bytes under the save id.

        Raises:
            CheckpointExistsError: the location has something that is not to be replaced.
            AtomicityError: the storage cannot replace a checkpoint atomically, or has no conditional puts.
            SaveLostError: another process claimed the location.
        """

    @abstractmethod
    def begin_session(self, location: Location, planned: PlannedSession, conditions: Conditions) -> Transaction:
        """Begin or resume the transaction of a partial save, for one session.

        Raises:
            CheckpointExistsError: the location has something else than a partial save.
            SaveLostError: a session is running, or began or ended since this one was planned.
            AtomicityError: the storage has no conditional puts.
        """

    @abstractmethod
    def resume_sessions(
        self, location: Location, examine: Callable[[PartialSave, StorageBackend], T], conditions: Conditions
    ) -> tuple[PartialSave, Transaction, T]:
        """Resume the transaction of a partial save, to commit it.

        Args:
            location: the location of the partial save.
            examine: checks the session table and the store of the sessions. An error stops this. Without locks it runs
                before the claim, so that a check that fails disturbs no running session.
            conditions: of the Context.

        Raises:
            CheckpointNotFoundError: there is no partial save.
            CheckpointExistsError: a checkpoint is in its place.
            SaveLostError: a session is running, or began or ended meanwhile.
        """

    @abstractmethod
    def store_of(
        self, location: Location, save_id: str, conditions: Conditions, *, owner: int | None = None
    ) -> StorageBackend:
        """Return the store of a transaction that another process of the job began; of a session with `owner`."""

    @abstractmethod
    def session_store(self, location: Location) -> StorageBackend:
        """Return the store of the sessions of a partial save, to read."""

    @abstractmethod
    def read_table(self, location: Location) -> bytes | None:
        """Return the session table of a partial save; None if there is none."""

    @abstractmethod
    def is_committed(self, name: str) -> bool | None:
        """Return whether a name is a committed checkpoint of ours; None without a root.

        "" is the directory itself. One small request. The root is not verified.
        """

    @abstractmethod
    def remove(self, location: Location, save_id: str, conditions: Conditions) -> None:
        """Remove the checkpoint of ours at a location, so that it never exists in part.

        Args:
            location: the location of the checkpoint.
            save_id: a new save id, for a hidden name or a claim.
            conditions: of the Context.

        Raises:
            CheckpointExistsError: another checkpoint is in its directory. Nothing was removed.
            SaveLostError: it was replaced meanwhile. The new checkpoint stays.
        """

    def remove_unfinished(self, location: Location, save_id: str, conditions: Conditions) -> None:
        """Remove a claim in the place of a root, with its objects, unless it was committed. See `remove`."""

    def remove_sessions(self, location: Location, save_id: str) -> bool:
        """Remove a partial save that is beside its location. Return whether it existed; False if `claims_by_root`.

        Raises:
            SaveLostError: a session is running.
        """
        return False

    def sweep(self, location: Location) -> None:
        """Delete the hidden directories of failed saves to a location, and of deletions of it. Lists the directory."""

    def sweep_names(self, names: Iterable[str]) -> None:
        """Delete hidden directories by name, except those of running saves.

        Raises:
            StorageError
        """

    def is_changing(self, location: Location) -> bool:
        """Return True if a save to a location, or a deletion of it, is running. False if `claims_by_root`."""
        return False

    @abstractmethod
    def announce_deletion(self, location: Location, locks: Locks, pin: str) -> AbstractContextManager[object] | None:
        """Announce the deletion of a checkpoint until the result is closed; None if `pin` is the name of a pin.

        Raises:
            StorageError
        """

    def with_conditions(self, conditions: Conditions, url: str) -> StorageBackend:
        """Return the directory as a storage for conditional puts, which emulates them if the Context says so.

        Args:
            conditions: of the Context.
            url: the URL of the directory, or of an object in it.
        """
        return self._directory

    @abstractmethod
    def locks(self, display: str = "", lease_seconds: float = 60.0, clock: Clock | None = None) -> Locks:
        """Return the locks in the directory; writes nothing.

        Args:
            display: the directory as the user knows it, for errors.
            lease_seconds: how long this process may be suspended without losing a lease.
            clock: the time; None: the system's.

        Raises:
            ValueError: a lease cannot be that long.
        """
