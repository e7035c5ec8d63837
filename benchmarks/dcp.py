"""The layout dcp compared with torch.distributed.checkpoint: the same tensors, saved and loaded by both in turn."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import ckptcore
from benchmarks.alternating import Case, Contender, compare
from benchmarks.local import Clearing, write_raw
from benchmarks.report import Row
from benchmarks.setting import Setting
from benchmarks.states import large_state, small_state

_FULL = ckptcore.Context()
_FAST = ckptcore.Context(durability="none")


class TorchDcp:
    """torch.distributed.checkpoint in one process, without warnings."""

    def __init__(self) -> None:
        warnings.filterwarnings("ignore", module="torch")

    def save(self, location: Path, state: dict[str, Any]) -> None:
        """Save with the defaults: one file, one thread, synced."""
        save(state, storage_writer=FileSystemWriter(location), no_dist=True)

    def save_fast(self, location: Path, state: dict[str, Any]) -> None:
        """Save with the fastest settings: one file per item, two threads, not synced."""
        writer = FileSystemWriter(location, single_file_per_rank=False, sync_files=False, thread_count=2)
        save(state, storage_writer=writer, no_dist=True)

    def load(self, location: Path, target: dict[str, Any]) -> None:
        """Load in place."""
        load(target, checkpoint_id=location, no_dist=True)


def rows(setting: Setting) -> Iterator[Row]:
    """Measure many small tensors, as many Python integers, and one large state."""
    peer = TorchDcp()
    small: Mapping[str, Any] = small_state(setting.count(1000))
    integers = {f"count.{number}": number for number in range(len(small))}
    for name, part in (("tensors", small), ("integers", integers)):
        for case in _small_cases(setting.directory, name, part, peer):
            yield from compare(case, setting.rounds)
    for case in _large_cases(setting.directory, large_state(1.5 * setting.scale), peer):
        yield from compare(case, setting.rounds)


def _targets(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else 0 for name, value in state.items()}


def _large_cases(directory: Path, state: dict[str, torch.Tensor], peer: TorchDcp) -> Sequence[Case]:
    theirs, ours, written = directory / "dcp", directory / "ckptcore-dcp", directory / "dcp-raw"
    clear = Clearing(theirs, ours, written)
    their_ready, ready = directory / "ready-torch-dcp", directory / "ready-dcp"
    peer.save(their_ready, state)
    ckptcore.save(ready, state, layout="dcp", context=_FAST)
    target = _targets(state)
    views = [np.asarray(tensor.view(torch.int16)).reshape(-1) for tensor in state.values()]
    total = sum(view.nbytes for view in views)
    save = partial(ckptcore.save, ours, state, layout="dcp")
    return [
        Case(
            "dcp: save",
            [
                Contender("ckptcore.save, dcp", lambda: save(context=_FULL), clear),
                Contender("dcp.save", lambda: peer.save(theirs, state), clear, target=2.0),
                Contender("raw pwrite + fdatasync", lambda: write_raw(written, views, total, durable=True), clear),
            ],
            total,
            writes=True,
        ),
        Case(
            "dcp: save, not durable",
            [
                Contender("ckptcore.save, dcp", lambda: save(context=_FAST), clear),
                Contender("dcp.save, fastest settings", lambda: peer.save_fast(theirs, state), clear, target=1.2),
            ],
            total,
            writes=True,
        ),
        Case(
            "dcp: load",
            [
                Contender("ckptcore.load_into", lambda: ckptcore.load_into(ready, target)),
                Contender("dcp.load", lambda: peer.load(their_ready, target), target=4.0),
                Contender("ckptcore.load_into of torch's", lambda: ckptcore.load_into(their_ready, target)),
                Contender("ckptcore.load", lambda: ckptcore.load(ready, target)),
            ],
            total,
        ),
    ]


def _small_cases(directory: Path, name: str, state: Mapping[str, Any], peer: TorchDcp) -> Sequence[Case]:
    theirs, ours = directory / f"dcp-{name}", directory / f"ckptcore-dcp-{name}"
    clear = Clearing(theirs, ours)
    their_ready, ready = directory / f"ready-torch-{name}", directory / f"ready-dcp-{name}"
    held = dict(state)
    peer.save(their_ready, held)
    ckptcore.save(ready, held, layout="dcp", context=_FAST)
    target = _targets(held)
    return [
        Case(
            f"dcp: save {len(held)} {name}",
            [
                Contender("ckptcore.save, dcp", lambda: ckptcore.save(ours, held, layout="dcp", context=_FULL), clear),
                Contender("dcp.save", lambda: peer.save(theirs, held), clear, target=5.0),
            ],
            writes=True,
        ),
        Case(
            f"dcp: load {len(held)} {name}",
            [
                Contender("ckptcore.load", lambda: ckptcore.load(ready, target)),
                Contender("dcp.load", lambda: peer.load(their_ready, target), target=5.0),
                Contender("ckptcore.load of torch's", lambda: ckptcore.load(their_ready, target)),
            ],
        ),
    ]
