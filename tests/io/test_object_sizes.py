"""Sizes of objects, which a root records or the storage reports."""

from __future__ import annotations

import pytest
from ckptcore_testing import FarStorage

from ckptcore.errors import CorruptCheckpointError, ObjectNotFoundError
from ckptcore.io.reader import ObjectReader
from ckptcore.io.threads import IOThreads
from ckptcore.model import ObjectRecord
from ckptcore.protocols import StorageBackend
from tests.io.watched_storage import memory_storage


def recorded(**sizes: int) -> dict[str, ObjectRecord]:
    return {key: ObjectRecord(key, size) for key, size in sizes.items()}


def filled(storage: StorageBackend, **sizes: int) -> None:
    for key, size in sizes.items():
        storage.put(key, bytes(size))


def test_recorded_sizes_of_small_remote_objects_are_trusted() -> None:
    storage = FarStorage(concurrency=8, request_bytes=100)
    filled(storage, a=1, b=2, c=3, d=4)
    sizes = ObjectReader(storage, recorded(a=100, b=101, c=0), IOThreads(2))
    assert sizes.size_limits("abcd") == {
        "a": 1,
        "b": 2,
        "c": 3,
        "d": 4,
    }  # with a fixed number of threads, no storage counts as remote
    storage.forget()
    sizes = ObjectReader(storage, recorded(a=100, b=101, c=0), IOThreads())
    assert sizes.size_limits("abcd") == {"a": 100, "b": 2, "c": 0, "d": 4}
    assert sorted([request.key for request in storage.requests]) == ["b", "d"]
    assert sizes.stored_sizes("abcd") == {"a": 1, "b": 2, "c": 3, "d": 4}


def test_the_sum_of_trusted_sizes_is_limited() -> None:
    stated = 300 << 20
    storage = FarStorage(concurrency=8, request_bytes=400 << 20)
    keys = {f"k{number}": stated for number in range(10)}
    filled(storage, **dict.fromkeys(keys, 1))
    sizes = ObjectReader(storage, recorded(**keys), IOThreads()).size_limits(keys)
    assert sorted(sizes.values()) == [1] * 7 + [stated] * 3
    assert sizes.keys() == keys.keys()


def test_the_size_of_a_missing_object_is_an_error() -> None:
    for storage in (FarStorage(concurrency=8, request_bytes=100), memory_storage()):
        with pytest.raises(ObjectNotFoundError):
            ObjectReader(storage, recorded(a=1000), IOThreads()).size_limits("a")


@pytest.mark.parametrize(("start", "stop"), [(0, None), (3, None), (7, 12), (0, 11)])
def test_an_object_shorter_than_recorded_is_an_error_without_checksums(start: int, stop: int | None) -> None:
    storage = memory_storage()
    filled(storage, a=10)
    reader = ObjectReader(storage, recorded(a=20), IOThreads(), verify=False)
    with pytest.raises(CorruptCheckpointError, match="'a' is too short"):
        reader.get("a", start, stop)
    assert reader.get("a", 2, 10) == bytes(8)
    assert ObjectReader(storage, recorded(a=10), IOThreads(), verify=False).get("a", 5, 50) == bytes(5)
