"""Fake workers of a single controller: processes of this machine. All bytes that they exchange are counted."""

from __future__ import annotations

import hashlib
import itertools
import multiprocessing
import multiprocessing.connection
import multiprocessing.process
import pickle
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from ckptcore_jax.staged_executor import StagedExecutor
from ckptcore_jax.worker_loads import StagedReadResult, WantedLeaf
from ckptcore_jax.worker_saves import HeldElements, LeafBoxes
from ckptcore_jax.worker_stages import ReadStage, WriteStage

from ckptcore.errors import RankFailedError, UnsupportedLeafError
from ckptcore.model.arrays import ArraySpec, Box, HostArray, Shard
from ckptcore.model.metadata import ArrayRecord
from ckptcore.model.transfer import Pending
from tests.controller.remote_arrays import RemoteArray

Elements = Callable[[ArraySpec, Box], HostArray]
"""Returns the elements of a box of an array. Must be a module-level function, so that it can be pickled."""

_Arrays = dict[tuple[int, Box], HostArray]
"""Arrays of a worker, by number of the array and box."""


@dataclass(frozen=True, slots=True)
class Crossing:
    """One request to a worker and its answer.

    Attributes:
        worker: the number of the worker.
        request: the name of the request.
        sent, received: numbers of bytes of the request and of the answer.
    """

    worker: int
    request: str
    sent: int
    received: int


class _HeldNumbers:
    """Elements that a worker holds, identified by a number. See `HeldElements`."""

    def __init__(self, workers: WorkerProcesses, worker: int, number: int, begun: Future[Any]) -> None:
        self.worker = worker
        self.number = number
        self._workers = workers
        self._begun = begun
        self._closed = False

    def wait(self) -> None:
        """See `HeldElements`."""
        self._begun.result()

    def close(self) -> None:
        """See `HeldElements`."""
        if self._closed:
            return
        self._closed = True
        try:
            self._begun.result()
            self._workers.ask(self.worker, _Drop(self.number))
        except RankFailedError:
            return  # the worker has ended, and its elements are freed


