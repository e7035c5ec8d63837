"""The replacement for torch.distributed.checkpoint in one process, compared with the original."""

from __future__ import annotations

import functools
import inspect
import io
import os
import pickle
import threading
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import ckptcore_integrations.torch_dcp as dcp
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as original
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

import ckptcore
from ckptcore.builtin.local import open_local
from ckptcore.commit.location import resolve_location
from ckptcore.context import PluginOptions, default_context
from ckptcore.errors import CheckpointNotFoundError
from ckptcore.hookspecs import hookimpl
from ckptcore.protocols import StorageOpener
from ckptcore.runtime import runtime_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable):UserWarning"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint:UserWarning"),
]


def nested_state() -> dict[str, Any]:
    """Return a state with arrays of many dtypes, lists, and values that only a pickle can store."""
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    blob = io.BytesIO(b"blob")
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": 7,
        "text": "x",
        "large": 2**70,
        "bytes": b"abc",
        "lists": [1, [2.5, None], ()],
        "empty": [],
        "mixed": [torch.ones(2), {"a": 1}],
        "tuple": (1, (torch.ones(2), {"b": 2})),
        "array": np.arange(4.0),
        "set": {1, 2},
        "size": torch.Size([1, 2]),
        "dtype": torch.bfloat16,
        "blob": blob,
        "bfloat16": torch.arange(6.0).bfloat16().reshape(2, 3),
        "float8": torch.ones(3).to(torch.float8_e4m3fn),
        "complex": torch.ones(2, dtype=torch.complex64),
        "strided": torch.arange(6.0).reshape(2, 3).t(),
        "scalar": torch.tensor(3),
        "nothing": torch.empty(0, 3),
    }


