"""Plans of saves: they predict what saves do, and do not touch any element."""

from __future__ import annotations

import pickle
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_testing import run_ranks
from ckptcore_tools.dry_run.leaves import running_leaves

import ckptcore
from ckptcore import AbstractArray, Context, Export, ShardedArray, WithExports
from ckptcore.builtin.host_leaves import HostArrayHandler
from ckptcore.context import IOOptions, MemoryOptions, PluginOptions
from ckptcore.errors import (
    CheckpointExistsError,
    CorruptCheckpointError,
    PluginError,
    RankFailedError,
    TreeMismatchError,
    UnsupportedLeafError,
)
from ckptcore.model import Box, HostArray, Pending, Ready, Shard
from ckptcore.protocols import HostBytes, HostMemory, LeafHandler
from ckptcore.runtime import runtime_of

LAYOUTS = ["safetensors", "dcp", "zarr3", "ocdbt", "zarr"]


class OnDevice:
    """An array outside host memory. Each view on the host is a copy, and the handler counts the copies."""

    def __init__(self, elements: HostArray) -> None:
        self.elements = elements


class DeviceHandler(LeafHandler):
    """A handler of `OnDevice`. It records how many bytes of views are alive, and the peak of this number."""

    priority = 100

    def __init__(self) -> None:
        self._host = HostArrayHandler()
        self._lock = threading.Lock()
        self._alive = 0
        self.peak = 0

    def describe(self, leaf: OnDevice) -> Any:
        return self._host.describe(leaf.elements)

    def abstract(self, leaf: OnDevice) -> Any:
        return self._host.abstract(leaf.elements)

    def identity(self, leaf: OnDevice) -> Hashable | None:
        return id(leaf)

    def shards(self, leaf: OnDevice, rank: int, size: int) -> Sequence[Shard]:
        return (Shard(Box.whole(leaf.elements.shape), rank, size),)

    def shards_of(self, leaf: OnDevice, process: int | None, rank: int, size: int) -> Sequence[Shard] | None:
        return self.shards(leaf, rank, size)

    def host_bytes(self, leaf: OnDevice, boxes: Sequence[Box]) -> HostBytes:
        nbytes = sum(box.size for box in boxes) * leaf.elements.itemsize
        return HostBytes(nbytes, nbytes)

    def copy_to_host(self, leaf: OnDevice, boxes: Sequence[Box], memory: HostMemory) -> Sequence[Pending[HostArray]]:
        return [memory.copy(leaf.elements[box.slices]) for box in boxes]

    def view_on_host(self, leaf: OnDevice, boxes: Sequence[Box]) -> Sequence[Pending[HostArray]]:
        views = [leaf.elements[box.slices].copy() for box in boxes]
        for view in views:
            with self._lock:
                self._alive += view.nbytes
                self.peak = max(self.peak, self._alive)
            weakref.finalize(view, self._freed, view.nbytes)
        return [Ready(view) for view in views]

    def _freed(self, nbytes: int) -> None:
        with self._lock:
            self._alive -= nbytes

    def wanted(self, *_: Any) -> Any:
        raise NotImplementedError

    def build(self, *_: Any) -> Any:
        raise NotImplementedError


class UntouchableHandler(DeviceHandler):
    def copy_to_host(self, leaf: OnDevice, boxes: Sequence[Box], memory: HostMemory) -> Sequence[Pending[HostArray]]:
        raise AssertionError("elements were touched")

    def view_on_host(self, leaf: OnDevice, boxes: Sequence[Box]) -> Sequence[Pending[HostArray]]:
        raise AssertionError("elements were touched")


class SilentHandler(UntouchableHandler):
    """A handler without the methods that only plans call."""

    def shards_of(self, leaf: OnDevice, process: int | None, rank: int, size: int) -> Sequence[Shard] | None:
        return LeafHandler.shards_of(self, leaf, process, rank, size)

    def host_bytes(self, leaf: OnDevice, boxes: Sequence[Box]) -> HostBytes:
        return LeafHandler.host_bytes(self, leaf, boxes)


