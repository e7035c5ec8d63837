"""Parts of transformed arrays equal NumPy's, and a load reads only the required parts of stored arrays."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_testing import ThreadJob, ThreadNetwork
from ckptcore_testing.strategies import partitions
from ckptcore_transforms import Cast, Fuse, Pad, Rename, Reshape, Slice, Split, Stack, Transform, Transpose, inverse
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptcore
from ckptcore import ArrayShard, Context, ShardedArray
from ckptcore.context import IOOptions, JobOptions, MemoryOptions
from ckptcore.errors import CheckpointError
from ckptcore.model import Box
from ckptcore.protocols import Coordinator
from ckptcore.results import LoadReport

RANKS = 4
LAYERS, ROWS, COLUMNS = 4, 1024, 1024


def _shards(shape: tuple[int, ...], dtype: Any, boxes: list[Box]) -> ShardedArray:
    return ShardedArray(shape, np.dtype(dtype), [ArrayShard(box) for box in boxes])


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Save layers of 4 MiB, named as other software names them.

    No checksums are stored, because verifying them would need reads of whole blocks.
    """
    rng = np.random.default_rng(0)
    state = {f"layers.{layer}.w": rng.integers(0, 99, (ROWS, COLUMNS), np.int32) for layer in range(LAYERS)}
    location = tmp_path_factory.mktemp("layers")
    ckptcore.save(location / "c", state, context=Context(durability="none", io=IOOptions(checksums=False)))
    return location / "c", state


def _stacked(state: dict[str, Any]) -> Any:
    return np.stack([state[f"layers.{layer}.w"] for layer in range(LAYERS)])


