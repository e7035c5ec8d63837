"""HDF5 and Keras files, written by h5py and Keras."""

from __future__ import annotations

import json
import os
import shutil
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import h5py  # type: ignore[import-untyped]
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from ckptcore_testing import FaultPlan

import ckptcore
from ckptcore.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    MissingDistributionError,
    UnsupportedLeafError,
)
from plugins.formats.tests.counted import assert_same, counted, place

ARRAYS: dict[str, Any] = {
    "plain": np.arange(6.0).reshape(2, 3),
    "big_endian": np.arange(5, dtype=">i4"),
    "bfloat16": np.arange(3).astype(ml_dtypes.bfloat16),
    "half": np.arange(3, dtype=np.float16),
    "bool": np.array([True, False]),
    "complex": np.array([1 + 2j]),
    "no_axes": np.array(5),
    "no_elements": np.zeros((0, 3)),
    "fixed_text": np.array([b"ab", b"c"]),
    "large": np.arange(90_000, dtype=np.float32).reshape(300, 300),
}
RECORDS = np.array([(1, 2.0), (3, 4.0)], [("i", "<i4"), ("f", ">f8")])


def _write(path: Path, **options: Any) -> None:
    with h5py.File(path, "w", **options) as file:
        for name, array in ARRAYS.items():
            file.create_dataset(f"a/{name}", data=array)
        for kind, value in {"gzip": "gzip", "lzf": "lzf", "none": None}.items():
            file.create_dataset(f"b/{kind}", data=ARRAYS["large"], chunks=(64, 100), compression=value, shuffle=True)
        file.create_dataset("b/big_endian", data=ARRAYS["large"].astype(">f4"), chunks=(64, 100), fletcher32=True)
        file["records"] = RECORDS
        file["text"] = "a text"
        file["empty"] = h5py.Empty("f4")
        file.create_group("nothing")
        file.attrs["version"] = "3"
        file["a"].attrs["numbers"] = np.arange(3)


@pytest.mark.parametrize(
    "options", [{}, {"libver": "latest"}, {"userblock_size": 512}, {"userblock_size": 2048}], ids=str
)
def test_groups_are_mappings_and_datasets_arrays(options: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    _write(path, **options)
    loaded = ckptcore.load(path)
    for name, array in ARRAYS.items():
        assert_same(loaded["a"][name], array)
    for name in ("gzip", "lzf", "none", "big_endian"):
        assert_same(loaded["b"][name], ARRAYS["large"])
    assert_same(loaded["records"]["i"], RECORDS["i"])
    assert_same(loaded["records"]["f"], RECORDS["f"])
    assert loaded["text"] == "a text" and loaded["empty"] is None and loaded["nothing"] == {}
    assert ckptcore.verify(path).ok
    checkpoint = ckptcore.open(path)
    for name in ("gzip", "none", "big_endian"):
        assert_same(checkpoint["b"][name][60:70, 95:105], ARRAYS["large"][60:70, 95:105])
    custom: Any = ckptcore.metadata(path).custom["attributes"]
    assert custom == {"/": {"version": "3"}, "/a": {"numbers": [0, 1, 2]}}


@pytest.mark.parametrize("name", ["a.h5", "a.hdf5"])
def test_a_file_with_other_content_is_not_found(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(bytes(5000))
    with pytest.raises(CheckpointNotFoundError):
        ckptcore.load(tmp_path / name)


def test_names_may_end_like_the_mark_of_big_endian(tmp_path: Path) -> None:
    arrays = {"w": np.arange(3, dtype=">f4"), "w>": np.arange(10, 13, dtype="f4"), "0>": np.arange(2, dtype=">i2")}
    chunked = {"c": np.arange(5, dtype="f4"), "c>": np.arange(9, dtype=">f4")}
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, array in arrays.items():
            file[name] = array
        for name, array in chunked.items():
            file.create_dataset(name, data=array, chunks=(2,))
    loaded = ckptcore.load(tmp_path / "a.h5")
    for name, array in (arrays | chunked).items():
        assert_same(loaded[name], array)


def test_numbers_with_unused_bits(tmp_path: Path) -> None:
    types = {name: h5py.h5t.STD_I32LE.copy() for name in ("whole", "precision", "offset", "big")}
    types["precision"].set_precision(16)
    types["offset"].set_precision(16)
    types["offset"].set_offset(8)
    types["big"].set_precision(24)
    types["big"].set_order(h5py.h5t.ORDER_BE)
    types["bias"] = h5py.h5t.IEEE_F32LE.copy()
    types["bias"].set_ebias(100)
    types["bool"] = h5py.h5t.enum_create(h5py.h5t.STD_I8LE)
    for text, number in ((b"FALSE", 0), (b"TRUE", 1)):
        types["bool"].enum_insert(text, number)
    structure = h5py.h5t.create(h5py.h5t.COMPOUND, 8)
    structure.insert(b"a", 0, types["whole"])
    structure.insert(b"b", 4, types["precision"])
    numbers = np.array([-1, 2, -3, 4], "i4")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        space = h5py.h5s.create_simple((4,))
        for name, kind in types.items():
            dataset = h5py.h5d.create(file.id, name.encode(), kind, space)
            if name == "bool":
                dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, np.array([1, 0, 1, 1], "i1"), kind)
            else:
                dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, numbers)
        h5py.h5d.create(file.id, b"structure", structure, space)
        expected = {name: file[name][()] for name in types}
    checkpoint = ckptcore.open(tmp_path / "a.h5")
    for name, array in expected.items():
        assert_same(checkpoint[name][...], array)
    assert expected["precision"].tolist() == numbers.tolist()
    with pytest.raises(UnsupportedLeafError, match=r"structure.*of unusual types"):
        ckptcore.load(tmp_path / "a.h5")


