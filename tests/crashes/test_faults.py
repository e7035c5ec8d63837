"""Saves and deletions that crash or fail at each operation, on storages with and without directories."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal

import pytest
from ckptcore_testing.faults import CrashAt, FailAt, Fault, FaultPlan, Operation, SimulatedCrash
from ckptcore_testing.locations import faulty_context, through

import ckptcore
from ckptcore.errors import AtomicityError, CheckpointError, CheckpointExistsError, StorageError
from ckptcore.plugins import installed_plugins
from ckptcore.protocols import StorageOptions
from tests.crashes.states import make_composite, make_state, version_at

_OLD, _NEW, _NEXT = 1, 2, 3
_MOMENTS: Final[tuple[Literal["before", "midway"], ...]] = ("before", "midway")

_FAST: Final = ckptcore.Context(durability="none", io=ckptcore.context.IOOptions(threads=1))

_numbers = itertools.count()

Task = Callable[[str, ckptcore.Context], None]


def _save(location: str, context: ckptcore.Context) -> None:
    ckptcore.save(location, make_state(_NEW), context=context)


def _overwrite(location: str, context: ckptcore.Context) -> None:
    ckptcore.save(location, make_state(_NEW), overwrite=True, context=context)


def _overwrite_non_atomic(location: str, context: ckptcore.Context) -> None:
    ckptcore.save(location, make_state(_NEW), overwrite="non-atomic", context=context)


def _overwrite_by_composite(location: str, context: ckptcore.Context) -> None:
    ckptcore.save_checkpointables(location, make_composite(_NEW), overwrite="non-atomic", context=context)


def _delete(location: str, context: ckptcore.Context) -> None:
    ckptcore.delete(location, context=context)


class _Place:
    """A new location, with saves directly and through a storage with faults."""

    def __init__(self, scheme: str, directory: Path, *, exchanges: bool = True) -> None:
        name = f"place-{next(_numbers)}"
        self.above = f"file://{directory}/{name}" if scheme == "file" else f"memory://{directory.name}-{name}"
        self.location = f"{self.above}/step_1"
        self._exchanges = exchanges

    def save(self, version: int) -> None:
        ckptcore.save(self.location, make_state(version), overwrite="non-atomic", context=_FAST)

    def run(self, task: Task, *faults: Fault) -> list[Operation]:
        """Run a task in a new simulated process. Return its operations."""
        plan = FaultPlan(*faults)
        task(through(self.location), faulty_context(self.location, plan, exchanges=self._exchanges))
        return plan.operations

    def assert_clean(self, *, leased: bool = False) -> None:
        """Assert that only the checkpoint and its objects exist.

        Args:
            leased: True after a killed deletion with a lease. The lease may stay until another process sees it expire.
        """
        scheme = self.above[: self.above.index("://")]
        storage = installed_plugins().storage(scheme)(self.above, StorageOptions())
        known = {"step_1/checkpoint.json", *(f"step_1/{key}" for key in ckptcore.metadata(self.location).objects)}
        rest = set(storage.list()) - known
        assert known <= set(storage.list()) and len(rest) <= leased
        assert all(key.startswith(".ckptcore/deleting/") for key in rest)


_SCENARIOS: Final[dict[str, tuple[str, bool, Task, set[int | None]]]] = {
    # name: (scheme, True if directories can be exchanged, task, versions that may exist afterwards)
    "overwrite a directory": ("file", True, _overwrite, {_OLD, _NEW}),
    "overwrite a directory that cannot be exchanged": ("file", False, _overwrite_non_atomic, {_OLD, _NEW}),
    "overwrite objects": ("memory", True, _overwrite_non_atomic, {_OLD, _NEW, None}),
    "overwrite a directory by a composite": ("file", True, _overwrite_by_composite, {_OLD, _NEW}),
    "overwrite objects by a composite": ("memory", True, _overwrite_by_composite, {_OLD, _NEW, None}),
    "delete a directory": ("file", True, _delete, {_OLD, None}),
    "delete objects": ("memory", True, _delete, {_OLD, None}),
}


@pytest.mark.parametrize("name", _SCENARIOS)
def test_a_crash_at_any_operation_leaves_the_old_or_the_new_checkpoint(name: str, tmp_path: Path) -> None:
    scheme, exchanges, task, allowed = _SCENARIOS[name]
    outcomes = set()
    first = _Place(scheme, tmp_path, exchanges=exchanges)
    first.save(_OLD)
    operations = first.run(task)
    for operation, moment in itertools.product(operations, _MOMENTS):
        place = _Place(scheme, tmp_path, exchanges=exchanges)
        place.save(_OLD)
        where = f"died {moment} {operation}"
        with pytest.raises(SimulatedCrash):
            place.run(task, CrashAt(operation.number, moment))
        version = version_at(place.location)
        assert version in allowed, where
        outcomes.add(version)
        place.save(_NEXT)
        assert version_at(place.location) == _NEXT, where
        place.assert_clean(leased=name == "delete objects")
    assert outcomes >= {_OLD}


@pytest.mark.parametrize("name", [name for name in _SCENARIOS if name.startswith("overwrite")])
def test_an_error_at_any_operation_leaves_the_old_or_the_new_checkpoint(name: str, tmp_path: Path) -> None:
    scheme, exchanges, task, allowed = _SCENARIOS[name]
    first = _Place(scheme, tmp_path, exchanges=exchanges)
    first.save(_OLD)
    for operation in first.run(task):
        place = _Place(scheme, tmp_path, exchanges=exchanges)
        place.save(_OLD)
        try:
            place.run(task, FailAt(operation.number, StorageError("the test lets it fail")))
        except CheckpointError:
            assert version_at(place.location) in allowed, f"{operation} failed"
        else:
            assert version_at(place.location) == _NEW, f"{operation} failed without an error"
        place.save(_NEXT)
        assert version_at(place.location) == _NEXT
        place.assert_clean()


def test_replacing_is_refused_without_an_atomic_commit(tmp_path: Path) -> None:
    for place in (_Place("file", tmp_path, exchanges=False), _Place("memory", tmp_path)):
        place.save(_OLD)
        with pytest.raises(AtomicityError, match="non-atomic"):
            place.run(_overwrite)
        with pytest.raises(CheckpointExistsError, match="overwrite"):
            place.run(_save)
        assert version_at(place.location) == _OLD
        place.assert_clean()


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_a_crash_over_the_leftovers_of_another_crash_is_cleaned_up(scheme: str, tmp_path: Path) -> None:
    count = len(_Place(scheme, tmp_path).run(_save))
    choices = random.Random(0)
    for first, second in [(choices.randrange(count), choices.randrange(count)) for _ in range(40)]:
        place = _Place(scheme, tmp_path)
        with pytest.raises(SimulatedCrash):
            place.run(_save, CrashAt(first, choices.choice(_MOMENTS)))
        assert version_at(place.location) is None
        with contextlib.suppress(SimulatedCrash):  # no crash if the second save needs fewer operations
            place.run(_save, CrashAt(second, choices.choice(_MOMENTS)))
            assert version_at(place.location) == _NEW
            continue
        assert version_at(place.location) is None, f"died at {first}, then at {second}"
        place.run(_save)
        assert version_at(place.location) == _NEW
        place.assert_clean()
