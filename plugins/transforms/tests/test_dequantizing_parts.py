"""Loads of parts of a quantised weight read only the values and scales of the part, and equal a slice of the whole."""

# mypy: allow-untyped-calls

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from ckptcore_testing import ThreadJob, ThreadNetwork
from ckptcore_testing.strategies import partitions
from ckptcore_transforms import Dequantize, DequantizeAsConfigured, Stack, Transform
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ckptcore
from ckptcore import ArrayShard, Context, ShardedArray
from ckptcore.context import JobOptions, MemoryOptions
from ckptcore.model import Box, HostArray
from ckptcore.model.arrays import dtype_from_name
from ckptcore.protocols import Coordinator
from ckptcore.results import LoadReport
from plugins.transforms.tests.quantizing import fp8_blocks, minilm, mxfp4_experts, publish, turned_back

RANKS = 4
BFLOAT16 = dtype_from_name("bfloat16")
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}

Published = tuple[Path, dict[str, HostArray]]


def _array(tensor: torch.Tensor) -> HostArray:
    """Return a tensor of bfloat16 as an array."""
    array: HostArray = tensor.contiguous().view(torch.int16).numpy().view(BFLOAT16)
    return array


def _whole(values: torch.Tensor, scales: torch.Tensor) -> HostArray:
    wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: values.shape[0], : values.shape[1]]
    return _array((values.float() * wide).to(torch.bfloat16))


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Published:
    """Publish two experts of 2000 x 1536 elements. Their sixteenth block of rows is smaller than the others."""
    weight = minilm()["encoder.layer.0.intermediate.dense.weight"].T.contiguous()  # 384 by 1536
    stored: dict[str, torch.Tensor] = {}
    whole: dict[str, HostArray] = {}
    for number in range(2):
        values, scales = fp8_blocks(torch.cat([weight * (number + part) for part in range(1, 7)])[:2000])
        stored |= {f"e.{number}.weight": values, f"e.{number}.weight_scale_inv": scales}
        whole[f"e.{number}.weight"] = _whole(values, scales)
    return publish(tmp_path_factory.mktemp("fp8"), stored, FP8, files=3), whole


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Published:
    """Publish eight experts with 1536 outputs and 384 inputs in MXFP4, as gpt-oss stores them."""
    weight = minilm()["encoder.layer.0.intermediate.dense.weight"]
    blocks, scales = mxfp4_experts(torch.stack([weight * (number + 1) for number in range(8)]))
    stored = {"m.experts.up_blocks": blocks, "m.experts.up_scales": scales}
    directory = publish(tmp_path_factory.mktemp("mxfp4"), stored, {"quant_method": "mxfp4"}, files=2)
    return directory, {"m.experts.up": _array(turned_back(blocks, scales))}


def _boxes(shape: Sequence[int], axis: int, count: int) -> list[Box]:
    """Return shards of equal extent along an axis."""
    step = shape[axis] // count
    whole = Box.whole(tuple(shape))
    return [
        Box(
            (*whole.start[:axis], number * step, *whole.start[axis + 1 :]),
            (*whole.stop[:axis], (number + 1) * step, *whole.stop[axis + 1 :]),
        )
        for number in range(count)
    ]


def _wanted(whole: HostArray, box: Box) -> ShardedArray:
    return ShardedArray(whole.shape, whole.dtype, [ArrayShard(box)])


