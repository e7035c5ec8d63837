"""Files of torch.save load bit for bit, without torch, and without executing code in them."""

from __future__ import annotations

import json
import os
import pickle
import random
import tracemalloc
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ckptcore_dcp import storages
from ckptcore_dcp.torch_files import TorchLayout
from ckptcore_dcp.zips import read_zip, torch_members
from ckptcore_testing.layout_stores import DirectoryReadStore

import ckptcore
from ckptcore.errors import CheckpointError, ChecksumError, CorruptCheckpointError, UnsupportedLeafError
from ckptcore.hookspecs import hookimpl
from ckptcore.model import JSON, LEAF, ArrayRecord, ArraySpec, Box, ChunkRead, HostArray, ReadItem, TreeMetadata
from ckptcore.protocols import Inspection, LayoutFactory

_FORMATS = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])


class _Plugin:
    @hookimpl
    def ckpt_layouts(self) -> Mapping[str, LayoutFactory]:
        return {"torch": TorchLayout}


def _load(path: Path) -> Any:
    installed = any(point.value.startswith("ckptcore_dcp") for point in entry_points(group="ckptcore"))
    return ckptcore.load(
        path, context=ckptcore.Context(plugins=ckptcore.context.PluginOptions(extra=() if installed else (_Plugin(),)))
    )


def _save(state: object, path: Path, zipped: bool = True) -> None:
    torch.save(state, path, _use_new_zipfile_serialization=zipped)