@pytest.fixture(scope="module")
def keras_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[np.ndarray[Any, Any]]]:
    """The files of one Keras model, and its weights in the order of Keras."""
    os.environ.setdefault("KERAS_BACKEND", "jax")
    keras = pytest.importorskip("keras", exc_type=ImportError)

    directory = tmp_path_factory.mktemp("keras")
    layers = [keras.layers.Input((4,)), keras.layers.Dense(3, dtype="bfloat16"), keras.layers.Dense(2)]
    model = keras.Sequential(layers)
    model.compile("adam", "mse")
    model.save(directory / "m.keras")
    model.save_weights(directory / "m.weights.h5")
    model.save_weights(directory / "s.weights.json", max_shard_size=5e-8)
    model.save(directory / "old.h5")
    return directory, model.get_weights()


@pytest.mark.parametrize("name", ["m.keras", "m.weights.h5", "s.weights.json", "m.keras!/model.weights.h5"])
def test_weights_of_keras_3(name: str, keras_files: tuple[Path, list[Any]]) -> None:
    directory, weights = keras_files
    layers = ckptcore.load(directory / name)["layers"]
    stored = [layers[layer]["vars"][number] for layer in ("dense", "dense_1") for number in ("0", "1")]
    for array, expected in zip(stored, weights, strict=True):
        assert_same(array, expected)
    assert ckptcore.metadata(directory / name).writer in ("Keras", "HDF5")


def test_a_model_of_keras_2(keras_files: tuple[Path, list[Any]]) -> None:
    """The format of Keras 2, with the names of layers and weights in attributes."""
    directory, weights = keras_files
    loaded = ckptcore.load(directory / "old.h5")["model_weights"]
    assert list(loaded)[:2] == ["dense", "dense_1"]
    last = loaded["dense_1"]["sequential"]["dense_1"]
    assert_same(last["kernel"], weights[2])
    attributes: Any = ckptcore.metadata(directory / "old.h5").custom["attributes"]
    assert attributes["/model_weights"]["layer_names"] == ["dense", "dense_1"]


def test_a_shard_of_keras_that_is_missing(keras_files: tuple[Path, list[Any]], tmp_path: Path) -> None:
    """The test follows the remedy of the error."""
    directory, _ = keras_files
    shutil.copytree(directory, tmp_path / "c")
    index = json.loads((tmp_path / "c" / "s.weights.json").read_text())
    name = str(np.ravel(list(index["weight_map"].values())[-1])[0])
    (tmp_path / "c" / name).unlink()
    location = tmp_path / "c" / "s.weights.json"
    for call in (ckptcore.load, ckptcore.metadata, lambda path: ckptcore.copy(path, tmp_path / "copy", layout="dcp")):
        with pytest.raises(CorruptCheckpointError, match=f"lists {name}, which does not exist: restore {name} from a"):
            call(location)
    shutil.copy(directory / name, tmp_path / "c")
    assert ckptcore.load(location).keys() == ckptcore.load(directory / location.name).keys()


