"""Leaf handler of JAX arrays, typed random keys and abstract arrays."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from ckptcore.errors import PluginError, UnsupportedLeafError
from ckptcore.model import (
    JSON,
    PLAIN_ARRAY,
    ArrayRecord,
    ArraySpec,
    Box,
    HostArray,
    LeafRecord,
    Pending,
    Ready,
    Shard,
    name_of_dtype,
)
from ckptcore.protocols import HostBytes, HostMemory, LeafHandler, Priority
from ckptcore_jax import random_keys
from ckptcore_jax.array_creation import create_array, is_on_cpu
from ckptcore_jax.shardings import concrete_sharding, placement_of, shards_in_process, shards_of

_PACKED: Final = frozenset(
    np.dtype(getattr(jnp, name)) for name in ("int2", "int4", "uint2", "uint4", "float4_e2m1fn") if hasattr(jnp, name)
)
"""Dtypes whose elements JAX packs on devices. NumPy does not pack them, so it cannot view such arrays."""


UNSUPPORTED_DTYPES: Final = frozenset({"float6_e2m3fn", "float6_e3m2fn", "int1", "uint1"})
"""Dtypes that JAX names but does not support: XLA has no float6, and treats int1 as bool."""


@dataclass(frozen=True, slots=True)
class JaxLeafHandler(LeafHandler):
    """Handler of `jax.Array`, typed random keys, and `jax.ShapeDtypeStruct`.

    An asynchronous save copies arrays in host memory before it returns: arrays of the CPU backend,
    and arrays that are offloaded to the host (``memory_kind="pinned_host"``). The copy is needed
    because such an array can alias memory of NumPy or PyTorch, which the caller may change.
    Examples are arrays made by `jax.device_put` from a NumPy array (also with ``may_alias=False``),
    `jax.dlpack.from_dlpack` or `jax.make_array_from_callback`. JAX does not expose the owner of the
    memory. Arrays in accelerator memory are not copied again after the transfer to the host.

    Attributes:
        copy: True if an asynchronous save copies arrays in host memory. False keeps views; use it
            only if no array of the state aliases memory that changes. In both cases arrays can be
            deleted and donated during the save.
    """

    copy: bool = True

    @property
    def priority(self) -> int:
        """Priority of a framework's own types."""
        return Priority.FRAMEWORK

    def describe(self, leaf: Any) -> LeafRecord:
        """Return shape, dtype and sharding. Never waits.

        Typed random keys are described by their ``uint32`` data. Deleted and donated arrays are
        accepted, because they can be abstract leaves.
        """
        return _record_of(leaf.shape, leaf.dtype, concrete_sharding(leaf.sharding), getattr(leaf, "weak_type", False))

    def abstract(self, leaf: Any) -> jax.ShapeDtypeStruct:
        """Return an abstract array with the shape, dtype, weak type and sharding of a leaf, including its memory kind.

        The result has no sharding if the array is uncommitted. If the sharding is over an abstract
        mesh, the result uses the mesh that is set in this thread. Random keys keep their dtype. The
        array can be deleted, donated or not yet computed.
        """
        self.describe(leaf)  # raises an error if the leaf cannot be stored
        sharding = concrete_sharding(leaf.sharding)
        if isinstance(leaf, jax.ShapeDtypeStruct) and sharding is leaf.sharding:
            return leaf
        if not is_committed(leaf):
            sharding = None
        make: Any = jax.ShapeDtypeStruct  # the constructor is untyped in JAX
        abstract: jax.ShapeDtypeStruct = make(
            leaf.shape, leaf.dtype, sharding=sharding, weak_type=getattr(leaf, "weak_type", False)
        )
        return abstract

    def identity(self, leaf: Any) -> Hashable | None:
        """Return the addresses of an array's elements on the CPU backend, or else an id of the array object.

        Arrays with other placements are not tied, although `jax.device_put` lets them share memory of NumPy on the CPU
        backend. Return None for abstract, deleted and empty arrays.
        """
        if isinstance(leaf, jax.ShapeDtypeStruct) or leaf.is_deleted() or leaf.size == 0:
            return None
        placed = leaf.sharding, is_committed(leaf)
        leaf = data_array(leaf)
        shape, sharding = leaf.shape, leaf.sharding
        placement = placement_of(sharding, shape)
        if not placement.on_cpu or not placement.boxes:  # in device memory, or no elements in this process
            return ("jax", id(leaf))
        if placement.devices == 1:
            return ("jax", placed, leaf.unsafe_buffer_pointer(), shape, leaf.dtype)
        pointers = [leaf.addressable_data(position).unsafe_buffer_pointer() for position in placement.boxes.values()]
        return ("jax", placed, tuple(pointers), shape, leaf.dtype)

    def shards(self, leaf: Any, rank: int, size: int) -> Sequence[Shard] | None:
        """Return each box on this process's devices once, or None if the process has no device of the array.

        Raises:
            UnsupportedLeafError: if the array is abstract, deleted or donated, or if this process
                saves alone but holds only a part.
        """
        leaf = data_array(with_elements(leaf))
        return shards_of(leaf.sharding, leaf.shape, rank, size)

    def shards_of(self, leaf: Any, process: int | None, rank: int, size: int) -> Sequence[Shard] | None:
        """Return each box on a process's devices once, or the whole array without a sharding.

        Return None if the process has no device of the array. `process` is a JAX process index, or
        None for this process.

        Raises:
            UnsupportedLeafError: as for `shards`, but abstract, deleted and donated arrays are
                accepted.
        """
        shape, sharding = _data_shape(leaf), _data_sharding(leaf)
        if sharding is None:
            return (Shard(Box.whole(shape), rank, size),)
        if process is None:
            return shards_of(sharding, shape, rank, size)
        return shards_in_process(sharding, shape, process, rank, size)

    def host_bytes(self, leaf: Any, boxes: Sequence[Box]) -> HostBytes:
        """Return the host memory of a save. Views of arrays on the CPU backend need none.

        In an asynchronous save, these arrays also need memory for copies, unless `copy` is False.
        """
        record = self.describe(leaf)
        assert isinstance(record, ArrayRecord)  # all JAX leaves are arrays
        dtype = record.spec.numpy_dtype
        nbytes = sum([box.size for box in boxes]) * dtype.itemsize
        sharding = _data_sharding(leaf)
        if sharding is None or dtype in _PACKED or not placement_of(sharding, record.spec.shape).on_cpu:
            return HostBytes(nbytes, nbytes)
        return HostBytes(0, nbytes if self.copy else 0)

    def replicas(self, leaf: Any, size: int) -> int:
        """Return the number of processes that have each box, or 1 if the number varies.

        Return `size` for an array in a single process, because every process may have an equal
        array.
        """
        sharding = concrete_sharding(leaf.sharding)
        replicas = None if sharding is None else placement_of(sharding, leaf.shape).replicas
        return size if replicas is None else replicas

    def copy_to_host(self, leaf: Any, boxes: Sequence[Box], memory: HostMemory) -> Sequence[Pending[HostArray]]:
        """Copy arrays in host memory, or return views if `copy` is False. Start transfers from other devices."""
        leaf = data_array(with_elements(leaf))
        views = self.view_on_host(leaf, boxes)
        if not self.copy or leaf.dtype in _PACKED or not _may_alias(leaf.sharding, leaf.shape):
            return views
        return [memory.copy(view.result()) for view in views]

    def view_on_host(self, leaf: Any, boxes: Sequence[Box]) -> Sequence[Pending[HostArray]]:
        """Return views of arrays in host memory, and start transfers from other devices.

        Waits until arrays in host memory are computed. A view keeps the memory of its array alive.
        """
        leaf = data_array(with_elements(leaf))
        shape, sharding = leaf.shape, leaf.sharding
        placement = placement_of(sharding, shape)
        if placement.on_cpu and leaf.dtype not in _PACKED:
            if placement.devices == 1:
                view = np.asarray(leaf)
                return [Ready(view if box.shape == shape else view[box.slices]) for box in boxes]
            return [Ready(_view_box(leaf, placement.boxes, box)) for box in boxes]
        transfers = []
        for box in boxes:
            position, slices = _find_box(placement.boxes, box, leaf)
            # JAX caches the host copy in the array object. Use a new array object over the same
            # elements, so that the host copy is freed together with this object.
            part = leaf.addressable_data(position)
            alias = jax.make_array_from_single_device_arrays(part.shape, part.sharding, [part])
            alias.copy_to_host_async()
            transfers.append(_DeviceTransfer(alias, slices))
        return transfers

    def wanted(self, abstract: Any, stored: ArrayRecord) -> Sequence[Box]:
        """Return each box on this process's devices once, or the whole array without a sharding.

        Raises:
            UnsupportedLeafError: if the stored array cannot be converted.
        """
        random_keys.expect_same_impl(abstract.dtype, stored)
        sharding = concrete_sharding(abstract.sharding)
        if random_keys.is_key(abstract.dtype):
            sharding = random_keys.data_sharding(sharding)
        if sharding is None or (isinstance(sharding, SingleDeviceSharding) and sharding.is_fully_addressable):
            return (Box.whole(stored.spec.shape),)
        return tuple(placement_of(sharding, stored.spec.shape).boxes)

    def build(self, abstract: Any, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]) -> object:
        """Build an array with the requested dtype, weak type and sharding.

        The array is uncommitted if the abstract leaf is uncommitted or has no sharding.

        Raises:
            UnsupportedLeafError: if the stored leaf cannot be converted.
        """
        assert isinstance(stored, ArrayRecord)  # the load refuses stored values earlier
        sharding = concrete_sharding(abstract.sharding) if is_committed(abstract) else None
        if random_keys.is_key(abstract.dtype):
            random_keys.expect_same_impl(abstract.dtype, stored)
            return random_keys.build_keys(abstract.dtype, sharding, boxes, stored.spec.shape)
        return create_array(
            stored.spec.shape, abstract.dtype, sharding, boxes, weak_type=getattr(abstract, "weak_type", False)
        )

    def keeps_memory(self, abstract: Any) -> bool:
        """Return False on the CPU backend. Transfers to other devices may still be running."""
        return not is_on_cpu(_data_sharding(abstract) if is_committed(abstract) else None, _data_shape(abstract))


