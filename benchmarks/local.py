"""Saves and loads on a local disk, compared with safetensors and the raw limit of the machine."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

import ckptcore
from benchmarks.alternating import Case, Contender, compare, huge
from benchmarks.report import Row
from benchmarks.setting import Setting
from benchmarks.states import large_state, small_state
from ckptcore.results import SaveHandle

State = dict[str, torch.Tensor]

_FAST = ckptcore.Context(durability="none")
_FULL = ckptcore.Context()
_TRUSTING = ckptcore.Context(io=ckptcore.context.IOOptions(verify=False))
_PIECE = 1 << 20


def rows(setting: Setting) -> Iterator[Row]:
    """Measure many small tensors, and one large state."""
    for case in _small_cases(setting.directory, small_state(setting.count(1000))):
        yield from compare(case, setting.rounds * 3)
    state = large_state(1.5 * setting.scale)
    for case in (*_large_cases(setting.directory, state), *_async_cases(setting.directory, state)):
        yield from compare(case, setting.rounds)


def _small_cases(directory: Path, state: State) -> Sequence[Case]:
    ours, theirs = directory / "ours", directory / "theirs.safetensors"
    clear = Clearing(ours, theirs)
    ready, file = directory / "ready-small", directory / "ready-small.safetensors"
    ckptcore.save(ready, state, context=_FAST)
    safetensors.torch.save_file(state, file)
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    count = len(state)
    return [
        Case(
            f"save {count} small, not durable",
            [
                Contender("ckptcore.save", lambda: ckptcore.save(ours, state, context=_FAST), clear),
                Contender("save_file", lambda: safetensors.torch.save_file(state, theirs), clear, target=0.2),
            ],
            writes=True,
        ),
        Case(
            f"save {count} small, durable",
            [
                Contender("ckptcore.save", lambda: ckptcore.save(ours, state, context=_FULL), clear),
                Contender("save_file + fsync", lambda: save_and_sync(state, theirs), clear, target=0.2),
            ],
            writes=True,
        ),
        Case(
            f"load {count} small",
            [
                Contender("ckptcore.load", lambda: ckptcore.load(ready, target)),
                Contender("load_file, pages copied", lambda: load_and_copy(file), target=0.2),
                Contender("ckptcore.load (NumPy)", lambda: ckptcore.load(ready)),
            ],
        ),
    ]


def _large_cases(directory: Path, state: State) -> Sequence[Case]:
    views = [tensor.view(torch.int16).numpy().reshape(-1) for tensor in state.values()]
    total = sum(view.nbytes for view in views)
    return [*_save_cases(directory, state, views, total), *_load_cases(directory, state, total)]


def _save_cases(directory: Path, state: State, views: Sequence[Any], total: int) -> Sequence[Case]:
    ours, theirs, raw = directory / "ours", directory / "theirs.safetensors", directory / "raw"
    clear = Clearing(ours, theirs, raw)
    save = partial(ckptcore.save, ours, state)
    write = partial(_write_and_sync, raw, views, total)
    return [
        Case(
            "save, not durable",
            [
                Contender("ckptcore.save", lambda: save(context=_FAST), clear),
                Contender("save_file", lambda: safetensors.torch.save_file(state, theirs), clear, target=1.0),
                Contender("raw pwrite, preallocated", lambda: write_raw(raw, views, total), clear),
            ],
            total,
            writes=True,
        ),
        Case(
            "save, durable",
            [
                Contender("ckptcore.save", lambda: save(context=_FULL), clear),
                Contender("save_file + fsync", lambda: save_and_sync(state, theirs), clear, target=1.4),
                Contender("raw pwrite + fdatasync", write, clear),
            ],
            total,
            writes=True,
        ),
        Case(
            "overwrite, durable",  # replaces the files of the previous round, or of the warm-up round
            [
                Contender("ckptcore.save, overwrite=True", lambda: save(overwrite=True, context=_FULL)),
                Contender("save_file + fsync, then rename", lambda: _replace_and_sync(state, theirs)),
                Contender("raw pwrite + fdatasync", write),
            ],
            total,
            writes=True,
        ),
    ]


def _load_cases(directory: Path, state: State, total: int) -> Sequence[Case]:
    ready = directory / "ready"
    ckptcore.save(ready, state, context=_FAST)
    file = ready / "model.safetensors"
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    touched = np.zeros(total, np.uint8)
    spread = [tensor.view(torch.int16).numpy().reshape(-1).view(np.uint8) for tensor in target.values()]
    return [
        Case(
            "load into fresh memory",
            [
                Contender("ckptcore.load", lambda: ckptcore.load(ready, target)),
                Contender("load_file, pages copied", lambda: load_and_copy(file), target=3.0),
                Contender("ckptcore.load (NumPy)", lambda: ckptcore.load(ready)),
                Contender("raw preadv, huge pages, 2 threads", lambda: read_raw(file, huge(total))),
            ],
            total,
        ),
        Case(
            "load into existing memory",
            [
                Contender("ckptcore.load_into", lambda: ckptcore.load_into(ready, target)),
                Contender("raw preadv, 2 threads", lambda: _read_spread(file, spread), target=0.75),
                Contender("raw preadv, one buffer", lambda: read_raw(file, touched.data)),
            ],
            total,
        ),
        Case(
            "load into existing memory, not verified",
            [
                Contender("ckptcore.load_into", lambda: ckptcore.load_into(ready, target, context=_TRUSTING)),
                Contender("raw preadv, 2 threads", lambda: _read_spread(file, spread), target=0.9),
            ],
            total,
        ),
    ]


def _async_cases(directory: Path, state: State) -> Sequence[Case]:
    """Return cases that measure for how long `save_async` blocks its caller."""
    ours = directory / "ours"
    views = [tensor.view(torch.int16).numpy().reshape(-1) for tensor in state.values()]
    total = sum(view.nbytes for view in views)
    targets = [np.zeros_like(view) for view in views]
    for view in targets:
        view[:] = 0
    reused = ckptcore.Context(durability="none")
    clear = Clearing(ours)

    def save(context: ckptcore.Context) -> SaveHandle:
        return ckptcore.save_async(ours, state, context=context)

    def finish(handle: SaveHandle) -> None:
        handle.result()

    return [
        Case(
            "save_async blocks, first save",
            [
                Contender(
                    "ckptcore.save_async", lambda: save(ckptcore.Context(durability="none")), clear, after=finish
                ),
                Contender("memcpy into fresh pages", lambda: [view.copy() for view in views], clear, target=1 / 1.2),
            ],
            total,
            writes=True,
        ),
        Case(
            "save_async blocks, later saves",
            [
                Contender("ckptcore.save_async", lambda: save(reused), clear, after=finish),
                Contender("memcpy into touched pages", lambda: _copy_all(targets, views), clear, target=1 / 1.2),
            ],
            total,
            writes=True,
        ),
    ]


class Clearing:
    """A callable that removes the given files and directories."""

    def __init__(self, *paths: Path) -> None:
        self._paths = paths

    def __call__(self) -> None:
        for path in self._paths:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def save_and_sync(state: State, path: Path) -> None:
    """Save with safetensors, and make the file and its name durable."""
    safetensors.torch.save_file(state, path)
    sync(path, path.parent)


def _replace_and_sync(state: State, path: Path) -> None:
    """Replace a file of safetensors so that a crash leaves the old one or the new one."""
    fresh = path.with_suffix(".new")
    safetensors.torch.save_file(state, fresh)
    sync(fresh)
    fresh.replace(path)
    sync(path.parent)


def sync(*paths: Path) -> None:
    for name in paths:
        descriptor = os.open(name, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def _write_and_sync(path: Path, views: Sequence[Any], total: int) -> None:
    write_raw(path, views, total, durable=True)


def write_raw(path: Path, views: Sequence[Any], total: int, *, durable: bool = False) -> None:
    """Write arrays to a preallocated file, one after the other, with plain system calls."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.posix_fallocate(descriptor, 0, total)
    offset = 0
    for view in views:
        data = view.data.cast("B")
        for start in range(0, len(data), 4 * _PIECE):
            offset += os.pwrite(descriptor, data[start : start + 4 * _PIECE], offset)
    if durable:
        os.fdatasync(descriptor)
    os.close(descriptor)