def blank(value: Any) -> Any:
    """Return a target of the same structure with other elements."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return type(value)((key, blank(inner)) for key, inner in value.items())
    if isinstance(value, list):
        return [blank(inner) for inner in value]
    return None


def assert_same(loaded: Any, expected: Any) -> None:
    """Compare types, dtypes and bits."""
    assert type(loaded) is type(expected), (loaded, expected)
    if isinstance(expected, torch.Tensor):
        assert (loaded.dtype, loaded.shape) == (expected.dtype, expected.shape)
        assert _bits(loaded) == _bits(expected)
    elif isinstance(expected, dict):
        assert list(loaded) == list(expected)
        for key in expected:
            assert_same(loaded[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(loaded) == len(expected)
        for left, other in zip(loaded, expected, strict=True):
            assert_same(left, other)
    elif isinstance(expected, np.ndarray):
        assert np.array_equal(loaded, expected)
    elif isinstance(expected, io.BytesIO):
        assert loaded.getvalue() == expected.getvalue()
    else:
        assert loaded == expected


def _bits(tensor: torch.Tensor) -> bytes:
    whole = tensor.resolve_conj().contiguous().reshape(-1)
    return whole.view(torch.uint8).numpy().tobytes() if whole.numel() else b""


@pytest.mark.parametrize("saver", [dcp, original])
@pytest.mark.parametrize("loader", [dcp, original])
def test_each_library_loads_checkpoints_of_the_other(tmp_path: Path, saver: Any, loader: Any) -> None:
    if saver is loader is original:
        pytest.skip("tests only PyTorch")
    state = nested_state()
    saver.save(state, checkpoint_id=tmp_path / "saved")
    target = blank(state)
    loader.load(target, checkpoint_id=tmp_path / "saved")
    assert_same(target, state)


def test_the_metadata_equals_that_of_the_original(tmp_path: Path) -> None:
    state = nested_state()
    returned = dcp.save(state, checkpoint_id=tmp_path / "ours")
    original.save(state, checkpoint_id=tmp_path / "theirs")
    ours = original.FileSystemReader(tmp_path / "ours").read_metadata()
    theirs = original.FileSystemReader(tmp_path / "theirs").read_metadata()
    assert ours.planner_data == theirs.planner_data == returned.planner_data
    assert ours.version == theirs.version == returned.version
    assert ours.state_dict_metadata.keys() == theirs.state_dict_metadata.keys() == returned.state_dict_metadata.keys()
    for name, expected in theirs.state_dict_metadata.items():
        tensor_metadata = ours.state_dict_metadata[name]
        assert type(tensor_metadata) is type(expected)
        if isinstance(expected, original.TensorStorageMetadata):
            assert tensor_metadata.properties.dtype == expected.properties.dtype
            assert (tensor_metadata.size, tensor_metadata.chunks) == (expected.size, expected.chunks) or not all(
                expected.size
            )
    assert ours.storage_meta.checkpoint_id == str(tmp_path / "ours")
    assert returned.storage_meta is not None
    assert ours.storage_meta.save_id == returned.storage_meta.save_id
    for name, expected_ids in (("ours", ours.storage_meta), ("theirs", theirs.storage_meta)):
        read = dcp.Reader(tmp_path / name).read_metadata()
        assert read.planner_data == theirs.planner_data
        assert read.state_dict_metadata.keys() == theirs.state_dict_metadata.keys()
        assert read.storage_meta is not None
        assert read.storage_meta.save_id == expected_ids.save_id
        assert read.storage_meta.checkpoint_id == os.fspath(expected_ids.checkpoint_id)


def test_ckptcore_loads_the_nested_structure(tmp_path: Path) -> None:
    state = nested_state()
    dcp.save(state, checkpoint_id=tmp_path)
    loaded = ckptcore.load(tmp_path)
    assert loaded["step"] == 7
    assert loaded["lists"] == [1, [2.5, None], ()]
    assert np.array_equal(loaded["mixed"][0], np.ones(2))
    assert loaded["optimizer"]["param_groups"][0]["lr"] == state["optimizer"]["param_groups"][0]["lr"]
    assert ckptcore.verify(tmp_path).ok


def test_the_state_dict_is_updated_as_by_pytorch(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(2), "nested": {"n": 1}}, checkpoint_id=tmp_path)
    sets: list[str] = []

    class Recorded(dict[str, Any]):
        def __setitem__(self, key: str, value: Any) -> None:
            sets.append(key)
            super().__setitem__(key, value)

    weight, inner = torch.zeros(2), {"n": 0}
    state = Recorded(w=weight, nested=inner)
    version = weight._version
    dcp.load(state, checkpoint_id=tmp_path)
    assert state["w"] is weight
    assert torch.equal(weight, torch.ones(2))
    assert weight._version > version
    assert state["nested"] is inner
    assert inner == {"n": 1}
    assert sets == ["nested", "w"]


def test_objects_with_a_state_load_it_themselves(tmp_path: Path) -> None:
    class Counter:
        count = 3

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.count = state["count"]

    dcp.save({"counter": Counter()}, checkpoint_id=tmp_path)
    counter = Counter()
    counter.count = 0
    dcp.load({"counter": counter}, checkpoint_id=tmp_path)
    assert counter.count == 3


def test_targets_that_differ_from_the_stored_tensors(tmp_path: Path) -> None:
    """The targets have other dtypes and strides, share memory, or are parameters that require gradients."""
    saved = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0, 4.0]), "c": torch.ones(2), "d": torch.ones(2)}
    dcp.save(saved, checkpoint_id=tmp_path)
    tied, wide = torch.zeros(2), torch.zeros(2, 2)
    state = {"a": tied, "b": tied, "c": wide[:, 0], "d": torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))}
    dcp.load(state, checkpoint_id=tmp_path)
    assert torch.equal(tied, saved["b"])
    assert torch.equal(wide, torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
    assert torch.equal(state["d"], torch.ones(2, dtype=torch.float64))


def test_tied_tensors_are_stored_once(tmp_path: Path) -> None:
    weight = torch.randn(1 << 16)
    dcp.save({"a": weight, "b": weight}, checkpoint_id=tmp_path)
    assert (tmp_path / "__0_0.distcp").stat().st_size < 1.5 * weight.nbytes
    target = {"a": torch.zeros(1 << 16), "b": torch.zeros(1 << 16)}
    original.load(target, checkpoint_id=tmp_path)
    assert torch.equal(target["a"], weight)
    assert torch.equal(target["b"], weight)


def test_a_planner_decides_the_names(tmp_path: Path) -> None:
    """Without flattening, PyTorch stores each dict as one value, and does not fill the dicts of the caller's state."""
    state = {"model": {"w": torch.ones(2)}, "a.b": torch.ones(3), "step": 1}
    planner = original.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(state, checkpoint_id=tmp_path / "ours", planner=planner)
    original.save(state, checkpoint_id=tmp_path / "theirs", planner=planner)
    for location in (tmp_path / "ours", tmp_path / "theirs"):
        for library in (dcp, original):
            target = {"model": {}, "a.b": torch.zeros(3), "step": 0}
            planner = original.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
            library.load(target, checkpoint_id=location, planner=planner)
            assert_same(target, state)


