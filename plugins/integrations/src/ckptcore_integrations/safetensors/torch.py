"""Replacement for `safetensors.torch`."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from safetensors.torch import (  # noqa: F401  # programs import the library's helpers from here
    _end_ptr,
    _evaluate_tensors_for_save,
    _find_shared_tensors,
    _is_complete,
    _remove_duplicate_names,
    storage_ptr,
    storage_size,
)

from ckptcore import Context
from ckptcore_integrations.safetensors.files import safe_open
from ckptcore_integrations.safetensors.reading import Backend, checked_header, save_bytes, save_to
from ckptcore_integrations.safetensors.torch_tensors import tensor_of, tensors_bytes

__all__ = ["load", "load_file", "load_model", "save", "save_file", "save_model"]


def save(tensors: dict[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return tensors as the bytes of a file. See `safetensors.torch.save`."""
    _evaluate_tensors_for_save(tensors)
    return save_bytes(tensors_bytes(tensors), metadata)


def save_file(
    tensors: dict[str, torch.Tensor],
    filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    *,
    context: Context | None = None,
) -> None:
    """Save tensors atomically in one file. See `safetensors.torch.save_file`.

    Args:
        tensors: contiguous tensors by name, which share no memory. They must not change during the call.
        filename: the file, which is replaced.
        metadata: text for the header.
        context: with ``Context(durability="none")``, a power failure can lose the file, as with the library.

    Raises:
        SafetensorError: the format has no such dtype, or the file cannot be written.
        ValueError: `tensors` is not a dict of contiguous, dense tensors.
        RuntimeError: tensors share memory; use `save_model`.
    """
    _evaluate_tensors_for_save(tensors)
    save_to(tensors_bytes(tensors), filename, metadata, context)


def load(data: bytes) -> dict[str, torch.Tensor]:
    """Return the tensors of a file in memory. See `safetensors.torch.load`."""
    tensors = checked_header(data).tensors
    return {name: tensor_of(entry, bytearray(data[entry.start : entry.stop]), 0) for name, entry in tensors.items()}


def load_file(
    filename: str | os.PathLike[str], device: str | int = "cpu", *, backend: Backend = "mmap"
) -> dict[str, torch.Tensor]:
    """Load all tensors of a file. See `safetensors.torch.load_file`."""
    with safe_open(filename, framework="pt", device=device, backend=backend) as file:
        return file.get_tensors()


def save_model(
    model: torch.nn.Module,
    filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    force_contiguous: bool = True,
    *,
    context: Context | None = None,
) -> None:
    """Save a model whose parameters may share memory. See `safetensors.torch.save_model`.

    The metadata lists the names that are dropped, with the names under which their tensors are stored.
    """
    state = model.state_dict()
    dropped = {name: kept for kept, names in _remove_duplicate_names(state).items() for name in names}
    about = {**dropped, **(metadata or {})}
    kept = {
        name: tensor.contiguous() if force_contiguous else tensor
        for name, tensor in state.items()
        if name not in dropped
    }
    try:
        save_file(kept, filename, None if metadata is None and not dropped else about, context=context)
    except ValueError as error:
        raise ValueError(f"{error} Or use save_model(..., force_contiguous=True).") from error


def load_model(
    model: torch.nn.Module,
    filename: str | os.PathLike[str],
    strict: bool = True,
    device: str | int = "cpu",
    *,
    backend: Backend = "mmap",
) -> tuple[set[str], list[str]]:
    """Load a model in place. See `safetensors.torch.load_model`.

    Returns:
        The names that the file lacks, and the names that the model lacks.

    Raises:
        RuntimeError: names are missing or unexpected, and `strict` is True.
    """
    state = load_file(filename, device=device, backend=backend)
    shared = _remove_duplicate_names(model.state_dict(), preferred_names=list(state))
    result = model.load_state_dict(state, strict=False)
    missing, unexpected = set(result.missing_keys), list(result.unexpected_keys)
    for name in [name for names in shared.values() for name in names]:
        if name in missing:
            missing.remove(name)
        else:
            unexpected.append(name)
    if strict and (missing or unexpected):
        lines = [f"Error(s) in loading state_dict for {type(model).__name__}:"]
        for kind, names in (("Missing", missing), ("Unexpected", set(unexpected))):
            if names:
                listed = ", ".join([f'"{name}"' for name in sorted(names)])
                lines.append(f"    {kind} key(s) in state_dict: {listed}")
        raise RuntimeError("\n".join(lines))
    return missing, unexpected
