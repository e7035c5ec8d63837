"""Reader of checkpoints for the load functions of torch.distributed.checkpoint."""

from __future__ import annotations

import collections
import dataclasses
import functools
import io
import itertools
import os
import pickle
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from ckptcore_dcp.layouts import DcpEntries
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

import ckptcore
from ckptcore.errors import CheckpointError, UnsupportedLeafError
from ckptcore.model import (
    ArrayRecord,
    Attribute,
    Box,
    Key,
    LeafRecord,
    Node,
    PlainKey,
    Skeleton,
    TreeMetadata,
    TreePath,
    are_indices,
    format_path,
)
from ckptcore.protocols import LayoutFactory
from ckptcore.results import CheckpointMetadata
from ckptcore_integrations.torch_dcp.names import Entry, Steps, entries_of, fits_in_place, host_array, torch_dtype
from ckptcore_integrations.torch_dcp.writer import CUSTOM

_TEXT_KINDS: Final = ("str", "bytes")
_MAKERS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "builtins.set": set,
    "builtins.frozenset": frozenset,
    "collections.Counter": collections.Counter,
}
"""Functions that build values of standard library types from their elements. torch pickles these types as objects."""


class Reader(StorageReader):
    """Reads checkpoints with ckptcore, for ``torch.distributed.checkpoint.load(state, storage_reader=Reader(path))``.

    Reads checkpoints of torch.distributed.checkpoint, and of every other layout that ckptcore reads. Each rank reads
    only the boxes that its planner requests, and verifies their checksums. If possible, it reads directly into the
    memory of the target. A load runs no code of the checkpoint. Objects of classes that PyTorch does not trust are
    refused: see `torch.serialization.add_safe_globals`.
    """

    def __init__(self, path: str | os.PathLike[str], *, context: ckptcore.Context | None = None) -> None:
        """Prepare to read. Reads nothing yet.

        Args:
            path: a path or URL of a checkpoint.
            context: options of ckptcore. Each rank reads alone.
        """
        self.path = path
        self.load_id = str(uuid.uuid4())
        self._context = _reading_entries(context) if context is not None else _default_context()
        self._opened: _Entries | None = None
        self.failure: Exception | None = None
        """The error of the last `read_metadata`. PyTorch before 2.12 does not report it."""

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The location of the checkpoint."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True. Unsupported locations raise an error later, in the load."""
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepare for another load. If `checkpoint_id` is given, it becomes the location."""
        if checkpoint_id:
            self.path = checkpoint_id
        self.load_id = str(uuid.uuid4())
        self._opened = None

    def read_metadata(self) -> Metadata:
        """Return the entries of the checkpoint. Each tensor has one chunk, because any box of it can be read.

        Raises:
            CheckpointNotFoundError, UncommittedCheckpointError, CorruptCheckpointError
            CompositeCheckpointError: the checkpoint has several checkpointables. Load one by its own location.
        """
        self.failure = None
        try:
            entries = self._opened = _Entries.of(ckptcore.metadata(self.path, context=self._context))
        except Exception as error:
            self.failure = error
            raise
        return Metadata(
            {name: entries.storage_metadata(entry) for name, entry in entries.entries.items()},
            planner_data=entries.paths,
            storage_meta=StorageMeta(entries.checkpoint_id, entries.save_id, self.load_id),
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read all items of the plan in one load, so that all come from the same save.

        Raises:
            CorruptCheckpointError: bytes differ from those written.
            TreeMismatchError: the checkpoint was replaced by a different one since `read_metadata`.
            UnsupportedLeafError: a value is an object that cannot be built without running its own code.
        """
        entries = self._opened
        assert entries is not None  # the protocol calls `read_metadata` first
        values = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        requests = _requests([item for item in plan.items if item.type != LoadItemType.BYTE_IO], planner, entries)
        arrays = self._load(entries, requests, [entries.entries[item.storage_index.fqn] for item in values])
        for request in requests:
            request.finish()
            planner.commit_tensor(request.item, request.target)
        for item, value in zip(values, arrays, strict=True):
            buffer = io.BytesIO()
            torch.save(value, buffer)
            buffer.seek(0)
            planner.load_bytes(item, buffer)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _load(self, entries: _Entries, requests: Sequence[_Request], values: Sequence[Entry]) -> list[Any]:
        """Read boxes into the memory of the requests, and return values."""
        shards: dict[str, list[ckptcore.ArrayShard]] = {}
        for request in requests:
            shards.setdefault(request.item.storage_index.fqn, []).append(request.shard)
        wanted = dict(itertools.chain.from_iterable(map(entries.value_leaves, values)))
        wanted.update(itertools.starmap(entries.sharded, shards.items()))
        target = _target(entries.tree.skeleton, wanted, itertools.count())
        if wanted:
            with CheckpointError.offering():
                ckptcore.load_into(self.path, target, context=self._context)
        return [entries.value(entry, target) for entry in values]


