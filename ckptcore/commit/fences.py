"""FencedStore: writes of a save that replace no object of another save, and stop when its claim is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Final

import xxhash

from ckptcore.commit.root import ROOT_KEY, Claimed, PartialSave
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
from ckptcore.io.requests import SIZES
from ckptcore.protocols import IF_ABSENT, Buffer, IfTag, ObjectWriter, PutCondition

if TYPE_CHECKING:
    from ckptcore.commit.location import Location

__all__ = ["FencedStore"]

_LOOK_SECONDS: Final = 20.0
"""Seconds that a save writes without checking its claim."""

_ATTEMPTS: Final = 5
"""Attempts to write an object in whose place another one was found."""

_COMPARE_BYTES: Final = 8 << 20


class FencedStore(Subdirectory):
    """The objects of a save that claimed a location by its root.

    A format fixes some names, so two saves to a location use the same ones. A suspended save may write after another
    one took the location over and committed. So every object is written on the condition that it does not exist. If it
    exists, the claim decides. Without the claim the save is lost. With it the object is its own (a lost answer), or was
    left by a failed save and not listed, and is replaced. No storage checks the claim and deletes in one step: see
    ``docs/design/commits-on-object-stores.md``.
    """

    def __init__(
        self, location: Location, save_id: str, now: Callable[[], float] = time.monotonic, *, owner: int | None = None
    ) -> None:
        """Write to a location that this process, or another one of its job, has just claimed.

        Args:
            location: the location of the checkpoint.
            save_id: the save id of the claim.
            now: returns the time in seconds.
            owner: the owner of a partial save that this process writes for: see `PartialSave.owner`.
        """
        super().__init__(location.parent, location.name)
        self._location = location
        self._save_id = save_id
        self._owner = owner
        self._now = now
        self._looked = now()
        self._written: dict[str, None] = {}

    @property
    def written(self) -> Collection[str]:
        """The keys that this process began to write and did not delete, including failed writes."""
        return list(self._written)

    def expect_claim(self) -> None:
        """Check that the claim is not lost.

        Raises:
            SaveLostError
        """
        began = self._now()
        try:
            root = decode_root(super().get(ROOT_KEY), _read_no_part)
        except (ObjectNotFoundError, CorruptCheckpointError, UnsupportedVersionError):
            root = None
        if isinstance(root, PartialSave):
            is_ours = root.save_id == self._save_id and root.owner == self._owner and self._owner is not None
        else:
            is_ours = isinstance(root, Claimed) and root.save_id == self._save_id and self._owner is None
        if not is_ours:
            raise SaveLostError(
                f"another save took {self._location.display} over before this one committed; this one is lost"
            )
        self._looked = began

    def look_now_and_then(self) -> None:
        """Check the claim if the last check is old. It only limits the objects that a lost save leaves.

        Raises:
            SaveLostError
        """
        if self._now() - self._looked > _LOOK_SECONDS:
            self.expect_claim()

    def put(self, key: str, data: bytes, *, condition: PutCondition | None = None) -> str:
        """See `StorageBackend`. Replaces nothing; raises `SaveLostError` too."""
        if condition is not None:
            return super().put(key, data, condition=condition)
        self.look_now_and_then()
        self._written[key] = None
        condition = IF_ABSENT
        for _ in range(_ATTEMPTS):
            try:
                return super().put(key, data, condition=condition)
            except StorageError as error:
                # The put may have succeeded, and its answer been lost.
                found = self._find_after(error, key)
                if found is not None and found[0] == data:
                    return found[1]
                if not isinstance(error, ConditionFailedError | ObjectNotFoundError):
                    raise
            # After the object was read: if it is another save's, that save had claimed the location before.
            self.expect_claim()
            condition = IF_ABSENT if found is None else IfTag(found[1])
        raise StorageError(
            f"cannot write {key} to {self._location.display}: the storage says that an object is there, {_ATTEMPTS} "
            "times after it was replaced, while the claim of this save stands. Look whether something else writes "
            "there, and save again"
        )

    def _find_after(self, error: BaseException, key: str) -> tuple[bytes, str] | None:
        """Return the object after a failed put. Raise the error if it cannot be read."""
        try:
            return self.get_with_tag(key)
        except ObjectNotFoundError:
            return None
        except StorageError as failure:
            raise error from failure

    def open_writer(self, key: str, size: int | None = None) -> ObjectWriter:
        """See `StorageBackend`. Replaces nothing; raises `SaveLostError` too."""
        self.look_now_and_then()
        self._written[key] = None
        if size is not None and size < SIZES.inline:
            return _WholeWriter(self, key, size)
        return _FencedWriter(self, key, super().open_new(key, size))

    def open_new(self, key: str, size: int | None = None) -> ObjectWriter:
        """See `StorageBackend`: no writer here replaces anything."""
        return self.open_writer(key, size)

    def delete(self, keys: Sequence[str]) -> None:
        """See `StorageBackend`; raises `SaveLostError` too."""
        super().delete_while(keys, self.expect_claim)
        for key in keys:
            self._written.pop(key, None)


class _WholeWriter:
    """Collects a small object and puts it, because conditional puts are the best supported condition. Any thread."""

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
                    f"cannot write bytes {offset} to {offset + len(data)} of {self._key}: it has {len(whole)}"
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
            raise ValueError(f"{self._key} is complete or given up; nothing more can be written")
        return self._data


class _FencedWriter:
    """Writes an object in pieces, and keeps their checksums to recognise it by its content. Any thread."""

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
        self._store.look_now_and_then()
        for _ in range(_ATTEMPTS):
            try:
                self._inner.finish()
                return
            except StorageError as error:
                # The put may have succeeded, and its answer been lost.
                if self._is_there(error):
                    if isinstance(error, ConditionFailedError):
                        self._inner.abort()  # the pieces that it sent would be kept
                    return
                if not isinstance(error, ConditionFailedError):
                    self._expect_claim_after(error)
                    raise
            # A failed save left it, and no list showed it. The deletion checks the claim.
            self._store.delete([self._key])
        raise StorageError(
            f"cannot complete {self._key}: the storage says that an object is there, {_ATTEMPTS} times after it was "
            "deleted. Look whether something else writes there, and save again"
        )

    def _expect_claim_after(self, error: StorageError) -> None:
        """Raise that the save is lost, if that is why its pieces are missing."""
        try:
            self._store.expect_claim()
        except StorageError:
            raise error from None
        except SaveLostError as lost:
            raise lost from error

    def _is_there(self, error: StorageError) -> bool:
        """Return True if the object is what was written. Raise the error if it cannot be read."""
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
    """Refuse to read a part: claims have no parts, so this root is not a claim."""
    raise CorruptCheckpointError(f"{key} is a part of a committed root", key=key)
