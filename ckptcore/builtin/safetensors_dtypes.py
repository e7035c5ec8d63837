"""Dtypes of the safetensors format: conversion between arrays and the dtypes and shapes in headers.

The names are those of safetensors 0.8 (``safetensors/src/tensor.rs``). Shapes in headers are in elements, also for
dtypes smaller than a byte. Their elements are packed; the library refuses a tensor that does not end at a byte
boundary.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Final

from ckptcore.model.arrays import ArraySpec
from ckptcore.model.metadata import PLAIN_ARRAY, ArrayRecord
from ckptcore.model.tree import JSON

__all__ = ["header_entry", "record_of"]

_WHOLE_BYTES: Final[Mapping[str, str]] = {
    "bool": "BOOL",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}
"""The names of dtypes whose elements have whole bytes, by ours."""

_OURS: Final = {theirs: ours for ours, theirs in _WHOLE_BYTES.items()}

_BITS: Final[Mapping[str, int]] = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
"""Bits per element of dtypes smaller than a byte. Those of ml_dtypes have a byte per element and are other dtypes."""

_PAIRS: Final = "torch.float4_e2m1fn_x2"
"""The kind of an array of bytes with two F4 elements each: the dtype that the safetensors library uses for F4."""

_RAW: Final = "safetensors."
"""Prefix of the kind of an array that holds the bytes of a tensor whose dtype NumPy lacks. The dtype's name follows."""

_NAME: Final = re.compile(r"\w{1,40}", re.ASCII)


def header_entry(record: ArrayRecord) -> tuple[str, Sequence[int]]:
    """The dtype and shape that a header states for an array that is stored whole."""
    spec = record.spec
    if spec.dtype == "uint8" and record.kind != PLAIN_ARRAY and spec.shape:
        if record.kind == _PAIRS:
            return "F4", (*spec.shape[:-1], 2 * spec.shape[-1])
        raw = _raw_entry(record)
        if raw is not None:
            return raw
    if (known := _WHOLE_BYTES.get(spec.dtype)) is not None:
        return known, spec.shape
    dtype = spec.numpy_dtype
    if dtype.kind in "mM":
        return "I64", spec.shape
    return "U8", spec.shape if dtype.itemsize == 1 else (*spec.shape, dtype.itemsize)


def _raw_entry(record: ArrayRecord) -> tuple[str, Sequence[int]] | None:
    """Return the dtype and shape from which `record_of` made a record of bytes; None for other records."""
    name = record.kind.removeprefix(_RAW)
    bits, shape = _BITS.get(name), record.notes.get("shape")
    if bits is None or not isinstance(shape, list) or not all(type(extent) is int for extent in shape):
        return None
    extents = [extent for extent in shape if isinstance(extent, int)]
    fits = min(extents, default=0) >= 0 and math.prod(extents) * bits == 8 * record.spec.size
    return (name, extents) if fits and len(record.spec.shape) == 1 else None


def record_of(dtype: str, shape: Sequence[int], nbytes: int) -> ArrayRecord | None:
    """Return the array that a header describes; None if the header is inconsistent.

    A tensor of F4 is an array of bytes with two elements each, the first in the lower half. A tensor of any other dtype
    that NumPy lacks is a one-dimensional array of its bytes; `kind` and `notes` have its dtype and its shape.

    Args:
        dtype: its name in the format; one of a newer version has other names.
        shape: elements along each axis.
        nbytes: bytes that the header states.
    """
    if (ours := _OURS.get(dtype)) is not None:
        record = ArrayRecord(ArraySpec(tuple(shape), ours))
        return record if record.spec.nbytes == nbytes and record.spec.is_possible else None
    bits = _BITS.get(dtype)
    if not _NAME.fullmatch(dtype) or (bits is not None and math.prod(shape) * bits != 8 * nbytes):
        return None
    if dtype == "F4" and shape and shape[-1] % 2 == 0:
        record = ArrayRecord(ArraySpec((*shape[:-1], shape[-1] // 2), "uint8"), _PAIRS)
        return record if record.spec.is_possible else None
    notes: dict[str, JSON] = {"shape": list(shape)}
    return ArrayRecord(ArraySpec((nbytes,), "uint8"), f"{_RAW}{dtype}", notes=notes)
