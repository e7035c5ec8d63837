"""The entries of the comparison table in the README, tested with the installed versions of the libraries."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from importlib.metadata import requires
from pathlib import Path
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import torch
from orbax.checkpoint import v1  # type: ignore[import-untyped]  # it has no type stubs
from packaging.requirements import Requirement
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

import ckptcore
from ckptcore.errors import CheckpointError, CorruptCheckpointError, TreeMismatchError, UnsupportedLeafError
from tests.architecture.sources import ROOT

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable):UserWarning"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning"),
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),  # of Orbax, after an error
    pytest.mark.filterwarnings("ignore:Exception ignored in. <coroutine:pytest.PytestUnraisableExceptionWarning"),
]

OLD: Final = np.random.default_rng(0).integers(0, 1 << 31, 6000, dtype=np.int32)
NEW: Final = OLD[::-1].copy()


class Library(NamedTuple):
    """The functions of a library that save and load an array.

    Attributes:
        save: saves an array at a path, and overwrites an existing checkpoint.
        load: returns the array at a path.
    """

    save: Callable[[Path, np.ndarray], object]
    load: Callable[[Path], np.ndarray]


def _load_dcp(path: Path) -> np.ndarray:
    state = {"w": torch.zeros(len(OLD), dtype=torch.int32)}
    state_dict_loader.load(state, checkpoint_id=path, no_dist=True)
    return state["w"].numpy()


LIBRARIES: Final = {
    "ckptcore": Library(
        lambda path, array: ckptcore.save(path, {"w": array}, overwrite=True),
        lambda path: np.asarray(ckptcore.load(path)["w"]),
    ),
    "Orbax v1": Library(
        lambda path, array: v1.save(path, {"w": jnp.asarray(array)}, overwrite=True),
        lambda path: np.asarray(v1.load(path)["w"]),
    ),
    "PyTorch DCP": Library(
        lambda path, array: state_dict_saver.save({"w": torch.from_numpy(array)}, checkpoint_id=path, no_dist=True),
        _load_dcp,
    ),
    "torch.save": Library(
        lambda path, array: torch.save({"w": torch.from_numpy(array)}, path),
        lambda path: np.asarray(torch.load(path)["w"]),
    ),
    "safetensors": Library(
        lambda path, array: safetensors.numpy.save_file({"w": array}, path),
        lambda path: safetensors.numpy.load_file(path)["w"],
    ),
}

PEERS: Final = [name for name in LIBRARIES if name != "ckptcore"]


def _files(path: Path) -> Iterator[Path]:
    yield from [path] if path.is_file() else [file for file in sorted(path.rglob("*")) if file.is_file()]


def _data_file(path: Path, array: np.ndarray) -> tuple[Path, int]:
    """Return the file that contains the elements of an array, and the offset of an element."""
    wanted = array[3000:3004].tobytes()
    ((file, offset),) = [(file, at) for file in _files(path) if (at := file.read_bytes().find(wanted)) >= 0]
    return file, offset


def _flip_a_bit(path: Path) -> None:
    file, offset = _data_file(path, OLD)
    content = bytearray(file.read_bytes())
    content[offset] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("name", PEERS)
def test_a_changed_bit_loads_silently(name: str, tmp_path: Path) -> None:
    library = LIBRARIES[name]
    library.save(tmp_path / "c", OLD)
    _flip_a_bit(tmp_path / "c")
    assert (library.load(tmp_path / "c") != OLD).sum() == 1


def test_a_changed_bit_is_an_error_of_ckptcore(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"w": OLD})
    _flip_a_bit(tmp_path / "c")
    with pytest.raises(CorruptCheckpointError):
        ckptcore.load(tmp_path / "c")


@pytest.mark.parametrize("name", ["PyTorch DCP", "torch.save"])
def test_an_overwrite_is_in_place(name: str, tmp_path: Path) -> None:
    """The test makes a hard link to the old data file, which has the new elements after the overwrite."""
    library = LIBRARIES[name]
    library.save(tmp_path / "c", OLD)
    file, _ = _data_file(tmp_path / "c", OLD)
    os.link(file, tmp_path / "link")
    library.save(tmp_path / "c", NEW)
    assert NEW[3000:3004].tobytes() in (tmp_path / "link").read_bytes()


def test_an_overwrite_of_safetensors_replaces_the_file(tmp_path: Path) -> None:
    library = LIBRARIES["safetensors"]
    library.save(tmp_path / "c", OLD)
    os.link(tmp_path / "c", tmp_path / "link")
    library.save(tmp_path / "c", NEW)
    assert np.array_equal(library.load(tmp_path / "link"), OLD)


def test_an_overwrite_of_orbax_that_fails_loses_the_old_checkpoint(tmp_path: Path) -> None:
    LIBRARIES["Orbax v1"].save(tmp_path / "c", OLD)
    with pytest.raises(ValueError, match="zero size"):
        v1.save(tmp_path / "c", {"w": jnp.ones((0, 3))}, overwrite=True)
    assert not (tmp_path / "c").exists()


def test_an_overwrite_of_ckptcore_that_fails_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"w": OLD})
    with pytest.raises(UnsupportedLeafError):
        ckptcore.save(tmp_path / "c", {"w": NEW, "x": object()}, overwrite=True)
    assert np.array_equal(ckptcore.load(tmp_path / "c")["w"], OLD)
    file, _ = _data_file(tmp_path / "c", OLD)
    os.link(file, tmp_path / "link")
    ckptcore.save(tmp_path / "c", {"w": NEW}, overwrite=True)
    assert OLD[3000:3004].tobytes() in (tmp_path / "link").read_bytes()


class _Code:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_loads_of_dcp_run_code_and_those_of_torch_do_not_by_default(tmp_path: Path) -> None:
    LIBRARIES["PyTorch DCP"].save(tmp_path / "c", OLD)
    shutil.copytree(tmp_path / "c", tmp_path / "hostile")
    (tmp_path / "hostile" / ".metadata").write_bytes(pickle.dumps(_Code(tmp_path / "ran")))
    with pytest.raises(CheckpointError):
        ckptcore.load(tmp_path / "hostile")
    assert not (tmp_path / "ran").exists()
    with pytest.raises(BaseException, match="."):  # the result of the code is no valid checkpoint
        _load_dcp(tmp_path / "hostile")
    assert (tmp_path / "ran").is_dir()

    torch.save({"w": _Code(tmp_path / "ran by torch")}, tmp_path / "c.pt")
    with pytest.raises(pickle.UnpicklingError, match="[Ww]eights"):
        torch.load(tmp_path / "c.pt")
    ckptcore.load(tmp_path / "c.pt")  # the function is loaded as plain data
    assert not (tmp_path / "ran by torch").exists()


def test_another_dtype_is_cast_by_orbax_and_dcp_and_refused_by_ckptcore(tmp_path: Path) -> None:
    array = np.linspace(0, 1, 8, dtype=np.float32)
    v1.save(tmp_path / "orbax", {"w": jnp.asarray(array)})
    loaded = v1.load(tmp_path / "orbax", {"w": jax.ShapeDtypeStruct((8,), jnp.bfloat16)})  # type: ignore[no-untyped-call]
    assert loaded["w"].dtype == jnp.bfloat16
    state_dict_saver.save({"w": torch.from_numpy(array)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    state = {"w": torch.zeros(8, dtype=torch.bfloat16)}
    state_dict_loader.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert state["w"].dtype == torch.bfloat16 and state["w"].max() == 1
    for name in ("orbax", "dcp"):
        with pytest.raises(TreeMismatchError, match="dtype"):
            ckptcore.load(tmp_path / name, {"w": ckptcore.AbstractArray((8,), "bfloat16")})


def test_orbax_does_not_save_tensors(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"Tensor|[Uu]nsupported|[Tt]ype"):
        v1.save(tmp_path / "c", {"w": torch.ones(3)})
    v1.save(tmp_path / "numpy", {"w": np.ones(3, np.float32)})


@pytest.mark.parametrize("name", PEERS)
def test_ckptcore_reads_the_checkpoints_of_the_others(name: str, tmp_path: Path) -> None:
    LIBRARIES[name].save(tmp_path / "c", OLD)
    assert np.array_equal(ckptcore.load(tmp_path / "c")["w"], OLD)


@pytest.mark.parametrize(("distribution", "number"), [("ckptcore", 4), ("orbax-checkpoint", 15), ("safetensors", 0)])
def test_the_number_of_required_packages(distribution: str, number: int) -> None:
    requirements = [Requirement(text) for text in requires(distribution) or ()]
    required = {
        requirement.name
        for requirement in requirements
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    }
    assert len(required) == number


def test_the_readme_has_these_libraries_and_entries() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
    begin = next(number for number, row in enumerate(table) if row[1] == "ckptcore")
    rows: dict[str, Any] = {row[0]: row[1:] for row in table[begin:]}
    assert rows[""] == ["ckptcore", "Orbax v1", "PyTorch DCP", "torch.save", "safetensors"]
    assert rows["a changed bit in an array"] == ["error", *["loads silently"] * 4]
    assert rows["loading runs code from the file"] == ["no", "no", "yes", "no, by default", "no"]
    assert rows["another dtype than requested"] == ["error", "casts", "casts", "-", "-"]
    assert rows["required packages"] == ["4", "15", "PyTorch", "PyTorch", "0"]
    outcomes = ["old checkpoint stays", "old checkpoint is gone", *["overwritten in place"] * 2, "old file stays"]
    assert rows["overwriting, if the new save fails"] == outcomes
