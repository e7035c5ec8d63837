"""A storage in which a save writes only as long as its claim stands."""

from __future__ import annotations

from collections.abc import Sequence

from ckptcore.errors import CorruptCheckpointError, ObjectNotFoundError, SaveLostError, UnsupportedVersionError
from ckptcore.locations import Location, Subdirectory
from ckptcore.protocols import Buffer, ObjectWriter, PutCondition
from ckptcore.root import ROOT_KEY, Claimed
from ckptcore.root_json import decode_root

__all__ = ["FencedStore"]


class FencedStore(Subdirectory):
    """The objects of a save that claimed a location by its root.

    A save that stood still while another one took its location over finds out before it writes or deletes: names that a
    format fixes are the same for both, and what the other one committed must stay. No storage makes this check and the
    change that follows one step, so it is made right before each.
    """

    def __init__(self, location: Location, save_id: str) -> None:
        """Write to a location that a save, of this process or another of its job, has claimed."""
        super().__init__(location.parent, location.name)
        self._location = location
        self._save_id = save_id

    def expect_claim(self) -> None:
        """Do nothing while the claim stands.

        Raises:
            SaveLostError
        """
        try:
            root = decode_root(super().get(ROOT_KEY), _read_no_part)
        except (ObjectNotFoundError, CorruptCheckpointError, UnsupportedVersionError):
            root = None
        if not isinstance(root, Claimed) or root.save_id != self._save_id:
            raise SaveLostError(
                f"another save took {self._location.display} over before this one committed; this one is lost"
            )

    def put(self, key: str, data: bytes, *, condition: PutCondition | None = None) -> str:
        """See `StorageBackend`; raises `SaveLostError` too."""
        self.expect_claim()
        return super().put(key, data, condition=condition)

    def open_writer(self, key: str, size: int | None = None) -> ObjectWriter:
        """See `StorageBackend`; raises `SaveLostError` too."""
        self.expect_claim()
        return _FencedWriter(super().open_writer(key, size), self)

    def delete(self, keys: Sequence[str]) -> None:
        """See `StorageBackend`; raises `SaveLostError` too."""
        self.expect_claim()
        super().delete(keys)


class _FencedWriter:
    def __init__(self, inner: ObjectWriter, store: FencedStore) -> None:
        self._inner = inner
        self._store = store

    def write_at(self, offset: int, data: Buffer) -> None:
        self._inner.write_at(offset, data)

    def finish(self) -> None:
        self._store.expect_claim()
        self._inner.finish()

    def abort(self) -> None:
        self._inner.abort()


def _read_no_part(key: str, size: int) -> bytes:
    """What a claim has of a part: it has none, so whoever asks reads a root that is no claim of ours."""
    raise CorruptCheckpointError(f"{key} is a part of a root that is committed", key=key)
