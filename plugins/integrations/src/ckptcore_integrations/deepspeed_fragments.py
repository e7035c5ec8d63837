"""Fragments: the elements of each parameter that the optimizer of DeepSpeed steps on this process.

ZeRO packs the parameters of a group one after another into a flat tensor, and each process steps a slice of it. So a
process has one range of the elements of a parameter, in C order, which is a few boxes of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from ckptcore_torch.conversions import elements_as, encoding_of, host_view
from deepspeed import comm
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ckptcore import ArrayShard, ShardedArray
from ckptcore.model import ArrayRecord, ArraySpec, Box, name_of_dtype
from ckptcore.planning import boxes_of_range

OPTIMIZERS = (
    DeepSpeedZeroOptimizer,
    DeepSpeedZeroOptimizer_Stage3,
    BF16_Optimizer,
    FP16_Optimizer,
    FP16_UnfusedOptimizer,
)
"""The optimizers of DeepSpeed whose fragments are known. Subclasses of them divide parameters in other ways."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """A range of the elements of a parameter, in C order, and its place in a tensor of this process.

    Attributes:
        name: the name of the parameter in the module.
        shape: the shape of the whole parameter.
        start: the first element of the parameter that this process has.
        count: the number of elements, which may be 0.
        tensor: the tensor with these elements. For fragments of an optimizer, the one that it steps.
        offset: where they begin in the flattened tensor, in elements.
        group: the number of the group of the optimizer.
        replicas: the number of processes that all have these elements; the rank is the number of the replica.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    count: int
    tensor: torch.Tensor
    offset: int = 0
    group: int = 0
    replicas: int = 1

    @property
    def _is_whole(self) -> bool:
        """True if the tensor is that of the parameter. It may then have other strides, unlike a flat one."""
        return tuple(self.tensor.shape) == self.shape and self.count == math.prod(self.shape)

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the elements in a tensor like the fragment's."""
        tensor = tensor.detach()
        return tensor if self._is_whole else tensor[self.offset : self.offset + self.count]

    def pieces(self, own: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
        """Return the boxes of the parameter, each with a view of its elements."""
        if self._is_whole:
            yield Box.whole(self.shape), own
            return
        position = 0
        for box in boxes_of_range(self.shape, self.start, self.start + self.count):
            yield box, own[position : position + box.size].view(box.shape)
            position += box.size

    def array(self, tensor: torch.Tensor) -> ShardedArray:
        """Return the parameter's part of a tensor like the fragment's. It shares memory on the CPU."""
        replica = comm.get_rank() if self.replicas > 1 else 0
        shards = [
            ArrayShard(box, host_view(view), replica, self.replicas)
            for box, view in self.pieces(self._own(tensor).cpu())
        ]
        return ShardedArray(self.shape, encoding_of(tensor.dtype).name, shards)

    def request(self, dtype: torch.dtype | np.dtype[Any]) -> ShardedArray:
        """Return the request for the elements of the fragment."""
        named = encoding_of(dtype).name if isinstance(dtype, torch.dtype) else dtype
        return ShardedArray(self.shape, named, [ArrayShard(box) for box, _ in self.pieces(self._own(self.tensor))])

    def fill(self, tensor: torch.Tensor, loaded: ShardedArray) -> None:
        """Copy the loaded elements into a tensor like the fragment's."""
        elements = {shard.box: shard.elements for shard in loaded.shards}
        for box, view in self.pieces(self._own(tensor)):
            found = np.ascontiguousarray(elements[box])
            record = ArrayRecord(ArraySpec(found.shape, name_of_dtype(found.dtype)))
            view.copy_(elements_as(found, record, tensor.dtype).view(view.shape))


def fragment_of_weight(name: str, parameter: Any) -> Fragment:
    """Return the fragment of a parameter that ZeRO 3 has divided, in the weights of this process."""
    rank = comm.get_rank(group=parameter.ds_process_group)
    size = parameter.ds_tensor.ds_numel  # with padding
    start = min(rank * size, parameter.ds_numel)
    return Fragment(name, tuple(parameter.ds_shape), start, min(size, parameter.ds_numel - start), parameter.ds_tensor)


def fragments_of(engine: Any) -> list[Fragment]:
    """Return the fragments of an engine with one of `OPTIMIZERS`: on every process one for each parameter of it."""
    optimizer, names = engine.optimizer, engine.param_names
    kind = type(optimizer)
    if kind is DeepSpeedZeroOptimizer:
        return list(_flat_fragments(optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups, names))
    if kind is BF16_Optimizer:
        return list(_flat_fragments(optimizer.bf16_groups, optimizer.fp32_groups_flat_partition, names))
    if kind is DeepSpeedZeroOptimizer_Stage3:
        return list(_stage3_fragments(optimizer, names))
    masters = optimizer.fp32_groups_flat if kind is FP16_Optimizer else optimizer.fp32_groups
    return list(_replicated_fragments(optimizer.fp16_groups, masters, names))


def _flat_fragments(
    groups: Sequence[Sequence[Any]], flats: Sequence[torch.Tensor], names: Mapping[Any, str]
) -> Iterator[Fragment]:
    """ZeRO 1 and 2: a process has a slice of all parameters of a group."""
    for number, (group, flat) in enumerate(zip(groups, flats, strict=True)):
        for parameter in group:
            name, shape, mapping = names[parameter], tuple(parameter.shape), parameter._hp_mapping
            if mapping is None:
                yield Fragment(name, shape, 0, 0, flat, 0, number)
            else:
                whole, own = mapping.lp_fragment_address, mapping.hp_fragment_address
                yield Fragment(name, shape, whole.start, whole.numel, flat, own.start, number)


def _stage3_fragments(optimizer: Any, names: Mapping[Any, str]) -> Iterator[Fragment]:
    """ZeRO 3: a process has a slice of each parameter, and packs the slices of some parameters into a flat tensor."""
    for number, parameters in enumerate(optimizer.fp16_groups):
        flat, group = optimizer.fp32_partitioned_groups_flat[number], optimizer.sub_group_to_group_id[number]
        offset = 0
        for parameter in parameters:
            weight = fragment_of_weight(names[parameter], parameter)
            yield Fragment(weight.name, weight.shape, weight.start, weight.count, flat, offset, group)
            offset += parameter.partition_numel()


def _replicated_fragments(
    groups: Sequence[Sequence[Any]], masters: Sequence[Any], names: Mapping[Any, str]
) -> Iterator[Fragment]:
    """16 bits without ZeRO: a process has all parameters of a group, in one flat tensor or in a tensor for each."""
    processes = comm.get_world_size()
    for number, (group, tensors) in enumerate(zip(groups, masters, strict=True)):
        is_flat = isinstance(tensors, torch.Tensor)
        offset = 0
        for position, parameter in enumerate(group):
            tensor = tensors if is_flat else tensors[position]
            shape, count = tuple(parameter.shape), parameter.numel()
            yield Fragment(names[parameter], shape, 0, count, tensor, offset, number, processes)
            offset += count if is_flat else 0
