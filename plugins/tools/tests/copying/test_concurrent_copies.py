"""Copies during other operations: another copy to the same destination, and a save at the source or destination."""

from __future__ import annotations

import contextlib
import functools
from concurrent.futures import CancelledError
from pathlib import Path

import pytest
from ckptcore_testing.faults import FaultPlan, Operation
from ckptcore_testing.locations import InterruptedPlan, faulty_context, new_place, objects_at, through
from ckptcore_tools.copies.copying import copy_checkpoint

import ckptcore
from ckptcore.context import default_context
from ckptcore.errors import CheckpointError, CheckpointExistsError, SaveLostError
from tests.crashes.states import make_composite, make_state, version_at

_OLD, _NEW, _OTHER = 1, 2, 3


def _operations_at(destination: str, source: str) -> list[Operation]:
    plan = FaultPlan()
    ckptcore.copy(source, through(destination), context=faulty_context(destination, plan))
    return plan.operations


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_two_copies_of_one_checkpoint_can_run_at_once(scheme: str, tmp_path: Path) -> None:
    source = new_place("memory", tmp_path)
    ckptcore.save(source, make_state(_NEW))
    lost = 0
    for operation in _operations_at(new_place(scheme, tmp_path), source):
        there = new_place(scheme, tmp_path)
        refused: list[CheckpointError] = []

        def copy_too(there: str = there, refused: list[CheckpointError] = refused) -> None:
            try:
                ckptcore.copy(source, there)
            except CheckpointError as error:
                refused.append(error)

        plan = InterruptedPlan(operation.number, copy_too)
        try:
            ckptcore.copy(source, through(there), context=faulty_context(there, plan))
        except SaveLostError:
            lost += 1
            assert not refused, f"neither copy committed, interrupted at {operation}"
        assert version_at(there) == _NEW, f"interrupted at {operation}"
        assert objects_at(there) == objects_at(source)
    assert not lost, "a copy raised SaveLostError, although its checkpoint exists"


def test_a_copy_detects_that_another_copy_took_over(tmp_path: Path) -> None:
    source = new_place("memory", tmp_path)
    ckptcore.save(source, make_state(_NEW))

    def begin(there: str) -> None:
        with contextlib.suppress(CancelledError, CheckpointExistsError):
            copy_checkpoint(source, there, default_context(), is_stopped=lambda: True)

    for operation in _operations_at(new_place("memory", tmp_path), source):
        there = new_place("memory", tmp_path)
        plan = InterruptedPlan(operation.number, functools.partial(begin, there))
        report = ckptcore.copy(source, through(there), context=faulty_context(there, plan))
        assert report.kept_bytes + report.sent_bytes == report.nbytes
        assert version_at(there) == _NEW, f"interrupted at {operation}"
        assert objects_at(there) == objects_at(source)


@pytest.mark.parametrize("several", [False, True])
def test_a_replacement_of_the_source_during_the_copy_is_detected(several: bool, tmp_path: Path) -> None:
    def save(place: str, version: int) -> None:
        if several:
            ckptcore.save_checkpointables(place, make_composite(version), overwrite="non-atomic")
        else:
            ckptcore.save(place, make_state(version), overwrite="non-atomic")

    for scheme in ("file", "memory"):
        first = new_place(scheme, tmp_path)
        save(first, _OLD)
        plan = FaultPlan()
        ckptcore.copy(through(first), new_place("memory", tmp_path), context=faulty_context(first, plan))
        for operation in plan.operations:
            here, there = new_place(scheme, tmp_path), new_place(("memory", "file")[operation.number % 2], tmp_path)
            save(here, _OLD)
            meanwhile = InterruptedPlan(operation.number, functools.partial(save, here, _NEW))
            context = faulty_context(here, meanwhile)
            # The destination is opened without faults, so only operations at the source are interrupted.
            ckptcore.copy(through(here), there, context=context)
            expected = {_NEW} if operation.number < plan.operations[-1].number else {_OLD, _NEW}
            assert version_at(there) in expected, f"interrupted at {operation}"


def test_a_concurrent_save_at_the_destination_is_detected(tmp_path: Path) -> None:
    source = new_place("memory", tmp_path)
    ckptcore.save(source, make_state(_NEW))
    for scheme in ("file", "memory"):
        operations = _operations_at(new_place(scheme, tmp_path), source)
        for operation in operations:
            there = new_place(scheme, tmp_path)
            refused: list[CheckpointError] = []

            def save(there: str = there, refused: list[CheckpointError] = refused) -> None:
                try:
                    ckptcore.save(there, make_state(_OTHER))
                except CheckpointError as error:
                    refused.append(error)

            context = faulty_context(there, InterruptedPlan(operation.number, save))
            try:
                ckptcore.copy(source, through(there), context=context)
            except (SaveLostError, CheckpointExistsError):
                assert not refused, f"neither the copy nor the save committed, interrupted at {operation}"
                before = operations[operation.number - 1]
                if operation.changes and before.name == "get" and before.keys == ("step/checkpoint.json",):
                    continue  # the save came after the check of the claim, which no storage combines with the change
                assert version_at(there) == _OTHER, f"interrupted at {operation}"
            else:
                assert version_at(there) == _NEW, f"interrupted at {operation}"


def test_a_deletion_of_the_source_during_the_copy_is_an_error(tmp_path: Path) -> None:
    first = new_place("memory", tmp_path)
    ckptcore.save(first, make_state(_OLD))
    plan = FaultPlan()
    ckptcore.copy(through(first), new_place("memory", tmp_path), context=faulty_context(first, plan))
    outcomes = set()
    for operation in plan.operations[:-1]:
        here, there = new_place("memory", tmp_path), new_place("memory", tmp_path)
        ckptcore.save(here, make_state(_OLD))
        context = faulty_context(here, InterruptedPlan(operation.number, functools.partial(ckptcore.delete, here)))
        with pytest.raises(CheckpointError) as raised:
            ckptcore.copy(through(here), there, context=context)
        outcomes.add(type(raised.value).__name__)
        assert version_at(there) is None
    assert outcomes <= {"CheckpointNotFoundError", "CorruptCheckpointError"}
