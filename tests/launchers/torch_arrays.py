"""The arrays of the matrix as tensors."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch

from tests.launchers.states import ARRAYS


def tensor_of(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return the elements of an array as a tensor."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.uint16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def assert_is(name: str, tensor: torch.Tensor) -> None:
    """Assert that a whole tensor equals the array with this name, bit for bit."""
    expected = tensor_of(ARRAYS[name])
    assert tensor.dtype == expected.dtype and torch.equal(tensor, expected), f"{name}: {tensor} is not {expected}"
