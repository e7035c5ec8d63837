"""What every storage must do that repeats deletions which failed, as tests to inherit."""

from __future__ import annotations

import uuid
from typing import Protocol

import pytest

from ckptcore.errors import SaveLostError
from ckptcore.protocols import RepeatsDeletions, StorageBackend

__all__ = ["DeletingStorage", "RepeatsDeletionsTests"]


class DeletingStorage(StorageBackend, RepeatsDeletions, Protocol):
    """A storage that offers `RepeatsDeletions`."""


class RepeatsDeletionsTests:
    """Inherit, give `open`, and pytest collects the tests; beside `StorageBackendTests`, in a class of its own."""

    def open(self, directory: str) -> DeletingStorage:
        """Open a directory; within one test the same name opens the same one.

        Args:
            directory: its name; nothing is there before the test that first opens it.
        """
        raise NotImplementedError("give the class the method `open`")

    @pytest.fixture
    def storage(self) -> DeletingStorage:
        """An empty directory."""
        return self.open(f"conformance-{uuid.uuid4().hex}")

    def test_it_offers_the_protocol(self, storage: DeletingStorage) -> None:
        assert isinstance(storage, RepeatsDeletions)

    def test_it_is_checked_before_anything_is_deleted(self, storage: DeletingStorage) -> None:
        for key in ("a/b", "c", "tab\tname"):
            storage.put(key, b"1")
        seen: list[list[str]] = []
        storage.delete_while(["a/b", "tab\tname", "missing"], lambda: seen.append(list(storage.list())))
        assert seen and seen[0] == ["a/b", "c", "tab\tname"]
        assert list(storage.list()) == ["c"]

    def test_what_the_check_raises_ends_it(self, storage: DeletingStorage) -> None:
        storage.put("a", b"1")

        def refuse() -> None:
            raise SaveLostError("another save is here")

        with pytest.raises(SaveLostError, match="another save is here"):
            storage.delete_while(["a"], refuse)
        assert list(storage.list()) == ["a"]

    def test_nothing_is_deleted_of_nothing(self, storage: DeletingStorage) -> None:
        storage.put("a", b"1")
        storage.delete_while([], lambda: None)
        assert list(storage.list()) == ["a"]
