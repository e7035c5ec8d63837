"""Leaf handler of DTensors, as used by FSDP2 and tensor parallelism."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Replicate

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
from ckptcore.protocols import HostBytes, HostMemory, LeafHandler, Priority
from ckptcore_torch.abstracts import empty_tensor, expect_device
from ckptcore_torch.conversions import elements_as
from ckptcore_torch.dtypes import encoding_of
from ckptcore_torch.placements import DTensorPlacement, Pieces, placed_pieces, sharding_cuts, sharding_notes
from ckptcore_torch.tensors import TensorHandler, is_fake

__all__ = ["DTensorHandler"]

_LOCAL: Final = TensorHandler()


class DTensorHandler(LeafHandler):
    """Handler of `torch.distributed.tensor.DTensor`, including Parameters.

    Each process saves its boxes, of which one replica is written, and reads the boxes of its local
    tensor. A DTensor is built with the mesh and placements of the abstract one, which can be on the
    meta device.
    """

    priority = Priority.FRAMEWORK

    def describe(self, leaf: Any) -> LeafRecord:
        """Return the global shape and dtype, the cuts between shards, and the mesh and placements as notes.

        Raises:
            UnsupportedLeafError: for partial sums.
        """
        placed = _placed(leaf)
        encoding = encoding_of(leaf.dtype)
        spec = ArraySpec(placed.shape, encoding.name)
        notes = {"dtensor": sharding_notes(leaf.device_mesh, placed.placements)}
        return ArrayRecord(spec, encoding.kind, sharding_cuts(placed), notes)

    def abstract(self, leaf: Any) -> torch.Tensor:
        """Return a DTensor with the same mesh and placements over an abstract local tensor.

        The local tensor is on the meta device, which means the devices of the mesh. If the elements
        are on another device, as with CPU offload of FSDP2, it is a FakeTensor.
        """
        self.describe(leaf)  # raises an error if the leaf cannot be stored
        local = _local(leaf)
        if local.is_meta or is_fake(local):
            made: torch.Tensor = leaf
            return made
        elsewhere = local.device != _mesh_device(leaf)
        return _over(leaf, empty_tensor(local.shape, local.dtype, local.device if elsewhere else None))

    def identity(self, leaf: Any) -> Hashable | None:
        """Return an id of the local tensor's memory and strides, also if this process holds no elements."""
        local = _local(leaf)
        placed = _placed(leaf)
        storage = local.untyped_storage()._cdata
        return ("dtensor", storage, local.storage_offset(), local.shape, local.stride(), local.dtype, placed)

    def shards(self, leaf: Any, rank: int, size: int) -> Sequence[Shard] | None:
        """Return the boxes of this process, or None if it is not in the mesh.

        Raises:
            UnsupportedLeafError: if the tensor has no elements in memory.
        """
        pieces = _pieces(leaf)
        if pieces is None:
            return None
        local = _local(leaf)
        if tuple(local.shape) != pieces.shape:
            raise UnsupportedLeafError(
                f"the local tensor of a DTensor with the placements {leaf.placements} on a "
                f"mesh of {tuple(leaf.device_mesh.shape)} has the shape {tuple(local.shape)}; "
                f"expected {pieces.shape}, because torch divides the shape {tuple(leaf.shape)} "
                "so; create it with distribute_tensor, or with from_local and the right shape"
            )
        _LOCAL.shards(local, rank, size)  # checks the memory, and orders copies after pending work of the device
        return tuple([Shard(box, pieces.replica, pieces.replicas) for box in pieces.boxes])

    def shards_of(self, leaf: Any, process: int | None, rank: int, size: int) -> Sequence[Shard] | None:
        """Return the boxes of a process, from mesh and placements only.

        Processes have their torch ranks.
        """
        if process is None:
            pieces = _pieces(leaf)
        else:
            coordinate = _coordinate(leaf.device_mesh.mesh.tolist(), process)
            pieces = None if coordinate is None else placed_pieces(_placed(leaf), coordinate)
        return None if pieces is None else tuple([Shard(box, pieces.replica, pieces.replicas) for box in pieces.boxes])

    def host_bytes(self, leaf: Any, boxes: Sequence[Box]) -> HostBytes:
        """Return the bytes in host memory, for the local tensor."""
        return _LOCAL.host_bytes(_local(leaf), boxes)

    def replicas(self, leaf: Any, size: int) -> int:
        """Return the number of replicas: the product of the mesh axes that replicate."""
        extents = zip(leaf.device_mesh.shape, leaf.placements, strict=True)
        return math.prod([int(extent) for extent, placement in extents if isinstance(placement, Replicate)])

    def copy_to_host(self, leaf: Any, boxes: Sequence[Box], memory: HostMemory) -> Sequence[Pending[HostArray]]:
        """Copy boxes of the local tensor to the host."""
        local = _local(leaf)
        return _LOCAL.copy_to_host(local, _local_boxes(leaf, boxes), memory)

    def view_on_host(self, leaf: Any, boxes: Sequence[Box]) -> Sequence[Pending[HostArray]]:
        """View boxes of the local tensor on the host."""
        return _LOCAL.view_on_host(_local(leaf), _local_boxes(leaf, boxes))

    def wanted(self, abstract: Any, stored: ArrayRecord) -> Sequence[Box]:
        """Return the boxes that this process must read.

        Raises:
            TreeMismatchError: if the shapes differ.
            UnsupportedLeafError: if a local FakeTensor requests a device that is missing.
        """
        _expect_shape(abstract, stored)
        local = _local(abstract)
        if is_fake(local):
            expect_device(local.device)
        pieces = _pieces(abstract)
        return () if pieces is None else tuple(pieces.boxes)

    def destination(self, abstract: Any, stored: ArrayRecord, box: Box) -> HostArray | None:
        """Return the memory of the local tensor, if it is one box with the stored element order."""
        pieces = _pieces(abstract)
        if pieces is None or len(pieces.boxes) != 1 or box not in pieces.boxes or is_fake(_local(abstract)):
            return None
        part = ArrayRecord(ArraySpec(box.shape, stored.spec.dtype), stored.kind)
        return _LOCAL.destination(_local(abstract), part, Box.whole(box.shape))

    def build(self, abstract: Any, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]) -> object:
        """Build a DTensor with the mesh, placements and dtype of `abstract`, on the devices of the mesh."""
        _expect_shape(abstract, stored)
        local = _local_elements(abstract, stored, boxes)
        device = _local(abstract).device
        if device.type == "meta":
            device = _mesh_device(abstract)
        if device.type != "cpu":
            local = local.to(device)
        return _over(abstract, local)

    def fill(self, target: Any, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]) -> bool:
        """Copy into the local tensor. Return False if it has no elements."""
        local = _local(target)
        if local.is_meta or is_fake(local):
            return False
        _expect_shape(target, stored)
        if not boxes:
            return True  # this process has no part of it
        assert isinstance(stored, ArrayRecord)  # values were refused above
        array = _gathered(target, stored, boxes)
        record = ArrayRecord(ArraySpec(tuple(local.shape), stored.spec.dtype), stored.kind)
        return _LOCAL.fill(local, record, [(Box.whole(tuple(local.shape)), array)])

    def memory_to_fill(self, target: Any) -> Sequence[StridedMemory] | None:
        """Return the memory of the local tensor, or None if it has no elements."""
        local = _local(target)
        return None if is_fake(local) else _LOCAL.memory_to_fill(local)


