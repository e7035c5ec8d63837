"""Session tables of partial saves: reading one, and the errors for sessions that cannot begin.

With real directories the table is in the hidden directory of the partial save, whose lock excludes other sessions.
Other storage has it in the place of the root, and compares and swaps it: a session takes over from one that failed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptcore.commit.occupants import parse_root, refuse_to_replace
from ckptcore.commit.root import PARTIAL_KEY, PartialSave
from ckptcore.errors import CheckpointExistsError, CheckpointNotFoundError, CorruptCheckpointError, SaveLostError

if TYPE_CHECKING:
    from ckptcore.commit.location import Location

__all__ = [
    "PlannedSession",
    "changed",
    "expect_no_checkpoint",
    "find_partial",
    "nothing",
    "occupied",
    "parse_table",
    "read_unchanged",
    "running",
]


@dataclass(frozen=True, slots=True)
class PlannedSession:
    """A session that can begin.

    Attributes:
        before: the session table as it was read; None if there was none. Only the leader has it.
        partial: the table while the session writes.
        kept: the keys of the objects of complete sessions. Only the leader has them.
    """

    before: PartialSave | None
    partial: PartialSave
    kept: frozenset[str]


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
            raise changed(location) from error
        raise


def expect_no_checkpoint(location: Location, partial: PartialSave | None = None) -> None:
    """Refuse to write or finalize sessions at the location of a checkpoint.

    Args:
        location: the location of the partial save.
        partial: the session table; None if there is none. Where it is in the place of the root, there is no checkpoint.

    Raises:
        CheckpointExistsError
    """
    if partial is not None and location.commits.claims_by_root:
        return
    if refuse_to_replace(location, True) == "checkpoint":
        raise occupied(location)


def occupied(location: Location) -> CheckpointExistsError:
    """Return the error for a partial save at the location of a checkpoint."""
    return CheckpointExistsError(
        f"{location.display} holds a checkpoint, and a partial save replaces none: save to another location, or remove the checkpoint "
        "with ckptcore.delete first. Nothing was changed"
    )


def running(location: Location) -> SaveLostError:
    """Return the error for a partial save that another process holds."""
    return SaveLostError(
        f"a session of the partial save to {location.display} is under way in another process, or it is being finalized or deleted: "
        "sessions come one after the other. Nothing was changed; wait for it and call again"
    )


def changed(location: Location) -> SaveLostError:
    """Return the error for a session table that changed since it was read."""
    return SaveLostError(
        f"the partial save to {location.display} was changed at the same time: another session began or ended, or it was finalized or "
        "deleted. Check the location and call again. Nothing was written"
    )


def nothing(location: Location) -> CheckpointNotFoundError:
    """Return the error for a location without a partial save."""
    return CheckpointNotFoundError(
        f"there is no partial save to finalize at {location.display}; it may be finalized already, or never have begun"
    )