def test_a_planner_changes_what_is_saved_and_loaded(tmp_path: Path) -> None:
    class Halving(original.DefaultSavePlanner):
        def transform_object(self, write_item: Any, object: Any) -> Any:
            transformed = super().transform_object(write_item, object)
            return transformed / 2 if isinstance(transformed, torch.Tensor) else transformed

    class Renaming(original.DefaultLoadPlanner):
        committed = 0

        def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
            self.committed += 1

    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path, planner=Halving())
    planner = Renaming()
    target = {"w": torch.zeros(2)}
    dcp.load(target, checkpoint_id=tmp_path, planner=planner)
    assert torch.equal(target["w"], torch.full((2,), 0.5))
    assert planner.committed == 1


def test_cached_plans(tmp_path: Path) -> None:
    for number in range(3):
        planner = original.DefaultSavePlanner(enable_plan_caching=True)
        dcp.save({"w": torch.full((2,), float(number))}, checkpoint_id=tmp_path / str(number), planner=planner)
        target = {"w": torch.zeros(2)}
        original.load(target, checkpoint_id=tmp_path / str(number))
        assert torch.equal(target["w"], torch.full((2,), float(number)))


@pytest.mark.parametrize("save", [original.save, dcp.save])
def test_the_original_functions_accept_our_writer_and_reader(tmp_path: Path, save: Callable[..., Any]) -> None:
    state = nested_state()
    save(state, storage_writer=dcp.Writer(tmp_path / "saved"))
    assert ckptcore.metadata(tmp_path / "saved").layout == "dcp"
    target = blank(state)
    original.load(target, storage_reader=dcp.Reader(tmp_path / "saved"))
    assert_same(target, state)
    with pytest.warns(FutureWarning, match="deprecated"):
        dcp.save_state_dict({"w": torch.ones(1)}, dcp.Writer(tmp_path / "old"), no_dist=True)
    with pytest.warns(FutureWarning, match="deprecated"):
        dcp.load_state_dict(old := {"w": torch.zeros(1)}, dcp.Reader(tmp_path / "old"), no_dist=True)
    assert old["w"] == 1


def test_writers_and_readers_of_others_are_used(tmp_path: Path) -> None:
    writer = original.FileSystemWriter(tmp_path / "theirs", single_file_per_rank=False)
    dcp.save({"a": torch.ones(1), "b": torch.ones(1)}, storage_writer=writer)
    assert not (tmp_path / "theirs" / "checkpoint.json").exists()
    assert len(list((tmp_path / "theirs").glob("*.distcp"))) == 2
    target = {"a": torch.zeros(1)}
    dcp.load(target, storage_reader=original.FileSystemReader(tmp_path / "theirs"))
    assert target["a"] == 1
    with pytest.warns(UserWarning, match="order"):
        dcp.save({"a": torch.ones(1)}, original.FileSystemWriter(tmp_path / "positional"))
    assert not (tmp_path / "positional" / "checkpoint.json").exists()


