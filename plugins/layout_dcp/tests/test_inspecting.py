"""Inspection of checkpoints written by torch: returns the tree of the saved state, and the location of every chunk."""

from __future__ import annotations

import io
import json
import pickle
import random
import shutil
import struct
import subprocess
import sys
import textwrap
import zipfile
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import zstandard
from ckptcore_dcp.chunk_index import ItemIndex
from ckptcore_dcp.inspecting import inspect_dcp
from ckptcore_dcp.item_reading import StoredItem
from torch.distributed.checkpoint import metadata as theirs
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo

import ckptcore
from ckptcore.builtin.host_leaves import HostValueHandler
from ckptcore.errors import (
    CheckpointError,
    CorruptCheckpointError,
    UncommittedCheckpointError,
    UnsupportedLeafError,
)
from ckptcore.model import ArrayRecord, LeafRecord, Node, Skeleton, TreeMetadata, ValueRecord
from ckptcore.protocols import Inspection
from plugins.layout_dcp.tests.directories import Directory
from plugins.layout_dcp.tests.test_hf_shards import expect_shards

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


def _state() -> dict[str, Any]:
    return {
        "model": OrderedDict(
            w=torch.arange(12, dtype=torch.float32).reshape(3, 4).T,
            b=torch.ones(5, dtype=torch.bfloat16, requires_grad=True),
            u=torch.tensor([1, 2, 3], dtype=torch.uint16),
        ),
        "optim": {
            "groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": [0, 1]}],
            "state": {0: {"m": torch.zeros(2, 2)}},
        },
        "step": torch.tensor(7),
        "texts": ["a", "b"],
        "empty": torch.zeros(0, 3),
        "rng": b"\x00\x01\xff",
        "big": 1 << 70,
        "special": (float("nan"), float("-inf"), 1 + 2j, None, True),
        "nested": ({"a": [1, {"b": 2}], 3: "x"}, OrderedDict(z=1, y=2)),
        "nothing": [],
    }


def _save(path: Path, state: dict[str, Any] | None = None, **options: Any) -> Path:
    writer = FileSystemWriter(path, sync_files=False, **options)
    dcp.save(_state() if state is None else state, storage_writer=writer, no_dist=True)
    return path


def _inspect(path: Path) -> Inspection:
    inspection = inspect_dcp(Directory(path), None)
    assert inspection is not None
    return inspection


def _value(record: LeafRecord) -> object:
    return HostValueHandler().build(None, record, ())


def _chunks(inspection: Inspection, leaf: int) -> Sequence[StoredItem]:
    state = json.loads(json.dumps(inspection.state))  # the state must be valid JSON
    return ItemIndex(inspection.tree, state).items(leaf)


def _tensor(path: Path, inspection: Inspection, leaf: int) -> torch.Tensor:
    """Read a leaf with torch, from the items that the inspection located."""
    record = inspection.tree.leaves[leaf]
    assert isinstance(record, ArrayRecord)
    whole: torch.Tensor | None = torch.empty(record.spec.shape) if 0 in record.spec.shape else None
    for chunk in _chunks(inspection, leaf):
        item = (path / chunk.key).read_bytes()[chunk.offset : chunk.offset + chunk.nbytes]
        if chunk.transforms:
            import zstandard

            item = zstandard.ZstdDecompressor().stream_reader(item).read()
        part = torch.load(io.BytesIO(item), weights_only=True)
        if whole is None:
            whole = torch.zeros(record.spec.shape, dtype=part.dtype)
        whole[chunk.box.slices] = part
    assert whole is not None
    return whole


def _rebuilt(path: Path, inspection: Inspection) -> Any:
    """Return the state: tensors loaded by torch, values by ckptcore."""
    leaves = iter(range(len(inspection.tree.leaves)))

    def build(node: Skeleton) -> Any:
        if not isinstance(node, Node):
            leaf = next(leaves)
            record = inspection.tree.leaves[leaf]
            return _tensor(path, inspection, leaf) if isinstance(record, ArrayRecord) else _value(record)
        children = [build(child) for child in node.children]
        if node.kind == "list":
            return children
        if node.kind == "tuple":
            return tuple(children)
        made = dict(zip(node.keys, children, strict=True))
        return OrderedDict(made) if node.kind == "OrderedDict" else made

    return build(inspection.tree.skeleton)


