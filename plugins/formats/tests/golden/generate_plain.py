"""Writes the golden files in `plain`, with old versions of their software. Run by hand; tests only read them.

    python3.11 -m venv old
    old/bin/pip install numpy==1.23.5 joblib==1.1.1 jax==0.4.13 jaxlib==0.4.13 ml_dtypes==0.1.0 scipy==1.10.1
    old/bin/python generate_plain.py

``expected.npz`` has the arrays of all files, as uint8 for dtypes of ml_dtypes. The files are

    numpy_1.npz, numpy_1.pkl    NumPy 1: its modules have other names in pickles
    joblib_1_1.joblib           joblib before 1.2, which does not align arrays
    joblib_1_1.joblib.z         the same, compressed by zlib
    jax_0_4_13.pkl              arrays of JAX
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import joblib  # type: ignore[import-untyped]
import numpy as np

HERE = Path(__file__).parent / "plain"

ARRAYS: dict[str, Any] = {
    "c": np.arange(6.0).reshape(2, 3),
    "fortran": np.asfortranarray(np.arange(24, dtype=np.int16).reshape(2, 3, 4)),
    "big_endian": np.arange(4, dtype=">f4"),
    "text": np.array(["a", "bé"]),
    "no_axes": np.array(5),
    "matrix": np.matrix([[1, 2], [3, 4]]),
}

if __name__ == "__main__":
    HERE.mkdir(exist_ok=True)
    bfloat16 = jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3)
    np.savez(HERE / "expected.npz", bfloat16=np.asarray(bfloat16).view(np.uint16), **ARRAYS)
    np.savez(HERE / "numpy_1.npz", **ARRAYS)
    (HERE / "numpy_1.pkl").write_bytes(pickle.dumps({**ARRAYS, "scalar": np.float32(1.5)}, 2))
    joblib.dump({**ARRAYS, "objects": np.array([None, {"a": 1}], object)}, HERE / "joblib_1_1.joblib")
    joblib.dump(ARRAYS, HERE / "joblib_1_1.joblib.z", compress=("zlib", 3))
    (HERE / "jax_0_4_13.pkl").write_bytes(pickle.dumps({"b": bfloat16, "f": jnp.ones(3)}))
