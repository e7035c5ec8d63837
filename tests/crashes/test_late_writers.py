"""A save that pauses, and continues after another process has saved to its location."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import pytest
from ckptcore_testing.faults import FaultPlan, Operation
from ckptcore_testing.locations import InterruptedPlan, faulty_context, through

import ckptcore
from ckptcore.commit.stored_root import Overwrite
from ckptcore.errors import CheckpointError, CheckpointExistsError, CorruptCheckpointError, SaveLostError
from tests.crashes.states import make_state, version_at, version_of

_OLD, _ZOMBIE, _OTHER = 1, 2, 3

_names = itertools.count()


def _place(scheme: str, directory: Path) -> str:
    name = f"place-{next(_names)}"
    return f"file://{directory}/{name}/step_1" if scheme == "file" else f"memory://{directory.name}-{name}/step_1"


def _operations(scheme: str, directory: Path, overwrite: Overwrite) -> list[Operation]:
    location = _place(scheme, directory)
    if overwrite:
        ckptcore.save(location, make_state(_OLD))
    plan = FaultPlan()
    ckptcore.save(through(location), make_state(_ZOMBIE), overwrite=overwrite, context=faulty_context(location, plan))
    return plan.operations


def test_a_checkpoint_that_another_save_committed_is_not_replaced(tmp_path: Path) -> None:
    operations = _operations("memory", tmp_path, overwrite=False)
    claimed = next(operation for operation in operations if operation.name == "put")
    for operation in operations[: claimed.number + 1]:
        location = _place("memory", tmp_path)
        plan = InterruptedPlan(operation.number, functools.partial(ckptcore.save, location, make_state(_OTHER)))
        with pytest.raises((SaveLostError, CheckpointExistsError)):
            ckptcore.save(through(location), make_state(_ZOMBIE), context=faulty_context(location, plan))
        assert version_at(location) == _OTHER, f"interrupted at {operation}"


def _stands_still_in_a_change(operations: list[Operation], operation: Operation) -> bool:
    """Return True if the operation is a change right after a check of the claim. No storage can combine the two."""
    before = operations[operation.number - 1]
    return operation.changes and before.name == "get" and before.keys == ("step_1/checkpoint.json",)


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_one_of_two_first_saves_commits(scheme: str, tmp_path: Path) -> None:
    outcomes = set()
    operations = _operations(scheme, tmp_path, overwrite=False)
    for operation in operations:
        location = _place(scheme, tmp_path)
        refused: list[CheckpointError] = []

        def save_other(location: str = location, refused: list[CheckpointError] = refused) -> None:
            try:
                ckptcore.save(location, make_state(_OTHER))
            except CheckpointError as error:
                refused.append(error)

        plan = InterruptedPlan(operation.number, save_other)
        context = faulty_context(location, plan)
        try:
            ckptcore.save(through(location), make_state(_ZOMBIE), context=context)
        except (SaveLostError, CheckpointExistsError):
            outcomes.add("lost")
            assert not refused, f"neither save committed, with one interrupted at {operation}"
            if scheme == "memory" and _stands_still_in_a_change(operations, operation):
                _never_wrong(location)
            else:
                assert version_at(location) == _OTHER, f"interrupted at {operation}"
        else:
            outcomes.add("won")
            assert refused, f"both saves committed, with one interrupted at {operation}"
            assert isinstance(refused[0], CheckpointExistsError | SaveLostError)
            assert version_at(location) == _ZOMBIE, f"interrupted at {operation}"
        assert plan.interrupted
    # The other save takes over the claim of a paused save. With directories, the commit is the last operation.
    assert outcomes == {"lost"}


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_two_overwriting_saves_commit_one_after_the_other(scheme: str, tmp_path: Path) -> None:
    overwrite: Overwrite = True if scheme == "file" else "non-atomic"
    operations = _operations(scheme, tmp_path, overwrite=overwrite)
    for operation in operations:
        location = _place(scheme, tmp_path)
        ckptcore.save(location, make_state(_OLD))
        save_other = functools.partial(ckptcore.save, location, make_state(_OTHER), overwrite=overwrite)
        plan = InterruptedPlan(operation.number, save_other)
        context = faulty_context(location, plan)
        try:
            ckptcore.save(through(location), make_state(_ZOMBIE), overwrite=overwrite, context=context)
        except SaveLostError:
            if scheme == "memory" and _stands_still_in_a_change(operations, operation):
                _never_wrong(location)
            else:
                assert version_at(location) == _OTHER, f"interrupted at {operation}"
        else:
            assert version_at(location) in (_ZOMBIE, _OTHER), f"interrupted at {operation}"
        ckptcore.save(location, make_state(_OLD), overwrite=overwrite)
        assert version_at(location) == _OLD
        if scheme == "file":
            assert [path.name for path in Path(location.removeprefix("file://")).parent.iterdir()] == ["step_1"]


def _never_wrong(location: str) -> None:
    try:
        assert version_of(ckptcore.load(location)) == _OTHER
    except CorruptCheckpointError:
        assert not ckptcore.verify(location).ok
