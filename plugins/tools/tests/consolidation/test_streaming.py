"""Streaming of arrays: a reader thread reads ahead of the writer."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from ckptcore_orbax import Zarr3Layout
from ckptcore_testing.layout_stores import WatchedIndex
from ckptcore_tools.copies.streaming import StreamedSnapshot, StreamSizes, items_by_object

import ckptcore
from ckptcore.errors import CorruptCheckpointError, PluginError, SaveLostError
from ckptcore.io.chunk_reads import StoredFormat
from ckptcore.model import JSON, ArraySpec, Box, HostArray, ReadItem, TreeMetadata, WriteItem, WritePlan
from ckptcore.opening.checkpoint import Checkpoint
from ckptcore.opening.open_checkpoints import open_checkpoint
from ckptcore.protocols import ChunkIndex, Layout, ReadStore
from plugins.tools.tests.consolidation.test_jobs import CountedFiles
from tests.composites.foreign_format import ShelfLayout

ARRAYS, ARRAY_BYTES = 10, 8000
CONTEXT = ckptcore.Context(durability="none", io=ckptcore.context.IOOptions(threads=2))
SMALL = StreamSizes(slice=16_000, item=16_000, buffered=24_000)


class Watched(ckptcore.SafetensorsLayout):
    """A layout that records its reads. It can wait before a read, fail, or skip arrays."""

    gate: threading.Event
    batches: list[list[int]]
    fault: Exception | None
    silent: bool

    __slots__ = ("batches", "fault", "gate", "silent")

    def index(self, tree: TreeMetadata, state: JSON) -> ChunkIndex:
        return WatchedIndex(super().index(tree, state), self._read)

    def _read(
        self, index: ChunkIndex, items: Sequence[ReadItem], buffers: Sequence[HostArray], store: ReadStore
    ) -> Iterator[int]:
        self.gate.wait(10)
        self.batches.append([item.leaf for item in items])
        if self.fault is not None:
            raise self.fault
        if not self.silent:
            yield from store.read_boxes(index, items, buffers)


def watched() -> Watched:
    """Return a layout that reads without waits and errors."""
    layout = Watched()
    for name, value in (("gate", threading.Event()), ("batches", []), ("fault", None), ("silent", False)):
        object.__setattr__(layout, name, value)
    layout.gate.set()
    return layout


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    state = {f"w{number}": np.full(ARRAY_BYTES // 4, number, np.float32) for number in range(ARRAYS)}
    ckptcore.save(tmp_path / "source", state, context=CONTEXT)
    checkpoint = open_checkpoint(tmp_path / "source", CONTEXT)
    return replace(checkpoint, stored=StoredFormat(watched(), checkpoint.state))


def layout_of(checkpoint: Checkpoint) -> Watched:
    assert isinstance(checkpoint.layout, Watched)
    return checkpoint.layout


def snapshot_of(checkpoint: Checkpoint, sizes: StreamSizes = SMALL) -> StreamedSnapshot:
    (items,) = items_by_object(ckptcore.SafetensorsLayout(), checkpoint.tree, checkpoint, range(ARRAYS), sizes)
    return StreamedSnapshot(WritePlan(checkpoint.tree, tuple(items), 0, 1, "id"), checkpoint, range(ARRAYS), sizes)


def first_element(snapshot: StreamedSnapshot, item: int) -> float:
    (array,) = snapshot.take(item)
    assert (array == array.ravel()[0]).all()
    return float(array.ravel()[0])


class WatchedCondition(threading.Condition):
    """A condition that counts the waits of all threads except the main thread."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = threading.Semaphore(0)

    def wait(self, timeout: float | None = None) -> bool:
        if threading.current_thread() is not threading.main_thread():
            self.waits.release()  # this thread holds the lock, so nothing changes before it waits
        return super().wait(timeout)


def test_read_ahead_stays_within_the_memory_limit(checkpoint: Checkpoint) -> None:
    snapshot = snapshot_of(checkpoint)
    changed = snapshot._changed = WatchedCondition()
    try:
        assert first_element(snapshot, 0) == 0
        assert changed.waits.acquire(timeout=60)  # the reader waits for free memory
        assert sum(map(len, layout_of(checkpoint).batches)) == 3
        snapshot.release(0)
        snapshot.release(0)  # a second release is not an error
        assert changed.waits.acquire(timeout=60)
        assert sum(map(len, layout_of(checkpoint).batches)) == 4
        assert [first_element(snapshot, item) for item in range(1, ARRAYS)] == list(range(1, ARRAYS))
    finally:
        snapshot.close()


