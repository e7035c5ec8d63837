"""Four processes that save one state together, beside torch.distributed.checkpoint and Orbax, each under its own launcher.

32 matrices of 4096 x 4096 bfloat16 with elements that do not compress, a GB, of which each process holds a quarter of the rows. All are durable when a save returns. The
contenders save in turn, each over nothing; a round takes as long as the slowest process.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

import ckptcore
from benchmarks.alternating import outcomes_of_ranks
from ckptcore.model import HostArray

__all__ = ["rows"]

_PROCESSES: Final = 4
_MATRICES: Final = 32
_SIDE: Final = 4096
_ROUNDS: Final = 5


def rows(scratch: Path) -> Iterator[tuple[str, bool]]:
    """Rows to print, and whether each is at least as fast as its peer, which comes first."""
    for launcher, start in (("torchrun", _torchrun), ("jax.distributed", _jax_processes)):
        directory = scratch / f"jobs-{launcher}"
        (directory / "results").mkdir(parents=True)
        _end(start(directory))
        nbytes = _MATRICES * _SIDE * _SIDE * 2
        case = f"jobs: {_PROCESSES} processes of {launcher} save"
        for found in outcomes_of_ranks(directory / "results"):
            ok = found.ratio >= 1  # that of the reference is 1
            row = f"{case:42} {found.name:36} {found.median * 1e3:7.0f} ms {found.ratio:7.2f}"
            yield f"{row}  {nbytes / found.median / 1e9:.2f} GB/s{'' if ok else ', 1 MISSED'}", ok
        shutil.rmtree(directory)


def _torchrun(directory: Path) -> list[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(_PROCESSES)]
    return [_start([*command, "-m", "benchmarks.jobs", "torch", str(directory)])]


def _jax_processes(directory: Path) -> list[subprocess.Popen[bytes]]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    command = [sys.executable, "-m", "benchmarks.jobs", "jax", str(directory), port]
    return [_start([*command, str(rank)]) for rank in range(_PROCESSES)]


def _start(command: list[str]) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(command, env=environment, cwd=Path(__file__).parents[1], stderr=subprocess.PIPE)


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        _, told = process.communicate()
        if process.returncode:
            raise RuntimeError(told.decode(errors="replace")[-4000:])


def _measure(
    directory: Path,
    rank: int,
    barrier: Callable[[], object],
    saves: Mapping[str, Callable[[Path], object]],
) -> None:
    seconds: dict[str, list[float]] = {name: [] for name in saves}
    for number in range(_ROUNDS + 1):  # the first is not counted: it reads modules, too
        for place, (name, save) in enumerate(saves.items()):
            location = directory / f"{place}-{number}"
            barrier()
            start = time.perf_counter()
            save(location)
            taken = time.perf_counter() - start
            barrier()
            if rank == 0:
                shutil.rmtree(location)
            if number:
                seconds[name].append(taken)
    (directory / "results" / f"{rank}.json").write_text(json.dumps(seconds), encoding="utf-8")


def _elements(rank: int, number: int) -> HostArray:
    """A process's part of a matrix, as the bits of its elements."""
    return np.random.default_rng([rank, number]).integers(0, 1 << 15, (_SIDE // _PROCESSES, _SIDE), np.int16)


def _torch(directory: Path) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        mesh = init_device_mesh("cpu", (_PROCESSES,))
        local = [torch.from_numpy(_elements(dist.get_rank(), number)) for number in range(_MATRICES)]
        state = {
            f"layers.{number}.weight": DTensor.from_local(part.view(torch.bfloat16), mesh, [Shard(0)], run_check=False)
            for number, part in enumerate(local)
        }
        saves: dict[str, Callable[[Path], object]] = {
            "dcp.save": lambda location: dcp_save(state, checkpoint_id=location),
            "ckptcore.save, dcp": lambda location: ckptcore.save(location, state, layout="dcp"),
            "ckptcore.save, safetensors": lambda location: ckptcore.save(location, state),
        }
        _measure(directory, dist.get_rank(), dist.barrier, saves)
    finally:
        dist.destroy_process_group()


def _jax(directory: Path, port: str, rank: int) -> None:
    import jax
    import jax.numpy as jnp
    import orbax.checkpoint as ocp  # type: ignore[import-untyped]  # it has no type stubs
    from jax.experimental import multihost_utils
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    config: Any = jax.config
    config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=_PROCESSES, process_id=rank)
    spec: Any = PartitionSpec
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), spec("x"))
    shape = (_SIDE, _SIDE)

    def matrix(number: int) -> jax.Array:
        part = _elements(rank, number).view(jnp.bfloat16)
        return jax.make_array_from_callback(shape, sharding, lambda index: part)

    state = {f"layers.{number}.weight": matrix(number) for number in range(_MATRICES)}
    orbax: Any = ocp.PyTreeCheckpointer()
    saves: dict[str, Callable[[Path], object]] = {
        "orbax PyTreeCheckpointer.save": lambda location: orbax.save(location, state),
        "ckptcore.save, ocdbt": lambda location: ckptcore.save(location, state, layout="ocdbt"),
        "ckptcore.save, zarr3": lambda location: ckptcore.save(location, state, layout="zarr3"),
    }
    _measure(directory, rank, lambda: multihost_utils.sync_global_devices("round"), saves)
    jax.distributed.shutdown()  # type: ignore[no-untyped-call]  # JAX says no types here


def main(framework: str, directory: str, *rest: str) -> None:
    """What each process of a job does."""
    warnings.simplefilter("ignore")
    if framework == "torch":
        _torch(Path(directory))
    else:
        _jax(Path(directory), rest[0], int(rest[1]))


if __name__ == "__main__":
    main(*sys.argv[1:])
