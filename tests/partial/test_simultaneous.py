"""Sessions and ends that look at a place at the same time, where no lock keeps them apart: one of them is told that it lost."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

import ckptcore
from ckptcore.errors import CheckpointError, CheckpointNotFoundError, StorageError
from ckptcore.testing.faults import FaultPlan, Operation, Step
from tests.copying.places import new_place
from tests.crashes.places import InterruptedPlan, faulty_context, through

_Task = Callable[[str, ckptcore.Context], None]


def _first(place: str, context: ckptcore.Context) -> None:
    ckptcore.save_partial(place, {"first": np.full(5000, 1.0)}, context=context)


def _second(place: str, context: ckptcore.Context) -> None:
    ckptcore.save_partial(place, {"second": np.full(5000, 2.0)}, context=context)


def _finalize(place: str, context: ckptcore.Context) -> None:
    ckptcore.finalize(place, context=context)


class _Paused:
    """Does a task in a thread, up to an operation of its storage, where it stands still until it may go on, or fails."""

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
    """No faults; before some operations something else is done."""

    def __init__(self, meanwhile: Mapping[int, Callable[[], None]]) -> None:
        super().__init__()
        self._meanwhile = dict(meanwhile)

    def begin(self, name: str, keys: Sequence[str], offset: int = 0, nbytes: int = 0) -> Step:
        """Do it first."""
        self._meanwhile.pop(len(self.operations), lambda: None)()
        return super().begin(name, keys, offset, nbytes)


class _BeforeFinish(FaultPlan):
    """No faults; before the first upload is complete something else is done."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        super().__init__()
        self._meanwhile = [meanwhile]

    def begin(self, name: str, keys: Sequence[str], offset: int = 0, nbytes: int = 0) -> Step:
        """Do it first."""
        if name == "finish" and self._meanwhile:
            self._meanwhile.pop()()
        return super().begin(name, keys, offset, nbytes)


def _prepared(directory: Path) -> str:
    place = new_place("memory", directory)
    ckptcore.save_partial(place, {"before": np.full(5000, 0.0)})
    return place


def _since_claim(task: _Task, directory: Path) -> Sequence[Operation]:
    """What a task does from where it claims the place on."""
    place, plan = _prepared(directory), FaultPlan()
    task(through(place), faulty_context(place, plan))
    tried_first = 2  # by puts that must fail: see `Conditions.try_out`
    puts = [operation.number for operation in plan.operations if operation.name == "put"]
    return plan.operations[puts[tried_first] :]


@pytest.mark.parametrize(
    ("one", "other"),
    [(_first, _second), (_first, _finalize), (_finalize, _first), (_finalize, _finalize)],
)
def test_of_two_that_saw_the_same_only_one_goes_on(one: _Task, other: _Task, tmp_path: Path) -> None:
    """What both want to put in the place of the root must not be the same bytes: each would take it for its own."""
    claim, *later = _since_claim(one, tmp_path)
    numbers = range(claim.number + 1, later[-1].number + 8)  # one that is disturbed has more to do
    for begun, ended in itertools.product(_since_claim(other, tmp_path)[1:], numbers):
        place = _prepared(tmp_path)
        paused: list[_Paused] = []

        def begin(place: str = place, paused: list[_Paused] = paused, number: int = begun.number) -> None:
            paused.append(_Paused(other, place, number))

        done = []
        plan = _Between({claim.number: begin, ended: lambda paused=paused: paused[0].end()})  # type: ignore[misc]  # of a lambda
        try:
            one(through(place), faulty_context(place, plan))
            done.append(one)
        except CheckpointError:
            pass
        paused[0].end()
        if paused[0].error is None:
            done.append(other)
        moment = f"the other one stood at {begun}, and ended at {ended}"
        assert done, f"both lost: {moment}"
        try:
            ckptcore.finalize(place)
        except CheckpointNotFoundError:
            assert _finalize in done
        expected = (
            {"before": 0.0} | ({"first": 1.0} if _first in done else {}) | ({"second": 2.0} if _second in done else {})
        )
        found = ckptcore.load(place)
        assert set(found) == set(expected), moment
        assert all(np.array_equal(found[name], np.full(5000, value)) for name, value in expected.items()), moment
        assert ckptcore.verify(place).ok, moment


@pytest.mark.parametrize("sessions", [0, 1])
def test_a_session_that_lost_its_place_gives_up_no_upload_of_who_has_it(sessions: int, tmp_path: Path) -> None:
    """It fails in the middle of what the other one writes, and cleans up."""

    def prepared() -> str:
        place = new_place("memory", tmp_path)
        for number in range(sessions):
            ckptcore.save_partial(place, {f"before {number}": np.ones(3)})
        return place

    def save(place: str, context: ckptcore.Context) -> None:
        ckptcore.save_partial(place, {"large": np.ones(1 << 18)}, context=context)

    plan, place = FaultPlan(), prepared()
    _second(through(place), faulty_context(place, plan))
    written = next(one.number for one in plan.operations if one.name == "put" and ".safetensors" in one.keys[0])
    place = prepared()
    lost = _Paused(_second, place, written, StorageError("the test lets it fail"))
    save(through(place), faulty_context(place, _BeforeFinish(lost.end)))
    assert isinstance(lost.error, StorageError)
    ckptcore.finalize(place)
    assert np.array_equal(ckptcore.load(place)["large"], np.ones(1 << 18))
