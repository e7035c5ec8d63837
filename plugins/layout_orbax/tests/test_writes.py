"""Writes of the layouts: names of files, storage errors, options of processes, and checks before the write."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import pytest
from ckptcore_orbax import ArrayRule, OcdbtLayout, Zarr3Layout, ZarrLayout
from ckptcore_testing.layout_stores import DirectoryWriteStore, MemorySnapshot, local_directory
from ckptcore_testing.layout_trials import Trial, flat_trial, write_trial

import ckptcore
from ckptcore.errors import CheckpointError, StorageError, UnsupportedKeyError, UnsupportedLeafError
from ckptcore.model import LEAF, ArrayRecord, ArraySpec, Box, Node, Receipt, Segment, TreeMetadata
from ckptcore.protocols import Layout


def test_node_files_of_saves_without_arrays_have_different_names(tmp_path: Path) -> None:
    """On storages without renames of directories, files of a failed save must not collide with those of the next."""
    nodes: set[str] = set()
    for number in range(3):
        place = tmp_path / str(number)
        ckptcore.save(place, {"step": 5}, layout="ocdbt")
        nodes.update([path.name for path in (place / "state" / "d").iterdir()])
    assert len(nodes) == 3


class _FullDisk(DirectoryWriteStore):
    """A storage that is full after five objects, and counts the writes that it refuses."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.refused = 0
        self._counting = threading.Lock()

    def put(self, key: str, data: bytes) -> None:
        self._refuse(key)
        super().put(key, data)

    def write(self, key: str, segments: Sequence[Segment]) -> None:
        self._refuse(key)
        super().write(key, segments)

    def _refuse(self, key: str) -> None:
        with self._counting:
            if len(self.objects) >= 5:
                self.refused += 1
                raise StorageError(f"no space left for {key}")


@pytest.mark.parametrize(
    "layout",
    [ZarrLayout(), Zarr3Layout(), ZarrLayout(compression="zstd"), Zarr3Layout(compression="zstd")],
    ids=["zarr", "zarr3", "zarr compressed", "zarr3 compressed"],
)
def test_a_storage_error_ends_the_write_after_few_more_objects(layout: Layout, tmp_path: Path) -> None:
    """A storage may retry each object for minutes, and a save may have a hundred thousand objects."""
    trial = flat_trial({str(number): ArraySpec((4, 4), "float32") for number in range(200)})
    plan = trial.plan(0)
    store = _FullDisk(tmp_path / "chunks")
    with pytest.raises(StorageError, match="no space left"):
        layout.write(MemorySnapshot(plan, trial.arrays), store)
    assert store.refused <= 8

    state = layout.write(MemorySnapshot(plan, trial.arrays), DirectoryWriteStore(tmp_path / "whole"))
    store = _FullDisk(tmp_path / "documents")
    with pytest.raises(StorageError, match="no space left"):
        layout.finish(trial.tree, [Receipt(0, plan.items, state, ())], store)
    assert store.refused <= 8


def _written_by(first: Layout, second: Layout, directory: Path) -> tuple[Trial, list[Receipt]]:
    """Write an array from two processes with different layouts. Return the trial and the receipts."""
    parts = {0: [[Box((0, 0), (16, 8))], [Box((16, 0), (32, 8))]]}
    trial = flat_trial({"x": ArraySpec((32, 8), "float32")}, parts=parts, size=2)
    receipts = []
    for rank, layout in enumerate((first, second)):
        plan = trial.plan(rank)
        state = layout.write(MemorySnapshot(plan, trial.arrays), DirectoryWriteStore(directory))
        receipts.append(Receipt(rank, plan.items, state, ()))
    return trial, receipts


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (OcdbtLayout(), OcdbtLayout(chunk_bytes=64)),
        (OcdbtLayout(), OcdbtLayout(checksum=False)),
        (OcdbtLayout(), OcdbtLayout(compression="zstd")),
        (OcdbtLayout(), OcdbtLayout(zarr_format=2)),
        (OcdbtLayout(), OcdbtLayout(item="default")),
        (OcdbtLayout(), OcdbtLayout(rules=[ArrayRule(pattern="x", checksum=False)])),
        (OcdbtLayout(), Zarr3Layout()),
        (ZarrLayout(), Zarr3Layout()),
    ],
    ids=["chunk_bytes", "checksum", "compression", "zarr_format", "item", "rules", "ocdbt and zarr3", "zarr and zarr3"],
)
def test_processes_with_different_options_do_not_commit(first: Layout, second: Layout, tmp_path: Path) -> None:
    """Each process writes chunks with its own options, but the leader describes a single format, so the
    checkpoint would be unreadable.
    """
    trial, receipts = _written_by(first, second, tmp_path)
    with pytest.raises(CheckpointError, match="rank 1 wrote arrays with other options"):
        first.finish(trial.tree, receipts, DirectoryWriteStore(tmp_path))


