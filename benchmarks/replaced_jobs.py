"""The replacements for torch.distributed.checkpoint, Orbax v1 and safetensors, compared with the originals, in jobs.

The state is 8 matrices of 4096 x 4096 bfloat16, 256 MiB whose elements do not compress. Each process holds an equal
part of the rows; with safetensors it has a file of its own. The replacements save durably. Of the originals, only
torch.distributed.checkpoint syncs its files. A round takes as long as the slowest process.
"""

from __future__ import annotations

import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.alternating import Contender
from benchmarks.in_jobs import jax_job, joined_rows, measure_rank, torchrun
from benchmarks.jobs import elements, jax_matrices
from benchmarks.report import Row
from benchmarks.setting import Setting

_MATRICES: Final = 8
_SIDE: Final = 4096
_PROCESSES: Final = (1, 4)

_Case = Mapping[str, Callable[[Path], object]]
"""Calls to measure, by the name of the contender. Each save gets a directory that does not exist yet. All loads get the
checkpoint that the original library saved."""


def rows(setting: Setting) -> Iterator[Row]:
    """Measure saves and loads of jobs of one process and of four."""
    side = setting.side(_SIDE)
    for processes in _PROCESSES:
        for library, launch in (("dcp", torchrun), ("safetensors", torchrun), ("orbax", jax_job)):
            directory = setting.directory / f"{library}-{processes}"
            directory.mkdir()
            launch(processes, "benchmarks.replaced_jobs", library, directory, side, setting.rounds)
            for results in sorted(directory.glob("* results")):
                name = results.name.removesuffix(" results")
                yield from joined_rows(
                    f"{library} replaced: {name}, {processes} process{'es' * (processes > 1)}",
                    results,
                    nbytes=_MATRICES * side * side * 2,
                    targets={},
                )
            shutil.rmtree(directory)


class _Measurements:
    """Measures the cases of a library in one process of a job."""

    def __init__(self, directory: Path, rounds: int, rank: int, barrier: Callable[[], object]) -> None:
        self._directory, self._rounds, self._rank, self._barrier = directory, rounds, rank, barrier

    def saves(self, name: str, case: _Case) -> None:
        """Measure saves. The checkpoints are removed."""

        def contender(number: int, save: Callable[[Path], object]) -> Contender:
            location = self._directory / f"saved-{number}"

            def remove(_: object) -> None:
                if self._rank == 0:
                    shutil.rmtree(location)

            return Contender(list(case)[number], partial(save, location), after=remove)

        self._measure(name, [contender(number, save) for number, save in enumerate(case.values())], writes=True)

    def loads(self, save: Callable[[Path], object], case: _Case) -> None:
        """Measure loads of one checkpoint, which the original library saves."""
        location = self._directory / "ready"
        save(location)
        self._barrier()
        self._measure("load", [Contender(name, partial(load, location)) for name, load in case.items()])

    def _measure(self, name: str, contenders: Sequence[Contender], *, writes: bool = False) -> None:
        results = self._directory / f"{name} results"
        results.mkdir(exist_ok=True)
        measure_rank(contenders, self._rounds, results, rank=self._rank, barrier=self._barrier, writes=writes)


def _of_each(modules: Mapping[str, Any], call: Callable[[Any, Path], object]) -> _Case:
    """Return the call for each library, by its name."""
    return {name: partial(call, module) for name, module in modules.items()}


def _torch(library: str, directory: Path, side: int, rounds: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        rank, processes = dist.get_rank(), dist.get_world_size()
        local = {
            f"layers.{number}.weight": torch.from_numpy(elements(rank, number, side, processes)).view(torch.bfloat16)
            for number in range(_MATRICES)
        }
        measured = _Measurements(directory, rounds, rank, dist.barrier)
        if library == "dcp":
            _dcp(measured, local, processes)
        else:
            _safetensors(measured, local, rank)
    finally:
        dist.destroy_process_group()


def _dcp(measured: _Measurements, local: Mapping[str, Any], processes: int) -> None:
    import torch
    import torch.distributed.checkpoint as original
    from ckptcore_integrations import torch_dcp as replacement
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (processes,))

    def sharded(parts: Mapping[str, Any]) -> dict[str, Any]:
        return {name: DTensor.from_local(part, mesh, [Shard(0)], run_check=False) for name, part in parts.items()}

    state = sharded(local)
    target = sharded({name: torch.zeros_like(part) for name, part in local.items()})

    def save(module: Any, location: Path) -> object:
        return module.save(state, checkpoint_id=location)

    def save_async(module: Any, location: Path) -> object:
        return module.async_save(state, checkpoint_id=location).result()

    def load(module: Any, location: Path) -> object:
        return module.load(target, checkpoint_id=location)

    modules = {"replacement": replacement, "torch.distributed.checkpoint": original}
    measured.saves("save", _of_each(modules, save))
    measured.saves("async_save, until its result", _of_each(modules, save_async))
    measured.loads(partial(save, original), _of_each(modules, load))


def _safetensors(measured: _Measurements, local: Mapping[str, Any], rank: int) -> None:
    import safetensors.torch as original
    from ckptcore_integrations.safetensors import torch as replacement

    def save(module: Any, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        module.save_file(dict(local), directory / f"{rank}.safetensors")

    def load(module: Any, directory: Path) -> object:
        # Both map the file into memory; a copy reads the bytes.
        return [tensor.clone() for tensor in module.load_file(directory / f"{rank}.safetensors").values()]

    modules = {"replacement": replacement, "safetensors": original}
    measured.saves("save", _of_each(modules, save))
    measured.loads(partial(save, original), _of_each(modules, load))


def _orbax(directory: Path, side: int, rounds: int, port: str, processes: int, rank: int) -> None:
    import jax
    from ckptcore_integrations import orbax_v1 as replacement
    from jax.experimental import multihost_utils
    from orbax.checkpoint import v1 as original  # type: ignore[import-untyped]  # it has no type stubs

    state = jax_matrices(_MATRICES, side, port, processes, rank)
    abstract = jax.tree.map(original.arrays.to_shape_dtype_struct, state)

    def save(module: Any, location: Path) -> object:
        return module.save(location, state)

    def save_async(module: Any, location: Path) -> object:
        return module.save_async(location, state).result()

    def load(module: Any, location: Path) -> object:
        return jax.block_until_ready(module.load(location, abstract))  # type: ignore[no-untyped-call]  # untyped in JAX

    modules = {"replacement": replacement, "Orbax v1": original}
    measured = _Measurements(directory, rounds, rank, lambda: multihost_utils.sync_global_devices("round"))
    measured.saves("save", _of_each(modules, save))
    measured.saves("save_async, until its result", _of_each(modules, save_async))
    measured.loads(partial(save, original), _of_each(modules, load))
    jax.distributed.shutdown()  # type: ignore[no-untyped-call]  # untyped in JAX


def main(library: str, directory: str, side: str, rounds: str, *job: str) -> None:
    """Measure in one process of a job."""
    warnings.simplefilter("ignore")
    if library == "orbax":
        port, processes, rank = job
        _orbax(Path(directory), int(side), int(rounds), port, int(processes), int(rank))
    else:
        _torch(library, Path(directory), int(side), int(rounds))


if __name__ == "__main__":
    main(*sys.argv[1:])
