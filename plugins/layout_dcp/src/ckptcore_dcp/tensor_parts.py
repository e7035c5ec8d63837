"""Parts of tensors that several processes hold: DTensor and ShardedTensor in the pickles of torch.

A pickle of one process has the local tensor and the description of the whole (torch 2.13.0,
``torch/distributed/tensor/_dtensor_spec.py``, ``placement_types.py`` and
``torch/distributed/_shard/sharded_tensor/api.py``). This module locates the part in the whole without importing torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from ckptcore.errors import CorruptCheckpointError, UnsupportedLeafError
from ckptcore.model import ArraySpec, Box
from ckptcore_dcp.pickles import Call, Global, Value, brief
from ckptcore_dcp.stored_tensors import StoredTensor, c_strides, known_dtype, spec_and_kind, stored_tensor

_MAX_BOXES: Final = 1 << 12
"""Maximum number of boxes of a part. In a real job, a `_StridedShard` has one box per process of one mesh axis."""
_MAX_COUNT: Final = 1 << 62

Interval: TypeAlias = tuple[int, int]
"""A half-open range of indices along one axis."""


@dataclass(frozen=True, slots=True)
class TensorPart:
    """The boxes of a tensor that one process saved. The leaf can be read only together with all other parts.

    Attributes:
        spec: shape and dtype of the whole tensor.
        kind: kind of the leaf, as in `StoredTensor`.
        boxes: boxes of the whole tensor, without overlap; none if the process holds no elements.
        tensors: for each box, its elements.
        processes: the number of processes that have parts of the tensor.
    """

    spec: ArraySpec
    kind: str
    boxes: tuple[Box, ...]
    tensors: tuple[StoredTensor, ...]
    processes: int

    @property
    def reason(self) -> str:
        """The reason why the part alone cannot be read, as in `Unreadable`."""
        shown = "no elements" if not self.boxes else f"the elements from {list(self.boxes[0].start)} on"
        return (
            f"a part ({shown}) of a tensor {self.spec} that several processes saved: with ckptcore[formats] installed, "
            "load the directory with the files of all processes by its own path"
        )


def tensor_part(value: Value, *, key: str, path: str) -> TensorPart | StoredTensor | None:
    """Return the part that a pickled DTensor or ShardedTensor describes; the tensor if it is whole; None for others.

    Args:
        value: result of `read_pickle`.
        key: the object that contains the pickle, for errors.
        path: path in the tree, for errors.

    Raises:
        CorruptCheckpointError: the part is invalid.
        UnsupportedLeafError: the elements of the part are not elements of the whole (a partial sum), or its
            placements are unknown.
    """
    if isinstance(value, Call) and value.function == Global("torch._utils", "_rebuild_parameter") and value.arguments:
        value = value.arguments[0]
    if (
        not isinstance(value, Call)
        or value.function != Global("torch._tensor", "_rebuild_from_type_v2")
        or len(value.arguments) != 4
    ):
        return None
    _, of_type, arguments, state = value.arguments
    if not isinstance(of_type, Global) or not isinstance(arguments, tuple) or len(arguments) < 3:
        return None
    if not of_type.module.startswith("torch.distributed."):
        return None
    reader = _READERS.get(of_type.name)
    return None if reader is None else reader(_Subject(key, path), arguments, state)


@dataclass(frozen=True, slots=True)
class _Subject:
    """The tensor that is read, for errors."""

    key: str
    path: str

    def corrupt(self, reason: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            f"{self.path} in {self.key!r} cannot be read: {reason}; restore the file from a copy, or load another "
            "checkpoint",
            key=self.key,
        )

    def unsupported(self, what: str) -> UnsupportedLeafError:
        return UnsupportedLeafError(f"{self.path} is {what}")

    def tensor(self, value: Value) -> StoredTensor:
        tensor = stored_tensor(value, key=self.key, path=self.path)
        if tensor is None:
            raise self.corrupt("it has no local tensor")
        return tensor

    def counts(self, value: Value) -> tuple[int, ...]:
        """Return a shape or a list of offsets."""
        if isinstance(value, Call) and value.function == Global("torch", "Size") and len(value.arguments) == 1:
            value = value.arguments[0]
        if not isinstance(value, tuple | list) or not all(
            type(number) is int and 0 <= number < _MAX_COUNT for number in value
        ):
            raise self.corrupt("a shape or an offset of it is not a list of natural numbers")
        return tuple([number for number in value if isinstance(number, int)])

    def spec(self, shape: Value, dtype: Value) -> tuple[ArraySpec, str]:
        if not isinstance(dtype, Global) or dtype.module != "torch":
            raise self.corrupt("its dtype is missing")
        if (known := known_dtype(dtype.name)) is None:
            raise self.unsupported(f"a tensor of torch.{dtype.name[:40]}, which NumPy cannot represent")
        spec, kind = spec_and_kind(known, self.counts(shape))
        if not spec.is_possible or len(spec.shape) > 64:
            raise self.corrupt(f"{str(spec)[:80]} is not a possible array")
        return spec, kind


def _attributes(value: Value) -> Mapping[str, Value]:
    """Return the attributes of a pickled object, in its ``__dict__`` and in its ``__slots__``."""
    attributes: dict[str, Value] = {}
    if isinstance(value, Call):
        for part in value.state if isinstance(value.state, tuple) and len(value.state) == 2 else (value.state,):
            if isinstance(part, dict):
                attributes.update({name: child for name, child in part.items() if isinstance(name, str)})
    return attributes


def _states(state: Value) -> Mapping[str, Value]:
    states: dict[str, Value] = {}
    for part in state if isinstance(state, tuple) else (state,):
        if isinstance(part, dict):
            states.update({name: child for name, child in part.items() if isinstance(name, str)})
    return states


def _read_dtensor(subject: _Subject, arguments: tuple[Value, ...], state: Value) -> TensorPart | StoredTensor:
    attributes = _states(state)
    if "_local_tensor" not in attributes or "_spec" not in attributes:
        raise subject.corrupt("a DTensor has no local tensor or no description of the whole")
    spec, kind = subject.spec(arguments[2], arguments[1])
    description = _attributes(attributes["_spec"])
    local = subject.tensor(attributes["_local_tensor"])
    if (local.dtype, local.kind) != (spec.dtype, kind):
        raise subject.corrupt(f"its local tensor is {local.spec}, and the whole is {spec}")
    mesh, coordinates = _read_mesh(subject, description.get("mesh"))
    if coordinates is None:
        return TensorPart(spec, kind, (), (), math.prod(mesh))  # the process is not part of the mesh
    placements = description.get("placements")
    if not isinstance(placements, tuple | list) or len(placements) != len(mesh):
        raise subject.corrupt(f"it has {brief(placements)} as placements on a mesh of {len(mesh)} axes")
    axes: list[Sequence[Interval]] = [((0, extent),) for extent in spec.shape]
    for number in _order(subject, placements, description):
        _apply(subject, axes, placements[number], mesh[number], coordinates[number])
    return _cut(subject, spec, kind, local, axes, math.prod(mesh))


def _read_mesh(subject: _Subject, value: Value) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Return the shape of a DeviceMesh, and the coordinates of the process; None if the process is not in it."""
    attributes = _attributes(value)
    if (stored := attributes.get("_layout")) is not None:  # since torch 2.9; in 2.13 each axis is a layout of its own
        layout = _attributes(stored)
        axes = layout.get("axes")
        shape: Value = layout.get("shape")
        if isinstance(axes, tuple | list):
            shape = tuple([_attributes(axis).get("shape") for axis in axes])
        mesh = tuple([_product(subject, extent, 0) for extent in (shape if isinstance(shape, tuple) else (shape,))])
    elif "mesh" in attributes:
        mesh = subject.tensor(attributes["mesh"]).shape
    else:
        raise subject.corrupt("its device mesh has no shape")
    coordinate = attributes.get("_coordinate_on_dim")
    if coordinate is None:
        return mesh, None
    coordinates = subject.counts(coordinate)
    if len(coordinates) != len(mesh) or any(
        position >= extent for position, extent in zip(coordinates, mesh, strict=True)
    ):
        raise subject.corrupt(f"the process is at {str(coordinates)[:80]} of a mesh of {str(mesh)[:80]}")
    return mesh, coordinates


