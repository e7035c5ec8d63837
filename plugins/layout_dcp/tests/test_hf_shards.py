"""Safetensors shards: the reader puts every box at its stated offset, and rejects invalid headers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from ckptcore_dcp.chunk_index import dcp_index
from ckptcore_dcp.inspecting import inspect_dcp
from ckptcore_testing import ThreadJob

import ckptcore
from ckptcore.builtin.host_leaves import HostArrayHandler
from ckptcore.errors import CorruptCheckpointError, UnsupportedLeafError
from ckptcore.model import ArrayRecord, Box, Shard
from ckptcore.protocols import Coordinator
from plugins.layout_dcp.tests.directories import Directory


def expect_shards(path: Path, expected: Mapping[str, torch.Tensor]) -> None:
    """Assert that a directory contains exactly the expected tensors."""
    inspection = inspect_dcp(Directory(path), None)
    assert inspection is not None
    table = dcp_index(inspection.tree, json.loads(json.dumps(inspection.state)))
    assert set(map(str, inspection.tree.paths)) == {str((name,)) for name in expected}
    for leaf, (name,) in enumerate(inspection.tree.paths):
        record = inspection.tree.leaves[leaf]
        assert isinstance(record, ArrayRecord) and record.spec.shape == tuple(expected[str(name)].shape)
        whole = np.zeros(record.spec.shape, record.spec.numpy_dtype)
        for chunk in table.boxes(leaf, Box.whole(record.spec.shape)):
            data = (path / chunk.key).read_bytes()
            part: Any = np.frombuffer(data, whole.dtype, chunk.box.size, chunk.offset)
            whole[chunk.box.slices] = part.reshape(chunk.box.shape)
        assert np.array_equal(whole.astype(np.float64), expected[str(name)].double().numpy())


def _shard(path: Path, number: int, header: Mapping[str, Any], data: bytes) -> None:
    encoded = json.dumps(header).encode()
    file = path / f"shard-{number:05d}-model-00001-of-00001.safetensors"
    file.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)


def _header(offsets: Any, shape: Any, stop: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {
        "__metadata__": {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": offsets}})},
        "w": {"dtype": dtype, "shape": shape, "data_offsets": [0, stop]},
    }


def test_parts_of_a_tensor_in_two_files(tmp_path: Path) -> None:
    whole = np.arange(12, dtype=np.float32).reshape(4, 3)
    _shard(tmp_path, 1, _header([0, 0], [1, 3], 12), whole[:1].tobytes())
    _shard(tmp_path, 2, _header([1, 0], [3, 3], 36), whole[1:].tobytes())
    expect_shards(tmp_path, {"w": torch.from_numpy(whole)})


@pytest.mark.parametrize(
    "header",
    [
        _header([0], [1, 3], 12),
        _header([-1, 0], [1, 3], 12),
        _header([0, 0], [1, 4], 12),
        _header([0, 0], [1, True], 4),
        _header([0, 0], [1 << 61, 3], 12),
        _header([1 << 61, 1 << 61], [1, 3], 12),
        _header([0, 0], [2, 3], 24),
        _header([0, 0], [1, 3], 12, "F4"),
        _header(None, [1, 3], 12),
        _header([0, 0], None, 12),
        {"__metadata__": {"DCP_SHARDING_INFO": "["}},
        {"__metadata__": {"DCP_SHARDING_INFO": "{}"}, "w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}},
    ],
)
def test_invalid_part_headers_are_refused(tmp_path: Path, header: Mapping[str, Any]) -> None:
    _shard(tmp_path, 1, header, bytes(12))
    with pytest.raises((CorruptCheckpointError, UnsupportedLeafError)):
        inspect_dcp(Directory(tmp_path), None)


def test_files_without_sharding_information_are_not_dcp(tmp_path: Path) -> None:
    _shard(tmp_path, 1, {"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}}, bytes(12))
    assert inspect_dcp(Directory(tmp_path), None) is None


@pytest.mark.skipif(not hasattr(dcp, "HuggingFaceStorageReader"), reason="PyTorch before 2.8 reads no such files")
@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable):UserWarning")
def test_torch_loads_slices_written_by_ckptcore(tmp_path: Path) -> None:
    """The layout safetensors writes an array as safetensors shards if no process has all of it."""
    state = {
        "w": np.arange(60, dtype=np.float32).reshape(10, 6),
        "b": np.arange(7, dtype=np.float64),
        "whole": np.ones(3, np.int32),
    }

    class Rows(HostArrayHandler):
        def shards(self, leaf: Any, rank: int, size: int) -> list[Shard]:
            edges = [leaf.shape[0] * number // (2 * size) for number in range(2 * size + 1)]
            rest = leaf.shape[1:]
            return [
                Shard(Box((edges[number], *[0] * len(rest)), (edges[number + 1], *rest)))
                for number in (rank, rank + size)
            ]

    def job(coordinator: Coordinator) -> None:
        context = ckptcore.Context(
            job=ckptcore.context.JobOptions(coordinator=coordinator),
            plugins=ckptcore.context.PluginOptions(handlers={np.ndarray: Rows()}),
        )
        ckptcore.save(tmp_path / "ours", state, layout=layout, context=context)

    layout = ckptcore.SafetensorsLayout(standalone=True)
    ThreadJob(2, timeout_seconds=60).run(job)
    target = {name: torch.zeros(array.shape, dtype=torch.from_numpy(array).dtype) for name, array in state.items()}
    dcp.load(target, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path / "ours")), no_dist=True)
    for name, array in state.items():
        assert np.array_equal(target[name].numpy(), array)
    (tmp_path / "ours" / "checkpoint.json").unlink()
    expect_shards(tmp_path / "ours", {name: torch.from_numpy(array) for name, array in state.items()})
    layout = ckptcore.SafetensorsLayout()
    (tmp_path / "ours").rename(tmp_path / "standalone")
    ThreadJob(2, timeout_seconds=60).run(job)
    (tmp_path / "ours" / "checkpoint.json").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"checkpoint\.json is missing"):
        ckptcore.load(tmp_path / "ours")


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable):UserWarning")
@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="PyTorch before 2.8 has no float4")
def test_parts_of_float4_pairs_written_by_torch(tmp_path: Path) -> None:
    pairs = torch.arange(12, dtype=torch.uint8).reshape(3, 4)
    state = {"w": pairs.view(torch.float4_e2m1fn_x2), "x": torch.ones(2)}
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(str(tmp_path), save_distributed=True), no_dist=True)
    expect_shards(tmp_path, {"w": pairs, "x": torch.ones(2)})
    inspection = inspect_dcp(Directory(tmp_path), None)
    assert inspection is not None
    kinds = {path: record.kind for path, record in zip(inspection.tree.paths, inspection.tree.leaves, strict=True)}
    assert kinds == {("w",): "torch.float4_e2m1fn_x2", ("x",): "array"}


def test_offsets_of_float4_are_counted_in_pairs(tmp_path: Path) -> None:
    """torch writes offsets in pairs, the unit of its float4 tensors, but the shape in elements."""
    pairs = np.arange(12, dtype=np.uint8).reshape(2, 6)
    _shard(tmp_path, 1, _header([0, 0], [2, 4], 4, "F4"), pairs[:, :2].tobytes())
    _shard(tmp_path, 2, _header([0, 2], [2, 8], 8, "F4"), pairs[:, 2:].tobytes())
    expect_shards(tmp_path, {"w": torch.from_numpy(pairs)})
