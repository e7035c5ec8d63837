"""The replacement for safetensors and safetensors itself: saves, loads, openings and slices, in one process.

Both write the same bytes. Saves are durable: the file of safetensors is synced after its save, as in `peers`. Rows
without durability compare what both do without a sync. safetensors maps PyTorch tensors into memory, and so does the
replacement: loads of PyTorch copy the tensors to measure the bytes, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from ckptcore_integrations import safetensors as replaced
from ckptcore_integrations.safetensors import numpy as replaced_numpy
from ckptcore_integrations.safetensors import torch as replaced_torch

import ckptcore
from benchmarks.alternating import Case, Contender, compare
from benchmarks.local import Clearing, sync
from benchmarks.report import Row
from benchmarks.setting import Setting

_QUICK = ckptcore.Context(durability="none")
_ROWS = 16


def rows(setting: Setting) -> Iterator[Row]:
    """Measure one big tensor and many small ones, in PyTorch and NumPy."""
    side = setting.count(1 << 13, least=64)
    states: Mapping[str, Mapping[str, torch.Tensor]] = {
        "one tensor": {"weight": torch.rand(side, side)},
        f"{setting.count(1000, least=8)} small": {
            f"layers.{number}.weight": torch.full((64, 64), float(number))
            for number in range(setting.count(1000, least=8))
        },
    }
    for kind, tensors in states.items():
        arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
        for case in _cases(setting.directory, kind, dict(tensors), arrays):
            yield from compare(case, setting.rounds)


def _cases(
    directory: Path, kind: str, tensors: dict[str, torch.Tensor], arrays: Mapping[str, np.ndarray[Any, Any]]
) -> Iterator[Case]:
    nbytes = sum(array.nbytes for array in arrays.values())
    mine, theirs, ready = directory / "ours", directory / "theirs", directory / "ready"
    clear = Clearing(mine, theirs)

    def saving(ours: Callable[[], object], library: Callable[[], object], name: str) -> Case:
        contenders = [Contender("replacement", ours, clear), Contender("safetensors", library, clear)]
        return Case(f"safetensors: {name}, {kind}", contenders, nbytes=nbytes, writes=True)

    def reading(read: Callable[[Any], object], modules: tuple[Any, Any], name: str, nbytes: int = nbytes) -> Case:
        contenders = [
            Contender(who, partial(read, module))
            for who, module in zip(("replacement", "safetensors"), modules, strict=True)
        ]
        return Case(f"safetensors: {name}, {kind}", contenders, nbytes=nbytes)

    def durable() -> None:
        safetensors.torch.save_file(tensors, theirs)
        sync(theirs, directory)

    yield saving(lambda: replaced_torch.save_file(tensors, mine), durable, "save, durable")
    yield saving(
        lambda: replaced_torch.save_file(tensors, mine, context=_QUICK),
        lambda: safetensors.torch.save_file(tensors, theirs),
        "save, not synced",
    )
    safetensors.torch.save_file(tensors, ready)
    first = next(iter(tensors))

    def copied(module: Any) -> object:
        return [tensor.clone() for tensor in module.load_file(ready).values()]

    def first_slice(module: Any) -> object:
        with module.safe_open(ready, "pt") as file:
            return file.get_slice(first)[:_ROWS]

    yield reading(copied, (replaced_torch, safetensors.torch), "load and copy, PyTorch")
    yield reading(lambda module: module.load_file(ready), (replaced_numpy, safetensors.numpy), "load, NumPy")
    yield reading(first_slice, (replaced, safetensors), "open, one slice", nbytes=0)
