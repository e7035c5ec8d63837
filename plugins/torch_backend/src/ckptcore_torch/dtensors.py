"""Leaf handler of DTensors, as used by FSDP2 and tensor parallelism."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Replicate

from ckptcore.errors import PluginError, UnsupportedLeafError
from ckptcore.model import ArrayRecord, ArraySpec, Box, HostArray, LeafRecord, Pending, Shard, StridedMemory
from ckptcore.protocols import CheckpointableHandler, HostBytes, HostMemory, LeafHandler, Priority
from ckptcore_torch.abstracts import empty_tensor, expect_device
from ckptcore_torch.conversions import FRAMEWORK, elements_as, encoding_of
from ckptcore_torch.placements import DTensorPlacement, LocalPart, local_part, sharding_cuts, sharding_notes
from ckptcore_torch.tensor_parts import SubclassPartsHandler, is_composed
from ckptcore_torch.tensors import TensorHandler, built_type, expect_shape, is_fake

_LOCAL_HANDLER: Final = TensorHandler()
_PARTS: Final = SubclassPartsHandler()


class DTensorHandler(LeafHandler):
    """Handler of `torch.distributed.tensor.DTensor`, also as a Parameter.

    Each process saves and loads the boxes of its local tensor. Only one replica of each box is
    written. A loaded DTensor has the mesh and placements of the abstract leaf, which can be on the
    meta device.
    """

    priority = Priority.FRAMEWORK

    def describe(self, leaf: Any) -> LeafRecord:
        """Return the global shape, the dtype, the cuts between shards, and the mesh and placements as notes.

        Raises:
            UnsupportedLeafError: for partial sums and unknown placements.
        """
        placed = _placement(leaf)
        encoding = encoding_of(leaf.dtype)
        spec = ArraySpec(placed.shape, encoding.name)
        notes = {**FRAMEWORK, "dtensor": sharding_notes(leaf.device_mesh, placed.placements)}
        return ArrayRecord(spec, encoding.kind, sharding_cuts(placed), notes)

    def abstract(self, leaf: Any) -> torch.Tensor:
        """Return a DTensor with the same mesh and placements over an abstract local tensor.

        The abstract local tensor is on the meta device, which requests the devices of the mesh. If
        the elements are on another device, as with CPU offload of FSDP2, the abstract local tensor
        is a FakeTensor on that device.
        """
        self.describe(leaf)  # raises an error if the leaf cannot be stored
        local = _local(leaf)
        if local.is_meta or is_fake(local):
            abstract: torch.Tensor = leaf
            return abstract
        is_offloaded = local.device != _mesh_device(leaf)
        return _with_local_tensor(leaf, empty_tensor(local.shape, local.dtype, local.device if is_offloaded else None))

    def parts_handler(self, leaf: Any) -> CheckpointableHandler | None:
        """Return the handler of DTensors with a composed local tensor, or None for other DTensors."""
        return _PARTS if is_composed(leaf._local_tensor) else None

    def identity(self, leaf: Any) -> Hashable | None:
        """Return the storage object, offset and strides of the local tensor, also if it has no elements.

        The mesh belongs to it: over the same local tensors, another order of ranks is another array.
        """
        local = _local(leaf)
        placed = (_placement(leaf), leaf.device_mesh)
        storage = local.untyped_storage()._cdata
        return ("dtensor", storage, local.storage_offset(), local.shape, local.stride(), local.dtype, placed)

    def built_type(self, leaf: Any) -> object:
        """Return the class, whether the tensor is a Parameter, and `requires_grad`."""
        return built_type(leaf)

    def shards(self, leaf: Any, rank: int, size: int) -> Sequence[Shard] | None:
        """Return the boxes of this process, or None if it is not in the mesh.

        Raises:
            UnsupportedLeafError: if the elements of the local tensor are not in memory, or if its
                shape does not match the mesh and placements.
        """
        own = _local_part(leaf)
        if own is None:
            return None
        local = _local(leaf)
        # FSDP2 gives a rank without elements a local tensor of shape (0, 0), whatever its placements (torch 2.13.0).
        if tuple(local.shape) != own.shape and (local.numel() or own.boxes):
            raise UnsupportedLeafError(
                f"the local tensor of a DTensor with the placements {leaf.placements} on a "
                f"mesh of {tuple(leaf.device_mesh.shape)} has the shape {tuple(local.shape)}, but "
                f"torch's division of the shape {tuple(leaf.shape)} gives {own.shape}; create the "
                "DTensor with distribute_tensor, or with from_local and the right shape"
            )
        _LOCAL_HANDLER.shards(local, rank, size)  # checks the memory, and waits for pending work of the device
        return tuple([Shard(box, own.replica, own.replicas) for box in own.boxes])

    def shards_of(self, leaf: Any, process: int | None, rank: int, size: int) -> Sequence[Shard] | None:
        """Return the boxes of a process, computed from the mesh and placements. `process` is a torch rank."""
        if process is None:
            own = _local_part(leaf)
        else:
            coordinate = _mesh_coordinate(leaf.device_mesh.mesh.tolist(), process)
            own = None if coordinate is None else local_part(_placement(leaf), coordinate)
        return None if own is None else tuple([Shard(box, own.replica, own.replicas) for box in own.boxes])

    def host_bytes(self, leaf: Any, boxes: Sequence[Box]) -> HostBytes:
        """Return the host memory in bytes that views and copies of boxes of the local tensor need."""
        return _LOCAL_HANDLER.host_bytes(_local(leaf), boxes)

    def replicas(self, leaf: Any, size: int) -> int:
        """Return the number of replicas: the product of the sizes of the mesh axes that replicate."""
        extents = zip(leaf.device_mesh.shape, leaf.placements, strict=True)
        return math.prod([int(extent) for extent, placement in extents if isinstance(placement, Replicate)])

    def copy_to_host(self, leaf: Any, boxes: Sequence[Box], memory: HostMemory) -> Sequence[Pending[HostArray]]:
        """Copy boxes of the local tensor to the host."""
        local = _local(leaf)
        return _LOCAL_HANDLER.copy_to_host(local, _local_boxes(leaf, boxes), memory)

    def view_on_host(self, leaf: Any, boxes: Sequence[Box]) -> Sequence[Pending[HostArray]]:
        """View boxes of the local tensor on the host."""
        return _LOCAL_HANDLER.view_on_host(_local(leaf), _local_boxes(leaf, boxes))

    def wanted(self, abstract: Any, stored: ArrayRecord) -> Sequence[Box]:
        """Return the boxes that this process must read.

        Raises:
            TreeMismatchError: if the shapes differ.
            UnsupportedLeafError: if a local FakeTensor requests a device that is missing.
        """
        expect_shape("DTensor", tuple(abstract.shape), stored)
        local = _local(abstract)
        if is_fake(local):
            expect_device(local.device)
        own = _local_part(abstract)
        return () if own is None else tuple(own.boxes)

    def destination(self, abstract: Any, stored: ArrayRecord, box: Box) -> HostArray | None:
        """Return the memory of the local tensor if it is a contiguous CPU tensor of one box and the stored dtype."""
        own = _local_part(abstract)
        if own is None or len(own.boxes) != 1 or box not in own.boxes or is_fake(_local(abstract)):
            return None
        part = ArrayRecord(ArraySpec(box.shape, stored.spec.dtype), stored.kind)
        return _LOCAL_HANDLER.destination(_local(abstract), part, Box.whole(box.shape))

    def build(self, abstract: Any, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]) -> object:
        """Build a DTensor with the mesh, placements and dtype of `abstract`.

        Its elements are on the device of the local tensor of `abstract`. If that local tensor is a
        meta tensor, they are on the device of the mesh.
        """
        stored = expect_shape("DTensor", tuple(abstract.shape), stored)
        local = _local_elements(abstract, stored, boxes)
        device = _local(abstract).device
        if device.type == "meta":
            device = _mesh_device(abstract)
        if device.type != "cpu":
            local = local.to(device)
        return _with_local_tensor(abstract, local)

    def fill(self, target: Any, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]) -> bool:
        """Copy into the local tensor. Return False if it is abstract, or if its elements may overlap."""
        local = _local(target)
        if local.is_meta or is_fake(local):
            return False
        stored = expect_shape("DTensor", tuple(target.shape), stored)
        if not boxes:
            return True  # this process has no elements of the tensor
        array = _assemble_local(target, stored, boxes)
        record = ArrayRecord(ArraySpec(tuple(local.shape), stored.spec.dtype), stored.kind)
        return _LOCAL_HANDLER.fill(local, record, [(Box.whole(tuple(local.shape)), array)])

    def memory_to_fill(self, target: Any) -> Sequence[StridedMemory] | None:
        """Return the memory of the local tensor, or None if `fill` returns False."""
        local = _local(target)
        return None if is_fake(local) else _LOCAL_HANDLER.memory_to_fill(local)


def _with_local_tensor(like: Any, local: torch.Tensor) -> torch.Tensor:
    """Return a DTensor or Parameter like `like`, but with another local tensor."""
    tensor = DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    if isinstance(like, torch.nn.Parameter):
        return torch.nn.Parameter(tensor, requires_grad=like.requires_grad)
    return tensor.requires_grad_() if like.requires_grad else tensor


def _placement(leaf: Any) -> DTensorPlacement:
    return DTensorPlacement(tuple(leaf.shape), tuple(leaf.device_mesh.shape), tuple(leaf.placements))


def _local_part(leaf: Any) -> LocalPart | None:
    """Return the part of this process, or None if it is not in the mesh."""
    coordinate = leaf.device_mesh.get_coordinate()
    return None if coordinate is None else local_part(_placement(leaf), tuple(coordinate))


def _mesh_coordinate(ranks: Any, rank: int) -> tuple[int, ...] | None:
    """Return the coordinate of a rank in the nested list of a mesh's ranks, or None if the mesh lacks it."""
    if isinstance(ranks, int):
        return () if ranks == rank else None
    for position, nested in enumerate(ranks):
        coordinate = _mesh_coordinate(nested, rank)
        if coordinate is not None:
            return (position, *coordinate)
    return None


