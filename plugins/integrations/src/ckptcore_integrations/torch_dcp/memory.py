"""Tensors as NumPy arrays over the same memory."""

from __future__ import annotations

from typing import Final

import torch

from ckptcore.model import HostArray, dtype_from_name

_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in checkpoints."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype | None:
    """Return the dtype of a name in checkpoints; None if PyTorch has none."""
    found = getattr(torch, name, None)
    return found if isinstance(found, torch.dtype) else None


def host_array(tensor: torch.Tensor) -> HostArray:
    """Return the elements of a tensor as a NumPy array: its memory if it is on the CPU, else a copy.

    Raises:
        UnsupportedLeafError: NumPy and ml_dtypes have no such dtype.
    """
    dtype = dtype_from_name(dtype_name(tensor.dtype))
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    try:
        array: HostArray = plain.numpy()
    except TypeError:  # a dtype of ml_dtypes, which PyTorch and NumPy exchange as integers
        array = plain.view(_INTEGERS[dtype.itemsize]).numpy().view(dtype)
    return array


def fits_in_place(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return True if elements of a dtype can be read into the memory of a tensor."""
    return (
        tensor.is_cpu
        and tensor.dtype == dtype
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )
