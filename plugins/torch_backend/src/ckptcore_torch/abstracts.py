"""Abstract tensors for what is stored: on the meta device, and over the mesh of a DTensor where they are to lie beside one."""

from __future__ import annotations

import sys

import torch

from ckptcore.model import PLAIN_ARRAY, AbstractArray
from ckptcore_torch.dtypes import encoding_of_stored

__all__ = ["abstract_beside", "abstract_tensor"]


def abstract_tensor(stored: AbstractArray) -> object:
    """A tensor on the meta device; `stored` itself where PyTorch has no such dtype."""
    encoding = encoding_of_stored(stored.dtype.name, PLAIN_ARRAY)
    return stored if encoding is None else torch.empty(stored.shape, dtype=encoding.dtype, device="meta")


def abstract_beside(parameter: torch.Tensor, stored: AbstractArray) -> object:
    """A tensor for the state of a parameter: where that is a DTensor and of the same shape, one with its mesh and placements.

    Anything else, such as a count of steps, is a plain tensor that every process has.
    """
    distributed = sys.modules.get("torch.distributed.tensor")  # nobody has a DTensor who did not import it
    if distributed is None or not isinstance(parameter, distributed.DTensor) or tuple(parameter.shape) != stored.shape:
        return abstract_tensor(stored)
    encoding = encoding_of_stored(stored.dtype.name, PLAIN_ARRAY)
    if encoding is None:
        return stored
    return torch.empty_like(parameter.detach(), dtype=encoding.dtype, device="meta")
