"""Saves by a job of four processes, compared with torch.distributed.checkpoint and Orbax.

The state is 16 matrices of 4096 x 4096 bfloat16, 0.5 GB whose elements do not compress. Each process holds a quarter of
the rows. All saves are durable, and write to a directory that does not exist. A round takes as long as the slowest
process.
"""

from __future__ import annotations

import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

import ckptcore
from benchmarks.alternating import Contender
from benchmarks.in_jobs import jax_job, joined_rows, measure_rank, torchrun
from benchmarks.report import Row
from benchmarks.setting import Setting
from ckptcore.model import HostArray

_PROCESSES: Final = 4
_MATRICES: Final = 16
_SIDE: Final = 4096
_TARGETS: Final = {"dcp.save": 1.0, "orbax PyTreeCheckpointer.save": 1.0}


def rows(setting: Setting) -> Iterator[Row]:
    """Measure saves of jobs of torchrun and of jax.distributed."""
    side, processes = setting.side(_SIDE), setting.count(_PROCESSES, least=2)
    for launcher, launch in (("torchrun", _torchrun), ("jax.distributed", _jax_processes)):
        directory = setting.directory / launcher
        (directory / "results").mkdir(parents=True)
        launch(directory, side, processes, setting.rounds)
        yield from joined_rows(
            f"jobs: {processes} processes of {launcher} save",
            directory / "results",
            nbytes=_MATRICES * side * side * 2,
            targets=_TARGETS,
        )
        shutil.rmtree(directory)


def _torchrun(directory: Path, side: int, processes: int, rounds: int) -> None:
    torchrun(processes, "benchmarks.jobs", "torch", directory, side, rounds)


def _jax_processes(directory: Path, side: int, processes: int, rounds: int) -> None:
    jax_job(processes, "benchmarks.jobs", "jax", directory, side, rounds)


def _measure(
    directory: Path, rounds: int, rank: int, barrier: Callable[[], object], saves: dict[str, Callable[[Path], object]]
) -> None:
    def contender(name: str, save: Callable[[Path], object], location: Path) -> Contender:
        def clear(_: object) -> None:
            if rank == 0:
                shutil.rmtree(location)

        return Contender(name, lambda: save(location), after=clear)

    contenders = [contender(name, save, directory / str(place)) for place, (name, save) in enumerate(saves.items())]
    measure_rank(contenders, rounds, directory / "results", rank=rank, barrier=barrier, writes=True)


def elements(rank: int, number: int, side: int, processes: int) -> HostArray:
    """Return a process's part of a matrix, as the bits of its elements."""
    return np.random.default_rng([rank, number]).integers(0, 1 << 15, (side // processes, side), np.int16)


def _torch(directory: Path, side: int, rounds: int) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        rank, processes = dist.get_rank(), dist.get_world_size()
        mesh = init_device_mesh("cpu", (processes,))
        local = [torch.from_numpy(elements(rank, number, side, processes)) for number in range(_MATRICES)]
        state = {
            f"layers.{number}.weight": DTensor.from_local(part.view(torch.bfloat16), mesh, [Shard(0)], run_check=False)
            for number, part in enumerate(local)
        }
        saves: dict[str, Callable[[Path], object]] = {
            "ckptcore.save, dcp": lambda location: ckptcore.save(location, state, layout="dcp"),
            "dcp.save": lambda location: dcp_save(state, checkpoint_id=location),
            "ckptcore.save, safetensors": lambda location: ckptcore.save(location, state),
        }
        _measure(directory, rounds, rank, dist.barrier, saves)
    finally:
        dist.destroy_process_group()


def jax_matrices(count: int, side: int, port: str, processes: int, rank: int) -> dict[str, Any]:
    """Join a job of JAX, and return matrices of bfloat16 whose rows are sharded over its processes."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    config: Any = jax.config
    config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=processes, process_id=rank)
    spec: Any = PartitionSpec
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), spec("x"))

    def matrix(number: int) -> jax.Array:
        part = elements(rank, number, side, processes).view(jnp.bfloat16)
        return jax.make_array_from_callback((side, side), sharding, lambda index: part)

    return {f"layers.{number}.weight": matrix(number) for number in range(count)}


def _jax(directory: Path, side: int, rounds: int, port: str, processes: int, rank: int) -> None:
    import jax
    import orbax.checkpoint as ocp  # type: ignore[import-untyped]  # it has no type stubs
    from jax.experimental import multihost_utils

    state = jax_matrices(_MATRICES, side, port, processes, rank)
    orbax: Any = ocp.PyTreeCheckpointer()
    saves: dict[str, Callable[[Path], object]] = {
        "ckptcore.save, ocdbt": lambda location: ckptcore.save(location, state, layout="ocdbt"),
        "orbax PyTreeCheckpointer.save": lambda location: orbax.save(location, state),
        "ckptcore.save, zarr3": lambda location: ckptcore.save(location, state, layout="zarr3"),
    }
    _measure(directory, rounds, rank, lambda: multihost_utils.sync_global_devices("round"), saves)
    jax.distributed.shutdown()  # type: ignore[no-untyped-call]  # untyped in JAX


def main(framework: str, directory: str, side: str, rounds: str, *rest: str) -> None:
    """Measure in one process of a job."""
    warnings.simplefilter("ignore")
    if framework == "torch":
        _torch(Path(directory), int(side), int(rounds))
    else:
        port, processes, rank = rest
        _jax(Path(directory), int(side), int(rounds), port, int(processes), int(rank))


if __name__ == "__main__":
    main(*sys.argv[1:])
