"""The memory storage."""

from __future__ import annotations

import pytest

from ckptcore.builtin.memory import MemoryStorages
from ckptcore.errors import InvalidLocationError, ObjectNotFoundError, StorageError
from ckptcore.protocols import AtomicDirectories, StorageOptions

OPTIONS = StorageOptions()


@pytest.mark.parametrize(
    ("url", "key"),
    [
        ("memory://name", "a/b/c"),
        ("memory://name/", "a/b/c"),
        ("MEMORY://name/a", "b/c"),
        ("memory://name/a/", "b/c"),
        ("memory://name/%61/b", "c"),
    ],
)
def test_urls_of_subdirectories_lead_to_the_same_objects(url: str, key: str) -> None:
    storages = MemoryStorages()
    storages.open("memory://name", OPTIONS).put("a/b/c", b"1")
    assert storages.open(url, OPTIONS).get(key) == b"1"


@pytest.mark.parametrize(
    "url", ["memory://", "memory:///a", "name", "memory://name/../a", "memory://name//a", "file:///a"]
)
def test_invalid_urls_are_refused(url: str) -> None:
    with pytest.raises(InvalidLocationError):
        MemoryStorages().open(url, OPTIONS)


def test_stores_with_other_names_are_separate() -> None:
    storages = MemoryStorages()
    storages.open("memory://one", OPTIONS).put("a", b"1")
    for other in (storages.open("memory://other", OPTIONS), MemoryStorages().open("memory://one", OPTIONS)):
        with pytest.raises(ObjectNotFoundError, match="lost with the process"):
            other.get("a")


def test_keys_are_flat_as_in_an_object_store() -> None:
    storage = MemoryStorages().open("memory://name", OPTIONS)
    storage.put("a", b"1")
    storage.put("a/b", b"2")
    assert storage.get("a") == b"1"
    assert list(storage.list("a")) == ["a/b"]
    assert storage.list_names() == ["a", "a/"]
    assert not isinstance(storage, AtomicDirectories)
    assert storage.address is None


def test_every_put_changes_the_tag() -> None:
    storage = MemoryStorages().open("memory://name", OPTIONS)
    assert storage.put("a", b"1") != storage.put("a", b"1")


def test_an_object_does_not_exist_before_finish() -> None:
    storage = MemoryStorages().open("memory://name", OPTIONS)
    writer = storage.open_writer("a", 2)
    writer.write_at(0, b"12")
    assert list(storage.list()) == []
    writer.finish()
    assert storage.get("a") == b"12"
    writer.abort()
    assert storage.get("a") == b"12", "an abort after finish undoes nothing"


def test_a_put_copies_its_bytes() -> None:
    storage = MemoryStorages().open("memory://name", OPTIONS)
    memory = bytearray(b"12")
    storage.put("a", memory)  # type: ignore[arg-type]  # bytes are expected
    memory[:] = b"34"
    assert storage.get("a") == b"12"


@pytest.mark.parametrize("known", [True, False])
def test_a_writer_detects_gaps(known: bool) -> None:
    storage = MemoryStorages().open("memory://name", OPTIONS)
    writer = storage.open_writer("a", 10 if known else None)
    writer.write_at(0, b"012")
    writer.write_at(7, b"789")
    with pytest.raises(StorageError, match="expected 10 bytes"):
        writer.finish()
    writer.write_at(3, b"3456")
    writer.finish()
    assert storage.get("a") == b"0123456789"
    with pytest.raises(ValueError, match="complete"):
        writer.write_at(0, b"1")
    with pytest.raises(ValueError, match="complete"):
        writer.finish()


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 1), (9, 2), (11, 0), (0, 11)])
def test_a_writer_refuses_bytes_outside_of_its_size(offset: int, nbytes: int) -> None:
    writer = MemoryStorages().open("memory://name", OPTIONS).open_writer("a", 10)
    with pytest.raises(ValueError, match="cannot write bytes"):
        writer.write_at(offset, bytes(nbytes))
