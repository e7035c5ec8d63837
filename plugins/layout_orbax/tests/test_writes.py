"""Writes of the layouts: names, storage errors, options of processes, and refusals before anything is written."""

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


def test_saves_without_arrays_share_no_names(tmp_path: Path) -> None:
    """Without directory renames, files of a failed save must not collide with those of the next one."""
    nodes: set[str] = set()
    for number in range(3):
        place = tmp_path / str(number)
        ckptcore.save(place, {"step": 5}, layout="ocdbt")
        nodes.update([path.name for path in (place / "state" / "d").iterdir()])
    assert len(nodes) == 3


class _FullDisk(DirectoryWriteStore):
    """A storage that becomes full after some objects, and reports it slowly."""

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
def test_an_error_of_the_storage_is_not_met_again_for_every_object(layout: Layout, tmp_path: Path) -> None:
    """A storage may retry for minutes per object, and there may be a hundred thousand objects."""
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
    """Write half of an array by a process with one layout, and half by a process with the other."""
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
    """Each process wrote chunks with its own options, but the leader describes one format: the
    result would be unreadable.
    """
    trial, receipts = _written_by(first, second, tmp_path)
    with pytest.raises(CheckpointError, match="rank 1 wrote arrays with other options"):
        first.finish(trial.tree, receipts, DirectoryWriteStore(tmp_path))


def test_processes_may_differ_in_the_size_of_data_files(tmp_path: Path) -> None:
    trial, receipts = _written_by(OcdbtLayout(), OcdbtLayout(data_file_bytes=100), tmp_path)
    OcdbtLayout().finish(trial.tree, receipts, DirectoryWriteStore(tmp_path))


@pytest.mark.parametrize("layout", [OcdbtLayout(), OcdbtLayout(compression="zstd")], ids=["direct", "encoded"])
def test_chunks_are_not_compared_with_every_box_that_a_process_holds(layout: Layout, tmp_path: Path) -> None:
    """One process with 512 devices has 512 boxes of every array."""
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


def test_a_name_that_no_database_takes_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """Before the write, and not by the leader afterwards."""
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
def test_what_no_load_takes_is_refused_before_it_is_written(layout: Layout, spec: ArraySpec, reason: str) -> None:
    """NumPy supports 64 axes, TensorStore 32: such a checkpoint was committed but could not be loaded."""
    skeleton = Node("dict", ("x",), (LEAF,))
    with pytest.raises(UnsupportedLeafError, match=reason):
        layout.check(TreeMetadata(skeleton, (ArrayRecord(spec),)), 1)


@pytest.mark.parametrize(
    "layout",
    [OcdbtLayout(chunk_bytes=1), OcdbtLayout(zarr_format=2, chunk_bytes=1), ZarrLayout(chunk_bytes=1)],
    ids=["inner chunks", "chunks of a database", "objects"],
)
def test_more_chunks_than_a_load_takes_are_refused_before_they_are_written(layout: Layout) -> None:
    skeleton = Node("dict", ("x",), (LEAF,))
    with pytest.raises(UnsupportedLeafError, match="33554432 chunks"):
        layout.check(TreeMetadata(skeleton, (ArrayRecord(ArraySpec((1 << 25,), "int8")),)), 1)


def test_chunks_that_blosc_does_not_take_are_refused_before_anything_is_written() -> None:
    skeleton = Node("dict", ("x",), (LEAF,))
    tree = TreeMetadata(skeleton, (ArrayRecord(ArraySpec((1 << 31,), "int8")),))
    with pytest.raises(UnsupportedLeafError, match="blosc allows 2147483631"):
        OcdbtLayout(compression="blosc", chunk_bytes=None).check(tree, 1)
    OcdbtLayout(compression="blosc").check(tree, 1)
    OcdbtLayout(compression="zstd", chunk_bytes=None).check(tree, 1)