CHAINS: list[tuple[list[Transform], Any]] = [
    ([Stack("layers.{i}.w", "w")], lambda w: w),
    ([Stack("layers.{i}.w", "w", axis=1)], lambda w: w.swapaxes(0, 1)),
    ([Stack("layers.{i}.w", "w"), Cast("w", "float64")], lambda w: w.astype(np.float64)),
    ([Stack("layers.{i}.w", "w"), Reshape("w", (LAYERS, 8, -1, COLUMNS))], lambda w: w.reshape(LAYERS, 8, -1, COLUMNS)),
    ([Fuse([f"layers.{i}.w" for i in range(LAYERS)], "w")], lambda w: w.reshape(-1, COLUMNS)),
    ([Stack("layers.{i}.w", "w"), Pad("w", ROWS + 512, 1, 7), Slice("w", 512, ROWS + 512, 1)],
     lambda w: np.pad(w, ((0, 0), (0, 512), (0, 0)), constant_values=7)[:, 512:]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("chain", "expected"), CHAINS, ids=lambda value: str(value)[:40] if isinstance(value, list) else ""
)
@pytest.mark.parametrize("load_bytes", [None, 4 << 20])
def test_a_rank_reads_only_what_its_rows_need(
    stored: tuple[Path, dict[str, Any]], chain: list[Transform], expected: Any, load_bytes: int | None
) -> None:
    location, state = stored
    whole = expected(_stacked(state))
    axis = 1 if whole.shape[0] == LAYERS else 0
    extent = whole.shape[axis] // RANKS
    start, stop = [0] * whole.ndim, list(whole.shape)
    start[axis], stop[axis] = extent, 2 * extent
    box = Box(tuple(start), tuple(stop))
    report = LoadReport()
    context = Context(memory=MemoryOptions(load_bytes=load_bytes))
    loaded = ckptcore.load(
        location,
        {"w": _shards(whole.shape, whole.dtype, [box])},
        transforms=chain,
        report=report,
        context=context,
    )
    (shard,) = loaded["w"].shards
    assert np.array_equal(shard.elements, whole[box.slices])
    assert report.bytes_read <= 1.1 * box.size * 4


def test_only_the_requested_experts_are_read(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    experts = {f"e.{number}.w": rng.integers(0, 99, (512, 512), np.int32) for number in range(32)}
    ckptcore.save(tmp_path / "c", experts)
    report = LoadReport()
    loaded = ckptcore.load(
        tmp_path / "c",
        {"w": _shards((32, 512, 512), np.int32, [Box((8, 0, 0), (12, 512, 512))])},
        transforms=[Stack("e.{i}.w", "w")],
        report=report,
    )
    assert all((loaded["w"].shards[0].elements[place] == experts[f"e.{8 + place}.w"]).all() for place in range(4))
    assert report.bytes_read <= 5 << 20, "more than the blocks of the four experts was read"


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_random_shards_equal_slices_of_the_result_of_numpy(data: st.DataObject) -> None:
    rng = np.random.default_rng(3)
    state = {f"l.{layer}.{name}": rng.normal(size=(6, 4)).astype(np.float32) for layer in range(3) for name in "qkv"}
    location = "memory://transforms/random-parts"
    ckptcore.save(location, state, overwrite="non-atomic")
    chain: list[Transform] = [
        Fuse(["l.{i}.q", "l.{i}.k", "l.{i}.v"], "l.{i}.qkv", axis=data.draw(st.integers(0, 1))),
        Stack("l.{i}.qkv", "qkv", axis=data.draw(st.integers(0, 2))),
        Transpose("qkv", data.draw(st.permutations(range(3)))),
    ]
    extras: list[Transform] = [Cast("qkv", "bfloat16"), Reshape("qkv", (-1, 4)), Pad("qkv", 20, -1, 1)]
    for extra in data.draw(st.permutations(extras)):
        if data.draw(st.booleans()):
            chain.append(extra)
    whole = ckptcore.load(location, transforms=chain)["qkv"]
    boxes = data.draw(partitions(whole.shape))
    sharded = _shards(whole.shape, whole.dtype, list(boxes))
    loaded = ckptcore.load(location, {"qkv": sharded}, transforms=chain)["qkv"]
    for shard in loaded.shards:
        assert shard.elements.tobytes() == whole[shard.box.slices].tobytes()


@pytest.mark.parametrize("reads", ["all", "broadcast"])
def test_ranks_load_together(stored: tuple[Path, dict[str, Any]], reads: Any) -> None:
    location, state = stored
    whole = _stacked(state).swapaxes(1, 2).astype(np.float32)
    chain: list[Transform] = [Stack("layers.{i}.w", "w"), Transpose("w"), Cast("w", "float32"), Rename("w", "v")]
    network, job = ThreadNetwork(RANKS, timeout_seconds=120), ThreadJob(RANKS, timeout_seconds=120)

    def load(coordinator: Coordinator) -> None:
        context = Context(
            job=JobOptions(coordinator=coordinator, collectives=network.collectives(coordinator.rank), reads=reads)
        )
        box = Box((0, 256 * coordinator.rank, 0), (LAYERS, 256 * (coordinator.rank + 1), ROWS))
        wanted = {"v": _shards(whole.shape, np.float32, [box])}
        (shard,) = ckptcore.load(location, wanted, transforms=chain, context=context)["v"].shards
        assert np.array_equal(shard.elements, whole[box.slices])

    job.run(load)


def test_ranks_with_different_transforms_are_refused(stored: tuple[Path, dict[str, Any]]) -> None:
    network, job = ThreadNetwork(2, timeout_seconds=120), ThreadJob(2, timeout_seconds=120)

    def load(coordinator: Coordinator) -> None:
        context = Context(
            job=JobOptions(
                coordinator=coordinator, collectives=network.collectives(coordinator.rank), reads="broadcast"
            )
        )
        chain: list[Transform] = [Cast("layers.0.w", "int8" if coordinator.rank else "uint8")]
        with pytest.raises((ValueError, CheckpointError), match="different options"):
            ckptcore.load(stored[0], transforms=chain, context=context)

    job.run(load)


def test_inverses_load_only_the_required_shards(stored: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    location, state = stored
    chain: list[Transform] = [Stack("layers.{i}.w", "w"), Split("w", ["low", "high"], axis=1)]
    ckptcore.save(
        tmp_path / "c",
        ckptcore.load(location, transforms=chain),
        context=Context(durability="none", io=IOOptions(checksums=False)),
    )
    half = Box((0, 0), (ROWS // 2, COLUMNS))
    report = LoadReport()
    wanted = dict.fromkeys(state, ...) | {"layers.2.w": _shards((ROWS, COLUMNS), np.int32, [half])}
    loaded = ckptcore.load(tmp_path / "c", wanted, transforms=inverse(chain), report=report)
    assert np.array_equal(loaded["layers.2.w"].shards[0].elements, state["layers.2.w"][half.slices])
    assert report.bytes_read <= 1.1 * half.size * 4


def test_rows_outside_a_slice_are_not_read(stored: tuple[Path, dict[str, Any]]) -> None:
    location, state = stored
    report = LoadReport()
    names = list(itertools.islice(state, 1, None))
    chain: list[Transform] = [Slice("layers.0.w", 0, 256)]
    loaded = ckptcore.load(
        location,
        {**dict.fromkeys(names, ...), "layers.0.w": np.zeros((256, COLUMNS), np.int32)},
        transforms=chain,
        report=report,
    )
    assert np.array_equal(loaded["layers.0.w"], state["layers.0.w"][:256])
    assert report.bytes_read == 1 << 20
