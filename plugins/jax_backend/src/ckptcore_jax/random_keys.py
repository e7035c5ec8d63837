"""Typed random keys, stored as their ``uint32`` data with the name of their implementation."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding

from ckptcore.errors import UnsupportedLeafError
from ckptcore.model import ArrayRecord, Box, HostArray
from ckptcore_jax.array_creation import create_array

KIND: Final = "jax.key"
"""Kind of a record whose elements are the data of random keys."""


def is_key(dtype: Any) -> bool:
    """Return True for a dtype of typed random keys."""
    return not isinstance(dtype, np.dtype) and bool(jax.numpy.issubdtype(dtype, jax.dtypes.prng_key))


def data_of(keys: Any) -> jax.Array:
    """Return the data of random keys. It shares the memory of the keys."""
    return jax.random.key_data(keys)


@functools.lru_cache(maxsize=256)
def data_shape(dtype: Any) -> tuple[int, ...]:
    """Return the shape of the data of one key."""
    return tuple(jax.eval_shape(jax.random.key_data, _abstract_key(dtype)).shape)


@functools.lru_cache(maxsize=256)
def impl_name(dtype: Any) -> str:
    """Return the name of a key implementation that `jax.random.wrap_key_data` accepts."""
    # Names returned by `key_impl` vary among versions of JAX, but accepted names do not.
    for name in ("threefry2x32", "rbg", "unsafe_rbg"):
        if jax.eval_shape(functools.partial(jax.random.key, 0, impl=name)).dtype == dtype:
            return name
    return str(_impl(dtype))


def dtype_of(stored: ArrayRecord) -> Any | None:
    """Return the dtype of stored keys.

    Return None if JAX lacks their implementation, or if their data has another format.
    """
    impl = stored.notes.get("impl")
    dtype = _dtype_of_impl(impl) if stored.kind == KIND and isinstance(impl, str) else None
    if dtype is None:
        return None
    expected = data_shape(dtype)
    return dtype if stored.spec.dtype == "uint32" and stored.spec.shape[-len(expected) :] == expected else None


@functools.lru_cache(maxsize=256)
def _dtype_of_impl(impl: str) -> Any | None:
    try:
        return jax.eval_shape(functools.partial(jax.random.key, 0, impl=impl)).dtype
    except ValueError:  # JAX has no implementation of this name, or it is not registered in this program
        return None


def expect_same_impl(dtype: Any, stored: ArrayRecord) -> None:
    """Check that stored keys have the requested implementation.

    Args:
        dtype: the requested dtype. Dtypes other than keys are always accepted.
        stored: the stored record. A plain array is accepted as data of keys if it is a uint32
            array of a valid shape.

    Raises:
        UnsupportedLeafError: if the keys cannot be loaded.
    """
    if not is_key(dtype):
        return
    impl = stored.notes.get("impl")
    if stored.kind == KIND and impl != impl_name(dtype):
        raise UnsupportedLeafError(
            f"stored as random keys of the implementation {impl!r}, but {impl_name(dtype)!r} "
            "is requested, which would generate other numbers; request keys with "
            f"jax.random.key(..., impl={impl!r}), or request the data and call "
            f"jax.random.wrap_key_data(data, impl={impl!r})"
        )
    expected = data_shape(dtype)
    if stored.spec.dtype != "uint32" or stored.spec.shape[-len(expected) :] != expected:
        raise UnsupportedLeafError(
            f"stored as {stored.spec}, but random keys of {impl_name(dtype)!r} are requested, "
            f"which are uint32 arrays of shape (..., {', '.join(map(str, expected))}); request the "
            "array, and call jax.random.wrap_key_data(array, impl=...) with the implementation of "
            "the program that saved it"
        )


def data_sharding(sharding: Sharding | None) -> Sharding | None:
    """Return the sharding for the data of keys that have this sharding. Return None if it cannot be derived.

    The data has additional axes after the axes of the keys. The additional axes are not sharded.
    Therefore a NamedSharding or SingleDeviceSharding of the keys is valid for their data too. For
    other kinds of sharding, and without a sharding, the result is None, which means the default
    device.
    """
    return sharding if isinstance(sharding, SingleDeviceSharding | NamedSharding) else None


def build_keys(
    dtype: Any, sharding: Sharding | None, boxes: Sequence[tuple[Box, HostArray]], shape: tuple[int, ...]
) -> jax.Array:
    """Return keys with this dtype and sharding.

    Args:
        dtype, sharding: dtype and sharding of the keys.
        boxes: all boxes of the data in this process, for the sharding `data_sharding(sharding)`.
        shape: shape of the data.
    """
    reusable = data_sharding(sharding)
    data = create_array(shape, np.dtype(np.uint32), reusable, boxes)
    keys = wrap_data(dtype, data)
    return keys if sharding is reusable else jax.device_put(keys, sharding)


def wrap_data(dtype: Any, data: jax.Array) -> jax.Array:
    """Return keys of this dtype with this data, on the same devices."""
    keys: jax.Array = jax.random.wrap_key_data(data, impl=_impl(dtype))
    return keys


@functools.lru_cache(maxsize=256)
def _impl(dtype: Any) -> Any:
    # `key_impl` requires keys, but uses only their dtype. Tracing creates a key without a device.
    impls: list[Any] = []
    jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), _abstract_key(dtype))
    return impls[0]


def _abstract_key(dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((), dtype)  # type: ignore[no-untyped-call]  # JAX leaves its constructor untyped
