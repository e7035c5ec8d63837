"""Jobs of several processes publish: each process encodes the boxes that it holds, and nothing is gathered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_testing.faults import FaultPlan
from ckptcore_testing.locations import faulty_context, store_at, through
from ckptcore_testing.thread_coordinator import ThreadJob
from ckptcore_testing.trees import same_value

import ckptcore
from ckptcore.errors import CheckpointError, RankFailedError
from ckptcore.protocols import Coordinator
from plugins.versions.tests.published import base_of, in_job, load, location, matrix, publisher, weights
from plugins.versions.tests.watched_deltas import WatchedDeltas
from tests.jobs.processes import run_job


def _encoded_bytes(place: str, number: int) -> dict[int, int]:
    """Return the bytes that each process of a job encoded for a delta."""
    store = store_at(location(place, number))
    sizes: dict[int, int] = {}
    for key in store.list():
        if key.startswith("deltas."):
            rank = int(key.split(".")[2].partition("-")[0])
            sizes[rank] = sizes.get(rank, 0) + store.size(key)
    return sizes


@pytest.mark.parametrize(("program", "devices"), [("torch", 1), ("jax", 2)])
def test_a_job_continues_with_other_processes_and_another_sharding(program: str, devices: int, tmp_path: Path) -> None:
    program = f"plugins.versions.tests.{program}_publishers"
    assert run_job(program, "publish", tmp_path, size=2, devices=devices) == [2, 2]
    assert run_job(program, "proceed", tmp_path, size=3, devices=1) == [4, 4, 4]
    assert [base_of(str(tmp_path), number) for number in range(1, 5)] == [None, 1, 2, 3]
    assert [sorted(_encoded_bytes(str(tmp_path), number)) for number in (2, 3, 4)] == [[0, 1], [0, 1, 2], [0, 1, 2]]
    for number in range(1, 5):
        loaded = ckptcore.load(location(str(tmp_path), number), framework="numpy")
        whole = matrix(number)
        assert np.array_equal(loaded["sharded"], whole)
        assert np.array_equal(loaded["half"], whole.astype(loaded["half"].dtype))
        assert np.array_equal(loaded["replicated"], whole[:3])
        assert np.array_equal(loaded["plain"], whole[:5])


def _shard(whole: Any, coordinator: Coordinator, axis: int) -> ckptcore.ShardedArray:
    """Return the part of a process, with an equal number of rows or columns."""
    extent = whole.shape[axis] // coordinator.size
    start = [0, 0]
    start[axis] = extent * coordinator.rank
    index = tuple([slice(first, first + extent) if at == axis else slice(None) for at, first in enumerate(start)])
    return ckptcore.ShardedArray.part(np.ascontiguousarray(whole[index]), start, whole.shape)


def _wide(number: int) -> Any:
    array = np.arange(2400 * 900, dtype=np.float32).reshape(2400, 900)
    array[::7, :number] = -1
    return array


def test_a_process_reads_only_its_boxes_after_a_restart(tmp_path: Path) -> None:
    place = f"file://{tmp_path}/versions"

    def publish(coordinator: Coordinator) -> None:
        with publisher(place, context=in_job(coordinator)) as versions:
            for number in (1, 2):
                versions.publish(number, {"w": _shard(_wide(number), coordinator, 0)})

    plans = [FaultPlan() for _ in range(3)]

    def proceed(coordinator: Coordinator) -> None:
        context = in_job(coordinator, faulty_context(place, plans[coordinator.rank]))
        with publisher(through(place), context=context) as versions:
            versions.publish(3, {"w": _shard(_wide(3), coordinator, 0)})
            read = plans[coordinator.rank].bytes_read
            versions.publish(4, {"w": _shard(_wide(4), coordinator, 0)})
            assert plans[coordinator.rank].bytes_read - read < 100_000  # the base is held

    ThreadJob(2).run(publish)
    ThreadJob(3).run(proceed)
    for plan in plans:
        assert plan.bytes_read < _wide(1).nbytes * 0.6  # a third of the array, whole blocks of checksums, and roots
    for number in range(1, 5):
        assert np.array_equal(load(place, number)["w"], _wide(number))


def test_the_sharding_may_change_within_a_run(tmp_path: Path) -> None:
    def publish(coordinator: Coordinator) -> None:
        with publisher(str(tmp_path), context=in_job(coordinator)) as versions:
            for number in range(1, 5):
                versions.publish(number, {"w": _shard(matrix(number), coordinator, number % 2)})
                assert versions._publications.held.nbytes == matrix(1).nbytes // 2

    ThreadJob(2).run(publish)
    for number in range(1, 5):
        assert np.array_equal(load(str(tmp_path), number)["w"], matrix(number))
    assert [base_of(str(tmp_path), number) for number in range(1, 5)] == [None, 1, 2, 3]


def test_a_publish_that_fails_in_one_process_fails_in_all(tmp_path: Path) -> None:
    fails = False

    def publish(coordinator: Coordinator) -> list[str]:
        nonlocal fails

        def take(name: str) -> None:
            if fails and coordinator.rank == 1 and name == "layers.0.w":
                raise OSError("the layout failed on one rank")

        refused = []
        layout = WatchedDeltas(taking=take)
        with publisher(str(tmp_path), layout=layout, context=in_job(coordinator)) as versions:

            def state(number: int) -> Any:
                return {
                    "w": _shard(matrix(number), coordinator, 0),
                    "layers": [{"w": _shard(matrix(number), coordinator, 1)}],
                }

            versions.publish(1, state(1))
            fails = True
            try:
                versions.publish(2, state(2))
            except (OSError, CheckpointError) as error:
                refused.append(type(error).__name__)
            with pytest.raises(ValueError, match="version 1 already"):
                versions.publish(1, state(1))
            fails = False
            versions.publish(3, state(3))
            versions.publish(4, state(4))
        return refused

    assert ThreadJob(2).run(publish) == [[RankFailedError.__name__], ["OSError"]]
    assert [base_of(str(tmp_path), number) for number in (1, 3, 4)] == [None, 1, 3]
    for number in (1, 3, 4):
        loaded = load(str(tmp_path), number)
        assert np.array_equal(loaded["w"], matrix(number))
        assert np.array_equal(loaded["layers"][0]["w"], matrix(number))


def test_a_base_that_one_process_cannot_read_makes_the_version_full(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Damage in the part of one process concerns all: they agree on a full version."""

    def publish(coordinator: Coordinator, numbers: list[int]) -> None:
        with publisher(str(tmp_path), context=in_job(coordinator)) as versions:
            for number in numbers:
                versions.publish(number, {"w": _shard(_wide(number), coordinator, 0)})

    ThreadJob(2).run(lambda coordinator: publish(coordinator, [1]))
    store = store_at(location(str(tmp_path), 1))
    key = max(key for key in store.list() if key.endswith(".safetensors"))
    data = bytearray(store.get(key))
    data[-5] ^= 1
    store.put(key, bytes(data))
    ThreadJob(2).run(lambda coordinator: publish(coordinator, [2, 3]))
    assert [base_of(str(tmp_path), number) for number in (2, 3)] == [None, 2]
    assert "version 2 is written as a full version" in caplog.text
    assert np.array_equal(load(str(tmp_path), 3)["w"], _wide(3))


def test_all_processes_hold_and_publish_equal_weights(tmp_path: Path) -> None:
    """As with data parallelism: one of them writes each array."""

    def publish(coordinator: Coordinator) -> None:
        with publisher(str(tmp_path), context=in_job(coordinator)) as versions:
            for number in (1, 2):
                versions.publish(number, weights(number))

    ThreadJob(3).run(publish)
    for number in (1, 2):
        assert same_value(load(str(tmp_path), number), weights(number))
    assert json.loads(store_at(location(str(tmp_path), 2)).get("checkpoint.json"))["bases"]