def _product(subject: _Subject, extent: Value, depth: int) -> int:
    """Return the number of processes along an axis of a mesh. The axis may consist of several flattened axes."""
    if type(extent) is int and 0 < extent < _MAX_COUNT:
        return extent
    if not isinstance(extent, tuple) or not extent or depth > 8 or len(extent) > 64:
        raise subject.corrupt("an axis of its device mesh has no extent")
    return math.prod([_product(subject, part, depth + 1) for part in extent])


def _order(subject: _Subject, placements: Sequence[Value], description: Mapping[str, Value]) -> Sequence[int]:
    """Return the axes of the mesh in the order in which they divide the tensor (``DTensorSpec.shard_order``)."""
    order = list(range(len(placements)))
    entries = description.get("shard_order")
    if description.get("use_strided_shard_as_shard_order") is True or not isinstance(entries, tuple):
        return order
    for entry in entries:
        parts = entry.arguments if isinstance(entry, Call) else ()
        parts = parts[0] if len(parts) == 1 and isinstance(parts[0], tuple) else parts
        if len(parts) != 2:
            raise subject.corrupt("the order in which it was divided is malformed")
        axes = subject.counts(parts[1])
        if len({*axes}) != len(axes) or any(axis >= len(order) for axis in axes):
            raise subject.corrupt("the order in which it was divided names other axes than those of its mesh")
        for position, axis in zip(sorted(axes), axes, strict=True):
            order[position] = axis
    return order


