"""Arrays of JAX made from boxes in host memory, without a copy where the devices are the host's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from ckptcore.errors import PluginError, UnsupportedLeafError
from ckptcore.model import Box, HostArray
from ckptcore_jax.placements import box_of

__all__ = ["cast_elements", "check_dtype", "placed", "with_weak_type"]

_SMALL_BYTES: Final = 1 << 14
"""Up to this size a copy costs less than what `jax.device_put` does to avoid it."""


def placed(
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    sharding: Sharding | None,
    boxes: Sequence[tuple[Box, HostArray]],
    *,
    weak_type: bool = False,
) -> jax.Array:
    """An array with this dtype and sharding that has these elements.

    Memory that is aligned to 64 bytes and of this dtype becomes the array itself on the CPU backend.

    Args:
        shape: of the whole array.
        dtype: elements are cast to it.
        sharding: None for the default device, uncommitted: then one box holds everything.
        boxes: every box of the sharding in this process.
        weak_type: whether the dtype gives way to others, like that of a Python scalar.

    Raises:
        UnsupportedLeafError: if the elements cannot be cast, or JAX has no such dtype now.
    """
    check_dtype(dtype)
    parts = [(box, part if part.dtype == dtype else cast_elements(part, dtype)) for box, part in boxes]
    if weak_type and shape == () and sharding is not None and sharding.is_fully_addressable:
        scalar = _weak_scalar(parts[0][1], sharding)
        if scalar is not None:
            return scalar
    if sharding is None:
        ((_, whole),) = parts
        array = jnp.asarray(whole) if whole.nbytes <= _SMALL_BYTES else jax.device_put(whole)
    elif len(parts) == 1 and parts[0][1].shape == shape:
        array = jax.make_array_from_callback(shape, sharding, lambda index: parts[0][1])
    elif parts:
        by_box = dict(parts)
        array = jax.make_array_from_callback(shape, sharding, lambda index: by_box[box_of(index, shape)])
    else:
        # This process has none of the array's devices, and is still to have the array.
        array = jax.make_array_from_single_device_arrays(shape, sharding, [], dtype=dtype)
    if array.dtype != dtype:
        raise PluginError(f"JAX made an array of {array.dtype} where one of {dtype} was asked for; please report this")
    return with_weak_type(array, sharding) if weak_type else array


def check_dtype(dtype: np.dtype[Any]) -> None:
    """Refuse a dtype that JAX would silently narrow.

    Raises:
        UnsupportedLeafError
    """
    if dtype.itemsize >= 8 and jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise UnsupportedLeafError(
            f"an array of {dtype} is asked for, and JAX has no such dtype while jax_enable_x64 is off; "
            'call jax.config.update("jax_enable_x64", True), or ask for a narrower dtype'
        )


def cast_elements(part: HostArray, dtype: np.dtype[Any]) -> HostArray:
    """Elements as another dtype.

    Raises:
        UnsupportedLeafError: if it cannot hold them.
    """
    if part.dtype.kind in "SUmM" or (part.dtype.kind == "c" and dtype.kind != "c"):
        raise UnsupportedLeafError(
            f"an array of {part.dtype} was saved and a jax.Array of {dtype} is asked for, which cannot hold it; "
            "give an abstract array that can: ckptcore.AbstractArray takes any dtype"
        )
    return part.astype(dtype)


def _weak_scalar(element: HostArray, sharding: Sharding) -> jax.Array | None:
    """A scalar that JAX makes of one of Python's, in the memory that is asked for and nowhere else; None if that would change it."""
    if element.dtype.kind in "fc" and np.isnan(element):  # of which NaN it is, Python keeps not all
        return None
    scalar: jax.Array = jax.device_put(element.item(), sharding)
    return scalar if scalar.dtype == element.dtype and scalar.weak_type else None


def with_weak_type(array: jax.Array, sharding: Sharding | None) -> jax.Array:
    """The same elements as an array whose dtype gives way to others, where such a dtype can."""
    # An update keeps the weak type of what it updates. That costs a copy, of what is nearly always a scalar; without it,
    # jitted functions would be compiled again for the loaded array and could give other dtypes.
    kind = {"b": False, "i": 0, "u": 0, "f": 0.0, "c": 0j}.get(array.dtype.kind)
    weak = jnp.full(array.shape, kind) if kind is not None else array
    if not weak.weak_type or weak.dtype != array.dtype:
        return array  # only the dtypes of Python's scalars can be weak
    updated = weak.at[...].set(array)
    return updated if sharding is None else jax.device_put(updated, sharding)
