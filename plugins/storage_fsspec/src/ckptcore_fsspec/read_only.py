"""A storage that takes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from ckptcore.errors import StoragePermissionError
from ckptcore.protocols import ObjectWriter, PutCondition
from ckptcore_fsspec.storage import FsspecStorage

__all__ = ["ReadOnlyStorage"]


class ReadOnlyStorage(FsspecStorage):
    """The objects below a path of a file system that is only read. Any thread."""

    def put(self, key: str, data: bytes, *, condition: PutCondition | None = None) -> str:
        """Refused, and nothing was asked of the storage."""
        raise self._refusal(key)

    def open_writer(self, key: str, size: int | None = None) -> ObjectWriter:
        """Refused, and nothing was asked of the storage."""
        raise self._refusal(key)

    def delete(self, keys: Sequence[str]) -> None:
        """Refused where there is anything to delete."""
        for key in keys:
            raise self._refusal(key)

    def _refusal(self, key: str) -> StoragePermissionError:
        self._path(key)
        return StoragePermissionError(
            f"{self._url} is only read, and {key!r} would change it: checkpoints are loaded from {self._scheme}:// and not saved; "
            "save to another storage"
        )