def _apply(
    subject: _Subject, axes: list[Sequence[Interval]], placement: Value, processes: int, coordinate: int
) -> None:
    """Divide the intervals of an axis of the tensor as one placement does."""
    if not isinstance(placement, Call) or not isinstance(placement.function, Global):
        raise subject.corrupt("a placement of it is missing")
    name, attributes = placement.function.name, _attributes(placement)
    if name == "Replicate":
        return
    if name not in ("Shard", "_StridedShard"):
        raise subject.unsupported(
            f"a DTensor with the placement {name[:40]}, whose parts are not elements of the tensor: save "
            "DTensor.full_tensor()"
        )
    axis = attributes.get("dim")
    if type(axis) is not int or not -len(axes) <= axis < len(axes):
        raise subject.corrupt(f"it is divided along axis {brief(axis)} of {len(axes)}")
    if name == "Shard":
        axes[axis] = _chunk(axes[axis], processes, coordinate)
        return
    factor = attributes.get("split_factor")
    if type(factor) is not int or factor < 1:
        raise subject.corrupt("a placement of it has no split factor")
    if factor > _MAX_BOXES:
        raise subject.unsupported(f"a DTensor that is divided with a split factor of {factor}")
    pieces = [_chunk(_chunk(axes[axis], factor, number), processes, coordinate) for number in range(factor)]
    axes[axis] = _joined(itertools.chain.from_iterable(pieces))
    if len(axes[axis]) > _MAX_BOXES:
        raise subject.unsupported(f"a DTensor that is divided into more than {_MAX_BOXES} boxes for one process")


