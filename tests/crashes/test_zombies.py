"""A save that stands still while another one saves to its location, and then goes on."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import pytest

import ckptcore
from ckptcore.errors import CheckpointExistsError, SaveLostError
from ckptcore.testing.faults import FaultPlan, Operation
from tests.crashes.places import InterruptedPlan, faulty_context, through
from tests.crashes.states import make_state, version_at

_OLD, _ZOMBIE, _OTHER = 1, 2, 3

_names = itertools.count()


def _place(scheme: str, directory: Path) -> str:
    name = f"place-{next(_names)}"
    return f"file://{directory}/{name}/step_1" if scheme == "file" else f"memory://{directory.name}-{name}/step_1"


def _operations(scheme: str, directory: Path, overwrite: bool) -> list[Operation]:
    location = _place(scheme, directory)
    if overwrite:
        ckptcore.save(location, make_state(_OLD))
    plan = FaultPlan()
    ckptcore.save(through(location), make_state(_ZOMBIE), overwrite=overwrite, context=faulty_context(location, plan))
    return plan.operations


def test_a_checkpoint_that_was_committed_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    operations = _operations("memory", tmp_path, overwrite=False)
    claimed = next(operation for operation in operations if operation.name == "put")
    for operation in operations[: claimed.number + 1]:
        location = _place("memory", tmp_path)
        plan = InterruptedPlan(operation.number, functools.partial(ckptcore.save, location, make_state(_OTHER)))
        with pytest.raises((SaveLostError, CheckpointExistsError)):
            ckptcore.save(through(location), make_state(_ZOMBIE), context=faulty_context(location, plan))
        assert version_at(location) == _OTHER, f"interrupted at {operation}"
