"""Writes the golden checkpoints in this directory, with torch and with ckptcore. Run by hand; tests only read them.

    python generate.py [name ...]

Each golden is a directory and a JSON file of the same name that describes its contents:

    {"written_with": the versions of torch and, for our own, of ckptcore and its format,
     "tree": result of `ckptcore.load`, if the checkpoint is one tree,
     "checkpointables": {name: result of `ckptcore.load_checkpointables`}, if there are several,
     "files": {file in it: result of `ckptcore.load` for it}, if files have their own location,
     "torch_loads": whether `torch.distributed.checkpoint.load` returns the tensors of the tree}

Values are JSON. Types that JSON lacks are objects with one key that begins with ``$``:

    {"$array": [dtype, shape, start]}  the numbers start, start + 1, ... in C order, modulo 100
    {"$tuple": [...]}                  a tuple
    {"$complex": [real, imaginary]}    a complex number
    {"$bytes": hexadecimal digits}     bytes
    {"$float": text}                   nan and infinities
"""

from __future__ import annotations

import functools
import json
import math
import os
import shutil
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from ckptcore_testing.fixed_saves import fixed_saves
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import ckptcore

HERE = Path(__file__).resolve().parent
MADE: dict[str, Any] = {}
DTYPES = (
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16", "float32",
    "float64",
    "complex64", "complex128", "float8_e4m3fn", "float8_e5m2",
)  # fmt: skip


def golden(function: Any) -> Any:
    """Register a function that writes a golden into a path and returns its description."""
    MADE[function.__name__] = function
    return function


def array(dtype: str, shape: tuple[int, ...] = (), start: int = 1) -> dict[str, Any]:
    return {"$array": [dtype, list(shape), start]}


def tensor(dtype: str, shape: list[int], start: int) -> torch.Tensor:
    numbers = (torch.arange(math.prod(shape)) + start) % 100
    return numbers.to(getattr(torch, dtype)).reshape(shape)


def built(value: Any) -> Any:
    """Return the value to save for a JSON value."""
    if isinstance(value, dict) and len(value) == 1 and next(iter(value)).startswith("$"):
        ((tag, content),) = value.items()
        made = {
            "$array": lambda: tensor(*content),
            "$tuple": lambda: tuple(built(child) for child in content),
            "$complex": lambda: complex(*content),
            "$bytes": lambda: bytes.fromhex(content),
            "$float": lambda: float(content),
        }
        return made[tag]()
    if isinstance(value, dict):
        return {key: built(child) for key, child in value.items()}
    return [built(child) for child in value] if isinstance(value, list) else value


EVERY_DTYPE = {dtype: array(dtype, (2, 3)) for dtype in DTYPES} | {
    "scalar": array("float32"),
    "empty": array("float32", (0, 2)),
}
TRAINING = {
    "model": {
        "layers": [{"weight": array("float32", (3, 4)), "bias": array("float32", (3,), 7)}, {"odd.key": array("int64")}]
    },
    "optimizer": {
        "state": {"0": {"exp_avg": array("bfloat16", (3, 4), 50), "step": array("float32", (), 9)}},
        "param_groups": [{"lr": 0.1, "betas": {"$tuple": [0.9, 0.999]}, "params": [0, 1], "name": None, "fused": True}],
    },
    "data": {"state": {"$bytes": "00ff10"}, "seed": -(2**70), "text": "größe\n", "c": {"$complex": [1.0, -2.0]}},
    "best": {"$float": "nan"},
}  # fmt: skip
ROWS = {
    "by_rows": array("float32", (5, 3)),
    "by_columns": array("int32", (2, 5), 40),
    "whole": array("float64", (2,)),
    "step": 3,
}


def save(state: Any, path: Path, **options: Any) -> None:
    storage = dcp.FileSystemWriter(path, sync_files=False, **options)
    dcp.save(built(state), storage_writer=storage, no_dist=True)


def in_two_processes(work: Any, path: Path) -> None:
    """Run a function in a job of two processes, with a mesh of both."""
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(functools.partial(_process, work, path, f"file://{directory}/store"), nprocs=2, join=True)