def test_processes_may_differ_in_the_size_of_data_files(tmp_path: Path) -> None:
    trial, receipts = _written_by(OcdbtLayout(), OcdbtLayout(data_file_bytes=100), tmp_path)
    OcdbtLayout().finish(trial.tree, receipts, DirectoryWriteStore(tmp_path))


@pytest.mark.parametrize("layout", [OcdbtLayout(), OcdbtLayout(compression="zstd")], ids=["direct", "encoded"])
def test_each_chunk_is_compared_with_few_boxes_of_a_process(layout: Layout, tmp_path: Path) -> None:
    """A process with 512 devices holds 512 boxes of every array."""
    boxes = [Box((row,), (row + 1,)) for row in range(200)]
    trial = flat_trial({"x": ArraySpec((200,), "int32")}, parts={0: [boxes, []]}, size=2)
    intersect = Box.intersect.__code__
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code is intersect

    store = DirectoryWriteStore(tmp_path)
    sys.setprofile(count)
    try:
        layout.write(MemorySnapshot(trial.plan(0), trial.arrays), store)
    finally:
        sys.setprofile(None)
    assert calls < 20 * len(boxes)


def test_names_that_are_too_long_for_a_database_are_refused(tmp_path: Path) -> None:
    """The layout refuses such a name before the write. Otherwise the leader would fail after the write."""
    trial = flat_trial({"k" * 64_001: ArraySpec((3,), "int32")})
    with pytest.raises(UnsupportedKeyError, match="64001 bytes"):
        OcdbtLayout().check(trial.tree, 1)
    longest = flat_trial({"k" * 64_000: ArraySpec((1,) * 32, "int32")})
    layout = OcdbtLayout()
    layout.check(longest.tree, 1)
    write_trial(layout, longest, local_directory(tmp_path)).assert_reads_back()


@pytest.mark.parametrize("layout", [OcdbtLayout(), Zarr3Layout(), ZarrLayout()], ids=["ocdbt", "zarr3", "zarr"])
@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (ArraySpec((1,) * 33, "int8"), "33 axes"),
        (ArraySpec((1,) * 32, "U3"), "33 axes"),
        (ArraySpec((0, 1 << 60, 16), "int8"), "exceed the address space"),
    ],
    ids=["axes", "axes of bytes", "extents"],
)
def test_arrays_that_no_load_supports_are_refused_before_write(layout: Layout, spec: ArraySpec, reason: str) -> None:
    """NumPy supports 64 axes, and tensorstore 32. An earlier version committed checkpoints that could not be loaded."""
    skeleton = Node("dict", ("x",), (LEAF,))
    with pytest.raises(UnsupportedLeafError, match=reason):
        layout.check(TreeMetadata(skeleton, (ArrayRecord(spec),)), 1)


@pytest.mark.parametrize(
    "layout",
    [OcdbtLayout(chunk_bytes=1), OcdbtLayout(zarr_format=2, chunk_bytes=1), ZarrLayout(chunk_bytes=1)],
    ids=["inner chunks", "chunks of a database", "objects"],
)
def test_arrays_of_too_many_chunks_are_refused_before_the_write(layout: Layout) -> None:
    skeleton = Node("dict", ("x",), (LEAF,))
    with pytest.raises(UnsupportedLeafError, match="33554432 chunks"):
        layout.check(TreeMetadata(skeleton, (ArrayRecord(ArraySpec((1 << 25,), "int8")),)), 1)


def test_chunks_that_are_too_large_for_blosc_are_refused_before_the_write() -> None:
    skeleton = Node("dict", ("x",), (LEAF,))
    tree = TreeMetadata(skeleton, (ArrayRecord(ArraySpec((1 << 31,), "int8")),))
    with pytest.raises(UnsupportedLeafError, match="blosc allows 2147483631"):
        OcdbtLayout(compression="blosc", chunk_bytes=None).check(tree, 1)
    OcdbtLayout(compression="blosc").check(tree, 1)
    OcdbtLayout(compression="zstd", chunk_bytes=None).check(tree, 1)