def _requests(items: Sequence[ReadItem], planner: LoadPlanner, entries: _Entries) -> list[_Request]:
    """Ask the planner for the tensors to fill. Only one of several tied tensors is read into directly."""
    requests, known = [], set()
    for item in items:
        target = planner.resolve_tensor(item).detach()
        address = target.data_ptr()
        requests.append(_Request.of(item, target, entries.dtype_of(item), in_place=address not in known))
        known.add(address)
    return requests


@dataclass(frozen=True, slots=True)
class _Request:
    """A box to read into a tensor.

    Attributes:
        item: the item of the plan.
        target: the tensor to fill.
        memory: the tensor to read into: the target itself, or a temporary tensor of the stored dtype.
        shard: the box as a shard that shares this memory.
    """

    item: ReadItem
    target: torch.Tensor
    memory: torch.Tensor
    shard: ckptcore.ArrayShard

    @classmethod
    def of(cls, item: ReadItem, target: torch.Tensor, dtype: torch.dtype, *, in_place: bool) -> _Request:
        """Describe a request.

        Raises:
            AssertionError: the planner's tensor does not have the size of the item.
        """
        if target.size() != item.lengths:
            raise AssertionError(f"req {item.storage_index} mismatch sizes {target.size()} vs {item.lengths}")
        memory = target if in_place and fits_in_place(target, dtype) else torch.empty(item.lengths, dtype=dtype)
        start = tuple(item.storage_offsets)
        stop = tuple([first + extent for first, extent in zip(start, item.lengths, strict=True)])
        return cls(item, target, memory, ckptcore.ArrayShard(Box(start, stop), host_array(memory)))

    def finish(self) -> None:
        """Copy to the target, unless it was read into directly."""
        if self.memory is self.target:
            torch.autograd.graph.increment_version(self.target)
        else:
            self.target.copy_(self.memory)


@dataclass(frozen=True, slots=True)
class _Entries:
    """The entries of a checkpoint.

    Attributes:
        tree: its tree.
        abstract: the same tree with abstract leaves.
        entries: its entries by name.
        paths: the keys that lead to each entry in the state dict that was saved; None if unknown.
        items: names of the values that are stored as torch.save files.
        checkpoint_id, save_id: ids that torch gave to the save; None if unknown.
    """

    tree: TreeMetadata
    abstract: Any
    entries: Mapping[str, Entry]
    paths: Mapping[str, Steps] | None
    items: frozenset[str]
    checkpoint_id: str | None
    save_id: str | None

    @classmethod
    def of(cls, metadata: CheckpointMetadata) -> _Entries:
        """Find the entries."""
        entries = {entry.name: entry for entry in entries_of(metadata.tree)}
        tree, abstract = metadata.tree, metadata.abstract
        custom: Mapping[str, Any] = metadata.custom
        if metadata.layout != DcpEntries().name:
            custom = custom.get(CUSTOM, {})
            paths: Mapping[str, Steps] = {name: entry.steps for name, entry in entries.items()}
            items = frozenset(custom.get("items", ())) & entries.keys()
        else:
            paths = {name: tuple(path) for name, path in custom["paths"].items()}
            arrays = [name for name, entry in entries.items() if isinstance(_record(tree, entry), ArrayRecord)]
            items = frozenset(entries.keys() - arrays)
        ids = custom.get("checkpoint_id"), custom.get("save_id")
        return cls(tree, abstract, entries, paths or None, items, *ids)

    def storage_metadata(self, entry: Entry) -> TensorStorageMetadata | BytesStorageMetadata:
        """Describe an entry. Arrays with a dtype that PyTorch lacks are values, and load as NumPy arrays."""
        dtype = self._torch_dtype(entry)
        if dtype is None:
            return BytesStorageMetadata()
        size = torch.Size(self.tree.leaves[entry.leaves.start].spec.shape)  # type: ignore[union-attr]  # it has a dtype
        chunk = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
        return TensorStorageMetadata(TensorProperties(dtype=dtype), size, [chunk])

    def dtype_of(self, item: ReadItem) -> torch.dtype:
        """Return the dtype of a tensor."""
        dtype = self._torch_dtype(self.entries[item.storage_index.fqn])
        assert dtype is not None  # it was planned as a tensor
        return dtype

    def _torch_dtype(self, entry: Entry) -> torch.dtype | None:
        record = _record(self.tree, entry)
        if not isinstance(record, ArrayRecord) or record.kind in _TEXT_KINDS:
            return None
        return torch_dtype(record.spec.dtype)

    def sharded(self, name: str, parts: Sequence[ckptcore.ArrayShard]) -> tuple[int, ckptcore.ShardedArray]:
        """Return the number of an array, and a request for parts of it."""
        leaf = self.entries[name].leaves.start
        record = self.tree.leaves[leaf]
        assert isinstance(record, ArrayRecord)  # it was planned as a tensor
        return leaf, ckptcore.ShardedArray(record.spec.shape, record.spec.numpy_dtype, parts)

    def value_leaves(self, entry: Entry) -> Iterator[tuple[int, Any]]:
        """Yield the number and the request of each leaf of a value. Arrays are requested as tensors."""
        for leaf in entry.leaves:
            abstract = _at(self.abstract, self.tree.paths[leaf])
            dtype = torch_dtype(abstract.dtype.name) if isinstance(abstract, ckptcore.AbstractArray) else None
            yield leaf, abstract if dtype is None else torch.empty(abstract.shape, dtype=dtype, device="meta")

    def value(self, entry: Entry, loaded: Any) -> Any:
        """Return a value from the loaded tree.

        Raises:
            UnsupportedLeafError: it is an object that cannot be built without running its own code.
        """
        if entry.name not in self.items:
            return _built(entry.node, entry.path, loaded)
        try:
            with torch.serialization.safe_globals(_trusted()):
                return torch.load(io.BytesIO(_at(loaded, entry.path)), weights_only=True)
        except pickle.UnpicklingError as error:
            # Keep only this line: torch's other lines recommend options of torch.load, which this call lacks.
            reason = str(error).rpartition("WeightsUnpickler error: ")[2].partition("\n")[0]
            raise UnsupportedLeafError(
                f"{entry.name!r} is an object of a class that PyTorch does not trust, and loading it could run any "
                "code. If you trust the checkpoint, allow the class with torch.serialization.add_safe_globals: "
                f"{reason}"
            ) from error


