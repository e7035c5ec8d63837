"""Write golden checkpoints of the current layouts. Run ``python write.py`` in this directory, once per format.

The tests only read the checkpoints. Do not write the checkpoints of a version again, because they
prove that old checkpoints still load. If the format changes, give `VERSION` a new value.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import jax
import ml_dtypes
import numpy as np
from ckptcore_orbax import ArrayRule, OcdbtLayout, Zarr3Layout, ZarrLayout
from ckptcore_testing.fixed_saves import fixed_saves

import ckptcore
from ckptcore.protocols import Layout

VERSION: Final = "state-1"
"""Version of the state of the layouts in the root. It names the directory of the checkpoints."""


def golden_layouts() -> Mapping[str, Layout]:
    """Return layouts that together use every storage option."""
    return {
        "ocdbt": OcdbtLayout(),
        "ocdbt-files": OcdbtLayout(data_file_bytes=256, checksum=False),
        "ocdbt-flat": OcdbtLayout(item=""),
        "ocdbt-subchunks": OcdbtLayout(chunk_bytes=32, rules=[ArrayRule(pattern="params.*", chunk_bytes=16)]),
        "ocdbt-zarr2": OcdbtLayout(zarr_format=2),
        "ocdbt-zstd": OcdbtLayout(compression="zstd", chunk_bytes=64),
        "zarr": ZarrLayout(chunk_bytes=32),
        "zarr-blosc": ZarrLayout(compression="blosc"),
        "zarr3": Zarr3Layout(chunk_bytes=64),
        "zarr3-zstd": Zarr3Layout(compression="zstd:5"),
    }


def golden_state() -> dict[str, Any]:
    """Return arrays of several frameworks and dtypes, tied arrays, values, and difficult names."""
    weights = np.arange(24, dtype=np.float32).reshape(6, 4)
    return {
        "params": {
            "w": weights,
            "tied": weights,
            "b": np.arange(5).astype(ml_dtypes.bfloat16),
            "jax": jax.numpy.arange(12, dtype=jax.numpy.int32).reshape(3, 4),
            "x.y": np.float64(0.5) * np.ones(3),
            "a": {"b": np.full((2, 2), 7, np.int8)},
        },
        "odd": {
            "empty": np.zeros((0, 4), np.float32),
            "scalar": np.float16(1.5),
            "text": np.array(["ab", "c"]),
            "times": np.array(["2020-01-02", "2021-03-04"], "datetime64[D]"),
            "complex": np.array([1 + 2j, -3j], np.complex64),
            "bool": np.array([True, False, True]),
            "int4": np.arange(-3, 4).astype(ml_dtypes.int4),
        },
        "values": [1, 2.5, True, None, "hi", b"\x00\xff", 2**70, 1 - 2j, {}, []],
        "key": jax.random.key(7),
        "tuple": (np.uint8([1, 2]), {3: np.int16([4])}),
    }


def save_golden(name: str, directory: Path) -> None:
    """Save the golden state in a layout, with a fixed save id and time."""
    with fixed_saves():
        ckptcore.save(directory, golden_state(), layout=golden_layouts()[name], metadata={"made for": "golden"})


if __name__ == "__main__":
    for name in golden_layouts():
        directory = Path(__file__).parent / "checkpoints" / VERSION / name
        if not directory.exists():
            save_golden(name, directory)
            print(f"wrote {directory.relative_to(Path(__file__).parent)}")
