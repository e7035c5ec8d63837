"""Crashes and errors at any operation of a session, a finalization or a deletion.

Earlier sessions are kept, and the next program can continue.
"""

from __future__ import annotations

import itertools
import random
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import pytest
from ckptcore_testing.faults import CrashAt, FailAt, FaultPlan, FullAfter, Operation, SimulatedCrash
from ckptcore_testing.locations import (
    SCHEME,
    InterruptedPlan,
    faulty_context,
    new_place,
    objects_at,
    simulated_context,
    through,
)
from ckptcore_testing.simulated_disk import SimulatedDisk
from ckptcore_testing.trees import same_value

import ckptcore
from ckptcore.builtin.safetensors import SafetensorsLayout
from ckptcore.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    SaveLostError,
    StorageError,
    StorageFullError,
    TreeMismatchError,
    UncommittedCheckpointError,
)
from tests.crashes.saver import partial_state
from tests.crashes.tracing import Saver, needs_strace

pytestmark = pytest.mark.system

_MOMENTS: Final[tuple[Literal["before", "midway"], ...]] = ("before", "midway")
_LAYOUTS: Final = ["safetensors", "ocdbt", "zarr3", "dcp"]
_QUICK: Final = [("memory", "dcp"), ("file", "ocdbt")]
_PLACES: Final = [
    pytest.param(*place, marks=[] if place in _QUICK else pytest.mark.slow)
    for place in itertools.product(["memory", "file"], _LAYOUTS)
]
"""Schemes and layouts. All but two combinations run only as slow tests."""
_SAMPLE: Final = 12

_Task = Callable[[str, ckptcore.Context | None], None]


def _session(number: int, layout: str) -> _Task:
    def save(location: str, context: ckptcore.Context | None) -> None:
        ckptcore.partial(location, layout=layout, context=context).save(partial_state(number))

    return save


def _finalize(location: str, context: ckptcore.Context | None) -> None:
    ckptcore.partial(location, context=context).finalize()


def _delete(location: str, context: ckptcore.Context | None) -> None:
    ckptcore.delete(location, context=context)


def _operations(place: str, task: _Task) -> Sequence[Operation]:
    plan = FaultPlan()
    task(through(place), faulty_context(place, plan))
    return plan.operations


def _prepared(scheme: str, directory: Path, sessions: int, layout: str) -> str:
    place = new_place(scheme, directory)
    for number in range(sessions):
        _session(number, layout)(place, None)
    return place


def _save_missing(place: str, numbers: Sequence[int], layout: str) -> None:
    """Save the missing sessions. A session that exists must be rejected."""
    for number in numbers:
        try:
            _session(number, layout)(place, None)
        except TreeMismatchError as error:
            assert "already" in str(error)


def _expect_whole(place: str, sessions: int) -> None:
    states = [partial_state(number) for number in range(sessions)]
    arrays = {name: array for state in states for name, array in state["arrays"].items()}
    loaded = ckptcore.load(place)
    assert set(loaded) == {key for state in states for key in state} and set(loaded["arrays"]) == set(arrays)
    assert all(same_value(loaded["arrays"][name], array) for name, array in arrays.items())
    assert ckptcore.verify(place).ok
    name = place.rpartition("/")[2]
    known = {f"{name}/{key}" for key in ("checkpoint.json", *ckptcore.metadata(place).objects)}
    assert set(objects_at(place.rpartition("/")[0])) == known, "something is left"


def _die(place: str, task: _Task, operation: Operation, moment: Literal["before", "midway"]) -> None:
    plan = FaultPlan(CrashAt(operation.number, moment))
    with pytest.raises(SimulatedCrash):
        task(through(place), faulty_context(place, plan))


