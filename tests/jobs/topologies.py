"""Arrays that jobs of every size and framework save, and compare with the checkpoints of other jobs."""

from __future__ import annotations

from typing import Any, Final

import ml_dtypes
import numpy as np

LAYOUTS: Final = ("safetensors", "zarr3", "ocdbt", "dcp")

WHOLE: Final = {
    "even": np.arange(16 * 12, dtype=np.float32).reshape(16, 12),
    "uneven": (np.arange(10 * 6) % 128).reshape(10, 6).astype(ml_dtypes.bfloat16),
    "few": np.arange(3, dtype=np.float32) - 1,
    "count": np.array(7, np.int32),
}
"""By name. There are fewer elements of one than processes, and one has no axis."""


def assert_part(name: str, part: Any, index: tuple[slice, ...]) -> None:
    """Assert that elements equal a part of an array, bit for bit."""
    expected = WHOLE[name][index]
    part = np.asarray(part)
    assert part.dtype == expected.dtype and part.tobytes() == expected.tobytes(), f"{name}{index}: {part}"
