"""Writers for the formats of the page *Checkpoints of other software*. Each writes any given arrays."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import tarfile
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias, cast

import h5py  # type: ignore[import-untyped]
import joblib  # type: ignore[import-untyped]
import numpy as np
import torch
import torch.distributed.checkpoint
from ckptcore_orbax import OcdbtLayout

import ckptcore
from plugins.formats.tests.test_rank_files import part_of
from plugins.formats.tests.zero_files import write_zero

Arrays: TypeAlias = "Mapping[str, np.ndarray[Any, np.dtype[np.float32]]]"
"""Arrays by name, created by `zero_files.array`."""


class Format(NamedTuple):
    """A format: how to write it, and how a conversion reads it.

    Attributes:
        write: writes arrays into a new directory. Returns the location inside it.
        subtree: the part of the loaded tree that contains the arrays.
        by_ranges: True if arrays are read in pieces from byte ranges of the files. False if they are decompressed.
        header_bytes: bytes of elements that a read of headers includes, so that they are read twice.
        is_single: True if a file contains one array without a name. A copy names it "array".
    """

    write: Callable[[Path, Arrays], str]
    subtree: str = "module"
    by_ranges: bool = True
    header_bytes: int = 0
    is_single: bool = False


def _zero(stage: int) -> Format:
    def write(directory: Path, arrays: Arrays) -> str:
        shapes = [(name, array.shape) for name, array in arrays.items()]
        write_zero(directory, stage, 3, [dict(shapes[: len(shapes) // 2]), dict(shapes[len(shapes) // 2 :])])
        return ""

    return Format(write)


def _tensors(arrays: Arrays) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _universal(directory: Path, arrays: Arrays) -> str:
    """Write the files of ``ds_to_universal.py``."""
    step, tensors = directory / "global_step1_universal", _tensors(arrays)
    step.mkdir()
    state = {
        "module": {},
        "param_shapes": [{name: tensor.shape for name, tensor in tensors.items()}],
        "ds_version": "0",
    }
    torch.save(state, step / "mp_rank_00_model_states.pt")
    for name, tensor in tensors.items():
        (step / "zero" / name).mkdir(parents=True)
        torch.save({"param": tensor}, step / "zero" / name / "fp32.pt")
    return "global_step1_universal"


def _parts(name: str, wrap: Callable[[dict[str, Any]], object]) -> Callable[[Path, Arrays], str]:
    """Return a writer of one file for each process, which holds rows of each array as DTensors."""

    def write(directory: Path, arrays: Arrays) -> str:
        for rank in range(4):
            state = {}
            for key, whole in arrays.items():
                rows = -(-len(whole) // 4)
                local = torch.from_numpy(whole[rank * rows : (rank + 1) * rows].copy())
                state[key] = part_of(rank, shape=whole.shape, local=local)
            torch.save(wrap(state), directory / name.format(rank))
        return ""

    return write


def _megatron(directory: Path, arrays: Arrays) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that there is a single process
        torch.distributed.checkpoint.save(  # type: ignore[attr-defined]  # torch does not export it
            {"module": _tensors(arrays)}, checkpoint_id=directory, no_dist=True
        )
    torch.save({"iteration": 3}, directory / "common.pt")
    (directory / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "common_backend": "torch"}))
    return ""


def _orbax(directory: Path, arrays: Arrays) -> str:
    ckptcore.save(directory / "step", {"module": arrays}, layout=OcdbtLayout(separate_nodes=True))
    (directory / "step" / "checkpoint.json").unlink()
    return "step"


def _of_file(name: str, dump: Callable[[Path, Arrays], object]) -> Callable[[Path, Arrays], str]:
    def write(directory: Path, arrays: Arrays) -> str:
        dump(directory / name, arrays)
        return name

    return write


def _write_hdf5(path: Path, arrays: Arrays, **options: Any) -> None:
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file.create_dataset(f"module/{name}", data=array, **options)


def _keras(path: Path, arrays: Arrays) -> None:
    """Write the same members as Keras 3, in the same order."""
    _write_hdf5(weights := path.with_name("model.weights.h5"), arrays)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("metadata.json", json.dumps({"keras_version": "3.15.0"}))
        archive.writestr("config.json", "{}")
        archive.write(weights, weights.name)
    weights.unlink()


def _keras_shards(path: Path, arrays: Arrays) -> None:
    """Write two weight files and an index, like ``save_weights(max_shard_size=...)``."""
    files: dict[str, str] = {}
    names = list(arrays)
    for number in range(2):
        file = f"model_0000{number}.weights.h5"
        _write_hdf5(path.with_name(file), {name: arrays[name] for name in names[number::2]})
        files.update({f"/module/{name}": file for name in names[number::2]})
    path.write_text(json.dumps({"metadata": {}, "weight_map": files}))


def _in_zip(method: int) -> Callable[[Path, Arrays], str]:
    def write(directory: Path, arrays: Arrays) -> str:
        torch.save({"module": _tensors(arrays)}, directory / "policy.pth")
        with zipfile.ZipFile(directory / "model.zip", "w", method, compresslevel=1) as archive:
            archive.write(directory / "policy.pth", "policy.pth")
        (directory / "policy.pth").unlink()
        return "model.zip!/policy.pth"

    return write


def _in_tar(name: str, mode: str) -> Callable[[Path, Arrays], str]:
    """Return a writer of an archive like those of AllenNLP, with a configuration before the weights."""

    def write(directory: Path, arrays: Arrays) -> str:
        torch.save({"module": _tensors(arrays)}, directory / "weights.th")
        options: Any = {} if mode == "w" else {"compresslevel": 1}
        with tarfile.open(directory / name, cast("Any", mode), **options) as archive:
            archive.addfile(tarfile.TarInfo("config.json"), io.BytesIO())
            archive.add(directory / "weights.th", "weights.th")
        (directory / "weights.th").unlink()
        return f"{name}!/weights.th"

    return write


def _gzip(directory: Path, arrays: Arrays) -> str:
    torch.save({"module": _tensors(arrays)}, directory / "policy.pth")
    (directory / "policy.pth.gz").write_bytes(gzip.compress((directory / "policy.pth").read_bytes(), 1))
    (directory / "policy.pth").unlink()
    return "policy.pth.gz!/policy.pth"


def _pickle_gzip(path: Path, arrays: Arrays) -> None:
    with gzip.open(path, "wb", 1) as file:
        pickle.dump({"module": arrays}, file)


FORMATS: Final = {
    "ZeRO 1": _zero(1),
    "ZeRO 2": _zero(2),
    "ZeRO 3": _zero(3),
    "universal": Format(_universal),
    "ranks": Format(_parts("model_world_size_4_rank_{}.pt", lambda state: {"module": state})),
    "torch_checkpointing": Format(_parts("model_{}.pt", lambda state: state), "model"),
    "Orbax": Format(_orbax, by_ranges=False),
    "Megatron": Format(_megatron),
    "npy": Format(
        _of_file("array.npy", lambda path, arrays: np.save(path, next(iter(arrays.values())))), "", is_single=True
    ),
    "npz": Format(_of_file("arrays.npz", lambda path, arrays: np.savez(path, **cast("Any", arrays))), ""),
    "deflated npz": Format(
        _of_file("arrays.npz", lambda path, arrays: np.savez_compressed(path, **cast("Any", arrays))),
        "",
        by_ranges=False,
    ),
    "pickle": Format(
        _of_file("params.pkl", lambda path, arrays: path.write_bytes(pickle.dumps({"module": dict(arrays)})))
    ),
    "pickle in gzip": Format(_of_file("params.pkl.gz", _pickle_gzip), by_ranges=False),
    "joblib": Format(_of_file("params.joblib", lambda path, arrays: joblib.dump({"module": dict(arrays)}, path))),
    "compressed joblib": Format(
        _of_file("params.joblib", lambda path, arrays: joblib.dump({"module": dict(arrays)}, path, compress=1)),
        by_ranges=False,
    ),
    "HDF5": Format(_of_file("model.h5", _write_hdf5)),
    "HDF5 in chunks": Format(
        _of_file("model.h5", lambda path, arrays: _write_hdf5(path, arrays, chunks=True, compression="gzip")),
        by_ranges=False,
        header_bytes=4 << 16,
    ),
    "Keras, weights": Format(_of_file("model.weights.h5", _write_hdf5)),
    "Keras, model": Format(_of_file("model.keras", _keras)),
    "Keras, shards": Format(_of_file("model.weights.json", _keras_shards)),
    "zip": Format(_in_zip(zipfile.ZIP_STORED), by_ranges=False),
    "deflated zip": Format(_in_zip(zipfile.ZIP_DEFLATED), by_ranges=False),
    "tar": Format(_in_tar("model.tar", "w"), by_ranges=False),
    "tar.gz": Format(_in_tar("model.tar.gz", "w:gz"), by_ranges=False),
    "gzip": Format(_gzip, by_ranges=False),
}
"""Each row of the page *Checkpoints of other software*."""
