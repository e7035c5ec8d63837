"""Interleavings of readers and deleters. In no order of their operations is a pinned step deleted.

Before every operation of the storage, another actor can continue. With real directories, this can also happen between
the creation of a directory and its lock.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from ckptcore_testing.faulty_storage import with_faults
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptcore.builtin import local as local_storage
from ckptcore.builtin.local_directories import FileLock, try_to_lock
from ckptcore.commit.location import commit_method
from ckptcore.commit.locks import Locks
from ckptcore.errors import DirectoryInUseError
from ckptcore.protocols import StorageBackend
from tests.ownership.interleavings import Actor, Choices, Turns, every_order
from tests.ownership.lockable_storages import LEASED, local, memory, simulated

Place = Callable[[Path], StorageBackend]
ROOT = "1/checkpoint.json"
DATA = "1/data"


class World:
    """A directory with one step, and actors that read and delete it."""

    def __init__(self, store: StorageBackend) -> None:
        self.store = store
        self.actors: list[Actor] = []
        self.read: list[bool] = []
        self.deleted = 0
        self.spared = 0
        for key in (ROOT, DATA):
            store.put(key, b"x")

    def add_reader(self) -> None:
        actor, store, holds = self._add("reader")

        def read() -> None:
            with holds.pin("1") as pin:
                if is_there(store, ROOT):
                    self.read.append(is_there(store, DATA) and is_there(store, ROOT))
                    pin.check()

        actor.start(read)

    def add_deleter(self) -> None:
        actor, store, holds = self._add("deleter")

        def delete() -> None:
            intent = holds.intend_deletion("1")
            if intent is None:
                self.spared += 1
                return
            with intent:
                intent.check()
                store.delete([ROOT])
                store.delete([DATA])
                self.deleted += 1

        actor.start(delete)

    def _add(self, what: str) -> tuple[Actor, StorageBackend, Locks]:
        actor = Actor(f"{what} {len(self.actors)}")
        self.actors.append(actor)
        store = with_faults(self.store, actor)
        return actor, store, commit_method(store).locks("run", clock=actor)

    def run(self, choices: Choices, deaths: int = 0) -> None:
        Turns(choices, self.actors, deaths).run()
        assert all(self.read), "a step vanished while it was read"


def is_there(store: StorageBackend, key: str) -> bool:
    return list(store.list(key.rpartition("/")[0])).count(key) == 1


@pytest.fixture(autouse=True)
def ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace random ids by increasing ids, so that the order of listed locks is repeatable."""
    made = itertools.count()
    monkeypatch.setattr(os, "urandom", lambda nbytes: next(made).to_bytes(nbytes))


@pytest.fixture
def stops_before_locking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pause a local storage between the creation of a directory and its lock."""

    def stop_and_try(directory: str) -> FileLock | None:
        actor = Actor.current()
        if actor is not None and not actor.crashed:
            actor.stop()
        return try_to_lock(directory)

    monkeypatch.setattr(local_storage, "try_to_lock", stop_and_try)


@pytest.mark.parametrize("place", [memory, simulated])
def test_every_order_of_a_reader_and_a_deleter(place: Place, tmp_path: Path) -> None:
    outcomes = set()
    for choices in every_order():
        world = World(place(tmp_path))
        world.add_reader()
        world.add_deleter()
        world.run(choices)
        assert world.deleted + world.spared == 1
        assert is_there(world.store, ROOT) == (world.deleted == 0)
        outcomes.add((world.deleted, len(world.read)))
        assert left(world.store) == []
    assert outcomes == {(0, 1), (1, 0), (1, 1)}, "spared, deleted before it was read, deleted after"


@pytest.mark.slow
@pytest.mark.usefixtures("stops_before_locking")
def test_every_order_of_a_reader_and_a_deleter_in_a_file_system(tmp_path: Path) -> None:
    for number, choices in enumerate(every_order()):
        world = World(local(tmp_path / str(number)))
        world.add_reader()
        world.add_deleter()
        world.run(choices)
        assert world.deleted + world.spared == 1
        assert left(world.store) == []


def left(store: StorageBackend) -> list[str]:
    return [*store.list_names(".ckptcore/pins"), *store.list_names(".ckptcore/deleting")]


class Drawn:
    """Choices that hypothesis draws."""

    def __init__(self, data: st.DataObject) -> None:
        self._data = data

    def choose(self, count: int) -> int:
        return self._data.draw(st.integers(0, count - 1))


@pytest.mark.parametrize("place", [memory, simulated, local])
@pytest.mark.usefixtures("stops_before_locking")
@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_orders_of_several_readers_and_deleters(
    place: Place, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    world = World(place(tmp_path_factory.mktemp("orders")))
    for _ in range(data.draw(st.integers(1, 2))):
        world.add_reader()
    for _ in range(data.draw(st.integers(1, 2))):
        world.add_deleter()
    world.run(Drawn(data))


@pytest.mark.parametrize("place", [simulated, local])
@pytest.mark.usefixtures("stops_before_locking")
@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_orders_with_killed_actors(
    place: Place, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """If an actor is killed, the others finish, and its locks are removed by the next sweep."""
    world = World(place(tmp_path_factory.mktemp("orders")))
    for _ in range(data.draw(st.integers(1, 2))):
        world.add_reader()
    for _ in range(data.draw(st.integers(1, 2))):
        world.add_deleter()
    world.run(Drawn(data), deaths=2)
    commit_method(world.store).locks("run").sweep()
    assert left(world.store) == []


@pytest.mark.parametrize(
    "place",
    [memory, *[pytest.param(place, marks=pytest.mark.slow) for place in (simulated, *LEASED) if place is not memory]],
)
def test_every_order_of_two_jobs(place: Place, tmp_path: Path) -> None:
    """One of the jobs owns the directory, or both own it one after the other."""
    for number, choices in enumerate(every_order()):
        store = place(tmp_path / str(number))
        owners: list[str] = []
        refused: list[str] = []
        actors = [Actor("first"), Actor("second")]

        def own(
            actor: Actor,
            store: StorageBackend = store,
            owners: list[str] = owners,
            refused: list[str] = refused,
        ) -> None:
            seen = with_faults(store, actor)
            try:
                owner = commit_method(seen).locks("run", clock=actor).own()
            except DirectoryInUseError:
                refused.append(actor.name)
                return
            owners.append(actor.name)
            owner.check()
            assert owners == [actor.name], "two own it at once"
            owner.check()
            owners.remove(actor.name)
            owner.close()

        for actor in actors:
            actor.start(lambda actor=actor: own(actor))  # type: ignore[misc]
        Turns(choices, actors).run()
        assert len(refused) < 2