def _same(actual: Any, expected: Any) -> bool:
    if isinstance(expected, torch.Tensor):
        return isinstance(actual, torch.Tensor) and torch.equal(actual.double(), expected.detach().double())
    if isinstance(expected, Mapping):
        # torch converts the keys of flattened mappings to text.
        return list(map(str, actual)) == list(map(str, expected)) and all(
            map(_same, actual.values(), expected.values())
        )
    if isinstance(expected, list | tuple):
        return type(actual) is type(expected) and len(actual) == len(expected) and all(map(_same, actual, expected))
    return repr(actual) == repr(expected)


@pytest.mark.parametrize(
    "options",
    [{}, {"single_file_per_rank": False}, {"thread_count": 3}, {"_extensions": [ZStandard()]}],
    ids=["one file", "a file each", "three threads", "compressed"],
)
def test_a_state_saved_by_torch_comes_back(tmp_path: Path, options: dict[str, Any]) -> None:
    _save(tmp_path, **options)
    inspection = _inspect(tmp_path)
    assert inspection.writer == "torch.distributed.checkpoint"
    assert _same(_rebuilt(tmp_path, inspection), _state())
    TreeMetadata.from_json(json.loads(json.dumps(inspection.tree.to_json())))


def test_adjacent_values_take_one_request(tmp_path: Path) -> None:
    store = Directory(_save(tmp_path, {"a": {str(number): number for number in range(200)}, "t": torch.zeros(2)}))
    inspection = inspect_dcp(store, ".metadata")
    assert inspection is not None and len(inspection.tree.leaves) == 201
    assert store.gets == 2


def test_a_large_state_of_values_is_read_in_several_requests(tmp_path: Path) -> None:
    state = {str(number): bytes([number]) * (3 << 20) for number in range(5)}
    inspection = _inspect(_save(tmp_path, state))
    assert _same(_rebuilt(tmp_path, inspection), state)


def test_the_length_of_an_item_gives_the_offset_of_its_elements(tmp_path: Path) -> None:
    sizes = [1, 47, 48, 63, 64, 65, 1000, 1 << 16]
    dtypes = [torch.uint8, torch.float32, torch.float8_e5m2, torch.uint64]
    state = {f"{size}.{dtype}": torch.ones(size).to(dtype) for size in sizes for dtype in dtypes}
    inspection = _inspect(_save(tmp_path, state))
    data = (tmp_path / "__0_0.distcp").read_bytes()
    for leaf, record in enumerate(inspection.tree.leaves):
        assert isinstance(record, ArrayRecord)
        (chunk,) = _chunks(inspection, leaf)
        nbytes = record.spec.nbytes
        start = chunk.offset + chunk.nbytes - 873 - nbytes // 64 * 64
        assert data[start : start + nbytes] == np.ones(record.spec.shape, record.spec.numpy_dtype).tobytes()
        assert data[start + nbytes :][:4] == b"PK\x07\x08"
        assert struct.unpack("<2I", data[start + nbytes + 8 :][:8]) == (nbytes, nbytes)


class _Custom:
    def __init__(self) -> None:
        self.position = 3


