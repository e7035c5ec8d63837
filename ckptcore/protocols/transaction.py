"""Transaction: the right to write one checkpoint at a location, and its commit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from ckptcore.protocols.storage import StorageBackend


class Transaction(Protocol):
    """The right to write one checkpoint at a location. It ends with `commit`, `leave` or `abort`.

    Saves, copies, updates and partial saves are transactions.
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

    def leave(self) -> None:
        """Release the claim and keep the objects, for a later transaction that resumes. Does nothing after the end."""
        ...

    def abort(self) -> None:
        """Remove all objects and release the claim. Does nothing after the end."""
        ...
