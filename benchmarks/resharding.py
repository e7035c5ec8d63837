"""Bytes read by loads on another mesh than that of the save. Counted, not timed.

The state has the weights of one layer of Llama-3.1-8B and its embedding, with every axis a quarter as long. They are
sharded over an FSDP axis and a tensor-parallel axis, as is usual. The meshes are those of the paper on Orbax: ``(16,
4)``, loaded as ``(64, 1)``, and as ``(16, 1)`` on 16 devices; ``(4, 8, 4)``, loaded as ``(1, 128, 1)``; and ``(8, 2,
1)``, loaded as ``(1, 16, 1)``. Blocks of checksums are scaled too: they have 512 bytes instead of 1 MiB.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from ckptcore_orbax import OcdbtLayout

from benchmarks.report import Row
from benchmarks.setting import Setting
from ckptcore.builtin.local import LocalStorage
from ckptcore.io.object_writes import ObjectRecorder
from ckptcore.io.reader import ObjectReader
from ckptcore.io.threads import IOThreads, Sizes
from ckptcore.model import (
    BLOCK_BYTES,
    LEAF,
    ArrayRecord,
    ArraySpec,
    Box,
    HostArray,
    Node,
    ReadItem,
    Receipt,
    TreeMetadata,
    WriteItem,
    WritePlan,
)
from ckptcore.planning import cuts_of
from ckptcore.protocols import Layout, StorageCapabilities, StorageOptions

_BLOCK_BYTES = 512
_CHUNK_BYTES = 16 * _BLOCK_BYTES
_LEAST_BLOCKS = 64
"""Smallest size of a counted box, in blocks. A load of a smaller box reads mostly other bytes of its blocks."""

_MOST_READ = 1.1
"""Limit of the bytes read for each byte of a box."""

_SCALE = 4
_DEVICES = 8
"""Approximate number of processes of the new mesh for which bytes are counted, spread over the mesh."""


@dataclass(frozen=True, slots=True)
class ParallelSizes:
    """Number of parts of a weight along the axis of FSDP and along that of tensor parallelism."""

    fsdp: int
    tensor: int


@dataclass(frozen=True, slots=True)
class MeshChange:
    """A mesh that saves and one that loads."""

    name: str
    saved: ParallelSizes
    loaded: ParallelSizes


@dataclass(frozen=True, slots=True)
class Count:
    """Bytes read by a load of boxes.

    Attributes:
        needed: bytes of the boxes.
        read: bytes that were read for them.
        worst: the highest ratio of bytes read to bytes needed of a box.
        boxes: number of boxes.
    """

    needed: int
    read: int
    worst: float
    boxes: int

    @property
    def ratio(self) -> float:
        """Bytes read for each byte needed."""
        return self.read / self.needed


CASES = (
    MeshChange("(16, 4) -> (64, 1)", ParallelSizes(16, 4), ParallelSizes(64, 1)),
    MeshChange("(16, 4) -> (16, 1)", ParallelSizes(16, 4), ParallelSizes(16, 1)),
    MeshChange("4-8-4 -> 1-128-1", ParallelSizes(8, 4), ParallelSizes(128, 1)),
    MeshChange("8-2-1 -> 1-16-1", ParallelSizes(2, 1), ParallelSizes(16, 1)),
)

_FSDP, _TENSOR = "fsdp", "tensor"
_HIDDEN, _WIDE, _KEYS, _WORDS = 4096 // _SCALE, 14336 // _SCALE, 1024 // _SCALE, 128256 // _SCALE
_WEIGHTS: Mapping[str, tuple[tuple[int, int], tuple[str, str]]] = {
    "embed_tokens": ((_WORDS, _HIDDEN), (_TENSOR, _FSDP)),
    "q_proj": ((_HIDDEN, _HIDDEN), (_FSDP, _TENSOR)),
    "k_proj": ((_HIDDEN, _KEYS), (_FSDP, _TENSOR)),
    "o_proj": ((_HIDDEN, _HIDDEN), (_TENSOR, _FSDP)),
    "gate_proj": ((_HIDDEN, _WIDE), (_FSDP, _TENSOR)),
    "down_proj": ((_WIDE, _HIDDEN), (_TENSOR, _FSDP)),
}
_SIZES = Sizes(
    block=_BLOCK_BYTES,
    task=16 * _BLOCK_BYTES,
    write=16 * _BLOCK_BYTES,
    inline=_BLOCK_BYTES,
    direct=_BLOCK_BYTES,
    run=4 * _BLOCK_BYTES,
)


def _boxes(name: str, mesh: ParallelSizes) -> Sequence[Box]:
    shape, axes = _WEIGHTS[name]
    parts = [mesh.fsdp if axis == _FSDP else mesh.tensor for axis in axes]
    steps = [extent // count for extent, count in zip(shape, parts, strict=True)]
    return [
        Box((row * steps[0], column * steps[1]), ((row + 1) * steps[0], (column + 1) * steps[1]))
        for row, column in np.ndindex(parts[0], parts[1])
    ]


class _Arrays:
    """A snapshot of weights with distinct elements."""

    def __init__(self, plan: WritePlan, arrays: Mapping[int, HostArray]) -> None:
        self.plan = plan
        self._arrays = arrays

    def take(self, item: int) -> Sequence[HostArray]:
        """See `ckptcore.protocols.Snapshot`."""
        planned = self.plan.items[item]
        return [self._arrays[planned.leaf][box.slices] for box in planned.boxes]

    def release(self, item: int) -> None:
        """See `ckptcore.protocols.Snapshot`."""


def counts(case: MeshChange, layout: Layout) -> Count:
    """Save with one mesh, load boxes of another, and count bytes. Fails if an element differs."""
    arrays: dict[int, HostArray] = {}
    records, items = [], []
    for leaf, (name, (shape, _)) in enumerate(_WEIGHTS.items()):
        arrays[leaf] = np.arange(shape[0] * shape[1], dtype=np.uint32).astype(np.uint16).reshape(shape)
        boxes = tuple(_boxes(name, case.saved))
        spec = ArraySpec(shape, "uint16")  # as wide as bfloat16
        records.append(ArrayRecord(spec, cuts=cuts_of(shape, boxes)))
        items.append(WriteItem(leaf, spec, boxes))
    tree = TreeMetadata(Node("dict", tuple(_WEIGHTS), (LEAF,) * len(records)), tuple(records))
    plan = WritePlan(tree, tuple(items), 0, 1, "0123456789abcdef")
    threads = IOThreads(2)
    with tempfile.TemporaryDirectory() as directory:
        storage = _ScaledStorage(directory, StorageOptions(durable=False))
        recorder = ObjectRecorder(storage, threads, sizes=_SIZES)
        written = layout.write(_Arrays(plan, arrays), recorder)
        receipt = Receipt(0, plan.items, written, recorder.objects)
        finished = ObjectRecorder(storage, threads, sizes=_SIZES)
        state = layout.finish(tree, [receipt], finished)
        objects = {record.key: record for record in (*recorder.objects, *finished.objects)}
        index = layout.index(tree, state)
        needed = read = counted = 0
        worst = 0.0
        for leaf, name in enumerate(_WEIGHTS):
            wanted = _boxes(name, case.loaded)
            for box in wanted[:: max(1, len(wanted) // _DEVICES)]:
                nbytes = box.size * arrays[leaf].itemsize
                if nbytes < _LEAST_BLOCKS * _BLOCK_BYTES:
                    continue
                buffer = np.empty(box.shape, arrays[leaf].dtype)
                reader = ObjectReader(storage, objects, threads, strict=True, sizes=_SIZES)
                for _ in reader.read_boxes(index, [ReadItem(leaf, box)], [buffer]):
                    pass
                if not np.array_equal(buffer, arrays[leaf][box.slices]):
                    raise AssertionError(f"{case.name}: {name} {box} was not read as it was saved")
                needed += nbytes
                read += reader.bytes_read
                worst = max(worst, reader.bytes_read / nbytes)
                counted += 1
        return Count(needed, read, worst, counted)


class _ScaledStorage(LocalStorage):
    """A local directory whose request size is scaled down like the blocks."""

    capabilities = StorageCapabilities(request_bytes=StorageCapabilities().request_bytes * _BLOCK_BYTES // BLOCK_BYTES)


def subchunked() -> Layout:
    """Return a layout whose shards are divided into read chunks of some blocks."""
    return OcdbtLayout(chunk_bytes=_CHUNK_BYTES)


def whole_shards() -> Layout:
    """Return a layout whose shards are single read chunks."""
    return OcdbtLayout(chunk_bytes=None)


def rows(setting: Setting) -> Iterator[Row]:
    """Count the bytes read by loads, with and without subchunks."""
    blocks = _CHUNK_BYTES // _BLOCK_BYTES
    for case in CASES[: setting.count(len(CASES))]:
        divided = counts(case, subchunked())
        whole = counts(case, whole_shards())
        name = f"bytes read / needed, {case.name}"
        yield Row(
            name,
            f"ckptcore, subchunks of {blocks} blocks",
            divided.ratio,
            "B/B",
            target=f"at most {_MOST_READ}",
            reached=divided.worst <= _MOST_READ,
            note=f"{divided.boxes} boxes, worst {divided.worst:.3f}",
        )
        yield Row(name, "ckptcore, without subchunks", whole.ratio, "B/B", note=f"{whole.boxes} boxes")
