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
from ckptcore.model import JSON, ArrayRecord, LeafRecord, Node, Skeleton
from ckptcore_jax import random_keys
from ckptcore_jax.leaves import LACKING
from ckptcore_jax.shardings import sharding_from_notes

__all__ = ["abstract_arrays"]


def abstract_arrays(metadata: ckptcore.results.CheckpointMetadata, devices: Sequence[jax.Device] | None = None) -> Any:
    """Return the abstract tree of a checkpoint, with a `jax.ShapeDtypeStruct` for each array that JAX saved.

    Arrays that JAX saved get the sharding, memory kind and weak type they had, and random keys are
    keys again. An array has no sharding if the present devices do not fit (`sharding_from_notes`),
    or if it was on one device that is JAX's default now: then it is loaded to the default device,
    uncommitted, so that it can be used with arrays on other devices.

    Other leaves stay as they are in `metadata.abstract`, and are loaded as NumPy: values, NumPy
    scalars, and arrays that NumPy or another framework saved, which have no sharding in their
    notes. So do arrays that JAX cannot hold now: text, dates, and dtypes of 64 bits while
    jax_enable_x64 is off. If other software wrote the checkpoint, every array that JAX can hold
    gets a `jax.ShapeDtypeStruct`.

    Args:
        metadata: of one tree: from `ckptcore.metadata`, or one of its `checkpointables`.
        devices: to put arrays on; None for `jax.devices()`.

    Returns:
        The tree; None of files that an object wrote, which hold no arrays.

    Reads nothing. Safe in any thread.
    """
    if metadata.abstract is None:
        return None
    is_foreign = metadata.save_id is None  # only ckptcore stores the sharding of every JAX array in the notes
    records = [record if is_foreign or _is_of_jax(record) else None for record in metadata.tree.leaves]
    return _replaced(metadata.tree.skeleton, metadata.abstract, iter(records), _Shardings(devices))


class _Shardings:
    """Cache of shardings by notes, because thousands of arrays share a few."""

    def __init__(self, devices: Sequence[jax.Device] | None) -> None:
        self._devices = jax.devices() if devices is None else devices
        self._made: dict[str, Sharding | None] = {}
        # The only way to get the default device in every version of JAX.
        self._default = jax.device_put(np.zeros((), np.bool_)).sharding

    def find(self, notes: Mapping[str, JSON], shape: tuple[int, ...]) -> Sharding | None:
        """Return the sharding of an array of this shape, or None for the default."""
        key = json.dumps([notes.get("sharding"), notes.get("memory_kind")])
        if key not in self._made:
            made = sharding_from_notes(notes, self._devices)
            self._made[key] = None if made == self._default else made
        return _fitted(self._made[key], shape)


def _is_of_jax(record: LeafRecord) -> bool:
    return isinstance(record, ArrayRecord) and (record.kind == random_keys.KIND or "sharding" in record.notes)


def _replaced(skeleton: Skeleton, abstract: Any, records: Iterator[LeafRecord | None], shardings: _Shardings) -> Any:
    if not isinstance(skeleton, Node):
        record = next(records)
        return _abstract_array(record, abstract, shardings) if _is_array(record, abstract) else abstract
    # Children have the order of the skeleton; the keys of the abstract container may differ.
    keys = list(abstract) if isinstance(abstract, dict) else range(len(abstract))
    children = [
        _replaced(child, abstract[key], records, shardings) for key, child in zip(keys, skeleton.children, strict=True)
    ]
    return type(abstract)(zip(keys, children, strict=True)) if isinstance(abstract, dict) else type(abstract)(children)


def _is_array(record: LeafRecord | None, abstract: object) -> bool:
    return isinstance(record, ArrayRecord) and isinstance(abstract, ckptcore.AbstractArray)


def _abstract_array(record: Any, abstract: Any, shardings: _Shardings) -> Any:
    shape, dtype = record.spec.shape, record.spec.numpy_dtype
    if record.kind == random_keys.KIND and (keys := random_keys.dtype_of(record)) is not None:
        shape, dtype = shape[: len(shape) - len(random_keys.data_shape(keys))], keys
    elif not _holds(dtype):
        return abstract
    make: Any = jax.ShapeDtypeStruct  # the constructor is untyped in JAX
    weak = record.notes.get("weak_type") is True
    return make(shape, dtype, sharding=shardings.find(record.notes, shape), weak_type=weak)


def _holds(dtype: np.dtype[Any]) -> bool:
    """Return True if JAX supports this dtype with its present configuration."""
    known = dtype.name not in LACKING and hasattr(jnp, dtype.name)
    return known and jax.dtypes.canonicalize_dtype(dtype) == dtype


def _fitted(sharding: Sharding | None, shape: tuple[int, ...]) -> Sharding | None:
    """Return the sharding if it fits an array of this shape."""
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
