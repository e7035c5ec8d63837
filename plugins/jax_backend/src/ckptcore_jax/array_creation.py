"""Creation of JAX arrays from boxes in host memory. The arrays have their own memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from ckptcore.errors import PluginError, UnsupportedLeafError
from ckptcore.model import Box, HostArray
from ckptcore_jax.shardings import box_of, placement_of

_SMALL_BYTES: Final = 1 << 20
"""Up to this size in bytes, two copies on the host are cheaper than one copy between JAX arrays."""

_ALIGNMENT: Final = 64
"""Alignment in bytes of host memory that the CPU backend borrows. It copies other memory."""


def create_array(
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    sharding: Sharding | None,
    boxes: Sequence[tuple[Box, HostArray]],
    *,
    weak_type: bool = False,
) -> jax.Array:
    """Create an array with these elements, dtype and sharding.

    The array has its own memory, so that it can be donated. A jitted step can then reuse this
    memory and need not allocate a second state.

    Args:
        shape: shape of the whole array.
        dtype: dtype of the array. Elements are cast to it.
        sharding: sharding of the array; None for an uncommitted array on the default device.
            Without a sharding there must be exactly one box, the whole array.
        boxes: all boxes of the sharding in this process, with their elements.
        weak_type: True for a weak dtype, like that of a Python scalar, if the dtype can be weak.

    Raises:
        UnsupportedLeafError: if the elements cannot be cast, or if the dtype has 64-bit numbers
            while jax_enable_x64 is off.
    """
    check_dtype(dtype)
    parts = [(box, part if part.dtype == dtype else cast_elements(part, dtype)) for box, part in boxes]
    if weak_type and shape == () and (sharding is None or sharding.is_fully_addressable):
        scalar = _weak_scalar(parts[0][1], sharding)
        if scalar is not None:
            return scalar
    if sharding is None or parts:
        array = _transferred(shape, sharding, parts)
    else:
        # This process has no device of the array, but still needs an array object.
        array = jax.make_array_from_single_device_arrays(shape, sharding, [], dtype=dtype)
    if array.dtype != dtype:
        raise PluginError(f"internal error: JAX made an array of {array.dtype} instead of {dtype}; please report this")
    return with_weak_type(array, sharding) if weak_type else array


def _transferred(
    shape: tuple[int, ...], sharding: Sharding | None, parts: Sequence[tuple[Box, HostArray]]
) -> jax.Array:
    """Transfer boxes to their devices. On the CPU backend, the array does not borrow the memory of the boxes."""
    if not is_on_cpu(sharding, shape):
        return _assembled(shape, sharding, parts)
    if max([part.nbytes for _, part in parts]) > _SMALL_BYTES:
        array: jax.Array = jax.device_put(_assembled(shape, sharding, parts), sharding, may_alias=False)
        # The copy runs in the background. Wait for it, so that only few read buffers are in memory
        # at a time.
        array.block_until_ready()
        pointers = {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}
        if pointers.isdisjoint([part.ctypes.data for _, part in parts]):
            return array
        # Versions before 0.6 do not copy, even with `may_alias=False`.
    return _assembled(shape, sharding, [(box, _unaligned(part)) for box, part in parts])


def _assembled(shape: tuple[int, ...], sharding: Sharding | None, parts: Sequence[tuple[Box, HostArray]]) -> jax.Array:
    if sharding is None:
        array: jax.Array = jax.device_put(parts[0][1])
        return array
    if len(parts) == 1 and parts[0][1].shape == shape:
        return jax.make_array_from_callback(shape, sharding, lambda index: parts[0][1])
    by_box = dict(parts)
    return jax.make_array_from_callback(shape, sharding, lambda index: by_box[box_of(index, shape)])


def is_on_cpu(sharding: Sharding | None, shape: tuple[int, ...]) -> bool:
    """Return True for an array on the CPU backend. Without a sharding it is on the default device."""
    if sharding is not None:
        return placement_of(sharding, shape).on_cpu
    options: Any = jax.config  # its attributes are defined at run time
    device: Any = options.jax_default_device or jax.devices()[0]
    return str(getattr(device, "platform", device)) == "cpu"


def _unaligned(part: HostArray) -> HostArray:
    """Copy an array to memory that the CPU backend does not borrow. The memory is aligned enough for every dtype."""
    memory = np.empty(part.nbytes + 2 * _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT + _ALIGNMENT // 2
    copied = memory[start : start + part.nbytes].view(part.dtype).reshape(part.shape)
    copied[...] = part
    return copied


def check_dtype(dtype: np.dtype[Any]) -> None:
    """Check that JAX would not silently narrow a dtype.

    Raises:
        UnsupportedLeafError: if the dtype has 64-bit numbers while jax_enable_x64 is off.
    """
    if dtype.itemsize >= 8 and jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise UnsupportedLeafError(
            f"cannot load an array of {dtype}, which JAX does not support while jax_enable_x64 is "
            'off; call jax.config.update("jax_enable_x64", True), or request a narrower dtype'
        )


def cast_elements(part: HostArray, dtype: np.dtype[Any]) -> HostArray:
    """Cast elements to another dtype.

    Raises:
        UnsupportedLeafError: for text and dates, and for casts from complex to real.
    """
    if part.dtype.kind in "SUmM" or (part.dtype.kind == "c" and dtype.kind != "c"):
        raise UnsupportedLeafError(
            f"stored as an array of {part.dtype}, which a jax.Array of {dtype} cannot "
            "represent; request it as a ckptcore.AbstractArray, which can have any dtype"
        )
    return part.astype(dtype)


def _weak_scalar(element: HostArray, sharding: Sharding | None) -> jax.Array | None:
    """Create a weakly typed scalar from a Python scalar. Return None if this would change the bits or the dtype."""
    if element.dtype.kind in "fc" and np.isnan(element):  # Python does not preserve the bits of NaNs
        return None
    scalar: jax.Array = jax.device_put(element.item(), sharding)
    if is_on_cpu(sharding, ()):
        scalar = jax.device_put(scalar, sharding, may_alias=False)  # it may borrow the number's memory
    return scalar if scalar.dtype == element.dtype and scalar.weak_type else None


def with_weak_type(array: jax.Array, sharding: Sharding | None) -> jax.Array:
    """Return a copy of an array with a weak dtype, or the array itself if its dtype cannot be weak."""
    # `.at[...].set` keeps the weak type of its target. This copies the array, which is nearly
    # always a scalar. With a strong type, JAX would compile jitted functions again for the loaded
    # array, and they could return other dtypes.
    kind = {"b": False, "i": 0, "u": 0, "f": 0.0, "c": 0j}.get(array.dtype.kind)
    weak = jnp.full(array.shape, kind) if kind is not None else array
    if not weak.weak_type or weak.dtype != array.dtype:
        return array  # this dtype cannot be weak: only dtypes of Python scalars can
    updated = weak.at[...].set(array)
    return updated if sharding is None else jax.device_put(updated, sharding)
