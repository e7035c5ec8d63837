"""Names of torch dtypes in pickles, and their conversion to and from array specs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ckptcore.model import JSON, PLAIN_ARRAY, ArrayRecord, ArraySpec, Box

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
"""Dtype of each typed storage. Other dtypes use an untyped storage, and the tensor names its dtype."""

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
"""ckptcore's dtype name for each name in the module ``torch``."""

_RAW_BYTES: Final = frozenset(["float4_e2m1fn_x2", *(f"{sign}int{bits}" for bits in range(1, 8) for sign in ("", "u"))])
"""One-byte dtypes that NumPy lacks. Stored as uint8, with the torch dtype in the kind of the leaf."""

FRAMEWORK: Final[Mapping[str, JSON]] = {"framework": "torch"}
"""Notes that make an array load as a tensor into objects that do not have it yet."""

_OF_TORCH: Final = "torch."
"""Prefix of the kind of a leaf with raw bytes. The name of the torch dtype follows."""

_WRITTEN: Final = frozenset(["torch.float4_e2m1fn_x2"])
"""Kinds of `_RAW_BYTES` that torch.distributed.checkpoint can save and load (torch 2.13.0)."""


def known_dtype(name: str) -> str | None:
    """Return the canonical name of a torch dtype, or None if it is not supported."""
    return name if name in _RAW_BYTES else TORCH_DTYPES.get(name)


def spec_and_kind(dtype: str, shape: tuple[int, ...]) -> tuple[ArraySpec, str]:
    """Return the array spec and the kind of the leaf for a tensor. `dtype` comes from `known_dtype`."""
    if dtype in _RAW_BYTES:
        return ArraySpec(shape, "uint8"), _OF_TORCH + dtype
    return ArraySpec(shape, dtype), PLAIN_ARRAY


def record_of_tensor(
    dtype: str, shape: tuple[int, ...], cuts: tuple[tuple[int, ...], ...] | None = None
) -> ArrayRecord:
    """Return the record of a tensor that PyTorch saved. `dtype` comes from `known_dtype`."""
    return ArrayRecord(*spec_and_kind(dtype, shape), cuts, FRAMEWORK)


def torch_dtype(dtype: str, kind: str) -> str:
    """Return the torch dtype of a leaf. Kinds that torch.distributed.checkpoint cannot save become uint8."""
    return kind.removeprefix(_OF_TORCH) if dtype == "uint8" and kind in _WRITTEN else dtype


def physical_spec(spec: ArraySpec) -> ArraySpec:
    """Return the spec that torch sees.

    Times are int64. A dtype that torch lacks becomes uint8 with the bytes of an element as last
    axis.
    """
    if TORCH_DTYPES.get(spec.dtype) == spec.dtype:
        return spec
    dtype = spec.numpy_dtype
    if dtype.kind in "mM":
        return ArraySpec(spec.shape, "int64")
    return ArraySpec((*spec.shape, dtype.itemsize), "uint8")


def physical_box(spec: ArraySpec, box: Box) -> Box:
    """Return the box in the array that torch sees. See `physical_spec`."""
    physical = physical_spec(spec)
    if len(physical.shape) == len(spec.shape):
        return box
    return Box((*box.start, 0), (*box.stop, physical.shape[-1]))
