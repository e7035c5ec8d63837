"""A program that kills publishers and followers at random moments, and checks what they leave.

Run it as ``python -m plugins.versions.tests.killed_versions LOCATION DIRECTORY SEED KILLS``.

One process publishes versions to the location. Two processes follow them, one of them a shard, with caches in the
directory. Each is killed at the n-th call of the operating system that it makes, or after a random time, and starts
again. The program imports all modules once and forks the processes. No storage is opened before a fork, because clients
of object stores do not survive it. A follower compares each version that it yields with the weights of that number. The
program fails with a `LostError` if a version is a mixture, or is lost. Its last line of output is a summary in JSON.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import select
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import ckptcore_versions.layout  # noqa: F401  # here, so that the processes need not import it
import numpy as np
import safetensors.numpy
from ckptcore_versions import Publisher, Version, follow
from ckptcore_versions.cache import complete_versions

import ckptcore
from ckptcore import ShardedArray
from ckptcore.builtin.sharded_arrays import ArrayShard
from ckptcore.commit.location import open_directory
from ckptcore.model import Box
from ckptcore.policies import LatestN
from ckptcore.runtime import runtime_of
from plugins.versions.tests.followed import trained

_CALLS: Final = ("open", "os.", "fcntl.", "shutil.", "mmap.", "socket.")
"""Prefixes of the names of audit events that are calls of the operating system."""

_SECONDS: Final = 180.0
"""Time without any event that counts as a hang."""

_KEPT: Final = 6
"""Versions that the publisher keeps, besides those that they need."""

_SHARD: Final = Box((300, 0), (700, 1000))
"""The box of the matrix that the second follower needs."""

_LAST: Final = 5
"""Versions that are published after the last kill."""


class LostError(Exception):
    """A version is a mixture of two, or was lost."""


@dataclass
class Worker:
    """A process that is killed and started again.

    Attributes:
        name: its name.
        run: its work; takes a function that reports a line.
        check: checks what it left, in a process of its own; takes the newest number that it reported.
        process: the id of the process.
        output: the descriptor of the pipe with its reports.
        dies: the time at which it is killed; None if it kills itself, or lives.
        newest: the newest number that it reported.
        reports: the number of its reports.
    """

    name: str
    run: Callable[[Callable[[int], None]], None]
    check: Callable[[int], None]
    process: int = 0
    output: int = -1
    dies: float | None = None
    newest: int = -1
    reports: int = 0
    _rest: bytes = field(default=b"", repr=False)

    def start(self, errors: Path, calls: int | None, seconds: float | None) -> None:
        """Start the process, to die at a call or after a time; None: not."""
        reading, writing = os.pipe()
        self.process = os.fork()
        if not self.process:
            os.close(reading)
            _end(errors, lambda: self._work(writing, calls))
        os.close(writing)
        self.output, self._rest = reading, b""
        self.dies = None if seconds is None else time.monotonic() + seconds

    def _work(self, writing: int, calls: int | None) -> None:
        left = calls

        def count(name: str, _: tuple[Any, ...]) -> None:
            nonlocal left
            if left is not None and name.startswith(_CALLS):
                left -= 1
                if not left:
                    os.kill(os.getpid(), signal.SIGKILL)

        if calls is not None:
            sys.addaudithook(count)
        self.run(lambda number: void(os.write(writing, f"{number}\n".encode())))

    def receive(self) -> bool:
        """Read reports. Return False if the process has ended."""
        data = os.read(self.output, 1 << 16)
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            self.reports += 1
            self.newest = max(self.newest, int(line))
        return bool(data)


def void(_: object) -> None:
    """Return nothing."""


def _end(errors: Path, work: Callable[[], None]) -> None:
    """Do the work of a forked process, and end it."""
    try:
        descriptor = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 2)
        work()
    except BaseException:  # noqa: BLE001  # ends the forked process
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


class Versions:
    """Workers on one location."""

    def __init__(self, location: str, directory: Path, seed: int) -> None:
        """Start no process yet."""
        self.location = location
        self.directory = directory
        self.chance = random.Random(seed)
        self.last: int | None = None  # the version after which the publisher ends
        self.counts: Counter[str] = Counter()
        self.workers = [
            Worker("publisher", self._publish, self._check_published),
            Worker("whole", lambda say: self._follow("whole", None, say), lambda _: self._check_cache("whole")),
            Worker("shard", lambda say: self._follow("shard", _SHARD, say), lambda _: self._check_cache("shard")),
        ]

    def run(self, kills: int) -> None:
        """Kill processes, then let them end.

        Raises:
            LostError
        """
        for worker in self.workers:
            self._start(worker, mortal=True)
        while self.counts["kills"] < kills:
            ended = self._await_end()
            self.counts["kills"] += 1
            self.counts[f"kills of {ended.name}"] += 1
            self._check(ended)
            self._start(ended, mortal=self.counts["kills"] < kills)
        for worker in self.workers:
            self._kill(worker)
            self._check(worker)
        self.last = self.workers[0].newest + _LAST
        for worker in self.workers:
            self._start(worker, mortal=False)
        for _ in self.workers:
            self._await_end(killed=False)
        for worker in self.workers:
            if worker.newest != self.last:
                raise LostError(f"{worker.name} ended with version {worker.newest} instead of {self.last}")
            self._check(worker)
            self.counts[f"reports of {worker.name}"] = worker.reports

    def _start(self, worker: Worker, *, mortal: bool) -> None:
        by_calls = self.chance.random() < 0.5
        calls = int(10 ** self.chance.uniform(1, 4)) if mortal and by_calls else None
        seconds = self.chance.uniform(0, 1.5) if mortal and not by_calls else None
        worker.start(self._errors(worker.name), calls, seconds)

    def _errors(self, name: str) -> Path:
        return self.directory / f"errors-{name}"

    def _await_end(self, *, killed: bool = True) -> Worker:
        """Read reports until a process ends.

        Raises:
            LostError: it ended by an error, or nothing happens.
        """
        quiet_since = time.monotonic()
        while True:
            now = time.monotonic()
            for worker in self.workers:
                if worker.dies is not None and now >= worker.dies:
                    os.kill(worker.process, signal.SIGKILL)
                    worker.dies = None
            alive = {worker.output: worker for worker in self.workers if worker.process}
            ready = select.select(list(alive), [], [], 0.02)[0]
            for output in ready:
                quiet_since = now
                if not alive[output].receive():
                    return self._reap(alive[output], killed=killed)
            if now - quiet_since > _SECONDS:
                raise LostError(f"nothing happens: {[(worker.name, worker.newest) for worker in self.workers]}")

    def _reap(self, worker: Worker, *, killed: bool) -> Worker:
        os.close(worker.output)
        _, status = os.waitpid(worker.process, 0)
        worker.process = 0
        expected = -signal.SIGKILL if killed else 0
        if os.waitstatus_to_exitcode(status) != expected:
            errors = self._errors(worker.name).read_text()[-4000:]
            raise LostError(f"{worker.name} ended with {os.waitstatus_to_exitcode(status)}: {errors}")
        return worker

    def _kill(self, worker: Worker) -> None:
        if worker.process:
            os.kill(worker.process, signal.SIGKILL)
            while worker.receive():
                pass
            self._reap(worker, killed=True)

    def close(self) -> None:
        """Kill all processes."""
        for worker in self.workers:
            if worker.process:
                os.kill(worker.process, signal.SIGKILL)
                os.waitpid(worker.process, 0)

    def _check(self, worker: Worker) -> None:
        """Check what a worker left, in a forked process.

        Raises:
            LostError: a version is lost, or is a mixture.
        """
        errors = self._errors(f"check-{worker.name}")
        child = os.fork()
        if not child:
            _end(errors, lambda: worker.check(worker.newest))
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            raise LostError(f"{worker.name}: {errors.read_text()[-4000:]}")

    def _publish(self, say: Callable[[int], None]) -> None:
        with Publisher(self.location, full_every=5, keep=LatestN(_KEPT)) as publisher:
            number = -1 if publisher.latest is None else publisher.latest
            while self.last is None or number < self.last:
                number += 1
                publisher.publish(number, trained(number))
                say(number)
                time.sleep(0.01)  # followers that are never the newest would have nothing to do

    def _follow(self, name: str, box: Box | None, say: Callable[[int], None]) -> None:
        """Compare every version with its weights, in its arrays and in weights that are written again and again."""
        logging.getLogger("ckptcore.versions").addFilter(_refuse_skipped)
        served: dict[str, Any] = {key: np.zeros_like(array) for key, array in trained(0).items()}
        if box is not None:
            served["matrix"] = _shard(np.zeros(box.shape, np.float32))
        like = None if box is None else served
        with follow(self.location, cache=self.directory / name, like=like, poll_seconds=0.01) as follower:
            for version in follower:
                _compare(version.number, {key: _elements(array) for key, array in version.arrays.items()}, box)
                version.load_into(served)
                _compare(version.number, {key: _elements(array) for key, array in served.items()}, box)
                _compare_files(version, box)
                say(version.number)
                if version.number == self.last:
                    return

    def _check_published(self, newest: int) -> None:
        """Check that no version is lost, and that the newest ones can be read."""
        steps = ckptcore.CheckpointReader(self.location).steps
        if newest >= 0 and newest not in steps:
            raise LostError(f"version {newest} was published; found {steps}")
        for number in steps[-2:]:
            _compare(number, ckptcore.load(f"{self.location}/v{number:06d}"), None)
        if "://" in self.location:  # in place of waiting until the lease of the killed publisher expires
            storage = open_directory(self.location, runtime_of(ckptcore.Context()).storages, to_write=True)
            storage.delete([".ckptcore/owner.json"])

    def _check_cache(self, name: str) -> None:
        """Check that each complete version in a cache is whole, as an engine would load it."""
        box = None if name == "whole" else _SHARD
        if not (self.directory / name).exists():
            return
        versions = complete_versions(str(self.directory / name))
        if len(versions) > 3:
            raise LostError(f"{name} has {[cached.directory for cached in versions]}")
        for cached in versions:
            if not cached.is_intact(runtime_of(ckptcore.Context()).io_threads):
                raise LostError(f"{cached.directory} has other checksums")
            _compare(cached.version.number, _stored(Path(cached.directory)), box)


def _shard(elements: Any) -> ShardedArray:
    return ShardedArray(trained(0)["matrix"].shape, np.float32, [ArrayShard(_SHARD, elements)])


def _elements(array: Any) -> Any:
    return array.shards[0].elements if isinstance(array, ShardedArray) else array


def _stored(directory: Path) -> dict[str, Any]:
    arrays: dict[str, Any] = {}
    for file in directory.glob("*.safetensors"):
        arrays.update(safetensors.numpy.load_file(file))
    return arrays


def _compare_files(version: Version, box: Box | None) -> None:
    _compare(version.number, _stored(Path(version.directory)), box)


def _compare(number: int, arrays: dict[str, Any], box: Box | None) -> None:
    expected = trained(number)
    if box is not None:
        expected["matrix"] = expected["matrix"][box.slices]
    if arrays.keys() != expected.keys():
        raise LostError(f"version {number} has {sorted(arrays)}")
    for name, array in expected.items():
        if not np.array_equal(arrays[name], array):
            raise LostError(f"{name} of version {number} differs in {int(np.sum(arrays[name] != array))} elements")


def _refuse_skipped(record: logging.LogRecord) -> bool:
    if "cannot be read" in record.getMessage() or "is damaged" in record.getMessage():
        raise LostError(record.getMessage())
    return True


def main() -> None:
    """Run the program."""
    location, directory, seed, kills = sys.argv[1:]
    if location.startswith("s3:"):
        import ckptcore_s3.plugin  # noqa: F401  # only imported: its threads would not survive a fork
    versions = Versions(location, Path(directory), int(seed))
    try:
        versions.run(int(kills))
    finally:
        with contextlib.suppress(ProcessLookupError):
            versions.close()
    print(json.dumps({"seed": int(seed), **versions.counts}))


if __name__ == "__main__":
    main()
