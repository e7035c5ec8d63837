"""Every dtype of the installed PyTorch is supported, or refused with an error that names the dtype."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from ckptcore_torch.conversions import encoding_of, encoding_of_stored

from ckptcore.errors import UnsupportedLeafError
from ckptcore.model import PLAIN_ARRAY, dtype_from_name

ALL = sorted(
    {member for name in dir(torch) if isinstance(member := getattr(torch, name), torch.dtype)},
    key=str,
)
REFUSED = {
    "qint8", "quint8", "qint32", "quint4x2", "quint2x4", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2",
}  # fmt: skip
if not hasattr(ml_dtypes, "complex32"):  # older versions lack this dtype
    REFUSED.update(("complex32", "bcomplex32"))
RAW = {"float4_e2m1fn_x2", *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8))}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def test_the_list_of_dtypes_is_not_empty() -> None:
    assert {torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.complex128} <= set(ALL)
    assert len(ALL) > 25


@pytest.mark.parametrize("dtype", ALL, ids=_name)
def test_every_dtype_is_supported_or_refused(dtype: torch.dtype) -> None:
    name = _name(dtype)
    if name in REFUSED:
        with pytest.raises(UnsupportedLeafError, match=name):
            encoding_of(dtype)
        return
    encoding = encoding_of(dtype)
    assert encoding.dtype is dtype
    assert encoding.host == dtype_from_name(encoding.name)
    assert encoding.host.itemsize == dtype.itemsize
    if name in RAW:
        assert (encoding.name, encoding.kind) == ("uint8", f"torch.{name}")
    else:
        assert (encoding.name, encoding.kind) == (name, PLAIN_ARRAY)
    assert encoding_of_stored(encoding.name, encoding.kind) is encoding
    if encoding.carrier is not None:
        over, under = encoding.carrier
        assert over.itemsize == under.itemsize == dtype.itemsize
        assert torch.zeros((), dtype=over).numpy().dtype == under


@pytest.mark.parametrize("dtype", [dtype for dtype in ALL if _name(dtype) not in REFUSED | RAW], ids=_name)
def test_numbers_are_equal_in_torch_and_numpy(dtype: torch.dtype) -> None:
    encoding = encoding_of(dtype)
    if _name(dtype) == "float8_e8m0fnu":
        numbers = [0.5, 1.0, 2.0]
    elif dtype is torch.bool:
        numbers = [0.0, 1.0, 1.0]
    else:
        numbers = [0.0, 1.0, 3.0]
    there = torch.tensor(numbers).to(torch.complex64 if dtype.is_complex else torch.float32)
    if _name(dtype) in ("complex32", "bcomplex32"):
        half = torch.float16 if dtype is torch.complex32 else torch.bfloat16
        bits = torch.tensor([[number, 0.0] for number in numbers], dtype=half).view(torch.int32).reshape(-1)
    else:
        converted = there.to(dtype)
        bits = converted if encoding.carrier is None else converted.view(encoding.carrier[0])
    here = bits.numpy().view(encoding.host)
    assert here.astype(np.complex64 if dtype.is_complex else np.float32).tolist() == numbers


def test_an_unknown_dtype_is_refused_with_advice() -> None:
    class Future:
        def __str__(self) -> str:
            return "torch.float3_future"

    with pytest.raises(UnsupportedLeafError, match="does not support .*float3_future.*upgrade ckptcore-torch"):
        encoding_of(Future())  # type: ignore[arg-type]  # represents a dtype of a later PyTorch


def test_dtype_that_pytorch_lacks_has_no_encoding() -> None:
    for name in ("float8_e3m4", "int4", "datetime64[ns]", "S3"):
        assert encoding_of_stored(name, PLAIN_ARRAY) is None


def test_an_unknown_kind_loads_as_a_plain_array() -> None:
    encoding = encoding_of_stored("uint8", "stranger.kind")
    assert encoding is not None
    assert encoding.dtype is torch.uint8