def test_the_error_for_compressed_weights_names_a_remedy(keras_files: tuple[Path, list[Any]], tmp_path: Path) -> None:
    directory, weights = keras_files
    with zipfile.ZipFile(directory / "m.keras") as old, zipfile.ZipFile(tmp_path / "c.keras", "w", 8) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    with pytest.raises(UnsupportedLeafError, match=r"load c\.keras!/model\.weights\.h5"):
        ckptcore.load(tmp_path / "c.keras")
    loaded = ckptcore.load(tmp_path / "c.keras!/model.weights.h5")
    assert_same(loaded["layers"]["dense_1"]["vars"]["0"], weights[2])


def test_conversion_reads_each_byte_once(tmp_path: Path) -> None:
    numbers = np.random.default_rng(0).normal(size=(1000, 600))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["plain"] = numbers
        file.create_dataset("chunks", data=numbers, chunks=(50, 600), compression="gzip")
    plan = FaultPlan()
    context = counted(plan, 3 << 20)
    ckptcore.copy(place(tmp_path / "a.h5"), tmp_path / "c", layout="safetensors", context=context)
    assert plan.bytes_read < 1.08 * (tmp_path / "a.h5").stat().st_size
    for array in safetensors.numpy.load_file(tmp_path / "c/model.safetensors").values():
        assert_same(array, numbers)


def test_memory(tmp_path: Path) -> None:
    array = np.zeros((32, 1 << 20), np.uint8)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["a"] = array
        file.create_dataset("b", data=array, chunks=(1, 1 << 20), compression="gzip")
    tracemalloc.start()
    try:
        checkpoint = ckptcore.open(tmp_path / "a.h5")
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
        for name in ("a", "b"):
            assert checkpoint[name][...].shape == array.shape
        assert tracemalloc.get_traced_memory()[1] < array.nbytes + (24 << 20)
    finally:
        tracemalloc.stop()


def test_nothing_outside_of_the_file_is_read(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "secret.h5", "w") as file:
        file["x"] = np.arange(3.0)
    (tmp_path / "raw").write_bytes(bytes(24))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["good"] = np.ones(2)
        file["external"] = h5py.ExternalLink(str(tmp_path / "secret.h5"), "x")
        file["soft"] = h5py.SoftLink("/good")
        file["cycle/inner"] = h5py.SoftLink("/cycle")
        file["group/again"] = file["group"] if "group" in file else file.create_group("group")
        file.create_dataset("raw", (3,), "f8", external=[(str(tmp_path / "raw"), 0, 24)])
        layout = h5py.VirtualLayout((3,), "f8")
        layout[:] = h5py.VirtualSource(str(tmp_path / "secret.h5"), "x", (3,))
        file.create_virtual_dataset("virtual", layout)
    for name, reason in {
        "external": "a link to 'x' in the file '.*secret.h5': load that file",
        "soft": "a link to another name of the file",
        "raw": "a dataset with its elements in the file '.*raw'",
        "virtual": "a virtual dataset, whose elements are in other datasets",
        "group": "a group that contains itself",
    }.items():
        with pytest.raises(UnsupportedLeafError, match=reason):
            ckptcore.load(tmp_path / "a.h5", select=ckptcore.select.names(name))
    assert_same(ckptcore.load(tmp_path / "a.h5", select=ckptcore.select.names("good"))["good"], np.ones(2))


