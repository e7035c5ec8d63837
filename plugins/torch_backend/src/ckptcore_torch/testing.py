"""The PyTorch sample for the matrix of `ckptcore_testing`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
from ckptcore_testing import DTYPE_NAMES, FrameworkSample

from ckptcore.model import ArraySpec, HostArray, dtype_from_name

_INTEGERS: Final[Mapping[int, str]] = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}
"""Integer dtypes that PyTorch and NumPy exchange, by item size in bytes."""

# PyTorch's int4 and float4 pack several elements into a byte, unlike the dtypes of ml_dtypes.
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
    """Ignore the warning that complex32 is experimental, which PyTorch raises once per process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(ComplexHalf|BComplex32) support is experimental")
        yield


def _abstract(spec: ArraySpec) -> torch.Tensor:
    return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")


def _elements(leaf: Any) -> HostArray:
    name = str(leaf.dtype).removeprefix("torch.")
    # Copy, because a view of another dtype needs a stride of 1, which even a tensor of one element
    # may lack.
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
"""Tensors, requested with tensors on the meta device."""
