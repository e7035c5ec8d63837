"""Functions that create elements of arrays. They can be sent to worker processes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ckptcore.model import ArraySpec, Box, HostArray


def counted(spec: ArraySpec, box: Box) -> HostArray:
    """Return the elements of a box of an array that counts 0, 1, 2 and so on in C order."""
    whole = np.arange(spec.size, dtype=np.int64).astype(spec.numpy_dtype)
    return whole.reshape(spec.shape)[box.slices].copy()


@dataclass(frozen=True)
class Given:
    """A function that returns the elements of a given array."""

    whole: HostArray

    def __call__(self, spec: ArraySpec, box: Box) -> HostArray:
        return self.whole[box.slices].copy()