def test_hostile_sizes(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("huge", (1 << 40,), "f8", chunks=(1024,))
        file.create_dataset("unfilled", (1000,), "f4")
    with pytest.raises(UnsupportedLeafError, match="huge.* a dataset of 8796093022208 bytes that was not filled"):
        ckptcore.load(tmp_path / "a.h5", select=ckptcore.select.names("huge"))
    loaded = ckptcore.load(tmp_path / "a.h5", select=ckptcore.select.names("unfilled"))
    assert_same(loaded["unfilled"], np.zeros(1000, np.float32))


def test_exponentially_many_links_are_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["a0/x"] = np.ones(2)
        for number in range(1, 40):
            group = file.create_group(f"a{number}")
            for name in ("x", "y"):
                group[name] = file[f"a{number - 1}"]
    most = 1000 + (tmp_path / "a.h5").stat().st_size // 64
    with pytest.raises(CorruptCheckpointError, match=rf"'a\.h5' has more than {most} objects, or refers to some again"):
        ckptcore.load(tmp_path / "a.h5")


@pytest.mark.parametrize("options", [{}, {"libver": "latest"}], ids=str)
def test_many_small_objects(options: dict[str, Any], tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w", **options) as file:
        for number in range(1100):
            file.create_group(f"{number}")
        file["again"] = file["7"]
    assert ckptcore.load(tmp_path / "a.h5") == {**{f"{number}": {} for number in range(1100)}, "again": {}}


def test_a_name_that_is_not_unicode(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        h5py.h5g.create(file.id, b"gr\xfc\xdf")
        file["x"] = np.ones(2)
        h5py.h5a.create(file["x"].id, b"\xfc", h5py.h5t.NATIVE_INT32, h5py.h5s.create(h5py.h5s.SCALAR))
        file["x"].attrs["text"] = b"\xfc"
        file.attrs.create("text", b"\xfc", dtype=h5py.string_dtype())
    with pytest.raises(UnsupportedLeafError, match=r"'a\.h5' has the name b'gr\\xfc\\xdf' in '/', .* rename it"):
        ckptcore.load(tmp_path / "a.h5")
    with h5py.File(tmp_path / "a.h5", "a") as file:
        file.id.links.move(b"gr\xfc\xdf", file.id, b"new")  # the remedy
    assert list(ckptcore.load(tmp_path / "a.h5")) == ["new", "x"]
    custom: Any = ckptcore.metadata(tmp_path / "a.h5").custom["attributes"]
    mark = "\N{REPLACEMENT CHARACTER}"
    assert custom == {"/": {"text": mark}, "/x": {mark: 0, "text": mark}}


def test_damage(tmp_path: Path) -> None:
    _write(tmp_path / "a.h5")
    content = (tmp_path / "a.h5").read_bytes()
    for stop in (20, 500, 3000, len(content) // 2):
        (tmp_path / "a.h5").write_bytes(content[:stop])
        with pytest.raises(CorruptCheckpointError, match=r"'a\.h5' cannot be read as an HDF5 file: .*restore it"):
            ckptcore.load(tmp_path / "a.h5")
    for content in (b'{"weight_map": {"a": ["../x.h5"]}}', b'{"weight_map": {"a": 7}}'):
        (tmp_path / "s.weights.json").write_bytes(content)
        with pytest.raises((CorruptCheckpointError, CheckpointNotFoundError), match=r"s\.weights\.json"):
            ckptcore.load(tmp_path / "s.weights.json")


@pytest.mark.parametrize("options", [{}, {"userblock_size": 1024}], ids=str)
@pytest.mark.parametrize("change", [(24, 0), (9, 0), (31, 127), (24, 255), (25, 128)], ids=str)
def test_a_damaged_heap_is_named(change: tuple[int, int], options: dict[str, Any], tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w", **options) as file:
        file.attrs["k"] = "v"
        file["text"] = "a text"
    content = bytearray((tmp_path / "a.h5").read_bytes())
    at, byte = change
    content[content.find(b"GCOL") + at] = byte
    (tmp_path / "a.h5").write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match=r"'a\.h5' .*the global heap at byte \d+ .* restore it"):
        ckptcore.load(tmp_path / "a.h5")


def test_texts_of_many_heaps_are_read(tmp_path: Path) -> None:
    texts = {f"t{number}": "GCOL" * (number * number) for number in range(1, 50)}
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, text in texts.items():
            file[name] = text
            file.attrs[name] = text
        for name in list(texts)[::3]:
            del file[name]  # leaves a gap in the heap of the text
        file.attrs["list"] = ["a", "", "b"]
        texts = {name: texts[name] for name in file}
    loaded = ckptcore.load(tmp_path / "a.h5")
    assert loaded == texts


def test_without_h5py_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path / "a.h5")
    for name in ("h5py", "ckptcore_formats.hdf5_objects"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    with pytest.raises(MissingDistributionError, match=r"needs h5py: run pip install 'ckptcore\[hdf5\]'"):
        ckptcore.load(tmp_path / "a.h5")