def _process(work: Any, path: Path, store: str, rank: int) -> None:
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    state = built(ROWS)
    placements = {"by_rows": [Shard(0)], "by_columns": [Shard(1)], "whole": [Replicate()]}
    work(
        {name: distribute_tensor(state[name], mesh, placed) for name, placed in placements.items()} | {"step": 3}, path
    )
    dist.destroy_process_group()


def _save_together(state: Any, path: Path) -> None:
    dcp.save(state, checkpoint_id=str(path))


def _save_apart(state: Any, path: Path) -> None:
    dcp.save(state, checkpoint_id=str(path), use_collectives=False)


def _save_for_hugging_face(state: Any, path: Path) -> None:
    del state["step"]
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(str(path), save_distributed=True))


def _save_ours(state: Any, path: Path) -> None:
    from ckptcore_torch.store_coordinator import StoreCoordinator

    store = dist.distributed_c10d._get_default_store()
    context = ckptcore.Context(
        job=ckptcore.context.JobOptions(coordinator=StoreCoordinator(store, rank=dist.get_rank(), size=2))
    )
    with fixed_saves():
        ckptcore.save(path, state, layout="dcp", context=context)


@golden
def plain(path: Path) -> Any:
    save(EVERY_DTYPE, path)
    return {"tree": EVERY_DTYPE, "torch_loads": True}


@golden
def nested(path: Path) -> Any:
    save(TRAINING, path)
    return {"tree": TRAINING}


@golden
def zstd(path: Path) -> Any:
    save(TRAINING, path, _extensions=[ZStandard()])
    return {"tree": TRAINING}


@golden
def file_per_item(path: Path) -> Any:
    save(TRAINING, path, single_file_per_rank=False)
    return {"tree": TRAINING}


@golden
def two_processes(path: Path) -> Any:
    in_two_processes(_save_together, path)
    return {"tree": ROWS, "torch_loads": True}


@golden
def two_processes_apart(path: Path) -> Any:
    in_two_processes(_save_apart, path)
    return {"tree": ROWS}


@golden
def hugging_face_shards(path: Path) -> Any:
    in_two_processes(_save_for_hugging_face, path)
    return {"tree": {name: value for name, value in ROWS.items() if name != "step"}}


@golden
def step_of_several(path: Path) -> Any:
    parts = {
        "model": {"w": array("float32", (2, 2))},
        "optimizer": {"state": {"w": {"exp_avg": array("float32", (2, 2), 5)}}},
    }
    for name, part in parts.items():
        save(part, path / name)
    (path / "extra_state").mkdir()
    ranks = {f"extra_state_rank_{rank}.pt": {"rng": array("uint8", (4,), rank), "step": 100} for rank in range(2)}
    for name, value in ranks.items():
        torch.save(built(value), path / "extra_state" / name)
    torch.save(built({"last_epoch": 3}), path / "scheduler.pt")
    return {"checkpointables": {**parts, "extra_state": ranks, "scheduler.pt": {"last_epoch": 3}}}


@golden
def torch_files(path: Path) -> Any:
    path.mkdir()
    torch.save(built(TRAINING), path / "zip.pt")
    torch.save(built(TRAINING), path / "legacy.pt", _use_new_zipfile_serialization=False)
    return {"files": {"zip.pt": TRAINING, "legacy.pt": TRAINING}}


@golden
def ours(path: Path) -> Any:
    tree = {"dtypes": EVERY_DTYPE, "training": TRAINING}
    with fixed_saves():
        ckptcore.save(path, built(tree), layout="dcp")
    return {"tree": tree}


@golden
def ours_two_processes(path: Path) -> Any:
    in_two_processes(_save_ours, path)
    return {"tree": ROWS, "torch_loads": True}


def versions(path: Path) -> dict[str, str]:
    root = path / "checkpoint.json"
    if not root.exists():
        return {"torch": torch.__version__}
    said = json.loads(root.read_text())
    return {"torch": torch.__version__, **said["writer"], "format": str(said["version"])}


def main() -> None:
    warnings.simplefilter("ignore")
    os.chdir(HERE)  # DCP writes the given path into the checkpoint
    for name in sys.argv[1:] or MADE:
        path = Path(name)
        shutil.rmtree(path, ignore_errors=True)
        told = MADE[name](path)
        text = json.dumps({"written_with": versions(path), **told}, indent=1)
        Path(f"{name}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
