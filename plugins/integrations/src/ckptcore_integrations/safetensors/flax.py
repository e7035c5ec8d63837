"""Replacement for `safetensors.flax`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from ckptcore import Context
from ckptcore_integrations.safetensors import numpy
from ckptcore_integrations.safetensors.files import safe_open
from ckptcore_integrations.safetensors.reading import Backend

__all__ = ["load", "load_file", "save", "save_file"]


def save(tensors: Mapping[str, Array], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return arrays as the bytes of a file. See `safetensors.flax.save`."""
    return numpy.save(_on_host(tensors), metadata)


def save_file(
    tensors: Mapping[str, Array],
    filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    *,
    context: Context | None = None,
) -> None:
    """Save arrays atomically in one file. See `ckptcore_integrations.safetensors.numpy.save_file`.

    Unlike the library, it does not replace the arrays in `tensors`.
    """
    numpy.save_file(_on_host(tensors), filename, metadata, context=context)


def load(data: bytes) -> dict[str, Array]:
    """Return the arrays of a file in memory. See `safetensors.flax.load`."""
    return {name: jnp.array(array) for name, array in numpy.load(data).items()}


def load_file(filename: str | os.PathLike[str], *, backend: Backend = "mmap") -> dict[str, Array]:
    """Load all arrays of a file. See `safetensors.flax.load_file`."""
    with safe_open(filename, framework="flax", backend=backend) as file:
        return file.get_tensors()


def _on_host(tensors: Mapping[str, Array]) -> dict[str, np.ndarray[Any, Any]]:
    return {name: np.asarray(array) for name, array in tensors.items()}
