"""Conversions between tensors and NumPy arrays over the same memory, and casts."""

from __future__ import annotations

import numpy as np
import torch

from ckptcore.errors import UnsupportedLeafError
from ckptcore.model import PLAIN_ARRAY, ArrayRecord, HostArray
from ckptcore_torch.dtypes import encoding_of, encoding_of_stored


def host_view(tensor: torch.Tensor) -> HostArray:
    """Return a NumPy array over the memory of a CPU tensor, with its strides.

    Conjugated and negated views are copied, because their memory contains other values.
    """
    encoding = encoding_of(tensor.dtype)
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_conj():
        tensor = tensor.resolve_conj()
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    if encoding.carrier is None:
        return tensor.numpy()
    return tensor.view(encoding.carrier[0]).numpy().view(encoding.host)


def shares_memory(array: HostArray, tensor: torch.Tensor) -> bool:
    """Return True if this result of `host_view` shares the memory of this CPU tensor."""
    base = array.base
    if isinstance(base, np.ndarray):  # a view of the carrier integers
        base = base.base
    return isinstance(base, torch.Tensor) and base.data_ptr() == tensor.data_ptr() and tensor.is_cpu


def tensor_over(array: HostArray, stored: ArrayRecord) -> torch.Tensor | None:
    """Return a tensor over the memory of a C-contiguous array, or None if PyTorch lacks the dtype.

    A read-only array is copied, because tensors cannot be read-only.
    """
    encoding = encoding_of_stored(stored.spec.dtype, stored.kind)
    if encoding is None:
        return None
    if not array.flags.writeable:
        array = array.copy()
    carrier = encoding.carrier
    if carrier is None:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(carrier[1])).view(encoding.dtype)


def elements_as(array: HostArray, stored: ArrayRecord, dtype: torch.dtype) -> torch.Tensor:
    """Return a CPU tensor with the elements of an array, cast to `dtype`.

    The tensor shares the memory of the array if the array is writeable and no cast is needed.

    Raises:
        UnsupportedLeafError: if the cast does not exist, or would drop imaginary parts.
    """
    tensor = tensor_over(array, stored)
    if tensor is not None and tensor.dtype == dtype:
        return tensor
    wanted = encoding_of(dtype)
    stored_raw = tensor is not None and encoding_of(tensor.dtype).kind != PLAIN_ARRAY
    if stored_raw or wanted.kind != PLAIN_ARRAY:
        # PyTorch does not define the values of raw bytes, so they can be copied but not cast.
        if not (
            (stored_raw and dtype == torch.uint8)
            or (not stored_raw and stored.spec.dtype == "uint8")
            or wanted.kind == f"torch.{stored.spec.dtype}"
        ):
            found = stored.kind if stored_raw else stored.spec.dtype
            raise UnsupportedLeafError(
                f"{found} cannot be cast to {dtype}: PyTorch does not define the bits of one of them; load it as it is "
                "stored, and convert it yourself"
            )
        plain = array if array.flags.writeable else array.copy()
        return torch.from_numpy(plain.view(np.uint8)).view(dtype)
    if "complex" in stored.spec.dtype and not dtype.is_complex:
        raise UnsupportedLeafError(
            f"{stored.spec.dtype} cannot be cast to {dtype}, which has no imaginary parts; "
            "load it as a complex dtype, and use .real"
        )
    if tensor is None:
        tensor = torch.from_numpy(array.astype(_exact_superset(stored.spec.dtype)))
    return tensor.to(dtype)


def copy_elements(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy the elements of a tensor into another of the same dtype, on any device."""
    carrier = encoding_of(source.dtype).carrier
    # Copy as integers, because PyTorch cannot copy some dtypes. A conjugated tensor cannot be viewed
    # as integers.
    if carrier is not None and not target.is_conj():
        target, source = target.view(carrier[0]), source.view(carrier[0])
    target.copy_(source)


def _exact_superset(name: str) -> type[np.generic]:
    """Return a NumPy dtype that PyTorch also has, and that can represent all values of a dtype that PyTorch lacks."""
    for prefix, wider in (
        ("float", np.float32),
        ("int", np.int8),
        ("uint", np.uint8),
        ("bcomplex", np.complex64),
        ("complex", np.complex64),
    ):
        if name.startswith(prefix):
            return wider
    raise UnsupportedLeafError(
        f"PyTorch has no dtype for {name}; load this leaf as a NumPy array, with an AbstractArray instead of the tensor"
    )
