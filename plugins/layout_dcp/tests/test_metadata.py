"""The file ``.metadata``: read as torch writes it, written so that torch reads it, and rejected if it is invalid."""

from __future__ import annotations

import pickle
import pickletools
import random
import time
import tracemalloc
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ckptcore_dcp.metadata import DcpChunk, DcpMetadata, DcpTensor, DcpValue, read_metadata, write_metadata
from ckptcore_dcp.pickles import Call, Global, write_pickle
from torch.distributed.checkpoint import metadata as theirs
from torch.distributed.checkpoint.filesystem import _StorageInfo

from ckptcore.errors import CheckpointError, CorruptCheckpointError, UnsupportedLeafError
from ckptcore.model import unreadable_error
from plugins.layout_dcp.tests.state_dicts import VERSION


def _tensor(dtype: torch.dtype, shape: tuple[int, ...], *boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> Any:
    chunks = [theirs.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]
    return theirs.TensorStorageMetadata(theirs.TensorProperties(dtype=dtype), torch.Size(shape), chunks)


def _place(path: str, offset: int, length: int, *transforms: str) -> _StorageInfo:
    return _StorageInfo(path, offset, length, list(transforms) or None)


def _of_torch() -> theirs.Metadata:
    tensors = {
        "model.w": _tensor(torch.bfloat16, (10, 3), ((0, 0), (5, 3)), ((5, 0), (5, 3))),
        "scalar": _tensor(torch.float64, (), ((), ())),
        "deep": _tensor(torch.float8_e4m3fn, (1, 2, 3, 4, 5), ((0,) * 5, (1, 2, 3, 4, 5))),
        "große": _tensor(torch.int64, (70_000,), ((0,), (70_000,))),
    }
    tensors["scalar"].properties.requires_grad = True
    storage = {
        theirs.MetadataIndex("opt.lr"): _place("__0_0.distcp", 0, 1261),
        theirs.MetadataIndex("model.w", (0, 0), 0): _place("__0_0.distcp", 1261, 1577),
        theirs.MetadataIndex("model.w", (5, 0), 1): _place("sub/__1_0.distcp", 1 << 40, 1 << 33, "stream.zstd/1"),
        theirs.MetadataIndex("scalar", (), 0): _place("__0_0.distcp", 1 << 20, 300),
        theirs.MetadataIndex("deep", (0,) * 5, 0): _place("__0_0.distcp", (1 << 31) - 1, 1 << 31),
        theirs.MetadataIndex("große", (0,), 0): _place("__0_0.distcp", 255, 256),
    }
    return theirs.Metadata(
        {"model.w": tensors["model.w"], "opt.lr": theirs.BytesStorageMetadata(), **tensors},
        {
            "model.w": ("model", "w"),
            "opt.lr": ("opt", "lr"),
            "scalar": ("scalar",),
            "deep": ("deep",),
            "große": ("große",),
        },
        storage,
        theirs.StorageMeta("/somewhere", "an id"),
        *VERSION,
    )


def _read(value: object) -> DcpMetadata:
    return read_metadata(pickle.dumps(value, protocol=4), key=".metadata")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_metadata_written_by_torch_is_read(tmp_path: Path) -> None:
    state = {
        "w": torch.zeros(2, 3, requires_grad=True),
        "a": {"b": [torch.ones(2, dtype=torch.uint16), 3]},
        "t": (1, 2),
    }
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    metadata = read_metadata((tmp_path / ".metadata").read_bytes(), key=".metadata")
    assert metadata.paths == {"w": ("w",), "a.b.0": ("a", "b", 0), "a.b.1": ("a", "b", 1), "t": ("t",)}
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in metadata.tensors.items()} == {
        "w": ("float32", (2, 3)),
        "a.b.0": ("uint16", (2,)),
    }
    assert set(metadata.values) == {"a.b.1", "t"}
    assert metadata.names == ["w", "a.b.0", "a.b.1", "t"]
    assert metadata.tensors["w"].requires_grad and not metadata.tensors["a.b.0"].requires_grad
    assert metadata.checkpoint_id == str(tmp_path)
    size = (tmp_path / "__0_0.distcp").stat().st_size
    places = [*metadata.values.values(), *[chunk for tensor in metadata.tensors.values() for chunk in tensor.chunks]]
    assert sum(place.length for place in places) == size


