"""Golden files of old versions of NumPy, joblib and JAX: see golden/generate_plain.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ckptcore
from plugins.formats.tests.counted import assert_same

GOLDEN = Path(__file__).parent / "golden/plain"


def _expected() -> dict[str, Any]:
    with np.load(GOLDEN / "expected.npz") as arrays:
        return dict(arrays)


@pytest.mark.parametrize("name", ["numpy_1.npz", "numpy_1.pkl", "joblib_1_1.joblib", "joblib_1_1.joblib.z"])
def test_arrays_of_old_versions(name: str) -> None:
    expected = _expected()
    expected.pop("bfloat16")
    loaded = ckptcore.load(GOLDEN / name)
    for key, array in expected.items():
        assert_same(loaded[key], array)
    if name == "joblib_1_1.joblib":
        assert loaded["objects"] == [None, {"a": 1}]


def test_arrays_of_an_old_jax() -> None:
    loaded = ckptcore.load(GOLDEN / "jax_0_4_13.pkl")
    assert_same(loaded["b"], _expected()["bfloat16"].view(ml_dtypes.bfloat16))
    assert_same(loaded["f"], np.ones(3, np.float32))