def test_objects_of_classes_stay_inert(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    inspection = _inspect(_save(tmp_path / "made", {"a": _Custom(), "s": {1}, "t": 1}))
    types = {node.type for node in inspection.tree.skeleton.children if isinstance(node, Node)}  # type: ignore[union-attr]  # a dict
    assert any(name is not None and name.endswith("_Custom") for name in types)
    assert [_value(record) for record in inspection.tree.leaves] == [3, 1, 1]


def test_tensors_within_values_are_listed_without_elements(tmp_path: Path) -> None:
    inspection = _inspect(_save(tmp_path, {"a": (torch.zeros(2, 3), 1), "b": torch.ones(1)}))
    assert [getattr(record, "spec", None) is not None for record in inspection.tree.leaves] == [True, False, True]
    assert [len(_chunks(inspection, leaf)) for leaf in range(3)] == [0, 0, 1]


def _merge(path: Path, metadata: theirs.Metadata, rank: int) -> None:
    (path / f"__{rank}.metadata").write_bytes(pickle.dumps(metadata))


def _two_ranks(path: Path) -> None:
    """Write the files of two processes that save without collectives.

    They have different shards, and shared entries.
    """
    for rank in range(2):
        part = path / f"part{rank}"
        _save(part, {"w": torch.full((2, 3), rank), "x": torch.ones(2), "step": 4 + rank})
        shutil.move(part / "__0_0.distcp", path / f"__{rank}_0.distcp")
        metadata: theirs.Metadata = pickle.loads((part / ".metadata").read_bytes())
        shutil.rmtree(part)
        entry: Any = metadata.state_dict_metadata["w"]
        entry.size = torch.Size((4, 3))
        entry.chunks[0].offsets = torch.Size((2 * rank, 0))
        storage = {}
        for index, info in metadata.storage_data.items():
            offset = (2 * rank, 0) if index.fqn == "w" else index.offset
            place = _StorageInfo(f"__{rank}_0.distcp", info.offset, info.length)
            storage[theirs.MetadataIndex(index.fqn, offset, index.index)] = place
        metadata.storage_data = storage
        _merge(path, metadata, rank)


def test_files_of_ranks_that_saved_separately_are_merged(tmp_path: Path) -> None:
    _two_ranks(tmp_path)
    inspection = _inspect(tmp_path)
    expected = {"w": torch.tensor([[0] * 3] * 2 + [[1] * 3] * 2), "x": torch.ones(2), "step": 4}
    assert _same(_rebuilt(tmp_path, inspection), expected)
    record = inspection.tree.leaves[0]
    assert isinstance(record, ArrayRecord) and record.cuts == ((2,), ())


def test_cuts_are_released_with_the_inspection(tmp_path: Path) -> None:
    """A large array has thousands of them."""
    _two_ranks(tmp_path)
    inspections = [_inspect(tmp_path) for _ in range(2)]
    first, second = [inspection.tree.leaves[0] for inspection in inspections]
    assert isinstance(first, ArrayRecord) and isinstance(second, ArrayRecord)
    assert first.cuts == second.cuts and first.cuts is not second.cuts


def test_ranks_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    _two_ranks(tmp_path)
    metadata: theirs.Metadata = pickle.loads((tmp_path / "__1.metadata").read_bytes())
    entry: Any = metadata.state_dict_metadata["w"]
    entry.size = torch.Size((5, 3))
    _merge(tmp_path, metadata, 1)
    with pytest.raises(CorruptCheckpointError, match="lists something else: the processes saved different states"):
        ckptcore.load(tmp_path)


def test_other_directories_are_not_recognized(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"x")
    assert inspect_dcp(Directory(tmp_path), None) is None
    assert inspect_dcp(Directory(tmp_path), "x.safetensors") is None
    (tmp_path / ".metadata").write_text("{}")
    assert inspect_dcp(Directory(tmp_path), None) is None


def test_an_unfinished_save_is_no_checkpoint(tmp_path: Path) -> None:
    _save(tmp_path)
    (tmp_path / ".metadata").unlink()
    with pytest.raises(UncommittedCheckpointError, match="is missing: the save failed or is still running"):
        inspect_dcp(Directory(tmp_path), None)
    (tmp_path / ".metadata").write_bytes(b"")
    with pytest.raises(CorruptCheckpointError):
        inspect_dcp(Directory(tmp_path), None)


def test_the_error_names_missing_and_truncated_files(tmp_path: Path) -> None:
    _save(tmp_path, {"a": 1, "b": 2})
    file = tmp_path / "__0_0.distcp"
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2 + 10])
    with pytest.raises(CorruptCheckpointError, match=r"cut off.*'b'"):
        ckptcore.load(tmp_path)
    file.unlink()
    with pytest.raises(CorruptCheckpointError, match="is missing, which contains the value"):
        ckptcore.load(tmp_path)


