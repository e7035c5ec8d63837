"""Plain pickles and joblib files, written by pickle and joblib."""

from __future__ import annotations

import collections
import io
import os
import pickle
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import flax
import haiku
import jax
import jax.numpy as jnp
import joblib  # type: ignore[import-untyped]
import ml_dtypes
import numpy as np
import optax  # type: ignore[import-untyped]
import pytest
import safetensors.numpy
import torch
from ckptcore_testing import FaultPlan
from sklearn.ensemble import RandomForestClassifier  # type: ignore[import-untyped]

import ckptcore
from ckptcore.errors import CheckpointNotFoundError, CorruptCheckpointError
from plugins.formats.tests.counted import assert_same, counted, place

ARRAYS: dict[str, Any] = {
    "c": np.arange(6.0).reshape(2, 3),
    "fortran": np.arange(256, dtype=np.uint8).reshape(2, 128).T,
    "transposed": np.arange(24.0).reshape(2, 3, 4).transpose(1, 0, 2),
    "big_endian": np.arange(4, dtype=">f4"),
    "big_endian_text": np.array(["aé", "b"], ">U3"),
    "bfloat16": np.arange(3).astype(ml_dtypes.bfloat16),
    "no_elements": np.zeros((0, 3)),
    "no_axes": np.array(5),
    "bool": np.array([True, False, True]),
    "date": np.array("2020-01-01", "M8[D]"),
    "large": np.arange(90_000, dtype=np.float32).reshape(300, 300),
}
RECORDS = np.array([(1, 2.0, "a"), (3, 4.0, "bc")], [("i", "i4"), ("f", ">f8"), ("u", "U3")])


def _assert_arrays(loaded: Any) -> None:
    for name, expected in ARRAYS.items():
        assert_same(loaded[name], expected)


@pytest.mark.parametrize("protocol", range(6))
def test_arrays_of_each_protocol(protocol: int, tmp_path: Path) -> None:
    (tmp_path / "params.pkl").write_bytes(pickle.dumps({**ARRAYS, "n": 3}, protocol))
    loaded = ckptcore.load(tmp_path / "params.pkl")
    _assert_arrays(loaded)
    assert loaded["n"] == 3
    assert ckptcore.verify(tmp_path / "params.pkl").ok


def test_a_joblib_dtype_with_too_large_sizes_is_refused(tmp_path: Path) -> None:
    class Type:
        def __reduce__(self) -> tuple[object, ...]:
            return np.dtype, ("V8", False, True), (3, "|", None, ("a",), {"a": (np.dtype("f4"), 0)}, 1 << 70, 1, 0)

    wrapper = joblib.numpy_pickle.NumpyArrayWrapper(np.ndarray, (1,), "C", Type())
    (tmp_path / "a.joblib").write_bytes(pickle.dumps({"a": wrapper}))
    with pytest.raises(
        CorruptCheckpointError, match=r"a\.joblib contains .*a NumPy dtype has a size or an offset that"
    ):
        ckptcore.load(tmp_path / "a.joblib")


@pytest.mark.parametrize("compress", [0, "zlib", "gzip", "bz2", "lzma", "xz"])
def test_files_of_joblib(compress: Any, tmp_path: Path) -> None:
    objects = np.array([np.ones(2), None], object)
    joblib.dump({**ARRAYS, "objects": objects, "records": RECORDS, "last": "text"}, tmp_path / "a", compress=compress)
    loaded = ckptcore.load(tmp_path / "a")
    _assert_arrays(loaded)
    assert_same(loaded["objects"][0], np.ones(2))
    assert loaded["objects"][1] is None and loaded["last"] == "text"
    for name in ("i", "f", "u"):
        assert_same(loaded["records"][name], RECORDS[name])
    checkpoint = ckptcore.open(tmp_path / "a")
    assert_same(checkpoint["large"][7:9, 20:70], ARRAYS["large"][7:9, 20:70])