def test_every_field_is_read() -> None:
    metadata = _read(_of_torch())
    assert metadata == DcpMetadata(
        {
            "model.w": DcpTensor(
                "bfloat16",
                (10, 3),
                (
                    DcpChunk((0, 0), (5, 3), "__0_0.distcp", 1261, 1577),
                    DcpChunk((5, 0), (5, 3), "sub/__1_0.distcp", 1 << 40, 1 << 33, ("stream.zstd/1",)),
                ),
            ),
            "scalar": DcpTensor("float64", (), (DcpChunk((), (), "__0_0.distcp", 1 << 20, 300),), requires_grad=True),
            "deep": DcpTensor(
                "float8_e4m3fn",
                (1, 2, 3, 4, 5),
                (DcpChunk((0,) * 5, (1, 2, 3, 4, 5), "__0_0.distcp", (1 << 31) - 1, 1 << 31),),
            ),
            "große": DcpTensor("int64", (70_000,), (DcpChunk((0,), (70_000,), "__0_0.distcp", 255, 256),)),
        },
        {"opt.lr": DcpValue("__0_0.distcp", 0, 1261)},
        {
            "model.w": ("model", "w"),
            "opt.lr": ("opt", "lr"),
            "scalar": ("scalar",),
            "deep": ("deep",),
            "große": ("große",),
        },
        "an id",
        "/somewhere",
    )


def test_torch_reads_our_metadata() -> None:
    expected = _of_torch()
    data = write_metadata(_read(expected))
    assert len(data) < len(pickle.dumps(expected, protocol=4))
    metadata = pickle.loads(data)
    assert metadata == expected
    assert {(index.fqn, index.index) for index in metadata.storage_data} == {
        (index.fqn, index.index) for index in expected.storage_data
    }
    for tensor in metadata.state_dict_metadata.values():
        if isinstance(tensor, theirs.TensorStorageMetadata):
            assert type(tensor.size) is type(tensor.chunks[0].offsets) is torch.Size
            assert tensor.properties.memory_format is torch.contiguous_format
    # Raises an error for an undefined memo entry, or if the stack is not empty at the end.
    pickletools.dis(data, StringIO())


def test_empty_metadata() -> None:
    metadata = pickle.loads(write_metadata(DcpMetadata({}, {})))
    assert metadata == theirs.Metadata({}, None, {}, theirs.StorageMeta(), *VERSION)
    assert _read(metadata) == DcpMetadata({}, {})


def test_more_names_than_one_byte_can_number() -> None:
    names = [f"block.{number}.{'x' * (number % 300)}" for number in range(600)]
    metadata = DcpMetadata(
        {name: DcpTensor("float32", (4,), (DcpChunk((0,), (4,), f"__{name}.distcp", 0, 9),)) for name in names[:500]},
        {name: DcpValue("__0_0.distcp", number, 9) for number, name in enumerate(names[500:])},
        {name: tuple(name.split(".")) for name in names},
    )
    data = write_metadata(metadata)
    assert read_metadata(data, key=".metadata") == metadata
    assert _read(pickle.loads(data)) == metadata


def test_duplicate_chunks_count_once_and_chunks_without_a_location_are_skipped() -> None:
    of_torch = _of_torch()
    entry = of_torch.state_dict_metadata["model.w"]
    entry.chunks.append(entry.chunks[0])
    del of_torch.storage_data[theirs.MetadataIndex("model.w", (5, 0))]
    chunks = _read(of_torch).tensors["model.w"].chunks
    assert [chunk.offsets for chunk in chunks] == [(0, 0)]


def test_additions_of_other_software_are_ignored() -> None:
    of_torch = _of_torch()
    of_torch.mcore_data = {"w": {"nd_reformulated_orig_global_shape": (3, 4)}}
    of_torch.planner_data = {"not": "paths"}
    metadata = _read(of_torch)
    assert metadata.paths is None and metadata.names == ["model.w", "scalar", "deep", "große", "opt.lr"]


