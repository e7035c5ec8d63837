"""NumPy arrays and scalars, subclasses of dict, and modules saved before torch 1.6, in files that torch writes."""

from __future__ import annotations

import collections
import random
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckptcore
from ckptcore.errors import CorruptCheckpointError

ARRAYS: dict[str, Any] = {
    "C order": np.arange(6.0).reshape(2, 3),
    "Fortran order": np.arange(6.0).reshape(2, 3).T,
    "transposed": np.arange(24.0).reshape(2, 3, 4).transpose(1, 0, 2),
    "every byte": np.arange(256, dtype=np.uint8),
    "bfloat16": np.arange(3).astype(ml_dtypes.bfloat16),
    "text": np.array(["a", "bé"]),
    "date": np.array("2020-01-01", "M8[D]"),
    "duration": np.array([3], "m8[25s]"),
    "big endian": np.arange(4, dtype=">f4"),
    "empty": np.zeros((0, 3)),
    "no axes": np.array(5),
    "bool": np.array([True, False, True]),
    "float scalar": np.float32(1.5),
    "bool scalar": np.bool_(True),
    "int scalar": np.int64(-3),
    "date scalar": np.datetime64("2021-02-03"),
}


def _assert_same(loaded: object, expected: Any) -> None:
    assert type(loaded) is type(expected)
    assert isinstance(loaded, np.ndarray | np.generic)
    dtype = expected.dtype.newbyteorder("=")
    assert loaded.dtype == dtype and loaded.shape == expected.shape
    assert loaded.tobytes() == expected.astype(dtype).tobytes()