def _chunk(intervals: Sequence[Interval], count: int, number: int) -> Sequence[Interval]:
    """Return a chunk as ``torch.chunk`` does: chunks have equal extents, but the last ones may be shorter or empty."""
    total = sum([stop - start for start, stop in intervals])
    extent = -(-total // count)
    first, last = min(number * extent, total), min((number + 1) * extent, total)
    chunk: list[Interval] = []
    position = 0
    for start, stop in intervals:
        low, high = max(first, position), min(last, position + stop - start)
        if low < high:
            chunk.append((start + low - position, start + high - position))
        position += stop - start
    return chunk


def _joined(intervals: itertools.chain[Interval]) -> Sequence[Interval]:
    joined: list[Interval] = []
    for start, stop in intervals:
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((start, stop))
    return joined


def _cut(
    subject: _Subject,
    spec: ArraySpec,
    kind: str,
    local: StoredTensor,
    axes: Sequence[Sequence[Interval]],
    processes: int,
) -> TensorPart | StoredTensor:
    """Divide a local tensor into its boxes of the whole tensor."""
    held = tuple([sum([stop - start for start, stop in intervals]) for intervals in axes])
    if 0 in held and 0 in local.shape:
        if 0 not in spec.shape:
            return TensorPart(spec, kind, (), (), processes)
        return replace(local, shape=spec.shape, strides=c_strides(spec.shape))
    if local.shape != held:
        raise subject.corrupt(f"its local tensor is {local.spec}, and its placements give a part of {list(held)}")
    if held == spec.shape and all(len(intervals) == 1 for intervals in axes):
        return local
    if math.prod([len(intervals) for intervals in axes]) > _MAX_BOXES:
        raise subject.unsupported(f"a DTensor that is divided into more than {_MAX_BOXES} boxes for one process")
    boxes: list[Box] = []
    tensors: list[StoredTensor] = []
    for chosen in itertools.product(*[_with_positions(intervals) for intervals in axes]):
        box = Box(tuple([start for start, _, _ in chosen]), tuple([stop for _, stop, _ in chosen]))
        skipped = sum([position * stride for (_, _, position), stride in zip(chosen, local.strides, strict=True)])
        boxes.append(box)
        tensors.append(replace(local, shape=box.shape, offset=local.offset + skipped))
    return TensorPart(spec, kind, tuple(boxes), tuple(tensors), processes)


def _with_positions(intervals: Sequence[Interval]) -> Sequence[tuple[int, int, int]]:
    """Return the intervals, each with its position in the local tensor."""
    extents = [stop - start for start, stop in intervals]
    before = [0, *itertools.accumulate(extents)]
    return [(start, stop, position) for (start, stop), position in zip(intervals, before, strict=False)]


def _read_sharded_tensor(subject: _Subject, arguments: tuple[Value, ...], state: Value) -> TensorPart | StoredTensor:
    if not isinstance(state, tuple) or len(state) < 2 or not isinstance(state[0], list):
        raise subject.corrupt("a ShardedTensor has no shards")
    spec, kind = subject.spec(_attributes(state[1]).get("size", arguments[2]), arguments[1])
    boxes: list[Box] = []
    tensors: list[StoredTensor] = []
    for shard in state[0]:
        attributes = _attributes(shard)
        bounds = _attributes(attributes.get("metadata"))
        start, sizes = subject.counts(bounds.get("shard_offsets")), subject.counts(bounds.get("shard_sizes"))
        tensor = subject.tensor(attributes.get("tensor"))
        if len(start) != len(sizes) or len(start) != len(spec.shape):
            raise subject.corrupt(f"a shard of it has {len(start)} offsets and {len(sizes)} sizes")
        box = Box(start, tuple([low + extent for low, extent in zip(start, sizes, strict=True)]))
        if not Box.whole(spec.shape).contains(box):
            raise subject.corrupt(f"a shard of it ends at {list(box.stop)} of {list(spec.shape)}")
        if (tensor.shape, tensor.dtype, tensor.kind) != (sizes, spec.dtype, kind):
            raise subject.corrupt(f"a shard of it is {tensor.spec}, and its description says {spec.dtype}{list(sizes)}")
        if box.size:
            boxes.append(box)
            tensors.append(tensor)
    if boxes == [Box.whole(spec.shape)]:
        return tensors[0]
    size = _attributes(state[2]).get("local_world_size") if len(state) > 2 else None
    return TensorPart(spec, kind, tuple(boxes), tuple(tensors), size if type(size) is int else 1)


_READERS: Final[Mapping[str, Callable[[_Subject, tuple[Value, ...], Value], TensorPart | StoredTensor]]] = {
    "DTensor": _read_dtensor,
    "ShardedTensor": _read_sharded_tensor,
}