def test_overlapping_values_are_refused(tmp_path: Path) -> None:
    _save(tmp_path, {"a": 1, "b": 2})
    metadata: theirs.Metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    first, second = metadata.storage_data
    metadata.storage_data[second] = metadata.storage_data[first]
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptCheckpointError, match="overlap"):
        _inspect(tmp_path)


def test_a_huge_stated_length_allocates_no_memory(tmp_path: Path) -> None:
    _save(tmp_path, {"a": 1})
    metadata: theirs.Metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.length = 1 << 61
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptCheckpointError, match="cut off"):
        ckptcore.load(tmp_path)


def test_the_error_names_unknown_transforms(tmp_path: Path) -> None:
    _save(tmp_path, {"a": 1})
    metadata: theirs.Metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.transform_descriptors = ["stream.secret/1"]
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UnsupportedLeafError, match=r"stream\.secret/1"):
        ckptcore.load(tmp_path)


@pytest.mark.parametrize("transform", ["stream.zstd/1", None])
def test_a_value_that_expands_a_thousand_times_is_refused(transform: str | None, tmp_path: Path) -> None:
    """Compression is inside the item or around it.

    A value of equal length, which compression hardly shortens, comes first.
    """
    chance = random.Random(3)
    pickles = {
        "random": b"\x80\x02(" + b"".join([b"K" + chance.randbytes(1) for _ in range(15_000)]) + b"l.",
        "zeros": b"\x80\x02(" + b"K\0" * 15_000 + b"l.",
    }
    _save(tmp_path, {"random": "x", "zeros": "y"})
    metadata: theirs.Metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    data = b""
    for index, info in metadata.storage_data.items():
        item = io.BytesIO()
        with zipfile.ZipFile(item, "w", zipfile.ZIP_STORED if transform else zipfile.ZIP_DEFLATED) as file:
            file.writestr(zipfile.ZipInfo("archive/data.pkl"), pickles[index.fqn], file.compression)
        stored = zstandard.compress(item.getvalue()) if transform else item.getvalue()
        info.offset, info.length = len(data), len(stored)
        info.transform_descriptors = [transform] if transform else None
        data += stored
    for path in tmp_path.glob("*.distcp"):
        path.write_bytes(data)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptCheckpointError, match=r"data\.pkl.*at most"):
        ckptcore.load(tmp_path)
    del metadata.storage_data[next(index for index in metadata.storage_data if index.fqn == "zeros")]
    del metadata.state_dict_metadata["zeros"]
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert len(ckptcore.load(tmp_path)["random"]) == 15_000


@pytest.mark.parametrize("shape", [(1 << 50, 10), (7, 10)])
def test_a_tensor_that_its_chunks_do_not_cover(shape: tuple[int, ...], tmp_path: Path) -> None:
    """A load rejects the tensor before it reads any data, and `verify` reports it. Other arrays load."""
    _save(tmp_path, {"w": torch.zeros(6, 10), "v": torch.ones(3)})
    metadata: theirs.Metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    metadata.state_dict_metadata["w"].size = torch.Size(shape)  # type: ignore[union-attr]  # it is a tensor
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert ckptcore.load(tmp_path, {"w": ckptcore.PLACEHOLDER, "v": np.zeros(3, np.float32)})["v"].tolist() == [1, 1, 1]
    for read in (
        ckptcore.load,
        lambda location: list(ckptcore.open(location).iter_boxes()),
        lambda location: ckptcore.open(location)["w"][:1, :1],
        lambda location: ckptcore.copy(location, tmp_path.parent / "copy", layout="safetensors"),
    ):
        with pytest.raises(CorruptCheckpointError, match="w .* the stored boxes do not cover it"):
            read(tmp_path)
    assert not ckptcore.verify(tmp_path).ok


class _Evil:
    def __reduce__(self) -> Any:
        return (pytest.fail, ("code was run",))