@pytest.mark.parametrize("load_bytes", [None, 1 << 18])
def test_a_rank_reads_its_rows_and_their_scales(fp8: Published, load_bytes: int | None) -> None:
    location, expected = fp8
    whole = expected["e.0.weight"]
    for box in _boxes(whole.shape, 0, RANKS):
        report = LoadReport()
        loaded = ckptcore.load(
            location,
            {"e.0.weight": _wanted(whole, box), "e.1.weight": ...},
            transforms=[DequantizeAsConfigured()],
            report=report,
            context=Context(memory=MemoryOptions(load_bytes=load_bytes)),
        )
        (shard,) = loaded["e.0.weight"].shards
        assert shard.elements.tobytes() == whole[box.slices].tobytes()
        blocks = -(-box.stop[0] // 128) - box.start[0] // 128
        assert report.bytes_read <= 1.1 * (box.size + 4 * 12 * blocks)


def test_a_rank_reads_its_columns_only_if_rows_are_long(tmp_path: Path) -> None:
    """Rows have 256 KiB, so the bytes between two parts of a column shard are not read."""
    values = torch.arange(16 << 18, dtype=torch.int64).remainder(120).to(torch.uint8).reshape(16, -1)
    scales = torch.rand(1, (1 << 18) // 128)
    publish(tmp_path, {"w.weight": values.view(torch.float8_e4m3fn), "w.weight_scale_inv": scales}, FP8)
    whole = _whole(values.view(torch.float8_e4m3fn), scales)
    for box in _boxes(whole.shape, 1, RANKS):
        report = LoadReport()
        wanted = {"w.weight": _wanted(whole, box)}
        loaded = ckptcore.load(tmp_path, wanted, transforms=[DequantizeAsConfigured()], report=report)
        assert loaded["w.weight"].shards[0].elements.tobytes() == whole[box.slices].tobytes()
        assert report.bytes_read <= 1.1 * (box.size + 4 * box.shape[1] // 128)


@pytest.mark.parametrize("axis", [0, 2])
def test_a_rank_reads_its_experts_or_its_outputs(axis: int, tmp_path: Path) -> None:
    """Experts are as large as those of gpt-oss, because scales that are closer than 64 KiB are read together."""
    rng = np.random.default_rng(0)
    blocks = torch.from_numpy(rng.integers(0, 256, (4, 8192, 32, 16), dtype=np.uint8))
    scales = torch.from_numpy(rng.integers(100, 150, (4, 8192, 32), dtype=np.uint8))
    stored = {"m.experts.up_blocks": blocks, "m.experts.up_scales": scales}
    location = publish(tmp_path, stored, {"quant_method": "mxfp4"})
    whole = _array(turned_back(blocks, scales))
    for box in _boxes(whole.shape, axis, RANKS):
        report = LoadReport()
        wanted = {"m.experts.up": _wanted(whole, box)}
        loaded = ckptcore.load(location, wanted, transforms=[DequantizeAsConfigured()], report=report)
        assert loaded["m.experts.up"].shards[0].elements.tobytes() == whole[box.slices].tobytes()
        needed = box.size // 2 + box.size // 32
        assert report.bytes_read <= 1.1 * needed, "neighbouring bytes were read"


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_random_shards_equal_slices_of_the_whole(fp8: Published, experts: Published, data: st.DataObject) -> None:
    location, expected = data.draw(st.sampled_from([fp8, experts]))
    name = data.draw(st.sampled_from(sorted(expected)))
    whole = expected[name]
    boxes = data.draw(partitions(whole.shape))
    sharded = ShardedArray(whole.shape, whole.dtype, [ArrayShard(box) for box in boxes])
    wanted = dict.fromkeys(expected, ...) | {name: sharded}
    context = Context(memory=MemoryOptions(load_bytes=data.draw(st.sampled_from([None, 4096]))))
    loaded = ckptcore.load(location, wanted, transforms=[DequantizeAsConfigured()], context=context)[name]
    for shard in loaded.shards:
        assert shard.elements.tobytes() == whole[shard.box.slices].tobytes()


@pytest.mark.parametrize("reads", ["all", "broadcast"])
def test_ranks_load_together(fp8: Published, reads: Any) -> None:
    location, expected = fp8
    network, job = ThreadNetwork(RANKS, timeout_seconds=120), ThreadJob(RANKS, timeout_seconds=120)

    def load(coordinator: Coordinator) -> None:
        context = Context(
            job=JobOptions(coordinator=coordinator, collectives=network.collectives(coordinator.rank), reads=reads)
        )
        wanted = {
            name: _wanted(whole, _boxes(whole.shape, 1, RANKS)[coordinator.rank]) for name, whole in expected.items()
        }
        loaded = ckptcore.load(location, wanted, transforms=[DequantizeAsConfigured()], context=context)
        for name, whole in expected.items():
            (shard,) = loaded[name].shards
            assert shard.elements.tobytes() == whole[shard.box.slices].tobytes()

    job.run(load)


def test_eight_devices_of_jax_get_their_shards_and_bytes_are_read_once(fp8: Published, experts: Published) -> None:
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "model"))

    def abstract(shape: tuple[int, ...], *axes: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec(*axes)))

    report = LoadReport()
    chain: list[Transform] = [DequantizeAsConfigured(), Stack("e.{i}.weight", "experts")]
    location, expected = fp8
    wanted = {"experts": abstract((2, 2000, 1536), "data", "model", None)}
    loaded = ckptcore.load(location, wanted, transforms=chain, report=report)["experts"]
    assert loaded.sharding == wanted["experts"].sharding
    whole = np.stack([expected[f"e.{number}.weight"] for number in range(2)])
    assert np.asarray(loaded).tobytes() == whole.tobytes()
    assert report.bytes_read <= 1.1 * (whole.size + 2 * 16 * 12 * 4)

    location, expected = experts
    whole = expected["m.experts.up"]
    for axes in (("data", None, "model"), ("model", None, None), (None, "data", "model")):
        wanted = {"m.experts.up": abstract(whole.shape, *axes)}
        loaded = ckptcore.load(location, wanted, transforms=[DequantizeAsConfigured()], report=report)["m.experts.up"]
        assert loaded.sharding == wanted["m.experts.up"].sharding
        assert np.asarray(loaded).tobytes() == whole.tobytes()
        assert report.bytes_read <= 1.1 * math.prod(whole.shape) * (1 / 2 + 1 / 32)


def test_conversions_write_dequantised_weights(fp8: Published, tmp_path: Path) -> None:
    location, expected = fp8
    context = Context(memory=MemoryOptions(load_bytes=1 << 20), durability="none")
    ckptcore.copy(
        location, tmp_path / "c", layout="safetensors", transforms=[DequantizeAsConfigured()], context=context
    )
    loaded = ckptcore.load(tmp_path / "c")
    assert loaded.keys() == expected.keys()
    assert all(loaded[name].tobytes() == expected[name].tobytes() for name in expected)


def test_a_part_of_a_checkpoint_with_checksums_reads_whole_blocks(tmp_path: Path) -> None:
    """Blocks of 1 MiB are read whole. A quarter of 8 MiB is in three blocks, and the scales are in one."""
    values = np.arange(8 << 20, dtype=np.uint32).astype(np.uint8).reshape(4096, 2048) & np.uint8(0x77)
    scales = np.ones((32, 16), np.float32)
    state = {"w": values.view(dtype_from_name("float8_e4m3fn")), "w_scale": scales}
    ckptcore.save(tmp_path / "c", state, context=Context(durability="none"))
    report = LoadReport()
    box = Box((1024, 0), (2048, 2048))
    wanted = {"w": ShardedArray((4096, 2048), BFLOAT16, [ArrayShard(box)])}
    chain = [Dequantize("{n...}", "{n}_scale", (128, 128))]
    loaded = ckptcore.load(tmp_path / "c", wanted, transforms=chain, report=report)["w"]
    assert loaded.shards[0].elements.tobytes() == state["w"][box.slices].astype(BFLOAT16).tobytes()
    assert report.bytes_read <= 4 << 20