def _may_alias(sharding: Sharding, shape: tuple[int, ...]) -> bool:
    """Return True if the array may alias host memory: on the CPU backend, or offloaded to the host."""
    return placement_of(sharding, shape).on_cpu or (sharding.memory_kind or "").endswith("_host")


class _DeviceTransfer:
    """A running transfer of a box from a device. Thread-safe."""

    __slots__ = ("_array", "_arrived", "_slices")

    def __init__(self, array: jax.Array, slices: tuple[slice, ...]) -> None:
        self._array: jax.Array | None = array
        self._slices = slices
        self._arrived: HostArray | None = None

    def result(self) -> HostArray:
        array = self._array
        if array is not None:
            with jax.transfer_guard_device_to_host("allow"):  # a save is a transfer that the caller asked for
                self._arrived = np.asarray(array)[self._slices]
            self._array = None  # frees the device memory
        assert self._arrived is not None  # set before the array was dropped
        return self._arrived


class _RefusingHandler(JaxLeafHandler):
    """Handler that refuses JAX values that look like arrays, but have no elements or can change during a save."""

    __slots__ = ()

    def describe(self, leaf: Any) -> LeafRecord:
        if isinstance(leaf, jax.core.Tracer):
            raise UnsupportedLeafError(
                f"{leaf} is a tracer without elements, because it is inside jax.jit, jax.grad "
                "or another transformation; save outside, with the arrays that the transformed function returns"
            )
        raise UnsupportedLeafError(f"a {type(leaf).__name__} of JAX is mutable; save its value: ref[...]")


