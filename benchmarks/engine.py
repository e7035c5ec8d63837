"""The engine against the raw limits of memory and storage: alternating runs, medians, and ratios of pairs.

Run ``python benchmarks/engine.py [--mebibytes 1500] [--rounds 7] [--directory DIR]``.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ckptcore.builtin.local import open_local
from ckptcore.engine.memory import StagingMemory, StagingPool, allocate
from ckptcore.engine.reader import ObjectReader
from ckptcore.engine.recorder import ObjectRecorder
from ckptcore.engine.threads import IOThreads
from ckptcore.model import ArraySegment, ArraySpec, Box, BytesSegment, HostArray, ObjectRecord, Segment, TileRead
from ckptcore.protocols import StorageBackend, StorageOptions

_KEY = "model.safetensors"
_HEADER = 4096


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mebibytes", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--directory", type=Path, default=None)
    parser.add_argument("--only", default="", help="run only sections whose name contains this")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        bench = _Bench(Path(directory), options.rounds, options.only)
        bench.large(options.mebibytes << 20)
        bench.small(1000)


class _Bench:
    def __init__(self, directory: Path, rounds: int, only: str) -> None:
        self.directory = directory
        self.rounds = rounds
        self.only = only
        self.threads = IOThreads()
        self.storage: StorageBackend = open_local(str(directory / "checkpoint"), StorageOptions(durable=False))

    def large(self, nbytes: int) -> None:
        arrays = _transformer(nbytes)
        total = sum(array.nbytes for array in arrays)
        print(f"{len(arrays)} bfloat16 arrays, {total / 2**20:.0f} MiB; GiB/s")
        path = self.directory / "checkpoint" / _KEY
        records = {record.key: record for record in _write(self.storage, self.threads, arrays, checksums=True)}
        self._compare(
            "write, not durable",
            total,
            {
                "pwrite 1 thread": lambda: _raw_write(path.with_name("raw"), arrays),
                "engine": lambda: _write(self.storage, self.threads, arrays, checksums=True),
                "engine unchecked": lambda: _write(self.storage, self.threads, arrays, checksums=False),
                **_save_file(self.directory / "other.safetensors", arrays),
            },
        )
        path.with_name("raw").unlink(missing_ok=True)
        fresh = [ArraySpec(array.shape, "bfloat16") for array in arrays]
        self._compare(
            "load into fresh memory",
            total,
            {
                "preadv 2 threads": lambda: _raw_read(path, [allocate(spec) for spec in fresh], 2),
                "engine": lambda: self._read(records, [allocate(spec) for spec in fresh], verify=True),
                "engine unverified": lambda: self._read(records, [allocate(spec) for spec in fresh], verify=False),
                **_load_file(self.directory / "other.safetensors"),
            },
        )
        touched = [allocate(spec) for spec in fresh]
        for array in touched:
            array.reshape(-1).view(np.uint8)[::4096] = 1
        self._compare(
            "load into touched memory",
            total,
            {
                "preadv 1 thread": lambda: _raw_read(path, touched, 1),
                "preadv 2 threads": lambda: _raw_read(path, touched, 2),
                "engine": lambda: self._read(records, touched, verify=True),
                "engine unverified": lambda: self._read(records, touched, verify=False),
            },
        )
        self._read(records, touched, verify=True)
        for array, back in zip(arrays, touched, strict=True):
            assert np.array_equal(array.view(np.uint16), back.view(np.uint16))
        self._compare(
            "load columns of 4 shards",
            total,
            {
                "preadv 2 threads": lambda: _raw_read(path, touched, 2),
                "engine": lambda: self._read_columns(records, arrays, verify=True),
                "engine unverified": lambda: self._read_columns(records, arrays, verify=False),
            },
        )
        pool = StagingPool()
        self._compare(
            "stage a copy",
            total,
            {
                "memcpy fresh 1 thread": lambda: _copy_raw(arrays, [allocate(spec) for spec in fresh]),
                "memcpy touched 1 thread": lambda: _copy_raw(arrays, touched),
                "staging fresh": lambda: self._stage(StagingPool(), arrays),
                "staging again": lambda: self._stage(pool, arrays),
            },
        )

    def small(self, count: int) -> None:
        arrays = [np.full(16, number, np.float32) for number in range(count)]
        specs = [ArraySpec(array.shape, "float32") for array in arrays]
        records = {record.key: record for record in _write(self.storage, self.threads, arrays, checksums=True)}
        path = self.directory / "other.safetensors"
        print(f"{count} arrays of 16 floats; ms")
        save, load = _save_file(path, arrays), {}
        if save:
            save["safetensors"]()
            load = _load_file(path)
        pool = StagingPool()
        self._compare(
            "write small", None, {"engine": lambda: _write(self.storage, self.threads, arrays, checksums=True), **save}
        )
        self._compare(
            "read small",
            None,
            {"engine": lambda: self._read(records, [allocate(spec) for spec in specs], verify=True), **load},
        )
        self._compare("stage small", None, {"staging": lambda: self._stage(pool, arrays)})

    def _read(self, records: dict[str, ObjectRecord], targets: Sequence[HostArray], *, verify: bool) -> None:
        reader = ObjectReader(self.storage, records, self.threads, verify=verify)
        reads = []
        offset = _HEADER
        for number, target in enumerate(targets):
            box = Box.whole(target.shape)
            reads.append(TileRead(_KEY, offset, box, target.itemsize, ((number, box, target),)))
            offset += target.nbytes
        assert sum(1 for _ in reader.read_tiles(reads)) == len(targets)

    def _read_columns(self, records: dict[str, ObjectRecord], arrays: Sequence[HostArray], *, verify: bool) -> None:
        reader = ObjectReader(self.storage, records, self.threads, verify=verify)
        reads = []
        offset = _HEADER
        number = 0
        for array in arrays:
            targets = []
            for start in range(0, array.shape[-1], width := array.shape[-1] // 4):
                box = Box((*(0,) * (array.ndim - 1), start), (*array.shape[:-1], start + width))
                targets.append((number, box, allocate(ArraySpec(box.shape, "bfloat16"))))
                number += 1
            reads.append(TileRead(_KEY, offset, Box.whole(array.shape), array.itemsize, tuple(targets)))
            offset += array.nbytes
        assert sum(1 for _ in reader.read_tiles(reads)) == number

    def _stage(self, pool: StagingPool, arrays: Sequence[HostArray]) -> None:
        memory = StagingMemory(pool, self.threads)
        for copy in [memory.copy(array) for array in arrays]:
            copy.result()
        memory.close()

    def _compare(self, name: str, total: int | None, runs: dict[str, Callable[[], Any]]) -> None:
        if self.only not in name:
            return
        times: dict[str, list[float]] = {run: [] for run in runs}
        for number in range(self.rounds + 1):
            for run, function in runs.items():
                gc.collect()
                begin = time.perf_counter()
                function()
                if number:
                    times[run].append(time.perf_counter() - begin)
        print(f"  {name}")
        first = next(iter(runs))
        for run, seconds in times.items():
            ratio = statistics.median(a / b for a, b in zip(times[first], seconds, strict=True))
            median = statistics.median(seconds)
            speed = f"{total / median / 2**30:7.2f}" if total is not None else f"{median * 1e3:7.3f}"
            print(f"    {run:<26}{speed}   {ratio:5.2f} x {first}")


def _transformer(nbytes: int) -> list[HostArray]:
    generator = np.random.default_rng(0)
    arrays: list[HostArray] = []
    left = nbytes
    while left > 0:
        for shape in ((2048, 2048), (2048, 2048), (2048,), (8192, 2048), (2048, 8192)):
            memory = allocate(ArraySpec(shape, "bfloat16"))
            memory.reshape(-1).view(np.uint8)[...] = generator.integers(0, 255, memory.nbytes, np.uint8)
            arrays.append(memory)
            left -= memory.nbytes
    return arrays


def _write(
    storage: StorageBackend, threads: IOThreads, arrays: Sequence[HostArray], *, checksums: bool
) -> tuple[ObjectRecord, ...]:
    recorder = ObjectRecorder(storage, threads, checksums=checksums)
    segments: list[Segment] = [BytesSegment(bytes(_HEADER))]
    segments.extend([_segment(array) for array in arrays])
    recorder.write(_KEY, segments)
    return recorder.objects


def _segment(array: HostArray) -> ArraySegment:
    box = Box.whole(array.shape)
    return ArraySegment(box, array.itemsize, lambda: ((box, array),), lambda: None)


def _views(arrays: Sequence[HostArray]) -> list[memoryview]:
    return [memoryview(array.reshape(-1).view(np.uint8)) for array in arrays]  # type: ignore[arg-type]  # as in the engine


def _raw_read(path: Path, arrays: Sequence[HostArray], count: int) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    pieces: list[tuple[int, memoryview]] = []
    offset = _HEADER
    for view in _views(arrays):
        pieces.extend([(offset + start, view[start : start + (4 << 20)]) for start in range(0, len(view), 4 << 20)])
        offset += len(view)

    def work(number: int) -> None:
        for start, piece in pieces[number::count]:
            os.preadv(descriptor, [piece], start)

    others = [threading.Thread(target=work, args=(number,)) for number in range(1, count)]
    for other in others:
        other.start()
    work(0)
    for other in others:
        other.join()
    os.close(descriptor)


def _raw_write(path: Path, arrays: Sequence[HostArray]) -> None:
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    offset = _HEADER
    for view in _views(arrays):
        for start in range(0, len(view), 4 << 20):
            os.pwrite(descriptor, view[start : start + (4 << 20)], offset + start)
        offset += len(view)
    os.close(descriptor)


def _copy_raw(arrays: Sequence[HostArray], targets: Sequence[HostArray]) -> None:
    for array, target in zip(arrays, targets, strict=True):
        np.copyto(target.view(np.uint16), array.view(np.uint16))


def _save_file(path: Path, arrays: Sequence[HostArray]) -> dict[str, Callable[[], Any]]:
    try:
        import torch
        from safetensors.torch import save_file
    except ImportError:
        return {}
    tensors = {
        str(number): torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
        if array.dtype == ml_dtypes.bfloat16
        else torch.from_numpy(array)
        for number, array in enumerate(arrays)
    }
    return {"safetensors": lambda: save_file(tensors, path)}


def _load_file(path: Path) -> dict[str, Callable[[], Any]]:
    try:
        from safetensors.torch import load_file
    except ImportError:
        return {}
    return {"safetensors copied": lambda: [tensor.clone() for tensor in load_file(path).values()]}


if __name__ == "__main__":
    main()
