"""`LeavesAtWorkers`: handlers of leaves whose elements are at the workers of a single controller. Imports no JAX."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

from ckptcore.model import ArrayRecord, Box, HostArray, LeafRecord, Pending, Shard, StridedMemory
from ckptcore.protocols import CheckpointableHandler, HostBytes, HostMemory, LeafHandler

if TYPE_CHECKING:
    from ckptcore_jax.staged_executor import StagedExecutor


class LeavesAtWorkers(LeafHandler):
    """A leaf handler of a controller, which holds no boxes of leaves at its workers.

    Other leaves are handled as by the wrapped handler.
    """

    def __init__(self, handler: LeafHandler, executor: StagedExecutor) -> None:
        self._handler = handler
        self._executor = executor

    @property
    def priority(self) -> int:
        """See `LeafHandler`."""
        return self._handler.priority

    def describe(self, leaf: Any) -> LeafRecord:
        """See `LeafHandler`."""
        return self._handler.describe(leaf)

    def abstract(self, leaf: Any) -> object:
        """See `LeafHandler`."""
        return self._handler.abstract(leaf)

    def parts_handler(self, leaf: Any) -> CheckpointableHandler | None:
        """See `LeafHandler`."""
        return self._handler.parts_handler(leaf)

    def identity(self, leaf: Any) -> Hashable | None:
        """Return the identity that the executor knows, for leaves at workers."""
        is_remote = self._executor.takes(leaf) or self._executor.makes(leaf)
        return (self._executor if is_remote else self._handler).identity(leaf)

    def shards(self, leaf: Any, rank: int, size: int) -> Sequence[Shard] | None:
        """Return no box for a leaf at workers, once they have its elements."""
        if not self._executor.takes(leaf):
            return self._handler.shards(leaf, rank, size)
        for worker in range(len(self._executor.workers)):
            self._executor.shards(leaf, worker)  # raises an error for a leaf without elements
        return ()

    def replicas(self, leaf: Any, size: int) -> int | None:
        """See `LeafHandler`."""
        return self._handler.replicas(leaf, size)

    def shards_of(self, leaf: Any, process: int | None, rank: int, size: int) -> Sequence[Shard] | None:
        """Return what `shards` returns in this process, for a leaf at workers."""
        if process is None and self._executor.takes(leaf):
            return self.shards(leaf, rank, size)
        return self._handler.shards_of(leaf, process, rank, size)

    def host_bytes(self, leaf: Any, boxes: Sequence[Box]) -> HostBytes:
        """See `LeafHandler`."""
        return self._handler.host_bytes(leaf, boxes)

    def copy_to_host(self, leaf: Any, boxes: Sequence[Box], memory: HostMemory) -> Sequence[Pending[HostArray]]:
        """See `LeafHandler`."""
        return self._handler.copy_to_host(leaf, boxes, memory)

    def view_on_host(self, leaf: Any, boxes: Sequence[Box]) -> Sequence[Pending[HostArray]]:
        """See `LeafHandler`."""
        return self._handler.view_on_host(leaf, boxes)

    def sample(self, leaf: Any, stored: ArrayRecord, box: Box) -> Sequence[Pending[HostArray]] | None:
        """See `LeafHandler`."""
        return self._handler.sample(leaf, stored, box)

    def wanted(self, abstract: Any, stored: ArrayRecord) -> Sequence[Box]:
        """Return the boxes of the worker that reads most of a leaf. They are read there."""
        workers = range(len(self._executor.workers))
        wanted = [self._executor.wanted(abstract, stored, worker) for worker in workers]
        return max(wanted, key=lambda boxes: sum([box.size for box in boxes]), default=())

    def destination(self, abstract: Any, stored: ArrayRecord, box: Box) -> HostArray | None:
        """See `LeafHandler`."""
        return self._handler.destination(abstract, stored, box)

    def build(self, abstract: Any, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]) -> object:
        """Build a stored value. Workers build arrays."""
        return self._handler.build(abstract, stored, boxes)

    def keeps_memory(self, abstract: Any) -> bool:
        """See `LeafHandler`."""
        return self._handler.keeps_memory(abstract)

    def fill(self, target: Any, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]) -> bool:
        """See `LeafHandler`."""
        return self._handler.fill(target, stored, boxes)

    def memory_to_fill(self, target: Any) -> Sequence[StridedMemory] | None:
        """See `LeafHandler`."""
        return self._handler.memory_to_fill(target)
