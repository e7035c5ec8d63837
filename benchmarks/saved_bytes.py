"""The cost of copying the bytes that a save writes.

A blocking save copies each block before it hashes and writes it. Two references with the same number of threads do
nothing else: one copies, hashes and writes each block, and the other hashes and writes it in place. `save_async` copies
`jax.Array`s of the CPU backend before it returns; its reference is `save_async` with a handler that takes views.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

import jax
import numpy as np
from ckptcore_jax import JaxLeafHandler
from xxhash import xxh3_64_intdigest

import ckptcore
from benchmarks.alternating import Case, Contender, compare
from benchmarks.report import Row
from benchmarks.setting import Setting
from ckptcore.model import BLOCK_BYTES, HostArray
from ckptcore.runtime import runtime_of

_ARRAYS: Final = 16
_FAST: Final = ckptcore.Context(durability="none")
_MOST_COST: Final = 1.1
"""Limit of the time of a save, relative to hashing and writing in place."""


def rows(setting: Setting) -> Iterator[Row]:
    """Measure a blocking save to the page cache, and how long an asynchronous one blocks."""
    count = setting.count(1_000_000_000) // _ARRAYS // 4
    arrays = [np.random.default_rng(number).random(count, np.float32) for number in range(_ARRAYS)]
    with ThreadPoolExecutor(runtime_of(_FAST).io_threads.count) as threads:
        yield from compare(_blocking(setting.directory, arrays, threads), setting.rounds)
    yield from compare(_asynchronous(setting.directory, arrays), setting.rounds)


def _blocking(directory: Path, arrays: Sequence[HostArray], threads: ThreadPoolExecutor) -> Case:
    ours, raw = directory / "ours", directory / "raw"

    def clear(_: object = None) -> None:
        shutil.rmtree(ours, ignore_errors=True)
        raw.unlink(missing_ok=True)

    def write(take: Callable[[memoryview], memoryview]) -> None:
        _write(raw, arrays, threads, take)

    contenders = [
        Contender("ckptcore.save", lambda: ckptcore.save(ours, list(arrays), context=_FAST), clear, clear),
        Contender("copy, hash and write", partial(write, _copied), clear, clear),
        Contender("hash and write in place", partial(write, lambda block: block), clear, clear, target=1 / _MOST_COST),
    ]
    return Case("save to the page cache", contenders, sum([array.nbytes for array in arrays]), writes=True)


def _asynchronous(directory: Path, arrays: Sequence[HostArray]) -> Case:
    path = directory / "asynchronous"
    state = [jax.numpy.array(array, copy=True).block_until_ready() for array in arrays]

    def clear(_: object = None) -> None:
        shutil.rmtree(path, ignore_errors=True)

    def contender(name: str, *, copy: bool) -> Contender:
        context = ckptcore.Context(
            durability="none", plugins=ckptcore.context.PluginOptions(handlers={jax.Array: JaxLeafHandler(copy=copy)})
        )
        return Contender(name, lambda: _blocked_seconds(path, state, context), clear, clear, float)

    contenders = [contender("ckptcore.save_async", copy=True), contender("JaxLeafHandler(copy=False)", copy=False)]
    nbytes = sum([array.nbytes for array in arrays])
    return Case("save_async of jax on the CPU blocks", contenders, nbytes, writes=True)


_memory = threading.local()


def _copied(block: memoryview) -> memoryview:
    """Copy a block to memory of this thread."""
    memory: np.ndarray[tuple[int], np.dtype[np.uint8]] | None = getattr(_memory, "block", None)
    if memory is None:
        memory = _memory.block = np.empty(BLOCK_BYTES, np.uint8)
    memory[: len(block)] = np.frombuffer(block, np.uint8)
    return memory[: len(block)].data


def _write(
    path: Path, arrays: Sequence[HostArray], threads: ThreadPoolExecutor, take: Callable[[memoryview], memoryview]
) -> None:
    """Hash and write all arrays to one file, block by block."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        os.posix_fallocate(descriptor, 0, max(1, sum([array.nbytes for array in arrays])))
        blocks: list[tuple[int, memoryview]] = []
        offset = 0
        for array in arrays:
            view = array.view(np.uint8).data
            blocks += [
                (offset + start, view[start : start + BLOCK_BYTES]) for start in range(0, len(view), BLOCK_BYTES)
            ]
            offset += len(view)

        def write(block: tuple[int, memoryview]) -> int:
            data = take(block[1])
            digest = xxh3_64_intdigest(data)
            os.pwrite(descriptor, data, block[0])
            return digest

        list(threads.map(write, blocks))
    finally:
        os.close(descriptor)


def _blocked_seconds(path: Path, state: Sequence[jax.Array], context: ckptcore.Context) -> float:
    start = time.perf_counter()
    handle = ckptcore.save_async(path, list(state), context=context)
    seconds = time.perf_counter() - start
    handle.result()
    return seconds
