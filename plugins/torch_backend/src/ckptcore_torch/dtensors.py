"""The leaf handler of DTensors: tensors of which every process of a mesh holds a part, as FSDP2 and tensor parallelism have them."""

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
from ckptcore.protocols import HostBytes, HostMemory, Priority
from ckptcore_torch.abstracts import empty_tensor, expect_device
from ckptcore_torch.conversions import elements_as
from ckptcore_torch.dtypes import encoding_of
from ckptcore_torch.placements import Pieces, Placed, placed_pieces, sharding_cuts, sharding_notes
from ckptcore_torch.tensors import TensorHandler, is_fake

__all__ = ["DTensorHandler"]

_LOCAL: Final = TensorHandler()


class DTensorHandler:
    """`torch.distributed.tensor.DTensor`, and Parameters that are one.

    Each process saves the boxes it holds, one of the processes that hold the same; each reads those it is to hold. Built for
    an abstract one, also on the meta device, a DTensor has its mesh and placements.
    """

    priority = Priority.FRAMEWORK

    def describe(self, leaf: Any) -> LeafRecord:
        """Shape and dtype of the whole, where shards meet, and the mesh and placements as notes.

        Raises:
            UnsupportedLeafError: if processes hold partial sums.
        """
        placed = _placed(leaf)
        encoding = encoding_of(leaf.dtype)
        spec = ArraySpec(placed.shape, encoding.name)
        notes = {"dtensor": sharding_notes(leaf.device_mesh, placed.placements)}
        return ArrayRecord(spec, encoding.kind, sharding_cuts(placed), notes)

    def abstract(self, leaf: Any) -> torch.Tensor:
        """A DTensor with its mesh and placements over a local tensor without elements.

        That is on the meta device, which asks for the devices of the mesh; where the elements are elsewhere, as FSDP2 offloads them to
        the CPU, it is a FakeTensor.
        """
        self.describe(leaf)  # refuses what cannot be stored
        local = _local(leaf)
        if local.is_meta or is_fake(local):
            made: torch.Tensor = leaf
            return made
        elsewhere = local.device != _mesh_device(leaf)
        return _over(leaf, empty_tensor(local.shape, local.dtype, local.device if elsewhere else None))

    def identity(self, leaf: Any) -> Hashable | None:
        """The local tensor's storage, and how it lies there; also where this process holds nothing."""
        local = _local(leaf)
        placed = _placed(leaf)
        storage = local.untyped_storage()._cdata
        return ("dtensor", storage, local.storage_offset(), local.shape, local.stride(), local.dtype, placed)

    def shards(self, leaf: Any, rank: int, size: int) -> Sequence[Shard] | None:
        """The boxes this process holds; None where it is not in the mesh.

        Raises:
            UnsupportedLeafError: if the tensor has no elements in memory.
        """
        pieces = _pieces(leaf)
        if pieces is None:
            return None
        local = _local(leaf)
        if tuple(local.shape) != pieces.shape:
            raise UnsupportedLeafError(
                f"a DTensor with the placements {leaf.placements} over a mesh of {tuple(leaf.device_mesh.shape)} has a local tensor "
                f"of the shape {tuple(local.shape)}: expected {pieces.shape}, as torch divides the shape {tuple(leaf.shape)}; "
                "make it with distribute_tensor, or with from_local and the shape that fits"
            )
        _LOCAL.shards(local, rank, size)  # refuses what has no memory, and orders copies after what runs on the device
        return tuple([Shard(box, pieces.replica, pieces.replicas) for box in pieces.boxes])

    def shards_of(self, leaf: Any, process: int | None, rank: int, size: int) -> Sequence[Shard] | None:
        """The boxes that a process holds, from the mesh and placements alone; a process of the job has the rank that torch gives it."""
        if process is None:
            pieces = _pieces(leaf)
        else:
            coordinate = _coordinate(leaf.device_mesh.mesh.tolist(), process)
            pieces = None if coordinate is None else placed_pieces(_placed(leaf), coordinate)
        return None if pieces is None else tuple([Shard(box, pieces.replica, pieces.replicas) for box in pieces.boxes])

    def host_bytes(self, leaf: Any, boxes: Sequence[Box]) -> HostBytes:
        """As of a plain tensor, from the local one."""
        return _LOCAL.host_bytes(_local(leaf), boxes)

    def replicas(self, leaf: Any, size: int) -> int:
        """How many processes hold each part: those along the axes of the mesh that replicate."""
        extents = zip(leaf.device_mesh.shape, leaf.placements, strict=True)
        return math.prod([int(extent) for extent, placement in extents if isinstance(placement, Replicate)])

    def copy_to_host(self, leaf: Any, boxes: Sequence[Box], memory: HostMemory) -> Sequence[Pending[HostArray]]:
        """As of a plain tensor, from the local one."""
        local = _local(leaf)
        return _LOCAL.copy_to_host(local, _local_boxes(leaf, boxes), memory)

    def view_on_host(self, leaf: Any, boxes: Sequence[Box]) -> Sequence[Pending[HostArray]]:
        """As of a plain tensor, from the local one."""
        return _LOCAL.view_on_host(_local(leaf), _local_boxes(leaf, boxes))

    def wanted(self, abstract: Any, stored: ArrayRecord) -> Sequence[Box]:
        """The boxes this process is to hold.

        Raises:
            TreeMismatchError: if the shapes differ.
            UnsupportedLeafError: if a local FakeTensor asks for a device that is not here.
        """
        _expect_shape(abstract, stored)
        local = _local(abstract)
        if is_fake(local):
            expect_device(local.device)
        pieces = _pieces(abstract)
        return () if pieces is None else tuple(pieces.boxes)

    def destination(self, abstract: Any, stored: ArrayRecord, box: Box) -> HostArray | None:
        """The memory of the local tensor, where that is one box and lies as it is stored."""
        pieces = _pieces(abstract)
        if pieces is None or len(pieces.boxes) != 1 or box not in pieces.boxes or is_fake(_local(abstract)):
            return None
        part = ArrayRecord(ArraySpec(box.shape, stored.spec.dtype), stored.kind)
        return _LOCAL.destination(_local(abstract), part, Box.whole(box.shape))

    def build(self, abstract: Any, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]) -> object:
        """A DTensor with the mesh, placements and dtype of `abstract`, on the devices of the mesh."""
        _expect_shape(abstract, stored)
        local = _local_elements(abstract, stored, boxes)
        device = _local(abstract).device
        if device.type == "meta":
            device = _mesh_device(abstract)
        if device.type != "cpu":
            local = local.to(device)
        return _over(abstract, local)

    def fill(self, target: Any, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]) -> bool:
        """Copy into the local tensor; False where that has no elements."""
        local = _local(target)
        if local.is_meta or is_fake(local):
            return False
        _expect_shape(target, stored)
        if not boxes:
            return True  # nothing of it is here
        assert isinstance(stored, ArrayRecord)  # a value has another shape
        array = _gathered(target, stored, boxes)
        record = ArrayRecord(ArraySpec(tuple(local.shape), stored.spec.dtype), stored.kind)
        return _LOCAL.fill(local, record, [(Box.whole(tuple(local.shape)), array)])

    def memory_to_fill(self, target: Any) -> Sequence[StridedMemory] | None:
        """The memory of the local tensor; None if it has no elements."""
        local = _local(target)
        return None if is_fake(local) else _LOCAL.memory_to_fill(local)


