"""Loads of a job in which every process reads for itself. The processes use the same order and finish together."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_testing import ThreadJob, ThreadNetwork

import ckptcore
from ckptcore import Context
from ckptcore.context import JobOptions, PluginOptions
from ckptcore.errors import (
    CheckpointError,
    CorruptCheckpointError,
    RankFailedError,
    TargetUndefinedError,
    TreeMismatchError,
)
from ckptcore.protocols import CheckpointableHandler, Coordinator, Priority
from ckptcore.runtime import runtime_of

PATIENCE_SECONDS = 60
"""Seconds after which a hang fails the test."""


class Meetings:
    """A collective operation like those of a process group: all ranks must call it in the same order."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size)
        self._called: dict[int, str] = {}
        self.order: list[str] = []

    def call(self, rank: int, name: str) -> None:
        self._called[rank] = name
        if self._barrier.wait(PATIENCE_SECONDS) == 0:
            names = set(self._called.values())
            self.order.append(name if len(names) == 1 else f"mixed up: {sorted(names)}")
        self._barrier.wait(PATIENCE_SECONDS)


class Joint:
    """An object whose state all ranks get and set together."""

    def __init__(
        self,
        name: str,
        value: float,
        meetings: Meetings | None = None,
        rank: int = 0,
        hook: Callable[[], None] | None = None,
    ) -> None:
        self.name, self.meetings, self.rank, self.hook = name, meetings, rank, hook
        self.state = np.full(3, value)

    def meet(self, method: str) -> None:
        if self.meetings is not None:
            self.meetings.call(self.rank, f"{method} {self.name}")
        if self.hook is not None and method != "get":
            self.hook()


class JointHandler(CheckpointableHandler):
    """A handler like that of FSDP modules, where each process has a part of the object."""

    priority = Priority.EXACT

    def flatten(self, value: Joint) -> object:
        value.meet("get")
        return {"state": value.state}

    def unflatten(self, like: Joint, state: object) -> object:
        like.meet("make")
        return state

    def restore(self, target: Joint, state: Any) -> None:
        target.meet("set")
        target.state = state["state"]


def context_of(coordinator: Coordinator, **job: Any) -> Context:
    return Context(
        job=JobOptions(coordinator=coordinator, **job),
        plugins=PluginOptions(handlers={Joint: JointHandler()}),
        durability="none",
    )


def run(work: Callable[[Context], Any], *, size: int = 2) -> list[Any]:
    job = ThreadJob(size, timeout_seconds=PATIENCE_SECONDS)
    return list(job.run(lambda coordinator: work(context_of(coordinator))))


def tree(meetings: Meetings, rank: int, value: float) -> dict[str, Any]:
    """Return a tree whose keys are in another order on odd ranks, at two levels."""
    objects = {name: Joint(name, value, meetings, rank) for name in ("a", "b", "c")}
    inner: dict[Any, Any] = {"a": objects["a"], "number": 1, "b": objects["b"]}
    whole: dict[Any, Any] = {"inner": inner, 3: objects["c"], "w": np.arange(4.0)}
    if rank % 2 == 0:
        return whole
    whole["inner"] = dict(reversed(inner.items()))
    return dict(reversed(whole.items()))


SORTED = ["c", "a", "b"]


def saved(directory: Path) -> Path:
    def save(context: Context) -> None:
        ckptcore.save(directory / "saved", tree(Meetings(1), 0, 7.0) | {"n": 1}, context=context)

    run(save, size=1)
    return directory / "saved"


def save_one(place: Path) -> None:
    run(lambda context: ckptcore.save(place, {"a": Joint("a", 7.0)}, context=context), size=1)


def with_number(wanted: Mapping[Any, Any]) -> dict[Any, Any]:
    return {**wanted, "n": 0}


def test_a_save_gets_states_of_objects_in_sorted_order(tmp_path: Path) -> None:
    meetings = Meetings(2)

    def save(context: Context) -> None:
        ckptcore.save(tmp_path / "x", tree(meetings, runtime_of(context).job().rank, 2.0), context=context)

    run(save)
    assert meetings.order == [f"get {name}" for name in SORTED]
    assert ckptcore.load(tmp_path / "x")["inner"]["b"]["state"].tolist() == [2.0] * 3


def test_checkpointables_in_different_orders_are_refused(tmp_path: Path) -> None:
    meetings = Meetings(2)

    def save(context: Context) -> None:
        rank = runtime_of(context).job().rank
        objects = {name: Joint(name, 2.0, meetings, rank) for name in ("a", "b")}
        given = objects if rank == 0 else dict(reversed(objects.items()))
        with pytest.raises(CheckpointError, match="order"):
            ckptcore.save_checkpointables(tmp_path / "x", given, context=context)

    run(save)
    assert meetings.order == ["get a", "get b"]