def read_raw(path: Path, buffer: memoryview) -> object:
    """Read a file into one buffer with two threads."""
    pieces = [(start, buffer[start : start + _PIECE]) for start in range(0, len(buffer), _PIECE)]
    _read_pieces(path, pieces)
    return buffer


def _read_spread(path: Path, arrays: Sequence[Any]) -> None:
    """Read a file into arrays one after the other with two threads."""
    pieces = []
    offset = 0
    for array in arrays:
        view = array.data
        for start in range(0, len(view), _PIECE):
            piece = view[start : start + _PIECE]
            pieces.append((offset, piece))
            offset += len(piece)
    _read_pieces(path, pieces)


def _read_pieces(path: Path, pieces: Sequence[tuple[int, memoryview]]) -> None:
    descriptor = os.open(path, os.O_RDONLY)

    def work(own: Sequence[tuple[int, memoryview]]) -> None:
        for offset, piece in own:
            os.preadv(descriptor, [piece], offset)

    half = len(pieces) // 2
    threads = [threading.Thread(target=work, args=(own,)) for own in (pieces[:half], pieces[half:])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(descriptor)


def load_and_copy(file: Path) -> State:
    """Load with safetensors, and copy the tensors so that they do not depend on the mapped file."""
    return {name: tensor.clone() for name, tensor in safetensors.torch.load_file(file).items()}


def _copy_all(targets: Sequence[Any], sources: Sequence[Any]) -> None:
    """Copy every array."""
    for target, source in zip(targets, sources, strict=True):
        np.copyto(target, source)
