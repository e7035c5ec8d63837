"""Abstract JAX arrays of a checkpoint, with their stored shardings."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

import ckptcore
from ckptcore.model import JSON, PLAIN_ARRAY, ArrayRecord, LeafRecord, Node, Skeleton
from ckptcore_jax import random_keys
from ckptcore_jax.leaves import UNSUPPORTED_DTYPES
from ckptcore_jax.shardings import sharding_from_notes


def abstract_arrays(metadata: ckptcore.results.CheckpointMetadata, devices: Sequence[jax.Device] | None = None) -> Any:
    """Return the abstract tree of a checkpoint, with a `jax.ShapeDtypeStruct` for each array that JAX saved.

    Each `jax.ShapeDtypeStruct` has the stored sharding, memory kind and weak type. For random keys
    it has a key dtype, if this JAX has their implementation. It has no sharding in three cases: if
    the available devices do not fit (`sharding_from_notes`), if the sharding does not fit the
    shape, or if the array was on a single device that is now JAX's default device. An array without
    a sharding is loaded to the default device, uncommitted, so that it can be used with arrays on
    other devices.

    Other leaves are the same as in `metadata.abstract`, and are loaded as NumPy arrays or values.
    They are: values; NumPy scalars; arrays saved by NumPy or another framework, which have no
    sharding in their notes; and arrays that JAX does not support (text, dates, and 64-bit dtypes
    while jax_enable_x64 is off). If the checkpoint was not written by ckptcore, the result has a
    `jax.ShapeDtypeStruct` for every array that JAX supports, unless the files name another
    framework, as Orbax does for NumPy arrays.

    Does no I/O. Thread-safe.

    Args:
        metadata: metadata of one tree: the result of `ckptcore.metadata`, or one of its
            `checkpointables`.
        devices: devices for the arrays; None for `jax.devices()`.

    Returns:
        The abstract tree. None for a checkpointable that consists of files, because it has no
        arrays.
    """
    if metadata.abstract is None:
        return None
    is_foreign = metadata.save_id is None  # only ckptcore stores the sharding of every JAX array in the notes
    records = [
        record if (is_foreign and _may_be_of_jax(record)) or _was_saved_by_jax(record) else None
        for record in metadata.tree.leaves
    ]
    return _replace_leaves(metadata.tree.skeleton, metadata.abstract, iter(records), _Shardings(devices))


def abstract_leaves(stored: Sequence[ArrayRecord]) -> Sequence[object]:
    """Return a `jax.ShapeDtypeStruct` for each stored array; None if JAX lacks its dtype or kind.

    The shardings are the same as in `abstract_arrays`.
    """
    shardings = _Shardings(None)
    return [
        _abstract_array(record, None, shardings) if record.kind in (PLAIN_ARRAY, random_keys.KIND) else None
        for record in stored
    ]


class _Shardings:
    """Cache of shardings by notes, because thousands of arrays share a few shardings."""

    def __init__(self, devices: Sequence[jax.Device] | None) -> None:
        self._devices = jax.devices() if devices is None else devices
        self._by_notes: dict[str, Sharding | None] = {}
        # No other way to find the default device works in every version of JAX.
        self._default = jax.device_put(np.zeros((), np.bool_)).sharding

    def find(self, notes: Mapping[str, JSON], shape: tuple[int, ...]) -> Sharding | None:
        """Return the sharding of an array of this shape. Return None for the default device, or if no sharding fits."""
        key = json.dumps([notes.get("sharding"), notes.get("memory_kind")])
        if key not in self._by_notes:
            sharding = sharding_from_notes(notes, self._devices)
            self._by_notes[key] = None if sharding == self._default else sharding
        return _fit_sharding(self._by_notes[key], shape)


def _was_saved_by_jax(record: LeafRecord) -> bool:
    return isinstance(record, ArrayRecord) and (record.kind == random_keys.KIND or "sharding" in record.notes)


def _may_be_of_jax(record: LeafRecord) -> bool:
    return isinstance(record, ArrayRecord) and record.framework in ("jax", None)


def _replace_leaves(
    skeleton: Skeleton, abstract: Any, records: Iterator[LeafRecord | None], shardings: _Shardings
) -> Any:
    if not isinstance(skeleton, Node):
        record = next(records)
        return _abstract_array(record, abstract, shardings) if _is_array(record, abstract) else abstract
    # Children are in the order of the skeleton. The keys of the abstract container may differ.
    keys = list(abstract) if isinstance(abstract, dict) else range(len(abstract))
    children = [
        _replace_leaves(child, abstract[key], records, shardings)
        for key, child in zip(keys, skeleton.children, strict=True)
    ]
    return type(abstract)(zip(keys, children, strict=True)) if isinstance(abstract, dict) else type(abstract)(children)


def _is_array(record: LeafRecord | None, abstract: object) -> bool:
    return isinstance(record, ArrayRecord) and isinstance(abstract, ckptcore.AbstractArray)


def _abstract_array(record: Any, abstract: Any, shardings: _Shardings) -> Any:
    shape, dtype = record.spec.shape, record.spec.numpy_dtype
    if record.kind == random_keys.KIND and (keys := random_keys.dtype_of(record)) is not None:
        shape, dtype = shape[: len(shape) - len(random_keys.data_shape(keys))], keys
    elif not _supports_dtype(dtype):
        return abstract
    make: Any = jax.ShapeDtypeStruct  # the constructor is untyped in JAX
    weak = record.notes.get("weak_type") is True
    return make(shape, dtype, sharding=shardings.find(record.notes, shape), weak_type=weak)


def _supports_dtype(dtype: np.dtype[Any]) -> bool:
    """Return True if JAX supports this dtype in its current configuration."""
    known = dtype.name not in UNSUPPORTED_DTYPES and hasattr(jnp, dtype.name)
    return known and jax.dtypes.canonicalize_dtype(dtype) == dtype


def _fit_sharding(sharding: Sharding | None, shape: tuple[int, ...]) -> Sharding | None:
    """Return the sharding for an array of this shape, or None if it does not fit."""
    if sharding is None:
        return None
    if isinstance(sharding, NamedSharding) and len(sharding.spec) > len(shape) and not any(sharding.spec[len(shape) :]):
        # For random keys, Orbax stores the sharding of their data, which has one more axis.
        spec: Any = PartitionSpec  # the constructor is untyped in JAX
        sharding = NamedSharding(sharding.mesh, spec(*sharding.spec[: len(shape)]), memory_kind=sharding.memory_kind)
    try:
        sharding.shard_shape(shape)
    except (ValueError, IndexError, NotImplementedError):  # indivisible extents, too many axes, or partial sums
        return None
    return sharding
