"""The leaf handlers of the core satisfy the protocol."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from ckptcore_testing import DTYPE_NAMES, SHAPES, LeafExample, LeafHandlerTests, bit_patterns

from ckptcore.builtin.host_leaves import HostArrayHandler, HostValueHandler
from ckptcore.model import AbstractArray, ArraySpec, HostArray


def _mutate(array: HostArray) -> None:
    changed = bytearray(np.ascontiguousarray(array).tobytes())
    step = array.dtype.itemsize
    for position in range(0, len(changed), step):
        changed[position] ^= 1
    array[...] = np.frombuffer(changed, array.dtype).reshape(array.shape)


def _array(name: str, make: Callable[[], HostArray]) -> LeafExample:
    expected = make()
    native = expected.astype(expected.dtype.newbyteorder("="))
    writable = expected.flags.writeable
    return LeafExample(
        name,
        make,
        np.array(native, order="C"),
        lambda leaf: np.asarray(leaf),
        [lambda: AbstractArray(native.shape, native.dtype), lambda: np.zeros_like(native)],
        _mutate if writable else None,
    )


def _of(spec: ArraySpec) -> LeafExample:
    return _array(str(spec), lambda: bit_patterns(spec))


def _frozen() -> HostArray:
    array = bit_patterns(ArraySpec((3, 2), "float32"))
    array.flags.writeable = False
    return array


def _base() -> HostArray:
    return bit_patterns(ArraySpec((4, 6), "int32"))


class TestHostArrays(LeafHandlerTests):
    handler = HostArrayHandler()
    examples = (
        *[_of(ArraySpec((4, 3), dtype)) for dtype in DTYPE_NAMES if dtype not in ("bool", "U3") and "1" != dtype[-1]],
        _of(ArraySpec((5,), "bool")),
        *[_of(ArraySpec(shape, "float32")) for shape in SHAPES],
        _array("Fortran order", lambda: np.asfortranarray(_base())),
        _array("transposed", lambda: _base().T),
        _array("strided", lambda: _base()[::2, 1::3]),
        _array("reversed", lambda: _base()[::-1, ::-1]),
        _array("big endian", lambda: _base().astype(">i4")),
        _array("read only", _frozen),
        LeafExample(
            "scalar",
            lambda: bit_patterns(ArraySpec((7,), "float32"))[0],
            bit_patterns(ArraySpec((7,), "float32"))[0:1].reshape(()),
            np.asarray,
            [lambda: np.float32(0)],
        ),
    )
    unsupported = (
        lambda: np.array([object()]),
        lambda: np.zeros(2, [("a", "i4"), ("b", "f4")]),
        lambda: np.ma.masked_array([1, 2], [True, False]),
        lambda: np.zeros((1, 2)).view(np.matrix),
        lambda: np.char.array(["a ", "b"]),
        lambda: np.zeros(2, [("a", "i4"), ("b", "f8")]).view(np.recarray),
        lambda: np.zeros(2, "V3"),
        lambda: np.zeros(2, np.longdouble),
    )


def _named(value: object) -> str:
    shown = hex(value) if isinstance(value, int) else ascii(value)
    return f"{type(value).__name__} {shown:.24}"


def _value(value: object) -> LeafExample:
    return LeafExample(_named(value), lambda: value, value, lambda leaf: leaf)


def _text(name: str, value: str | bytes) -> LeafExample:
    data = value.encode() if isinstance(value, str) else value

    def elements(leaf: Any) -> HostArray:
        return np.frombuffer(leaf.encode() if isinstance(leaf, str) else leaf, np.uint8)

    return LeafExample(name, lambda: value, np.frombuffer(data, np.uint8), elements)


class TestHostValues(LeafHandlerTests):
    handler = HostValueHandler()
    examples = (
        *[_value(value) for value in (None, True, False, 0, 1, -1, 2**53, -(2**53) - 1, 10**5000)],
        *[_value(value) for value in (0.0, -0.0, 0.1, 5e-324, 1.7976931348623157e308, float("inf"), float("-inf"))],
        *[_value(value) for value in (float("nan"), complex(1, -0.0), complex(float("nan"), float("inf")))],
        *[_value(value) for value in ("", "text", "é\u0000\U0001f600", "\ud800", b"", b"\x00\xff", "1" * 100)],
        _text("long str", "é" * 20_000),
        _text("long bytes", bytes(range(256)) * 100),
    )