def test_small_arrays_are_read_together(checkpoint: Checkpoint) -> None:
    snapshot = snapshot_of(checkpoint)
    try:
        for item in range(ARRAYS):
            first_element(snapshot, item)
            snapshot.release(item)
    finally:
        snapshot.close()
    assert max(map(len, layout_of(checkpoint).batches)) == 2
    assert list(itertools.chain(*layout_of(checkpoint).batches)) == list(range(ARRAYS))


def test_a_writer_can_read_in_any_order(checkpoint: Checkpoint) -> None:
    snapshot = snapshot_of(checkpoint)
    try:
        order = [9, 3, 4, 0, 8, 1, 7, 2, 6, 5]
        assert [first_element(snapshot, item) for item in order] == order  # without any release
    finally:
        snapshot.close()
    assert sorted(itertools.chain(*layout_of(checkpoint).batches)) == list(range(ARRAYS))


def test_an_error_of_the_reader_reaches_the_writer(checkpoint: Checkpoint) -> None:
    object.__setattr__(checkpoint.layout, "fault", CorruptCheckpointError("it is damaged"))
    snapshot = snapshot_of(checkpoint)
    for _ in range(2):
        with pytest.raises(CorruptCheckpointError, match="damaged"):
            snapshot.take(5)
    snapshot.close()


def test_a_layout_that_skips_arrays_is_an_error(checkpoint: Checkpoint) -> None:
    object.__setattr__(checkpoint.layout, "silent", True)
    snapshot = snapshot_of(checkpoint)
    with pytest.raises(PluginError, match="w0: the layout safetensors did not read it. A layout must yield the number"):
        snapshot.take(0)
    snapshot.close()
    object.__setattr__(checkpoint.layout, "silent", False)
    snapshot = snapshot_of(checkpoint)
    assert first_element(snapshot, 0) == 0
    snapshot.close()


def test_waiting_threads_are_woken_at_the_end(checkpoint: Checkpoint) -> None:
    layout_of(checkpoint).gate.clear()
    snapshot = snapshot_of(checkpoint)
    raised: list[type[Exception]] = []

    def take() -> None:
        try:
            snapshot.take(0)
        except SaveLostError as error:
            raised.append(type(error))
        layout_of(checkpoint).gate.set()

    writer = threading.Thread(target=take)
    writer.start()
    snapshot.close()
    snapshot.close()
    writer.join(10)
    assert raised == [SaveLostError]
    with pytest.raises(SaveLostError):
        snapshot.take(1)


def test_released_memory_is_reused(checkpoint: Checkpoint) -> None:
    snapshot = snapshot_of(checkpoint)
    snapshot.take(0)
    snapshot.release(0)
    with pytest.raises(PluginError, match="w0 was taken again"):
        snapshot.take(0)
    assert snapshot.take(1)[0][0] == 1
    snapshot.close()


def test_unrequested_arrays_are_not_read(checkpoint: Checkpoint) -> None:
    snapshot_of(checkpoint).close()
    assert not layout_of(checkpoint).batches


