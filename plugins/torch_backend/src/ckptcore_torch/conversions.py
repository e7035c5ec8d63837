"""Conversions between tensors and NumPy arrays over the same memory, their dtypes, and casts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from ckptcore.errors import UnsupportedLeafError
from ckptcore.model import JSON, PLAIN_ARRAY, ArrayRecord, HostArray, dtype_from_name

FRAMEWORK: Final[Mapping[str, JSON]] = {"framework": "torch"}
"""Notes of a saved tensor. They let a load create a tensor if the target object has no such entry yet."""

# Dtype names shared by PyTorch and checkpoints. PyTorch and NumPy can exchange the dtypes in
# `_DIRECT` directly, and the others only as integers of the same size.
_DIRECT: Final = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "complex64", "complex128",
)  # fmt: skip
_THROUGH_INTEGERS: Final = {
    "bfloat16": "int16",
    "complex32": "int32",
    "bcomplex32": "int32",
    "float8_e4m3fn": "uint8",
    "float8_e4m3fnuz": "uint8",
    "float8_e5m2": "uint8",
    "float8_e5m2fnuz": "uint8",
    "float8_e8m0fnu": "uint8",
}
# Dtypes whose bits PyTorch does not define: libraries pack several elements into a byte. The byte
# is stored as uint8, and the kind of the leaf names the dtype.
_RAW_BYTES: Final = (
    "float4_e2m1fn_x2",
    *(f"int{bits}" for bits in range(1, 8)),
    *(f"uint{bits}" for bits in range(1, 8)),
)
_QUANTIZED: Final = ("qint8", "quint8", "qint32", "quint4x2", "quint2x4")
_OPAQUE: Final = ("bits8", "bits16", "bits1x8", "bits2x4", "bits4x2")


@dataclass(frozen=True, slots=True)
class Encoding:
    """Representation of a torch dtype.

    Attributes:
        dtype: the torch dtype.
        name: name of the dtype in checkpoints.
        kind: kind of the leaf: `PLAIN_ARRAY`, or ``torch.`` and the name of the torch dtype if
            `name` does not determine it.
        host: the NumPy dtype of that name.
        carrier: torch and NumPy integer dtypes of the same size, to exchange elements; None if
            PyTorch and NumPy can exchange the dtype directly.
    """

    dtype: torch.dtype
    name: str
    kind: str
    host: np.dtype[Any]
    carrier: tuple[torch.dtype, np.dtype[Any]] | None


def _known_encodings() -> tuple[Encoding, ...]:
    """Return the encodings that the installed PyTorch and ml_dtypes support."""
    encodings = []
    for name in (*_DIRECT, *_THROUGH_INTEGERS):
        dtype = getattr(torch, name, None)
        if dtype is None:
            continue
        try:
            host_dtype = dtype_from_name(name)
        except UnsupportedLeafError:
            continue  # the installed ml_dtypes is too old: `encoding_of` raises an error on use
        integer = _THROUGH_INTEGERS.get(name)
        carrier = None if integer is None else (getattr(torch, integer), np.dtype(integer))
        encodings.append(Encoding(dtype, name, PLAIN_ARRAY, host_dtype, carrier))
    byte = np.dtype(np.uint8)
    for name in _RAW_BYTES:
        dtype = getattr(torch, name, None)
        if dtype is not None:
            encodings.append(Encoding(dtype, "uint8", f"torch.{name}", byte, (torch.uint8, byte)))
    return tuple(encodings)


_BY_TORCH: Final = {encoding.dtype: encoding for encoding in _known_encodings()}
_BY_STORED: Final = {(encoding.kind, encoding.name): encoding for encoding in _BY_TORCH.values()}
_BY_NAME: Final = {encoding.name: encoding for encoding in _BY_TORCH.values() if encoding.kind == PLAIN_ARRAY}


def encoding_of(dtype: torch.dtype) -> Encoding:
    """Return the encoding of a torch dtype.

    Raises:
        UnsupportedLeafError: for quantized, opaque and unknown dtypes.
    """
    encoding = _BY_TORCH.get(dtype)
    if encoding is None:
        raise UnsupportedLeafError(_unsupported_message(dtype))
    return encoding


def encoding_of_stored(name: str, kind: str) -> Encoding | None:
    """Return the encoding of stored elements, or None if PyTorch lacks the dtype."""
    return _BY_STORED.get((kind, name)) or _BY_NAME.get(name)


def _unsupported_message(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    if name in _QUANTIZED:
        return (
            f"cannot store a quantized tensor ({dtype}), which consists of integers, a scale and a "
            "zero point; save tensor.int_repr(), tensor.q_scale() and tensor.q_zero_point() as "
            "separate leaves, or tensor.dequantize()"
        )
    if name in _OPAQUE:
        return f"cannot store {dtype}, whose bits have no defined meaning; save tensor.view(torch.uint8)"
    if name in _THROUGH_INTEGERS:
        return f"{dtype} needs a newer ml_dtypes than the installed one: upgrade ml-dtypes, or save a view as integers"
    return (
        f"this ckptcore-torch does not support {dtype}; upgrade ckptcore-torch, or save a view "
        "of the tensor as integers of the same size"
    )


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
        # PyTorch does not define the values of raw bytes, so raw bytes can be copied but not cast.
        if not (
            (stored_raw and dtype == torch.uint8)
            or (not stored_raw and stored.spec.dtype == "uint8")
            or wanted.kind == f"torch.{stored.spec.dtype}"
        ):
            kind = stored.kind if stored_raw else stored.spec.dtype
            raise UnsupportedLeafError(
                f"{kind} cannot be cast to {dtype}: PyTorch does not define the bits of one of them; load it as it is "
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
    """Return a NumPy dtype that PyTorch supports and that represents all values of a dtype that PyTorch lacks."""
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
