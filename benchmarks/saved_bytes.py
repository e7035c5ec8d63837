"""What it costs that a save owns the bytes it writes: ``python -m benchmarks.saved_bytes [--gigabytes 1] [--rounds 7]``.

A blocking save copies each block before it hashes and writes it. Two references do no more than that, with as many threads: one
copies too, the other takes the blocks from where the arrays are. An asynchronous save of `jax.Array`s of the CPU backend copies
them before it returns; its reference keeps views. Contenders take turns in each round, and all dirty pages are written back
before each run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
from ckptcore_jax import JaxLeafHandler
from xxhash import xxh3_64_intdigest

import ckptcore
from ckptcore.model import BLOCK_BYTES, HostArray

__all__ = ["rows"]

_ARRAYS = 16


def rows(directory: Path, nbytes: int, rounds: int) -> Iterator[str]:
    """Measure, and give a line for each contender.

    Args:
        directory: an empty directory. Files of two states are in it at a time.
        nbytes: of the state.
        rounds: timed runs of each contender; one more is not counted.
    """
    arrays = [np.random.default_rng(number).random(nbytes // _ARRAYS // 4, np.float32) for number in range(_ARRAYS)]
    with ThreadPoolExecutor(ckptcore.Context().io_threads.count) as threads:
        yield from _compared(
            "save, page cache",
            {
                "ckptcore": lambda: _save(directory / "save", arrays),
                "copy, hash and write": lambda: _write(directory / "raw", arrays, threads, _copied),
                "hash and write in place": lambda: _write(directory / "raw", arrays, threads, lambda block: block),
            },
            nbytes,
            rounds,
        )
    in_jax = [jax.numpy.array(array, copy=True).block_until_ready() for array in arrays]
    contexts = {
        name: ckptcore.Context(durability="none", handlers={jax.Array: JaxLeafHandler(copy=copy)})
        for name, copy in (("ckptcore", True), ("JaxLeafHandler(copy=False)", False))
    }

    def blocked(context: ckptcore.Context) -> Callable[[], float]:
        return lambda: _blocked(directory / "async", in_jax, context)

    yield from _compared(
        "save_async, jax on the CPU, blocked",
        {name: blocked(context) for name, context in contexts.items()},
        nbytes,
        rounds,
    )


def _compared(case: str, contenders: Mapping[str, Callable[[], float]], nbytes: int, rounds: int) -> Iterator[str]:
    """Time contenders in turn; the ratio of a line is to the last contender, round by round."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name in sorted(contenders, reverse=number % 2 == 1):
            os.sync()
            seconds[name].append(contenders[name]())
    reference = list(seconds.values())[-1][1:]
    for name, found in seconds.items():
        counted = found[1:]
        ratio = statistics.median([one / other for one, other in zip(counted, reference, strict=True)])
        median = statistics.median(counted)
        yield (
            f"{case:36} {name:28} {median * 1e3:9.1f} ms {nbytes / median / 1e9:6.2f} GB/s {ratio:6.2f} x the last"
            f" (least {min(counted) * 1e3:.1f} ms)"
        )


def _save(path: Path, arrays: Sequence[HostArray]) -> float:
    shutil.rmtree(path, ignore_errors=True)
    start = time.perf_counter()
    ckptcore.save(path, list(arrays), context=ckptcore.Context(durability="none"))
    return time.perf_counter() - start


_memory = threading.local()


def _copied(block: memoryview) -> memoryview:
    """The bytes of a block in memory of this thread."""
    memory: np.ndarray[tuple[int], np.dtype[np.uint8]] | None = getattr(_memory, "block", None)
    if memory is None:
        memory = _memory.block = np.empty(BLOCK_BYTES, np.uint8)
    memory[: len(block)] = np.frombuffer(block, np.uint8)
    return memory[: len(block)].data


def _write(
    path: Path,
    arrays: Sequence[HostArray],
    threads: ThreadPoolExecutor,
    taken: Callable[[memoryview], memoryview],
) -> float:
    path.unlink(missing_ok=True)
    start = time.perf_counter()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        os.posix_fallocate(descriptor, 0, max(1, sum([array.nbytes for array in arrays])))
        pieces: list[tuple[int, memoryview]] = []
        offset = 0
        for array in arrays:
            view = array.view(np.uint8).data
            pieces += [
                (offset + begin, view[begin : begin + BLOCK_BYTES]) for begin in range(0, len(view), BLOCK_BYTES)
            ]
            offset += len(view)

        def write(piece: tuple[int, memoryview]) -> int:
            data = taken(piece[1])
            digest = xxh3_64_intdigest(data)
            os.pwrite(descriptor, data, piece[0])
            return digest

        list(threads.map(write, pieces))
    finally:
        os.close(descriptor)
    return time.perf_counter() - start


def _blocked(path: Path, arrays: Sequence[jax.Array], context: ckptcore.Context) -> float:
    shutil.rmtree(path, ignore_errors=True)
    start = time.perf_counter()
    handle = ckptcore.save_async(path, list(arrays), context=context)
    seconds = time.perf_counter() - start
    handle.result()
    return seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.saved_bytes", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds of each contender")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the state")
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help="where to write")
    options = parser.parse_args(arguments)
    scratch = Path(tempfile.mkdtemp(prefix=".bench-", dir=options.directory))
    try:
        for line in rows(scratch, int(options.gigabytes * 1e9), options.rounds):
            print(line, flush=True)
    finally:
        shutil.rmtree(scratch)
    return 0


if __name__ == "__main__":
    sys.exit(main())
