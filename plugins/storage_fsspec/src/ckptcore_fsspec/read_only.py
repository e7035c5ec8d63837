"""A read-only storage."""

from __future__ import annotations

from collections.abc import Sequence

from ckptcore.errors import StoragePermissionError
from ckptcore.protocols import ObjectWriter, PutCondition
from ckptcore_fsspec.storage import FsspecStorage

__all__ = ["ReadOnlyStorage"]


class ReadOnlyStorage(FsspecStorage):
    """Objects below a path of a read-only file system. Any thread."""

    def put(self, key: str, data: bytes, *, condition: PutCondition | None = None) -> str:
        """Raise an error without a request."""
        raise self._refusal(key)

    def open_writer(self, key: str, size: int | None = None) -> ObjectWriter:
        """Raise an error without a request."""
        raise self._refusal(key)

    def delete(self, keys: Sequence[str]) -> None:
        """Raise an error if there are keys."""
        for key in keys:
            raise self._refusal(key)

    def _refusal(self, key: str) -> StoragePermissionError:
        self._path(key)
        return StoragePermissionError(
            f"cannot change {key!r} in {self._url}: {self._scheme}:// is read-only; save to another storage"
        )
