"""The sample of PyTorch for the matrix of `ckptcore_testing`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
from ckptcore_testing import DTYPE_NAMES, FrameworkSample

from ckptcore.model import ArraySpec, HostArray, dtype_from_name

__all__ = ["SAMPLE"]

_INTEGERS: Final[Mapping[int, str]] = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}
"""By bytes of an element, integers that PyTorch and NumPy exchange."""

# PyTorch's int4, float4 and the like are bytes that libraries pack several elements into: other dtypes than ml_dtypes'.
_DTYPES: Final = frozenset(
    name
    for name in DTYPE_NAMES
    if isinstance(getattr(torch, name, None), torch.dtype) and getattr(torch, name).itemsize and "int4" not in name
) - {"int1", "int2", "uint1", "uint2"}  # fmt: skip


def _carrier(itemsize: int) -> str:
    return _INTEGERS[min(itemsize, 8)]


def _make(elements: HostArray) -> torch.Tensor:
    name = elements.dtype.name
    flat = np.array(elements, order="C", copy=True).reshape(-1)
    tensor = torch.from_numpy(flat.view(_carrier(flat.itemsize)))
    return tensor.view(getattr(torch, name)).reshape(elements.shape)


@contextmanager
def _complex32_is_expected() -> Iterator[None]:
    """PyTorch says of complex32 once in a process that it is experimental, wherever it meets it first."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
        yield


def _abstract(spec: ArraySpec) -> torch.Tensor:
    return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")


def _elements(leaf: Any) -> HostArray:
    name = str(leaf.dtype).removeprefix("torch.")
    # A copy: views of another dtype need a stride of 1, which also a tensor of one element may lack.
    flat = torch.empty_strided((leaf.numel(),), (1,), dtype=leaf.dtype).copy_(leaf.detach().reshape(-1))
    carried = flat.view(getattr(torch, _carrier(leaf.dtype.itemsize))).numpy()
    return carried.view(dtype_from_name(name)).reshape(tuple(leaf.shape))


SAMPLE: Final = FrameworkSample(
    name="torch",
    dtypes=_DTYPES,
    make=_make,
    abstract=_abstract,
    elements=_elements,
    array_type=torch.Tensor,
    fills=True,
    session=_complex32_is_expected,
)
"""Tensors; asked for by tensors on the meta device."""
