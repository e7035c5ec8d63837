"""The layout dcp against torch.distributed.checkpoint, at its own format: the same tensors, saved and loaded by both in turn."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import ckptcore
from benchmarks.alternating import Contender
from benchmarks.cases import Case, Clearing, write_raw
from benchmarks.dcp_metadata import dcp_metadata_cases

__all__ = ["dcp_large_cases", "dcp_small_cases"]

_CHUNKS = 100_000
"""Of the metadata that is merged, written and read: as many tensors as a large model has on a few hundred accelerators."""
_FULL = ckptcore.Context()
_FAST = ckptcore.Context(durability="none")


class _Torch:
    """torch.distributed.checkpoint in one process, quiet."""

    def __init__(self) -> None:
        warnings.filterwarnings("ignore", module="torch")

    def save(self, location: Path, state: dict[str, Any]) -> None:
        """With its defaults: one file, one thread, synced."""
        save(state, storage_writer=FileSystemWriter(location), no_dist=True)

    def save_fast(self, location: Path, state: dict[str, Any]) -> None:
        """With the settings that are fastest here: a file for each item, two threads, nothing synced."""
        writer = FileSystemWriter(location, single_file_per_rank=False, sync_files=False, thread_count=2)
        save(state, storage_writer=writer, no_dist=True)

    def load(self, location: Path, target: dict[str, Any]) -> None:
        """In place, as it always does."""
        load(target, checkpoint_id=location, no_dist=True)


def _targets(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else 0 for name, value in state.items()}


def dcp_large_cases(directory: Path, state: dict[str, torch.Tensor]) -> Sequence[Case]:
    """Saving and loading one large state."""
    peer = _Torch()
    theirs, ours, written = directory / "dcp", directory / "ckptcore-dcp", directory / "dcp-raw"
    prepare = Clearing(theirs, ours, written)
    their_ready, ready = directory / "ready-torch-dcp", directory / "ready-dcp"
    peer.save(their_ready, state)
    ckptcore.save(ready, state, layout="dcp", context=_FAST)
    target = _targets(state)
    views = [np.asarray(tensor.view(torch.int16)).reshape(-1) for tensor in state.values()]
    total = sum(view.nbytes for view in views)
    return [
        Case(
            "dcp: save",
            [
                Contender("dcp.save", lambda: peer.save(theirs, state), prepare),
                Contender(
                    "ckptcore.save, dcp", lambda: ckptcore.save(ours, state, layout="dcp", context=_FULL), prepare
                ),
                Contender("raw pwrite + fdatasync", lambda: write_raw(written, views, total, durable=True), prepare),
            ],
            2.0,
        ),
        Case(
            "dcp: save, not durable",
            [
                Contender("dcp.save, fastest settings", lambda: peer.save_fast(theirs, state), prepare),
                Contender(
                    "ckptcore.save, dcp", lambda: ckptcore.save(ours, state, layout="dcp", context=_FAST), prepare
                ),
            ],
            1.2,
        ),
        Case(
            "dcp: load",
            [
                Contender("dcp.load", lambda: peer.load(their_ready, target)),
                Contender("ckptcore.load_into", lambda: ckptcore.load_into(ready, target)),
                Contender("ckptcore.load_into of torch's", lambda: ckptcore.load_into(their_ready, target)),
                Contender("ckptcore.load", lambda: ckptcore.load(ready, target)),
            ],
            4.0,
        ),
    ]


def dcp_small_cases(directory: Path, state: Mapping[str, torch.Tensor]) -> Iterator[Case]:
    """1000 tensors of 16 floats, and as many Python integers; then metadata of very many chunks, made when it is its turn."""
    peer = _Torch()
    integers: dict[str, Any] = {f"count.{number}": number for number in range(len(state))}
    for name, part in (("tensors", dict(state)), ("integers", integers)):
        yield from _small(directory, name, part, peer)
    yield from dcp_metadata_cases(directory, _CHUNKS)


def _small(directory: Path, name: str, state: dict[str, Any], peer: _Torch) -> Sequence[Case]:
    theirs, ours = directory / f"dcp-{name}", directory / f"ckptcore-dcp-{name}"
    prepare = Clearing(theirs, ours)
    their_ready, ready = directory / f"ready-torch-{name}", directory / f"ready-dcp-{name}"
    peer.save(their_ready, state)
    ckptcore.save(ready, state, layout="dcp", context=_FAST)
    target = _targets(state)
    return [
        Case(
            f"dcp: save 1000 {name}",
            [
                Contender("dcp.save", lambda: peer.save(theirs, state), prepare),
                Contender(
                    "ckptcore.save, dcp", lambda: ckptcore.save(ours, state, layout="dcp", context=_FULL), prepare
                ),
            ],
            5.0,
        ),
        Case(
            f"dcp: load 1000 {name}",
            [
                Contender("dcp.load", lambda: peer.load(their_ready, target)),
                Contender("ckptcore.load", lambda: ckptcore.load(ready, target)),
                Contender("ckptcore.load of torch's", lambda: ckptcore.load(their_ready, target)),
            ],
            5.0,
        ),
    ]