_HANDLER: Final = JaxLeafHandler()
_REFUSING: Final = _RefusingHandler()


def leaf_handler(leaf_type: type, example: object) -> LeafHandler | None:
    """Return the handler of leaves of a type, or None."""
    if issubclass(leaf_type, jax.core.Tracer) or (hasattr(jax, "Ref") and issubclass(leaf_type, jax.Ref)):
        return _REFUSING
    if isinstance(example, jax.Array | jax.ShapeDtypeStruct):
        return _HANDLER
    return None


@functools.lru_cache(maxsize=1 << 14)
def _record_of(shape: tuple[int, ...], dtype: Any, sharding: Sharding | None, weak_type: bool) -> ArrayRecord:
    kind, notes, data_shape = PLAIN_ARRAY, dict[str, JSON](), shape
    if random_keys.is_key(dtype):
        kind, data_shape = random_keys.KIND, shape + random_keys.data_shape(dtype)
        notes["impl"] = random_keys.impl_name(dtype)
        dtype = np.dtype(np.uint32)
    elif not isinstance(dtype, np.dtype):
        raise UnsupportedLeafError(
            f"an array of the extended dtype {dtype} cannot be stored, because ckptcore does not know how JAX "
            "represents its elements; save the arrays that it consists of"
        )
    elif dtype.name in UNSUPPORTED_DTYPES:
        raise UnsupportedLeafError(
            f"an array of {dtype} cannot be stored or loaded with JAX, which names this dtype "
            "but does not support it; use int8 or float8 with Matching(cast='safe'), or a NumPy array"
        )
    if weak_type:
        notes["weak_type"] = True
    cuts = None
    if sharding is not None:
        placement = placement_of(sharding, shape)
        notes.update(placement.notes)
        cuts = placement.cuts
        if cuts is not None:
            cuts += ((),) * (len(data_shape) - len(shape))
    return ArrayRecord(ArraySpec(data_shape, name_of_dtype(dtype)), kind, cuts, notes)


