"""The safetensors library and its replacement load each other's files bit for bit. Damaged files are refused."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.flax
import safetensors.numpy
import safetensors.torch
import torch
from ckptcore_integrations import safetensors as ours
from ckptcore_integrations.safetensors import flax as our_flax
from ckptcore_integrations.safetensors import numpy as our_numpy
from ckptcore_integrations.safetensors import torch as our_torch
from ckptcore_integrations.safetensors.reading import checked_index
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError

import ckptcore
from ckptcore.plain_safetensors import DTYPES

BACKENDS = ["mmap", "pread"]
NOT_IN_JAX = {"int64", "uint64", "float64"}  # JAX needs ``jax_enable_x64`` for these dtypes


def tensors() -> dict[str, torch.Tensor]:
    """Return a tensor of each dtype, with random bits."""
    made = {}
    for name in DTYPES:
        dtype: torch.dtype = getattr(torch, name)
        bits = torch.randint(0, 2 if name == "bool" else 256, (12 * dtype.itemsize,), dtype=torch.uint8)
        made[f"layer.{name}"] = bits.view(dtype).reshape(3, 4)
    pairs = torch.randint(0, 256, (2, 6), dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    return {**made, "pairs": pairs, "empty": torch.zeros(0, 3), "scalar": torch.tensor(1.5)}


def arrays() -> dict[str, np.ndarray[Any, Any]]:
    """Return an array of each dtype of `tensors`, except dtypes that only PyTorch has."""
    made = {}
    for name, tensor in tensors().items():
        if name != "pairs":
            dtype = np.dtype(getattr(ml_dtypes, name[6:], None) or str(tensor.dtype)[6:])
            made[name] = tensor.reshape(-1).view(torch.uint8).numpy().view(dtype).reshape(tuple(tensor.shape))
    return made


def bits(value: Any) -> tuple[str, tuple[int, ...], bytes]:
    """Return the dtype, shape and bytes of a tensor or array."""
    if isinstance(value, torch.Tensor):
        data = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
        return str(value.dtype)[6:], tuple(value.shape), data
    array = np.asarray(value)
    return array.dtype.name, array.shape, array.tobytes()


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return {name: bits(value) for name, value in first.items()} == {name: bits(value) for name, value in second.items()}


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {}], ids=str)
def test_files_of_torch_equal_those_of_the_library(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    state = tensors()
    safetensors.torch.save_file(state, tmp_path / "theirs", metadata)
    our_torch.save_file(state, tmp_path / "ours", metadata)
    written = (tmp_path / "ours").read_bytes()
    if metadata != {}:  # with empty metadata, the library writes no comma
        assert written == (tmp_path / "theirs").read_bytes()
        assert our_torch.save(state, metadata) == safetensors.torch.save(state, metadata) == written
    assert same(safetensors.torch.load_file(tmp_path / "ours"), state)


@pytest.mark.parametrize("backend", BACKENDS)
def test_torch_loads_files_of_the_library(tmp_path: Path, backend: Any) -> None:
    state = tensors()
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(state, path)
    loaded = our_torch.load_file(path, backend=backend)
    assert list(loaded) == list(safetensors.torch.load_file(path))
    assert same(loaded, state)
    assert same(our_torch.load(path.read_bytes()), state)
    for tensor in loaded.values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes  # each tensor has its own memory


def test_files_of_numpy_equal_those_of_the_library(tmp_path: Path) -> None:
    state = arrays()
    safetensors.numpy.save_file(state, tmp_path / "theirs", {"a": "\n"})
    our_numpy.save_file(state, tmp_path / "ours", {"a": "\n"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert our_numpy.save(state) == safetensors.numpy.save(state)


@pytest.mark.parametrize("backend", BACKENDS)
def test_numpy_loads_files_of_the_library(tmp_path: Path, backend: Any) -> None:
    state = arrays()
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(state, path)
    loaded = our_numpy.load_file(path, backend=backend)
    assert same(loaded, state)
    assert same(our_numpy.load(path.read_bytes()), state)
    assert all(array.flags.writeable for array in loaded.values())


def test_flax_saves_and_loads_like_the_library(tmp_path: Path) -> None:
    state = {name: jnp.asarray(array) for name, array in arrays().items() if name[6:] not in NOT_IN_JAX}
    before = dict(state)
    safetensors.flax.save_file(dict(state), tmp_path / "theirs")
    our_flax.save_file(state, tmp_path / "ours")
    assert all(state[name] is array for name, array in before.items())
    data = (tmp_path / "ours").read_bytes()
    assert data == (tmp_path / "theirs").read_bytes() == our_flax.save(state)
    for loaded in (our_flax.load_file(tmp_path / "ours"), our_flax.load(data)):
        assert same(loaded, state)
    with ours.safe_open(tmp_path / "ours", "flax") as file:
        assert same({"x": file.get_slice("layer.float32")[1:, 2]}, {"x": state["layer.float32"][1:, 2]})


def test_an_open_file_describes_the_same_tensors(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(tensors(), path, {"format": "pt"})
    with ours.safe_open(path, "pt") as mine, safetensors.safe_open(path, "pt") as theirs:
        assert mine.keys() == theirs.keys()
        assert [name for name in mine.offset_keys() if name != "empty"] == [
            name for name in theirs.offset_keys() if name != "empty"
        ]
        assert mine.metadata() == theirs.metadata() == {"format": "pt"}
        for name in theirs.offset_keys():
            assert mine.get_slice(name).get_shape() == theirs.get_slice(name).get_shape()
            assert mine.get_slice(name).get_dtype() == theirs.get_slice(name).get_dtype()
            assert bits(mine.get_tensor(name)) == bits(theirs.get_tensor(name))


@pytest.mark.parametrize("backend", BACKENDS)
def test_slices_and_tensors_remain_valid_after_their_file_is_closed(tmp_path: Path, backend: Any) -> None:
    path = tmp_path / "model.safetensors"
    our_numpy.save_file({"x": np.arange(6.0)}, path)
    for framework in ("np", "pt"):
        with ours.safe_open(path, framework, backend=backend) as file:
            part, whole = file.get_slice("x"), file.get_tensor("x")
        for call in (file.keys, file.offset_keys, file.metadata, file.get_tensors):
            with pytest.raises(SafetensorError, match="File is closed"):
                call()
        del file
        gc.collect()
        assert list(part[2:4]) == [2, 3]
        assert list(whole) == list(range(6))


INDEXES: list[Any] = [
    (), slice(None), slice(2), slice(1, None), 0, -1, (0, 1), (-1, -5), (slice(1, 9, 3), 2), (Ellipsis, 1),
    (1, Ellipsis), Ellipsis, [], [0, 1], (0, 0, 0), 10, -11, slice(11), slice(10, 10), slice(0, 0),
    slice(5, 2), (slice(0), 4),
    slice(None, None, -1), slice(-2, None), None, 1.5, (Ellipsis, Ellipsis), np.int64(3), True, slice(0, 10, 0),
    (slice(2, None), 20), (slice(None), slice(20)), (20, 20), (Ellipsis, 1, 1), (1, 1, Ellipsis),
]  # fmt: skip


@pytest.mark.parametrize("index", INDEXES, ids=str)
@pytest.mark.parametrize("opening", [("np", "mmap"), ("np", "pread"), ("pt", "pread")], ids="-".join)
def test_slices_equal_those_of_the_library(tmp_path: Path, index: Any, opening: tuple[str, Any]) -> None:
    framework, backend = opening
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"x": np.arange(50.0).reshape(10, 5)}, path)
    outcomes: list[Any] = []
    for module in (safetensors, ours):
        part = module.safe_open(path, framework, backend=backend).get_slice("x")
        try:
            outcomes.append(bits(part[index]))
        except Exception as error:  # noqa: BLE001  # the errors of both are compared
            outcomes.append((type(error), str(error)))
    theirs, mine = outcomes
    if theirs[0] is SystemError:  # the library tries to allocate a negative number of bytes
        assert mine[0] is SafetensorError
    elif theirs[0] is OverflowError:
        assert mine[0] is OverflowError
    else:
        assert mine == theirs


def test_a_slice_accepts_every_index_of_torch(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensor = torch.arange(50.0).reshape(10, 5)
    our_torch.save_file({"x": tensor}, path)
    part = ours.safe_open(path, "pt").get_slice("x")
    for index in ([0, 2], slice(-3, None), None, (Ellipsis, -1), tensor > 7):
        assert torch.equal(part[index], tensor[index])


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=3).flatmap(
        lambda shape: st.tuples(
            st.just(shape),
            st.lists(st.slices(6) | st.integers(-6, 6) | st.just(...), max_size=4).map(tuple),
        )
    )
)
def test_an_accepted_index_has_the_meaning_of_numpy(drawn: tuple[list[int], tuple[Any, ...]]) -> None:
    shape, index = drawn
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    try:
        checked = checked_index(index, shape)
    except (SafetensorError, OverflowError):
        return
    np.testing.assert_array_equal(array[checked], array[index])


@pytest.mark.parametrize(
    "arguments",
    [("x", "zz"), ("x", "np", "cuda"), ("x", "pt", "zz"), ("x", "pt", "mps:1"), ("x", "pt", -1), ("x", "tf"),
     ("missing", "np"), (b"x", "np"), ("x", None)],
    ids=str,
)  # fmt: skip
def test_invalid_arguments_raise_the_errors_of_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[Any, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    our_numpy.save_file({"a": np.zeros(2)}, "x")
    kinds = []
    for module in (safetensors, ours):
        with pytest.raises(Exception) as caught:  # the types are compared
            module.safe_open(*arguments).get_tensors()
        kinds.append(caught.type)
    assert kinds[0] is kinds[1] or arguments[1] == "tf"
    with pytest.raises(SafetensorError, match="backend"):
        ours.safe_open("x", "np", backend="zz")  # type: ignore[arg-type]
    with pytest.raises(SafetensorError, match="does not contain tensor b"):
        ours.safe_open("x", "np").get_tensor("b")


def test_an_accelerator_gets_pinned_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    our_numpy.save_file({"a": np.arange(3.0)}, tmp_path / "x")
    calls: list[Any] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: calls.append("pin") or tensor)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device: calls.append(device) or tensor)
    our_torch.load_file(tmp_path / "x", device="cuda")
    our_torch.load_file(tmp_path / "x", device="xpu:1")
    our_torch.load_file(tmp_path / "x", device=2)
    assert calls == ["pin", "cuda:0", "xpu:1", 2]


UNSAVED: dict[str, Callable[[], object]] = {
    "dtype": lambda: our_numpy.save({"x": np.zeros(2, np.complex128)}),
    "torch dtype": lambda: our_torch.save({"x": torch.zeros(2, dtype=torch.complex128)}),
    "reserved": lambda: our_numpy.save({"__metadata__": np.zeros(2)}),
    "directory": lambda: our_numpy.save_file({"x": np.zeros(2)}, "missing/x"),
    "agreement": lambda: ours.serialize({"x": ours.TensorSpec(dtype="int8", shape=[3], data_ptr=1, data_len=2)}),
}


@pytest.mark.parametrize("save", UNSAVED.values(), ids=UNSAVED)
def test_unsupported_values_are_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Callable[[], object]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SafetensorError):
        save()
    assert os.listdir(tmp_path) == []


def test_arguments_of_wrong_types_are_refused() -> None:
    with pytest.raises(TypeError):
        our_numpy.save({"x": np.zeros(2)}, {"a": 1})  # type: ignore[dict-item]
    with pytest.raises(TypeError):
        our_numpy.save({1: np.zeros(2)})  # type: ignore[dict-item]
    with pytest.raises(TypeError):
        ours.serialize({"x": {"dtype": "int8"}})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="contiguous"):
        our_torch.save({"x": torch.zeros(2, 3).T})
    with pytest.raises(RuntimeError, match="share memory"):
        shared = torch.zeros(4)
        our_torch.save({"x": shared, "y": shared[:2]})
    with pytest.raises(RuntimeError, match="meta"):
        our_torch.save({"x": torch.zeros(2, device="meta")})


def test_values_are_saved_in_any_memory_layout() -> None:
    turned = np.arange(6.0).reshape(2, 3).T
    loaded = safetensors.numpy.load(our_numpy.save({"turned": turned, "big": turned.astype(">i4")}))
    np.testing.assert_array_equal(loaded["turned"], turned)
    np.testing.assert_array_equal(loaded["big"], turned)
    assert safetensors.torch.load(our_torch.save({"x": torch.zeros(4, 5)[:0, 1]}))["x"].shape == (0,)
    conjugate = torch.tensor([1 + 2j], dtype=torch.complex64).conj()
    assert safetensors.torch.load(our_torch.save({"x": conjugate}))["x"].tolist() == [1 - 2j]


DAMAGED: dict[str, Callable[[bytes], bytes]] = {
    "cut off": lambda data: data[:-1],
    "longer": lambda data: data + b"\0",
    "empty": lambda data: b"",
    "length": lambda data: b"\xff" * 8 + data[8:],
    "offsets": lambda data: data.replace(b"[0,8]", b"[8,0]"),
    "dtype": lambda data: data.replace(b'"F64"', b'"F00"'),
    "shape": lambda data: data.replace(b"[1]", b"[2]"),
    "json": lambda data: data.replace(b"{", b"[", 1),
}


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
def test_damaged_files_are_refused(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "x"
    path.write_bytes(damage(safetensors.numpy.save({"a": np.zeros(1)})))
    for module in (safetensors, ours):
        for backend in BACKENDS:
            with pytest.raises((SafetensorError, OSError)):
                module.safe_open(path, "pt", backend=backend)
    for load in (our_torch.load, our_numpy.load, our_flax.load, ours.deserialize):
        with pytest.raises(SafetensorError):
            load(path.read_bytes())


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(SafetensorError, match="regular"):
            ours.safe_open(path, "np")


def test_dtypes_that_a_framework_does_not_support_are_refused(tmp_path: Path) -> None:
    header = json.dumps({"x": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}).encode()
    path = tmp_path / "x"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(3))
    for framework in ("np", "pt"):
        with ours.safe_open(path, framework) as file:
            part = file.get_slice("x")
            assert (part.get_dtype(), part.get_shape()) == ("F6_E2M3", [4])
            with pytest.raises(SafetensorError, match="F6_E2M3"):
                file.get_tensor("x")
            with pytest.raises(SafetensorError, match="F6_E2M3"):
                _ = part[:2]
    header = json.dumps({"x": {"dtype": "F4", "shape": [2, 3], "data_offsets": [0, 3]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(3))
    with pytest.raises(SafetensorError, match="divisible by 2"):
        ours.safe_open(path, "pt").get_tensor("x")


def test_a_file_that_shrinks_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x"
    our_numpy.save_file({"a": np.zeros(1 << 12)}, path)
    with ours.safe_open(path, "np", backend="pread") as file:
        os.truncate(path, 1 << 12)
        for call in (partial(file.get_tensor, "a"), file.get_tensors):
            with pytest.raises(SafetensorError, match="cut off"):
                call()


def test_many_and_large_arrays_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {str(number): np.full(number % 7, number, np.int16) for number in range(2500)}
    our_numpy.save_file(state, tmp_path / "x")
    assert same(our_numpy.load_file(tmp_path / "x"), state)
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, buffers, start: preadv(file, [buffers[0][:5]], start))
    assert same(our_numpy.load_file(tmp_path / "x"), state)


class Tied(torch.nn.Module):
    """A model that has one layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(3, 3)
        self.b = self.a