@pytest.mark.parametrize("load_bytes", [None, 1 << 40, 300 << 20, 3 << 20, 1])
def test_sizes_follow_the_options(load_bytes: int | None) -> None:
    sizes = StreamSizes.of(ckptcore.Context(memory=ckptcore.context.MemoryOptions(load_bytes=load_bytes)))
    if load_bytes is None or load_bytes == 1 << 40:
        assert sizes == StreamSizes()
    elif load_bytes == 300 << 20:
        assert sizes == StreamSizes(item=load_bytes)
    else:
        assert sizes.buffered == sizes.item == load_bytes and sizes.slice == max(load_bytes // 3, 4096)


@pytest.mark.parametrize(
    "layout",
    [Zarr3Layout(compression="zstd", chunk_bytes=6000), Zarr3Layout(chunk_bytes=0),
    Zarr3Layout(compression="gzip", chunk_bytes=0)],
    ids=["compressed", "checksummed", "one chunk"],
)  # fmt: skip
def test_chunks_are_read_once(layout: Layout, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    array = rng.standard_normal((300, 100)).astype(np.float32)
    ckptcore.save(tmp_path / "source", {"w": array}, layout=layout, context=CONTEXT)
    storage = CountedFiles()
    memory = ckptcore.context.MemoryOptions(load_bytes=60_000)
    context = ckptcore.Context(
        durability="none",
        memory=memory,
        io=ckptcore.context.IOOptions(verify=False),
        plugins=ckptcore.context.PluginOptions(extra=(storage,)),
    )
    ckptcore.copy(f"counted://{tmp_path}/source", tmp_path / "hf", subtree=(), context=context)
    assert np.array_equal(ckptcore.load(tmp_path / "hf")["w"], array)
    stored = sum(path.stat().st_size for path in (tmp_path / "source").rglob("c/**/*") if path.is_file())
    # The root and the shard indices are read in addition to the chunks.
    assert stored < storage.plan.bytes_read < stored + 30_000


def test_arrays_are_cut_between_chunks_and_shards(tmp_path: Path) -> None:
    array = np.zeros((300, 10), np.float32)
    ckptcore.save(tmp_path / "source", {"w": array}, layout=Zarr3Layout(chunk_bytes=700), context=CONTEXT)
    checkpoint = open_checkpoint(tmp_path / "source", CONTEXT)
    (items,) = items_by_object(
        ckptcore.SafetensorsLayout(), checkpoint.tree, checkpoint, (0,), StreamSizes(2000, 2000, 4000)
    )
    starts = [item.boxes[0].start[0] for item in items]
    rows = checkpoint.index.chunk_rows(0)
    assert rows is not None and rows > 1 and all(start % rows == 0 for start in starts)
    assert 6 <= len(items) <= 12 and max(item.boxes[0].size for item in items) <= 500


def test_a_layout_without_pieces_gets_complete_arrays(checkpoint: Checkpoint) -> None:
    whole = ShelfLayout()  # inherits `Layout.arrays_by_object`
    (items,) = items_by_object(whole, checkpoint.tree, checkpoint, range(ARRAYS), StreamSizes(1, 1, 1))
    spec = ArraySpec((ARRAY_BYTES // 4,), "float32")
    assert items == [WriteItem(leaf, spec, (Box.whole(spec.shape),)) for leaf in range(ARRAYS)]


@pytest.mark.parametrize(("load_bytes", "times"), [(None, 1), (60_000, 3)])
def test_a_tied_array_is_read_once_if_it_can_be_kept(load_bytes: int | None, times: int, tmp_path: Path) -> None:
    """The array is written under each of its names. If the limit of memory is too low to keep it, it is read again."""
    tied = np.arange(50_000, dtype=np.float32)
    ckptcore.save(tmp_path / "source", {"a": tied, "b": tied, "m": tied[:9] + 1, "z": tied}, context=CONTEXT)
    storage = CountedFiles()
    context = ckptcore.Context(
        durability="none",
        memory=ckptcore.context.MemoryOptions(load_bytes=load_bytes),
        io=ckptcore.context.IOOptions(verify=False),
        plugins=ckptcore.context.PluginOptions(extra=(storage,)),
    )
    ckptcore.copy(f"counted://{tmp_path}/source", tmp_path / "hf", subtree=(), context=context)
    loaded = ckptcore.load(tmp_path / "hf")
    assert all(np.array_equal(loaded[name], tied) for name in "abz")
    assert tied.nbytes * times <= storage.plan.bytes_read < tied.nbytes * times + 30_000


def test_tied_items_are_taken_in_any_order_with_any_limit(tmp_path: Path) -> None:
    arrays = [np.full(1000, number, np.int64) for number in range(2)]
    ckptcore.save(tmp_path / "source", {"a": arrays[0], "b": arrays[1]}, context=CONTEXT)
    checkpoint = open_checkpoint(tmp_path / "source", CONTEXT)
    sources = (0, 1, 1, 0)
    spec = ArraySpec((1000,), "int64")
    items = tuple([WriteItem(leaf, spec, (Box.whole((1000,)),)) for leaf in range(4)])
    for tied, order in itertools.product((0, 8000, 16_000), itertools.permutations(range(4))):
        snapshot = StreamedSnapshot(
            WritePlan(checkpoint.tree, items, 0, 1, "0" * 16), checkpoint, sources, replace(SMALL, tied=tied)
        )
        for item in order:
            assert snapshot.take(item)[0][0] == sources[item]
            snapshot.release(item)
        snapshot.close()
