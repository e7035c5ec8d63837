"""Dtypes of torch, by the names that its pickles use, and what is stored of arrays of which torch has no dtype."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ckptcore.model import ArraySpec, Box

__all__ = ["STORAGES", "TORCH_DTYPES", "physical_box", "physical_spec"]

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