def test_no_code_of_a_checkpoint_runs(tmp_path: Path) -> None:
    _save(tmp_path, {"a": (_Evil(),), "b": 1})
    inspection = _inspect(tmp_path)
    assert len(inspection.tree.leaves) >= 2
    (tmp_path / ".metadata").write_bytes(pickle.dumps(_Evil()))
    with pytest.raises(CorruptCheckpointError, match="expected a Metadata"):
        _inspect(tmp_path)


def test_damage_raises_a_checkpoint_error_or_changes_a_value(tmp_path: Path) -> None:
    _save(tmp_path, {"a": (1, "x"), "b": {"c": [1, 2]}, "t": torch.zeros(2)})
    chance = random.Random(3)
    originals = {name: (tmp_path / name).read_bytes() for name in (".metadata", "__0_0.distcp")}
    refused = 0
    for _ in range(400):
        name = chance.choice(list(originals))
        damaged = bytearray(originals[name])
        damaged[chance.randrange(min(len(damaged), 2600))] ^= 1 << chance.randrange(8)
        (tmp_path / name).write_bytes(damaged)
        try:
            inspect_dcp(Directory(tmp_path), None)
        except CheckpointError:
            refused += 1
        (tmp_path / name).write_bytes(originals[name])
    assert refused > 100


def test_a_flipped_bit_in_a_value_is_found(tmp_path: Path) -> None:
    _save(tmp_path, {"a": "some text"})
    file = tmp_path / "__0_0.distcp"
    file.write_bytes(file.read_bytes().replace(b"some text", b"some tezt"))
    with pytest.raises(CorruptCheckpointError):
        ckptcore.load(tmp_path)
    assert zipfile.is_zipfile(file)


_JOB = """
import os, sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
rendezvous = "file://" + sys.argv[2] + "/rendezvous"
dist.init_process_group("gloo", init_method=rendezvous, rank=int(sys.argv[1]), world_size=2)
mesh = init_device_mesh("cpu", (2,))
state = {"w": distribute_tensor(torch.arange(15.).reshape(5, 3), mesh, [Shard(0)]),
         "one": distribute_tensor(torch.arange(3.).reshape(1, 3), mesh, [Shard(0)]),
         "v": distribute_tensor(torch.arange(8.).reshape(2, 4).bfloat16(), mesh, [Shard(1)]),
         "r": distribute_tensor(torch.ones(4), mesh, [Replicate()])}
dcp.save({**state, "nested": {"step": 3}}, checkpoint_id=sys.argv[2] + "/plain")
dcp.save(state, storage_writer=HuggingFaceStorageWriter(sys.argv[2] + "/hf", save_distributed=True))
dist.destroy_process_group()
"""


@pytest.mark.system
@pytest.mark.slow
def test_a_state_saved_by_several_processes_comes_back(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(textwrap.dedent(_JOB))
    jobs = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(script), str(rank), str(tmp_path)], stderr=subprocess.PIPE
        )
        for rank in range(2)
    ]
    for job in jobs:
        _, errors = job.communicate(timeout=240)
        assert job.returncode == 0, errors.decode()[-2000:]
    expected: dict[str, Any] = {
        "w": torch.arange(15.0).reshape(5, 3),
        "one": torch.arange(3.0).reshape(1, 3),
        "v": torch.arange(8.0).reshape(2, 4),
        "r": torch.ones(4),
    }
    inspection = _inspect(tmp_path / "plain")
    rebuilt = _rebuilt(tmp_path / "plain", inspection)
    assert _same({name: rebuilt[name] for name in (*expected, "nested")}, {**expected, "nested": {"step": 3}})
    expect_shards(tmp_path / "hf", expected)


def test_empty_containers_have_no_leaves(tmp_path: Path) -> None:
    inspection = _inspect(_save(tmp_path, {"a": (), "b": [], "c": [{}], "d": {"e": ({},)}}))
    assert inspection.tree.leaves == () and not any(
        isinstance(record, ValueRecord) for record in inspection.tree.leaves
    )
