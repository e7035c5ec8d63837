"""Items of all processes of a save, merged into columns for ``.metadata`` and for the root."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ckptcore.model import JSON, ArrayRecord, HostArray, TreeMetadata
from ckptcore_dcp.dtypes import physical_spec
from ckptcore_dcp.metadata import ChunkRows, ChunkTableColumns, DcpValue

__all__ = ["WrittenColumns"]


class WrittenColumns:
    """The items of all processes, ordered by process. Runs no Python code per item.

    Attributes:
        values: byte ranges of the items of values, in the order of the values.
    """

    def __init__(self, tree: TreeMetadata, parts: Sequence[tuple[str, JSON]]) -> None:
        """Merge the file name and the JSON of `WrittenItems` of each process."""
        states: list[tuple[str, Any]] = list(parts)
        self._tree = tree
        self._files = [file for file, _ in states]
        self.values: Sequence[DcpValue] = [
            DcpValue(file, offset, nbytes)
            for file, state in states
            for offset, nbytes in zip(state["value_offset"], state["value_nbytes"], strict=True)
        ]
        counts = [len(state["leaf"]) for _, state in states]
        self._leaf = _joined(states, "leaf")
        self._file: HostArray = np.repeat(np.arange(len(states)), counts)
        self._offset = _joined(states, "offset")
        self._nbytes = _joined(states, "nbytes")
        self._elements = _joined(states, "elements")
        self._box = _joined(states, "box")

    def to_json(self) -> JSON:
        """Return the table of elements that `ckptcore_dcp.chunk_index.index_of` reads."""
        used, file = np.unique(self._file, return_inverse=True)
        return {
            "content": "elements",
            "files": [self._files[number] for number in used.tolist()],
            "leaf": self._leaf.tolist(),
            "file": file.tolist(),
            "offset": self._elements.tolist(),
            "box": self._box.tolist(),
        }

    def chunks(self) -> Mapping[int, ChunkRows]:
        """Return the chunks of each leaf as torch sees them: with its physical dtype and axes."""
        leaves = self._tree.leaves
        logical: HostArray = np.zeros(len(leaves) + 1, np.int64)
        extra: HostArray = np.zeros(len(leaves) + 1, np.int64)  # bytes per element if torch lacks the dtype
        for leaf in np.unique(self._leaf).tolist():
            record = leaves[leaf]
            assert isinstance(record, ArrayRecord)  # only arrays have boxes
            logical[leaf] = len(record.spec.shape)
            physical = physical_spec(record.spec)
            if len(physical.shape) > len(record.spec.shape):
                extra[leaf] = physical.shape[-1]
        order: HostArray = np.argsort(self._leaf, kind="stable")
        leaf_of = self._leaf[order]
        widths = 2 * logical[self._leaf]
        begins = (np.cumsum(widths) - widths)[order]
        axes = logical[leaf_of]
        bytes_of = extra[leaf_of]
        most = int((axes + (bytes_of > 0)).max(initial=0))
        offsets: HostArray = np.zeros((len(order), most), np.int64)
        sizes: HostArray = np.zeros((len(order), most), np.int64)
        for axis in range(most):
            (rows,) = np.nonzero(axes > axis)
            start = self._box[begins[rows] + axis]
            offsets[rows, axis] = start
            sizes[rows, axis] = self._box[begins[rows] + axes[rows] + axis] - start
        (rows,) = np.nonzero(bytes_of)
        sizes[rows, axes[rows]] = bytes_of[rows]
        columns = ChunkTableColumns(
            axes + (bytes_of > 0),
            offsets,
            sizes,
            self._file[order],
            self._offset[order],
            self._nbytes[order],
            self._files,
        )
        found, starts = np.unique(leaf_of, return_index=True)
        stops = [*starts.tolist(), len(order)][1:]
        return {
            leaf: ChunkRows(columns, start, stop)
            for leaf, start, stop in zip(found.tolist(), starts.tolist(), stops, strict=True)
        }


def _joined(states: Sequence[tuple[str, Any]], name: str) -> HostArray:
    return np.concatenate([np.zeros(0, np.int64), *[np.array(state[name], np.int64) for _, state in states]])