def is_committed(abstract: Any) -> bool:
    """Return True if an array is committed to its devices.

    Abstract arrays count as committed, also without a sharding.
    """
    committed = getattr(abstract, "committed", None)
    return bool(getattr(abstract, "_committed", True) if committed is None else committed)  # private before JAX 0.5


def data_array(leaf: Any) -> Any:
    """Return the array that contains the elements of a leaf: the leaf itself, or the data of random keys."""
    return leaf if isinstance(leaf.dtype, np.dtype) else random_keys.data_of(leaf)


def _data_shape(leaf: Any) -> tuple[int, ...]:
    """Return the shape of `data_array`, also for an abstract leaf."""
    shape: tuple[int, ...] = leaf.shape
    return shape + random_keys.data_shape(leaf.dtype) if random_keys.is_key(leaf.dtype) else shape


def _data_sharding(leaf: Any) -> Sharding | None:
    """Return the sharding of `data_array`, also for an abstract leaf. Return None if there is none."""
    sharding = concrete_sharding(leaf.sharding)
    if sharding is not None and random_keys.is_key(leaf.dtype):
        return random_keys.data_sharding(sharding)
    return sharding


def with_elements(leaf: Any) -> Any:
    """Return the leaf if it has elements.

    Raises:
        UnsupportedLeafError: if it is abstract, deleted or donated.
    """
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise UnsupportedLeafError(
            f"{leaf} has no elements to save; pass the array itself, or save eqx.filter(model, eqx.is_array) of an "
            "Equinox model that has such descriptions"
        )
    if leaf.is_deleted():
        raise UnsupportedLeafError(
            f"an array {leaf.dtype}{list(leaf.shape)} was deleted, or donated to a jitted function; "
            "save the array that the function returned, or save before the call"
        )
    return leaf


def _view_box(leaf: Any, positions: Mapping[Box, int], box: Box) -> HostArray:
    if (position := positions.get(box)) is not None:
        return np.asarray(leaf.addressable_data(position))
    position, slices = _find_box(positions, box, leaf)
    return np.asarray(leaf.addressable_data(position))[slices]


def _find_box(positions: Mapping[Box, int], box: Box, leaf: Any) -> tuple[int, tuple[slice, ...]]:
    """Return the position of a device that has a box, and the slices of the box within the device's data.

    Args:
        positions: `Placement.boxes` of the array.
        box: the box.
        leaf: the array.
    """
    if (position := positions.get(box)) is not None:
        return position, ()
    for outer, position in positions.items():
        if outer.contains(box):
            return position, box.within(outer)
    raise PluginError(
        f"internal error: no device of this process has {box} of an array {leaf.dtype}{list(leaf.shape)} with "
        f"{leaf.sharding}; please report this"
    )
