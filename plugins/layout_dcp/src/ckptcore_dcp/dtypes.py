"""Dtypes of torch by their names in pickles, and conversion to and from arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ckptcore.model import PLAIN_ARRAY, ArraySpec, Box

__all__ = ["STORAGES", "TORCH_DTYPES", "known_dtype", "physical_box", "physical_spec", "spec_and_kind", "torch_dtype"]

STORAGES: Final[Mapping[str, str]] = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
}
"""The dtype of the elements of each typed storage. Others lie in an untyped one, and the tensor names its dtype."""

TORCH_DTYPES: Final[Mapping[str, str]] = {
    **{name: name for name in STORAGES.values()},
    **{f"uint{bits}": f"uint{bits}" for bits in (16, 32, 64)},
    **{name: name for name in ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")},
    "double": "float64",
    "float": "float32",
    "half": "float16",
    "long": "int64",
    "int": "int32",
    "short": "int16",
    "cfloat": "complex64",
    "cdouble": "complex128",
}
"""ckptcore's name of a dtype by its name in the module ``torch``."""

_RAW_BYTES: Final = frozenset(["float4_e2m1fn_x2", *(f"{sign}int{bits}" for bits in range(1, 8) for sign in ("", "u"))])
"""Dtypes of one byte that NumPy lacks. They are stored as uint8, with the dtype in the kind of the leaf."""

_OF_TORCH: Final = "torch."
"""Prefix of such a kind. The name of the dtype follows."""

_WRITTEN: Final = frozenset(["torch.float4_e2m1fn_x2"])
"""Kinds whose dtypes torch.distributed.checkpoint can copy (torch 2.13.0). It can neither save nor load others."""


def known_dtype(name: str) -> str | None:
    """Return the canonical name of a dtype of torch; None if it is not supported."""
    return name if name in _RAW_BYTES else TORCH_DTYPES.get(name)


def spec_and_kind(dtype: str, shape: tuple[int, ...]) -> tuple[ArraySpec, str]:
    """Return the spec of the array for a tensor, and the kind of its leaf. `dtype` is a result of `known_dtype`."""
    if dtype in _RAW_BYTES:
        return ArraySpec(shape, "uint8"), _OF_TORCH + dtype
    return ArraySpec(shape, dtype), PLAIN_ARRAY


def torch_dtype(dtype: str, kind: str) -> str:
    """Return the dtype of torch for a leaf. Kinds that torch.distributed.checkpoint cannot copy are uint8."""
    return kind.removeprefix(_OF_TORCH) if dtype == "uint8" and kind in _WRITTEN else dtype


def physical_spec(spec: ArraySpec) -> ArraySpec:
    """What torch is told of an array: times are int64, and what it has no dtype for is uint8 with an element as last axis."""
    if TORCH_DTYPES.get(spec.dtype) == spec.dtype:
        return spec
    dtype = spec.numpy_dtype
    if dtype.kind in "mM":
        return ArraySpec(spec.shape, "int64")
    return ArraySpec((*spec.shape, dtype.itemsize), "uint8")


def physical_box(spec: ArraySpec, box: Box) -> Box:
    """Where a box of an array is in what torch is told of it."""
    physical = physical_spec(spec)
    if len(physical.shape) == len(spec.shape):
        return box
    return Box((*box.start, 0), (*box.stop, physical.shape[-1]))
