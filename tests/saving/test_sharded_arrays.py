"""Sharded NumPy arrays: each process saves its part, and loads may request other parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_testing import ThreadJob, run_ranks

import ckptcore
from ckptcore import ArrayShard, ShardedArray
from ckptcore.errors import CorruptCheckpointError, RankFailedError, TreeMismatchError, UnsupportedLeafError
from ckptcore.model import Box
from ckptcore.protocols import Coordinator
from tests.checkpointer.runs import Watch, through, watched
from tests.saving.test_failures import job_context

WHOLE = np.arange(10 * 6, dtype=np.float32).reshape(10, 6)
ROWS = (0, 4, 8, 10)
CUTS: tuple[list[int], list[int]] = ([4, 8], [])


def _rows(rank: int, edges: tuple[int, ...] = ROWS) -> np.ndarray[Any, Any]:
    return WHOLE[edges[rank] : edges[rank + 1]].copy()


def _save(location: Path, size: int = 3, **options: Any) -> None:
    def job(coordinator: Coordinator) -> None:
        rank = coordinator.rank
        part = ShardedArray.part(_rows(rank), (ROWS[rank], 0), WHOLE.shape, cuts=CUTS)
        ckptcore.save(location, {"w": part, "same": np.ones(3)}, context=job_context(coordinator), **options)

    ThreadJob(size, timeout_seconds=60).run(job)


@pytest.mark.parametrize("layout", ["safetensors", "dcp", "zarr3", "ocdbt"])
def test_parts_of_processes_are_one_array(layout: str, tmp_path: Path) -> None:
    _save(tmp_path / "c", layout=layout)
    assert np.array_equal(ckptcore.load(tmp_path / "c")["w"], WHOLE)
    assert ckptcore.verify(tmp_path / "c").ok

    def job(coordinator: Coordinator) -> None:
        rank = coordinator.rank
        columns = Box((0, 3 * rank), (10, 3 * rank + 3))
        wanted = {"w": ShardedArray((10, 6), "float32", [ArrayShard(columns)]), "same": np.zeros(3)}
        loaded = ckptcore.load(tmp_path / "c", wanted, context=job_context(coordinator))["w"]
        assert isinstance(loaded, ShardedArray)
        elements = loaded.shards[0].elements
        assert elements is not None and np.array_equal(elements, WHOLE[columns.slices])

    ThreadJob(2, timeout_seconds=60).run(job)


def test_a_load_of_a_part_asks_only_for_the_objects_that_contain_it(tmp_path: Path) -> None:
    """Before it allocates memory. It asked for the objects of all processes."""
    _save(tmp_path / "c")
    watch = Watch()
    box = Box((1, 0), (3, 6))
    wanted = {"w": ShardedArray((10, 6), "float32", [ArrayShard(box)]), "same": ckptcore.PLACEHOLDER}
    loaded = ckptcore.load(through(str(tmp_path / "c")), wanted, context=watched(watch))["w"]
    assert np.array_equal(loaded.shards[0].elements, WHOLE[box.slices])
    first = [operation.keys[0] for operation in watch.operations if operation.name == "size"]
    (own,) = {key for key in first if key.endswith(".safetensors")}
    ckptcore.load(through(str(tmp_path / "c")), context=watched(watch))
    asked = {operation.keys[0] for operation in watch.operations if operation.name == "size"}
    assert len([key for key in asked if key.endswith(".safetensors")]) == 3
    with open(tmp_path / "c" / own.rpartition("c/")[2], "r+b") as file:
        file.truncate(20)
    with pytest.raises(CorruptCheckpointError, match="truncated"):
        ckptcore.load(tmp_path / "c", wanted)


@pytest.mark.parametrize("layout", ["safetensors", "dcp", "zarr3", "ocdbt"])
def test_parts_of_an_array_without_elements(layout: str, tmp_path: Path) -> None:
    """The empty array is the only array, or shares its file with whole arrays or with slices."""
    empty = np.zeros((4, 0), np.float32)

    def job(coordinator: Coordinator) -> None:
        rank = coordinator.rank
        rows: tuple[list[int], list[int]] = ([2], [])
        state: dict[str, Any] = {"empty": ShardedArray.part(empty[:2], (2 * rank, 0), (4, 0), cuts=rows)}
        context = job_context(coordinator)
        ckptcore.save(tmp_path / "alone", state, layout=layout, context=context)
        ckptcore.save(tmp_path / "whole", {**state, "b": np.ones(2)}, layout=layout, context=context)
        state["w"] = ShardedArray.part(WHOLE[2 * rank : 2 * rank + 2], (2 * rank, 0), (4, 6), cuts=rows)
        ckptcore.save(tmp_path / "part", state, layout=layout, context=context)

    ThreadJob(2, timeout_seconds=60).run(job)
    for name in ("alone", "whole", "part"):
        loaded = ckptcore.load(tmp_path / name)["empty"]
        assert loaded.shape == (4, 0) and loaded.dtype == np.float32
        assert ckptcore.verify(tmp_path / name).ok


def test_parts_are_filled_in_place(tmp_path: Path) -> None:
    _save(tmp_path / "c")
    rows, column = np.zeros((2, 6), np.float32), np.zeros((5, 3), np.float32)[:, 1:2]
    shards = [ArrayShard(Box((3, 0), (5, 6)), rows), ArrayShard(Box((5, 5), (10, 6)), column)]
    target = {"w": ShardedArray((10, 6), "float32", shards), "same": np.zeros(3)}
    ckptcore.load_into(tmp_path / "c", target)
    assert np.array_equal(rows, WHOLE[3:5]) and np.array_equal(column, WHOLE[5:10, 5:6])


def test_an_array_that_is_not_whole_is_not_committed(tmp_path: Path) -> None:
    def job(rank: int, context: ckptcore.Context) -> None:
        part = ShardedArray.part(np.ones((3, 6), np.float32), (3 * rank, 0), (10, 6))
        with pytest.raises((CorruptCheckpointError, RankFailedError), match="not cover it exactly: 24 of 60 elements"):
            ckptcore.save(tmp_path / "c", {"w": part}, context=context)

    run_ranks(2, job, timeout_seconds=60)
    assert list(tmp_path.iterdir()) == []


def test_other_shapes_and_dtypes_are_refused(tmp_path: Path) -> None:
    _save(tmp_path / "c")
    for shape, dtype in (((10, 7), "float32"), ((10, 6), "float64")):
        wanted = {"w": ShardedArray(shape, dtype, [ArrayShard(Box((0, 0), (2, 2)))]), "same": ckptcore.PLACEHOLDER}
        with pytest.raises(TreeMismatchError, match="w"):
            ckptcore.load(tmp_path / "c", wanted)
    with pytest.raises(UnsupportedLeafError, match="it cannot be saved"):
        ckptcore.save(tmp_path / "d", {"w": ShardedArray((2,), "int8", [ArrayShard(Box((0,), (2,)))])})


@pytest.mark.parametrize(
    ("shards", "cuts", "told"),
    [
        ([ArrayShard(Box((0, 0), (2, 7)))], None, "not within"),
        ([ArrayShard(Box((2, 0), (1, 1)))], None, "not within"),
        ([ArrayShard(Box((0,), (2,)))], None, "not within"),
        ([ArrayShard(Box((0, 0), (2, 2)), np.zeros((2, 3), np.float32))], None, "elements of float32"),
        ([ArrayShard(Box((0, 0), (2, 2)), np.zeros((2, 2)))], None, "elements of float64"),
        ([ArrayShard(Box((0, 0), (2, 2))), ArrayShard(Box((1, 1), (3, 3)))], None, "overlap"),
        ([ArrayShard(Box((0, 0), (2, 2)), replica=2, replicas=2)], None, "the replica 2; expected 0 to 1"),
        ([], [[4], [6]], "cuts"),
        ([], [[4]], "cuts"),
    ],
)
def test_an_invalid_sharded_array_is_refused_when_it_is_created(shards: Any, cuts: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        ShardedArray((10, 6), "float32", shards, cuts=cuts)


def test_changes_after_a_save_in_the_background_began_are_not_saved(tmp_path: Path) -> None:
    elements = np.ones((10, 6), np.float32)
    handle = ckptcore.save_async(tmp_path / "c", {"w": ShardedArray.part(elements, (0, 0), (10, 6))})
    elements[:] = 7
    handle.result()
    assert np.array_equal(ckptcore.load(tmp_path / "c")["w"], np.ones((10, 6), np.float32))


def test_progress_counts_the_bytes_that_this_process_writes(tmp_path: Path) -> None:
    def job(coordinator: Coordinator) -> int:
        rank = coordinator.rank
        part = ShardedArray.part(_rows(rank), (ROWS[rank], 0), WHOLE.shape)
        handle = ckptcore.save_async(tmp_path / "c", {"w": part}, context=job_context(coordinator))
        handle.result()
        assert handle.progress.done == handle.progress.total
        return handle.progress.total

    assert ThreadJob(3, timeout_seconds=60).run(job) == [_rows(rank).nbytes for rank in range(3)]
