"""Loading what processes of one mesh saved in those of another, under torchrun, beside torch.distributed.checkpoint.

16 matrices of 4096 x 4096 bfloat16, half a GB. Counted is what the system says that a process read (``rchar`` in ``/proc/self/io``),
for both libraries alike, files in the page cache. The two load in turn; a round takes as long as the slowest process.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard

import ckptcore

__all__ = ["CASES", "Mesh", "ReshardCase", "rows"]

_MATRICES: Final = 16
_SIDE: Final = 4096
_ROUNDS: Final = 3
_MOST_READ: Final = 1.1
"""The target: bytes read for each byte that is wanted."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """Into how many parts rows and columns are cut, a process for each part."""

    rows: int
    columns: int

    @property
    def size(self) -> int:
        """How many processes."""
        return self.rows * self.columns

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}"


@dataclass(frozen=True, slots=True)
class ReshardCase:
    """A mesh that saves and one that loads; the target is compared where what is wanted lies together in what was saved."""

    saved: Mesh
    loaded: Mesh
    lies_together: bool = True


CASES: Final = [
    ReshardCase(Mesh(4, 1), Mesh(2, 1)),
    ReshardCase(Mesh(4, 1), Mesh(1, 1)),
    ReshardCase(Mesh(2, 1), Mesh(4, 1)),
    ReshardCase(Mesh(3, 1), Mesh(2, 1)),
    ReshardCase(Mesh(1, 4), Mesh(1, 2)),
    ReshardCase(Mesh(2, 2), Mesh(2, 1)),
    ReshardCase(Mesh(1, 2), Mesh(1, 4), lies_together=False),
]


def rows(scratch: Path) -> Iterator[tuple[str, bool]]:
    """Rows to print, and whether each reached its target."""
    for case in CASES:
        directory = scratch / f"reshard-{case.saved}"
        if not directory.exists():
            directory.mkdir()
            _launch(case.saved, "save", directory, directory)
        results = scratch / f"reshard-{case.saved}-{case.loaded}"
        results.mkdir()
        _launch(case.loaded, "load", directory, results)
        ranks = [json.loads(path.read_text()) for path in sorted(results.iterdir())]
        needed = sum(rank["needed"] for rank in ranks)
        slowest = {
            name: [max(rank["seconds"][name][number] for rank in ranks) for number in range(_ROUNDS)]
            for name in ranks[0]["seconds"]
        }
        for name, seconds in slowest.items():
            read = sum(statistics.median(rank["read"][name]) for rank in ranks) / needed
            ratio = statistics.median([first / this for first, this in zip(slowest["dcp.load"], seconds, strict=True)])
            row = f"{f'dcp: {case.saved} loaded as {case.loaded}':42} {name:36} {statistics.median(seconds) * 1e3:7.0f} ms {ratio:7.2f}"
            row += f"  read {read:.3f} of what is wanted"
            if name == "dcp.load" or not case.lies_together:
                yield row, True
            else:
                yield f"{row}, {_MOST_READ} {'reached' if read <= _MOST_READ else 'MISSED'}", read <= _MOST_READ


def _launch(mesh: Mesh, task: str, directory: Path, results: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(mesh.size)]
    command += ["-m", "benchmarks.dcp_reshard", task, str(mesh.rows), str(mesh.columns), str(directory), str(results)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])


def _bytes_read() -> int:
    for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == "rchar":
            return int(value)
    raise RuntimeError("the system does not say how much a process read")


def _state(mesh: DeviceMesh, value: int) -> dict[str, Any]:
    placements: list[Placement] = [Shard(0), Shard(1)]
    shape = torch.Size((_SIDE, _SIDE))
    rank = dist.get_rank()
    at = divmod(rank, mesh.size(1))
    extents = [_extent(mesh.size(axis), at[axis]) for axis in range(2)]
    return {
        f"layers.{number}.weight": DTensor.from_local(
            torch.full(extents, value + number, dtype=torch.bfloat16),
            mesh,
            placements,
            run_check=False,
            shape=shape,
            stride=(_SIDE, 1),
        )
        for number in range(_MATRICES)
    }


def _extent(parts: int, number: int) -> int:
    step = -(-_SIDE // parts)
    return max(0, min(_SIDE, (number + 1) * step) - number * step)


def _load(mesh: DeviceMesh, directory: Path, results: Path) -> None:
    target = _state(mesh, 0)
    loads: dict[str, Callable[[], object]] = {
        "dcp.load": lambda: dcp_load(target, checkpoint_id=directory / "torch"),
        "ckptcore.load_into": lambda: ckptcore.load_into(directory / "ckptcore", target),
        "ckptcore.load_into of torch's": lambda: ckptcore.load_into(directory / "torch", target),
    }
    read: dict[str, list[int]] = {name: [] for name in loads}
    seconds: dict[str, list[float]] = {name: [] for name in loads}
    for number in range(_ROUNDS + 1):  # the first is not counted: it reads modules, too
        for name, load in loads.items():
            for tensor in target.values():
                tensor.to_local().zero_()
            dist.barrier()
            before, start = _bytes_read(), time.perf_counter()
            load()
            taken, after = time.perf_counter() - start, _bytes_read()
            for layer, tensor in enumerate(target.values()):
                assert bool((tensor.to_local() == 1 + layer).all()), (name, layer)
            if number:
                seconds[name].append(taken)
                read[name].append(after - before)
    needed = sum(tensor.to_local().nbytes for tensor in target.values())
    found = {"needed": needed, "read": read, "seconds": seconds}
    (results / f"{dist.get_rank()}.json").write_text(json.dumps(found), encoding="utf-8")


def main(task: str, rows_: str, columns: str, directory: str, results: str) -> None:
    """What each process of a job does."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        mesh = init_device_mesh("cpu", (int(rows_), int(columns)))
        if task == "save":
            state = _state(mesh, 1)
            dcp_save(state, checkpoint_id=Path(directory) / "torch")
            context = ckptcore.Context(durability="none")
            ckptcore.save(Path(directory) / "ckptcore", state, layout="dcp", context=context)
        else:
            _load(mesh, Path(directory), Path(results))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
