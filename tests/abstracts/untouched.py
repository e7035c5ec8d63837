"""Memory that records accesses, and an exact comparison of two values."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import torch

_PAGE = mmap.PAGESIZE


class UntouchedMemory:
    """Anonymous memory, of which the system allocates a page at its first read or write."""

    def __init__(self, pages: int) -> None:
        self.memory = mmap.mmap(-1, pages * _PAGE)
        self._address = np.frombuffer(self.memory, np.uint8).ctypes.data
        self._pages = pages

    def pages_touched(self) -> int:
        """Return the number of allocated pages, as reported by mincore(2)."""
        resident = (ctypes.c_ubyte * self._pages)()
        libc = ctypes.CDLL(None, use_errno=True)
        failed = libc.mincore(ctypes.c_void_p(self._address), ctypes.c_size_t(self._pages * _PAGE), resident)
        assert failed == 0, ctypes.get_errno()
        return sum(entry & 1 for entry in resident)


def assert_same(actual: Any, expected: Any, where: str = "the value") -> None:
    """Assert that two values have the same types, structure and placement, and that leaves are equal bit for bit."""
    assert type(actual) is type(expected), f"{where}: expected a {type(expected)}, found a {type(actual)}"
    if isinstance(expected, torch.Tensor):
        _assert_same_tensor(actual, expected, where)
    elif isinstance(expected, jax.Array):
        _assert_same_jax_array(actual, expected, where)
    elif isinstance(expected, Mapping):
        assert list(actual) == list(expected), f"{where}: other keys"
        for key, child in expected.items():
            assert_same(actual[key], child, f"{where}[{key!r}]")
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected), f"{where}: another length"
        for index, child in enumerate(expected):
            assert_same(actual[index], child, f"{where}[{index}]")
    elif isinstance(expected, np.ndarray | np.generic):
        assert (actual.dtype, actual.shape, actual.tobytes()) == (expected.dtype, expected.shape, expected.tobytes()), (
            where
        )
    else:
        structure: Any
        leaves, structure = jax.tree_util.tree_flatten(expected)
        if leaves == [expected]:
            assert actual == expected, f"{where}: expected {expected!r}, found {actual!r}"
            return
        assert jax.tree_util.tree_structure(actual) == structure, f"{where}: another structure"
        assert_same(jax.tree_util.tree_leaves(actual), leaves, where)


def _assert_same_tensor(actual: torch.Tensor, expected: torch.Tensor, where: str) -> None:
    for name in ("dtype", "shape", "device", "requires_grad"):
        assert getattr(actual, name) == getattr(expected, name), f"{where}: another {name}"
    bits = [
        tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in (actual, expected)
    ]
    assert bits[0] == bits[1], f"{where}: other elements"


def _assert_same_jax_array(actual: Any, expected: Any, where: str) -> None:
    for name in ("dtype", "shape", "sharding", "weak_type", "committed"):
        assert getattr(actual, name, None) == getattr(expected, name, None), f"{where}: another {name}"
    if jax.numpy.issubdtype(expected.dtype, jax.dtypes.prng_key):
        actual, expected = jax.random.key_data(actual), jax.random.key_data(expected)
    assert np.asarray(actual).tobytes() == np.asarray(expected).tobytes(), f"{where}: other elements"