@pytest.mark.parametrize("reads", ["all", "broadcast"])
def test_load_into_restores_objects_in_sorted_order(tmp_path: Path, reads: Any) -> None:
    place, meetings = saved(tmp_path), Meetings(2)
    network = ThreadNetwork(2, timeout_seconds=PATIENCE_SECONDS)

    def load(coordinator: Coordinator) -> list[list[float]]:
        context = context_of(coordinator, reads=reads, collectives=network.collectives(coordinator.rank))
        target = with_number(tree(meetings, coordinator.rank, 0.0))
        ckptcore.load_into(place, target, context=context)
        return [restored.state.tolist() for restored in (target["inner"]["a"], target["inner"]["b"], target[3])]

    assert ThreadJob(2, timeout_seconds=PATIENCE_SECONDS).run(load) == [[[7.0] * 3] * 3] * 2
    assert meetings.order == [f"{method} {name}" for method in ("get", "set") for name in SORTED]


def test_load_builds_objects_in_sorted_order(tmp_path: Path) -> None:
    place, meetings = saved(tmp_path), Meetings(2)

    def load(context: Context) -> Any:
        return ckptcore.load(place, with_number(tree(meetings, runtime_of(context).job().rank, 0.0)), context=context)

    for loaded in run(load):
        assert [loaded[3]["state"].tolist(), loaded["inner"]["number"]] == [[7.0] * 3, 1]
    assert meetings.order == [f"{method} {name}" for method in ("get", "make") for name in SORTED]


def test_checkpointables_are_restored_in_the_order_of_the_save(tmp_path: Path) -> None:
    meetings = Meetings(2)

    def save(context: Context) -> None:
        objects = {name: Joint(name, 5.0) for name in ("b", "a")}
        ckptcore.save_checkpointables(tmp_path / "x", objects, context=context)

    def load(context: Context) -> list[str]:
        rank = runtime_of(context).job().rank
        objects = {name: Joint(name, 0.0, meetings, rank) for name in ("a", "b")}
        wanted = objects if rank == 0 else dict(reversed(objects.items()))
        loaded = ckptcore.load_checkpointables(tmp_path / "x", into=wanted, context=context)
        assert all(restored.state.tolist() == [5.0] * 3 for restored in objects.values())
        return list(loaded)

    run(save)
    assert run(load) == [["a", "b"], ["b", "a"]]
    gets = ["get b", "get a"]  # the order of the save
    assert meetings.order == [*gets, "get b", "set b", "get a", "set a"]


@pytest.mark.parametrize("load", [ckptcore.load, ckptcore.load_into])
def test_a_rank_whose_load_returned_may_delete_the_checkpoint(tmp_path: Path, load: Callable[..., Any]) -> None:
    place, returned = tmp_path / "x", threading.Event()

    def still_loading() -> None:
        assert not returned.wait(0.2), "rank 0 returned while rank 1 was loading"

    def run_rank(context: Context) -> None:
        hook = still_loading if runtime_of(context).job().rank == 1 else None
        load(place, {"a": Joint("a", 0.0, hook=hook)}, context=context)
        if runtime_of(context).job().rank == 0:
            returned.set()
            shutil.rmtree(place)

    save_one(place)
    run(run_rank)
    assert not place.exists()


def test_if_one_rank_cannot_load_no_rank_restores_an_object(tmp_path: Path) -> None:
    place, meetings = saved(tmp_path), Meetings(1)

    def load(context: Context) -> type[Exception]:
        rank = runtime_of(context).job().rank
        target = tree(meetings, 0, 0.0) if rank == 0 else {"missing": np.zeros(3)}
        with pytest.raises(CheckpointError) as raised:
            ckptcore.load_into(place, with_number(target), context=context)
        if rank == 0:
            assert "rank 1: TreeMismatchError" in str(raised.value)
            assert target["w"].tolist() == [0.0, 1.0, 2.0, 3.0]
        return raised.type

    assert run(load) == [RankFailedError, TreeMismatchError]
    assert meetings.order == [f"get {name}" for name in SORTED]


def test_if_restoring_fails_on_one_rank_all_ranks_raise(tmp_path: Path) -> None:
    def load(context: Context) -> None:
        def fail() -> None:
            if runtime_of(context).job().rank == 1:
                raise ValueError("no room")

        with pytest.raises(TargetUndefinedError, match="no room"):
            ckptcore.load_into(tmp_path / "x", {"a": Joint("a", 0.0, hook=fail)}, context=context)

    save_one(tmp_path / "x")
    run(load)


def test_if_one_rank_finds_damage_all_ranks_raise(tmp_path: Path) -> None:
    place = tmp_path / "x"
    ckptcore.save(place, {"v": np.zeros(8), "w": np.ones(8)})
    (file,) = place.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[data.index(np.ones(8).tobytes())] ^= 1
    file.write_bytes(data)

    def load(context: Context) -> None:
        wanted = {"v": np.zeros(8), "w": np.zeros(8) if runtime_of(context).job().rank == 1 else ckptcore.PLACEHOLDER}
        with pytest.raises(CorruptCheckpointError, match="w"):
            ckptcore.load(place, wanted, context=context)

    run(load)


def test_one_process_of_a_job_loads_alone(tmp_path: Path) -> None:
    place = saved(tmp_path)

    def load(coordinator: Coordinator) -> Any:
        if coordinator.rank:
            return None
        return ckptcore.load(place, context=context_of(coordinator, reads="alone"))["w"].tolist()

    assert ThreadJob(2, timeout_seconds=PATIENCE_SECONDS).run(load) == [[0.0, 1.0, 2.0, 3.0], None]
