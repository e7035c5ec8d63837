"""Concurrent sessions, finalizations and deletions of one location: one succeeds, the others raise an error."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from ckptcore_testing.faults import FaultPlan, Operation, Step
from ckptcore_testing.locations import InterruptedPlan, faulty_context, new_place, objects_at, through

import ckptcore
from ckptcore.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ObjectNotFoundError,
    SaveLostError,
    StorageError,
    TreeMismatchError,
)

pytestmark = pytest.mark.system

_Task = Callable[[str, ckptcore.Context], None]


def _first(place: str, context: ckptcore.Context) -> None:
    ckptcore.partial(place, context=context).save({"first": np.full(5000, 1.0)})


def _second(place: str, context: ckptcore.Context) -> None:
    ckptcore.partial(place, context=context).save({"second": np.full(5000, 2.0)})


def _finalize(place: str, context: ckptcore.Context) -> None:
    ckptcore.partial(place, context=context).finalize()


class _Paused:
    """Runs a task in a thread, pauses it before an operation of its storage, and lets it continue or fail later."""

    def __init__(self, task: _Task, place: str, operation: int, then: Exception | None = None) -> None:
        self._then = then
        self._there, self._go_on = threading.Event(), threading.Event()
        self.error: BaseException | None = None
        context = faulty_context(place, InterruptedPlan(operation, self._stand))
        self._thread = threading.Thread(target=self._do, args=(task, through(place), context))
        self._thread.start()
        assert self._there.wait(60)

    def _do(self, task: _Task, place: str, context: ckptcore.Context) -> None:
        try:
            task(place, context)
        except CheckpointError as error:
            self.error = error
        finally:
            self._there.set()

    def _stand(self) -> None:
        self._there.set()
        assert self._go_on.wait(60)
        if self._then is not None:
            raise self._then

    def end(self) -> None:
        self._go_on.set()
        self._thread.join(60)
        assert not self._thread.is_alive()


class _Between(FaultPlan):
    """A plan without faults. Runs other functions before some operations."""

    def __init__(self, meanwhile: Mapping[int, Callable[[], None]]) -> None:
        super().__init__()
        self._meanwhile = dict(meanwhile)

    def begin(self, name: str, keys: Sequence[str], offset: int = 0, nbytes: int = 0) -> Step:
        """Run the function of the next operation first."""
        self._meanwhile.pop(len(self.operations), lambda: None)()
        return super().begin(name, keys, offset, nbytes)


class _BeforeFinish(FaultPlan):
    """A plan without faults. Runs another function before the first upload is completed."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        super().__init__()
        self._meanwhile = [meanwhile]

    def begin(self, name: str, keys: Sequence[str], offset: int = 0, nbytes: int = 0) -> Step:
        """Run the function first, if an upload is about to complete."""
        if name == "finish" and self._meanwhile:
            self._meanwhile.pop()()
        return super().begin(name, keys, offset, nbytes)


def _prepared(directory: Path) -> str:
    place = new_place("memory", directory)
    ckptcore.partial(place).save({"before": np.full(5000, 0.0)})
    return place


def _since_claim(task: _Task, directory: Path) -> Sequence[Operation]:
    """Return the operations of a task, from its claim of the location."""
    place, plan = _prepared(directory), FaultPlan()
    task(through(place), faulty_context(place, plan))
    tried_first = 2  # these puts must fail: see `Conditions.try_out`
    puts = [operation.number for operation in plan.operations if operation.name == "put"]
    return plan.operations[puts[tried_first] :]