def context_of(handler: DeviceHandler, **options: Any) -> Context:
    return Context(plugins=PluginOptions(handlers={OnDevice: handler}), **options)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_element_is_touched(layout: str) -> None:
    state = {"w": OnDevice(np.ones((400, 1000))), "b": OnDevice(np.ones(3)), "n": 3}
    plan = ckptcore.plan(state, layout=layout, context=context_of(UntouchableHandler()))
    assert (plan.arrays, plan.values, plan.array_bytes) == (2, 1, 3_200_024)
    assert plan.processes[0].array_bytes == 3_200_024
    assert plan.memory[0].viewed == plan.memory[0].copied == 3_200_024


def test_a_plan_writes_nothing_and_is_plain_data(tmp_path: Path) -> None:
    plan = ckptcore.plan({"w": np.ones(9)}, location=tmp_path / "c")
    assert list(tmp_path.iterdir()) == []
    assert plan.storage == "directories"
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert "1 processes write 2 objects" in str(plan)


def test_a_plan_refuses_existing_checkpoints_like_the_save(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"w": np.ones(9)})
    with pytest.raises(CheckpointExistsError):
        ckptcore.plan({"w": np.ones(9)}, location=tmp_path / "c")
    ckptcore.plan({"w": np.ones(9)}, location=tmp_path / "c", overwrite=True)
    ckptcore.plan({"w": np.ones(9)})
    assert np.array_equal(ckptcore.load(tmp_path / "c")["w"], np.ones(9))


@pytest.mark.parametrize("layout", ["safetensors", "zarr3"])
def test_a_plan_predicts_the_memory_of_a_blocking_save(layout: str, tmp_path: Path) -> None:
    handler = DeviceHandler()
    context = context_of(handler, io=IOOptions(threads=2), durability="none")
    state = {f"w{number}": OnDevice(np.zeros(1 << 22, np.uint8)) for number in range(32)}
    plan = ckptcore.plan(state, layout=layout, context=context)
    ckptcore.save(tmp_path / "c", state, layout=layout, context=context)
    peak = plan.memory[0].blocking_peak
    assert handler.peak <= peak <= handler.peak + (16 << 20)
    assert peak < plan.array_bytes


@pytest.mark.parametrize("save_bytes", [None, 4 << 20])
def test_a_plan_predicts_the_memory_of_an_asynchronous_save(save_bytes: int | None, tmp_path: Path) -> None:
    context = Context(memory=MemoryOptions(save_bytes=save_bytes), io=IOOptions(threads=2), durability="none")
    state = {f"w{number}": np.full(1 << 20, number, np.uint8) for number in range(24)}
    plan = ckptcore.plan(state, context=context)
    ckptcore.save_async(tmp_path / "c", state, context=context).result()
    held = runtime_of(context).staging.held_bytes  # the pool keeps the largest size that it had
    assert held <= plan.memory[0].async_peak <= held + (10 << 20)
    assert plan.memory[0].copied == plan.array_bytes


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tied_arrays_count_once_and_exports_are_listed(layout: str, tmp_path: Path) -> None:
    tied = np.arange(5000.0)
    state = {"model": {"a": tied, "b": tied, "c": np.ones(7)}, "step": 1}
    exports = [Export(location=tmp_path / "e", layout=layout, subtree="model")]
    plan = ckptcore.plan(state, layout=layout, exports=exports)
    assert (plan.arrays, plan.array_bytes) == (2, 40_056)
    ckptcore.save(tmp_path / "c", state, layout=layout, strategy=WithExports(exports))
    assert str(plan.exports[0].location) == str(tmp_path / "e")
    for planned, location in ((plan.processes, "c"), (plan.exports[0].processes, "e")):
        files = sum(path.is_file() for path in (tmp_path / location).rglob("*"))
        assert sum(len(process.objects) for process in planned) == files


def in_job(size: int, plan: Callable[[int, Context], Any]) -> Sequence[Any]:
    return run_ranks(size, plan)