def test_ranks_that_do_not_communicate(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "saved", use_collectives=False)
    assert not (tmp_path / "saved" / "checkpoint.json").exists()
    target = {"w": torch.zeros(2)}
    dcp.load(target, checkpoint_id=tmp_path / "saved")
    assert target["w"].all()
    with pytest.raises(ValueError, match="use_collectives=False: ranks that do not communicate"):
        dcp.save({"w": torch.ones(2)}, storage_writer=dcp.Writer(tmp_path / "x"), use_collectives=False)


def test_overwriting(tmp_path: Path) -> None:
    original.save({"w": torch.zeros(2)}, checkpoint_id=tmp_path)
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path)
    with pytest.raises(original.CheckpointException, match="Checkpoint already exists and self.overwrite=False"):
        original.save({"w": torch.zeros(2)}, storage_writer=dcp.Writer(tmp_path, overwrite=False))
    target = {"w": torch.zeros(2)}
    original.load(target, checkpoint_id=tmp_path)
    assert target["w"].all()


@pytest.mark.parametrize("saver", [original, dcp], ids=["original", "replacement"])
def test_other_files_in_the_directory_stay(tmp_path: Path, saver: Any) -> None:
    (tmp_path / "meta.pt").write_bytes(b"of a trainer")
    for number in (1, 2):
        saver.save({"w": torch.full((2,), float(number))}, checkpoint_id=tmp_path)
        assert (tmp_path / "meta.pt").read_bytes() == b"of a trainer"
        target = {"w": torch.zeros(2)}
        dcp.load(target, checkpoint_id=tmp_path)
        assert target["w"].tolist() == [number, number]
    (data,) = tmp_path.glob("__0_0*.distcp")
    assert {path.name for path in tmp_path.iterdir()} - {"checkpoint.json"} == {".metadata", data.name, "meta.pt"}


def test_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``~`` is expanded for the original writer as well, which would create a directory of this name."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path))
    for number, name in enumerate(("ours", "original")):
        dcp.save({"w": torch.full((2,), number)}, checkpoint_id=f"~/{name}", use_collectives=name == "ours")
        target = {"w": torch.zeros(2, dtype=torch.int64)}
        dcp.load(target, checkpoint_id=f"~/{name}")
        assert target["w"].tolist() == [number] * 2
    started = dcp.async_save({"n": 1}, checkpoint_id="~/later", use_collectives=False)
    assert isinstance(started, Future)
    started.result()
    assert {path.name for path in tmp_path.iterdir()} == {"later", "original", "ours", "work"}
    assert not list((tmp_path / "work").iterdir())


class _Disk:
    """A storage with another scheme for local directories."""

    @hookimpl
    def ckpt_storages(self) -> Mapping[str, StorageOpener]:
        """Open a local directory."""
        return {"disk": lambda url, options: open_local(url.partition("://")[2], options)}


@pytest.mark.parametrize("scheme", ["file", "disk"])
def test_other_files_in_the_directory_of_a_url_stay(tmp_path: Path, scheme: str) -> None:
    (tmp_path / "meta.pt").write_bytes(b"of a trainer")
    context = ckptcore.Context(plugins=PluginOptions(extra=(_Disk(),)))
    for number in (1, 2):
        state = {"w": torch.full((2,), float(number))}
        original.save(state, storage_writer=dcp.Writer(f"{scheme}://{tmp_path}", context=context))
        assert ckptcore.load(tmp_path)["w"].tolist() == [number, number]
    assert (tmp_path / "meta.pt").read_bytes() == b"of a trainer"