@pytest.mark.parametrize(("scheme", "layout"), _PLACES)
def test_a_crashed_session_does_not_count(scheme: str, layout: str, tmp_path: Path) -> None:
    for before in (0, 1):
        task = _session(before, layout)
        operations = _operations(_prepared(scheme, tmp_path, before, layout), task)
        assert len(operations) > 5
        for operation, moment in itertools.product(operations, _MOMENTS):
            place = _prepared(scheme, tmp_path, before, layout)
            _die(place, task, operation, moment)
            with pytest.raises((UncommittedCheckpointError, CheckpointNotFoundError)):
                ckptcore.load(place)
            _save_missing(place, [before + 1, before], layout)
            _finalize(place, None)
            _expect_whole(place, before + 2)


@pytest.mark.parametrize(("scheme", "layout"), _PLACES)
def test_a_crashed_finalization_leaves_the_sessions_or_the_checkpoint(scheme: str, layout: str, tmp_path: Path) -> None:
    outcomes = set()
    for operation, moment in itertools.product(
        _operations(_prepared(scheme, tmp_path, 2, layout), _finalize), _MOMENTS
    ):
        place = _prepared(scheme, tmp_path, 2, layout)
        _die(place, _finalize, operation, moment)
        try:
            ckptcore.load(place)
        except UncommittedCheckpointError as error:
            assert "2 complete sessions" in str(error), f"died {moment} {operation}"
            outcomes.add("sessions")
            _session(2, layout)(place, None)
            _finalize(place, None)
            _expect_whole(place, 3)
            continue
        outcomes.add("checkpoint")
        with suppress(CheckpointNotFoundError):  # the checkpoint was already complete
            _finalize(place, None)
        _expect_whole(place, 2)
    assert outcomes == {"sessions", "checkpoint"}


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_a_crashed_deletion_leaves_the_sessions_or_a_free_location(scheme: str, tmp_path: Path) -> None:
    outcomes = set()
    for operation, moment in itertools.product(_operations(_prepared(scheme, tmp_path, 2, "dcp"), _delete), _MOMENTS):
        place = _prepared(scheme, tmp_path, 2, "dcp")
        _die(place, _delete, operation, moment)
        try:
            ckptcore.load(place)
        except UncommittedCheckpointError as error:
            if "2 complete sessions" in str(error):
                outcomes.add("sessions")
                _finalize(place, None)
                _expect_whole(place, 2)
                continue
        except CheckpointNotFoundError:
            pass
        outcomes.add("nothing")
        ckptcore.save(place, {"a": 1})
        assert ckptcore.load(place) == {"a": 1}
        assert {key.partition("/")[0] for key in objects_at(place.rpartition("/")[0])} == {place.rpartition("/")[2]}
    assert outcomes == {"sessions", "nothing"}


