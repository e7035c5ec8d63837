"""Objects that replace nothing, and pieces that nobody finished: of any storage, as well as it can."""

from __future__ import annotations

from ckptcore.errors import ConditionFailedError, ObjectNotFoundError
from ckptcore.protocols import Buffer, CreatesObjects, HoldsUploads, ObjectWriter, StorageBackend

__all__ = ["LooksBefore", "abort_uploads", "open_new"]


def open_new(storage: StorageBackend, key: str, size: int | None = None) -> ObjectWriter:
    """See `CreatesObjects`; of a storage that has no such writers, and shows no object before `finish`, it looks right before."""
    if isinstance(storage, CreatesObjects):
        return storage.open_new(key, size)
    return LooksBefore(storage, key, storage.open_writer(key, size))


def abort_uploads(storage: StorageBackend, prefix: str = "") -> int:
    """See `HoldsUploads`; 0 of a storage that keeps nothing unfinished."""
    return storage.abort_uploads(prefix) if isinstance(storage, HoldsUploads) else 0


class LooksBefore:
    """A writer that looks for the object right before it completes it. Any thread."""

    def __init__(self, storage: StorageBackend, key: str, inner: ObjectWriter) -> None:
        """Write through `inner`, which replaces what is there by then."""
        self._storage = storage
        self._key = key
        self._inner = inner

    def write_at(self, offset: int, data: Buffer) -> None:
        """See `ObjectWriter`."""
        self._inner.write_at(offset, data)

    def finish(self) -> None:
        """See `CreatesObjects`."""
        try:
            nbytes = self._storage.size(self._key)
        except ObjectNotFoundError:
            self._inner.finish()
        else:
            raise ConditionFailedError(
                f"cannot create the object {self._key!r}: expected none there, found one of {nbytes} bytes"
            )

    def abort(self) -> None:
        """See `ObjectWriter`."""
        self._inner.abort()
