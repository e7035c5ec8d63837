"""Bytes that shared loads read. A job reads and verifies each stored byte once, and reports give correct numbers."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_orbax import OcdbtLayout, Zarr3Layout
from ckptcore_testing import FaultPlan, FaultyStorage, ThreadJob, ThreadNetwork
from ckptcore_transforms import Cast, Stack

import ckptcore
from ckptcore import ArrayShard, Context, ShardedArray
from ckptcore.builtin.local import LocalStorage
from ckptcore.context import JobOptions, PluginOptions
from ckptcore.model import Box, ChunkRead
from ckptcore.protocols import Coordinator, Layout, StorageBackend, StorageOpener, StorageOptions

RANKS = 4


class CountedFiles:
    """A plugin: ``counted:///PATH`` is a local directory. It counts the bytes read from all objects except the root."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.nbytes = 0

    @ckptcore.hookimpl
    def ckpt_storages(self) -> Mapping[str, StorageOpener]:
        return {"counted": self.open}

    def open(self, url: str, options: StorageOptions) -> StorageBackend:
        return _Counting(LocalStorage(url.removeprefix("counted://"), options), self)

    def add(self, key: str, nbytes: int) -> None:
        """Add the bytes of a read."""
        if not key.startswith("checkpoint."):
            with self.lock:
                self.nbytes += nbytes


class _Counting(FaultyStorage):
    def __init__(self, inner: StorageBackend, files: CountedFiles) -> None:
        super().__init__(inner, FaultPlan())
        self._files = files

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        data = super().get(key, start, stop)
        self._files.add(key, len(data))
        return data

    def get_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        self._files.add(key, sum([len(buffer) for _, buffer in ranges]))
        super().get_into(key, ranges)


