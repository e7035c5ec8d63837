"""What is measured, each against the library a user would pick instead and the raw limit of the machine."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors.torch
import torch

import ckptcore
from benchmarks.alternating import Contender, Outcome, compare, huge

__all__ = ["Case", "Measured", "async_cases", "large_cases", "small_cases"]

State = dict[str, torch.Tensor]

_FAST = ckptcore.Context(durability="none")
_FULL = ckptcore.Context()
_TRUSTING = ckptcore.Context(verify=False)
_PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class Case:
    """Something that is measured, and what is asked of it.

    Attributes:
        name: what is done.
        contenders: the peer first, which is the reference of every ratio.
        target: the ratio that ckptcore is to reach; None where it stands for comparison only.
    """

    name: str
    contenders: Sequence[Contender]
    target: float | None


@dataclass(frozen=True, slots=True)
class Measured:
    """The outcome of a case."""

    case: Case
    outcomes: Sequence[Outcome]


def measure(case: Case, rounds: int, memory: int) -> Measured:
    """Run a case, with bytes of memory at hand."""
    return Measured(case, compare(case.contenders, rounds=rounds, memory=memory))


def large_cases(directory: Path, state: State) -> Sequence[Case]:
    """Saving and loading one large state."""
    ours, theirs, raw = directory / "ours", directory / "theirs.safetensors", directory / "raw"
    views = [tensor.view(torch.int16).numpy().reshape(-1) for tensor in state.values()]
    total = sum(view.nbytes for view in views)
    prepare = Clearing(ours, theirs, raw)
    ready = directory / "ready"
    ckptcore.save(ready, state, context=_FAST)
    file = ready / "model.safetensors"
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    touched = np.zeros(total, np.uint8)
    spread = [tensor.view(torch.int16).numpy().reshape(-1).view(np.uint8) for tensor in target.values()]
    return [
        Case(
            "save, not durable",
            [
                Contender("safetensors.torch.save_file", lambda: safetensors.torch.save_file(state, theirs), prepare),
                Contender("ckptcore.save", lambda: ckptcore.save(ours, state, context=_FAST), prepare),
                Contender("raw pwrite, preallocated", lambda: write_raw(raw, views, total), prepare),
            ],
            1.0,
        ),
        Case(
            "save, durable",
            [
                Contender("save_file + fsync", lambda: save_and_sync(state, theirs), prepare),
                Contender("ckptcore.save", lambda: ckptcore.save(ours, state, context=_FULL), prepare),
                Contender("raw pwrite + fdatasync", lambda: write_raw(raw, views, total, durable=True), prepare),
            ],
            1.4,
        ),
        Case(
            "load into fresh memory",
            [
                Contender("load_file, pages copied", lambda: copied(safetensors.torch.load_file(file))),
                Contender("ckptcore.load", lambda: ckptcore.load(ready, target)),
                Contender("ckptcore.load (NumPy)", lambda: ckptcore.load(ready)),
                Contender("raw preadv, huge pages, 2 threads", lambda: read_raw(file, huge(total))),
            ],
            3.0,
        ),
        Case(
            "load into existing memory",
            [
                Contender("raw preadv, 2 threads", lambda: read_spread(file, spread)),
                Contender("ckptcore.load_into", lambda: ckptcore.load_into(ready, target)),
                Contender("raw preadv, one buffer", lambda: read_raw(file, touched.data)),
            ],
            0.75,
        ),
        Case(
            "load into existing memory, not verified",
            [
                Contender("raw preadv, 2 threads", lambda: read_spread(file, spread)),
                Contender(
                    "ckptcore.load_into, verify=False", lambda: ckptcore.load_into(ready, target, context=_TRUSTING)
                ),
            ],
            0.9,
        ),
    ]


def small_cases(directory: Path, state: State) -> Sequence[Case]:
    """Saving and loading many small tensors."""
    ours, theirs = directory / "ours", directory / "theirs.safetensors"
    prepare = Clearing(ours, theirs)
    ready, file = directory / "ready-small", directory / "ready-small.safetensors"
    ckptcore.save(ready, state, context=_FAST)
    safetensors.torch.save_file(state, file)
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    return [
        Case(
            "save 1000 small, not durable",
            [
                Contender("safetensors.torch.save_file", lambda: safetensors.torch.save_file(state, theirs), prepare),
                Contender("ckptcore.save", lambda: ckptcore.save(ours, state, context=_FAST), prepare),
            ],
            0.2,
        ),
        Case(
            "save 1000 small, durable",
            [
                Contender("save_file + fsync", lambda: save_and_sync(state, theirs), prepare),
                Contender("ckptcore.save", lambda: ckptcore.save(ours, state, context=_FULL), prepare),
            ],
            0.2,
        ),
        Case(
            "load 1000 small",
            [
                Contender("load_file, pages copied", lambda: copied(safetensors.torch.load_file(file))),
                Contender("ckptcore.load", lambda: ckptcore.load(ready, target)),
                Contender("ckptcore.load (NumPy)", lambda: ckptcore.load(ready)),
            ],
            0.2,
        ),
    ]


def async_cases(directory: Path, state: State) -> Sequence[Case]:
    """How long `save_async` blocks its caller."""
    ours = directory / "ours"
    views = [tensor.view(torch.int16).numpy().reshape(-1) for tensor in state.values()]
    handles: list[ckptcore.SaveHandle] = []
    kept = [np.empty_like(view) for view in views]
    for view in kept:
        view[:] = 0
    reused = ckptcore.Context(durability="none")
    ckptcore.save_async(ours, state, overwrite=True, context=reused).result()

    def settle() -> None:
        for handle in handles:
            handle.result()
        handles.clear()
        shutil.rmtree(ours, ignore_errors=True)

    def first() -> None:
        handles.append(ckptcore.save_async(ours, state, context=ckptcore.Context(durability="none")))

    def again() -> None:
        handles.append(ckptcore.save_async(ours, state, context=reused))

    return [
        Case(
            "save_async blocks, first save",
            [
                Contender("memcpy into fresh pages", lambda: [view.copy() for view in views], settle),
                Contender("ckptcore.save_async", first, settle),
            ],
            1 / 1.2,
        ),
        Case(
            "save_async blocks, later saves",
            [
                Contender("memcpy into touched pages", lambda: copy_all(kept, views), settle),
                Contender("ckptcore.save_async", again, settle),
            ],
            1 / 1.2,
        ),
    ]


class Clearing:
    """Removes what a run wrote, and waits until the disk is idle."""

    def __init__(self, *paths: Path) -> None:
        self._paths = paths

    def __call__(self) -> None:
        for path in self._paths:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        os.sync()


def save_and_sync(state: State, path: Path) -> None:
    """What a careful user of safetensors does: the file, its bytes and its name on disk."""
    safetensors.torch.save_file(state, path)
    for name in (path, path.parent):
        descriptor = os.open(name, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def write_raw(path: Path, views: Sequence[np.ndarray], total: int, *, durable: bool = False) -> None:
    """Write arrays one after the other, as fast as the system calls allow."""
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


def read_spread(path: Path, arrays: Sequence[np.ndarray]) -> None:
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


def copied(state: State) -> State:
    """Tensors in memory of their own, as a program has them that goes on after the file is gone."""
    return {name: tensor.clone() for name, tensor in state.items()}


def copy_all(targets: Sequence[np.ndarray], sources: Sequence[np.ndarray]) -> None:
    """A memcpy of every array."""
    for target, source in zip(targets, sources, strict=True):
        np.copyto(target, source)
