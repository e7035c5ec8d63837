"""Conversion of checkpoints of other software into Hugging Face directories: all bytes once, in bounded pieces."""

from __future__ import annotations

import gzip
import json
import math
import pickle
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import h5py  # type: ignore[import-untyped]
import joblib  # type: ignore[import-untyped]
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint
from ckptcore_orbax import OcdbtLayout
from ckptcore_testing import FaultPlan
from safetensors.numpy import load_file

import ckptcore
from plugins.formats.tests.counted import counted, place
from plugins.formats.tests.test_rank_files import part_of
from plugins.formats.tests.zero_files import Shape, array, write_zero

SHAPES: list[dict[str, Shape]] = [
    {"a": (501, 307), "b": (3, 5, 7001), "c": (99991,)},
    {f"n{number}": (37, 3) for number in range(20)},
]
ARRAYS = {name: array(name, shape) for group in SHAPES for name, shape in group.items()}
NBYTES = sum(one.nbytes for one in ARRAYS.values())
PIECE = 400_000
"""Memory for a conversion, which is less than two of the arrays."""


class Format(NamedTuple):
    """A format, with a checkpoint of `ARRAYS`.

    Attributes:
        write: writes it into a new directory. Returns its location in there.
        subtree: the part with the arrays.
        by_ranges: True if arrays are read from their bytes in the files, in pieces, and not decompressed.
    """

    write: Callable[[Path], str]
    subtree: str = "module"
    by_ranges: bool = True


def zero(stage: int) -> Format:
    def write(directory: Path) -> str:
        write_zero(directory, stage, 3, SHAPES)
        return ""

    return Format(write)


def tensors() -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(one) for name, one in ARRAYS.items()}


def universal(directory: Path) -> str:
    """As ``ds_to_universal.py`` writes it."""
    step = directory / "global_step1_universal"
    step.mkdir()
    state = {"module": {}, "param_shapes": [{name: one.shape for name, one in tensors().items()}], "ds_version": "0"}
    torch.save(state, step / "mp_rank_00_model_states.pt")
    for name, one in tensors().items():
        (step / "zero" / name).mkdir(parents=True)
        torch.save({"param": one}, step / "zero" / name / "fp32.pt")
    return "global_step1_universal"


def parts(name: str, wrap: Callable[[dict[str, Any]], object]) -> Callable[[Path], str]:
    """Rows of each array, which the processes hold as DTensors."""

    def write(directory: Path) -> str:
        for rank in range(4):
            state = {}
            for key, whole in ARRAYS.items():
                rows = -(-len(whole) // 4)
                local = torch.from_numpy(whole[rank * rows : (rank + 1) * rows].copy())
                state[key] = part_of(rank, shape=whole.shape, local=local)
            torch.save(wrap(state), directory / name.format(rank))
        return ""

    return write


def megatron(directory: Path) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the only process
        torch.distributed.checkpoint.save(  # type: ignore[attr-defined]  # torch does not export it
            {"module": tensors()}, checkpoint_id=directory, no_dist=True
        )
    torch.save({"iteration": 3}, directory / "common.pt")
    (directory / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "common_backend": "torch"}))
    return ""


def orbax(directory: Path) -> str:
    ckptcore.save(directory / "step", {"module": ARRAYS}, layout=OcdbtLayout(separate_nodes=True))
    (directory / "step" / "checkpoint.json").unlink()
    return "step"


def hdf5(directory: Path) -> str:
    with h5py.File(directory / "model.weights.h5", "w") as file:
        for name, one in ARRAYS.items():
            file[f"module/{name}"] = one
    return "model.weights.h5"


def of_file(name: str, dump: Callable[[Path], object]) -> Callable[[Path], str]:
    def write(directory: Path) -> str:
        dump(directory / name)
        return name

    return write


def in_archive(directory: Path) -> str:
    torch.save({"module": tensors()}, directory / "policy.pth")
    with zipfile.ZipFile(directory / "model.zip", "w") as archive:
        archive.write(directory / "policy.pth", "policy.pth")
    (directory / "policy.pth").unlink()
    return "model.zip!/policy.pth"


def compressed(directory: Path) -> str:
    torch.save({"module": tensors()}, directory / "policy.pth")
    (directory / "policy.pth.gz").write_bytes(gzip.compress((directory / "policy.pth").read_bytes(), 1))
    (directory / "policy.pth").unlink()
    return "policy.pth.gz!/policy.pth"


FORMATS = {
    "ZeRO 1": zero(1),
    "ZeRO 2": zero(2),
    "ZeRO 3": zero(3),
    "universal": Format(universal),
    "ranks": Format(parts("model_world_size_4_rank_{}.pt", lambda state: {"module": state})),
    "torch_checkpointing": Format(parts("model_{}.pt", lambda state: state), "model"),
    "Megatron": Format(megatron),
    "Orbax": Format(orbax, by_ranges=False),
    "npz": Format(of_file("arrays.npz", lambda path: np.savez(path, **cast("Any", ARRAYS))), ""),
    "deflated npz": Format(
        of_file("arrays.npz", lambda path: np.savez_compressed(path, **cast("Any", ARRAYS))), "", by_ranges=False
    ),
    "pickle": Format(of_file("params.pkl", lambda path: path.write_bytes(pickle.dumps({"module": ARRAYS})))),
    "joblib": Format(of_file("params.joblib", lambda path: joblib.dump({"module": ARRAYS}, path))),
    "HDF5": Format(hdf5),
    "zip": Format(in_archive, by_ranges=False),
    "gzip": Format(compressed, by_ranges=False),
}
"""Each format of the page *Checkpoints of other software*."""


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS.keys())
def test_a_conversion_reads_each_byte_once_in_pieces(form: Format, tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    location = form.write(tmp_path / "c")
    plan = FaultPlan()
    ckptcore.copy(
        place(tmp_path / "c" / location), tmp_path / "hf",
        layout=ckptcore.SafetensorsLayout(max_file_bytes=700_000), subtree=form.subtree, context=counted(plan, PIECE),
    )  # fmt: skip
    sources = [path for path in (tmp_path / "c").rglob("*") if path.is_file()]
    stored = sum(path.stat().st_size for path in sources)
    assert plan.bytes_read < 1.02 * stored + max(160_000, 64_000 * len(sources))  # directories, headers and pickles
    elements = [operation for operation in plan.operations if operation.name == "get_into"]
    if form.by_ranges:
        assert 0.99 * NBYTES <= sum([one.nbytes for one in elements]) < 1.01 * NBYTES
        assert max([one.nbytes for one in elements]) <= PIECE
        assert len({(one.keys, one.offset) for one in elements}) == len(elements)
    found: dict[str, np.ndarray[Any, Any]] = {}
    for path in (tmp_path / "hf").glob("*.safetensors"):
        found.update(load_file(path))
    assert {name: one.shape for name, one in found.items() if name in ARRAYS} == {
        name: one.shape for name, one in ARRAYS.items()
    }
    assert all(found[name].tobytes() == one.tobytes() for name, one in ARRAYS.items())


def test_a_box_is_read_from_the_files_that_have_it(tmp_path: Path) -> None:
    write_zero(tmp_path / "c", 3, 3, SHAPES)
    plan = FaultPlan()
    with ckptcore.open(place(tmp_path / "c"), context=counted(plan)) as opened:
        before = plan.bytes_read
        row = opened["module"]["a"][100:101]
        assert np.array_equal(row, ARRAYS["a"][100:101])
        assert plan.bytes_read - before <= 1.05 * math.prod(row.shape) * 4