@pytest.mark.filterwarnings("ignore:the matrix subclass")
def test_special_arrays_of_numpy(tmp_path: Path) -> None:
    masked = np.ma.array([[1.0, 2.0], [3.0, 4.0]], mask=[[False, True], [False, False]], fill_value=9.0)
    state = {
        "masked": masked,
        "matrix": np.matrix([[1, 2], [3, 4]]),
        "record": np.rec.array(RECORDS),
        "structure": RECORDS,
        "fortran": np.array([["a", 1], [None, 2.5]], object, order="F"),
        "one": np.array({"w": np.ones(2)}),
    }
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(state))
    loaded = ckptcore.load(tmp_path / "a.pkl")
    assert_same(loaded["masked"]["data"], masked.data)
    assert_same(loaded["masked"]["mask"], masked.mask)
    assert_same(loaded["masked"]["fill_value"], np.array(9.0))
    assert_same(loaded["matrix"], np.array([[1, 2], [3, 4]]))
    for kind in ("record", "structure"):
        for name in ("i", "f", "u"):
            assert_same(loaded[kind][name], RECORDS[name])
    assert loaded["fortran"] == [["a", 1], [None, 2.5]]
    assert_same(loaded["one"]["w"], np.ones(2))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("rows", [3, 3000])
def test_tensors_of_pytorch(rows: int, protocol: int, tmp_path: Path) -> None:
    weight = torch.arange(rows * 4.0).reshape(4, rows).T
    state = {
        "weight": weight,
        "tied": weight,
        "view": weight[:, 1],
        "bias": torch.nn.Parameter(torch.arange(3.0).to(torch.bfloat16)),
        "step": torch.tensor(7),
    }
    (tmp_path / "model.pkl").write_bytes(pickle.dumps(state, protocol))
    loaded = ckptcore.load(tmp_path / "model.pkl", framework="torch")
    contents: Any = ckptcore.metadata(tmp_path / "model.pkl").contents
    assert contents.tree.aliases == {1: 0}
    for name, expected in state.items():
        assert torch.equal(loaded[name], expected.detach()) and loaded[name].dtype == expected.dtype
    module = torch.nn.Linear(2, 2)
    (tmp_path / "module.pkl").write_bytes(pickle.dumps(module.state_dict(), protocol))
    target = torch.nn.Linear(2, 2)
    ckptcore.load_into(tmp_path / "module.pkl", target)
    assert torch.equal(target.weight, module.weight)


def test_states_of_jax(tmp_path: Path) -> None:
    params = {"dense": {"kernel": jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3), "bias": jnp.ones(3)}}
    flat = haiku.data_structures.to_immutable_dict({"linear": {"w": np.ones((2, 2))}})
    adam = optax.adam(1e-3).init(params)
    state = {"params": flax.core.freeze(params), "haiku": flat, "adam": adam, "key": jax.random.PRNGKey(3)}
    (tmp_path / "params.pkl").write_bytes(cloudpickle.dumps(state))
    loaded = ckptcore.load(tmp_path / "params.pkl")
    assert_same(loaded["params"]["dense"]["kernel"], params["dense"]["kernel"])
    assert_same(loaded["haiku"]["linear"]["w"], np.ones((2, 2)))
    count, mu, _ = loaded["adam"][0]["__arguments__"]  # an instance of a class of optax, which is not imported
    assert_same(count, np.array(0, np.int32))
    assert_same(mu["dense"]["bias"], np.zeros(3, np.float32))
    assert_same(loaded["key"], jax.random.PRNGKey(3))
    target = jax.tree.map(jnp.zeros_like, {"params": params})
    restored = ckptcore.load(tmp_path / "params.pkl", target, select=ckptcore.select.names("params"))
    assert isinstance(restored["params"]["dense"]["kernel"], jax.Array)