@pytest.mark.parametrize("number", [0, 1])
def test_an_object_store_replaces_no_checkpoint_and_no_other_files(number: int) -> None:
    location = f"memory://{uuid.uuid4().hex}/c"
    store = resolve_location(location, runtime_of(default_context()).storages).store
    for _ in range(number):
        original.save({"w": torch.zeros(2)}, storage_writer=dcp.Writer(location))
    store.put("meta.pt", b"of a trainer")
    with pytest.raises(original.CheckpointException, match="meta.pt|cannot replace it atomically"):
        original.save({"w": torch.ones(2)}, storage_writer=dcp.Writer(location))
    assert store.get("meta.pt") == b"of a trainer"
    if number:
        assert not ckptcore.load(location)["w"].any()


def test_a_writer_saves_several_checkpoints(tmp_path: Path) -> None:
    writer = dcp.Writer(tmp_path / "first")
    ids = {
        dcp.save({"n": n}, storage_writer=writer, checkpoint_id=tmp_path / str(n)).storage_meta.save_id for n in (1, 2)
    }
    assert len(ids) == 2
    reader = dcp.Reader(tmp_path / "first")
    for number in (1, 2):
        target = {"n": 0}
        dcp.load(target, storage_reader=reader, checkpoint_id=tmp_path / str(number))
        assert target["n"] == number


def test_an_asynchronous_save_has_the_state_of_its_call(tmp_path: Path) -> None:
    weight = torch.ones(1000)
    future = dcp.async_save({"w": weight, "step": 3}, checkpoint_id=tmp_path)
    assert isinstance(future, Future)
    weight.zero_()
    assert future.result().storage_meta.save_id
    target = {"w": torch.zeros(1000), "step": 0}
    original.load(target, checkpoint_id=tmp_path)
    assert target["w"].all()
    assert target["step"] == 3


def test_an_asynchronous_save_with_its_own_staging(tmp_path: Path) -> None:
    stager = DefaultStager(StagingOptions(use_async_staging=True, use_pinned_memory=False, use_shared_memory=False,
                                          use_non_blocking_copy=False))  # fmt: skip
    response = dcp.async_save({"w": torch.ones(2)}, checkpoint_id=tmp_path, async_stager=stager)
    assert isinstance(response, AsyncSaveResponse)
    response.staging_completion.result()
    response.upload_completion.result()
    stager.close()
    assert ckptcore.load(tmp_path)["w"].all()


def test_the_future_has_the_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a checkpoint", encoding="utf-8")
    future = dcp.async_save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "file")
    assert isinstance(future, Future)
    assert isinstance(error := future.exception(), original.CheckpointException)
    assert "is a file; a checkpoint is a directory" in str(error)


def test_any_layout_is_read(tmp_path: Path) -> None:
    state = {
        "model": {"w": np.arange(6.0).reshape(2, 3)},
        "step": 4,
        "list": [np.ones(2), 5],
        "day": np.array("2026-01-01", "datetime64[D]"),
    }
    ckptcore.save(tmp_path, state)
    target = {"model": {"w": torch.zeros(2, 3)}, "step": 0, "list": [torch.zeros(2), 0], "day": None}
    dcp.load(target, checkpoint_id=tmp_path)
    assert torch.equal(target["model"]["w"], torch.arange(6.0).reshape(2, 3))
    assert (target["step"], target["list"][1], target["day"]) == (4, 5, state["day"])


def test_missing_keys_and_checkpoints(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "saved")
    with pytest.raises(original.CheckpointException, match="Missing key in checkpoint state_dict: other"):
        dcp.load({"other": torch.zeros(2)}, checkpoint_id=tmp_path / "saved")
    with pytest.raises(original.CheckpointException, match="Size mismatch"):
        dcp.load({"w": torch.zeros(3)}, checkpoint_id=tmp_path / "saved")
    with pytest.raises(original.CheckpointException, match="does not exist"):
        dcp.load({"w": torch.zeros(2)}, checkpoint_id=tmp_path / "none")
    with pytest.raises(CheckpointNotFoundError):
        dcp.Reader(tmp_path / "none").read_metadata()
    with pytest.raises(RuntimeError, match="`checkpoint_id` must be specified"):
        dcp.save({})
    planner = original.DefaultLoadPlanner(allow_partial_load=True)
    target = {"w": torch.zeros(2), "other": 1}
    dcp.load(target, checkpoint_id=tmp_path / "saved", planner=planner)
    assert target["w"].all()
    assert target["other"] == 1


