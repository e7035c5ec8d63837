"""Commits of one file, without a root: it is written under a hidden name, and renamed to its location.

In an object store the file is one object, which becomes visible as a whole. An existing file is replaced only with
``overwrite``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ckptcore.commit.subdirectory import Subdirectory
from ckptcore.errors import CheckpointExistsError, ConditionFailedError, SaveLostError
from ckptcore.protocols import Buffer, ObjectWriter, PutCondition, StorageBackend

if TYPE_CHECKING:
    from ckptcore.commit.location import Location
    from ckptcore.commit.rename import RenameMethod, RenameTransaction


class FileTransaction:
    """The right to write one file.

    In an object store, an object becomes visible as a whole once its writer finishes, so `commit` does nothing.

    Attributes:
        store: the storage to write to, under any key.
    """

    def __init__(self, store: StorageBackend) -> None:
        """Wrap a storage. Writes nothing."""
        self.store: Final = store

    def commit(self, key: str) -> None:
        """Move the file of a key to the location."""

    def abort(self) -> None:
        """Remove the written file. In an object store, the writer itself removes the pieces of an incomplete object."""


def file_exists(location: Location, *, meanwhile: bool = False) -> CheckpointExistsError:
    """Return the error for a file that may not be replaced."""
    return CheckpointExistsError(
        f"{location.display} exists{', because another process has written it meanwhile' if meanwhile else ''}; save "
        "to another location, or pass overwrite=True to replace the file. Nothing was changed"
    )


class PlacedFile(FileTransaction):
    """A file that is written in a hidden directory next to its location."""

    def __init__(
        self, location: Location, method: RenameMethod, hidden: str, inner: RenameTransaction, *, replaces: bool
    ) -> None:
        """Remember which file the commit replaces.

        Args:
            location: the location of the file.
            method: the commit method of its directory.
            hidden: the name of the hidden directory.
            inner: the transaction that has locked it.
            replaces: True if the commit may replace another file.
        """
        super().__init__(inner.store)
        self._location = location
        self._method = method
        self._hidden = hidden
        self._inner = inner
        self._stamp = method.directories.stamps([location.name]).get(location.name) if replaces else None
        if self._stamp is not None:
            method.directories.hide_from_others(location.name, hidden)

    def commit(self, key: str) -> None:
        """See `FileTransaction`.

        Raises:
            CheckpointExistsError, SaveLostError: another process wrote or replaced the file meanwhile, or this process
                lost its lease. The file at the location stays.
        """
        self._inner.check()
        directories, name = self._method.directories, self._location.name
        try:
            directories.replace(f"{self._hidden}/{key}", name, self._stamp)
        except ConditionFailedError as error:
            if self._stamp is None:
                raise file_exists(self._location, meanwhile=True) from error
            raise SaveLostError(
                f"{self._location.display} was replaced or removed by another process during the save, and was left as "
                "it is; save again"
            ) from error
        self._inner.abort()  # removes the hidden directory, which is empty now

    def abort(self) -> None:
        """See `FileTransaction`."""
        self._inner.abort()


class OneObject(Subdirectory):
    """A storage in which every key is the same object."""

    def __init__(self, location: Location, *, replaces: bool) -> None:
        """Wrap the storage of a location. `replaces` is True if the object may replace another object."""
        super().__init__(location.parent, "")
        self._location = location
        self._replaces = replaces

    def put(self, key: str, data: bytes, *, condition: PutCondition | None = None) -> str:
        """See `StorageBackend`."""
        raise NotImplementedError("files of safetensors are written in pieces")

    def open_writer(self, key: str, size: int | None = None) -> ObjectWriter:
        """See `StorageBackend`."""
        if self._replaces:
            return super().open_writer(self._location.name, size)
        return _NewObject(self._location, super().open_new(self._location.name, size))


class _NewObject:
    """A writer that does not replace an existing object."""

    def __init__(self, location: Location, inner: ObjectWriter) -> None:
        self._location = location
        self._inner = inner

    def write_at(self, offset: int, data: Buffer) -> None:
        self._inner.write_at(offset, data)

    def finish(self) -> None:
        try:
            self._inner.finish()
        except ConditionFailedError as error:
            raise file_exists(self._location, meanwhile=True) from error

    def abort(self) -> None:
        self._inner.abort()
