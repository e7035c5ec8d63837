"""Abstract tensors, created from live tensors or for stored arrays.

A tensor on the meta device requests a tensor on the CPU. A FakeTensor, PyTorch's tensor with a
device but without elements, requests a tensor on its device. This process needs the device only for
the load.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence
from typing import Any

import torch

from ckptcore.errors import UnsupportedLeafError
from ckptcore.model import PLAIN_ARRAY, AbstractArray, ArrayRecord
from ckptcore_torch.conversions import encoding_of_stored


def abstract_tensor(stored: AbstractArray) -> object:
    """Return a tensor on the meta device, or `stored` itself if PyTorch lacks the dtype."""
    encoding = encoding_of_stored(stored.dtype.name, PLAIN_ARRAY)
    return stored if encoding is None else torch.empty(stored.shape, dtype=encoding.dtype, device="meta")


def abstract_leaves(stored: Sequence[ArrayRecord]) -> Sequence[object]:
    """Return a tensor on the meta device for each stored array; None if PyTorch lacks its dtype or kind."""
    return list(map(_abstract_of_stored, stored))


def _abstract_of_stored(stored: ArrayRecord) -> torch.Tensor | None:
    if stored.kind != PLAIN_ARRAY and not stored.kind.startswith("torch."):
        return None  # text, a NumPy scalar, or random keys of JAX
    encoding = encoding_of_stored(stored.spec.dtype, stored.kind)
    return None if encoding is None else torch.empty(stored.spec.shape, dtype=encoding.dtype, device="meta")


def abstract_state_like(parameter: torch.Tensor, stored: AbstractArray) -> object:
    """Return an abstract tensor for the state of a parameter.

    If the parameter is a DTensor, a state of its shape has its mesh and placements. A state of
    another shape, such as the vectors of LBFGS, is replicated on its mesh, because PyTorch has no
    operations between a DTensor and a plain tensor. An exception is a state of one element, such as
    a step count: it is a plain tensor. The result is `stored` itself if PyTorch lacks the dtype.
    """
    distributed = sys.modules.get("torch.distributed.tensor")  # DTensors exist only if this module was imported
    single = math.prod(stored.shape) == 1 and tuple(parameter.shape) != stored.shape
    if distributed is None or single or not isinstance(parameter, distributed.DTensor):
        return abstract_tensor(stored)
    encoding = encoding_of_stored(stored.dtype.name, PLAIN_ARRAY)
    if encoding is None:
        return stored
    if tuple(parameter.shape) == stored.shape:
        return torch.empty_like(parameter.detach(), dtype=encoding.dtype, device="meta")
    whole = torch.empty(stored.shape, dtype=encoding.dtype, device="meta")
    replicated = [distributed.Replicate()] * parameter.device_mesh.ndim
    abstract: torch.Tensor = distributed.DTensor.from_local(whole, parameter.device_mesh, replicated, run_check=False)
    return abstract


def abstract_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous abstract tensor or Parameter with the shape, dtype, device and `requires_grad` of another."""
    abstract = empty_tensor(
        tensor.shape, tensor.dtype, None if tensor.device.type in ("cpu", "meta") else tensor.device
    )
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(abstract, requires_grad=tensor.requires_grad)
    return abstract.requires_grad_() if tensor.requires_grad else abstract


def abstract_subclass(plain: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the meta device with the class and attributes of `like`.

    Args:
        plain: `like` as a plain tensor.
        like: an instance of a subclass over plain memory.

    Raises:
        UnsupportedLeafError: if `like` is neither on the CPU nor on the meta device. Other devices need
            a FakeTensor, which cannot also have the class of `like`.
    """
    if plain.device.type not in ("cpu", "meta"):
        raise UnsupportedLeafError(
            f"cannot create an abstract {type(like).__qualname__} on {plain.device}: pass the "
            "tensor itself, or tensor.as_subclass(torch.Tensor)"
        )
    with torch._C.DisableTorchFunctionSubclass():
        abstract: Any = torch.empty(plain.shape, dtype=plain.dtype, device="meta").as_subclass(type(like))
        abstract.__dict__.update(like.__dict__)
        result: torch.Tensor = abstract.requires_grad_(plain.requires_grad)
        return result


def empty_tensor(shape: torch.Size, dtype: torch.dtype, device: torch.device | None) -> torch.Tensor:
    """Return a tensor without elements: on the meta device if `device` is None, else a FakeTensor."""
    meta = torch.empty(shape, dtype=dtype, device="meta")
    if device is None:
        return meta
    fakes, mode = _fakes()
    fake: torch.Tensor = fakes.FakeTensor(mode, meta, device)
    return fake


def expect_device(device: torch.device) -> None:
    """Check that this process has the device that an abstract tensor requests.

    Raises:
        UnsupportedLeafError: if the device is missing.
    """
    if not _has_device(device):
        raise UnsupportedLeafError(
            f"cannot load a tensor to {device}: this process has no such device; request one "
            "on the CPU with a tensor on the meta device, or use an available device"
        )


@functools.cache
def _has_device(device: torch.device) -> bool:
    if device.type in ("cpu", "meta"):
        return True
    try:
        module = torch.get_device_module(device.type)
    except RuntimeError:  # the backend is not installed
        return False
    return bool(module.is_available()) and (device.index or 0) < module.device_count()


@functools.cache
def _fakes() -> tuple[Any, Any]:
    """Return PyTorch's FakeTensor module and the mode that our FakeTensors share.

    Cached: the import takes about a second.
    """
    import torch._subclasses.fake_tensor as fakes

    return fakes, fakes.FakeTensorMode()