class _CountingStore(DirectoryReadStore):
    """A store that counts the bytes read from it."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.got = 0
        self.tiles: list[ChunkRead] = []

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        data = super().get(key, start, stop)
        self.got += len(data)
        return data

    def read_chunks(self, reads: Sequence[ChunkRead]) -> Iterator[int]:
        self.tiles.extend(reads)
        return super().read_chunks(reads)


def _inspect(path: Path) -> Inspection:
    inspection = TorchLayout().inspect(DirectoryReadStore(path.parent), path.name)
    assert inspection is not None
    return inspection


def _read(store: DirectoryReadStore, inspection: Inspection, items: Sequence[tuple[int, Box]]) -> list[HostArray]:
    buffers: list[HostArray] = []
    for leaf, box in items:
        record = inspection.tree.leaves[leaf]
        assert isinstance(record, ArrayRecord)
        buffers.append(np.empty(box.shape, record.spec.numpy_dtype))
    index = TorchLayout().index(inspection.tree, inspection.state)
    assert sorted(store.read_boxes(index, [ReadItem(leaf, box) for leaf, box in items], buffers)) == list(
        range(len(items))
    )
    return buffers


def _extents(tree: TreeMetadata, state: JSON) -> None:
    index = TorchLayout().index(tree, state)
    for leaf in range(len(tree.leaves)):
        list(index.extents(leaf))


def _bits(tensor: torch.Tensor) -> bytes:
    dense = tensor.detach().contiguous()
    return dense.reshape(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b""


def _assert_same(actual: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert isinstance(actual, np.ndarray)
        assert actual.shape == tuple(expected.shape)
        assert str(actual.dtype) == str(expected.dtype).removeprefix("torch.")
        assert actual.tobytes() == _bits(expected)
    elif isinstance(expected, dict):
        assert type(actual) is type(expected)
        assert list(actual) == list(expected)
        for key, value in expected.items():
            _assert_same(actual[key], value)
    elif isinstance(expected, list | tuple):
        assert type(actual) is type(expected) and len(actual) == len(expected)
        for leaf, other in zip(actual, expected, strict=True):
            _assert_same(leaf, other)
    else:
        assert type(actual) is type(expected) and actual == expected


def _tensors() -> dict[str, torch.Tensor]:
    dtypes = (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.complex128,
        torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
    )  # fmt: skip
    torch.manual_seed(0)
    base = torch.randn(6, 5) * 10
    tensors = {str(dtype): base.abs().to(dtype) for dtype in dtypes}
    tensors |= {
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "none": torch.empty(3, 0, dtype=torch.int32),
        "transposed": base.T,
        "part": base[1:5, 2:],
        "stepped": base[::2, ::3],
        "column": base[:, 3],
        "one": base[2:3, 4:5],
        "channels": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "permuted": torch.randn(2, 3, 4).permute(2, 0, 1)[1:, :, ::2],
        "expanded": torch.tensor([1.0, 2.0])[:, None].expand(2, 7),
        "overlapping": torch.arange(10.0).as_strided((4, 4), (1, 2)),
        "bf16 transposed": torch.randn(3, 4).to(torch.bfloat16).T,
        "fp8 stepped": torch.randn(12).to(torch.float8_e4m3fn)[::3],
    }
    return tensors


@_FORMATS
def test_tensors_of_every_kind(zipped: bool, tmp_path: Path) -> None:
    state = _tensors()
    _save(state, tmp_path / "model.pt", zipped)
    _assert_same(_load(tmp_path / "model.pt"), state)


@_FORMATS
def test_views_of_one_storage_stay_separate_arrays(zipped: bool, tmp_path: Path) -> None:
    base = torch.arange(24.0)
    state = {"all": base, "shape": base.reshape(4, 6), "part": base[4:9], "turned": base.reshape(4, 6).T}
    _save(state, tmp_path / "m.bin", zipped)
    assert not _inspect(tmp_path / "m.bin").tree.aliases
    _assert_same(_load(tmp_path / "m.bin"), state)


@_FORMATS
def test_tied_tensors_are_aliases(zipped: bool, tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.randn(3, 4))
    state = {"embedding": weight, "other": torch.ones(2), "head": weight, "data": weight.data}
    _save(state, tmp_path / "m.pth", zipped)
    assert dict(_inspect(tmp_path / "m.pth").tree.aliases) == {2: 0, 3: 0}
    loaded = _load(tmp_path / "m.pth")
    _assert_same(loaded, state)


@_FORMATS
def test_the_state_of_a_training_job(zipped: bool, tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    model(torch.randn(7, 4)).sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": 12,
        "loss": float("inf"),
        "name": "run é",
        "done": False,
        "nothing": None,
        "shape": (1, [2, (3.5, "x")], {}),
        "key": b"\0\xff" * 10,
        "large": 1 << 100,
        "phase": 1 - 2j,
        "nested": OrderedDict(a={"b": [torch.ones(2), {"c": torch.zeros(1)}]}),
        "rng": torch.get_rng_state(),
    }
    _save(state, tmp_path / "checkpoint.pt", zipped)
    _assert_same(_load(tmp_path / "checkpoint.pt"), state)
    assert scheduler is not None


@_FORMATS
def test_a_file_that_is_one_tensor(zipped: bool, tmp_path: Path) -> None:
    _save(torch.arange(3), tmp_path / "t.pt", zipped)
    _assert_same(_load(tmp_path / "t.pt"), torch.arange(3))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_other_protocols_of_pickles(protocol: int, tmp_path: Path) -> None:
    state = {"w": torch.randn(3, 4), "t": (1, "s", b"b")}
    for zipped in (True, False):
        torch.save(state, tmp_path / "m.pt", pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
        _assert_same(_load(tmp_path / "m.pt"), state)


def test_files_are_found_by_their_content(tmp_path: Path) -> None:
    _save({"w": torch.ones(2)}, tmp_path / "no-ending")
    _assert_same(_load(tmp_path / "no-ending"), {"w": torch.ones(2)})
    (tmp_path / "text.pt").write_text("PK is no zip")
    np.savez(tmp_path / "arrays.pt.npz", a=np.ones(3))
    (tmp_path / "empty.pt").touch()
    (tmp_path / "pickle.pt").write_bytes(pickle.dumps({"a": 1}))
    store = DirectoryReadStore(tmp_path)
    for name in ("text.pt", "arrays.pt.npz", "empty.pt", "pickle.pt"):
        assert TorchLayout().inspect(store, name) is None
    assert TorchLayout().inspect(store, None) is None


def test_a_directory_of_shards(tmp_path: Path) -> None:
    shared = torch.randn(3, 3)
    first = {"a": torch.randn(2, 3), "tied": shared, "too": shared}
    second = {"b": torch.randn(4).to(torch.bfloat16), "not listed": torch.ones(1)}
    _save(first, tmp_path / "pytorch_model-00001-of-00002.bin")
    _save(second, tmp_path / "pytorch_model-00002-of-00002.bin", zipped=False)
    weight_map = dict.fromkeys(first, "pytorch_model-00001-of-00002.bin") | {"b": "pytorch_model-00002-of-00002.bin"}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    expected = first | {"b": second["b"]}
    _assert_same(_load(tmp_path), expected)
    _assert_same(_load(tmp_path / "pytorch_model.bin.index.json"), expected)
    inspection = TorchLayout().inspect(DirectoryReadStore(tmp_path), None)
    assert inspection is not None and dict(inspection.tree.aliases) == {2: 1}


@pytest.mark.parametrize(
    "index",
    [
        "",
        "[]",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {"a": 1}}',
        '{"weight_map": {"a": "../secret.bin"}}',
        '{"weight_map": {"a": "/etc/passwd"}}',
        '{"weight_map": {"a": ".."}}',
        '{"weight_map": {"a": ""}}',
        "[" * 100_000,
    ],
)
def test_invalid_indexes_are_refused(index: str, tmp_path: Path) -> None:
    directory = tmp_path / "here"
    directory.mkdir()
    _save({"a": torch.ones(1)}, tmp_path / "secret.bin")
    _save({"a": torch.ones(1), "step": 3}, directory / "good.bin")
    (directory / "text.bin").write_text("text")
    (directory / "pytorch_model.bin.index.json").write_text(index)
    with pytest.raises(CorruptCheckpointError):
        TorchLayout().inspect(DirectoryReadStore(directory), None)


def test_a_directory_with_only_pytorch_model_bin(tmp_path: Path) -> None:
    _save({"w": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text("{}")
    _assert_same(_load(tmp_path), {"w": torch.ones(2)})


@_FORMATS
def test_a_box_of_an_array_reads_only_its_bytes(zipped: bool, tmp_path: Path) -> None:
    tensor = torch.arange(400_000.0).reshape(1000, 400)
    _save({"w": tensor, "t": tensor.T}, tmp_path / "m.pt", zipped)
    inspection = _inspect(tmp_path / "m.pt")
    store = _CountingStore(tmp_path)
    box = Box((10, 3), (12, 9))
    (part,) = _read(store, inspection, [(0, box)])
    assert part.tobytes() == _bits(tensor[10:12, 3:9])
    assert store.got == 0 and store.tiles[0].checksum is None
    (part,) = _read(store, inspection, [(1, Box((3, 10), (9, 12)))])
    assert part.tobytes() == _bits(tensor[10:12, 3:9].T)
    assert 0 < store.got < 4 * 1000


def test_completely_read_arrays_are_verified(tmp_path: Path) -> None:
    tensor = torch.arange(1000.0)
    _save({"w": tensor, "v": tensor.reshape(10, 100), "u": tensor[3:]}, tmp_path / "m.pt")
    inspection = _inspect(tmp_path / "m.pt")
    store = _CountingStore(tmp_path)
    boxes = [(leaf, Box.whole(shape)) for leaf, shape in enumerate([(1000,), (10, 100), (997,)])]
    _read(store, inspection, boxes)
    assert [tile.checksum is not None for tile in store.tiles] == [True, False, False]
    data = bytearray((tmp_path / "m.pt").read_bytes())
    data[data.index(np.float32(500).tobytes())] ^= 1
    (tmp_path / "m.pt").write_bytes(data)
    with pytest.raises(ChecksumError):
        _read(store, inspection, boxes[:1])
    with pytest.raises(ChecksumError) as caught:
        _load(tmp_path / "m.pt")
    assert caught.value.key == "m.pt"


@_FORMATS
def test_transposed_arrays_are_read_in_slabs(zipped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storages, "_SLAB_BYTES", 4096)
    base = torch.arange(60_000).reshape(20, 30, 100)
    state = {
        "a": base.permute(2, 0, 1),
        "b": base.permute(1, 2, 0)[::3, 5:, ::2],
        "c": torch.arange(3000).as_strided((50, 50), (20, 30)),
        "d": torch.arange(4000)[:, None].expand(4000, 2),
        "e": base.permute(2, 1, 0).to(torch.complex64).permute(2, 1, 0),
    }
    _save(state, tmp_path / "m.pt", zipped)
    store = _CountingStore(tmp_path)
    _assert_same(_load(tmp_path / "m.pt"), state)
    _read(store, _inspect(tmp_path / "m.pt"), [(0, Box.whole((100, 20, 30)))])
    assert store.got <= 8 * 60_000


def _rezipped(path: Path, compression: int, changed: Mapping[str, bytes]) -> None:
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, changed.get(name.partition("/")[2], data))


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_files_that_were_zipped_again(compression: int, tmp_path: Path) -> None:
    state = _tensors()
    _save(state, tmp_path / "m.pt")
    _rezipped(tmp_path / "m.pt", compression, {})
    _assert_same(_load(tmp_path / "m.pt"), state)


def test_big_endian_files_load(tmp_path: Path) -> None:
    state = _tensors()
    _save(state, tmp_path / "m.pt")
    swapped: dict[str, bytes] = {"byteorder": b"big"}
    inspection = _inspect(tmp_path / "m.pt")
    data = (tmp_path / "m.pt").read_bytes()
    members = torch_members(read_zip(lambda start, stop: data[start:stop], 0, len(data), key="m.pt"))
    names = {member.start: name for name, member in members.items()}
    state_json: Any = inspection.state
    for leaf, storage, _, _ in state_json["arrays"]:
        record = inspection.tree.leaves[leaf]
        assert isinstance(record, ArrayRecord)
        width = record.spec.numpy_dtype.itemsize // (2 if record.spec.dtype.startswith("complex") else 1)
        start, nbytes = state_json["storages"][storage][1:3]
        swapped[names[start]] = np.frombuffer(data[start : start + nbytes], f"u{width}").byteswap().tobytes()
    _rezipped(tmp_path / "m.pt", zipfile.ZIP_STORED, swapped)
    _assert_same(_load(tmp_path / "m.pt"), state)
    assert torch.load(tmp_path / "m.pt")["scalar"] == 2.5


class _Runs:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


@_FORMATS
def test_nothing_in_a_file_runs(zipped: bool, tmp_path: Path) -> None:
    sentinel = tmp_path / "ran"
    _save({"w": torch.ones(2), "x": _Runs(sentinel)}, tmp_path / "m.pt", zipped)
    loaded = _load(tmp_path / "m.pt")
    assert loaded["x"] == {"__arguments__": (f"touch {sentinel}",)}
    _assert_same(loaded["w"], torch.ones(2))
    assert not sentinel.exists()
    torch.load(tmp_path / "m.pt", weights_only=False)
    assert sentinel.exists(), "the file does not do what this test is about"


def test_whole_modules_load_as_their_attributes(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 3)
    _save(model, tmp_path / "m.pt")
    _assert_same(_load(tmp_path / "m.pt")["_parameters"]["weight"], model.weight)


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="PyTorch before 2.8 has no float4")
def test_dtypes_that_numpy_lacks_load_as_bytes(tmp_path: Path) -> None:
    raw = torch.arange(6, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    _save({"w": raw}, tmp_path / "m.pt")
    record = _inspect(tmp_path / "m.pt").tree.leaves[0]
    assert isinstance(record, ArrayRecord) and (record.kind, record.spec.dtype) == ("torch.float4_e2m1fn_x2", "uint8")
    assert _load(tmp_path / "m.pt")["w"].tobytes() == bytes(range(6))


def test_writing_is_refused() -> None:
    tree = TreeMetadata(LEAF, (ArrayRecord(ArraySpec((1,), "float32")),))
    with pytest.raises(UnsupportedLeafError, match="reads files"):
        TorchLayout().check(tree, 1)


def test_views_of_absurd_sizes_are_refused_in_little_memory(tmp_path: Path) -> None:
    _save({"w": torch.ones(1).expand(1 << 20, 1 << 15)}, tmp_path / "m.pt")
    tracemalloc.start()
    try:
        inspection = _inspect(tmp_path / "m.pt")
        assert inspection is not None
        assert "expand" in str(inspection.tree.leaves[0])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_truncated_legacy_file_is_refused(tmp_path: Path) -> None:
    _save({"w": torch.arange(100.0), "v": torch.ones(3)}, tmp_path / "m.pt", zipped=False)
    data = (tmp_path / "m.pt").read_bytes()
    for length in (len(data) - 1, len(data) - 300, 400, 100, 40):
        (tmp_path / "m.pt").write_bytes(data[:length])
        with pytest.raises(CorruptCheckpointError):
            _inspect(tmp_path / "m.pt")
    (tmp_path / "m.pt").write_bytes(data + b"more")
    assert _load(tmp_path / "m.pt")["w"][99] == 99


def test_a_legacy_file_with_a_long_pickle(tmp_path: Path) -> None:
    state: dict[str, Any] = {f"a long name of a parameter {number}": number for number in range(20_000)}
    state["w"] = torch.arange(5)
    _save(state, tmp_path / "m.pt", zipped=False)
    assert (tmp_path / "m.pt").stat().st_size > 1 << 19
    _assert_same(_load(tmp_path / "m.pt"), state)


@_FORMATS
@pytest.mark.parametrize("seed", range(3))
def test_random_damage_raises_an_error_or_changes_numbers(zipped: bool, seed: int, tmp_path: Path) -> None:
    _save(
        {"w": torch.arange(20.0).reshape(4, 5).T, "o": {"s": [1, "x", (2.5,)]}, "b": torch.ones(3)},
        tmp_path / "m.pt",
        zipped,
    )
    good = (tmp_path / "m.pt").read_bytes()
    chance = random.Random(seed)
    for _ in range(120):
        data = bytearray(good)
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        (tmp_path / "m.pt").write_bytes(data)
        store = DirectoryReadStore(tmp_path)
        try:
            inspection = TorchLayout().inspect(store, "m.pt")
            if inspection is None:
                continue
            for leaf, record in enumerate(inspection.tree.leaves):
                if isinstance(record, ArrayRecord):
                    _read(store, inspection, [(inspection.tree.aliases.get(leaf, leaf), Box.whole(record.spec.shape))])
            _extents(inspection.tree, inspection.state)
        except CheckpointError:
            continue


_NONSENSE: list[Any] = [None, -1, 1 << 70, True, "x", 1.5, [], {}]


def test_hostile_states(tmp_path: Path) -> None:
    _save({"w": torch.arange(20.0).reshape(4, 5), "t": torch.arange(20.0).reshape(4, 5).T}, tmp_path / "m.pt")
    inspection = _inspect(tmp_path / "m.pt")
    store = DirectoryReadStore(tmp_path)
    boxes = [(0, Box.whole((4, 5))), (1, Box.whole((5, 4)))]
    text = json.dumps(inspection.state)
    places: list[tuple[Any, ...]] = [("files",), ("storages",), ("arrays",), ("files", 0)]
    places += [("storages", 0, column) for column in range(8)] + [
        ("arrays", row, column) for row in (0, 1) for column in range(4)
    ]
    for place in places:
        for nonsense in _NONSENSE:
            state = json.loads(text)
            inner = state
            for step in place[:-1]:
                inner = inner[step]
            inner[place[-1]] = nonsense
            hostile = Inspection(inspection.tree, state, "")
            try:
                _read(store, hostile, boxes)
                _extents(inspection.tree, state)
            except CheckpointError:
                continue
    for state in _NONSENSE:
        with pytest.raises(CorruptCheckpointError):
            _read(store, Inspection(inspection.tree, state, ""), boxes)


def test_an_impossible_stated_size_allocates_no_memory(tmp_path: Path) -> None:
    """A hostile root can state that a compressed storage expands to 1 TiB."""
    _save({"w": torch.zeros(1 << 16)}, tmp_path / "m.pt")
    inspection = _inspect(tmp_path / "m.pt")
    extent = 1 << 38
    tree = replace(inspection.tree, leaves=(ArrayRecord(ArraySpec((extent,), "float32")),))
    state: Any = json.loads(json.dumps(inspection.state))
    for compression, error in ((8, CorruptCheckpointError), (99, CorruptCheckpointError), (0, UnsupportedLeafError)):
        storage = state["storages"][0]
        storage[3], storage[6] = storage[2] if compression == 0 else extent * 4, compression
        state["arrays"][0][3] = [0] if compression == 0 else None
        with pytest.raises(error):
            _extents(tree, state)


def test_a_deflated_pickle_that_expands_a_thousand_times_is_refused(tmp_path: Path) -> None:
    """Without the limit, 4 kB of deflated data became 4 MB of pickle and millions of objects."""
    torch.save({}, tmp_path / "empty.pt")
    assert _load(tmp_path / "empty.pt") == {}  # imports the modules that a load needs
    for name, opcode in (("sets", b"\x8f"), ("dicts", b"}"), ("numbers", b"K\0")):
        path = tmp_path / f"{name}.pt"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
            file.writestr("archive/data.pkl", b"\x80\x02(" + opcode * 4_000_000 + b"l.")
            file.writestr("archive/version", b"3\n")
        assert path.stat().st_size < 10_000
        tracemalloc.start()
        try:
            with pytest.raises(CorruptCheckpointError, match=r"data\.pkl"):
                _load(path)
            assert not ckptcore.verify(path).ok
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 2 << 20


def test_a_file_that_was_zipped_again_with_compression(tmp_path: Path) -> None:
    """Software other than torch wrote the file. Its pickle expands about five times."""
    state = {f"layers.{number}.weight": torch.full((3,), number) for number in range(500)}
    _save({"model": state, "rates": [0.125] * 100}, tmp_path / "stored.pt")
    with (
        zipfile.ZipFile(tmp_path / "stored.pt") as stored,
        zipfile.ZipFile(tmp_path / "deflated.pt", "w", zipfile.ZIP_DEFLATED) as deflated,
    ):
        for name in stored.namelist():
            deflated.writestr(name, stored.read(name))
    loaded = _load(tmp_path / "deflated.pt")
    assert loaded["model"]["layers.400.weight"].tolist() == [400] * 3
    assert loaded["rates"] == [0.125] * 100