@pytest.mark.parametrize(
    ("task", "other"),
    [(_first, _second), (_first, _finalize), (_finalize, _first), (_finalize, _finalize)],
)
def test_only_one_of_two_tasks_that_read_the_same_root_succeeds(task: _Task, other: _Task, tmp_path: Path) -> None:
    """The roots that they write must differ. If they were equal, each process would take the other root for its own."""
    claim, *later = _since_claim(task, tmp_path)
    numbers = range(claim.number + 1, later[-1].number + 8)  # a disturbed task needs more operations
    for begun, ended in itertools.product(_since_claim(other, tmp_path)[1:], numbers):
        place = _prepared(tmp_path)
        paused: list[_Paused] = []

        def begin(place: str = place, paused: list[_Paused] = paused, number: int = begun.number) -> None:
            paused.append(_Paused(other, place, number))

        done = []
        plan = _Between({claim.number: begin, ended: lambda paused=paused: paused[0].end()})  # type: ignore[misc]  # of a lambda
        try:
            task(through(place), faulty_context(place, plan))
            done.append(task)
        except CheckpointError:
            pass
        paused[0].end()
        if paused[0].error is None:
            done.append(other)
        moment = f"the other one stood at {begun}, and ended at {ended}"
        assert done, f"both lost: {moment}"
        try:
            ckptcore.partial(place).finalize()
        except CheckpointNotFoundError:
            assert _finalize in done
        expected = (
            {"before": 0.0} | ({"first": 1.0} if _first in done else {}) | ({"second": 2.0} if _second in done else {})
        )
        loaded = ckptcore.load(place)
        assert set(loaded) == set(expected), moment
        assert all(np.array_equal(loaded[name], np.full(5000, value)) for name, value in expected.items()), moment
        assert ckptcore.verify(place).ok, moment


@pytest.mark.parametrize("sessions", [0, 1])
def test_a_lost_session_does_not_abort_uploads_of_its_successor(sessions: int, tmp_path: Path) -> None:
    """The lost session fails while the other session is writing, and then cleans up."""

    def prepared() -> str:
        place = new_place("memory", tmp_path)
        for number in range(sessions):
            ckptcore.partial(place).save({f"before {number}": np.ones(3)})
        return place

    def save(place: str, context: ckptcore.Context) -> None:
        ckptcore.partial(place, context=context).save({"large": np.ones(1 << 18)})

    plan, place = FaultPlan(), prepared()
    _second(through(place), faulty_context(place, plan))
    written = next(
        operation.number
        for operation in plan.operations
        if operation.name == "put" and ".safetensors" in operation.keys[0]
    )
    place = prepared()
    lost = _Paused(_second, place, written, StorageError("the test lets it fail"))
    save(through(place), faulty_context(place, _BeforeFinish(lost.end)))
    assert isinstance(lost.error, StorageError)
    ckptcore.partial(place).finalize()
    assert np.array_equal(ckptcore.load(place)["large"], np.ones(1 << 18))


def _delete(place: str, context: ckptcore.Context) -> None:
    ckptcore.delete(place, context=context)


def _beside(place: str) -> set[str]:
    """Return the names of the files in the parent directory."""
    run = place.rpartition("/")[0]
    if place.startswith("file:"):
        return {entry.name for entry in Path(run.removeprefix("file://")).iterdir()}
    return {key.partition("/")[0] for key in objects_at(run)}


def _each_moment(
    task: _Task, prepare: Callable[[], str], meanwhile: _Task
) -> Iterator[tuple[str, Exception | None, bool]]:
    """Run a task once for each of its operations. Before that operation, run the task of another process.

    Yields the location, the error of the task, and whether the other task succeeded.
    """
    plan, place = FaultPlan(), prepare()
    task(through(place), faulty_context(place, plan))
    for number in range(len(plan.operations)):
        place = prepare()
        done: list[bool] = []

        def between(place: str = place, done: list[bool] = done) -> None:
            try:
                meanwhile(place, ckptcore.Context(durability="none", io=ckptcore.context.IOOptions(threads=1)))
                done.append(True)
            except CheckpointError:
                pass

        error = None
        try:
            task(through(place), faulty_context(place, InterruptedPlan(number, between)))
        except CheckpointError as failure:
            error = failure
        yield place, error, bool(done)