def test_a_scikit_learn_model_loads_as_its_attributes(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    model = RandomForestClassifier(2, random_state=0).fit(
        generator.normal(size=(40, 3)), generator.integers(2, size=40)
    )
    joblib.dump(model, tmp_path / "model.joblib")
    loaded = ckptcore.load(tmp_path / "model.joblib")
    assert loaded["n_features_in_"] == 3
    assert_same(loaded["classes_"], model.classes_)
    nodes = loaded["estimators_"][0]["tree_"]["nodes"]
    assert_same(nodes["threshold"], model.estimators_[0].tree_.threshold)
    assert_same(nodes["left_child"], model.estimators_[0].tree_.children_left)


PYTHON_2 = (
    b"(dp0\nS'w'\np1\ncnumpy.core.multiarray\n_reconstruct\np2\n(cnumpy\nndarray\np3\n(I0\ntp4\nS'b'\np5\ntp6\nRp7\n"
    b"(I1\n(I2\ntp8\ncnumpy\ndtype\np9\n(S'i2'\np10\nI0\nI1\ntp11\nRp12\n(I3\nS'<'\np13\nNNNI-1\nI-1\nI0\ntp14\nb"
    b"I00\nS'\\x01\\x00\\xff\\n'\np15\ntp16\nbs."
)
"""``pickle.dumps({'w': numpy.array([1, 2815], 'i2')})`` in Python 2.7, whose default is protocol 0."""


def test_a_pickle_of_python_2(tmp_path: Path) -> None:
    (tmp_path / "params.pkl").write_bytes(PYTHON_2)
    assert_same(ckptcore.load(tmp_path / "params.pkl")["w"], np.array([1, 0x0AFF], np.int16))


@pytest.mark.parametrize("write", [pickle.dumps, cloudpickle.dumps])
@pytest.mark.parametrize("order", ["C", "F"])
def test_conversion_reads_each_byte_once(order: Any, write: Callable[..., bytes], tmp_path: Path) -> None:
    arrays = {
        str(number): np.asarray(np.arange(600_000.0).reshape(600, 1000) + number, order=order) for number in range(2)
    }
    (tmp_path / "params.pkl").write_bytes(write(arrays))
    plan = FaultPlan()
    context = counted(plan, 3 << 20)
    ckptcore.copy(place(tmp_path / "params.pkl"), tmp_path / "c", layout="safetensors", context=context)
    assert plan.bytes_read < 1.05 * (tmp_path / "params.pkl").stat().st_size
    for name, array in safetensors.numpy.load_file(tmp_path / "c/model.safetensors").items():
        assert_same(array, arrays[name])


@pytest.mark.parametrize("dump", [lambda value, path: path.write_bytes(pickle.dumps(value)), joblib.dump])
def test_memory(dump: Callable[[object, Path], object], tmp_path: Path) -> None:
    array = np.zeros((32, 1 << 20), np.uint8)
    dump({"a": array, "b": torch.zeros(1 << 24, dtype=torch.uint8), "text": "x" * 100_000}, tmp_path / "a.pkl")
    tracemalloc.start()
    try:
        checkpoint = ckptcore.open(tmp_path / "a.pkl")
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
        loaded = checkpoint["a"][...]
        assert tracemalloc.get_traced_memory()[1] < array.nbytes + (24 << 20)
    finally:
        tracemalloc.stop()
    assert_same(loaded, array)


def test_a_long_pickle_with_few_arrays(tmp_path: Path) -> None:
    """A long pickle with few arrays is first read in parts, and then as a whole."""
    history = [[float(number), {"loss": number}] for number in range(20_000)]
    (tmp_path / "history.pkl").write_bytes(pickle.dumps({"history": history, "w": np.ones(3)}))
    loaded = ckptcore.load(tmp_path / "history.pkl")
    assert loaded["history"] == history
    assert_same(loaded["w"], np.ones(3))


def test_containers_and_values(tmp_path: Path) -> None:
    state = collections.OrderedDict(a=[1, (2.5, None)], b={"x", "y"}, c=b"bytes" * 9000, d="text" * 9000, e=1j, f=2**70)
    (tmp_path / "a.pkl").write_bytes(pickle.dumps({**state, "more": os.urandom(1 << 19)}))
    loaded = ckptcore.load(tmp_path / "a.pkl")
    assert {name: loaded[name] for name in ("a", "c", "d", "e", "f")} == {
        name: state[name] for name in ("a", "c", "d", "e", "f")
    }
    assert sorted(loaded["b"]) == ["x", "y"]
    (tmp_path / "line.pkl").write_bytes(b"\x80\x02V" + b"x" * (1 << 19) + b"\n.")
    assert ckptcore.load(tmp_path / "line.pkl") == "x" * (1 << 19)


class _Runs:
    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


def test_no_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.pkl").write_bytes(pickle.dumps({"x": _Runs()}))
    assert "posix.system" in str(ckptcore.metadata(tmp_path / "a.pkl"))
    ckptcore.load(tmp_path / "a.pkl")
    assert not (tmp_path / "ran").exists()


def _large() -> bytes:
    return pickle.dumps({"w": np.arange(100_000.0), "t": torch.zeros(100_000), "s": "s" * 40_000})


def _joblib() -> bytes:
    file = io.BytesIO()
    joblib.dump({"w": np.arange(100_000.0), "o": np.array([None, 1], object)}, file)
    return file.getvalue()


@pytest.mark.parametrize("write", [_large, _joblib])
def test_a_truncated_file_is_refused(write: Callable[[], bytes], tmp_path: Path) -> None:
    content = write()
    for stop in [20, 200, 5000, 500_000, len(content) - 1]:
        (tmp_path / "a.pkl").write_bytes(content[:stop])
        with pytest.raises(CorruptCheckpointError, match=r"a\.pkl.*restore"):
            ckptcore.load(tmp_path / "a.pkl")


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x04}\x94(B\x00\x00\x10\x00" + bytes(1 << 20) + b"K\x01u.",  # long bytes as a key
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f" + bytes(1 << 20),
        b"\x80\x04B\x00\x00\x10\x00" + bytes(1 << 20) + b"\x93.",  # long bytes as a name
        b"\x80\x02U\x01aQ." + bytes(1 << 20),
    ],
    ids=["key", "length", "name", "reference"],
)
def test_hostile_long_pickles(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.pkl").write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match=r"a\.pkl"):
        ckptcore.load(tmp_path / "a.pkl")


def test_compression_that_is_damaged_or_a_bomb(tmp_path: Path) -> None:
    joblib.dump({"w": np.zeros(1 << 17)}, tmp_path / "a.joblib", compress=("gzip", 3))
    content = (tmp_path / "a.joblib").read_bytes()
    (tmp_path / "cut.joblib").write_bytes(content[:-9])
    with pytest.raises(CorruptCheckpointError, match="cannot be decompressed by gzip: it is cut off; restore it"):
        ckptcore.load(tmp_path / "cut.joblib")
    damaged = bytearray(content)
    damaged[-6] ^= 1
    (tmp_path / "damaged.joblib").write_bytes(damaged)
    with pytest.raises(CorruptCheckpointError, match="cannot be decompressed by gzip: .*restore it"):
        ckptcore.load(tmp_path / "damaged.joblib")


@pytest.mark.parametrize("length", [0x0280, 0x0480, 0x7D0480])
def test_a_file_of_safetensors_is_no_pickle(length: int, tmp_path: Path) -> None:
    """The length of its header can begin with the same bytes as a pickle."""
    header = b'{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'.ljust(length)
    (tmp_path / "a.safetensors").write_bytes(length.to_bytes(8, "little") + header + b"\7")
    assert_same(ckptcore.load(tmp_path / "a.safetensors")["w"], np.array([7], np.uint8))


def test_the_error_for_a_git_lfs_pointer(tmp_path: Path) -> None:
    (tmp_path / "a.pkl").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21461\nsize 12345\n")
    with pytest.raises(CheckpointNotFoundError, match="a pointer of Git LFS"):
        ckptcore.load(tmp_path / "a.pkl")