class WorkerProcesses(StagedExecutor):
    """An executor of processes of this machine. Its leaves are `RemoteArray`. Close it, or use it in ``with``.

    Attributes:
        crossings: every request that was answered, in order.
    """

    def __init__(self, count: int, *, timeout_seconds: float = 300.0) -> None:
        """Start processes.

        Args:
            count: number of processes.
            timeout_seconds: the timeout for an answer.
        """
        spawning = multiprocessing.get_context("spawn")
        self.crossings: list[Crossing] = []
        self._timeout_seconds = timeout_seconds
        self._numbers = itertools.count(1)
        self._locks = [threading.Lock() for _ in range(count)]
        self._threads = ThreadPoolExecutor(4 * count, thread_name_prefix="workers")
        self._pipes: list[multiprocessing.connection.Connection] = []
        self._processes: list[multiprocessing.process.BaseProcess] = []
        for worker in range(count):
            ours, theirs = spawning.Pipe()
            process = spawning.Process(target=_work, args=(theirs,), name=f"worker-{worker}", daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes."""
        self._threads.shutdown()
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.close()
            process.join(self._timeout_seconds)

    def kill(self, worker: int) -> None:
        """Kill a process immediately."""
        self._processes[worker].kill()
        self._processes[worker].join(self._timeout_seconds)

    def ask(self, worker: int, request: object) -> Any:
        """Send a request to a worker, and wait for its answer.

        Raises:
            RankFailedError: if the process has ended, or the request failed.
        """
        data = pickle.dumps(request)
        name = type(request).__name__.removeprefix("_").lower()
        with self._locks[worker]:
            pipe = self._pipes[worker]
            try:
                pipe.send_bytes(data)
                if not pipe.poll(self._timeout_seconds):
                    raise RankFailedError(f"{self.workers[worker]} gave no answer for {self._timeout_seconds} seconds")
                answer = pipe.recv_bytes()
            except (EOFError, OSError) as error:
                raise RankFailedError(f"{self.workers[worker]} is gone: {type(error).__name__} {error}") from error
            self.crossings.append(Crossing(worker, name, len(data), len(answer)))
        failed, result = pickle.loads(answer)
        if failed is not None:
            raise RankFailedError(f"{self.workers[worker]} failed: {failed}")
        return result

    def make(self, spec: ArraySpec, boxes: Sequence[Sequence[Box]], elements: Elements) -> RemoteArray:
        """Return an array. Each worker creates its boxes of it."""
        made = RemoteArray(spec, tuple(map(tuple, boxes)), next(self._numbers))
        for worker, held in enumerate(made.boxes):
            self.ask(worker, _Make(made.number or 0, spec, held, elements))
        return made

    def change(self, array: RemoteArray) -> None:
        """Set all elements of an array to zero, in place."""
        for worker in range(len(self.workers)):
            self.ask(worker, _Change(array.number or 0))

    def digests(self, array: RemoteArray) -> Sequence[Mapping[Box, str]]:
        """Return for each worker the `digest` of each box that it holds."""
        return [self.ask(worker, _Digest(array.number or 0)) for worker in range(len(self.workers))]

    def elements(self, array: RemoteArray) -> HostArray:
        """Return all elements of an array, for tests. Their transfer is counted in `crossings`."""
        whole = np.zeros(array.spec.shape, array.spec.numpy_dtype)
        for worker in range(len(self.workers)):
            for box, part in self.ask(worker, _Get(array.number or 0)).items():
                whole[box.slices] = part
        return whole

    @staticmethod
    def digest(elements: HostArray) -> str:
        """Return a hash of the bytes of elements in C order."""
        return hashlib.sha256(np.ascontiguousarray(elements).tobytes()).hexdigest()

    @property
    def workers(self) -> Sequence[str]:
        """See `Executor`."""
        return [process.name for process in self._processes]

    def takes(self, leaf: Any) -> bool:
        """See `Executor`."""
        return isinstance(leaf, RemoteArray)

    def makes(self, abstract: Any) -> bool:
        """See `Executor`."""
        return isinstance(abstract, RemoteArray)

    def identity(self, leaf: Any) -> Hashable | None:
        """See `Executor`."""
        return None if leaf.number is None else ("remote", leaf.number)

    def shards(self, leaf: Any, worker: int) -> Sequence[Shard]:
        """See `Executor`."""
        if leaf.number is None:
            raise UnsupportedLeafError("this RemoteArray has no elements to save: it says what is asked for")
        shards = []
        for box in leaf.boxes[worker]:
            holders = [number for number, boxes in enumerate(leaf.boxes) if box in boxes]
            shards.append(Shard(box, holders.index(worker), len(holders)))
        return shards

    def take(self, worker: int, leaves: Sequence[LeafBoxes], *, copied: bool) -> HeldElements:
        """See `StagedExecutor`."""
        number = next(self._numbers)
        boxes = tuple([(leaf.leaf.number, leaf.leaf.boxes[worker], leaf.boxes) for leaf in leaves])
        return _HeldNumbers(self, worker, number, self._threads.submit(self.ask, worker, _Hold(number, boxes, copied)))

    def run_write(self, worker: int, stage: WriteStage, held: HeldElements) -> Pending[bytes]:
        """See `StagedExecutor`."""
        assert isinstance(held, _HeldNumbers)  # created by this executor
        return self._threads.submit(self.ask, worker, _Write(held.number, stage))

    def wanted(self, abstract: Any, stored: ArrayRecord, worker: int) -> Sequence[Box]:
        """See `StagedExecutor`."""
        if abstract.spec != stored.spec:
            raise UnsupportedLeafError(f"{stored.spec} was saved and {abstract.spec} is asked for")
        boxes: Sequence[Box] = abstract.boxes[worker]
        return boxes

    def run_reads(self, stages: Mapping[int, ReadStage], leaves: Sequence[WantedLeaf]) -> StagedReadResult:
        """See `StagedExecutor`."""
        made = [replace(leaf.abstract, number=next(self._numbers)) for leaf in leaves]
        begun = {}
        for worker, stage in stages.items():
            names = tuple([(leaf.number, leaf.boxes[worker]) for leaf in made])
            begun[worker] = self._threads.submit(self.ask, worker, _Read(names, stage))
        return StagedReadResult({worker: report.result() for worker, report in begun.items()}, made)


@dataclass(frozen=True, slots=True)
class _Make:
    number: int
    spec: ArraySpec
    boxes: tuple[Box, ...]
    elements: Elements

    def answer(self, arrays: _Arrays, held: dict[int, Any]) -> object:
        for box in self.boxes:
            arrays[self.number, box] = self.elements(self.spec, box)
        return None


@dataclass(frozen=True, slots=True)
class _Change:
    number: int

    def answer(self, arrays: _Arrays, held: dict[int, Any]) -> object:
        for (number, _), array in arrays.items():
            if number == self.number:
                array.fill(0)
        return None


@dataclass(frozen=True, slots=True)
class _Digest:
    number: int

    def answer(self, arrays: _Arrays, held: dict[int, Any]) -> object:
        return {box: WorkerProcesses.digest(array) for (number, box), array in arrays.items() if number == self.number}


@dataclass(frozen=True, slots=True)
class _Get:
    number: int

    def answer(self, arrays: _Arrays, held: dict[int, Any]) -> object:
        return {box: array for (number, box), array in arrays.items() if number == self.number}


@dataclass(frozen=True, slots=True)
class _Hold:
    number: int
    boxes: tuple[tuple[int, tuple[Box, ...], tuple[Box, ...]], ...]
    copied: bool

    def answer(self, arrays: _Arrays, held: dict[int, Any]) -> object:
        held_views = []
        for array, there, wanted in self.boxes:
            views = []
            for box in wanted:
                outer = next(candidate for candidate in there if candidate.contains(box))
                view = arrays[array, outer][box.within(outer)]
                views.append(view.copy() if self.copied else view)
            held_views.append(views)
        held[self.number] = held_views
        return None


@dataclass(frozen=True, slots=True)
class _Drop:
    number: int

    def answer(self, arrays: _Arrays, held: dict[int, Any]) -> object:
        del held[self.number]
        return None


@dataclass(frozen=True, slots=True)
class _Write:
    number: int
    stage: WriteStage

    def answer(self, arrays: _Arrays, held: dict[int, Any]) -> object:
        return self.stage(held[self.number])


@dataclass(frozen=True, slots=True)
class _Read:
    names: tuple[tuple[int, tuple[Box, ...]], ...]
    stage: ReadStage

    def answer(self, arrays: _Arrays, held: dict[int, Any]) -> object:
        report, read = self.stage()
        for (number, boxes), parts in zip(self.names, read, strict=False):  # shorter if the stage failed
            arrays.update({(number, box): array for box, array in zip(boxes, parts, strict=True)})
        return report


def _work(pipe: multiprocessing.connection.Connection) -> None:
    """Run a worker until its controller ends."""
    arrays: _Arrays = {}
    held: dict[int, Any] = {}
    while True:
        try:
            data = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        try:
            answer = pickle.dumps((None, pickle.loads(data).answer(arrays, held)))
        except Exception as error:  # noqa: BLE001  # the controller raises it
            answer = pickle.dumps((f"{type(error).__name__}: {error}", None))
        pipe.send_bytes(answer)