@pytest.mark.parametrize("layout", ["safetensors", "zarr3"])
@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_one_failed_operation_loses_no_session(scheme: str, layout: str, tmp_path: Path) -> None:
    for sessions, task in ((1, _session(1, layout)), (2, _finalize)):
        for operation in _operations(_prepared(scheme, tmp_path, sessions, layout), task):
            place = _prepared(scheme, tmp_path, sessions, layout)
            plan = FaultPlan(FailAt(operation.number, StorageError("the test lets it fail")))
            with suppress(CheckpointError):
                task(through(place), faulty_context(place, plan))
            if task is not _finalize:
                _save_missing(place, [1], layout)
            try:
                _finalize(place, None)
            except CheckpointNotFoundError:
                assert task is _finalize, f"{operation} failed"
            _expect_whole(place, 2)


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_a_session_removes_the_files_of_a_failed_session(scheme: str, tmp_path: Path) -> None:
    """These files may be as large as later sessions, and the finalization may be days later."""
    task = _session(1, "safetensors")
    operations = _operations(_prepared(scheme, tmp_path, 1, "safetensors"), task)
    last = [operation for operation in operations if operation.name == "put"][-1]
    place = _prepared(scheme, tmp_path, 1, "safetensors")
    _die(place, task, last, "before")
    left = {key for key in objects_at(place.rpartition("/")[0]) if "session-00002" in key}
    assert left
    task(place, None)
    assert not left & set(objects_at(place.rpartition("/")[0]))


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_a_session_on_a_full_disk_leaves_no_files(scheme: str, tmp_path: Path) -> None:
    place = _prepared(scheme, tmp_path, 1, "safetensors")
    plan = FaultPlan()
    _session(1, "safetensors")(through(place), faulty_context(place, plan))
    room = sum(operation.nbytes for operation in plan.operations if operation.changes)
    for nbytes in range(0, room, room // 20):
        place = _prepared(scheme, tmp_path, 1, "safetensors")
        before = set(objects_at(place.rpartition("/")[0]))
        with pytest.raises(StorageFullError):
            _session(1, "safetensors")(through(place), faulty_context(place, FaultPlan(FullAfter(nbytes))))
        assert set(objects_at(place.rpartition("/")[0])) == before
        _session(1, "safetensors")(place, None)
        _finalize(place, None)
        _expect_whole(place, 2)


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_one_of_two_concurrent_sessions_raises_an_error(scheme: str, tmp_path: Path) -> None:
    """With locks, the second session is refused. Without locks, it takes over. A session without an error is kept."""
    told: set[str] = set()
    for operation in _operations(_prepared(scheme, tmp_path, 1, "zarr3"), _session(1, "zarr3")):
        place = _prepared(scheme, tmp_path, 1, "zarr3")
        saved = {0}

        def meanwhile(place: str = place, saved: set[int] = saved) -> None:
            for state in ({"arrays": {"array 1": np.full(50, 77)}}, partial_state(2)):
                try:
                    ckptcore.partial(place, layout="zarr3").save(state)
                except (SaveLostError, TreeMismatchError):
                    continue
                saved.add(2 if state is not None and "array 2" in state["arrays"] else 77)

        plan = InterruptedPlan(operation.number, meanwhile)
        try:
            _session(1, "zarr3")(through(place), faulty_context(place, plan))
            saved.add(1)
        except (SaveLostError, TreeMismatchError):
            told.add("first")
        assert not {1, 77} <= saved, "an array was saved twice"
        if saved == {0, 1}:
            told.add("second")
        _finalize(place, None)
        loaded = ckptcore.load(place)["arrays"]
        assert ckptcore.verify(place).ok
        expected = {f"array {number}" for number in saved if number != 77} | ({"array 1"} if 77 in saved else set())
        assert set(loaded) == expected, f"interrupted at {operation}"
        if 77 in saved:
            assert np.array_equal(loaded["array 1"], np.full(50, 77))
    assert told == ({"first", "second"} if scheme == "file" else {"first"})


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_a_finalization_or_deletion_makes_a_running_session_fail(scheme: str, tmp_path: Path) -> None:
    for end in (_finalize, _delete):
        for operation in _operations(_prepared(scheme, tmp_path, 1, "dcp"), _session(1, "dcp")):
            place = _prepared(scheme, tmp_path, 1, "dcp")
            ended: list[bool] = []

            def meanwhile(place: str = place, ended: list[bool] = ended, end: _Task = end) -> None:
                try:
                    end(place, None)
                    ended.append(True)
                except SaveLostError:
                    pass  # a storage with locks refuses it

            saved = True
            try:
                _session(1, "dcp")(through(place), faulty_context(place, InterruptedPlan(operation.number, meanwhile)))
            except CheckpointError:
                saved = False
            assert not (saved and ended) or end is _delete, f"interrupted at {operation}"
            if ended and end is _finalize:
                assert set(ckptcore.load(place)["arrays"]) == {"array 0"}
                assert ckptcore.verify(place).ok
            elif not ended:
                assert saved
                _finalize(place, None)
                _expect_whole(place, 2)


_ON_DISK: Final = f"{SCHEME}://runs/a/step_1"


def _with_sessions(task: str, crash_at: int | None = None) -> SimulatedDisk:
    disk = SimulatedDisk(crash_at=crash_at)
    for number in range(1 if task == "session" else 2):
        _session(number, "safetensors")(_ON_DISK, simulated_context(disk))
    return disk


@pytest.mark.parametrize("task", ["session", "finalize"])
def test_a_power_failure_at_each_step(task: str) -> None:
    """The disk keeps all synced data, and any part of the rest."""
    chance = random.Random(0)
    do = _session(1, "safetensors") if task == "session" else _finalize
    disk = _with_sessions(task)
    first = len(disk.steps)
    do(_ON_DISK, simulated_context(disk))
    for survivor in disk.after_power_loss(chance, 3):
        with pytest.raises(TreeMismatchError) if task == "session" else pytest.raises(CheckpointError):
            _session(1, "safetensors")(_ON_DISK, simulated_context(survivor))  # the session is complete
    for crash_at in range(first + 1, len(disk.steps)):
        dying = _with_sessions(task, crash_at)
        with pytest.raises(SimulatedCrash):
            do(_ON_DISK, simulated_context(dying))
        for survivor in dying.after_power_loss(chance, 3):
            context = simulated_context(survivor)
            with suppress(TreeMismatchError, CheckpointExistsError):
                _session(1, "safetensors")(_ON_DISK, context)
            try:
                _finalize(_ON_DISK, context)
            except CheckpointNotFoundError:
                assert task == "finalize"
            assert set(ckptcore.load(_ON_DISK, context=context)["arrays"]) == {"array 0", "array 1"}, (
                f"before step {crash_at}: {disk.steps[crash_at]}"
            )
            assert ckptcore.verify(_ON_DISK, context=context).ok


def _try_kill(place: Path, warm: Saver, task: str, point: Any) -> None:
    status = warm.killed(task, str(place), point)
    assert status in (0, -signal.SIGKILL), f"{task} ended with {status}"


@pytest.mark.parametrize("task", ["save-partial", "finalize"])
def test_a_sample_of_kills(task: str, warm: Saver, tmp_path: Path) -> None:
    needs_strace()
    _kills(task, warm, tmp_path, sample=_SAMPLE)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["save-partial", "finalize"])
