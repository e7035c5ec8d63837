"""Items written without torch: torch and Python's zipfile read them, and compute the same CRC-32."""

from __future__ import annotations

import io
import zipfile
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from ckptcore_dcp.items import tensor_item, value_item
from ckptcore_dcp.stored_tensors import TORCH_DTYPES, physical_box, physical_spec
from ckptcore_testing import DTYPE_NAMES, SHAPES, bit_patterns

from ckptcore.model import ArraySpec, Box

_DTYPES = sorted(name for name in DTYPE_NAMES if TORCH_DTYPES.get(name) == name)


def _item(spec: ArraySpec, elements: bytes, position: int = 0) -> bytes:
    item = tensor_item(spec, position)
    tail = item.tail.encode(item.tail.of(memoryview(elements)))
    assert len(tail) == item.tail.nbytes
    return item.head + elements + tail


def _bytes_of(tensor: torch.Tensor) -> bytes:
    raw: bytes = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return raw


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", _DTYPES)
def test_torch_loads_a_tensor(dtype: str, shape: tuple[int, ...]) -> None:
    spec = ArraySpec(shape, dtype)
    elements = bit_patterns(spec).tobytes()
    loaded = torch.load(io.BytesIO(_item(spec, elements)), weights_only=True)
    assert loaded.dtype == getattr(torch, dtype) and tuple(loaded.shape) == shape
    assert _bytes_of(loaded) == elements
    assert loaded.is_contiguous()


@pytest.mark.parametrize("position", [0, 64, 4032, 1 << 20])
@pytest.mark.parametrize("count", [0, 1, 1000, 1 << 18])
def test_elements_are_aligned_and_have_a_checksum(count: int, position: int) -> None:
    spec = ArraySpec((count,), "float32")
    elements = bit_patterns(spec).tobytes()
    data = _item(spec, elements, position)
    assert (position + len(tensor_item(spec, position).head)) % (4096 if count >= 1 << 18 else 64) == 0
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        assert archive.namelist() == [f"archive/{name}" for name in ("data.pkl", "version", "byteorder", "data/0")]
        assert archive.getinfo("archive/data/0").CRC == zlib.crc32(elements)
        assert archive.read("archive/data/0") == elements


def test_zipfile_finds_a_flipped_bit() -> None:
    spec = ArraySpec((64,), "float32")
    data = bytearray(_item(spec, bytes(256)))
    data[len(tensor_item(spec, 0).head) + 5] ^= 1
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() == "archive/data/0"


@pytest.mark.parametrize(
    "value",
    [
        None, True, 0, -1, 255, 1 << 40, 10**30, 1.5, float("inf"), 2j, "text", "ü" * 300, b"bytes\0", b"", [],
        [1, [2.5, "x"]],
        (1, 2), (), {"a": {"b": [None, ()]}}, (0.9, 0.999),
    ],
    ids=repr,
)  # fmt: skip
def test_torch_loads_a_value(value: Any) -> None:
    data = value_item(value)
    loaded = torch.load(io.BytesIO(data), weights_only=True)
    assert type(loaded) is type(value) and loaded == value
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None


@pytest.mark.slow
def test_more_than_four_gibibytes() -> None:
    """Sizes and the offset of the zip directory exceed 4 bytes."""
    spec = ArraySpec(((1 << 32) + 5,), "uint8")
    item = tensor_item(spec, 0)
    elements = np.zeros(spec.shape, np.uint8)
    elements[-1] = 7
    tail = item.tail.encode(item.tail.of(memoryview(elements)))
    assert len(tail) == item.tail.nbytes
    data = io.BytesIO()
    data.write(item.head)
    data.write(memoryview(elements))
    data.write(tail)
    data.seek(0)
    with zipfile.ZipFile(data) as archive:
        assert archive.testzip() is None
        assert archive.getinfo("archive/data/0").file_size == spec.nbytes
    data.seek(0)
    loaded = torch.load(data, weights_only=True)
    assert tuple(loaded.shape) == spec.shape and loaded[-1] == 7


def test_physical_shapes_of_dtypes_that_torch_lacks() -> None:
    assert physical_spec(ArraySpec((2, 3), "datetime64[s]")) == ArraySpec((2, 3), "int64")
    assert physical_spec(ArraySpec((2,), "U5")) == ArraySpec((2, 20), "uint8")
    assert physical_spec(ArraySpec((2,), "float16")) == ArraySpec((2,), "float16")
    assert physical_box(ArraySpec((4,), "U5"), Box((1,), (3,))) == Box((1, 0), (3, 20))