def _local(leaf: Any) -> torch.Tensor:
    """Return the local tensor, detached and without a copy."""
    with torch.no_grad():
        local: torch.Tensor = leaf.to_local()
    return local.detach()


def _local_boxes(leaf: Any, boxes: Sequence[Box]) -> Sequence[Box]:
    """Convert boxes of the whole tensor to boxes of the local tensor."""
    own = _local_part(leaf)
    local_boxes = []
    for box in boxes:
        slices = None if own is None else _local_slices(own, box)
        if slices is None:
            raise PluginError(
                f"internal error: this process has no {box} of a DTensor {tuple(leaf.shape)}; please report this"
            )
        local_boxes.append(Box(tuple([part.start for part in slices]), tuple([part.stop for part in slices])))
    return local_boxes


def _local_slices(own: LocalPart, box: Box) -> tuple[slice, ...] | None:
    """Return the slices of the local tensor for a box of the whole tensor, or None if it is not in one local box."""
    known = own.boxes.get(box)
    if known is not None:
        return known
    for outer, slices in own.boxes.items():
        if outer.contains(box):
            return tuple(
                [
                    slice(local.start + part.start, local.start + part.stop)
                    for local, part in zip(slices, box.within(outer), strict=True)
                ]
            )
    return None


def _local_elements(abstract: Any, stored: ArrayRecord, boxes: Sequence[tuple[Box, HostArray]]) -> torch.Tensor:
    """Return the local tensor on the CPU, cast to the dtype of `abstract`."""
    array = _assemble_local(abstract, stored, boxes)
    return elements_as(array, stored, abstract.dtype)


def _assemble_local(abstract: Any, stored: ArrayRecord, boxes: Sequence[tuple[Box, HostArray]]) -> HostArray:
    """Assemble the local tensor from boxes of the whole tensor."""
    own = _local_part(abstract)
    if own is None:
        return np.empty(tuple(_local(abstract).shape), stored.spec.numpy_dtype)
    if {box for box, _ in boxes} != set(own.boxes):
        raise PluginError(
            f"internal error: {len(own.boxes)} boxes of {stored.spec} were requested, but other boxes were read; "
            "please report this"
        )
    if len(boxes) == 1 and boxes[0][1].shape == own.shape:
        return boxes[0][1]
    array: HostArray = np.empty(own.shape, stored.spec.numpy_dtype)
    for box, part in boxes:
        array[own.boxes[box]] = part
    return array


def _mesh_device(abstract: Any) -> torch.device:
    kind = abstract.device_mesh.device_type
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, torch.get_device_module(kind).current_device())
