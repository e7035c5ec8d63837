"""Executors: the workers of a single controller, which hold the elements of leaves and copy, write and read them there."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ckptcore.model.arrays import Box, HostArray, Shard
from ckptcore.model.metadata import ArrayRecord
from ckptcore.model.transfer import Pending

__all__ = ["Executor", "Fetched", "Held", "LeafBoxes", "ReadStage", "WantedLeaf", "WriteStage"]


@dataclass(frozen=True, slots=True)
class LeafBoxes:
    """Boxes of a leaf that a worker holds.

    Attributes:
        leaf: as the controller knows it; its elements are at the workers.
        boxes: without overlap.
    """

    leaf: Any
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class WantedLeaf:
    """A leaf that is to be made at the workers.

    Attributes:
        abstract: what is asked for.
        stored: the array that was saved.
    """

    abstract: Any
    stored: ArrayRecord


@dataclass(frozen=True, slots=True)
class Fetched:
    """What a read brought.

    Attributes:
        reports: by worker, the bytes that its stage gave.
        leaves: the leaves that were asked for, in order; of no use where a report says that a stage failed.
    """

    reports: Mapping[int, bytes]
    leaves: Sequence[object]


class Held(Protocol):
    """Elements that a worker holds for one save. Any thread."""

    def wait(self) -> None:
        """Return once nothing of the leaves is needed any more.

        Raises:
            RankFailedError: if the worker could not take them, or is gone.
        """
        ...

    def close(self) -> None:
        """Let go of the elements; again is no error, nor is a worker that is gone."""
        ...


class WriteStage(Protocol):
    """What a worker does to write what it holds. Can be pickled, has no elements in it, and raises nothing."""

    def __call__(self, arrays: Sequence[Sequence[HostArray]]) -> bytes:
        """Write.

        Args:
            arrays: for each leaf that is held, the elements of its boxes in their order; any strides. Nobody changes them
                meanwhile.

        Returns:
            A report for the controller: small, and of no concern to the executor.
        """
        ...


class ReadStage(Protocol):
    """What a worker does to read boxes. Can be pickled, and raises nothing."""

    def __call__(self) -> tuple[bytes, Sequence[Sequence[HostArray]]]:
        """Read.

        Returns:
            A report for the controller, and for each leaf the elements of its boxes in the order in which `Executor.wanted` gave them:
            C-contiguous, of the stored dtype, nobody else's. Fewer than that where the stage failed, which its report says.
        """
        ...


class Executor(Protocol):
    """Runs stages of saves and loads where the elements of leaves are: on the workers of a single controller.

    The controller plans and commits. What it sends a worker is a stage, and what it gets is a report; elements never come to it. In
    one checkpoint the controller is rank 0 and the worker `n` is rank ``n + 1``, as if each were a process of a job. Any thread.

    Every method that talks to a worker raises `RankFailedError`, or has its result raise it, if the worker is gone, or did not do
    what it was asked; the error names the worker.
    """

    @property
    def workers(self) -> Sequence[str]:
        """What each worker is called in errors, by its number. It does not change."""
        ...

    def takes(self, leaf: Any) -> bool:
        """Whether the elements of a leaf that is saved are at these workers and not here. Never waits."""
        ...

    def makes(self, abstract: Any) -> bool:
        """Whether what an abstract leaf asks for is to be at these workers and not here. Never waits."""
        ...

    def identity(self, leaf: Any) -> Hashable | None:
        """As `LeafHandler.identity`, of a leaf that it takes or makes; without a look at elements."""
        ...

    def shards(self, leaf: Any, worker: int) -> Sequence[Shard]:
        """The boxes that a worker holds, each once; the replicas of a box are workers.

        Raises:
            UnsupportedLeafError: if the leaf has no elements, or they are not all at these workers.
        """
        ...

    def copy(self, worker: int, leaves: Sequence[LeafBoxes]) -> Held:
        """For asynchronous saves: begin to copy boxes, at the worker, to where nobody can change or free them."""
        ...

    def view(self, worker: int, leaves: Sequence[LeafBoxes]) -> Held:
        """For blocking saves: hold boxes, as they are if that can be."""
        ...

    def write(self, worker: int, stage: WriteStage, held: Held) -> Pending[bytes]:
        """Begin to run a stage at a worker, on what it holds. Does not wait, so that workers write at the same time.

        Returns:
            What the stage returns. A result comes only once the worker writes no more, also where it failed.
        """
        ...

    def wanted(self, abstract: Any, stored: ArrayRecord, worker: int) -> Sequence[Box]:
        """As `LeafHandler.wanted`, of a worker: the boxes that it needs for its part of a leaf.

        Raises:
            UnsupportedLeafError: if the stored array cannot become what is asked for.
        """
        ...

    def read(self, stages: Mapping[int, ReadStage], leaves: Sequence[WantedLeaf]) -> Fetched:
        """Run a stage at each of some workers, and make leaves of what they read, there. Returns when all are done.

        Args:
            stages: by worker. A worker of which `wanted` gives no box of any of the leaves has none.
            leaves: what to make.
        """
        ...
