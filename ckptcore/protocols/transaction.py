"""Transaction: the right to write one checkpoint at a location, and its commit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Protocol

from ckptcore.protocols.storage import StorageBackend

__all__ = ["Transaction"]


class Transaction(Protocol):
    """The right to write one checkpoint at a location. It ends with `commit`, `leave`, `abort` or `restore`.

    Saves, copies, updates and partial saves are transactions. A session of a partial save resumes the transaction of
    the session before it, replaces the session table, and leaves. Finalizing resumes it and commits.
    """

    @property
    def store(self) -> StorageBackend:
        """The storage to write objects to. Objects count only after the commit."""
        ...

    def show_claim(self) -> None:
        """Make the claim visible to the other processes of the job, which wait for it before they write."""
        ...

    def expect_distinct(self, keys: Callable[[], Iterable[str]]) -> None:
        """Refuse keys that the storage takes for one, or that have names that are too long for it.

        Args:
            keys: returns keys of objects that will be written, or of directories. Not called if no keys are refused.

        Raises:
            NameCollisionError: two of them are one object, or one directory, for the storage.
            InvalidLocationError: a name is too long.
        """
        ...

    def commit(self, root: bytes | None, parts: Mapping[str, bytes]) -> None:
        """Turn the objects into the checkpoint at the location; durable if the storage was opened durable.

        Args:
            root: the root; None for a checkpoint of other software, which has none.
            parts: by key, objects that the root names in addition to those of the layout.

        Raises:
            CheckpointExistsError, SaveLostError: nothing was committed.
            CommitUnknownError: the commit may have happened.
        """
        ...

    def replace(self, table: bytes) -> None:
        """Replace the session table by compare-and-swap, so that the objects of this session count.

        Raises:
            SaveLostError: another session or a deletion took over. The objects of this session do not count.
            CommitUnknownError: the table may have been replaced.
        """
        ...

    def leave(self) -> None:
        """Release the claim and keep the objects, for a later transaction that resumes. Does nothing after the end."""
        ...

    def abort(self) -> None:
        """Remove all objects and release the claim. Does nothing after the end."""
        ...

    def restore(self, table: bytes, kept: Collection[str]) -> None:
        """Remove all objects except `kept`, restore a session table and release the claim. No effect after the end."""
        ...
