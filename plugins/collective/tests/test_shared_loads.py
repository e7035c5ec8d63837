"""Shared loads: every rank of a job gets the stored values, and each stored byte is read by one rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from ckptcore_testing import ThreadJob, ThreadNetwork, assert_same_tree

import ckptcore
from ckptcore import AbstractArray, ArrayShard, Context, ShardedArray
from ckptcore.context import JobOptions, MemoryOptions, ReadGroups, Reads
from ckptcore.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    PluginError,
    RankFailedError,
)
from ckptcore.model import Box
from ckptcore.protocols import Coordinator
from ckptcore.runtime import runtime_of

STATE: Mapping[str, Any] = {
    "w": np.arange(64 * 48, dtype=np.float32).reshape(64, 48),
    "e": (np.arange(96) % 128).reshape(8, 12).astype(ml_dtypes.bfloat16),
    "empty": np.zeros((0, 3), np.int8),
    "scalar": np.array(7, np.int64),
    "names": np.array(["one", "three"]),
    "step": 3,
}


def _of_rank(
    job: ThreadJob, network: ThreadNetwork, reads: Reads = "all", **options: Any
) -> Callable[[Coordinator], Context]:
    return lambda coordinator: Context(
        job=JobOptions(coordinator=coordinator, collectives=network.collectives(coordinator.rank), reads=reads),
        **options,
    )


def _run(size: int, work: Callable[[Context], Any], **options: Any) -> tuple[Sequence[Any], ThreadNetwork]:
    network, job = ThreadNetwork(size, timeout_seconds=20), ThreadJob(size, timeout_seconds=20)
    options = {"reads": "broadcast", **options}
    return job.run(lambda coordinator: work(_of_rank(job, network, **options)(coordinator))), network


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    ckptcore.save(tmp_path / "saved", STATE)
    return tmp_path / "saved"


@pytest.mark.parametrize("memory", [MemoryOptions(), MemoryOptions(load_bytes=1000, exchange_bytes=800)])
@pytest.mark.parametrize("layout", ["safetensors", "ocdbt", "dcp"])
def test_every_rank_gets_the_whole_tree(tmp_path: Path, layout: str, memory: MemoryOptions) -> None:
    ckptcore.save(tmp_path / "saved", STATE, layout=layout)
    loaded, network = _run(3, lambda context: ckptcore.load(tmp_path / "saved", context=context), memory=memory)
    for tree in loaded:
        assert_same_tree(tree, STATE)
    assert {members for _, members, _ in network.sent} == {(0, 1, 2)}
    if memory.load_bytes is not None:
        assert {rank for rank, _, _ in network.sent} == {0, 1, 2}
        assert max(nbytes for _, _, nbytes in network.sent) <= 128 + 64, (
            "100 bytes of elements, padded to 128, after a head of 64 bytes"
        )


def test_loads_into_existing_arrays(saved: Path) -> None:
    """Ranks read, and receive messages, directly into the memory of the target."""

    def into(context: Context) -> dict[str, Any]:
        target = {name: np.zeros_like(leaf) if isinstance(leaf, np.ndarray) else 0 for name, leaf in STATE.items()}
        target["names"] = np.empty_like(STATE["names"])
        kept = target["w"]
        ckptcore.load_into(saved, target, context=context)
        assert target["w"] is kept
        return target

    for tree in _run(2, into)[0]:
        assert_same_tree(tree, STATE)


def test_overlapping_requests_are_split_at_their_boundaries(saved: Path) -> None:
    """Each of three ranks requests 32 of 64 rows, from row 16 * rank."""

    def load(context: Context) -> None:
        rank = runtime_of(context).job().rank
        box = Box((16 * rank, 0), (16 * rank + 32, 48))
        wanted: dict[str, Any] = dict.fromkeys(STATE, ckptcore.PLACEHOLDER)
        wanted["w"] = ShardedArray((64, 48), np.dtype(np.float32), [ArrayShard(box)])
        (shard,) = ckptcore.load(saved, wanted, context=context)["w"].shards
        assert shard.box == box and np.array_equal(shard.elements, STATE["w"][box.slices])

    _, network = _run(3, load)
    assert {members for _, members, _ in network.sent} == {(0, 1), (1, 2)}


@pytest.mark.parametrize(
    ("reads", "expected"),
    [
        ("broadcast", {(0, 1, 2, 3)}),
        ("per_node", {(0, 1, 2, 3)}),
        (ReadGroups([(3, 1), (0,)]), {(1, 3)}),
        ("all", set()),
    ],
)
def test_groups_of_ranks_that_share_reads(saved: Path, reads: Any, expected: set[tuple[int, ...]]) -> None:
    loaded, network = _run(4, lambda context: ckptcore.load(saved, context=context), reads=reads)
    for tree in loaded:
        assert_same_tree(tree, STATE)
    assert {members for _, members, _ in network.sent} == expected


def test_ranks_of_one_host_share_reads(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "odd" if int(threading.current_thread().name[-1]) % 2 else "even")
    _, network = _run(4, lambda context: ckptcore.load(saved, context=context), reads="per_node")
    assert {members for _, members, _ in network.sent} == {(0, 2), (1, 3)}


def _errors(size: int, work: Callable[[Context], Any], **options: Any) -> list[Exception]:
    """Run the work on each rank. Return the errors that the ranks raised, in order of ranks."""

    def run(context: Context) -> Exception:
        with pytest.raises(Exception) as caught:  # each test checks the error
            work(context)
        return caught.value

    return list(_run(size, run, **options)[0])


def test_a_rank_that_requests_another_shape_than_is_stored_fails_all_ranks(saved: Path) -> None:
    def load(context: Context) -> None:
        wanted: dict[str, Any] = {name: None if name == "step" else ckptcore.PLACEHOLDER for name in STATE}
        wanted |= {"step": 0, "w": AbstractArray((64, 48 + runtime_of(context).job().rank), "float32")}
        ckptcore.load(saved, wanted, context=context)

    errors = _errors(2, load)
    assert isinstance(errors[0], RankFailedError) and "rank 1" in str(errors[0])
    assert not isinstance(errors[1], RankFailedError)


def test_damage_that_one_rank_detects_is_reported_by_all_ranks(saved: Path) -> None:
    (file,) = saved.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1000] ^= 1
    file.write_bytes(data)
    errors = _errors(3, lambda context: ckptcore.load(saved, context=context))
    assert all(isinstance(error, CorruptCheckpointError) for error in errors)
    assert sum(str(error).startswith("rank ") for error in errors) == 2


def test_a_missing_checkpoint_raises_the_same_error_on_all_ranks(tmp_path: Path) -> None:
    errors = _errors(2, lambda context: ckptcore.load(tmp_path / "nothing", context=context))
    assert [type(error) for error in errors] == [CheckpointNotFoundError] * 2


def test_a_rank_that_cannot_build_a_leaf_fails_all_ranks(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The failed rank still takes part until the end of the load, so that no other rank waits for it."""
    from ckptcore.loading.reading import TreeRead

    finish_leaf = TreeRead.finish_leaf

    def fail(reading: TreeRead, leaf_read: Any, buffers: Any) -> None:
        if threading.current_thread().name == "rank 1":
            raise MemoryError("no room")
        finish_leaf(reading, leaf_read, buffers)

    monkeypatch.setattr(TreeRead, "finish_leaf", fail)
    small = MemoryOptions(exchange_bytes=800)
    errors = _errors(3, lambda context: ckptcore.load(saved, context=context), memory=small)
    assert isinstance(errors[1], MemoryError)
    for rank in (0, 2):
        assert isinstance(errors[rank], RankFailedError) and "rank 1: MemoryError: no room" in str(errors[rank])