def test_an_empty_state(tmp_path: Path) -> None:
    dcp.save({}, checkpoint_id=tmp_path)
    dcp.load({}, checkpoint_id=tmp_path)
    original.load({}, checkpoint_id=tmp_path)


def test_damage_is_an_error(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(1000)}, checkpoint_id=tmp_path)
    path = tmp_path / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(original.CheckpointException, match=r"__0_0.distcp' is damaged"):
        dcp.load({"w": torch.zeros(1000)}, checkpoint_id=tmp_path)


class Danger:
    """An object whose pickle runs code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (os.environ["CKPTCORE_TEST_DANGER"],))


class Known:
    """An object of a class that a program can trust."""

    value = 3


@pytest.mark.parametrize("saver", [dcp, original])
def test_a_load_runs_no_code_of_the_checkpoint(tmp_path: Path, saver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tmp_path / "made"
    monkeypatch.setenv("CKPTCORE_TEST_DANGER", str(made))
    state = {"w": torch.ones(2), "known": Known()}
    saver.save(state, checkpoint_id=tmp_path / "saved")
    original.save({"w": torch.ones(2), "danger": Danger()}, checkpoint_id=tmp_path / "hostile")
    target = {"w": torch.zeros(2)}
    dcp.load(target, checkpoint_id=tmp_path / "hostile")
    assert target["w"].all()
    with pytest.raises(original.CheckpointException, match="add_safe_globals"):
        dcp.load({"danger": None}, checkpoint_id=tmp_path / "hostile")
    assert not made.exists()
    with pytest.raises(original.CheckpointException, match="add_safe_globals"):
        dcp.load({"known": None}, checkpoint_id=tmp_path / "saved")
    with torch.serialization.safe_globals([Known]):
        loaded: dict[str, Any] = {"known": None}
        dcp.load(loaded, checkpoint_id=tmp_path / "saved")
    assert loaded["known"].value == 3


def test_hostile_metadata_is_not_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTCORE_TEST_DANGER", str(tmp_path / "made"))
    (tmp_path / "hostile").mkdir()
    (tmp_path / "hostile" / ".metadata").write_bytes(pickle.dumps(Danger()))
    (tmp_path / "hostile" / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(original.CheckpointException):
        dcp.load({"w": torch.zeros(2)}, checkpoint_id=tmp_path / "hostile")
    assert not (tmp_path / "made").exists()


def test_all_other_names_are_those_of_the_original() -> None:
    for name in dir(original):
        if name.startswith("__") or name in ("save", "load", "async_save"):
            continue
        assert getattr(dcp, name) is getattr(original, name)
        assert name in dir(dcp)
    assert dcp.state_dict.get_state_dict is original.state_dict.get_state_dict
    assert dcp.format_utils.dcp_to_torch_save is dcp_to_torch_save
    assert not hasattr(dcp, "no_such_name")
    for name in ("save", "load", "async_save"):
        parameters = dict(inspect.signature(getattr(dcp, name)).parameters)
        parameters.pop("positional", None)
        expected = inspect.signature(getattr(original, name)).parameters
        assert [(parameter.name, parameter.default) for parameter in parameters.values()] == [
            (parameter.name, parameter.default) for parameter in expected.values()
        ]


def test_saves_of_several_threads(tmp_path: Path) -> None:
    threads = [
        threading.Thread(target=functools.partial(dcp.save, {"n": n}, checkpoint_id=tmp_path / str(n)))
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [ckptcore.load(tmp_path / str(n))["n"] for n in range(4)] == [0, 1, 2, 3]
