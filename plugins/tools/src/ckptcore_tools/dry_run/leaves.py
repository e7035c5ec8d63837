"""Leaf handlers for dry runs: they describe leaves and their shards, and read no elements."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from ckptcore.context import Context
from ckptcore.errors import PluginError
from ckptcore.model.arrays import Box, HostArray, Shard, StridedMemory
from ckptcore.model.metadata import ArrayRecord, LeafRecord
from ckptcore.model.transfer import Pending
from ckptcore.protocols import CheckpointableHandler, HostBytes, HostMemory, LeafHandler
from ckptcore.runtime import runtime_of, with_registry

WrapLeaf = Callable[[LeafHandler], LeafHandler]


def dry_run_context(context: Context, wrap_leaf: WrapLeaf) -> Context:
    """Return a Context with the same options, without observers, and with leaf handlers that read no elements."""
    return with_registry(replace(context, observers=()), runtime_of(context).registry.wrapping(wrap_leaf))


def running_leaves() -> WrapLeaf:
    """Wrap handlers for a process of the running job. The shards of a leaf are those of this process."""
    return lambda handler: _DryRunLeaves(handler, None)


def simulated_leaves(process: int) -> WrapLeaf:
    """Wrap handlers for a process of a job that is not running.

    The handlers raise UnsupportedLeafError for a leaf whose shards only that process could know.
    """
    return lambda handler: _DryRunLeaves(handler, process)


class _DryRunLeaves(LeafHandler):
    def __init__(self, handler: LeafHandler, process: int | None) -> None:
        self._handler = handler
        self._process = process

    @property
    def priority(self) -> int:
        return self._handler.priority

    def describe(self, leaf: Any) -> LeafRecord:
        return self._handler.describe(leaf)

    def abstract(self, leaf: Any) -> object:
        return self._handler.abstract(leaf)

    def parts_handler(self, leaf: Any) -> CheckpointableHandler | None:
        return self._handler.parts_handler(leaf)

    def identity(self, leaf: Any) -> Hashable | None:
        return self._handler.identity(leaf)

    def built_type(self, leaf: Any) -> object:
        return self._handler.built_type(leaf)

    def shards(self, leaf: Any, rank: int, size: int) -> Sequence[Shard] | None:
        return self._handler.shards_of(leaf, self._process, rank, size)

    def shards_of(self, leaf: Any, process: int | None, rank: int, size: int) -> Sequence[Shard] | None:
        return self.shards(leaf, rank, size)

    def replicas(self, leaf: Any, size: int) -> int | None:
        return self._handler.replicas(leaf, size)

    def host_bytes(self, leaf: Any, boxes: Sequence[Box]) -> HostBytes:
        return self._handler.host_bytes(leaf, boxes)

    def copy_to_host(self, leaf: Any, boxes: Sequence[Box], memory: HostMemory) -> Sequence[Pending[HostArray]]:
        _refuse()

    def view_on_host(self, leaf: Any, boxes: Sequence[Box]) -> Sequence[Pending[HostArray]]:
        _refuse()

    def sample(self, leaf: Any, stored: ArrayRecord, box: Box) -> Sequence[Pending[HostArray]] | None:
        return None  # without elements, a dry run cannot compare ranks

    def wanted(self, abstract: Any, stored: ArrayRecord) -> Sequence[Box]:
        _refuse()

    def destination(self, abstract: Any, stored: ArrayRecord, box: Box) -> HostArray | None:
        _refuse()

    def build(self, abstract: Any, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]) -> object:
        _refuse()

    def keeps_memory(self, abstract: Any) -> bool:
        return self._handler.keeps_memory(abstract)

    def fill(self, target: Any, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]) -> bool:
        _refuse()

    def memory_to_fill(self, target: Any) -> Sequence[StridedMemory] | None:
        _refuse()


def _refuse() -> NoReturn:
    raise PluginError("a dry run tried to read elements: this is a bug in ckptcore, please report it")
