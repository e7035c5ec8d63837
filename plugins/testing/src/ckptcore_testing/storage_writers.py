"""Conformance tests of `StorageBackend.open_new` and `StorageBackend.abort_uploads`."""

from __future__ import annotations

import time
from typing import Final

import pytest

from ckptcore.errors import ConditionFailedError, InvalidLocationError, ObjectNotFoundError, StorageError
from ckptcore.protocols import ObjectWriter, StorageBackend
from ckptcore_testing.storage import HOSTILE_KEYS, DirectoryTests

_PIECE_BYTES: Final = 1 << 20
_SECONDS: Final = 60.0
"""Maximum time until an upload in the background begins."""


class NewObjectTests(DirectoryTests):
    """Tests of `StorageBackend.open_new`, for object stores. Subclass it and define `open`.

    Attributes:
        large_bytes: size of an object that is uploaded in several requests.
    """

    large_bytes: int = (9 << 20) + 17

    @pytest.mark.parametrize("known", [True, False], ids=["size known", "size unknown"])
    @pytest.mark.parametrize("size", ["empty", "small", "large"])
    def test_a_new_object_is_created(self, storage: StorageBackend, size: str, known: bool) -> None:
        data = self._data(size)
        writer = storage.open_new("directory/data", len(data) if known else None)
        _write_pieces(writer, data)
        assert list(storage.list()) == [], "the object must not exist before finish"
        writer.finish()
        assert storage.get("directory/data") == data
        assert list(storage.list()) == ["directory/data"]

    @pytest.mark.parametrize("known", [True, False], ids=["size known", "size unknown"])
    @pytest.mark.parametrize("size", ["empty", "small", "large"])
    @pytest.mark.parametrize("moment", ["before it was opened", "before it was finished"])
    def test_an_existing_object_is_not_replaced(
        self, storage: StorageBackend, moment: str, size: str, known: bool
    ) -> None:
        data = self._data(size)
        if moment == "before it was opened":
            tag = storage.put("directory/data", b"another's")
        writer = storage.open_new("directory/data", len(data) if known else None)
        _write_pieces(writer, data)
        if moment == "before it was finished":
            tag = storage.put("directory/data", b"another's")
        with pytest.raises(ConditionFailedError):
            writer.finish()
        assert storage.get_with_tag("directory/data") == (b"another's", tag)
        writer.abort()
        assert storage.get_with_tag("directory/data") == (b"another's", tag)
        assert list(storage.list()) == ["directory/data"]

    @pytest.mark.parametrize("known", [True, False], ids=["size known", "size unknown"])
    @pytest.mark.parametrize("size", ["small", "large"])
    def test_finish_succeeds_after_the_existing_object_is_deleted(
        self, storage: StorageBackend, size: str, known: bool
    ) -> None:
        data = self._data(size)
        writer = storage.open_new("data", len(data) if known else None)
        _write_pieces(writer, data)
        storage.put("data", b"another's")
        with pytest.raises(ConditionFailedError):
            writer.finish()
        storage.delete(["data"])
        writer.finish()
        assert storage.get("data") == data
        assert list(storage.list()) == ["data"]

    def test_only_one_of_two_writers_finishes(self, storage: StorageBackend) -> None:
        data = self._data("large")
        writers = [storage.open_new("data", len(data)) for _ in range(2)]
        for writer, text in zip(writers, (data, bytes(len(data))), strict=True):
            _write_pieces(writer, text)
        writers[0].finish()
        with pytest.raises(ConditionFailedError):
            writers[1].finish()
        writers[1].abort()
        assert storage.get("data") == data

    def test_abort_leaves_no_object(self, storage: StorageBackend) -> None:
        data = self._data("large")
        writer = storage.open_new("directory/data", len(data))
        _write_pieces(writer, data[: len(data) // 2])
        writer.abort()
        writer.abort()
        assert list(storage.list()) == []
        with pytest.raises(ObjectNotFoundError):
            storage.get("directory/data")

    def test_a_deleted_object_does_not_block_a_new_one(self, storage: StorageBackend) -> None:
        storage.put("data", b"another's")
        writer = storage.open_new("data", 3)
        writer.write_at(0, b"new")
        storage.delete(["data"])
        writer.finish()
        assert storage.get("data") == b"new"

    @pytest.mark.parametrize("key", HOSTILE_KEYS, ids=ascii)
    def test_hostile_keys_are_refused(self, storage: StorageBackend, key: str) -> None:
        with pytest.raises(InvalidLocationError):
            storage.open_new(key, 1)
        assert list(storage.list()) == []

    def _data(self, size: str) -> bytes:
        nbytes = {"empty": 0, "small": 1000, "large": self.large_bytes}[size]
        return (bytes(range(251)) * (nbytes // 251 + 1))[:nbytes]


class UploadsTests(DirectoryTests):
    """Tests of `StorageBackend.abort_uploads`, for storages that keep parts of unfinished uploads.

    Subclass it and define `open`, as for `NewObjectTests`.

    Attributes:
        upload_bytes: size of an object, large enough that the service keeps parts of it before `finish`.
    """

    upload_bytes: int = 24 << 20

    def test_a_new_directory_has_no_uploads(self, storage: StorageBackend) -> None:
        assert storage.abort_uploads() == 0
        assert storage.abort_uploads("a/b") == 0

    def test_an_aborted_upload_cannot_be_finished(self, storage: StorageBackend, name: str) -> None:
        writer = self._begin(storage, "a/b/data")
        self._abort(self.open(name), "a", 1)
        with pytest.raises(StorageError):
            writer.finish()
        writer.abort()
        assert list(storage.list()) == []
        assert storage.abort_uploads("a") == 0
        again = self._begin(storage, "a/b/data")
        again.finish()
        assert storage.size("a/b/data") == self.upload_bytes

    def test_only_uploads_in_the_directory_are_aborted(self, storage: StorageBackend) -> None:
        elsewhere = {key: self._begin(storage, key) for key in ("ab/data", "a.b", "b/a/data")}
        inside = self._begin(storage, "a/data")
        self._abort(storage, "a/", 1)
        with pytest.raises(StorageError):
            inside.finish()
        for key, writer in elsewhere.items():
            writer.finish()
            assert storage.size(key) == self.upload_bytes
        assert storage.abort_uploads() == 0

    def test_all_uploads_of_a_storage_are_aborted(self, storage: StorageBackend) -> None:
        writers = [self._begin(storage, key) for key in ("data", "a/data")]
        self._abort(storage, "", 2)
        for writer in writers:
            with pytest.raises(StorageError):
                writer.finish()
        assert list(storage.list()) == []

    def test_finished_objects_are_not_deleted(self, storage: StorageBackend) -> None:
        self._begin(storage, "a/data").finish()
        storage.put("a/small", b"1")
        assert storage.abort_uploads("a") == 0
        assert storage.size("a/data") == self.upload_bytes
        assert storage.get("a/small") == b"1"

    def test_an_upload_aborted_by_its_writer_is_not_counted(self, storage: StorageBackend) -> None:
        self._begin(storage, "a/data").abort()
        assert storage.abort_uploads("a") == 0

    @pytest.mark.parametrize("key", [key for key in HOSTILE_KEYS if key not in ("", "a/")], ids=ascii)
    def test_hostile_keys_are_refused(self, storage: StorageBackend, key: str) -> None:
        with pytest.raises(InvalidLocationError):
            storage.abort_uploads(key)

    def _begin(self, storage: StorageBackend, key: str) -> ObjectWriter:
        """Write all bytes of an object, and return the unfinished writer."""
        writer = storage.open_writer(key, self.upload_bytes)
        _write_pieces(writer, bytes(self.upload_bytes))
        return writer

    def _abort(self, storage: StorageBackend, prefix: str, expected: int) -> None:
        """Abort the expected number of uploads, which may still be starting."""
        aborted = storage.abort_uploads(prefix)
        deadline = time.monotonic() + _SECONDS
        while aborted < expected and time.monotonic() < deadline:
            time.sleep(0.05)
            aborted += storage.abort_uploads(prefix)
        assert aborted == expected


def _write_pieces(writer: ObjectWriter, data: bytes) -> None:
    for start in range(0, len(data), _PIECE_BYTES):
        writer.write_at(start, data[start : start + _PIECE_BYTES])