def _record(tree: TreeMetadata, entry: Entry) -> LeafRecord | None:
    return None if isinstance(entry.node, Node) else tree.leaves[entry.leaves.start]


class _EntriesPlugin:
    """Registers the layout that returns the entries of torch's checkpoints under their flat names."""

    @ckptcore.hookimpl
    def ckpt_layouts(self) -> Mapping[str, LayoutFactory]:
        """Return the layout by name."""
        return {DcpEntries().name: DcpEntries}


def _reading_entries(context: ckptcore.Context) -> ckptcore.Context:
    """Return a Context that reads the flat entries of torch's checkpoints, without the other ranks of the job.

    Ranks can load different parts, and torch gathers their errors.
    """
    plugins = dataclasses.replace(context.plugins, extra=[*context.plugins.extra, _EntriesPlugin()])
    return dataclasses.replace(context, plugins=plugins, job=dataclasses.replace(context.job, reads="alone"))


@functools.cache
def _default_context() -> ckptcore.Context:
    return _reading_entries(ckptcore.Context())


def _trusted() -> list[Any]:
    """Return the globals that pickles of NumPy arrays, NumPy scalars and BytesIO need and PyTorch does not trust."""
    array = np.zeros(1)
    dtypes = {type(np.dtype(code)) for code in np.typecodes["All"]}
    return [io.BytesIO, np.ndarray, np.dtype, array.__reduce__()[0], array[0].__reduce__()[0], *dtypes]


def _target(node: Skeleton, wanted: Mapping[int, Any], numbers: Iterator[int]) -> Any:
    """Return a tree to load into: the wanted leaves, and placeholders for all others."""
    if not isinstance(node, Node):
        return wanted.get(next(numbers), ckptcore.PLACEHOLDER)
    children = [_target(child, wanted, numbers) for child in node.children]
    if node.keys and all(child is ckptcore.PLACEHOLDER for child in children):
        return ckptcore.PLACEHOLDER
    return _container(node, children)


def _container(node: Node, children: list[Any]) -> Any:
    """Return a container of the standard library, as `ckptcore.load` does without an abstract tree."""
    if node.kind in ("list", "tuple") or (node.kind == "object" and are_indices(node.keys)):
        return tuple(children) if node.kind == "tuple" else children
    make = collections.OrderedDict if node.kind == "OrderedDict" else dict
    return make(zip([_plain_key(key) for key in node.keys], children, strict=True))


def _plain_key(key: Key) -> PlainKey:
    return key.name if isinstance(key, Attribute) else key


def _at(tree: Any, path: TreePath) -> Any:
    """Return the subtree at a path."""
    for key in path:
        tree = tree[_plain_key(key)]
    return tree


def _built(node: Skeleton, path: TreePath, loaded: Any) -> Any:
    """Return a value from the loaded tree, with the types of the standard library that it had.

    Raises:
        UnsupportedLeafError: the value contains an object of another type.
    """
    if not isinstance(node, Node):
        return _at(loaded, path)
    children = [_built(child, (*path, key), loaded) for key, child in zip(node.keys, node.children, strict=True)]
    value = _container(node, children)
    if (make := _MAKERS.get(node.type or "")) is not None:
        return make(value)
    if node.kind == "object":
        raise UnsupportedLeafError(
            f"{format_path(path)} is a {node.type}, which only its own code can build, and a load runs no code of the "
            "checkpoint. Remove it from the state dict, or load it with the original torch.distributed.checkpoint"
        )
    return value