def _over(like: Any, local: torch.Tensor) -> torch.Tensor:
    """Return a DTensor or Parameter like `like` over another local tensor."""
    made = DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    if isinstance(like, torch.nn.Parameter):
        return torch.nn.Parameter(made, requires_grad=like.requires_grad)
    return made.requires_grad_() if like.requires_grad else made


def _placed(leaf: Any) -> DTensorPlacement:
    return DTensorPlacement(tuple(leaf.shape), tuple(leaf.device_mesh.shape), tuple(leaf.placements))


def _pieces(leaf: Any) -> Pieces | None:
    """Return the pieces of this process, or None if it is not in the mesh."""
    coordinate = leaf.device_mesh.get_coordinate()
    return None if coordinate is None else placed_pieces(_placed(leaf), tuple(coordinate))


def _coordinate(ranks: Any, rank: int) -> tuple[int, ...] | None:
    """Return the coordinate of a rank in a mesh, or None if it is not there."""
    if isinstance(ranks, int):
        return () if ranks == rank else None
    for position, below in enumerate(ranks):
        found = _coordinate(below, rank)
        if found is not None:
            return (position, *found)
    return None


def _local(leaf: Any) -> torch.Tensor:
    """Return the local tensor, without a copy and outside of autograd."""
    with torch.no_grad():
        local: torch.Tensor = leaf.to_local()
    return local.detach()