@pytest.mark.parametrize("metadata", [None, {"a.bias": "mine", "format": "pt"}], ids=["none", "own"])
def test_models_are_saved_and_loaded_like_by_the_library(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    model = Tied()
    given = None if metadata is None else dict(metadata)
    our_torch.save_model(model, tmp_path / "ours", metadata)
    assert metadata == given
    safetensors.torch.save_model(model, tmp_path / "theirs", given)
    with (
        safetensors.safe_open(tmp_path / "ours", "pt") as mine,
        safetensors.safe_open(tmp_path / "theirs", "pt") as own,
    ):
        assert mine.metadata() == own.metadata()
        assert mine.keys() == own.keys()
    for load in (our_torch.load_model, safetensors.torch.load_model):
        for name in ("ours", "theirs"):
            loaded = Tied()
            assert load(loaded, tmp_path / name) == (set(), [])
            assert torch.equal(loaded.b.weight, model.a.weight)


def test_names_that_differ_from_those_of_the_model_are_listed(tmp_path: Path) -> None:
    our_torch.save_file({"weight": torch.zeros(3, 3), "other": torch.zeros(1)}, tmp_path / "x")
    with pytest.raises(RuntimeError) as mine:
        our_torch.load_model(torch.nn.Linear(3, 3), tmp_path / "x")
    with pytest.raises(RuntimeError) as theirs:
        safetensors.torch.load_model(torch.nn.Linear(3, 3), tmp_path / "x")
    assert str(mine.value) == str(theirs.value)
    assert our_torch.load_model(torch.nn.Linear(3, 3), tmp_path / "x", strict=False) == ({"bias"}, ["other"])


def test_data_at_memory_addresses_is_saved_like_by_the_library(tmp_path: Path) -> None:
    array = np.arange(6, dtype=np.int16)
    specs = {
        "x": ours.TensorSpec(dtype="int16", shape=[2, 3], data_ptr=array.ctypes.data, data_len=array.nbytes),
        "empty": ours.TensorSpec(dtype="float32", shape=[0], data_ptr=0, data_len=0),
    }
    data = ours.serialize(specs, {"a": "b"})
    assert data == safetensors.serialize(specs, {"a": "b"})
    ours.serialize_file(specs, tmp_path / "x", {"a": "b"})
    assert (tmp_path / "x").read_bytes() == data
    assert sorted(ours.deserialize(data), key=lambda item: item[0]) == sorted(
        safetensors.deserialize(data), key=lambda item: item[0]
    )


def test_other_names_equal_those_of_the_library() -> None:
    assert ours.SafetensorError is safetensors.SafetensorError
    assert vars(ours)["__version__"] == safetensors.__version__
    for name in ("storage_ptr", "storage_size", "_find_shared_tensors", "_is_complete"):
        assert getattr(our_torch, name) is getattr(safetensors.torch, name)
    for module in (our_torch, our_numpy, our_flax):  # the package of the library also has modules with these names
        assert module.load.__module__ == module.__name__


def test_a_file_object_is_opened_by_its_name(tmp_path: Path) -> None:
    our_numpy.save_file({"a": np.arange(3)}, tmp_path / "x")
    with open(tmp_path / "x", "rb") as file, vars(ours)["_safe_open_handle"](file, "np") as reader:
        assert reader.get_tensor("a").tolist() == [0, 1, 2]


def test_loaded_tensors_keep_no_file_open(tmp_path: Path) -> None:
    our_torch.save_file({"a": torch.zeros(1000)}, tmp_path / "x")
    descriptors = len(os.listdir("/proc/self/fd"))
    loaded = [our_torch.load_file(tmp_path / "x") for _ in range(10)]
    assert len(os.listdir("/proc/self/fd")) == descriptors
    loaded[0]["a"][0] = 1  # changes a private mapping
    assert loaded[1]["a"][0] == 0
    our_torch.save_file({"a": torch.ones(1000)}, tmp_path / "x")
    assert loaded[1]["a"][5] == 0  # the mapping still shows the old file


def test_threads_read_one_file(tmp_path: Path) -> None:
    state = {str(number): np.full(1000, number) for number in range(50)}
    our_numpy.save_file(state, tmp_path / "x")
    equal: list[bool] = []
    with ours.safe_open(tmp_path / "x", "np") as file:
        threads = [threading.Thread(target=lambda: equal.append(same(file.get_tensors(), state))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert equal == [True] * 4


def test_a_context_without_durability_syncs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, synced.append)
    our_torch.save_file({"a": torch.zeros(2)}, tmp_path / "x", context=ckptcore.Context(durability="none"))
    assert synced == []
    our_torch.save_file({"a": torch.zeros(2)}, tmp_path / "x")
    assert len(synced) == 2  # the file and its name


@pytest.mark.system
def test_a_kill_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    our_torch.save_file({"a": torch.zeros(1 << 20)}, path)
    program = (
        "import os, signal, sys, torch\n"
        "from ckptcore_integrations.safetensors.torch import save_file\n"
        "write, calls = os.writev, []\n"
        "def kill(descriptor, group):\n"
        "    calls.append(group)\n"
        "    return write(descriptor, group) if len(calls) == 1 else os.kill(os.getpid(), signal.SIGKILL)\n"
        "os.writev = kill\n"
        "save_file({'a': torch.ones(4 << 20)}, sys.argv[1])\n"
    )
    killed = subprocess.run([sys.executable, "-c", program, str(path)], check=False)
    assert killed.returncode == -9
    assert not safetensors.torch.load_file(path)["a"].any()
