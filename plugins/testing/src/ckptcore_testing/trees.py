"""Assertions that two trees are equal: types and order of containers, and the bits of leaves."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from ckptcore_testing.arrays import assert_same_bits


def assert_same_tree(found: Any, expected: Any, where: str = "the tree") -> None:
    """Fail with the path unless two trees of built-in containers, NumPy arrays and values are equal."""
    assert type(found) is type(expected), f"{where}: expected a {type(expected)}, found {found!r:.100}"
    if isinstance(expected, dict):
        keys, expected_keys = list(found), list(expected)
        assert keys == expected_keys, f"{where}: expected the keys {expected_keys}, found {keys}"
        assert list(map(type, keys)) == list(map(type, expected_keys)), f"{where}: keys of other types: {keys}"
        for key in expected_keys:
            assert_same_tree(found[key], expected[key], f"{where}[{key!r}]")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), f"{where}: expected {len(expected)} children, found {len(found)}"
        for index, (child, expected_child) in enumerate(zip(found, expected, strict=True)):
            assert_same_tree(child, expected_child, f"{where}[{index}]")
    elif dataclasses.is_dataclass(expected):
        for field in dataclasses.fields(expected):
            child, expected_child = getattr(found, field.name), getattr(expected, field.name)
            assert_same_tree(child, expected_child, f"{where}.{field.name}")
    else:
        assert_same_value(found, expected, where)


def assert_same_value(found: Any, expected: Any, where: str) -> None:
    """Fail unless two arrays or values are equal. Arrays are compared bitwise; all NaNs of Python floats are equal."""
    if isinstance(expected, np.ndarray):
        assert isinstance(found, np.ndarray), f"{where}: expected a NumPy array, found {type(found)}"
        assert_same_bits(found, expected, where)
        return
    assert type(found) is type(expected), f"{where}: expected {expected!r:.200}, found {found!r:.200}"
    if isinstance(expected, float | complex):  # also np.float64 and np.complex128
        parts = ((found.real, expected.real), (found.imag, expected.imag))
        for part, expected_part in parts:
            same = math.isnan(part) if math.isnan(expected_part) else part.hex() == expected_part.hex()
            assert same, f"{where}: expected {expected!r}, found {found!r}"
        return
    if hasattr(expected, "dtype"):
        assert same_value(found, expected), f"{where}: expected {expected!r:.200}, found {found!r:.200}"
        return
    # No repr, because Python refuses to convert a very long int to text.
    assert found == expected, f"{where}: expected another {type(expected).__name__}"


def same_value(found: Any, expected: Any) -> bool:
    """Return True if two trees have the same containers, keys, types, dtypes, shapes and bits."""
    return bool(comparable(found) == comparable(expected))


def comparable(value: Any) -> Any:
    """Return a form of a tree for comparisons. Two forms are equal only if types, keys and bits are equal.

    Leaves can be arrays of NumPy, PyTorch and JAX, dataclasses, and values.
    """
    if isinstance(value, Mapping):
        return type(value), [(type(key), key, comparable(child)) for key, child in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [comparable(child) for child in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value), [comparable(getattr(value, field.name)) for field in dataclasses.fields(value)]
    if hasattr(value, "untyped_storage"):
        elements = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(sys.modules["torch"].uint8)
        return type(value), value.dtype, tuple(value.shape), elements.numpy().tobytes()
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        is_key = str(value.dtype).startswith("key<")
        elements = sys.modules["jax"].random.key_data(value) if is_key else value
        array = np.asarray(elements)
        if array.dtype.hasobject:  # its bytes are pointers: an abstract array, or an array of objects
            return type(value), value.dtype, value.tolist() if isinstance(value, np.ndarray) else value
        return type(value), value.dtype, tuple(value.shape), array.tobytes()
    return type(value), repr(value) if isinstance(value, float | complex) else value
