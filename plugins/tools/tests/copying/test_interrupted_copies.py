"""Copies that crash or fail at each operation leave the old checkpoint, the new one or none. The next copy resumes."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Final, Literal

import pytest
from ckptcore_testing.faults import CrashAt, FailAt, Fault, FaultPlan, Operation, SimulatedCrash
from ckptcore_testing.locations import faulty_context, new_place, objects_at, store_at, through
from ckptcore_tools.copies import CopyReport

import ckptcore
from ckptcore.commit.root import ROOT_KEY, SaveOrder
from ckptcore.commit.root_json import with_order
from ckptcore.commit.stored_root import Overwrite
from ckptcore.errors import CheckpointError, CommitUnknownError, StorageError
from tests.crashes.states import LARGE, make_composite, make_state, version_at

pytestmark = pytest.mark.system

_OLD, _NEW, _NEXT = 1, 2, 3
_MOMENTS: Final[tuple[Literal["before", "midway", "after"], ...]] = ("before", "midway", "after")
_FAST: Final = ckptcore.Context(durability="none", io=ckptcore.context.IOOptions(threads=1))


class _Trial:
    """A copy from a source to a destination whose storage has faults."""

    def __init__(self, scheme: str, directory: Path, source: str, overwrite: Overwrite) -> None:
        self._source = source
        self._overwrite = overwrite
        self.location = new_place(scheme, directory)
        if overwrite:
            ckptcore.save(self.location, make_state(_OLD), context=_FAST)

    def copy(self, *faults: Fault) -> list[Operation]:
        """Copy as a process that can crash, with faults at the destination. Return the operations there."""
        plan = FaultPlan(*faults)
        context = faulty_context(self.location, plan)
        ckptcore.copy(self._source, through(self.location), overwrite=self._overwrite, context=context)
        return plan.operations

    def go_on(self) -> CopyReport:
        """Copy again without faults."""
        return ckptcore.copy(self._source, self.location, overwrite=self._overwrite, context=_FAST)

    def assert_whole(self) -> None:
        """Check that the destination has only the copy. A copy that replaced a checkpoint has a higher order."""
        copied, stored = objects_at(self.location), objects_at(self._source)
        if self._overwrite:
            copied[ROOT_KEY] = with_order(copied[ROOT_KEY], SaveOrder())
        assert copied == stored
        assert list(store_at(self.location.removesuffix("/step")).list_names()) == ["step/"]


_SCENARIOS: Final[dict[str, tuple[str, bool, Overwrite, set[int | None]]]] = {
    # name: scheme, True for several checkpointables, overwrite, allowed versions after an interruption
    "to a directory": ("file", False, False, {_NEW, None}),
    "to objects": ("memory", False, False, {_NEW, None}),
    "of several checkpointables to a directory": ("file", True, False, {_NEW, None}),
    "of several checkpointables to objects": ("memory", True, False, {_NEW, None}),
    "over a directory": ("file", False, True, {_NEW, _OLD}),
    "over objects": ("memory", False, "non-atomic", {_NEW, _OLD, None}),
}


def _trials(name: str, directory: Path) -> tuple[str, bool, Overwrite, set[int | None], str]:
    scheme, several, overwrite, allowed = _SCENARIOS[name]
    source = new_place("memory", directory)
    if several:
        ckptcore.save_checkpointables(source, make_composite(_NEW), context=_FAST)
    else:
        ckptcore.save(source, make_state(_NEW), context=_FAST)
    return scheme, several, overwrite, allowed, source


@pytest.mark.parametrize("name", _SCENARIOS)
def test_a_copy_resumes_after_a_crash_at_any_operation(name: str, tmp_path: Path) -> None:
    scheme, _, overwrite, allowed, source = _trials(name, tmp_path)
    outcomes = set()
    for operation, moment in itertools.product(_Trial(scheme, tmp_path, source, overwrite).copy(), _MOMENTS):
        trial = _Trial(scheme, tmp_path, source, overwrite)
        where = f"died {moment} {operation}"
        try:
            trial.copy(CrashAt(operation.number, moment))
        except SimulatedCrash:
            pass
        else:
            # An operation that itself fails, such as a read of a missing object, has no moment after it.
            assert moment == "after", f"{where}, but the copy continued"
        version = version_at(trial.location)
        assert version in allowed, where
        outcomes.add(version)
        trial.go_on()
        assert version_at(trial.location) == _NEW, where
        trial.assert_whole()
    assert outcomes >= allowed - {_NEW}


@pytest.mark.parametrize("name", _SCENARIOS)
def test_a_copy_resumes_after_an_error_at_any_operation(name: str, tmp_path: Path) -> None:
    scheme, _, overwrite, allowed, source = _trials(name, tmp_path)
    for operation in _Trial(scheme, tmp_path, source, overwrite).copy():
        trial = _Trial(scheme, tmp_path, source, overwrite)
        where = f"{operation} failed"
        try:
            trial.copy(FailAt(operation.number, StorageError("the test lets it fail")))
        except CommitUnknownError:
            assert version_at(trial.location) in {*allowed, _NEW}, where
        except CheckpointError:
            assert version_at(trial.location) in allowed - {_NEW}, where
        else:
            assert version_at(trial.location) == _NEW, f"{where} and no error was raised"
        trial.go_on()
        assert version_at(trial.location) == _NEW, where
        trial.assert_whole()


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_complete_objects_are_not_sent_again(scheme: str, tmp_path: Path) -> None:
    source = new_place("memory", tmp_path)
    layout = ckptcore.SafetensorsLayout(max_file_bytes=LARGE)
    ckptcore.save(source, make_state(_NEW, LARGE), layout=layout, context=_FAST)
    operations = _Trial(scheme, tmp_path, source, False).copy()
    # A small object is written with one `put`.
    finishes = [
        operation
        for operation in operations
        if operation.name in ("finish", "put") and "safetensors" in operation.keys[0]
    ]
    assert len(finishes) > 3
    sizes = {key: len(data) for key, data in objects_at(source).items()}
    before = -1
    for number, finish in enumerate(finishes):
        trial = _Trial(scheme, tmp_path, source, False)
        with pytest.raises(SimulatedCrash):
            trial.copy(CrashAt(finish.number, "after"))
        complete = sum(
            sizes[operation.keys[0].removeprefix("step/").rpartition(".ckptcore/")[2]]
            for operation in finishes[: number + 1]
        )
        report = trial.go_on()
        assert report.kept_bytes == complete > before
        assert report.sent_bytes == report.nbytes - complete
        # The copy reads existing objects back, because their sizes do not show which save wrote them.
        assert report.read_back_bytes == complete
        trial.assert_whole()
        before = complete


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_partial_objects_are_sent_again(scheme: str, tmp_path: Path) -> None:
    source = new_place("memory", tmp_path)
    ckptcore.save(source, make_state(_NEW, LARGE), context=_FAST)
    operations = _Trial(scheme, tmp_path, source, False).copy()
    for operation in operations:
        if operation.name not in ("open_writer", "write_at"):
            continue
        trial = _Trial(scheme, tmp_path, source, False)
        with pytest.raises(SimulatedCrash):
            trial.copy(CrashAt(operation.number, "after"))
        trial.go_on()
        trial.assert_whole()
        assert version_at(trial.location) == _NEW
        assert store_at(trial.location).abort_uploads() == 0, "an unfinished upload"


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_a_copy_of_another_save_is_not_resumed(scheme: str, tmp_path: Path) -> None:
    sources = [new_place("memory", tmp_path) for _ in range(2)]
    for version, source in enumerate(sources, _NEW):
        ckptcore.save(source, make_state(version), context=_FAST)
    count = len(_Trial(scheme, tmp_path, sources[0], False).copy())
    for number in range(0, count - 1, 3):  # the last operation, after the commit, only looks for unfinished uploads
        trial = _Trial(scheme, tmp_path, sources[0], False)
        with pytest.raises(SimulatedCrash):
            trial.copy(CrashAt(number, "before"))
        other = _Trial(scheme, tmp_path, sources[1], False)
        other.location = trial.location
        assert other.go_on().kept_bytes == 0
        other.assert_whole()
        assert version_at(trial.location) == _NEXT