def _local_boxes(leaf: Any, boxes: Sequence[Box]) -> Sequence[Box]:
    """Convert boxes of the whole tensor to boxes of the local one."""
    pieces = _pieces(leaf)
    found = []
    for box in boxes:
        slices = None if pieces is None else _slices(pieces, box)
        if slices is None:
            raise PluginError(f"this process does not hold {box} of a DTensor {tuple(leaf.shape)}")
        found.append(Box(tuple([part.start for part in slices]), tuple([part.stop for part in slices])))
    return found


def _slices(pieces: Pieces, box: Box) -> tuple[slice, ...] | None:
    known = pieces.boxes.get(box)
    if known is not None:
        return known
    for outer, place in pieces.boxes.items():
        if outer.contains(box):
            return tuple(
                [
                    slice(whole.start + part.start, whole.start + part.stop)
                    for whole, part in zip(place, box.within(outer), strict=True)
                ]
            )
    return None


def _expect_shape(abstract: Any, stored: LeafRecord) -> None:
    shape = tuple(abstract.shape)
    if isinstance(stored, ValueRecord):
        difference = f"a {stored.kind} is stored, requested as a DTensor of the shape {shape}"
        raise TreeMismatchError(f"{difference}; give a {stored.kind} instead of the DTensor", [difference])
    if stored.spec.shape != shape:
        difference = f"stored with the shape {stored.spec.shape}, requested as a DTensor of the shape {shape}"
        raise TreeMismatchError(f"{difference}; give a DTensor of the stored shape", [difference])


def _local_elements(abstract: Any, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]) -> torch.Tensor:
    """Return the local tensor on the CPU, in the dtype of `abstract`."""
    assert isinstance(stored, ArrayRecord)  # checked by `_expect_shape`
    array = _gathered(abstract, stored, boxes)
    return elements_as(array, stored, abstract.dtype)


def _gathered(abstract: Any, stored: ArrayRecord, boxes: Sequence[tuple[Box, HostArray]]) -> HostArray:
    """Assemble the local tensor from boxes of the whole."""
    pieces = _pieces(abstract)
    if pieces is None:
        return np.empty(tuple(_local(abstract).shape), stored.spec.numpy_dtype)
    if {box for box, _ in boxes} != set(pieces.boxes):
        raise PluginError(f"{len(pieces.boxes)} boxes of {stored.spec} were requested, but other boxes were read")
    if len(boxes) == 1 and boxes[0][1].shape == pieces.shape:
        return boxes[0][1]
    array: HostArray = np.empty(pieces.shape, stored.spec.numpy_dtype)
    for box, part in boxes:
        array[pieces.boxes[box]] = part
    return array


def _mesh_device(abstract: Any) -> torch.device:
    kind = abstract.device_mesh.device_type
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, torch.get_device_module(kind).current_device())
