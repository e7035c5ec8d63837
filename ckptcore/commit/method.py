"""CommitMethod: how checkpoints in a directory are begun, committed, removed and locked.

Storage with real directories commits by rename and has locks (`RenameMethod`). Other storage commits by conditional
puts and has leases (`ConditionalPutMethod`). `ckptcore.commit.location.commit_method` chooses. No other code asks.

With real directories the session table of a partial save is in its hidden directory, whose lock excludes other
sessions. Other storage has the table in the place of the root, and compares and swaps it: a session takes over from one
that failed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeVar

from ckptcore.commit.root import PARTIAL_KEY, Claimed, PartialSave
from ckptcore.commit.target import IsForeign, Overwrite, none_is_foreign, parse_root, refuse_to_replace
from ckptcore.errors import CheckpointExistsError, CheckpointNotFoundError, CorruptCheckpointError, SaveLostError
from ckptcore.protocols import StorageBackend, Transaction

if TYPE_CHECKING:
    from ckptcore.commit.conditions import Conditions
    from ckptcore.commit.leases import Clock
    from ckptcore.commit.location import Location
    from ckptcore.commit.locks import Locks

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
        before: the session table as it was read; None if there was none. Only the leader has it.
        partial: the table while the session writes.
        kept: the keys of the objects of complete sessions. Only the leader has them.
    """

    before: PartialSave | None
    partial: PartialSave
    kept: frozenset[str]


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


def find_partial(location: Location) -> PartialSave | None:
    """Return the session table of the partial save at a location; None if there is none.

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


@contextmanager
def read_unchanged(location: Location, partial: PartialSave | None) -> Iterator[None]:
    """Do not report damage if the partial save changed while it was read without a claim.

    Args:
        location: the location of the partial save.
        partial: the session table as it was read before.

    Raises:
        SaveLostError: the table has changed, so missing objects are no damage.
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
        partial: the session table; None if there is none. A table in the place of the root excludes a checkpoint.

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
        f"{location.display} holds a checkpoint, and a partial save replaces none: save to another location, or remove "
        "the checkpoint with ckptcore.delete first. Nothing was changed"
    )


def session_running(location: Location) -> SaveLostError:
    """Return the error for a partial save that another process holds."""
    return SaveLostError(
        f"a session of the partial save to {location.display} is under way in another process, or it is being "
        "finalized or deleted: sessions come one after the other. Nothing was changed; wait for it and call again"
    )


def sessions_changed(location: Location) -> SaveLostError:
    """Return the error for a session table that changed since it was read."""
    return SaveLostError(
        f"the partial save to {location.display} was changed at the same time: another session began or ended, or it "
        "was finalized or deleted. Check the location and call again. Nothing was written"
    )


def no_sessions(location: Location) -> CheckpointNotFoundError:
    """Return the error for a location without a partial save."""
    return CheckpointNotFoundError(
        f"there is no partial save to finalize at {location.display}; it may be finalized already, or never have begun"
    )
