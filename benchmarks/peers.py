"""One state saved and loaded by ckptcore and the libraries that users would choose instead, for the chart."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

import ckptcore
from benchmarks.alternating import Case, Contender, compare
from benchmarks.dcp import TorchDcp
from benchmarks.local import Clearing, State, load_and_copy, save_and_sync, sync
from benchmarks.orbax import Orbax, jax_state
from benchmarks.report import Row
from benchmarks.setting import Setting
from benchmarks.states import large_state

SAVE: Final = "peers: save, durable"
LOAD: Final = "peers: load into fresh memory"


def rows(setting: Setting) -> Iterator[Row]:
    """Measure every library with its own format and default options, on the same arrays."""
    state = large_state(1.5 * setting.scale)
    for case in _cases(setting.directory, state):
        yield from compare(case, setting.rounds)


def _cases(directory: Path, state: State) -> Sequence[Case]:
    dcp, orbax, arrays = TorchDcp(), Orbax(), jax_state(state)
    total = sum(tensor.nbytes for tensor in state.values())
    ours, file, pickled = directory / "ckptcore", directory / "model.safetensors", directory / "model.pt"
    parts, zarr = directory / "dcp", directory / "orbax"
    clear = Clearing(ours, file, pickled, parts, zarr)
    ready = directory / "ready"
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    saves: dict[str, Any] = {
        "ckptcore": lambda: ckptcore.save(ours, state),
        "safetensors": lambda: save_and_sync(state, file),
        "torch.save": lambda: _save_pickled(state, pickled),
        "PyTorch DCP": lambda: dcp.save(parts, state),
        "Orbax v1": lambda: orbax.save(zarr, arrays, compressed=True),
    }
    for save in saves.values():
        save()
    ready.mkdir()
    for path in (ours, file, pickled, parts, zarr):
        shutil.move(path, ready / path.name)
    loads: dict[str, Any] = {
        "ckptcore": lambda: ckptcore.load(ready / ours.name, target),
        "safetensors": lambda: load_and_copy(ready / file.name),
        "torch.save": lambda: torch.load(ready / pickled.name),
        "PyTorch DCP": lambda: dcp.load(ready / parts.name, {name: torch.empty_like(t) for name, t in state.items()}),
        "Orbax v1": lambda: orbax.load(ready / zarr.name),
    }
    case = partial(Case, nbytes=total)
    return [
        case(SAVE, [Contender(name, run, clear) for name, run in saves.items()], writes=True),
        case(LOAD, [Contender(name, run) for name, run in loads.items()]),
    ]


def _save_pickled(state: State, path: Path) -> None:
    """Save with torch.save, and make the file and its name durable."""
    torch.save(state, path)
    sync(path, path.parent)