def _over(like: Any, local: torch.Tensor) -> torch.Tensor:
    """A DTensor or Parameter as `like` is one, over another local tensor."""
    made = DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    if isinstance(like, torch.nn.Parameter):
        return torch.nn.Parameter(made, requires_grad=like.requires_grad)
    return made.requires_grad_() if like.requires_grad else made


def _placed(leaf: Any) -> Placed:
    return Placed(tuple(leaf.shape), tuple(leaf.device_mesh.shape), tuple(leaf.placements))


def _pieces(leaf: Any) -> Pieces | None:
    """What this process holds; None where it is not in the mesh."""
    coordinate = leaf.device_mesh.get_coordinate()
    return None if coordinate is None else placed_pieces(_placed(leaf), tuple(coordinate))


def _coordinate(ranks: Any, rank: int) -> tuple[int, ...] | None:
    """Where in a mesh a rank stands; None if it does not."""
    if isinstance(ranks, int):
        return () if ranks == rank else None
    for position, below in enumerate(ranks):
        found = _coordinate(below, rank)
        if found is not None:
            return (position, *found)
    return None


def _local(leaf: Any) -> torch.Tensor:
    """The local tensor itself: in the memory of the DTensor, outside of autograd."""
    with torch.no_grad():
        local: torch.Tensor = leaf.to_local()
    return local.detach()


def _local_boxes(leaf: Any, boxes: Sequence[Box]) -> Sequence[Box]:
    """Where in the local tensor boxes of the whole are."""
    pieces = _pieces(leaf)
    found = []
    for box in boxes:
        slices = None if pieces is None else _slices(pieces, box)
        if slices is None:
            raise PluginError(f"{box} of a DTensor {tuple(leaf.shape)} is asked of a process that does not hold it")
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
        difference = f"a {stored.kind} is stored, asked for as a DTensor of the shape {shape}"
        raise TreeMismatchError(f"{difference}; give a {stored.kind} in the place of the DTensor", [difference])
    if stored.spec.shape != shape:
        difference = f"stored with the shape {stored.spec.shape}, asked for as a DTensor of the shape {shape}"
        raise TreeMismatchError(f"{difference}; give a DTensor of the stored shape", [difference])


def _local_elements(abstract: Any, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]) -> torch.Tensor:
    """The local tensor on the CPU, in the dtype of `abstract`."""
    assert isinstance(stored, ArrayRecord)  # `_expect_shape` refused others
    array = _gathered(abstract, stored, boxes)
    return elements_as(array, stored, abstract.dtype)


def _gathered(abstract: Any, stored: ArrayRecord, boxes: Sequence[tuple[Box, HostArray]]) -> HostArray:
    """The elements of the local tensor, from boxes of the whole."""
    pieces = _pieces(abstract)
    if pieces is None:
        return np.empty(tuple(_local(abstract).shape), stored.spec.numpy_dtype)
    if {box for box, _ in boxes} != set(pieces.boxes):
        raise PluginError(f"{len(pieces.boxes)} boxes of {stored.spec} were asked for, and others came")
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