@pytest.mark.parametrize("protocol", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("zipped", [True, False])
def test_arrays_and_scalars(zipped: bool, protocol: int, tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    protocol = protocol if zipped else max(protocol, 2)  # the legacy format has at least protocol 2
    torch.save(ARRAYS, path, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    loaded = ckptcore.load(path)
    for name, expected in ARRAYS.items():
        _assert_same(loaded[name], expected)
    assert ckptcore.verify(path).ok


def test_random_states_of_trainers(tmp_path: Path) -> None:
    """The Trainer and Accelerate save NumPy's random state, which contains an array of 624 numbers."""
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state(), "step": 7}
    torch.save(state, tmp_path / "rng_state.pth")
    loaded = ckptcore.load(tmp_path / "rng_state.pth")
    np.random.set_state(loaded["numpy"])
    again: Any = np.random.get_state()
    expected: Any = state["numpy"]
    assert again[0] == expected[0] and np.array_equal(again[1], expected[1]) and again[2:] == expected[2:]


def test_an_array_fills_a_target_and_survives_a_copy(tmp_path: Path) -> None:
    path, target = tmp_path / "file.pt", {"mean": np.zeros((3, 2)), "count": 0}
    torch.save({"mean": np.arange(6.0).reshape(2, 3).T, "count": 4}, path)
    mean = target["mean"]
    ckptcore.load_into(path, target)
    assert np.array_equal(mean, np.arange(6.0).reshape(2, 3).T)  # type: ignore[arg-type]  # an array
    ckptcore.copy(path, tmp_path / "copy", layout="zarr3")
    _assert_same(ckptcore.load(tmp_path / "copy")["mean"], np.arange(6.0).reshape(2, 3).T)


def test_arrays_of_one_byte_are_not_tied(tmp_path: Path) -> None:
    """Python caches bytes objects of length 1, so the contents of both arrays are the same object in the pickle."""
    shared = np.array([True])
    torch.save({"a": np.array([True]), "b": np.array([True]), "c": shared, "d": shared}, tmp_path / "file.pt")
    loaded = ckptcore.load(tmp_path / "file.pt")
    assert loaded["a"] is not loaded["b"]
    assert loaded["c"] is loaded["d"]


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable):UserWarning")
def test_arrays_and_scalars_in_values_of_dcp(tmp_path: Path) -> None:
    state = {"array": np.arange(3.0), "scalar": np.float32(2.5), "weights": torch.ones(2)}
    dcp.save(dict(state), storage_writer=dcp.FileSystemWriter(tmp_path / "step"), no_dist=True)
    loaded = ckptcore.load(tmp_path / "step")
    _assert_same(loaded["array"], state["array"])
    _assert_same(loaded["scalar"], state["scalar"])


def test_scalars_of_protocol_0_are_numbers(tmp_path: Path) -> None:
    """Protocol 0 escapes some bytes of a scalar, so it cannot be read from a range of the file."""
    torch.save({"scalar": np.float32(1.5), "step": np.int64(3)}, tmp_path / "file.pt", pickle_protocol=0)
    assert ckptcore.load(tmp_path / "file.pt") == {"scalar": 1.5, "step": 3}


def test_arrays_of_objects_are_lists(tmp_path: Path) -> None:
    torch.save({"one": np.array([None, {"a": 1}]), "two": np.array([[1, "b"], [2, None]], object)}, tmp_path / "f.pt")
    assert ckptcore.load(tmp_path / "f.pt") == {"one": [None, {"a": 1}], "two": [[1, "b"], [2, None]]}


def test_scalars_of_a_compressed_pickle_are_numbers(tmp_path: Path) -> None:
    torch.save({"scalar": np.float32(1.5), "array": np.arange(3)}, tmp_path / "stored.pt")
    with zipfile.ZipFile(tmp_path / "stored.pt") as stored, zipfile.ZipFile(tmp_path / "small.pt", "w", 8) as small:
        for name in stored.namelist():
            small.writestr(name, stored.read(name))
    loaded = ckptcore.load(tmp_path / "small.pt")
    assert loaded["scalar"] == 1.5 and type(loaded["scalar"]) is float


@pytest.mark.parametrize("shape", ["(5,)", "(-1,)", "(2.5,)", "(1 << 62, 1 << 62)"])
def test_a_shape_that_does_not_fit_is_damage(shape: str, tmp_path: Path) -> None:
    class Wrong:
        def __reduce__(self) -> tuple[object, ...]:
            function, arguments, state = np.arange(3.0).__reduce__()
            assert isinstance(state, tuple)
            return function, arguments, (state[0], eval(shape), *state[2:])

    torch.save({"a": Wrong()}, tmp_path / "file.pt")
    with pytest.raises(CorruptCheckpointError, match=r"a in 'file\.pt' cannot be read: .*restore the file"):
        ckptcore.load(tmp_path / "file.pt")


@pytest.mark.parametrize("size", [1 << 63, 1 << 70])
@pytest.mark.parametrize("place", ["size", "offset"])
def test_sizes_of_structures_are_checked(place: str, size: int, tmp_path: Path) -> None:
    class Type:
        def __reduce__(self) -> tuple[object, ...]:
            offset, whole = (0, size) if place == "size" else (size, 8)
            fields = {"a": (np.dtype("f4"), offset)}
            return np.dtype, ("V8", False, True), (3, "|", None, ("a",), fields, whole, 1, 0)

    class Wrong:
        def __reduce__(self) -> tuple[object, ...]:
            function, arguments, state = np.zeros(1).__reduce__()
            assert isinstance(state, tuple)
            return function, arguments, (state[0], (1,), Type(), False, bytes(8))

    torch.save({"a": Wrong()}, tmp_path / "file.pt")
    with pytest.raises(CorruptCheckpointError, match=r"a in 'file\.pt' cannot be read: a NumPy dtype has .*restore"):
        ckptcore.load(tmp_path / "file.pt")


class Settings(dict[str, Any]):
    """A dict whose items are attributes, too."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__.update(items)


class Plain(dict[str, Any]):
    """A plain subclass of dict."""


class Items(list[Any]):
    """A plain subclass of list."""


@pytest.mark.parametrize("protocol", [1, 2, 4])
def test_subclasses_of_dict_and_list(protocol: int, tmp_path: Path) -> None:
    values = {"settings": Settings(lr=0.5), "plain": Plain(a=torch.ones(2)), "items": Items([1, 2])}
    values |= {"deque": collections.deque([3, 4])}  # type: ignore[dict-item]  # of any type
    torch.save(values, tmp_path / "file.pt", pickle_protocol=protocol)
    loaded = ckptcore.load(tmp_path / "file.pt")
    assert loaded["settings"] == {"lr": 0.5} and loaded["items"] == [1, 2] and loaded["deque"] == [3, 4]
    assert list(loaded["plain"]) == ["a"]


def test_a_dict_with_other_attributes_keeps_both(tmp_path: Path) -> None:
    value = Plain(a=1)
    value.other = 2  # type: ignore[attr-defined]
    torch.save({"value": value}, tmp_path / "file.pt")
    assert ckptcore.load(tmp_path / "file.pt")["value"] == {"__pairs__": [("a", 1)], "other": 2}


@pytest.mark.parametrize("module", [torch.nn.Linear(2, 3), torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())])
def test_whole_modules_before_torch_1_6(module: torch.nn.Module, tmp_path: Path) -> None:
    """The legacy format has a persistent id for the class of a module, which also contains its source code."""
    torch.save(module, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    torch.save(module, tmp_path / "new.pt")
    old, new = ckptcore.load(tmp_path / "old.pt"), ckptcore.load(tmp_path / "new.pt")
    assert list(old) == list(new)
    name = "weight" if "weight" in old["_parameters"] else None
    if name is not None:
        np.testing.assert_array_equal(old["_parameters"][name], new["_parameters"][name])
    else:
        weight = old["_modules"]["0"]["_parameters"]["weight"]
        np.testing.assert_array_equal(weight, new["_modules"]["0"]["_parameters"]["weight"])


def test_a_long_list_of_numbers_is_one_leaf(tmp_path: Path) -> None:
    """A leaf for each number would be slow (7 microseconds each)."""
    history = {"loss": [float(step) for step in range(5000)], "names": {f"w{step}": step for step in range(5000)}}
    torch.save(history, tmp_path / "file.pt")
    contents = ckptcore.metadata(tmp_path / "file.pt").contents
    assert contents is not None and [str(path[0]) for path in contents.tree.paths] == ["loss", "names"]
    assert ckptcore.load(tmp_path / "file.pt") == history
    target: dict[str, Any] = {"loss": [], "names": {}}
    ckptcore.load_into(tmp_path / "file.pt", target)
    assert target == history


def test_one_list_in_many_places_is_limited(tmp_path: Path) -> None:
    """A small file must not expand into a large tree."""
    shared = [float(number) for number in range(2000)]
    torch.save([shared] * 200, tmp_path / "file.pt")
    tracemalloc.start()
    try:
        with pytest.raises(CorruptCheckpointError, match="far more leaves than bytes"):
            ckptcore.load(tmp_path / "file.pt")
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_one_text_in_many_places_is_limited(tmp_path: Path) -> None:
    """Each call would encode the text again: without a limit, 2 MB of pickle became 8 GB."""
    text = b"X" + (200_000).to_bytes(4, "little") + b"x" * 200_000
    call = b"c_codecs\nencode\nh\0X\x06\0\0\0latin1\x86R"
    pickle = b"\x80\x02](" + text + b"q\0" + call * 1000 + b"e."
    with zipfile.ZipFile(tmp_path / "file.pt", "w") as file:
        file.writestr("archive/data.pkl", pickle)
    ckptcore.save(tmp_path / "warm", {"w": 1})  # imports the modules that a load needs
    tracemalloc.start()
    try:
        with pytest.raises(CorruptCheckpointError, match="far more leaves than bytes"):
            ckptcore.load(tmp_path / "file.pt")
        assert tracemalloc.get_traced_memory()[1] < 160 << 20
    finally:
        tracemalloc.stop()
