"""Replacement for `safetensors.numpy`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from ckptcore import Context
from ckptcore_integrations.safetensors.files import safe_open
from ckptcore_integrations.safetensors.numpy_tensors import array_of, arrays_bytes
from ckptcore_integrations.safetensors.reading import Backend, checked_header, save_bytes, save_to

__all__ = ["load", "load_file", "save", "save_file"]


def save(tensor_dict: Mapping[str, np.ndarray[Any, Any]], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return arrays as the bytes of a file. See `safetensors.numpy.save`."""
    return save_bytes(arrays_bytes(tensor_dict), metadata)


def save_file(
    tensor_dict: Mapping[str, np.ndarray[Any, Any]],
    filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    *,
    context: Context | None = None,
) -> None:
    """Save arrays atomically in one file. See `safetensors.numpy.save_file`.

    Args:
        tensor_dict: the arrays by name. They must not change during the call.
        filename: the file, which is replaced.
        metadata: text for the header.
        context: with ``Context(durability="none")``, a power failure can lose the file, as with the library.

    Raises:
        SafetensorError: the format has no such dtype, or the file cannot be written.
    """
    save_to(arrays_bytes(tensor_dict), filename, metadata, context)


def load(data: bytes) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays of a file in memory. See `safetensors.numpy.load`."""
    view = memoryview(data)
    tensors = checked_header(data).tensors
    return {name: array_of(entry, view, entry.start).copy() for name, entry in tensors.items()}


def load_file(filename: str | os.PathLike[str], *, backend: Backend = "mmap") -> dict[str, np.ndarray[Any, Any]]:
    """Load all arrays of a file. See `safetensors.numpy.load_file`."""
    with safe_open(filename, framework="np", backend=backend) as file:
        return file.get_tensors()
