"""Host memory that copies as late as allowed, to detect handlers that free their arrays too early."""

from __future__ import annotations

import numpy as np

from ckptcore.model import ArraySpec, HostArray, Pending


class LateHostMemory:
    """A `ckptcore.protocols.HostMemory` that copies when the result is requested. Thread-safe."""

    def empty(self, spec: ArraySpec) -> HostArray:
        """Return memory filled with 0xA5, to detect bytes that are never written."""
        memory = np.full(spec.nbytes, 0xA5, np.uint8)
        return memory.view(spec.numpy_dtype).reshape(spec.shape)

    def copy(self, source: HostArray) -> Pending[HostArray]:
        """Return a copy that is made when its result is requested."""
        return _LateCopy(source)


class _LateCopy:
    def __init__(self, source: HostArray) -> None:
        self._source: HostArray | None = source
        self._copy: HostArray | None = None

    def result(self) -> HostArray:
        if self._source is not None:
            self._copy = np.array(self._source, order="C", copy=True)
            self._source = None
        assert self._copy is not None
        return self._copy
