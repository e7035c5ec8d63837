"""The leaves of JAX: arrays on one device or sharded, typed random keys, and abstract arrays."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from ckptcore.errors import UnsupportedLeafError
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
    ValueRecord,
    name_of_dtype,
)
from ckptcore.protocols import HostBytes, HostMemory, LeafHandler, Priority
from ckptcore_jax import random_keys
from ckptcore_jax.placements import placement_of, shards_in_process, shards_of
from ckptcore_jax.placing import placed
from ckptcore_jax.shardings import concrete

__all__ = ["LACKING", "JaxLeafHandler", "alive", "is_committed", "leaf_handler", "plain"]

_PACKED: Final = frozenset(
    np.dtype(getattr(jnp, name)) for name in ("int2", "int4", "uint2", "uint4", "float4_e2m1fn") if hasattr(jnp, name)
)
"""Dtypes that JAX packs on the device and that NumPy gets unpacked: there is no view of them."""


LACKING: Final = frozenset({"float6_e2m3fn", "float6_e3m2fn", "int1", "uint1"})
"""Dtypes that JAX names and cannot hold: XLA knows no float6, and takes int1 for bool in what it compiles."""


@dataclass(frozen=True, slots=True)
class JaxLeafHandler:
    """`jax.Array`, typed random keys, and `jax.ShapeDtypeStruct`.

    An asynchronous save copies arrays in host memory before it returns: those of the CPU backend, and those that are
    offloaded to the host (``memory_kind="pinned_host"``). Such an array can alias memory of NumPy or PyTorch that the
    caller changes (`jax.device_put` of a NumPy array, also with ``may_alias=False``, `jax.dlpack.from_dlpack`,
    `jax.make_array_from_callback`), and JAX does not expose the owner of its memory. Arrays in memory of an accelerator
    are not copied again after the transfer to the host.

    Attributes:
        copy: whether an asynchronous save copies arrays in host memory. False keeps views: only for states in which no
            array aliases memory that changes. Arrays can be deleted and donated either way.
    """

    copy: bool = True

    @property
    def priority(self) -> int:
        """That of a framework's own types."""
        return Priority.FRAMEWORK

    def describe(self, leaf: Any) -> LeafRecord:
        """Shape, dtype and sharding; a typed random key is the array of its ``uint32`` data. Never waits.

        A deleted or donated array is described: it still says as an abstract leaf what a load is to make.
        """
        return _record_of(leaf.shape, leaf.dtype, concrete(leaf.sharding), getattr(leaf, "weak_type", False))

    def abstract(self, leaf: Any) -> jax.ShapeDtypeStruct:
        """Shape, dtype, weak type and sharding, with its memory kind; no sharding where the array is not committed to its devices.

        A sharding over an abstract mesh becomes one over the mesh that is set in this thread.

        Of keys the dtype is that of keys. An array may be deleted, donated or still be computed.
        """
        self.describe(leaf)  # refuses what cannot be stored
        sharding = concrete(leaf.sharding)
        if isinstance(leaf, jax.ShapeDtypeStruct) and sharding is leaf.sharding:
            return leaf
        if not is_committed(leaf):
            sharding = None
        make: Any = jax.ShapeDtypeStruct  # JAX leaves its constructor untyped
        made: jax.ShapeDtypeStruct = make(
            leaf.shape, leaf.dtype, sharding=sharding, weak_type=getattr(leaf, "weak_type", False)
        )
        return made

    def identity(self, leaf: Any) -> Hashable | None:
        """The addresses of the elements in host memory, elsewhere the array object."""
        if isinstance(leaf, jax.ShapeDtypeStruct) or leaf.is_deleted() or leaf.size == 0:
            return None
        leaf = plain(leaf)
        shape, sharding = leaf.shape, leaf.sharding
        placement = placement_of(sharding, shape)
        if not placement.on_cpu or not placement.boxes:  # nothing of it is here to have an address
            return ("jax", id(leaf))
        if placement.devices == 1:
            return ("jax", leaf.unsafe_buffer_pointer(), shape, leaf.dtype)
        pointers = [leaf.addressable_data(position).unsafe_buffer_pointer() for position in placement.boxes.values()]
        return ("jax", tuple(pointers), shape, leaf.dtype)

    def shards(self, leaf: Any, rank: int, size: int) -> Sequence[Shard] | None:
        """The boxes on the devices of this process, each once; None where all its devices are in other processes.

        Raises:
            UnsupportedLeafError: if the array was deleted or donated, or has no elements: it is abstract. Or if this process saves
                alone and others have a part of it.
        """
        leaf = plain(alive(leaf))
        return shards_of(leaf.sharding, leaf.shape, rank, size)

    def shards_of(self, leaf: Any, process: int | None, rank: int, size: int) -> Sequence[Shard] | None:
        """The boxes on the devices of a process, each once; all of it where an abstract array has no sharding.

        A process of the job is the process of JAX with the same number.

        Raises:
            UnsupportedLeafError: as `shards`, but for arrays without elements.
        """
        shape, sharding = _data_shape(leaf), _data_sharding(leaf)
        if sharding is None:
            return (Shard(Box.whole(shape), rank, size),)
        if process is None:
            return shards_of(sharding, shape, rank, size)
        return shards_in_process(sharding, shape, process, rank, size)

    def host_bytes(self, leaf: Any, boxes: Sequence[Box]) -> HostBytes:
        """Return no bytes for views of arrays of the CPU backend, and those of the copies if this handler copies."""
        record = self.describe(leaf)
        assert isinstance(record, ArrayRecord)  # what JAX has are arrays
        dtype = record.spec.numpy_dtype
        nbytes = sum([box.size for box in boxes]) * dtype.itemsize
        sharding = _data_sharding(leaf)
        if sharding is None or dtype in _PACKED or not placement_of(sharding, record.spec.shape).on_cpu:
            return HostBytes(nbytes, nbytes)
        return HostBytes(0, nbytes if self.copy else 0)

    def replicas(self, leaf: Any, size: int) -> int:
        """How many processes have devices that hold each box; all of them, of an array on devices of one process alone."""
        sharding = concrete(leaf.sharding)
        replicas = None if sharding is None else placement_of(sharding, leaf.shape).replicas
        return size if replicas is None else replicas

    def copy_to_host(self, leaf: Any, boxes: Sequence[Box], memory: HostMemory) -> Sequence[Pending[HostArray]]:
        """Copy arrays in host memory, or return views that keep it alive. Start all transfers from other devices."""
        leaf = plain(alive(leaf))
        views = self.view_on_host(leaf, boxes)
        if not self.copy or leaf.dtype in _PACKED or not _may_alias(leaf.sharding, leaf.shape):
            return views
        return [memory.copy(view.result()) for view in views]

    def view_on_host(self, leaf: Any, boxes: Sequence[Box]) -> Sequence[Pending[HostArray]]:
        """Views that keep the memory, where the elements are in host memory; else starts all transfers from devices.

        Waits for the computation of an array in host memory, since a view is what keeps its memory.
        """
        leaf = plain(alive(leaf))
        shape, sharding = leaf.shape, leaf.sharding
        placement = placement_of(sharding, shape)
        if placement.on_cpu and leaf.dtype not in _PACKED:
            if placement.devices == 1:
                view = np.asarray(leaf)
                return [Ready(view if box.shape == shape else view[box.slices]) for box in boxes]
            return [Ready(_view(leaf, placement.boxes, box)) for box in boxes]
        arriving = []
        for box in boxes:
            position, slices = _held(placement.boxes, box, leaf)
            # JAX keeps the host's copy of an array with it for as long as the array lives. An array object of our own for
            # the same elements takes that copy away with it.
            part = leaf.addressable_data(position)
            own = jax.make_array_from_single_device_arrays(part.shape, part.sharding, [part])
            own.copy_to_host_async()
            arriving.append(_Arriving(own, slices))
        return arriving

    def wanted(self, abstract: Any, stored: ArrayRecord) -> Sequence[Box]:
        """The boxes on the devices of this process, each once; all of it where no sharding is asked for.

        Raises:
            UnsupportedLeafError: if the stored array cannot become what is asked for.
        """
        random_keys.check(abstract.dtype, stored)
        sharding = concrete(abstract.sharding)
        if random_keys.is_key(abstract.dtype):
            sharding = random_keys.data_sharding(sharding)
        if sharding is None or (isinstance(sharding, SingleDeviceSharding) and sharding.is_fully_addressable):
            return (Box.whole(stored.spec.shape),)
        return tuple(placement_of(sharding, stored.spec.shape).boxes)

    def destination(self, abstract: Any, stored: ArrayRecord, box: Box) -> HostArray | None:
        """None: arrays are immutable."""
        return None

    def build(self, abstract: Any, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]) -> object:
        """An array of the dtype, weak type and sharding asked for; uncommitted where no sharding is, or none is committed.

        In host memory an array may be the memory it was read into.

        Raises:
            UnsupportedLeafError: if the stored leaf cannot become what is asked for.
        """
        if isinstance(stored, ValueRecord):
            raise UnsupportedLeafError(
                f"a {stored.kind} of Python was saved and a jax.Array is asked for; give a {stored.kind} in the "
                "abstract tree and convert what is loaded with jnp.asarray"
            )
        sharding = concrete(abstract.sharding) if is_committed(abstract) else None
        if random_keys.is_key(abstract.dtype):
            random_keys.check(abstract.dtype, stored)
            return random_keys.built(abstract.dtype, sharding, boxes, stored.spec.shape)
        return placed(
            stored.spec.shape, abstract.dtype, sharding, boxes, weak_type=getattr(abstract, "weak_type", False)
        )

    def fill(self, target: Any, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]) -> bool:
        """False: arrays are immutable."""
        return False

    def memory_to_fill(self, target: Any) -> None:
        """None: arrays are immutable."""


