"""Files of numpy.save and numpy.savez, written by NumPy."""

from __future__ import annotations

import io
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import scipy.sparse  # type: ignore[import-untyped]
from ckptcore_testing import FaultPlan

import ckptcore
from ckptcore.errors import ChecksumError, CorruptCheckpointError, UnsupportedLeafError
from plugins.formats.tests.counted import assert_same, counted, place

ARRAYS: dict[str, Any] = {
    "params/dense/kernel": np.arange(6.0).reshape(2, 3),
    "fortran": np.asfortranarray(np.arange(24, dtype=np.int16).reshape(2, 3, 4)),
    "big_endian": np.arange(5, dtype=">i4"),
    "big_endian_text": np.array(["aé", "b"], ">U3"),
    "big_endian_complex": np.array([1 + 2j, 3], ">c16"),
    "text": np.array([b"ab", b"c"]),
    "no_elements": np.zeros((0, 3), np.float16),
    "no_axes": np.array(5),
    "bool": np.array([True, False]),
    "date": np.array(["2020-01-01"], "M8[D]"),
    "large": np.arange(90_000, dtype=np.float32).reshape(300, 300),
    "large_fortran": np.asfortranarray(np.arange(90_000.0).reshape(300, 100, 3)),
}
RECORDS = np.array(
    [(1, 2.0, "a", [1, 2], 4j), (3, 4.0, "bc", [3, 4], 5)],
    [("i", "i4"), ("f", ">f8"), ("u", ">U3"), ("pair", "i2", (2,)), ("c", ">c8")],
)


@pytest.mark.parametrize("write", [np.savez, np.savez_compressed])
def test_an_archive_is_the_mapping_that_numpy_loads(write: Callable[..., None], tmp_path: Path) -> None:
    write(tmp_path / "a.npz", **ARRAYS)
    loaded = ckptcore.load(tmp_path / "a.npz")
    with np.load(tmp_path / "a.npz") as theirs:
        assert list(loaded) == theirs.files
        for name in theirs.files:
            assert_same(loaded[name], theirs[name])
    assert ckptcore.verify(tmp_path / "a.npz").ok
    checkpoint = ckptcore.open(tmp_path / "a.npz")
    for name in ("large", "large_fortran"):
        assert_same(checkpoint[name][7:9, 20:70], ARRAYS[name][7:9, 20:70])