def test_a_gap_between_processes_is_found_before_the_save() -> None:
    def plan(rank: int, context: Context) -> Any:
        part = ShardedArray.part(np.ones((3, 4)), (4 * rank, 0), (8, 4), cuts=[[4], []])
        return ckptcore.plan({"w": part}, context=context)

    with pytest.raises(ExceptionGroup) as caught:
        in_job(2, plan)
    leader, follower = sorted(caught.value.exceptions, key=lambda error: isinstance(error, RankFailedError))
    assert isinstance(leader, CorruptCheckpointError) and "the written boxes do not cover it exactly" in str(leader)
    assert isinstance(follower, RankFailedError)


def test_plans_and_saves_of_one_job_do_not_mix_their_messages(tmp_path: Path) -> None:
    def plan(rank: int, context: Context) -> Any:
        state = {"w": np.ones(9), f"of {rank}": np.ones(rank + 1)}
        plans = [ckptcore.plan(state, location=tmp_path / "c", context=context) for _ in range(2)]
        ckptcore.save(tmp_path / "c", state, context=context)
        return plans

    (first, second), *others = in_job(3, plan)
    assert first.arrays == second.arrays == 4
    assert all(plans == [first, second] for plans in others)
    assert sum(process.array_bytes for process in first.processes) == first.array_bytes == 8 * (9 + 1 + 2 + 3)


def test_a_plan_simulates_a_job_with_a_tree_for_each_rank() -> None:
    def state_of(rank: int) -> dict[str, Any]:
        return {"shared": AbstractArray((8,), "float32"), f"stage {rank}": AbstractArray((rank + 1, 100), "float64")}

    plan = ckptcore.plan(state_of, processes=3, layout="ocdbt")
    assert [process.array_bytes for process in plan.processes] == [832, 1600, 2400]
    assert len(plan.processes) == len(plan.memory) == 3
    with pytest.raises(TreeMismatchError):
        ckptcore.plan(lambda rank: {"w": AbstractArray((rank + 1,), "int8")}, processes=2)


def test_a_large_job_takes_no_memory_for_elements() -> None:
    shape = (1 << 17, 1 << 14)  # 8 GiB

    def state_of(rank: int) -> dict[str, Any]:
        rows = shape[0] // 16
        shard = ckptcore.ArrayShard(Box((rows * rank, 0), (rows * (rank + 1), shape[1])))
        return {"w": ShardedArray(shape, np.float32, [shard], cuts=[range(rows, shape[0], rows), []])}

    plan = ckptcore.plan(state_of, processes=16, layout="dcp")
    assert {process.array_bytes for process in plan.processes} == {1 << 29}
    assert plan.imbalance == 1.0
    assert plan.parts(64 << 20) == 16 * 9 + 2
    assert "rank" in str(plan)


def test_leaves_of_handlers_without_planning_are_planned_only_in_their_own_job() -> None:
    handler = SilentHandler()
    state = {"w": OnDevice(np.ones(5))}
    assert ckptcore.plan(state, context=context_of(handler)).memory[0].copied == 40
    with pytest.raises(UnsupportedLeafError, match="call plan in the processes of the job"):
        ckptcore.plan(state, processes=2, context=context_of(handler))
    with pytest.raises(ValueError, match="at least 1"):
        ckptcore.plan(state, processes=0)


def test_handlers_of_plans_forward_every_method() -> None:
    names = {name for name in vars(LeafHandler) if not name.startswith("_")}
    kind = type(running_leaves()(HostArrayHandler()))
    assert {name for name in names if getattr(kind, name) is getattr(LeafHandler, name)} == set()


def test_a_layout_that_reads_elements_for_a_plan_is_refused() -> None:
    class Encoding(ckptcore.SafetensorsLayout):
        def write(self, snapshot: Any, store: Any) -> Any:
            snapshot.take(0)

    with pytest.raises(PluginError, match=r"ForecastingLayout\.forecast"):
        ckptcore.plan({"w": np.ones(5)}, layout=Encoding())
