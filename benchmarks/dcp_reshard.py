"""Loads on another mesh than that of the save, under torchrun, compared with torch.distributed.checkpoint.

The state is 16 matrices of 2048 x 2048 bfloat16, 0.13 GB, in the page cache. Bytes read are counted by the
system for each process (``rchar`` in ``/proc/self/io``). A round takes as long as the slowest process.
"""

from __future__ import annotations

import statistics
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard

import ckptcore
from benchmarks.alternating import Contender
from benchmarks.in_jobs import joined_rows, joined_times, measure_rank, torchrun
from benchmarks.report import Row
from benchmarks.setting import Setting

_MATRICES: Final = 16
_SIDE: Final = 2048
_MOST_READ: Final = 1.1
"""Target: at most this many bytes are read for each requested byte."""


@dataclass(frozen=True, slots=True)
class MeshShape:
    """Number of parts of the rows and of the columns. Each process has one part."""

    rows: int
    columns: int

    @property
    def size(self) -> int:
        """Number of processes."""
        return self.rows * self.columns

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}"


@dataclass(frozen=True, slots=True)
class ReshardCase:
    """A mesh that saves and one that loads. The target applies if requested boxes are contiguous in the stored data."""

    saved: MeshShape
    loaded: MeshShape
    contiguous: bool = True


CASES: Final = [
    ReshardCase(MeshShape(4, 1), MeshShape(2, 1)),
    ReshardCase(MeshShape(4, 1), MeshShape(1, 1)),
    ReshardCase(MeshShape(2, 1), MeshShape(4, 1)),
    ReshardCase(MeshShape(3, 1), MeshShape(2, 1)),
    ReshardCase(MeshShape(1, 4), MeshShape(1, 2)),
    ReshardCase(MeshShape(2, 2), MeshShape(2, 1)),
    ReshardCase(MeshShape(1, 2), MeshShape(1, 4), contiguous=False),
]


def rows(setting: Setting) -> Iterator[Row]:
    """Save in each mesh, load in others, and compare times and bytes read."""
    side = setting.side(_SIDE)
    for case in CASES[: setting.count(len(CASES))]:
        saved = setting.directory / str(case.saved)
        if not saved.exists():
            saved.mkdir()
            _launch(case.saved, "save", saved, saved, side, 0)
        results = setting.directory / f"{case.saved}-{case.loaded}"
        results.mkdir()
        _launch(case.loaded, "load", saved, results, side, setting.rounds)
        read = {name: statistics.median(of_one.nbytes_read) for name, of_one in joined_times(results).items()}
        needed = _MATRICES * side * side * 2
        for row in joined_rows(f"dcp: {case.saved} loaded as {case.loaded}", results, nbytes=needed, targets={}):
            share = read[row.contender] / needed
            noted = replace(row, note=f"{share:.3f} bytes read for each byte")
            if case.contiguous and row.contender != "dcp.load":
                noted = replace(noted, target=f"at most {_MOST_READ} read", reached=share <= _MOST_READ)
            yield noted


def _launch(mesh: MeshShape, task: str, directory: Path, results: Path, side: int, rounds: int) -> None:
    arguments = (task, mesh.rows, mesh.columns, directory, results, side, rounds)
    torchrun(mesh.size, "benchmarks.dcp_reshard", *arguments)


def _state(mesh: DeviceMesh, value: int, side: int) -> dict[str, Any]:
    placements: list[Placement] = [Shard(0), Shard(1)]
    shape = torch.Size((side, side))
    rank = dist.get_rank()
    at = divmod(rank, mesh.size(1))
    extents = [_extent(side, mesh.size(axis), at[axis]) for axis in range(2)]
    return {
        f"layers.{number}.weight": DTensor.from_local(
            torch.full(extents, value + number, dtype=torch.bfloat16),
            mesh,
            placements,
            run_check=False,
            shape=shape,
            stride=(side, 1),
        )
        for number in range(_MATRICES)
    }


def _extent(side: int, parts: int, number: int) -> int:
    step = -(-side // parts)
    return max(0, min(side, (number + 1) * step) - number * step)


def _load(mesh: DeviceMesh, directory: Path, results: Path, side: int, rounds: int) -> None:
    target = _state(mesh, 0, side)

    def contender(name: str, load: Callable[[], object]) -> Contender:
        def zero() -> None:
            for tensor in target.values():
                tensor.to_local().zero_()

        def check(_: object) -> None:
            for layer, tensor in enumerate(target.values()):
                assert bool((tensor.to_local() == 1 + layer).all()), (name, layer)

        return Contender(name, load, zero, check)

    contenders = [
        contender("ckptcore.load_into", lambda: ckptcore.load_into(directory / "ckptcore", target)),
        contender("dcp.load", lambda: dcp_load(target, checkpoint_id=directory / "torch")),
        contender("ckptcore.load_into of torch's", lambda: ckptcore.load_into(directory / "torch", target)),
    ]
    measure_rank(contenders, rounds, results, rank=dist.get_rank(), barrier=dist.barrier)


def main(task: str, rows_: str, columns: str, directory: str, results: str, side: str, rounds: str) -> None:
    """Save or measure in one process of a job."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        mesh = init_device_mesh("cpu", (int(rows_), int(columns)))
        if task == "save":
            state = _state(mesh, 1, int(side))
            dcp_save(state, checkpoint_id=Path(directory) / "torch")
            context = ckptcore.Context(durability="none")
            ckptcore.save(Path(directory) / "ckptcore", state, layout="dcp", context=context)
        else:
            _load(mesh, Path(directory), Path(results), int(side), int(rounds))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
