"""Receipts of the processes of the simulated job.

The real planning and the real layouts run for sample processes. For all other processes, receipts are assembled here,
array by array, because the real code would take hours on one machine. Arrays, boxes, chunks and file names equal those
of the real code, which `expect_alike` checks. Sizes of files and offsets in them are approximate, and checksums are
random.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from typing import Any, Final

import numpy as np
from ckptcore_dcp.layouts import DcpLayout
from ckptcore_dcp.writing import data_file_name

from benchmarks.scale_job import TrainingJob
from ckptcore.model import (
    BLOCK_BYTES,
    JSON,
    ArrayRecord,
    Box,
    HostArray,
    ItemColumns,
    ObjectRecord,
    Receipt,
    TreeMetadata,
)
from ckptcore.planning.partition import Owners

_CHECKSUM_BYTES: Final = 8
_APPROXIMATE: Final = ("offset", "nbytes", "elements", "length")
"""Columns of offsets and lengths in files. `expect_alike` compares only their number of entries."""

_DATA_FILE_BYTES: Final = 2 << 30
"""Default target size of a data file of the layout ocdbt, in bytes."""

_SAVE_ID: Final = "0" * 16


@dataclass(frozen=True)
class JobReceipts:
    """The receipts of a job in one layout.

    Attributes:
        job: the job.
        layout: the name of the layout.
        tree: the tree of the job, with the boundaries for replicas.
        owners: for each leaf, the replica that writes each box. None if replica 0 writes all boxes.
        options: the options of the layout in receipts; None if they have none.
        names: for each leaf, the name of the array in the layout.
        chunks: for each leaf, the shape of a chunk; only for layouts with chunks.
    """

    job: TrainingJob
    layout: str
    tree: TreeMetadata
    owners: Mapping[int, Owners] | None
    options: str | None
    names: Mapping[int, str]
    chunks: Mapping[int, tuple[int, ...]]

    @cached_property
    def _kinds(self) -> Sequence[HostArray]:
        """The leaves of each kind of array. A process holds the same box of all of them."""
        count = len(self.job.arrays)
        by_kind: dict[Any, list[int]] = {}
        for leaf in range(len(self.tree.leaves)):
            by_kind.setdefault(self.job.arrays[leaf % count], []).append(leaf)
        return [np.array(leaves) for leaves in by_kind.values()]

    @cached_property
    def _numbers(self) -> HostArray:
        """For each leaf, the number of the replica that writes its first box; -1 if replica 0 writes all boxes."""
        owners = self.owners or {}
        if any(len(rule.numbers) > 1 for rule in owners.values()):
            raise ValueError("boxes of this job are not large enough to be cut for their replicas")
        return np.array([owners[leaf].numbers[0] if leaf in owners else -1 for leaf in range(len(self.tree.leaves))])

    def columns(self, rank: int) -> tuple[HostArray, Mapping[int, Box]]:
        """Return the leaves whose box a process writes, ascending, and the box of each."""
        columns: list[HostArray] = []
        boxes: dict[int, Box] = {}
        for leaves in self._kinds:
            first = int(leaves[0])
            record = self.tree.leaves[first]
            assert isinstance(record, ArrayRecord)
            shard = self.job.shard(self.job.arrays[first % len(self.job.arrays)], rank)
            numbers = self._numbers[leaves]
            cuts = record.cuts or ()
            place = sum(int(np.searchsorted(cut, low, "right")) for cut, low in zip(cuts, shard.box.start, strict=True))
            mine = np.where(numbers < 0, 0, (numbers + place) % shard.replicas) == shard.replica
            columns.append(leaves[mine])
            boxes.update(dict.fromkeys(leaves[mine].tolist(), shard.box))
        return np.sort(np.concatenate(columns)), boxes

    def receipt(self, rank: int) -> Receipt:
        """Return the receipt of a process."""
        leaves, boxes = self.columns(rank)
        held = [boxes[leaf] for leaf in leaves.tolist()]
        bounds = np.array([bound for box in held for bound in (*box.start, *box.stop)], np.int64)
        items = ItemColumns(self.tree.leaves, leaves, np.ones(len(leaves), np.int64), bounds)
        sizes = np.array([box.size for box in held], np.int64) * self._itemsizes[leaves]
        build = {"dcp": self._dcp, "ocdbt": self._ocdbt, "zarr3": self._zarr3, "safetensors": self._safetensors}
        state, objects = build[self.layout](rank, leaves, held, sizes, bounds)
        records = [ObjectRecord(key, size, _checksums(size, rank)) for key, size in objects]
        return Receipt(rank, items, state, tuple(records))

    @cached_property
    def _itemsizes(self) -> HostArray:
        return np.array(
            [record.spec.numpy_dtype.itemsize for record in self.tree.leaves if isinstance(record, ArrayRecord)],
            np.int64,
        )

    def _dcp(
        self, rank: int, leaves: HostArray, held: Sequence[Box], sizes: HostArray, bounds: HostArray
    ) -> tuple[JSON, list[tuple[str, int]]]:
        most = DcpLayout().spread_from
        spread = most is not None and self.job.size >= most
        whole = -(-(sizes + 668) // 64) * 64
        offset = np.cumsum(whole) - whole
        state: JSON = {
            "spread": spread,
            "value_offset": [],
            "value_nbytes": [],
            "leaf": leaves.tolist(),
            "offset": offset.tolist(),
            "nbytes": (sizes + 668).tolist(),
            "elements": (offset + 384).tolist(),
            "box": bounds.tolist(),
        }
        return state, [(data_file_name(rank, spread=spread), int(whole.sum()))] if len(leaves) else []

    def _chunk_columns(self, leaves: HostArray, held: Sequence[Box]) -> tuple[list[int], list[int], list[int]]:
        """Return the leaf, number and bytes of each chunk."""
        leaf_column: list[int] = []
        chunk_column: list[int] = []
        nbytes: list[int] = []
        for leaf, box in zip(leaves.tolist(), held, strict=True):
            numbers, size = self._chunks_of(leaf, box)
            leaf_column += [leaf] * len(numbers)
            chunk_column += numbers
            nbytes += [size] * len(numbers)
        return leaf_column, chunk_column, nbytes

    def _chunks_of(self, leaf: int, box: Box) -> tuple[list[int], int]:
        record = self.tree.leaves[leaf]
        assert isinstance(record, ArrayRecord)
        return _chunk_numbers(record.spec.shape, self.chunks[leaf], box, record.spec.numpy_dtype.itemsize)

    def _ocdbt(
        self, rank: int, leaves: HostArray, held: Sequence[Box], sizes: HostArray, bounds: HostArray
    ) -> tuple[JSON, list[tuple[str, int]]]:
        leaf_column, chunk_column, nbytes = self._chunk_columns(leaves, held)
        file_column: list[int] = []
        offset: list[int] = []
        ends: list[int] = []
        position = 0
        for size in nbytes:
            if not ends or (position and position + size > _DATA_FILE_BYTES):
                ends.append(0)
                position = 0
            position += -position % (8 if size < 1 << 16 else 4096)
            file_column.append(len(ends) - 1)
            offset.append(position)
            ends[-1] = position = position + size
        names = [
            f"ocdbt.process_{rank}/d/"
            + hashlib.blake2b(f"{_SAVE_ID}/{rank}/{number}".encode(), digest_size=16).hexdigest()
            for number in range(len(ends))
        ]
        state = self._chunk_state(leaf_column, chunk_column)
        state.update(files=names, file=file_column, offset=offset, length=nbytes)
        return state, [(f"state/{name}", end) for name, end in zip(names, ends, strict=True)]

    def _zarr3(
        self, rank: int, leaves: HostArray, held: Sequence[Box], sizes: HostArray, bounds: HostArray
    ) -> tuple[JSON, list[tuple[str, int]]]:
        leaf_column, chunk_column, nbytes = self._chunk_columns(leaves, held)
        objects = [
            (f"state/{self.names[leaf]}/c/{self._index(leaf, chunk)}", size)
            for leaf, chunk, size in zip(leaf_column, chunk_column, nbytes, strict=True)
        ]
        return self._chunk_state(leaf_column, chunk_column), objects

    def _index(self, leaf: int, chunk: int) -> str:
        record = self.tree.leaves[leaf]
        assert isinstance(record, ArrayRecord)
        index: list[str] = []
        for extent, step in zip(reversed(record.spec.shape), reversed(self.chunks[leaf]), strict=True):
            chunk, place = divmod(chunk, -(-extent // step))
            index.append(str(place))
        return "/".join(reversed(index))

    def _chunk_state(self, leaf: list[int], chunk: list[int]) -> dict[str, JSON]:
        return {
            "directory": "state", "save_id": _SAVE_ID, "name": "", "options": self.options,
            "session": None, "files": [],
            "leaf": leaf, "chunk": chunk, "file": [], "offset": [], "length": [],
            "digested_leaf": [], "digested_chunk": [], "digest": "",
        }  # fmt: skip

    def _safetensors(
        self, rank: int, leaves: HostArray, held: Sequence[Box], sizes: HostArray, bounds: HostArray
    ) -> tuple[JSON, list[tuple[str, int]]]:
        if not len(leaves):
            return None, []
        order = np.argsort(-self._itemsizes[leaves], kind="stable")
        moved = sizes[order]
        files: list[int] = []
        number, room = 0, 5_000_000_000
        for nbytes in moved.tolist():
            if nbytes > room:
                number, room = number + 1, 5_000_000_000
            files.append(number)
            room -= nbytes
        names = [
            f"shard-{rank + 1:05d}-model-{part:05d}-of-{number + 1:05d}.safetensors" for part in range(1, number + 2)
        ]
        column = np.array(files)
        offset = 552_960 + np.cumsum(moved) - moved
        for part in range(1, number + 1):
            offset[column == part] -= offset[column == part][0] - 552_960
        boxes = [bound for place in order.tolist() for bound in (*held[place].start, *held[place].stop)]
        slices: JSON = {
            "files": names, "leaf": leaves[order].tolist(), "file": files, "offset": offset.tolist(), "box": boxes,
        }  # fmt: skip
        state: JSON = {"leaf": [], "file": [], "offset": [], "slices": slices}
        return state, [(name, int(moved[column == part].sum()) + 552_960) for part, name in enumerate(names)]


@cache
def _chunk_numbers(shape: tuple[int, ...], chunk: tuple[int, ...], box: Box, itemsize: int) -> tuple[list[int], int]:
    """Return the numbers of the chunks of a box, and the bytes of one with its checksum."""
    grid = [-(-extent // step) for extent, step in zip(shape, chunk, strict=True)]
    ranges = [range(low // step, -(-high // step)) for low, high, step in zip(box.start, box.stop, chunk, strict=True)]
    numbers = [int(np.ravel_multi_index(index, grid)) for index in product(*ranges)]
    return numbers, int(np.prod(chunk)) * itemsize + 4


def _checksums(nbytes: int, rank: int) -> bytes:
    """Return random checksums for an object of `nbytes`, one for each block. Like real ones, they do not compress."""
    return random.Random(nbytes * 65_537 + rank).randbytes(-(-nbytes // BLOCK_BYTES) * _CHECKSUM_BYTES)


def expect_alike(built: Receipt, real: Receipt) -> None:
    """Check that the assembled receipt of a process equals that of the real layout, except for checksums and offsets.

    Raises:
        AssertionError: if they differ, or if the size of a file differs by more than 4 MB plus 0.1 %.
    """
    assert tuple(built.items) == tuple(real.items), f"other items of rank {real.rank}"
    _expect_alike(built.state, real.state, f"rank {real.rank}")
    sizes = [sorted((record.key, record.size) for record in receipt.objects) for receipt in (built, real)]
    assert [key for key, _ in sizes[0]] == [key for key, _ in sizes[1]], f"other objects of rank {real.rank}"
    for (_, size), (_, other) in zip(*sizes, strict=True):
        assert abs(size - other) < 4_000_000 + other // 1000, f"rank {real.rank}: {size} and {other} bytes"


def _expect_alike(built: Any, real: Any, where: str) -> None:
    if isinstance(real, dict):
        assert built.keys() == real.keys(), where
        for name, inner in real.items():
            if name in _APPROXIMATE:
                assert len(built[name]) == len(inner), f"{where} {name}"
            else:
                _expect_alike(built[name], inner, f"{where} {name}")
        return
    assert built == real, f"{where}: {str(built)[:200]} is not {str(real)[:200]}"
