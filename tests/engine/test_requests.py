"""What storages say of requests, and what comes of it through the storages that stand before others."""

from __future__ import annotations

import pytest
from ckptcore_testing import FaultPlan, with_faults

from ckptcore.commit.subdirectory import subdirectory
from ckptcore.io.requests import Requests, requests_of
from ckptcore.protocols import ManyRequests, StorageBackend

from .watched_storage import WatchedStorage, memory_storage


class ManyAtOnce(WatchedStorage):
    """A storage that is worth many requests."""

    concurrency = 12
    part_bytes = 8 << 20


class Immodest(WatchedStorage):
    """A storage that asks for more than anybody has."""

    concurrency = 100_000
    part_bytes = 5 << 40


class Senseless(WatchedStorage):
    """A storage that was configured wrongly."""

    concurrency = 0
    part_bytes = -1


def test_a_storage_that_says_nothing() -> None:
    storage = WatchedStorage(memory_storage())
    assert not isinstance(storage, ManyRequests)
    assert requests_of(storage) == Requests(1, 1)


@pytest.mark.parametrize("kind", [WatchedStorage, ManyAtOnce])
def test_storages_before_others_pass_it_on(kind: type[WatchedStorage]) -> None:
    inner = kind(memory_storage())
    for storage in (
        subdirectory(inner, "a"),
        subdirectory(subdirectory(inner, "a"), "b"),
        with_faults(inner, FaultPlan()),
    ):
        assert isinstance(storage, ManyRequests)
        assert requests_of(storage) == requests_of(inner)


def test_what_is_said_has_bounds() -> None:
    found = requests_of(Immodest(memory_storage()))
    assert 12 < found.concurrency < 1000
    assert 8 << 20 < found.part_bytes < 1 << 30
    storage: StorageBackend = Senseless(memory_storage())
    assert requests_of(storage) == Requests(1, 1)
