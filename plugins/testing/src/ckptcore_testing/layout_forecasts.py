"""Conformance tests of dry runs: the plan must match the save."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest

import ckptcore
from ckptcore import ArrayShard, Context, ShardedArray
from ckptcore.builtin.memory import MemoryStorages
from ckptcore.context import IOOptions, JobOptions, PluginOptions, ReplicaOptions
from ckptcore.hookspecs import hookimpl
from ckptcore.model import Box
from ckptcore.protocols import Coordinator, Layout, StorageBackend, StorageOpener, StorageOptions
from ckptcore_testing.faults import FaultPlan
from ckptcore_testing.faulty_storage import with_faults
from ckptcore_testing.thread_coordinator import ThreadJob

if TYPE_CHECKING:
    from ckptcore_tools.dry_run import ObjectPlan, ProcessPlan, SavePlan

_RANDOM: Final = re.compile(r"[0-9a-f]{16,}")
"""Random parts of names."""

_ABOUT_BYTES: Final = 8192
"""Tolerance, in bytes, for sizes that depend on the duration of the save."""

_KINDS: Final[Mapping[str, str]] = {
    "put": "puts",
    "open_writer": "writes",
    "open_new": "writes",
    "get": "reads",
    "get_with_tag": "reads",
    "get_into": "reads",
    "size": "reads",
    "list": "lists",
    "list_names": "lists",
    "delete": "deletes",
}


class _CountedStorage:
    """A plugin with a storage in memory that counts the requests of one process."""

    def __init__(self, stores: MemoryStorages) -> None:
        self.asked = FaultPlan()
        self._stores = stores

    @hookimpl
    def ckpt_storages(self) -> Mapping[str, StorageOpener]:
        """Return the opener of ``counted://`` locations."""
        return {"counted": self._open}

    def _open(self, url: str, options: StorageOptions) -> StorageBackend:
        return with_faults(self._stores.open(url.replace("counted:", "memory:"), options), self.asked)


class LayoutForecastTests:
    """Tests that plans match saves, in addition to `LayoutTests`. Subclass it and define `layout`."""

    def layout(self) -> Layout:
        """Return the layout, with limits so low that arrays of some hundred kilobytes need several chunks or files."""
        raise NotImplementedError("give the class the method `layout`")

    @pytest.mark.parametrize("size", [1, 4])
    def test_a_plan_matches_the_objects_and_requests_of_the_save(self, size: int) -> None:
        layout = self.layout()
        stores = MemoryStorages()

        def job(coordinator: Coordinator) -> tuple[SavePlan, Counter[str]]:
            storage = _CountedStorage(stores)
            context = Context(
                job=JobOptions(coordinator=coordinator, replicas=ReplicaOptions(piece_bytes=1 << 14)),
                plugins=PluginOptions(extra=[storage]),
                io=IOOptions(threads=2),
            )
            state = _state(coordinator.rank, size)
            plan = ckptcore.plan(state, layout=layout, context=context)
            assert not storage.asked.operations
            ckptcore.save("counted://store/c", state, layout=layout, context=context)
            asked = [_KINDS[operation.name] for operation in storage.asked.operations if operation.name in _KINDS]
            return plan, Counter(asked)

        results = ThreadJob(size).run(job)
        plan = results[0][0]
        assert all(other == plan for other, _ in results)
        bounded = any(planned.certainty == "at most" for process in plan.processes for planned in process.objects)
        _expect_objects(plan, _objects_of(stores))
        for process, (_, asked) in zip(plan.processes, results, strict=True):
            if bounded:
                assert all(asked[kind] <= count for kind, count in _counts(process).items())
            else:
                assert _counts(process) == {kind: asked[kind] for kind in _counts(process)}

    def test_a_simulated_job_has_the_plan_of_a_real_job(self) -> None:
        layout = self.layout()
        replicas = ReplicaOptions(piece_bytes=1 << 14)

        def job(coordinator: Coordinator) -> SavePlan:
            context = Context(job=JobOptions(coordinator=coordinator, replicas=replicas))
            return ckptcore.plan(_state(coordinator.rank, 4), layout=layout, context=context)

        imagined = ckptcore.plan(
            lambda rank: _state(rank, 4),
            processes=4,
            layout=layout,
            context=Context(job=JobOptions(replicas=replicas)),
        )
        assert _without_random_names(imagined) == _without_random_names(ThreadJob(4).run(job)[0])

    def test_a_plan_of_abstract_arrays_is_the_same(self) -> None:
        layout = self.layout()

        def job(coordinator: Coordinator) -> tuple[SavePlan, SavePlan]:
            context = Context(job=JobOptions(coordinator=coordinator))
            concrete, abstract = _state(coordinator.rank, 2), _abstract(_state(coordinator.rank, 2))
            return (
                ckptcore.plan(concrete, layout=layout, context=context),
                ckptcore.plan(abstract, layout=layout, context=context),
            )

        concrete, abstract = ThreadJob(2).run(job)[0]
        assert _without_random_names(concrete) == _without_random_names(abstract)


