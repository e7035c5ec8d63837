"""Leaf handler of ShardedTensors, which occur in state dicts of FSDP1.

`torch.distributed._shard.sharded_tensor.ShardedTensor` knows the offsets and sizes of the shards of
all processes (``metadata().shards_metadata``, torch 2.13.0), and has the shards of this process as
tensors (``local_shards()``). Any other access to a ShardedTensor, even to its shape, emits a
deprecation warning.
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

from ckptcore.errors import PluginError, UnsupportedLeafError
from ckptcore.model import ArrayRecord, ArraySpec, Box, HostArray, LeafRecord, Pending, Shard, StridedMemory
from ckptcore.planning import cuts_of
from ckptcore.protocols import HostMemory, LeafHandler, Priority
from ckptcore_torch.abstracts import empty_tensor, expect_device
from ckptcore_torch.conversions import FRAMEWORK, encoding_of
from ckptcore_torch.tensors import TensorHandler, expect_shape, is_fake

_LOCAL_HANDLER: Final = TensorHandler()


class ShardedTensorHandler(LeafHandler):
    """Handler of `torch.distributed._shard.sharded_tensor.ShardedTensor`.

    Each process saves and loads its own shards. A loaded ShardedTensor has the shards, dtype and
    process group of the abstract leaf. It is stored as one array, which also loads into tensors,
    DTensors and ShardedTensors with other shards.
    """

    priority = Priority.FRAMEWORK

    def describe(self, leaf: Any) -> LeafRecord:
        """Return the global shape and dtype, and the cuts between the shards of all processes."""
        metadata = leaf.metadata()
        encoding = encoding_of(metadata.tensor_properties.dtype)
        spec = ArraySpec(tuple(metadata.size), encoding.name)
        return ArrayRecord(spec, encoding.kind, cuts_of(spec.shape, map(_box, metadata.shards_metadata)), FRAMEWORK)

    def abstract(self, leaf: Any) -> ShardedTensor:
        """Return a ShardedTensor with FakeTensors as its shards."""
        # Not meta tensors: torch checks that shards are on the devices in the metadata.
        self.describe(leaf)  # raises an error if the leaf cannot be stored
        tensors = [shard.tensor for shard in leaf.local_shards()]
        return _with_shards(leaf, [empty_tensor(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors])

    def identity(self, leaf: Any) -> Hashable | None:
        """Return the memory and box of each shard of this process.

        Return None if this process has no shards, or if one of them is a FakeTensor or has no
        elements.
        """
        if any(is_fake(shard.tensor) for shard in leaf.local_shards()):
            return None
        shards = tuple([(_box(shard.metadata), _LOCAL_HANDLER.identity(shard.tensor)) for shard in leaf.local_shards()])
        if not shards or any(identity is None for _, identity in shards):
            return None
        return ("sharded", tuple(leaf.metadata().size), shards)

    def shards(self, leaf: Any, rank: int, size: int) -> Sequence[Shard]:
        """Return the shards of this process, with replica numbers in hybrid sharding.

        Raises:
            UnsupportedLeafError: if a shard has no memory or a wrong shape, or if its replicas are
                unknown.
        """
        replica, replicas = _replica(leaf, rank, size)
        shards = []
        for box, local in _local_shards(leaf):
            if tuple(local.shape) != box.shape:
                raise UnsupportedLeafError(
                    f"a ShardedTensor of the shape {tuple(leaf.metadata().size)} has a local "
                    f"shard of the shape {tuple(local.shape)}, but its metadata has {box.shape}; "
                    "create the shard with the shape in the metadata"
                )
            _LOCAL_HANDLER.shards(local, rank, size)  # checks the memory, and waits for pending work of the device
            shards.append(Shard(box, replica, replicas))
        return shards

    def copy_to_host(self, leaf: Any, boxes: Sequence[Box], memory: HostMemory) -> Sequence[Pending[HostArray]]:
        """Copy boxes of this process's shards to the host."""
        return [_LOCAL_HANDLER.copy_to_host(*_find_shard(leaf, box), memory)[0] for box in boxes]

    def view_on_host(self, leaf: Any, boxes: Sequence[Box]) -> Sequence[Pending[HostArray]]:
        """View boxes of this process's shards on the host."""
        return [_LOCAL_HANDLER.view_on_host(*_find_shard(leaf, box))[0] for box in boxes]

    def wanted(self, abstract: Any, stored: ArrayRecord) -> Sequence[Box]:
        """Return the boxes of this process's shards.

        Raises:
            TreeMismatchError: if the shapes differ.
            UnsupportedLeafError: if a FakeTensor requests a device that is missing.
        """
        expect_shape("ShardedTensor", tuple(abstract.metadata().size), stored)
        for shard in abstract.local_shards():
            if is_fake(shard.tensor):
                expect_device(shard.tensor.device)
        return list(dict.fromkeys(box for box, _ in _local_shards(abstract)))

    def destination(self, abstract: Any, stored: ArrayRecord, box: Box) -> HostArray | None:
        """Return the memory of the shard with this box if it is a contiguous CPU tensor of the stored dtype."""
        for own, local in _local_shards(abstract):
            if own == box and not is_fake(local):
                part = ArrayRecord(ArraySpec(box.shape, stored.spec.dtype), stored.kind)
                return _LOCAL_HANDLER.destination(local, part, Box.whole(box.shape))
        return None

    def build(self, abstract: Any, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]) -> object:
        """Build a ShardedTensor with the shards and dtype of `abstract`, on their devices."""
        stored = expect_shape("ShardedTensor", tuple(abstract.metadata().size), stored)
        arrays = dict(boxes)
        tensors = []
        for shard in abstract.local_shards():
            box = _box(shard.metadata)
            record = ArrayRecord(ArraySpec(box.shape, stored.spec.dtype), stored.kind)
            array = arrays[box] if box.size else np.empty(box.shape, stored.spec.numpy_dtype)
            tensors.append(_LOCAL_HANDLER.build(shard.tensor.detach(), record, [(Box.whole(box.shape), array)]))
        return _with_shards(abstract, tensors)

    def fill(self, target: Any, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]) -> bool:
        """Copy into the shards of this process.

        Return False if a shard cannot be filled, because it is abstract or its elements may
        overlap.
        """
        stored = expect_shape("ShardedTensor", tuple(target.metadata().size), stored)
        arrays = dict(boxes)
        filled = True
        for box, local in _local_shards(target):
            record = ArrayRecord(ArraySpec(box.shape, stored.spec.dtype), stored.kind)
            elements = [(Box.whole(box.shape), arrays[box])]
            filled = not is_fake(local) and _LOCAL_HANDLER.fill(local, record, elements) and filled
        return filled

    def memory_to_fill(self, target: Any) -> Sequence[StridedMemory] | None:
        """Return the memory of this process's shards, or None if `fill` returns False."""
        memories: list[StridedMemory] = []
        for _, local in _local_shards(target):
            memory = None if is_fake(local) else _LOCAL_HANDLER.memory_to_fill(local)
            if memory is None:
                return None
            memories.extend(memory)
        return memories


