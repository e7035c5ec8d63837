"""Trainers that are killed while they publish: every version is whole or absent, and the next trainer continues."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

import pytest
from ckptcore_testing.faults import CrashAt, FaultPlan, SimulatedCrash, Step
from ckptcore_testing.locations import faulty_context, new_place, store_at, through
from ckptcore_testing.trees import same_value
from ckptcore_versions.version_directory import VERSION_NAMES

import ckptcore
from ckptcore.commit import locks
from plugins.versions.tests.killed_trainer import train_until_killed
from plugins.versions.tests.published import CONTEXT, base_of, load, location, present, publisher, weights
from tests.object_stores.stores import STORES
from tests.ownership.fake_clock import FakeClock


def _publish_until_crash(place: str, plan: FaultPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Continue from the newest version, and publish the next two. The process may crash at any operation."""
    clock = FakeClock()
    process = clock.process()
    monkeypatch.setattr(locks, "SYSTEM_CLOCK", process)
    with suppress(SimulatedCrash):
        versions = publisher(through(place), context=faulty_context(place, plan), if_in_use="take over", full_every=9)
        first = (versions.latest or 0) + 1
        for number in (first, first + 1):
            versions.publish(number, weights(number))
        versions.close()
    process.is_frozen = True
    monkeypatch.setattr(locks, "SYSTEM_CLOCK", clock.process())


def _expect_whole_versions(place: str, most: int) -> None:
    """Expect that every version can be loaded, and that the next trainer publishes and leaves no files of others."""
    numbers = _committed(place)
    for number in numbers:
        assert same_value(load(place, number), weights(number))
    with publisher(place, if_in_use="take over", full_every=9) as versions:
        assert versions.latest == numbers[-1]
        assert numbers[-1] <= most
        versions.publish(most + 1, weights(most + 1))
        versions.wait()
    assert base_of(place, most + 1) == numbers[-1]
    assert same_value(load(place, most + 1), weights(most + 1))
    assert present(place) == [*numbers, most + 1]
    left = [name for name in store_at(place).list_names() if not name.startswith("v")]
    assert set(left) <= {".ckptcore/"}


def _committed(place: str) -> Sequence[int]:
    return ckptcore.CheckpointReader(place, step_names=VERSION_NAMES, context=CONTEXT).steps


def _count(place: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the number of operations of a trainer that publishes two versions."""
    with publisher(place) as versions:
        versions.publish(1, weights(1))
    plan = FaultPlan()
    _publish_until_crash(place, plan, monkeypatch)
    assert present(place) == [1, 2, 3]
    return len(plan.operations)


@pytest.mark.parametrize("scheme", ["file", "memory"])
@pytest.mark.parametrize("part", [pytest.param(1.0, marks=pytest.mark.slow, id="all"), pytest.param(0.06, id="some")])
def test_a_crash_at_any_operation(scheme: str, part: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = _count(new_place(scheme, tmp_path), monkeypatch)
    assert count > 40
    moments: Sequence[Literal["before", "midway", "after"]] = ("before", "midway", "after")
    chosen = [(operation, moment) for operation in range(count) for moment in moments]
    chosen = random.Random(0).sample(chosen, int(len(chosen) * part))
    for operation, moment in chosen:
        place = new_place(scheme, tmp_path)
        with publisher(place) as versions:
            versions.publish(1, weights(1))
        _publish_until_crash(place, FaultPlan(CrashAt(operation, moment)), monkeypatch)
        _expect_whole_versions(place, 3)


@pytest.mark.parametrize("scheme", ["file", "memory"])
@pytest.mark.parametrize("count", [pytest.param(200, marks=pytest.mark.slow), 3])
def test_the_successor_of_a_killed_trainer_is_killed_too(
    scheme: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On object stores the second one may have claimed a version that has objects of the first one."""
    operations = _count(new_place(scheme, tmp_path), monkeypatch)
    draw = random.Random(1)
    for _ in range(count):
        place = new_place(scheme, tmp_path)
        with publisher(place) as versions:
            versions.publish(1, weights(1))
        for _ in range(2):
            # Most of the operations after the restart belong to the first publish.
            crash = CrashAt(draw.randrange(operations // 4, operations * 3 // 4))
            _publish_until_crash(place, FaultPlan(crash), monkeypatch)
        _expect_whole_versions(place, 5)


class _CrashAfter(FaultPlan):
    """Crash after the first operation that changes an object whose key has a given part."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self._part = part
        self._is_next = False

    def begin(self, name: str, keys: Sequence[str], offset: int = 0, nbytes: int = 0) -> Step:
        """See `FaultPlan`."""
        if self._is_next:
            self.crash()
        step = super().begin(name, keys, offset, nbytes)
        self._is_next = step.operation.changes and self._part in keys[0]
        return step


def test_objects_of_two_killed_trainers_do_not_stop_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one claimed the version, and was killed before it removed the objects of the first one."""
    place = new_place("memory", tmp_path)
    with publisher(place) as versions:
        versions.publish(1, weights(1))
    _publish_until_crash(place, _CrashAfter("v000002/deltas."), monkeypatch)
    _publish_until_crash(place, _CrashAfter("v000002/checkpoint.json"), monkeypatch)
    assert [key for key in store_at(location(place, 2)).list() if key.startswith("deltas.")]
    with publisher(place, if_in_use="take over") as versions:
        versions.publish(2, weights(2))
    assert same_value(load(place, 2), weights(2))
    assert len([key for key in store_at(location(place, 2)).list() if key.startswith("deltas.")]) == 1


class _Place(NamedTuple):
    """A new directory of versions, and a Context for it."""

    location: str
    context: ckptcore.Context


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[_Place]:
    """A directory on a file system or on S3."""
    if request.param == "file":
        yield _Place(str(tmp_path / "versions"), CONTEXT)
        return
    with STORES["s3"](tmp_path) as store:
        yield _Place(store.new_place("versions"), store.direct)


@pytest.mark.parametrize(
    ("place", "kills"),
    [
        ("file", 2),
        pytest.param("file", 100, marks=pytest.mark.slow),
        pytest.param("s3", 60, marks=pytest.mark.slow),
    ],
    indirect=["place"],
)
def test_a_killed_trainer(kills: int, place: _Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its successor continues from the last committed version. No committed version is lost or changed."""
    monkeypatch.setattr(locks, "SYSTEM_CLOCK", FakeClock())
    draw = random.Random(kills)
    saved: dict[int, str] = {}
    for _ in range(kills):
        train_until_killed(place.location, place.context.storage, draw)
        reader = ckptcore.CheckpointReader(place.location, step_names=VERSION_NAMES, context=place.context)
        assert list(reader.steps) == list(range(1, len(reader.steps) + 1))
        assert len(reader.steps) >= len(saved)
        for number in reader.steps[max(0, len(saved) - 1) :]:
            assert same_value(reader.load(number), weights(number))
            saved[number] = str(reader.metadata(number).created)
    assert len(saved) > kills // 2
    with publisher(place.location, context=replace(place.context), if_in_use="take over") as versions:
        following = len(saved) + 1
        versions.publish(following, weights(following))
        versions.wait()
    assert same_value(ckptcore.load(f"{place.location}/v{following:06d}", context=place.context), weights(following))