def test_options_that_differ_between_ranks_raise_an_error_on_all(saved: Path) -> None:
    network = ThreadNetwork(2)

    def load(coordinator: Coordinator) -> str:
        memory = MemoryOptions(exchange_bytes=1000 + coordinator.rank)
        context = Context(
            job=JobOptions(
                coordinator=coordinator, collectives=network.collectives(coordinator.rank), reads="broadcast"
            ),
            memory=memory,
        )
        with pytest.raises(ValueError, match="different options") as caught:
            ckptcore.load(saved, context=context)
        return str(caught.value)

    assert "1000" in ThreadJob(2).run(load)[0]


def test_missing_or_unsuitable_collectives_are_explained(saved: Path) -> None:
    def load(coordinator: Coordinator) -> None:
        with pytest.raises(PluginError, match=r"torch.distributed.*jax.distributed"):
            ckptcore.load(saved, context=Context(job=JobOptions(coordinator=coordinator, reads="broadcast")))
        with pytest.raises(PluginError, match=r"coordinator has rank \d of 2"):
            context = Context(
                job=JobOptions(
                    coordinator=coordinator,
                    reads="broadcast",
                    collectives=ThreadNetwork(3).collectives(coordinator.rank),
                )
            )
            ckptcore.load(saved, context=context)

    ThreadJob(2).run(load)


def test_a_job_of_one_process_reads_without_collectives(saved: Path) -> None:
    assert_same_tree(ckptcore.load(saved, context=Context(job=JobOptions(reads="broadcast"))), STATE)


def test_all_ranks_restart_load_of_checkpoint_replaced_meanwhile(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptcore_collective.broadcasts import Broadcasts

    run = Broadcasts.run
    newer = dict(STATE) | {"w": STATE["w"] + 1}
    replaced = threading.Event()

    def replace_before(broadcasts: Broadcasts) -> None:
        if threading.current_thread().name == "rank 1" and not replaced.is_set():
            replaced.set()
            ckptcore.save(
                saved, newer, overwrite=True, context=Context(job=JobOptions(coordinator=ThreadJob(1).coordinator(0)))
            )
        run(broadcasts)

    monkeypatch.setattr(Broadcasts, "run", replace_before)
    for tree in _run(3, lambda context: ckptcore.load(saved, context=context))[0]:
        assert_same_tree(tree, newer)
    assert replaced.is_set()


@pytest.mark.parametrize("reads", ["one", "", None])
def test_invalid_values_of_reads_are_rejected(reads: Any) -> None:
    with pytest.raises(ValueError, match="broadcast"):
        Context(job=JobOptions(reads=reads))


@pytest.mark.parametrize("groups", [[(0, 1), (1, 2)], [(0, -1)], [("0",)]])
def test_groups_with_repeated_or_invalid_ranks_are_rejected(groups: Any) -> None:
    with pytest.raises(ValueError, match="each rank once"):
        ReadGroups(groups)


def test_ranks_discard_a_message_whose_reader_could_not_read(tmp_path: Path) -> None:
    """The head of the message reports the failure. The rest of the message is uninitialized memory."""
    ckptcore.save(tmp_path / "saved", {"w": np.ones(1000)})
    (file,) = (tmp_path / "saved").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)

    def load(context: Context) -> bool:
        target = {"w": np.zeros(1000)}
        with pytest.raises(CheckpointError):
            ckptcore.load_into(tmp_path / "saved", target, context=context)
        return not target["w"].any()

    assert _run(3, load)[0] == [True] * 3