def _many() -> dict[str, Any]:
    """A hundred arrays of 64 kB to 4 MB."""
    rng = np.random.default_rng(0)
    sizes = np.exp(rng.uniform(np.log(64e3), np.log(4e6), 100)).astype(int)
    return {f"a{number}": rng.integers(0, 7, size // 4, np.int32) for number, size in enumerate(sizes)}


def _few() -> dict[str, Any]:
    """Five large arrays whose rows do not end at block boundaries."""
    rng = np.random.default_rng(1)
    return {f"w{number}": rng.integers(0, 7, (1300 + 37 * number, 4099), np.int32) for number in range(5)}


def _read(directory: Path, wanted: Sequence[Any], expected: Mapping[str, Any]) -> tuple[int, list[int]]:
    """Load on all ranks. Return the bytes that all ranks read together, and the bytes that each rank sent."""
    files = CountedFiles()
    network, job = ThreadNetwork(RANKS, timeout_seconds=120), ThreadJob(RANKS, timeout_seconds=120)

    def load(coordinator: Coordinator) -> None:
        context = Context(
            job=JobOptions(
                coordinator=coordinator, collectives=network.collectives(coordinator.rank), reads="broadcast"
            ),
            plugins=PluginOptions(extra=[files]),
        )
        loaded = ckptcore.load(f"counted://{directory}", wanted[coordinator.rank], context=context)
        for name, array in loaded.items():
            if isinstance(array, ShardedArray):
                (shard,) = array.shards
                assert shard.elements is not None and np.array_equal(shard.elements, expected[name][shard.box.slices])
            else:
                assert np.array_equal(array, expected[name])

    job.run(load)
    return files.nbytes, [sum(nbytes for rank, _, nbytes in network.sent if rank == own) for own in range(RANKS)]


def _check(directory: Path, state: Mapping[str, Any], layout: str | Layout) -> None:
    ckptcore.save(directory, dict(state), layout=layout, context=Context(durability="none"))
    nbytes, sent = _read(directory, [None] * RANKS, state)
    stored = sum(array.nbytes for array in state.values())
    assert stored >= 100e6
    assert stored <= nbytes <= 1.02 * stored, nbytes / stored
    assert max(sent) <= 1.1 * sum(sent) / RANKS


def test_many_arrays_are_read_once(tmp_path: Path) -> None:
    _check(tmp_path / "saved", _many(), "safetensors")


def test_large_chunks_are_read_once(tmp_path: Path) -> None:
    _check(tmp_path / "saved", _few(), OcdbtLayout(chunk_bytes=8 << 20))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["safetensors", "ocdbt", "zarr3", "dcp", Zarr3Layout(chunk_bytes=8 << 20)], ids=str)
@pytest.mark.parametrize("make", [_many, _few])
def test_each_layout_is_read_once(make: Any, layout: str | Layout, tmp_path: Path) -> None:
    _check(tmp_path / "saved", make(), layout)


@pytest.mark.parametrize("layout", [Zarr3Layout, OcdbtLayout])
def test_a_compressed_chunk_that_two_ranks_request_parts_of_is_read_once(layout: Any, tmp_path: Path) -> None:
    """Each rank requests rows that end in the middle of a chunk."""
    rng = np.random.default_rng(2)
    # Random bytes do not compress, so a chunk of 250 rows takes much more than a block of 1 MiB.
    state = {"w": rng.integers(0, 1 << 32, (1000, 4000), np.uint32)}
    ckptcore.save(
        tmp_path / "saved",
        state,
        layout=layout(chunk_bytes=4_000_000, compression="zstd:1"),
        context=Context(durability="none"),
    )
    bounds = [0, 300, 510, 700, 1000]
    wanted = [
        {"w": ShardedArray((1000, 4000), np.dtype(np.uint32), [ArrayShard(Box((low, 0), (high, 4000)))])}
        for low, high in itertools.pairwise(bounds)
    ]
    nbytes, sent = _read(tmp_path / "saved", wanted, state)
    assert nbytes <= state["w"].nbytes + (RANKS * 3 << 20), "each rank may read a few blocks twice, but no chunk"
    assert sum(sent) > 0


@pytest.mark.parametrize("layout", ["safetensors", "dcp", "zarr3", "ocdbt"])
def test_a_report_agrees_with_the_bytes_that_the_system_counts(layout: str, tmp_path: Path) -> None:
    """Load some rows of stacked arrays with a cast. The load reads only their bytes, the root and the chunk places."""

    def counted() -> int:
        return int(Path("/proc/self/io").read_text(encoding="ascii").split()[1])

    if not Path("/proc/self/io").exists():
        pytest.skip("this system does not count what a process reads")
    state = {f"w.{number}": np.full((4096, 1024), number, np.float32) for number in range(3)}
    ckptcore.save(tmp_path / "c", state, layout=layout, context=Context(durability="none"))
    box = Box((0, 1024, 0), (3, 2048, 1024))
    asked = {"w": ShardedArray((3, 4096, 1024), np.dtype(np.float64), [ArrayShard(box)])}
    report = ckptcore.results.LoadReport()
    before = counted()
    loaded = ckptcore.load(
        tmp_path / "c", asked, transforms=[Stack("w.{i}", "w"), Cast("w", "float64")], report=report
    )["w"]
    read = counted() - before
    assert (loaded.shards[0].elements == np.arange(3.0)[:, None, None]).all()
    assert 12 << 20 <= report.bytes_read <= read <= report.bytes_read + (256 << 10)


@pytest.mark.parametrize("count", [100, 1000])
def test_reads_of_arrays_at_one_place_are_merged_once(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Empty arrays have the same place in the file. Merging them one by one took 96 s for 80,000 arrays."""
    targets: list[int] = []

    def counted_read(*arguments: Any) -> ChunkRead:
        read = ChunkRead(*arguments)
        targets.append(len(read.targets))
        return read

    monkeypatch.setattr("ckptcore.io.chunk_reads.ChunkRead", counted_read)
    state = {"empty": [np.zeros((0, 3)) for _ in range(count)], "w": np.ones(3)}
    ckptcore.save(tmp_path / "c", state, layout=ckptcore.SafetensorsLayout(standalone=True))
    (tmp_path / "c" / "checkpoint.json").unlink()
    assert len(ckptcore.load(tmp_path / "c")) == count + 1
    assert sum(targets) <= 3 * (count + 1)