def sharded_like(leaf: ShardedTensor, dtype: torch.dtype) -> ShardedTensor:
    """Return a ShardedTensor with the same shards, another dtype and uninitialized elements."""
    return _with_shards(leaf, [torch.empty_like(shard.tensor, dtype=dtype) for shard in leaf.local_shards()])


def _with_shards(like: Any, tensors: Sequence[Any]) -> ShardedTensor:
    """Return a ShardedTensor like `like`, with other tensors as the shards of this process."""
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
    """Return the box and the detached tensor of each nonempty shard of this process."""
    shards = [(_box(shard.metadata), shard.tensor.detach()) for shard in leaf.local_shards()]
    return [(box, local) for box, local in shards if box.size]


def _find_shard(leaf: Any, box: Box) -> tuple[torch.Tensor, list[Box]]:
    """Return the shard that contains a box, and the box within it."""
    for own, local in _local_shards(leaf):
        if own.contains(box):
            slices = box.within(own)
            return local, [Box(tuple([part.start for part in slices]), tuple([part.stop for part in slices]))]
    raise PluginError(
        f"internal error: this process has no {box} of a ShardedTensor {tuple(leaf.metadata().size)}; "
        "please report this"
    )


def _replica(leaf: Any, rank: int, size: int) -> tuple[int, int]:
    """Return the number of this process's replica group, and the number of replica groups.

    A ShardedTensor knows only its own process group. With hybrid sharding there are several groups
    of equal size, each with consecutive ranks or with ranks at a constant stride.
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
        f"cannot determine the replicas of a ShardedTensor over the ranks {ranks} of {size}; "
        "save it in a job that consists of these ranks, or convert it to a DTensor"
    )