@pytest.mark.parametrize("name", ARRAYS)
def test_a_file_is_its_array(name: str, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", ARRAYS[name])
    assert_same(ckptcore.load(tmp_path / "a.npy"), ARRAYS[name])


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_versions_of_the_header(version: tuple[int, int], tmp_path: Path) -> None:
    with (tmp_path / "a").open("wb") as file:
        np.lib.format.write_array(file, RECORDS[["i", "f"]], version)
    loaded = ckptcore.load(tmp_path / "a")
    assert_same(loaded["f"], RECORDS["f"])


def test_a_header_of_python_2(tmp_path: Path) -> None:
    header = b"{'descr': '<i2', 'fortran_order': False, 'shape': (2L, 1L), }".ljust(117) + b"\n"
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY\x01\x00\x76\x00" + header + np.arange(2, dtype="<i2").tobytes())
    assert_same(ckptcore.load(tmp_path / "a.npy"), np.arange(2, dtype="<i2").reshape(2, 1))


@pytest.mark.parametrize("write", [np.savez, np.savez_compressed])
def test_structured_arrays_load_as_their_fields(write: Callable[..., None], tmp_path: Path) -> None:
    write(tmp_path / "a.npz", r=RECORDS, aligned=np.zeros(3, np.dtype([("a", "i1"), ("b", "f8")], align=True)))
    loaded = ckptcore.load(tmp_path / "a.npz")
    assert RECORDS.dtype.names is not None
    for name in RECORDS.dtype.names:
        assert_same(loaded["r"][name], RECORDS[name])
    assert_same(loaded["aligned"]["b"], np.zeros(3))


def test_dtypes_that_numpy_does_not_name(tmp_path: Path) -> None:
    """bfloat16 loads as in `jax.numpy.load`. Other raw bytes stay bytes."""
    values = np.arange(3).astype(ml_dtypes.bfloat16)
    small = np.arange(3).astype(ml_dtypes.float8_e4m3fn)
    np.savez(tmp_path / "a.npz", b=values, f8=small, raw=np.array([b"abc"], "V3"), wide=np.ones(2, np.longdouble))
    checkpoint = ckptcore.open(tmp_path / "a.npz")
    assert_same(checkpoint["b"][...], values)
    assert_same(checkpoint["f8"][...], small.view(np.uint8))
    assert_same(checkpoint["raw"][...], np.frombuffer(b"abc", np.uint8).reshape(1, 3))
    with pytest.raises(UnsupportedLeafError, match="wide: .* a NumPy array that cannot be loaded: dtype float128"):
        ckptcore.load(tmp_path / "a.npz")


def test_objects_are_read_as_data(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array({"w": np.arange(3.0), "n": 1}))
    loaded = ckptcore.load(tmp_path / "a.npy")  # TensorFlow weights of VGG and AlexNet have this form
    assert loaded["n"] == 1
    assert_same(loaded["w"], np.arange(3.0))
    np.savez(tmp_path / "a.npz", o=np.array([[1, "a"], [None, 2.5]], object))
    assert ckptcore.load(tmp_path / "a.npz") == {"o": [[1, "a"], [None, 2.5]]}


def test_a_sparse_matrix_is_named(tmp_path: Path) -> None:
    matrix = scipy.sparse.eye(3).tocsr()
    scipy.sparse.save_npz(tmp_path / "a.npz", matrix)
    assert_same(ckptcore.load(tmp_path / "a.npz")["data"], matrix.data)
    contents: Any = ckptcore.metadata(tmp_path / "a.npz").contents
    assert contents.tree.skeleton.type == "scipy.sparse matrix"


@pytest.mark.parametrize("write", [np.savez, np.savez_compressed])
def test_conversion_reads_each_byte_once(write: Callable[..., None], tmp_path: Path) -> None:
    """The arrays exceed the usual slices of a conversion, but these files can only be read as a whole."""
    numbers = np.arange(600_000.0).reshape(600, 1000)
    arrays = {"c": numbers, "f": np.asfortranarray(numbers)}
    write(tmp_path / "a.npz", **arrays)
    plan = FaultPlan()
    context = counted(plan, 3 << 20)
    ckptcore.copy(place(tmp_path / "a.npz"), tmp_path / "c", layout="safetensors", context=context)
    assert plan.bytes_read < 1.05 * (tmp_path / "a.npz").stat().st_size
    for name, array in safetensors.numpy.load_file(tmp_path / "c/model.safetensors").items():
        assert_same(array, arrays[name])


@pytest.mark.parametrize("write", [np.savez, np.savez_compressed])
def test_memory(write: Callable[..., None], tmp_path: Path) -> None:
    array = np.zeros((32, 1 << 20), np.uint8)
    write(tmp_path / "a.npz", a=array, f=np.asfortranarray(array))
    tracemalloc.start()
    try:
        ckptcore.load(tmp_path / "a.npz")
        assert tracemalloc.get_traced_memory()[1] < 2 * array.nbytes + (48 << 20)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_damage_is_found(compression: int, tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    member = io.BytesIO()
    np.save(member, np.arange(1000, dtype=np.uint16))
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("w.npy", member.getvalue())
        archive.writestr("other.npy", member.getvalue())
    data = bytearray(path.read_bytes())
    data[700] ^= 1
    path.write_bytes(data)
    with pytest.raises((ChecksumError, CorruptCheckpointError), match=r"a\.npz"):
        ckptcore.load(path)
    assert_same(ckptcore.load(path, select=ckptcore.select.names("other"))["other"], np.arange(1000, dtype=np.uint16))


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000,), }", "cut off: its header states 8000 bytes"),
        (b"{'descr': '<f8', 'fortran_order': False, 'shape': (-1,), }", "an extent of the shape is invalid"),
        (b"{'descr': '<f8', 'fortran_order': 1, 'shape': (1,), }", "the shape or the order is invalid"),
        (b"{'descr': '<f8', 'shape': (1,), }", "expected the keys descr, fortran_order and shape"),
        (b"{'descr': 'os.system', 'fortran_order': False, 'shape': (1,), }", "'os.system' is not a dtype"),
        (b"[" * 90, "its header cannot be read"),
        (b"__import__('os')", "its header cannot be read"),
    ],
)
def test_hostile_headers(header: bytes, message: str, tmp_path: Path) -> None:
    header = header.ljust(117) + b"\n"
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY\x01\x00\x76\x00" + header + bytes(8))
    with pytest.raises((CorruptCheckpointError, UnsupportedLeafError), match=message):
        ckptcore.load(tmp_path / "a.npy")


def test_a_damaged_member_does_not_block_the_others(tmp_path: Path) -> None:
    good = io.BytesIO()
    np.save(good, np.ones(2))
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("good.npy", good.getvalue())
        archive.writestr("bad.npy", b"no array at all")
    assert_same(ckptcore.load(tmp_path / "a.npz", select=ckptcore.select.names("good"))["good"], np.ones(2))
    with pytest.raises(CorruptCheckpointError, match=r"'bad\.npy in a\.npz' is not an array of numpy\.save"):
        ckptcore.load(tmp_path / "a.npz")


def test_saving_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedLeafError, match="the layout 'numpy' only reads files of other software"):
        ckptcore.save(tmp_path / "c", {"w": np.ones(1)}, layout="numpy")
