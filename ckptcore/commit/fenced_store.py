"""FencedStore: the storage of a save that claimed a location by its root. A save without the claim replaces nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Final

import xxhash

from ckptcore.commit.put_conditions import find_object
from ckptcore.commit.root import ROOT_KEY, Claim, PartialSave
from ckptcore.commit.root_json import decode_root
from ckptcore.commit.subdirectory import Subdirectory
from ckptcore.errors import (
    ConditionFailedError,
    CorruptCheckpointError,
    ObjectNotFoundError,
    SaveLostError,
    StorageError,
    UnsupportedVersionError,
)
from ckptcore.io.threads import SIZES
from ckptcore.protocols import IF_ABSENT, Buffer, IfTag, ObjectWriter, PutCondition

if TYPE_CHECKING:
    from ckptcore.commit.location import Location

_CHECK_SECONDS: Final = 20.0
"""A write checks the claim if the last check began more than this many seconds ago."""

_ATTEMPTS: Final = 5
"""Attempts to write an object while another object has its key."""

_COMPARE_BYTES: Final = 8 << 20
"""Maximum size of a read that compares a stored object with the written one. Limits the memory."""


def save_lost(location: Location) -> SaveLostError:
    """Return the error for a save whose claim another save took over."""
    return SaveLostError(
        f"{location.display}: another save took over the location before this one committed. Only one save at a time "
        "may write there: wait until the other save has ended, or save to another location"
    )


class FencedStore(Subdirectory):
    """The storage of a save that claimed a location by its root. Writes replace only objects of failed saves.

    Formats fix some object names, so two saves to a location use equal names. A suspended save may write after another
    save took over the location and committed. So every object is put on the condition that it does not exist. If it
    exists with other bytes, this save reads the claim. If another save has the claim, this save is lost. Otherwise the
    object belongs to a failed save and a listing missed it, so it is replaced. An object with equal bytes counts as
    written by this save: the response may have been lost. No storage can check the claim and delete in one atomic step:
    see ``docs/design/commits-on-object-stores.md``.
    """

    def __init__(
        self, location: Location, save_id: str, now: Callable[[], float] = time.monotonic, *, owner: int | None = None
    ) -> None:
        """Create the storage of a location that this process, or another process of its job, has just claimed.

        Args:
            location: the location of the checkpoint.
            save_id: the save id of the claim.
            now: returns the time in seconds.
            owner: for a session of a partial save, its `PartialSave.owner`.
        """
        super().__init__(location.parent, location.name)
        self._location = location
        self._save_id = save_id
        self._owner = owner
        self._now = now
        self._checked = now()
        self._written: dict[str, None] = {}

    @property
    def written(self) -> Collection[str]:
        """The keys of objects that this process began to write and did not delete, including failed writes."""
        return list(self._written)

    def expect_claim(self) -> None:
        """Check that this save still has the claim.

        Raises:
            SaveLostError: the root is not the claim of this save.
            StorageError: the root cannot be read.
        """
        began = self._now()
        try:
            root = decode_root(super().get(ROOT_KEY), _read_no_part)
        except (ObjectNotFoundError, CorruptCheckpointError, UnsupportedVersionError):
            root = None
        if self._owner is None:
            is_ours = isinstance(root, Claim) and root.save_id == self._save_id
        else:
            is_ours = isinstance(root, PartialSave) and (root.save_id, root.owner) == (self._save_id, self._owner)
        if not is_ours:
            raise save_lost(self._location)
        self._checked = began

    def check_sometimes(self) -> None:
        """Check the claim if the last check is old. This limits how many objects a save writes after it lost the claim.

        Raises:
            SaveLostError, StorageError: as for `expect_claim`.
        """
        if self._now() - self._checked > _CHECK_SECONDS:
            self.expect_claim()

    def put(self, key: str, data: bytes, *, condition: PutCondition | None = None) -> str:
        """See `StorageBackend`. Unconditional puts replace only objects of failed saves, or raise `SaveLostError`."""
        if condition is not None:
            return super().put(key, data, condition=condition)
        self.check_sometimes()
        self._written[key] = None
        condition = IF_ABSENT
        for _ in range(_ATTEMPTS):
            try:
                return super().put(key, data, condition=condition)
            except StorageError as error:
                # The put may have succeeded although its response was lost.
                try:
                    existing = find_object(self, key)
                except StorageError as failure:
                    raise error from failure
                if existing is not None and existing[0] == data:
                    return existing[1]
                if not isinstance(error, ConditionFailedError | ObjectNotFoundError):
                    raise
            # Check after reading the object: if another save wrote it, that save had already claimed the location.
            self.expect_claim()
            condition = IF_ABSENT if existing is None else IfTag(existing[1])
        raise StorageError(
            f"cannot write {key} to {self._location.display}: another object was found there {_ATTEMPTS} times, while "
            "this save had the claim. Check if other software writes there, and save again"
        )

    def open_writer(self, key: str, size: int | None = None) -> ObjectWriter:
        """See `StorageBackend`. Replaces only objects of failed saves; raises `SaveLostError` too."""
        self.check_sometimes()
        self._written[key] = None
        if size is not None and size < SIZES.inline:
            return _WholeWriter(self, key, size)
        return _FencedWriter(self, key, super().open_new(key, size))

    def open_new(self, key: str, size: int | None = None) -> ObjectWriter:
        """See `StorageBackend`. Same as `open_writer`, which also replaces objects of failed saves."""
        return self.open_writer(key, size)

    def delete(self, keys: Sequence[str]) -> None:
        """See `StorageBackend`; raises `SaveLostError` too."""
        super().delete_while(keys, self.expect_claim)
        for key in keys:
            self._written.pop(key, None)


class _WholeWriter:
    """Buffers a small object, and writes it by one conditional put in `finish`. Thread-safe."""

    def __init__(self, store: FencedStore, key: str, size: int) -> None:
        self._store = store
        self._key = key
        self._data: bytearray | None = bytearray(size)
        self._written = 0
        self._lock = threading.Lock()

    def write_at(self, offset: int, data: Buffer) -> None:
        with self._lock:
            whole = self._open()
            if offset < 0 or offset + len(data) > len(whole):
                raise ValueError(
                    f"cannot write bytes {offset} to {offset + len(data)} of {self._key}: its size is {len(whole)} "
                    "bytes"
                )
            whole[offset : offset + len(data)] = data
            self._written += len(data)

    def finish(self) -> None:
        with self._lock:
            whole = self._open()
            if self._written != len(whole):
                raise StorageError(
                    f"cannot complete {self._key}: expected {len(whole)} bytes, found {self._written} written"
                )
            self._store.put(self._key, bytes(whole))
            self._data = None

    def abort(self) -> None:
        with self._lock:
            self._data = None

    def _open(self) -> bytearray:
        if self._data is None:
            raise ValueError(f"{self._key} is complete or aborted; nothing more can be written")
        return self._data


class _FencedWriter:
    """Writes an object in pieces, and remembers their checksums to recognise the object later. Thread-safe."""

    def __init__(self, store: FencedStore, key: str, inner: ObjectWriter) -> None:
        self._store = store
        self._key = key
        self._inner = inner
        self._lock = threading.Lock()
        self._pieces: list[tuple[int, int, int]] = []

    def write_at(self, offset: int, data: Buffer) -> None:
        digest = xxhash.xxh3_64_intdigest(data)
        self._inner.write_at(offset, data)
        with self._lock:
            self._pieces.append((offset, len(data), digest))

    def finish(self) -> None:
        self._store.check_sometimes()
        for _ in range(_ATTEMPTS):
            try:
                self._inner.finish()
                return
            except StorageError as error:
                # The put may have succeeded although its response was lost.
                if self._is_stored(error):
                    if isinstance(error, ConditionFailedError):
                        self._inner.abort()  # else the service keeps the uploaded pieces
                    return
                if not isinstance(error, ConditionFailedError):
                    try:
                        self._store.expect_claim()  # if it is lost, another save removed the pieces
                    except StorageError:
                        raise error from None  # it is unknown whether the claim is lost
                    except SaveLostError as lost:
                        raise lost from error
                    raise
            # A failed save wrote the object, and a listing missed it. The deletion checks the claim.
            self._store.delete([self._key])
        raise StorageError(
            f"cannot complete {self._key}: it existed again {_ATTEMPTS} times after it was deleted. Check if other "
            "software writes there, and save again"
        )

    def _is_stored(self, error: StorageError) -> bool:
        """Return True if the stored object is the written object. Raise the error if it cannot be read."""
        try:
            if self._store.size(self._key) != sum(nbytes for _, nbytes, _ in self._pieces):
                return False
            for offset, nbytes, digest in self._pieces:
                hashed = xxhash.xxh3_64()
                for start in range(offset, offset + nbytes, _COMPARE_BYTES):
                    hashed.update(self._store.get(self._key, start, min(start + _COMPARE_BYTES, offset + nbytes)))
                if hashed.intdigest() != digest:
                    return False
        except ObjectNotFoundError:
            return False
        except StorageError as failure:
            raise error from failure
        return True

    def abort(self) -> None:
        self._inner.abort()


def _read_no_part(key: str, size: int) -> bytes:
    """Refuse to read a part. Claims have no parts, so this root is not a claim."""
    raise CorruptCheckpointError(f"{key} is a part of a committed root", key=key)
