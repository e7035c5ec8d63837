"""Chunks of an inspected checkpoint: their table and the grid cuts of their arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ckptcore.model import JSON, HostArray
from ckptcore_dcp.metadata import DcpTensor, joined_chunks

__all__ = ["InspectedChunks"]


class InspectedChunks:
    """Chunks of each tensor. Skips empty chunks, which a process may write if it holds no part of a tensor."""

    def __init__(self, leaves: Sequence[int], tensors: Sequence[DcpTensor]) -> None:
        """Collect the chunks of tensors. `leaves` has the leaf number of each tensor, in the order of leaves."""
        counts = np.array([len(tensor.chunks) for tensor in tensors], np.int64)
        found = joined_chunks([tensor.chunks for tensor in tensors if len(tensor.chunks)])
        within = np.arange(found.sizes.shape[1]) < found.axes[:, None]
        (rows,) = np.nonzero(((found.sizes > 0) | ~within).all(axis=1))
        owner: HostArray = np.repeat(np.arange(len(tensors)), counts)
        if len(rows) < len(found.axes):
            found, within, owner = found.take(rows), within[rows], owner[rows]
        self._columns = found
        self._within = within
        self._leaf: HostArray = np.array(leaves, np.int64)[owner]
        self._bounds: Sequence[int] = np.searchsorted(owner, np.arange(len(tensors) + 1)).tolist()
        self._starts: Sequence[Sequence[int]] = found.offsets.T.tolist()
        self._stops: Sequence[Sequence[int]] = (found.offsets + found.sizes).T.tolist()

    def cuts(self, number: int, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...] | None:
        """Return the grid cuts of a tensor with this shape, or None if it is one chunk. See `cuts_of`."""
        first, last = self._bounds[number], self._bounds[number + 1]
        if last - first < 2:
            return None
        cuts: list[tuple[int, ...]] = []
        for axis, extent in enumerate(shape):
            bounds = {*self._starts[axis][first:last], *self._stops[axis][first:last]}
            cuts.append(tuple(sorted(bounds.difference((0, extent)))))
        return tuple(cuts) if any(cuts) else None

    def to_json(self) -> JSON:
        """Return the state that `ckptcore_dcp.chunk_index.index_of` reads."""
        found = self._columns
        used, file = np.unique(found.file, return_inverse=True)
        both = np.concatenate([self._within, self._within], axis=1)
        return {
            "content": "items",
            "files": [found.files[number] for number in used.tolist()],
            "leaf": self._leaf.tolist(),
            "file": file.tolist(),
            "offset": found.offset.tolist(),
            "nbytes": found.length.tolist(),
            "box": np.concatenate([found.offsets, found.offsets + found.sizes], axis=1)[both].tolist(),
            "transforms": {str(row): list(names) for row, names in found.transforms.items()},
        }