@pytest.mark.parametrize("scheme", ["file", "memory"])
@pytest.mark.parametrize("task", [_first, _finalize])
def test_a_concurrent_finalization_is_not_reported_as_damage(task: _Task, scheme: str, tmp_path: Path) -> None:
    """Tables of deleted sessions must not remain: a user who deletes the supposed damage would lose the checkpoint."""

    def prepare() -> str:
        place = new_place(scheme, tmp_path)
        ckptcore.partial(place).save({"before": np.full(5, 0.0)})
        return place

    told = set()
    for place, error, done in _each_moment(task, prepare, _finalize):
        assert error is None or isinstance(error, SaveLostError | CheckpointExistsError | CheckpointNotFoundError), (
            error
        )
        told.add(type(error))
        if done:
            assert set(ckptcore.load(place)) == {"before"}
            assert _beside(place) == {"step"}, "something is left"
    assert len(told) > 1, "it was never disturbed"


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_no_session_begins_if_a_checkpoint_appears_meanwhile(scheme: str, tmp_path: Path) -> None:
    def fill(place: str, context: ckptcore.Context) -> None:
        _second(place, context)
        _finalize(place, context)

    def save(place: str, context: ckptcore.Context) -> None:
        ckptcore.save(place, {"second": np.full(5, 2.0)}, context=context)

    for meanwhile in (fill, save):
        for place, error, done in _each_moment(_first, lambda: new_place(scheme, tmp_path), meanwhile):
            if done:
                assert isinstance(error, SaveLostError | CheckpointExistsError), error
                assert _beside(place) == {"step"} and set(ckptcore.load(place)) == {"second"}


@pytest.mark.parametrize("scheme", ["file", "memory"])
@pytest.mark.parametrize(
    ("committed", "meanwhile"),
    [(False, _delete), (True, _delete), (False, _finalize)],
    ids=["both", "of a checkpoint", "end"],
)
def test_a_deletion_succeeds_only_if_nothing_remains(
    committed: bool, meanwhile: _Task, scheme: str, tmp_path: Path
) -> None:
    def prepare() -> str:
        place = new_place(scheme, tmp_path)
        ckptcore.partial(place).save({"before": np.full(5, 0.0)})
        if committed:
            ckptcore.partial(place).finalize()
        return place

    for place, error, done in _each_moment(_delete, prepare, meanwhile):
        if error is None:
            with pytest.raises(CheckpointNotFoundError):
                ckptcore.load(place)
            assert not _beside(place)
        else:
            assert done
            expected = (SaveLostError, CheckpointNotFoundError, CheckpointExistsError, ObjectNotFoundError)
            assert isinstance(error, expected), error
            if meanwhile is _finalize:
                assert set(ckptcore.load(place)) == {"before"}


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_a_finalization_that_is_too_early_disturbs_no_session(scheme: str, tmp_path: Path) -> None:
    """A program may call `finalize` again and again, until all sessions are complete."""
    parts = [ckptcore.ShardedArray.part(np.full(2, number), (2 * number,), (6,)) for number in range(3)]

    def save(number: int) -> _Task:
        return lambda place, context: ckptcore.partial(place, layout="dcp", context=context).save({"w": parts[number]})

    def prepare(sessions: int) -> str:
        place = new_place(scheme, tmp_path)
        for number in range(sessions):
            save(number)(place, ckptcore.Context())
        return place

    def with_another_layout(place: str, context: ckptcore.Context) -> None:
        ckptcore.partial(place, layout="zarr3", context=context).finalize()

    for sessions, early in itertools.product((0, 1), (_finalize, with_another_layout)):
        for place, error, done in _each_moment(save(sessions), lambda sessions=sessions: prepare(sessions), early):  # type: ignore[misc]  # of a lambda
            assert error is None and not done
            save(sessions + 1)(place, ckptcore.Context())  # reads the table of the session before
    place = prepare(2)
    with pytest.raises(TreeMismatchError, match="4 of its 6"):
        ckptcore.partial(place).finalize()
    save(2)(place, ckptcore.Context())
    ckptcore.partial(place).finalize()
    assert ckptcore.load(place)["w"].tolist() == [0, 0, 1, 1, 2, 2]
