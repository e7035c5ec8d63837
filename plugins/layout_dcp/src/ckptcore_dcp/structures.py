"""Leaves for a NumPy array of any dtype: one array, or one for each field of a structure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, TypeAlias

import numpy as np

from ckptcore.errors import UnsupportedLeafError
from ckptcore.model import name_of_dtype
from ckptcore_dcp.stored_tensors import PickledBytes, StoredTensor, c_strides

Fields: TypeAlias = "StoredTensor | str | Mapping[str, Fields]"
"""An array, what it is if it cannot be loaded, or the arrays of the fields of a structure by name."""

_BFLOAT16: Final = np.dtype("V2")
"""numpy.save loses the name of bfloat16. `jax.numpy.load` takes these bytes for bfloat16, too."""


def arrays_of(
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    storage: str,
    pickled: PickledBytes | None = None,
) -> Fields:
    """Return the arrays that have the elements of an array.

    Raw bytes (``|V3``) become uint8 with one more axis, except ``|V2``, which is bfloat16. A field of a structure is a
    view of its bytes in all elements.

    Args:
        dtype: any dtype, in the stored byte order.
        shape: extents.
        strides: distance between elements along each axis, in elements.
        storage: key of the storage.
        pickled: the place of the bytes if a pickle has them.
    """
    whole = tuple([stride * dtype.itemsize for stride in strides])
    return _arrays(dtype, shape, whole, 0, StoredTensor(storage, "uint8", (), (), 0, framework=None, pickled=pickled))


def _arrays(
    dtype: np.dtype[Any], shape: tuple[int, ...], strides: tuple[int, ...], offset: int, like: StoredTensor
) -> Fields:
    """Return the arrays of a field. Strides and offset are in bytes."""
    if dtype.subdtype is not None:
        dtype, inner = dtype.subdtype
        shape = (*shape, *inner)
        strides = (*strides, *[step * dtype.itemsize for step in c_strides(inner)])
        return _arrays(dtype, shape, strides, offset, like)
    if dtype.names is not None:
        fields: Mapping[str, Any] = dtype.fields or {}
        return {name: _arrays(fields[name][0], shape, strides, offset + fields[name][1], like) for name in dtype.names}
    is_raw = dtype.type is np.void  # the kind of dtypes of ml_dtypes is V too
    if is_raw and dtype.itemsize != 1 and dtype != _BFLOAT16:
        shape, strides = (*shape, dtype.itemsize), (*strides, 1)
    name = "bfloat16" if dtype == _BFLOAT16 else "uint8"
    if not is_raw:
        try:
            name = name_of_dtype(dtype)
        except UnsupportedLeafError as error:
            return f"a NumPy array that cannot be loaded: {error}"
    elif not dtype.itemsize:
        return "a NumPy array whose elements have no bytes"
    array = replace(like, dtype=name, shape=shape)
    if dtype.byteorder == ">":
        pickled = None if like.pickled is None else replace(like.pickled, big_endian=True)
        array = replace(array, storage=f"{like.storage}>", pickled=pickled)
    itemsize = array.itemsize
    if math.gcd(offset, *strides) % itemsize:
        return replace(array, strides=strides, offset=offset, in_bytes=True)
    return replace(array, strides=tuple([step // itemsize for step in strides]), offset=offset // itemsize)