def _may_alias(sharding: Sharding, shape: tuple[int, ...]) -> bool:
    """Return True if the array may alias host memory: on the CPU backend, or offloaded to the host."""
    return placement_of(sharding, shape).on_cpu or (sharding.memory_kind or "").endswith("_host")


class _Arriving:
    """A box on its way from a device. Any thread."""

    __slots__ = ("_array", "_arrived", "_slices")

    def __init__(self, array: jax.Array, slices: tuple[slice, ...]) -> None:
        self._array: jax.Array | None = array
        self._slices = slices
        self._arrived: HostArray | None = None

    def result(self) -> HostArray:
        array = self._array
        if array is not None:
            self._arrived = np.asarray(array)[self._slices]
            self._array = None  # lets go of the device's memory
        assert self._arrived is not None  # set before the array was let go of
        return self._arrived


class _RefusingHandler(JaxLeafHandler):
    """Values of JAX's that look like arrays and have no elements to store, or change under the save."""

    __slots__ = ()

    def describe(self, leaf: Any) -> LeafRecord:
        if isinstance(leaf, jax.core.Tracer):
            raise UnsupportedLeafError(
                f"{leaf} is a tracer: it has no elements, because it is inside jax.jit, jax.grad or another "
                "transformation; save outside of it, with the arrays that it returns"
            )
        raise UnsupportedLeafError(f"a {type(leaf).__name__} of JAX can change at any time; save its value: ref[...]")