@pytest.mark.parametrize(
    "path", ["", "/etc/passwd", "../x", "a/../../x", "a//b", "./a", "a\\b", "C:x", "a\0b", "a\nb", "a/", "\ud800"]
)
def test_files_outside_of_the_checkpoint_are_refused(path: str) -> None:
    of_torch = _of_torch()
    of_torch.storage_data[theirs.MetadataIndex("scalar", ())] = _place(path, 0, 1)
    with pytest.raises(CorruptCheckpointError, match="invalid file name .*inside the directory"):
        _read(of_torch)


@pytest.mark.parametrize(
    ("offset", "length"), [(-1, 1), (1, -1), (1 << 62, 1), (True, 1), ("0", 1), (0.0, 1), (None, 1), (1 << 5000, 1)]
)
def test_invalid_offsets_and_lengths_are_refused(offset: Any, length: Any) -> None:
    of_torch = _of_torch()
    of_torch.storage_data[theirs.MetadataIndex("scalar", ())] = _place("a", offset, length)
    with pytest.raises(CorruptCheckpointError, match="expected a number of bytes"):
        _read(of_torch)


@pytest.mark.parametrize(
    ("offsets", "sizes"), [((6, 0), (5, 3)), ((0,), (5,)), ((0, 0, 0), (1, 1, 1)), ((0, 0), (0, 4))]
)
def test_chunks_outside_of_their_tensor_are_refused(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    of_torch = _of_torch()
    of_torch.state_dict_metadata["model.w"] = _tensor(torch.bfloat16, (10, 3), (offsets, sizes))
    with pytest.raises(CorruptCheckpointError, match=r"model\.w"):
        _read(of_torch)


def test_tensors_larger_than_the_address_space_are_refused() -> None:
    of_torch = _of_torch()
    of_torch.state_dict_metadata["model.w"] = _tensor(torch.bfloat16, (1 << 40, 1 << 40))
    with pytest.raises(CorruptCheckpointError, match="exceeds the address space"):
        _read(of_torch)


def _expect_unreadable(of_torch: theirs.Metadata, name: str, error: type[Exception], message: str) -> None:
    metadata = _read(of_torch)
    assert name in metadata.names
    assert name not in {*metadata.tensors, *metadata.values}
    (record,) = metadata.unreadable.values()
    problem = unreadable_error(record)
    assert isinstance(problem, error)
    assert message in str(problem)


def test_an_error_names_an_unsupported_dtype() -> None:
    of_torch = _of_torch()
    of_torch.state_dict_metadata["deep"] = _tensor(torch.quint8, (2,))
    _expect_unreadable(of_torch, "deep", UnsupportedLeafError, "'deep' has the dtype torch.quint8")


def test_an_error_names_a_value_without_a_file() -> None:
    of_torch = _of_torch()
    del of_torch.storage_data[theirs.MetadataIndex("opt.lr")]
    _expect_unreadable(of_torch, "opt.lr", CorruptCheckpointError, "lists no file for the value 'opt.lr'")


@pytest.mark.parametrize("value", [None, 3, {}, [], "text", torch.Size([1]), theirs.StorageMeta(), theirs.Metadata])
def test_other_pickles_are_refused(value: object) -> None:
    with pytest.raises(CorruptCheckpointError, match="expected a Metadata"):
        _read(value)


@pytest.mark.parametrize("field", ["state_dict_metadata", "storage_data"])
@pytest.mark.parametrize("value", [None, 3, [1], {1: 2}, {"a": 3}, {"a": None}, {theirs.MetadataIndex("a"): 3}])
def test_fields_of_another_type_are_refused(field: str, value: object) -> None:
    of_torch = _of_torch()
    setattr(of_torch, field, value)
    with pytest.raises(CorruptCheckpointError):
        _read(of_torch)


def _old(module: str, name: str, **state: Any) -> Call:
    return Call(Global(module, name), (), state=dict(state), new=True)


@pytest.mark.parametrize(
    ("metadata", "properties", "files"),
    [
        (
            "torch.distributed.checkpoint.metadata",
            "torch.distributed._shard.sharded_tensor.metadata",
            "torch.distributed.checkpoint.filesystem",
        ),
        (
            "torch.distributed._shard.checkpoint.metadata",
            "torch.distributed._shard.sharded_tensor.metadata",
            "torch.distributed._shard.checkpoint.filesystem",
        ),
    ],
    ids=["torch 2.0 to 2.2", "torch 1.13"],
)
def test_classes_are_found_in_the_modules_of_older_versions(metadata: str, properties: str, files: str) -> None:
    layout = Call(Global("torch.serialization", "_get_layout"), ("torch.strided",))
    encoding = Call(Global(properties, "MEM_FORMAT_ENCODING"), (0,))
    state: Any = (Global("torch", "half"), layout, False, encoding, False)
    shape, origin = Call(Global("torch", "Size"), ((4,),)), Call(Global("torch", "Size"), ((0,),))
    tensor = _old(
        metadata,
        "TensorStorageMetadata",
        properties=Call(Global(properties, "TensorProperties"), (), state=state, new=True),
        size=shape,
        chunks=[_old(metadata, "ChunkStorageMetadata", offsets=origin, sizes=shape)],
    )
    index = _old(metadata, "MetadataIndex", fqn="w", offset=origin, index=0)
    place = _old(files, "_StorageInfo", relative_path="__0_0.distcp", offset=3, length=9)
    whole = _old(
        metadata, "Metadata", state_dict_metadata={"w": tensor}, planner_data=None, storage_data={index: place}
    )
    chunk = DcpChunk((0,), (4,), "__0_0.distcp", 3, 9)
    expected = DcpMetadata({"w": DcpTensor("float16", (4,), (chunk,))}, {})
    assert read_metadata(write_pickle(whole, protocol=4), key=".metadata") == expected


def test_bytes_after_the_pickle_are_refused() -> None:
    with pytest.raises(CorruptCheckpointError, match="ends at byte"):
        read_metadata(pickle.dumps(_of_torch(), protocol=4) + b"x", key=".metadata")


def test_one_list_of_chunks_for_many_tensors_is_refused_early() -> None:
    entry = _tensor(torch.bfloat16, (10,), *[((0,), (1,))] * 3000)
    entries = {
        str(number): theirs.TensorStorageMetadata(entry.properties, entry.size, entry.chunks) for number in range(3000)
    }
    data = pickle.dumps(theirs.Metadata(entries, None, {}), protocol=4)
    began = time.monotonic()
    with pytest.raises(CorruptCheckpointError, match="more chunks and transforms than it has bytes"):
        read_metadata(data, key=".metadata")
    assert time.monotonic() - began < 5


def test_one_chunk_listed_often_takes_no_more_memory_next_to_a_tensor_of_many_axes() -> None:
    one = _tensor(torch.float32, (200,), ((0,), (1,)))
    one.chunks *= 20_000  # a reference to the chunk takes 2 bytes
    entries: dict[str, Any] = {"one": one, "deep": _tensor(torch.float32, (1,) * 64, ((0,) * 64, (1,) * 64))}
    data = pickle.dumps(theirs.Metadata(entries, None, {}), protocol=4)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptCheckpointError, match="times the axes of the largest, exceed its bytes"):
            read_metadata(data, key=".metadata")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100 * len(data)


def test_a_tensor_of_many_axes_among_many_scalars_is_read() -> None:
    entries: dict[str, Any] = {f"{number:x}": _tensor(torch.float32, (), ((), ())) for number in range(1000)}
    entries["deep"] = _tensor(torch.float32, (1,) * 64, ((0,) * 64, (1,) * 64))
    storage = {
        theirs.MetadataIndex(name, entry.chunks[0].offsets, 0): _place("f", 0, 1) for name, entry in entries.items()
    }
    data = pickle.dumps(theirs.Metadata(entries, None, storage), protocol=4)
    assert len(read_metadata(data, key=".metadata").tensors["deep"].chunks) == 1


@pytest.mark.slow
def test_damage_raises_an_error_or_changes_a_value() -> None:
    data = pickle.dumps(_of_torch(), protocol=4)
    chance = random.Random(7)
    refused = 0
    for _ in range(3000):
        damaged = bytearray(data)
        for _ in range(chance.choice((1, 1, 1, 4))):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        if chance.random() < 0.1:
            del damaged[chance.randrange(len(damaged)) :]
        try:
            read_metadata(bytes(damaged), key=".metadata")
        except CheckpointError:
            refused += 1
    assert refused > 1500
