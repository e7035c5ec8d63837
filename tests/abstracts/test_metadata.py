"""Abstract trees of `ckptcore.metadata`, which a load accepts without changes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from ckptcore_testing import SaveLoadMatrixTests, assert_same_tree

import ckptcore
from ckptcore.builtin.host_leaves import abstract_of_stored
from ckptcore.model import ArrayRecord, ArraySpec

LAYOUTS = list(SaveLoadMatrixTests().layouts())

SCALARS = {
    "bfloat16": ml_dtypes.bfloat16(1.5),
    "int4": ml_dtypes.int4(3),
    "complex64": np.complex64(1 + 2j),
    "bool": np.bool_(True),
    "date": np.datetime64("2020-02-03T04:05:06", "ns"),
    "no date": np.datetime64("NaT"),
    "difference": np.timedelta64(5, "D"),
    "difference of any unit": np.timedelta64(5),
    "text": np.str_("four"),
    "bytes": np.bytes_(b"123"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_numpy_scalars_are_restored(layout: str, tmp_path: Path) -> None:
    saved = 0
    for name, scalar in SCALARS.items():
        try:
            ckptcore.save(tmp_path / name, {"s": scalar}, layout=layout)
        except ckptcore.CheckpointError:
            continue  # the layout has no such dtype
        saved += 1
        loaded = ckptcore.load(tmp_path / name, ckptcore.metadata(tmp_path / name).abstract)["s"]
        assert type(loaded) is type(scalar) and loaded.dtype == scalar.dtype, name
        assert loaded.tobytes() == scalar.tobytes(), name
    assert saved > len(SCALARS) // 2


def test_a_request_for_a_long_text_scalar_allocates_no_memory(tmp_path: Path) -> None:
    """The checkpoint states the length of the text, which may be false."""
    long = np.str_("x" * 100_000)
    ckptcore.save(tmp_path / "c", {"s": long})
    abstract = ckptcore.metadata(tmp_path / "c").abstract["s"]
    assert abstract == ckptcore.AbstractArray((), "U100000")
    assert ckptcore.load(tmp_path / "c", {"s": abstract})["s"][()] == long


@pytest.mark.parametrize("dtype", ["float32", "U3", "S3"])
def test_a_scalar_record_with_axes_becomes_an_array(dtype: str) -> None:
    """A hostile checkpoint may contain such a record."""
    record = ArrayRecord(ArraySpec((2, 1), dtype), "numpy.scalar")
    assert abstract_of_stored(record) == ckptcore.AbstractArray((2, 1), dtype)


class Words:
    """An object that writes a file."""

    def save(self, directory: Path) -> None:
        (directory / "words.txt").write_text("a b")

    def load(self, directory: Path) -> None:
        raise AssertionError("no object is asked for")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_several_checkpointables_load_with_their_metadata(layout: str, tmp_path: Path) -> None:
    state: dict[str, Any] = {"w": np.arange(3.0), "name": "run"}
    ckptcore.save_checkpointables(tmp_path / "c", {"model": state, "words": Words(), "step": 3}, layout=layout)
    described = ckptcore.metadata(tmp_path / "c").checkpointables
    wanted = {name: metadata.abstract for name, metadata in described.items()}
    expected = {"model": state, "words": {"words.txt": b"a b"}, "step": 3}
    assert_same_tree(
        ckptcore.load_checkpointables(tmp_path / "c", wanted), ckptcore.load_checkpointables(tmp_path / "c")
    )
    for name, abstract in wanted.items():
        assert_same_tree(ckptcore.load(tmp_path / "c" / name, abstract), expected[name])


def test_an_open_checkpoint_has_the_digest_of_its_root(tmp_path: Path) -> None:
    path = tmp_path / "tree"
    ckptcore.save(path, {"w": np.arange(3)})
    expected = hashlib.sha256((path / "checkpoint.json").read_bytes()).hexdigest()
    assert ckptcore.metadata(path).digest == f"sha256:{expected}"
    with ckptcore.open(path) as checkpoint:
        assert checkpoint.metadata.digest == f"sha256:{expected}"
    ckptcore.save(path, {"w": np.arange(3)}, overwrite=True)
    assert ckptcore.metadata(path).digest != f"sha256:{expected}"


def test_the_digest_of_several_objects_covers_each(tmp_path: Path) -> None:
    path = tmp_path / "several"
    ckptcore.save_checkpointables(path, {"a": {"w": np.arange(3)}, "b": {"v": np.ones(2)}})
    metadata = ckptcore.metadata(path)
    parts = [metadata.checkpointables[name].digest or "" for name in ("a", "b")]
    root = (path / "checkpoint.json").read_bytes()
    assert metadata.digest == f"sha256:{hashlib.sha256(root + ''.join(parts).encode()).hexdigest()}"
    assert len({metadata.digest, *parts}) == 3
    ckptcore.delete(path / "b")
    assert ckptcore.metadata(path).digest != metadata.digest


@pytest.mark.parametrize("save", [ckptcore.save, ckptcore.save_checkpointables])
def test_a_copy_has_the_digest_of_its_source(tmp_path: Path, save: Callable[..., Any]) -> None:
    """Copies to a new location and copies that replace another save are compared."""
    save(tmp_path / "a", {"x": {"w": np.ones(3)}, "y": {"n": 1}})
    digest = ckptcore.metadata(tmp_path / "a").digest
    ckptcore.copy(tmp_path / "a", tmp_path / "b")
    assert ckptcore.metadata(tmp_path / "b").digest == digest
    for place in ("a", "b"):
        save(tmp_path / place, {"x": {"w": np.zeros(3)}, "y": {"n": 1}}, overwrite=True)
        assert ckptcore.metadata(tmp_path / place).digest != digest
    save(tmp_path / "c", {"x": {"w": np.ones(3)}, "y": {"n": 1}})
    digest = ckptcore.metadata(tmp_path / "c").digest
    for place in ("a", "b"):
        ckptcore.copy(tmp_path / "c", tmp_path / place, overwrite=True)
        assert ckptcore.metadata(tmp_path / place).digest == digest


def test_checkpoints_of_other_software_have_no_digest(tmp_path: Path) -> None:
    safetensors.numpy.save_file({"w": np.arange(3)}, tmp_path / "w.safetensors")
    assert ckptcore.metadata(tmp_path / "w.safetensors").digest is None
