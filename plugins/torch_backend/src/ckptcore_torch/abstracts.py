"""Abstract tensors: of tensors that are there, and for what is stored.

A tensor on the meta device asks for one on the CPU. What asks for another device is a FakeTensor: PyTorch's own tensor that has a device
and no elements, which needs no such device to be there until it is loaded.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from ckptcore.errors import UnsupportedLeafError
from ckptcore.model import PLAIN_ARRAY, AbstractArray
from ckptcore_torch.dtypes import encoding_of_stored

__all__ = ["abstract_beside", "abstract_like", "abstract_subclass", "abstract_tensor", "empty_tensor", "expect_device"]


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


def abstract_like(tensor: torch.Tensor) -> torch.Tensor:
    """A plain tensor or Parameter as `tensor` is one: of its shape, dtype and device, requiring gradients as it does. Contiguous."""
    made = empty_tensor(tensor.shape, tensor.dtype, None if tensor.device.type in ("cpu", "meta") else tensor.device)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made.requires_grad_() if tensor.requires_grad else made


def abstract_subclass(plain: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor on the meta device of the class of another, with its attributes.

    Args:
        plain: `like` as a plain tensor.
        like: of a subclass that lies over plain memory.

    Raises:
        UnsupportedLeafError: if it is on a device: what says so without elements has a class of its own.
    """
    if plain.device.type not in ("cpu", "meta"):
        raise UnsupportedLeafError(
            f"nothing without elements says that a {type(like).__qualname__} is to be on {plain.device}: ask for it by the tensor "
            "itself, or by tensor.as_subclass(torch.Tensor)"
        )
    with torch._C.DisableTorchFunctionSubclass():
        made: Any = torch.empty(plain.shape, dtype=plain.dtype, device="meta").as_subclass(type(like))
        made.__dict__.update(like.__dict__)
        abstract: torch.Tensor = made.requires_grad_(plain.requires_grad)
        return abstract


def empty_tensor(shape: torch.Size, dtype: torch.dtype, device: torch.device | None) -> torch.Tensor:
    """A tensor without elements: on the meta device if `device` is None, else one that says it is there."""
    meta = torch.empty(shape, dtype=dtype, device="meta")
    if device is None:
        return meta
    fakes, mode = _fakes()
    fake: torch.Tensor = fakes.FakeTensor(mode, meta, device)
    return fake


def expect_device(device: torch.device) -> None:
    """Refuse a device that an abstract tensor asks for and that this process has not.

    Raises:
        UnsupportedLeafError
    """
    if not _is_here(device):
        raise UnsupportedLeafError(
            f"a tensor on {device} is asked for, and this process has no such device; ask for one on the CPU, by a tensor on the device "
            "meta, or on a device that is here"
        )


@functools.cache
def _is_here(device: torch.device) -> bool:
    if device.type in ("cpu", "meta"):
        return True
    try:
        module = torch.get_device_module(device.type)
    except RuntimeError:  # of a backend that is not installed
        return False
    return bool(module.is_available()) and (device.index or 0) < module.device_count()


@functools.cache
def _fakes() -> tuple[Any, Any]:
    """PyTorch's module of FakeTensors, and the mode that all of ours belong to. Costs about a second to import."""
    import torch._subclasses.fake_tensor as fakes

    return fakes, fakes.FakeTensorMode()