_HANDLER: Final = JaxLeafHandler()
_REFUSING: Final = _RefusingHandler()


def leaf_handler(leaf_type: type, example: object) -> LeafHandler | None:
    """The handler for leaves of a type, or None."""
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
        raise UnsupportedLeafError(f"an array of the extended dtype {dtype} cannot be stored; save what it is made of")
    elif dtype.name in LACKING:
        raise UnsupportedLeafError(
            f"an array of {dtype} cannot be stored or loaded with JAX, which names this dtype and cannot hold it; "
            "use int8 or float8, or a NumPy array"
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
    """Whether a concrete array was placed on its devices on purpose. An abstract one with a sharding always is."""
    committed = getattr(abstract, "committed", None)
    return bool(getattr(abstract, "_committed", True) if committed is None else committed)  # its name before 0.5


def plain(leaf: Any) -> Any:
    """The array that holds the elements of a leaf: itself, or the data of a random key."""
    return leaf if isinstance(leaf.dtype, np.dtype) else random_keys.data_of(leaf)


def _data_shape(leaf: Any) -> tuple[int, ...]:
    """The shape of the array that holds the elements of a leaf, which may have none."""
    shape: tuple[int, ...] = leaf.shape
    return shape + random_keys.data_shape(leaf.dtype) if random_keys.is_key(leaf.dtype) else shape


def _data_sharding(leaf: Any) -> Sharding | None:
    """The sharding of that array; None where none is said."""
    sharding = concrete(leaf.sharding)
    if sharding is not None and random_keys.is_key(leaf.dtype):
        return random_keys.data_sharding(sharding)
    return sharding


def alive(leaf: Any) -> Any:
    """The leaf itself.

    Raises:
        UnsupportedLeafError: if it has no elements: it is abstract, deleted or donated.
    """
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise UnsupportedLeafError(f"{leaf} has no elements to save; give the array itself")
    if leaf.is_deleted():
        raise UnsupportedLeafError(
            f"an array {leaf.dtype}{list(leaf.shape)} was deleted, or donated to a jitted function; "
            "save the array that the function returned, or save before the call"
        )
    return leaf


def _view(leaf: Any, held: Mapping[Box, int], box: Box) -> HostArray:
    if (position := held.get(box)) is not None:
        return np.asarray(leaf.addressable_data(position))
    position, slices = _held(held, box, leaf)
    return np.asarray(leaf.addressable_data(position))[slices]


def _held(held: Mapping[Box, int], box: Box, leaf: Any) -> tuple[int, tuple[slice, ...]]:
    """The position of a device that holds a box, and where in what it holds the box is."""
    if (position := held.get(box)) is not None:
        return position, ()
    for outer, position in held.items():
        if outer.contains(box):
            return position, box.within(outer)
    raise UnsupportedLeafError(
        f"{box} of an array {leaf.dtype}{list(leaf.shape)} is on no single device of this process: "
        f"there are {len(held)} boxes, of {leaf.sharding}"
    )
