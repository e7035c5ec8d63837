"""`StagedExecutor`: an executor whose workers run pickled stages. Independent of the transport. Imports no JAX."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from ckptcore.model import ArrayRecord, Box, Pending, Shard
from ckptcore.protocols import LeafHandler, ReadStrategy, SaveStrategy
from ckptcore_jax.worker_loads import StagedReadResult, WantedLeaf, WorkerLoad
from ckptcore_jax.worker_saves import HeldElements, LeafBoxes, LeavesAtWorkers, WorkerSave
from ckptcore_jax.worker_stages import ReadStage, WriteStage

__all__ = ["StagedExecutor"]


class StagedExecutor(ABC):
    """A `ckptcore.protocols.Executor` whose workers run stages.

    Subclasses implement access to leaves, and the transport of stages and elements. Every method that
    calls a worker raises `RankFailedError` if the worker failed. The error names the worker.
    Thread-safe.
    """

    @property
    @abstractmethod
    def workers(self) -> Sequence[str]:
        """Return the names of the workers, by number, for errors. They do not change."""

    @abstractmethod
    def takes(self, leaf: Any) -> bool:
        """Return True if these workers hold the elements of a leaf to save. Never waits."""

    @abstractmethod
    def makes(self, abstract: Any) -> bool:
        """Return True if these workers build the requested leaf. Never waits."""

    @abstractmethod
    def identity(self, leaf: Any) -> Hashable | None:
        """Return the identity of a leaf that these workers hold or build. See `LeafHandler.identity`."""

    @abstractmethod
    def shards(self, leaf: Any, worker: int) -> Sequence[Shard]:
        """Return the boxes that a worker holds.

        Each box is returned once. Replicas are counted by worker, not by device.

        Raises:
            UnsupportedLeafError: if the leaf has no elements, or if these workers do not hold all
                of them.
        """

    @abstractmethod
    def wanted(self, abstract: Any, stored: ArrayRecord, worker: int) -> Sequence[Box]:
        """Return the boxes that a worker must read for its part of a leaf. See `LeafHandler.wanted`.

        Raises:
            UnsupportedLeafError: if the stored array cannot be converted to the requested leaf.
        """

    @abstractmethod
    def take(self, worker: int, leaves: Sequence[LeafBoxes], *, copied: bool) -> HeldElements:
        """Begin to keep boxes in the memory of a worker.

        Args:
            worker: number of the worker.
            leaves: the leaves, with the boxes to keep.
            copied: True to copy the boxes. Later changes of the leaves then do not affect an
                asynchronous save.
        """

    @abstractmethod
    def run_write(self, worker: int, stage: WriteStage, held: HeldElements) -> Pending[bytes]:
        """Start a stage on a worker with its held elements. Does not wait, so that workers write concurrently.

        Returns:
            The pending report of the stage. It is ready only after the worker has stopped writing,
            also after an error.
        """

    @abstractmethod
    def run_reads(self, stages: Mapping[int, ReadStage], leaves: Sequence[WantedLeaf]) -> StagedReadResult:
        """Run read stages on the workers, and build the leaves there. Return when all are done.

        Args:
            stages: stages by worker. A worker that needs no box has no stage.
            leaves: the leaves to build.
        """

    def leaves_to_save(self, handler: LeafHandler) -> LeafHandler:
        """See `Executor`."""
        return LeavesAtWorkers(handler, self)

    def save_strategy(self, strategy: SaveStrategy[Any, Any]) -> SaveStrategy[Any, Any]:
        """See `Executor`."""
        return WorkerSave(strategy, self)

    def read_strategy(self, strategy: ReadStrategy[Any] | None) -> ReadStrategy[Any]:
        """See `Executor`."""
        return WorkerLoad(strategy, self)
