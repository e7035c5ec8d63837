"""Typed random keys: stored as their ``uint32`` data, with the name of their implementation."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding

from ckptcore.errors import UnsupportedLeafError
from ckptcore.model import ArrayRecord, Box, HostArray
from ckptcore_jax.placing import placed

__all__ = [
    "KIND",
    "built",
    "check",
    "data_of",
    "data_shape",
    "data_sharding",
    "dtype_of",
    "impl_name",
    "is_key",
    "wrapped",
]

KIND: Final = "jax.key"
"""The kind of a record whose elements are the data of random keys."""


def is_key(dtype: Any) -> bool:
    """Whether a dtype is that of typed random keys."""
    return not isinstance(dtype, np.dtype) and bool(jax.numpy.issubdtype(dtype, jax.dtypes.prng_key))


def data_of(keys: Any) -> jax.Array:
    """The data of random keys; shares their memory."""
    return jax.random.key_data(keys)


@functools.lru_cache(maxsize=256)
def data_shape(dtype: Any) -> tuple[int, ...]:
    """The shape of the data of one key of this dtype."""
    return tuple(jax.eval_shape(jax.random.key_data, _abstract_key(dtype)).shape)


@functools.lru_cache(maxsize=256)
def impl_name(dtype: Any) -> str:
    """The name of the implementation of keys of this dtype, as `jax.random.wrap_key_data` takes it."""
    # What `key_impl` gives has other names in other versions of JAX. What JAX takes as a name stays.
    for name in ("threefry2x32", "rbg", "unsafe_rbg"):
        if jax.eval_shape(functools.partial(jax.random.key, 0, impl=name)).dtype == dtype:
            return name
    return str(_impl(dtype))


def dtype_of(stored: ArrayRecord) -> Any | None:
    """The dtype of the keys whose data was saved; None if JAX knows no such keys now, or they have other data."""
    impl = stored.notes.get("impl")
    dtype = _dtype_named(impl) if stored.kind == KIND and isinstance(impl, str) else None
    if dtype is None:
        return None
    expected = data_shape(dtype)
    return dtype if stored.spec.dtype == "uint32" and stored.spec.shape[-len(expected) :] == expected else None


@functools.lru_cache(maxsize=256)
def _dtype_named(impl: str) -> Any | None:
    try:
        return jax.eval_shape(functools.partial(jax.random.key, 0, impl=impl)).dtype
    except ValueError:  # JAX has no implementation of this name, or not in this program
        return None


def check(dtype: Any, stored: ArrayRecord) -> None:
    """Refuse to make keys of one implementation from those of another.

    Args:
        dtype: what is asked for; anything but keys is let through.
        stored: the record of what was saved; a plain array is taken as data of keys if it has their shape.

    Raises:
        UnsupportedLeafError: if it cannot be.
    """
    if not is_key(dtype):
        return
    impl = stored.notes.get("impl")
    if stored.kind == KIND and impl != impl_name(dtype):
        raise UnsupportedLeafError(
            f"random keys of the implementation {impl!r} were saved, and {impl_name(dtype)!r} is asked for: they would "
            f"give other numbers; give an abstract key made with impl={impl!r}"
        )
    expected = data_shape(dtype)
    if stored.spec.dtype != "uint32" or stored.spec.shape[-len(expected) :] != expected:
        raise UnsupportedLeafError(
            f"{stored.spec} was saved and random keys of {impl_name(dtype)!r} are asked for, which are uint32 arrays "
            f"of shape (..., {', '.join(map(str, expected))}); give an abstract array instead"
        )


def data_sharding(sharding: Sharding | None) -> Sharding | None:
    """The sharding by which the data of keys with this one is read and placed; None for whole, on the default device.

    Data has an axis or more behind those of its keys, along which it is not cut. Only a mesh, or one device, lets that be said by
    the same sharding.
    """
    return sharding if isinstance(sharding, SingleDeviceSharding | NamedSharding) else None


def built(
    dtype: Any, sharding: Sharding | None, boxes: Sequence[tuple[Box, HostArray]], shape: tuple[int, ...]
) -> jax.Array:
    """Keys of this dtype with this sharding.

    Args:
        dtype, sharding: of the keys.
        boxes: of the data, those of `data_sharding` in this process.
        shape: of the data.
    """
    at_once = data_sharding(sharding)
    placed_data = placed(shape, np.dtype(np.uint32), at_once, boxes)
    keys = wrapped(dtype, placed_data)
    return keys if sharding is at_once else jax.device_put(keys, sharding)


def wrapped(dtype: Any, data: jax.Array) -> jax.Array:
    """Keys of this dtype that have this data; on the same devices."""
    keys: jax.Array = jax.random.wrap_key_data(data, impl=_impl(dtype))
    return keys


@functools.lru_cache(maxsize=256)
def _impl(dtype: Any) -> Any:
    # `key_impl` wants keys, and only looks at their dtype; tracing makes one without a device.
    found: list[Any] = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), _abstract_key(dtype))
    return found[0]


def _abstract_key(dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((), dtype)  # type: ignore[no-untyped-call]  # JAX leaves its constructor untyped
