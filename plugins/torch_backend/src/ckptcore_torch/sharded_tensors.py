"""The leaf handler of ShardedTensors, of which each process holds some shards, as the state dicts of FSDP1 have them.

`torch.distributed._shard.sharded_tensor.ShardedTensor` says of every shard of all processes where it begins and how long it is
(``metadata().shards_metadata``, torch 2.13.0), and holds those of its own process as tensors (``local_shards()``). Asked for anything
else, also for its shape, it warns that it is deprecated.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard

from ckptcore.errors import PluginError, TreeMismatchError, UnsupportedLeafError
from ckptcore.model import (
    ArrayRecord,
    ArraySpec,
    Box,
    HostArray,
    LeafRecord,
    Pending,
    Shard,
    StridedMemory,
    ValueRecord,
)
from ckptcore.planning import cuts_of
from ckptcore.protocols import HostMemory, Priority
from ckptcore_torch.abstracts import empty_tensor, expect_device
from ckptcore_torch.dtypes import encoding_of
from ckptcore_torch.tensors import TensorHandler, is_fake

__all__ = ["ShardedTensorHandler", "sharded_like"]

_LOCAL: Final = TensorHandler()


class ShardedTensorHandler:
    """`torch.distributed._shard.sharded_tensor.ShardedTensor`.

    Each process saves its shards and reads them; built for an abstract one, a ShardedTensor has its shards, dtype and group.
    Saved is one array: it loads into tensors, DTensors and ShardedTensors of other shards as well.
    """

    priority = Priority.FRAMEWORK

    def describe(self, leaf: Any) -> LeafRecord:
        """Shape and dtype of the whole, and where the shards of all processes meet."""
        metadata = leaf.metadata()
        encoding = encoding_of(metadata.tensor_properties.dtype)
        spec = ArraySpec(tuple(metadata.size), encoding.name)
        return ArrayRecord(spec, encoding.kind, cuts_of(spec.shape, map(_box, metadata.shards_metadata)))

    def abstract(self, leaf: Any) -> ShardedTensor:
        """A ShardedTensor of the same shards over FakeTensors: torch wants shards on the devices that its metadata says."""
        self.describe(leaf)  # refuses what cannot be stored
        tensors = [shard.tensor for shard in leaf.local_shards()]
        return _with_shards(leaf, [empty_tensor(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors])

    def identity(self, leaf: Any) -> Hashable | None:
        """Where the memory of each shard is, and which part of the whole it is; None without elements."""
        if any(is_fake(shard.tensor) for shard in leaf.local_shards()):
            return None
        shards = tuple([(_box(shard.metadata), _LOCAL.identity(shard.tensor)) for shard in leaf.local_shards()])
        if not shards or any(identity is None for _, identity in shards):
            return None
        return ("sharded", tuple(leaf.metadata().size), shards)

    def shards(self, leaf: Any, rank: int, size: int) -> Sequence[Shard]:
        """The shards of this process. Where others hold the same, as in hybrid sharding, one of them is to write each.

        Raises:
            UnsupportedLeafError: if a shard has no memory or another shape than it should, or it cannot be told who else has it.
        """
        replica, replicas = _replica(leaf, rank, size)
        found = []
        for box, local in _local_shards(leaf):
            if tuple(local.shape) != box.shape:
                raise UnsupportedLeafError(
                    f"a ShardedTensor of the shape {tuple(leaf.metadata().size)} has a local shard of the shape {tuple(local.shape)} "
                    f"where {box.shape} is expected; make it with the shapes that its metadata says"
                )
            _LOCAL.shards(
                local, rank, size
            )  # refuses what has no memory, and orders copies after what runs on the device
            found.append(Shard(box, replica, replicas))
        return found

    def copy_to_host(self, leaf: Any, boxes: Sequence[Box], memory: HostMemory) -> Sequence[Pending[HostArray]]:
        """As of a plain tensor, from the shards of this process."""
        return [_LOCAL.copy_to_host(*_located(leaf, box), memory)[0] for box in boxes]

    def view_on_host(self, leaf: Any, boxes: Sequence[Box]) -> Sequence[Pending[HostArray]]:
        """As of a plain tensor, from the shards of this process."""
        return [_LOCAL.view_on_host(*_located(leaf, box))[0] for box in boxes]

    def wanted(self, abstract: Any, stored: ArrayRecord) -> Sequence[Box]:
        """The boxes of the shards of this process.

        Raises:
            TreeMismatchError: if the shapes differ.
            UnsupportedLeafError: if a FakeTensor asks for a device that is not here.
        """
        _expect_shape(abstract, stored)
        for shard in abstract.local_shards():
            if is_fake(shard.tensor):
                expect_device(shard.tensor.device)
        return list(dict.fromkeys(box for box, _ in _local_shards(abstract)))

    def destination(self, abstract: Any, stored: ArrayRecord, box: Box) -> HostArray | None:
        """The memory of the shard, where it lies as it is stored."""
        for own, local in _local_shards(abstract):
            if own == box and not is_fake(local):
                part = ArrayRecord(ArraySpec(box.shape, stored.spec.dtype), stored.kind)
                return _LOCAL.destination(local, part, Box.whole(box.shape))
        return None

    def build(self, abstract: Any, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]) -> object:
        """A ShardedTensor with the shards and dtype of `abstract`, on their devices."""
        _expect_shape(abstract, stored)
        assert isinstance(stored, ArrayRecord)  # a value has no shape
        arrays = dict(boxes)
        made = []
        for shard in abstract.local_shards():
            box = _box(shard.metadata)
            record = ArrayRecord(ArraySpec(box.shape, stored.spec.dtype), stored.kind)
            array = arrays[box] if box.size else np.empty(box.shape, stored.spec.numpy_dtype)
            made.append(_LOCAL.build(shard.tensor.detach(), record, [(Box.whole(box.shape), array)]))
        return _with_shards(abstract, made)

    def fill(self, target: Any, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]) -> bool:
        """Copy into the shards of this process; False if one cannot be changed."""
        _expect_shape(target, stored)
        assert isinstance(stored, ArrayRecord)  # a value has no shape
        arrays = dict(boxes)
        filled = True
        for box, local in _local_shards(target):
            record = ArrayRecord(ArraySpec(box.shape, stored.spec.dtype), stored.kind)
            elements = [(Box.whole(box.shape), arrays[box])]
            filled = not is_fake(local) and _LOCAL.fill(local, record, elements) and filled
        return filled

    def memory_to_fill(self, target: Any) -> Sequence[StridedMemory] | None:
        """The memory of the shards of this process; None if one cannot be changed."""
        found: list[StridedMemory] = []
        for _, local in _local_shards(target):
            memory = None if is_fake(local) else _LOCAL.memory_to_fill(local)
            if memory is None:
                return None
            found.extend(memory)
        return found


def sharded_like(leaf: ShardedTensor, dtype: torch.dtype) -> ShardedTensor:
    """A ShardedTensor with the shards of another and elements that are not set yet, of another dtype."""
    return _with_shards(leaf, [torch.empty_like(shard.tensor, dtype=dtype) for shard in leaf.local_shards()])


def _with_shards(like: Any, tensors: Sequence[Any]) -> ShardedTensor:
    metadata = copy.deepcopy(like.metadata())
    if tensors:
        metadata.tensor_properties = dataclasses.replace(metadata.tensor_properties, dtype=tensors[0].dtype)
    shards = [
        LocalShard(tensor, copy.deepcopy(shard.metadata))
        for tensor, shard in zip(tensors, like.local_shards(), strict=True)
    ]
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, metadata, process_group=like._process_group, sharding_spec=like.sharding_spec()
    )


def _box(metadata: Any) -> Box:
    start = tuple(metadata.shard_offsets)
    return Box(start, tuple([low + extent for low, extent in zip(start, metadata.shard_sizes, strict=True)]))


def _local_shards(leaf: Any) -> list[tuple[Box, torch.Tensor]]:
    """The shards of this process that have elements: the box of each, and its tensor, outside of autograd."""
    shards = [(_box(shard.metadata), shard.tensor.detach()) for shard in leaf.local_shards()]
    return [(box, local) for box, local in shards if box.size]


def _located(leaf: Any, box: Box) -> tuple[torch.Tensor, list[Box]]:
    """The shard that a box is in, and where in it."""
    for own, local in _local_shards(leaf):
        if own.contains(box):
            place = box.within(own)
            return local, [Box(tuple([part.start for part in place]), tuple([part.stop for part in place]))]
    raise PluginError(
        f"{box} of a ShardedTensor {tuple(leaf.metadata().size)} is asked of a process that does not hold it"
    )


def _expect_shape(abstract: Any, stored: LeafRecord) -> None:
    shape = tuple(abstract.metadata().size)
    if isinstance(stored, ValueRecord):
        difference = f"a {stored.kind} is stored, asked for as a ShardedTensor of the shape {shape}"
        raise TreeMismatchError(f"{difference}; give a {stored.kind} in its place", [difference])
    if stored.spec.shape != shape:
        difference = f"stored with the shape {stored.spec.shape}, asked for as a ShardedTensor of the shape {shape}"
        raise TreeMismatchError(f"{difference}; give a ShardedTensor of the stored shape", [difference])


def _replica(leaf: Any, rank: int, size: int) -> tuple[int, int]:
    """Which of how many groups of processes, each of which holds all shards, this process is in.

    A ShardedTensor knows only its own group. Hybrid sharding, the one case where there are several, divides all processes
    evenly: into runs of consecutive ranks, or into ranks that are equally far from each other.
    """
    ranks = dist.get_process_group_ranks(leaf._process_group)
    groups, rest = divmod(size, len(ranks))
    if groups <= 1 and not rest:
        return 0, 1
    if not rest:
        first = ranks[0]
        if first % len(ranks) == 0 and ranks == list(range(first, first + len(ranks))):
            return rank // len(ranks), groups
        if first < groups and ranks == list(range(first, size, groups)):
            return rank % groups, groups
    raise UnsupportedLeafError(
        f"a ShardedTensor over the ranks {ranks} of {size} does not tell which other ranks hold the same; "
        "save it in a job of these ranks alone, or make it a DTensor"
    )
