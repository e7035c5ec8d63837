"""Saves in which one rank fails at an unusual moment. The other ranks get its error."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from ckptcore_testing import ThreadJob, run_ranks

import ckptcore
from ckptcore.builtin.local import LocalStorage
from ckptcore.errors import (
    CheckpointError,
    CommitUnknownError,
    CoordinationTimeoutError,
    RankFailedError,
    StorageError,
    UnsupportedLeafError,
)
from ckptcore.job.agreement import Agreement
from ckptcore.protocols import Coordinator
from ckptcore.runtime import runtime_of
from ckptcore.saving.descriptions import TreeDescription
from tests.composites.objects import Files
from tests.saving.test_failures import job_context


def _outcomes(job: Callable[[Coordinator], object], size: int = 2, *, seconds: float = 30) -> list[Any]:
    """Return the error of each rank, or None."""

    def of_rank(coordinator: Coordinator) -> BaseException | None:
        try:
            job(coordinator)
        except Exception as error:  # noqa: BLE001  # compared by the test
            return error
        return None

    return list(ThreadJob(size, timeout_seconds=seconds).run(of_rank))


@pytest.mark.parametrize("begin", [ckptcore.save, ckptcore.save_async])
def test_a_rank_fails_while_it_waits_for_the_previous_save(begin: Any, tmp_path: Path) -> None:
    def job(coordinator: Coordinator) -> None:
        context = job_context(coordinator)
        if coordinator.rank == 1:

            def fail() -> None:
                raise MemoryError("only here")

            runtime_of(context).saves.wait = fail  # type: ignore[method-assign]  # simulates an interrupt
        begin(tmp_path / "c", {"w": np.ones(2)}, context=context)

    first, second = _outcomes(job)
    assert isinstance(first, RankFailedError) and "only here" in str(first) and isinstance(second, MemoryError)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("rank_that_fails", [0, 1])
def test_a_rank_fails_to_plan(rank_that_fails: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = TreeDescription.plan

    def fail(self: Any, rank: int, size: int, save_id: str) -> Any:
        if rank == rank_that_fails:
            raise MemoryError("only here")
        return plan(self, rank, size, save_id)

    monkeypatch.setattr(TreeDescription, "plan", fail)
    outcomes = _outcomes(lambda job: ckptcore.save(tmp_path / "c", {"w": np.ones(2)}, context=job_context(job)))
    assert isinstance(outcomes[rank_that_fails], MemoryError)
    assert isinstance(outcomes[1 - rank_that_fails], RankFailedError) and "only here" in str(
        outcomes[1 - rank_that_fails]
    )


@pytest.mark.parametrize("through_checkpointer", [False, True])
@pytest.mark.parametrize("rank_that_differs", [0, 1])
def test_the_ranks_stay_in_step_after_a_bad_name_on_one_rank(
    rank_that_differs: int, through_checkpointer: bool, tmp_path: Path
) -> None:
    def of_rank(rank: int, context: ckptcore.Context) -> list[str]:
        told = []
        checkpointer = ckptcore.Checkpointer(tmp_path / "run", context=context) if through_checkpointer else None
        for step in range(3):
            objects: Any = {"x": {"a": 1}}
            if step == 0 and rank == rank_that_differs:
                objects = {"": {"a": 1}}
            try:
                if checkpointer is not None:
                    checkpointer.save_checkpointables(step, objects)
                    checkpointer.wait()
                else:
                    ckptcore.save_checkpointables(tmp_path / "run" / str(step), objects, context=context)
            except CheckpointError as error:
                told.append(type(error).__name__)
                assert "'' cannot be the name" in str(error)
            else:
                told.append("saved")
        if checkpointer is not None:
            checkpointer.close()
        return told

    expected = [["RankFailedError", "saved", "saved"]] * 2
    expected[rank_that_differs] = ["InvalidLocationError", "saved", "saved"]
    assert run_ranks(2, of_rank, timeout_seconds=20) == expected


def test_all_ranks_raise_error_if_result_of_commit_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = LocalStorage.rename

    def fail(self: LocalStorage, source: str, destination: str) -> None:
        rename(self, source, destination)
        raise StorageError("the disk does not answer")

    monkeypatch.setattr(LocalStorage, "rename", fail)
    outcomes = _outcomes(lambda job: ckptcore.save(tmp_path / "c", {"w": np.ones(2)}, context=job_context(job)), 3)
    assert [type(error) for error in outcomes] == [CommitUnknownError] * 3
    assert not any("nothing was committed" in str(error) for error in outcomes)
    assert "does not answer" in str(outcomes[2])
    assert ckptcore.load(tmp_path / "c")["w"].tolist() == [1, 1]


class _CutOff:
    """A coordinator whose connection breaks in one exchange."""

    def __init__(self, inner: Coordinator, method: str, ending: str) -> None:
        self.inner, self.method, self.ending = inner, method, ending
        self.rank, self.size = inner.rank, inner.size

    def _may_break(self, method: str, key: str) -> None:
        if method == self.method and key.endswith(self.ending):
            raise ConnectionError("reset by peer")

    def gather(self, key: str, payload: bytes) -> Sequence[bytes] | None:
        self._may_break("gather", key)
        return self.inner.gather(key, payload)

    def broadcast(self, key: str, payload: bytes | None) -> bytes:
        self._may_break("broadcast", key)
        return self.inner.broadcast(key, payload)


@pytest.mark.parametrize(("method", "ending"), [("gather", "/commit"), ("broadcast", "/commit/verdict")])
@pytest.mark.parametrize("cut_off", [0, 1])
def test_a_connection_that_breaks_after_the_commit_does_no_harm(
    method: str, ending: str, cut_off: int, tmp_path: Path
) -> None:
    committed = threading.Event()

    class Told(_CutOff):
        """A coordinator with which rank 1 reaches the end of the commit after rank 0."""

        def gather(self, key: str, payload: bytes) -> Sequence[bytes] | None:
            if key.endswith("/commit"):
                if self.rank == 0:
                    committed.set()
                else:
                    assert committed.wait(30)
            return super().gather(key, payload)

    def save(coordinator: Coordinator) -> None:
        broken = Told(coordinator, method if coordinator.rank == cut_off else "", ending)
        ckptcore.save(tmp_path / "c", {"w": np.ones(2)}, context=job_context(broken))

    assert _outcomes(save, seconds=1) == [None, None]
    assert ckptcore.load(tmp_path / "c")["w"].tolist() == [1, 1]


def test_a_connection_that_breaks_before_the_commit_prevents_it(tmp_path: Path) -> None:
    def save(coordinator: Coordinator) -> None:
        broken = _CutOff(coordinator, "gather" if coordinator.rank == 0 else "", "/write")
        ckptcore.save(tmp_path / "c", {"w": np.ones(2)}, context=job_context(broken))

    first, second = _outcomes(save, seconds=1)
    assert isinstance(first, ConnectionError) and isinstance(second, CommitUnknownError)
    assert os.listdir(tmp_path) == []


def test_a_rank_raises_its_error_even_if_no_other_rank_answers() -> None:
    alone = ThreadJob(2, timeout_seconds=0.1).coordinator(0)
    with pytest.raises(OSError, match="disk is full") as caught, Agreement(alone, "save").stage("write"):
        raise OSError("the disk is full")
    assert any("CoordinationTimeoutError" in note for note in caught.value.__notes__)


def test_a_decision_that_is_not_json_fails_on_all_ranks() -> None:
    def decide(coordinator: Coordinator) -> None:
        Agreement(coordinator, "save").lead("decide", lambda: cast(Any, object()))

    assert ["not JSON" in str(error) for error in _outcomes(decide)] == [True, True]


def test_a_rank_that_writes_after_the_leader_gave_up_leaves_nothing(tmp_path: Path) -> None:
    gave_up = threading.Event()

    class Slow(Files):
        def save(self, directory: Path) -> Callable[[], None]:
            def rest() -> None:
                assert gave_up.wait(30)
                (directory / "f").write_bytes(b"1")

            return rest

    def save(coordinator: Coordinator) -> None:
        slow = Slow() if coordinator.rank else Files({"f": b"1"})
        try:
            ckptcore.save_checkpointables(tmp_path / "c", {"files": slow}, context=job_context(coordinator))
        finally:
            if coordinator.rank == 0:
                gave_up.set()

    first, second = _outcomes(save, seconds=1)
    assert isinstance(first, CoordinationTimeoutError) and isinstance(second, CheckpointError)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("make", [lambda: np.random.default_rng(0), lambda: random.Random(0)])
@pytest.mark.parametrize("named", [False, True])
def test_a_generator_in_a_shared_tree_is_refused(named: bool, make: Callable[[], object], tmp_path: Path) -> None:
    def save(coordinator: Coordinator) -> None:
        tree = {"w": np.ones(2), "of": [{"rng": make()}]}
        if named:
            ckptcore.save_checkpointables(tmp_path / "c", {"train": tree}, context=job_context(coordinator))
        else:
            ckptcore.save(tmp_path / "c", tree, context=job_context(coordinator))

    for error in _outcomes(save):
        assert isinstance(error, UnsupportedLeafError) and "as a separate name" in str(error)
        assert "of[0]/rng" in str(error) and ("'train'" in str(error)) == named
    assert os.listdir(tmp_path) == []


def test_each_process_saves_the_generator_of_its_own_tree(tmp_path: Path) -> None:
    def job(rank: int, context: ckptcore.Context) -> tuple[float, float]:
        generator = random.Random(rank)
        wrapped = {"train": ckptcore.PerProcess({"rng": generator})}
        ckptcore.save_checkpointables(tmp_path / "c", wrapped, context=context)
        expected, restored = generator.random(), random.Random(9)
        ckptcore.load_into(tmp_path / "c" / f"train.rank_{rank}", {"rng": restored})
        return expected, restored.random()

    for expected, actual in run_ranks(2, job, timeout_seconds=30):
        assert expected == actual