def _state(rank: int, size: int) -> dict[str, Any]:
    """Return values and arrays: sharded, partly replicated, fully replicated, and one array only on the last rank."""
    wide = np.arange(300 * 500, dtype=np.float32).reshape(300, 500)
    edges = [300 * part // size for part in range(size + 1)]
    rows = ShardedArray.part(wide[edges[rank] : edges[rank + 1]], (edges[rank], 0), wide.shape, cuts=[edges[1:-1], []])
    groups = max(1, size // 2)
    start = 8 * (rank % groups)
    shard = ArrayShard(Box((start, 0), (start + 8, 64)), np.ones((8, 64)), rank // groups, -(-size // groups))
    pairs = ShardedArray((8 * groups, 64), np.float64, [shard], cuts=[list(range(8, 8 * groups, 8)), []])
    shared = np.sin(np.arange(100_000, dtype=np.float64))
    state = {
        "wide": rows,
        "pairs": pairs,
        "shared": shared,
        "deep": {"small": np.arange(7, dtype=np.int16), "empty": np.zeros((0, 3)), "scalar": np.float32(2)},
        "step": 3,
        "name": "run",
    }
    if size == 1 or rank == size - 1:
        state["last"] = np.zeros((257, 129), np.uint8)
    return state


def _abstract(state: Any) -> Any:
    """Return the same tree without elements."""
    if isinstance(state, dict):
        return {key: _abstract(child) for key, child in state.items()}
    if isinstance(state, ShardedArray):
        shards = [ArrayShard(shard.box, None, shard.replica, shard.replicas) for shard in state.shards]
        return ShardedArray(state.shape, state.dtype, shards, cuts=state.cuts)
    return ckptcore.AbstractArray(state.shape, state.dtype) if isinstance(state, np.ndarray) else state


def _objects_of(stores: MemoryStorages) -> Mapping[str, int]:
    store = stores.open("memory://store/c", StorageOptions())
    return {key: store.size(key) for key in store.list()}


def _counts(process: ProcessPlan) -> dict[str, int]:
    return {field.name: getattr(process.requests, field.name) for field in fields(process.requests)}


def _expect_objects(plan: SavePlan, sizes: Mapping[str, int]) -> None:
    planned = [entry for process in plan.processes for entry in process.objects]
    assert len({entry.key for entry in planned}) == len(planned)
    exact = Counter([(_RANDOM.sub("*", entry.key), entry.nbytes) for entry in planned if entry.certainty == "exact"])
    stored = Counter([(_RANDOM.sub("*", key), size) for key, size in sizes.items()])
    assert not exact - stored, "an object differs from the plan"
    left = stored - exact
    for entry in sorted(planned, key=lambda entry: -entry.nbytes):
        if entry.certainty == "exact":
            continue
        fitting = [key for key in left if key[0] == _RANDOM.sub("*", entry.key) and left[key]]
        if not fitting and entry.certainty == "at most":
            continue  # compressed data can need fewer files
        assert fitting, f"{entry.key} was not written"
        key = max(fitting, key=lambda key: key[1])
        if entry.certainty == "at most":
            assert key[1] <= entry.nbytes
        else:
            assert abs(key[1] - entry.nbytes) <= _ABOUT_BYTES
        left -= Counter([key])
    assert not left, "an object was not planned"


def _without_random_names(plan: SavePlan) -> list[Any]:
    """Return a plan without random names and approximate sizes, for comparison with the plan of another save."""
    return [
        (plan.layout, plan.arrays, plan.values, plan.array_bytes, tuple(plan.memory)),
        *[
            (process.rank, process.array_bytes, process.boxes, process.requests, _renamed(process.objects))
            for process in plan.processes
        ],
    ]


def _renamed(objects: Sequence[ObjectPlan]) -> list[ObjectPlan]:
    renamed = [
        replace(entry, key=_RANDOM.sub("*", entry.key), nbytes=0 if entry.certainty == "about" else entry.nbytes)
        for entry in objects
    ]
    return sorted(renamed, key=lambda entry: (entry.key, entry.nbytes))