def test_every_kill(task: str, full: bool, warm: Saver, tmp_path: Path) -> None:
    needs_strace()
    _kills(task, warm, tmp_path, sample=None if full else 60)


def _kills(task: str, warm: Saver, directory: Path, *, sample: int | None) -> None:
    sessions = 1 if task == "save-partial" else 2

    def prepare(name: str) -> Path:
        place = directory / name / "run" / "step_1"
        for number in range(sessions):
            ckptcore.partial(place).save(partial_state(number))
        return place

    points = list(warm.kill_points(task, str(prepare("traced")), directory / "trace"))
    for number, point in enumerate(points if sample is None else points[:: max(1, len(points) // sample)]):
        place = prepare(str(number))
        _try_kill(place, warm, task, point)
        committed = place.exists()
        if not committed:
            with pytest.raises(UncommittedCheckpointError, match=r"[12] complete session"):
                ckptcore.load(place)
            _save_missing(str(place), [1, 2], "safetensors")
        try:
            ckptcore.partial(place).finalize()
        except CheckpointNotFoundError:
            assert committed, f"killed at {point}"
        _expect_whole(f"file://{place}", 2 if committed else 3)


def test_sessions_and_finalization_need_equal_layout_options(tmp_path: Path) -> None:
    """The stem of file names is such an option. This test involves no crash."""
    layout = SafetensorsLayout(stem="adapter_model")
    ckptcore.partial(tmp_path / "a", layout=layout).save({"x": np.ones(3)})
    with pytest.raises(CheckpointError, match="adapter_model"):
        ckptcore.partial(tmp_path / "a").finalize()
    ckptcore.partial(tmp_path / "a", layout=layout).finalize()
    assert (tmp_path / "a" / "adapter_model.safetensors.index.json").exists()
