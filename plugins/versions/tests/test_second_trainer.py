"""A trainer that was paused, and wakes up after another one took over, publishes nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from ckptcore_testing.locations import new_place
from ckptcore_testing.trees import same_value

import ckptcore
from ckptcore.builtin import local_directories
from ckptcore.commit import locks
from ckptcore.errors import CheckpointNotFoundError, SaveLostError
from plugins.versions.tests.published import CONTEXT, publisher, weights
from plugins.versions.tests.watched_deltas import WatchedDeltas
from tests.object_stores.stores import STORES
from tests.ownership.fake_clock import FakeClock


class _Place(NamedTuple):
    """A new directory of versions, and a Context for it."""

    location: str
    context: ckptcore.Context


@pytest.fixture(params=["file", "memory", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Place]:
    """A directory on a file system whose locks do not reach other hosts, in memory, or on S3."""
    if request.param == "s3":
        with STORES["s3"](tmp_path) as store:
            yield _Place(store.new_place("versions"), store.direct)
        return
    monkeypatch.setattr(local_directories, "has_locks_of_all_hosts", lambda descriptor: False)
    yield _Place(new_place(request.param, tmp_path), CONTEXT)


def test_a_paused_trainer_cannot_commit_after_another_took_over(place: _Place, monkeypatch: pytest.MonkeyPatch) -> None:
    location, context = place
    clock = FakeClock()
    paused, successor = clock.process(), clock.process()
    arrived, resumed = threading.Event(), threading.Event()
    pauses = False

    def take(name: str) -> None:
        if pauses and name == "frozen":
            arrived.set()
            assert resumed.wait(60)

    monkeypatch.setattr(locks, "SYSTEM_CLOCK", paused)
    first = publisher(location, layout=WatchedDeltas(taking=take), context=context)
    first.publish(1, weights(1))
    pauses = True
    handle = first.publish(2, weights(2), background=True)
    assert arrived.wait(60)
    paused.is_frozen = True

    monkeypatch.setattr(locks, "SYSTEM_CLOCK", successor)
    with publisher(location, if_in_use="take over", context=replace(context)) as second:
        assert second.latest == 1
        second.publish(3, weights(30))
        paused.is_frozen = False
        resumed.set()
        with pytest.raises(SaveLostError):
            handle.result()
        pauses = False
        with pytest.raises(SaveLostError):
            first.publish(5, weights(5))
        first.close()
        second.publish(4, weights(40))
    for number, published, bases in ((1, 1, ()), (3, 30, ("v000001",)), (4, 40, ("v000003",))):
        version = f"{location}/v{number:06d}"
        assert same_value(ckptcore.load(version, context=context), weights(published))
        assert ckptcore.metadata(version, context=context).bases == bases
    with pytest.raises(CheckpointNotFoundError):
        ckptcore.load(f"{location}/v000002", context=context)
