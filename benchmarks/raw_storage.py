"""What the disk, the page cache and memory of this machine can do, and what the local storage makes of it.

``python -m benchmarks.raw_storage [--directory DIRECTORY] [--gigabytes N] [--rounds N]``. One thread, in pieces of 4 MiB (writes)
and 1 MiB (reads), as the core asks for them. Ratios are those of rounds in which all contenders ran one after the other.
"""

from __future__ import annotations

import argparse
import functools
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.alternating import Contender, compare
from ckptcore.builtin.linux_calls import allocate, start_writeback
from ckptcore.builtin.local import LocalStorage, open_local
from ckptcore.protocols import StorageOptions

WRITE_BYTES = 4 << 20
READ_BYTES = 1 << 20


class Machine:
    """A directory to write to, and memory that was touched."""

    def __init__(self, directory: Path, nbytes: int) -> None:
        self.directory = directory
        self.nbytes = nbytes
        self.path = str(directory / "raw")
        words = np.random.default_rng(0).integers(0, 2**63, nbytes // 8, dtype=np.int64)
        self.source: memoryview = words.view(np.uint8).data
        # Of whole pages, for direct reads; touched, so that no page faults are measured.
        self.target = memoryview(mmap.mmap(-1, nbytes))
        self.target[:: mmap.PAGESIZE] = bytes(nbytes // mmap.PAGESIZE)

    def storage(self, *, durable: bool) -> LocalStorage:
        """A storage on the directory."""
        return open_local(str(self.directory), StorageOptions(durable=durable))

    def clear(self) -> None:
        """Remove what was written, and let the disk forget it before the next contender runs."""
        for entry in self.directory.iterdir():
            entry.unlink()
        os.sync()

    def fill(self, *, warm: bool) -> None:
        """Have files to read, in the page cache or not."""
        for name in ("raw", "data"):
            path = self.directory / name
            if not path.exists():
                path.write_bytes(self.source)
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            if not warm:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)

    def copy(self) -> None:
        """Memory to memory."""
        np.copyto(np.frombuffer(self.target, np.uint8), np.frombuffer(self.source, np.uint8))

    def write(self, *, allocated: bool = False, early: bool = False, durable: bool = False) -> None:
        """By system calls alone."""
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        if allocated:
            allocate(descriptor, self.nbytes)
        for start in range(0, self.nbytes, WRITE_BYTES):
            piece = self.source[start : start + WRITE_BYTES]
            os.pwrite(descriptor, piece, start)
            if early:
                start_writeback(descriptor, start, len(piece))
        if durable:
            os.fdatasync(descriptor)
        os.close(descriptor)

    def write_stored(self, *, durable: bool) -> None:
        """By a writer of the storage."""
        writer = self.storage(durable=durable).open_writer("data", self.nbytes)
        for start in range(0, self.nbytes, WRITE_BYTES):
            writer.write_at(start, self.source[start : start + WRITE_BYTES])
        writer.finish()

    def read(self, flags: int = 0) -> None:
        """By system calls alone."""
        descriptor = os.open(self.path, os.O_RDONLY | flags)
        for start in range(0, self.nbytes, READ_BYTES):
            os.preadv(descriptor, [self.target[start : start + READ_BYTES]], start)
        os.close(descriptor)

    def read_stored(self) -> None:
        """By the storage."""
        storage = self.storage(durable=False)
        for start in range(0, self.nbytes, READ_BYTES):
            storage.get_into("data", [(start, self.target[start : start + READ_BYTES])])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--directory", type=Path, default=Path.cwd(), help="where to write; its file system is measured"
    )
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args(arguments)
    directory = Path(tempfile.mkdtemp(prefix=".bench-", dir=chosen.directory))
    try:
        nbytes = int(chosen.gigabytes * 1e9) // WRITE_BYTES * WRITE_BYTES
        measure(Machine(directory, nbytes), chosen.rounds)
    finally:
        shutil.rmtree(directory)


def measure(machine: Machine, rounds: int) -> None:
    """Run the groups of contenders."""
    show(machine, rounds, "memory", machine.clear, [("copy", machine.copy)])
    show(
        machine, rounds, "write, not durable", machine.clear,
        [
            ("pwrite", machine.write),
            ("pwrite into allocated space", lambda: machine.write(allocated=True)),
            ("local storage", lambda: machine.write_stored(durable=False)),
        ],
    )  # fmt: skip
    show(
        machine, rounds, "write, durable", machine.clear,
        [
            ("pwrite, fdatasync", lambda: machine.write(durable=True)),
            ("allocated, fdatasync", lambda: machine.write(allocated=True, durable=True)),
            ("allocated, early writeback, fdatasync", lambda: machine.write(allocated=True, early=True, durable=True)),
            ("local storage", lambda: machine.write_stored(durable=True)),
        ],
    )  # fmt: skip
    for warm in (True, False):
        prepare = functools.partial(machine.fill, warm=warm)
        direct = (
            [("preadv, O_DIRECT", lambda: machine.read(os.O_DIRECT))] if hasattr(os, "O_DIRECT") and not warm else []
        )
        show(
            machine, rounds, f"read, {'warm' if warm else 'cold'}", prepare,
            [("preadv", machine.read), *direct, ("local storage", machine.read_stored)],
        )  # fmt: skip
    machine.clear()


def show(
    machine: Machine,
    rounds: int,
    title: str,
    prepare: Callable[[], None],
    runs: Sequence[tuple[str, Callable[[], None]]],
) -> None:
    """Time a group and print a table of it."""
    print(f"\n{title:<40}{'GB/s':>8}{'of the first':>14}")
    for outcome in compare([Contender(name, run, prepare) for name, run in runs], rounds=rounds):
        print(f"{outcome.name:<40}{machine.nbytes / outcome.median / 1e9:>8.1f}{outcome.ratio:>14.2f}", flush=True)


if __name__ == "__main__":
    main()
