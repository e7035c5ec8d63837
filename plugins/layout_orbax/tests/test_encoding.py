"""Encoders of chunks: how they end, which chunks need tensorstore, and the memory that they use again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ALL_COMPLETED, Future, wait
from pathlib import Path
from typing import Any

import google_crc32c
import ml_dtypes
import numpy as np
import pytest
import tensorstore
import zstandard
from ckptcore_orbax import OcdbtLayout, Zarr3Layout, ZarrLayout
from ckptcore_orbax.zarr import chunk_codec, chunk_encoding, writing
from ckptcore_orbax.zarr.chunk_codec import ChunkCodec, EncodingChunk, ReadErrors
from ckptcore_orbax.zarr.chunk_encoding import ChunkSource
from ckptcore_orbax.zarr.codecs import FrameFormat

import ckptcore
from ckptcore import Context
from ckptcore.errors import StorageError, UnsupportedLeafError
from ckptcore.io.snapshot import ViewedSnapshot
from ckptcore.model import Box, HostArray, Ready, Segment
from ckptcore.protocols import Layout, WriteStore
from ckptcore.runtime import runtime_of
from ckptcore.saving.descriptions import describe_part


class _FullStore:
    """A `ckptcore.protocols.WriteStore` on which every write fails."""

    address = None

    def put(self, key: str, data: bytes) -> None:
        raise OSError("the disk is full")

    def write(self, key: str, segments: Sequence[Segment]) -> None:
        raise OSError("the disk is full")

    def write_many(self, objects: Iterable[tuple[str, Sequence[Segment]]]) -> None:
        for key, segments in objects:
            self.write(key, segments)


class _NullStore(_FullStore):
    """A `ckptcore.protocols.WriteStore` that drops all objects."""

    def write(self, key: str, segments: Sequence[Segment]) -> None:
        pass


class _InterruptingStore(_NullStore):
    """A `ckptcore.protocols.WriteStore` whose writes interrupt the main thread once it waits, and end later."""

    def __init__(self) -> None:
        self.begun = 0
        self.ended = 0
        self.waited_for = threading.Event()

    def write(self, key: str, segments: Sequence[Segment]) -> None:
        self.begun += 1
        self.waited_for.wait(60)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)  # Ctrl-C
        time.sleep(0.2)
        self.ended += 1

    def noted_wait(
        self, futures: Iterable[Future[None]], return_when: str = ALL_COMPLETED
    ) -> tuple[set[Future[None]], set[Future[None]]]:
        self.waited_for.set()
        return wait(futures, return_when=return_when)


def _write(arrays: Sequence[HostArray], layout: Layout, store: WriteStore) -> None:
    description = describe_part("", list(arrays), layout, runtime_of(Context()).registry, rank=0, size=1)
    plan = description.plan(0, 1, "0" * 16)
    layout.write(ViewedSnapshot(plan, lambda number: [Ready(arrays[number])]), store)


@pytest.mark.parametrize("layout", [OcdbtLayout(compression="zstd"), Zarr3Layout(compression="zstd")], ids=str)
def test_an_interrupted_write_leaves_no_writer_behind(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "ENCODED_FILE_BYTES", 1)  # wait after each chunk
    store = _InterruptingStore()
    monkeypatch.setattr(writing, "wait", store.noted_wait)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts jobs with SIGINT ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            _write([np.full(8, number) for number in range(12)], layout, store)
    finally:
        signal.signal(signal.SIGINT, before)
    assert store.begun == store.ended == 1


def test_one_slow_object_does_not_stop_the_others() -> None:
    last = threading.Event()
    waits: list[bool] = []
    with writing._ObjectWriter(8) as writer:
        writer.start(lambda: waits.append(last.wait(60)))
        for _ in range(20):
            writer.start(lambda: None)
        last.set()
    assert waits == [True]


def _fail() -> None:
    raise StorageError("the disk is full")


def _join_writers() -> None:
    for thread in threading.enumerate():
        if thread.name == "ckptcore-objects":
            thread.join()


def test_no_object_is_begun_after_a_failed_write() -> None:
    begun: list[int] = []
    with pytest.raises(StorageError, match="full"), writing._ObjectWriter(8) as writer:
        writer.start(_fail)
        _join_writers()
        for number in range(100):
            writer.start(lambda number=number: begun.append(number))  # type: ignore[misc]
    assert begun == []


def test_a_write_that_fails_while_all_threads_write_is_the_last() -> None:
    begun: list[int] = []
    end = threading.Event()

    def wait_for_end() -> None:
        end.wait(60)

    with pytest.raises(StorageError, match="full"), writing._ObjectWriter(8) as writer:
        for _ in range(7):
            writer.start(wait_for_end)
        writer.start(_fail)
        try:
            writer.start(lambda: begun.append(8))
        finally:
            end.set()
    assert begun == []


def test_at_most_one_chunk_for_each_processor_is_encoded_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each encoder has a context of zstd, which takes many times the memory of a small chunk."""
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    lock = threading.Lock()
    begun: list[int] = []
    ended: list[int] = []
    third, fourth = threading.Event(), threading.Event()
    encode = chunk_codec._encode_frame

    def noted_encode(elements: HostArray, frame: FrameFormat) -> Sequence[bytes]:
        with lock:
            begun.append(len(begun))
            running = len(begun) - len(ended)
        if running == 3:
            third.set()
        if running > 3:
            fourth.set()
        third.wait(60)
        fourth.wait(0.1)  # long enough for the start of one more
        pieces = encode(elements, frame)
        with lock:
            ended.append(len(ended))
        return pieces

    monkeypatch.setattr(chunk_codec, "_encode_frame", noted_encode)
    _write([np.full(8, number) for number in range(12)], OcdbtLayout(compression="zstd"), _NullStore())
    assert len(ended) == 12 and third.is_set() and not fourth.is_set()


def test_an_error_of_zstandard_names_the_array(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing_encode(elements: HostArray, frame: FrameFormat) -> Sequence[bytes]:
        raise zstandard.ZstdError("could not compress: not enough memory")

    monkeypatch.setattr(chunk_codec, "_encode_frame", failing_encode)
    with pytest.raises(UnsupportedLeafError, match="'w' cannot be encoded: could not compress: not enough memory"):
        ckptcore.save("memory://zstd-error/c", {"w": np.ones(9)}, layout=OcdbtLayout(compression="zstd"))


@pytest.mark.parametrize("layout", [OcdbtLayout(compression="zstd"), Zarr3Layout(compression="zstd")], ids=str)
def test_a_failed_write_waits_for_the_end_of_all_encoders(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "ENCODED_FILE_BYTES", 1)  # write the first chunk while others are being encoded
    begun: list[object] = []
    ended: list[object] = []
    begin, settle, result = EncodingChunk.__init__, EncodingChunk.settle, EncodingChunk.result

    def noted_begin(chunk: EncodingChunk, *arguments: Any) -> None:
        begin(chunk, *arguments)
        begun.append(chunk)

    def noted_settle(chunk: EncodingChunk) -> None:
        settle(chunk)
        ended.append(chunk)

    def noted_result(chunk: EncodingChunk) -> Sequence[bytes]:
        data = result(chunk)
        ended.append(chunk)
        return data

    monkeypatch.setattr(EncodingChunk, "__init__", noted_begin)
    monkeypatch.setattr(EncodingChunk, "settle", noted_settle)
    monkeypatch.setattr(EncodingChunk, "result", noted_result)
    arrays = [np.full((1024, 1024), number) for number in range(12)]  # 96 MiB, of which 64 MiB are encoded at a time
    with pytest.raises(OSError, match="full") as raised:
        _write(arrays, layout, _FullStore())
    assert raised.value.__traceback__ is not None  # the traceback keeps the frames of the write alive
    assert len(begun) > 2 and set(begun) == set(ended)


def _no_dtype(name: str) -> None:
    raise ValueError(f'No TensorStore data type with name: "{name}"')


def test_dtypes_that_tensorstore_lacks_are_refused_before_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Older versions of tensorstore lack some dtypes. Uncompressed arrays do not need tensorstore."""
    monkeypatch.setattr(tensorstore, "dtype", _no_dtype)
    state = {"packed": np.arange(3, dtype=np.float32).astype(ml_dtypes.float8_e3m4)}
    with pytest.raises(UnsupportedLeafError, match=r"pip install --upgrade tensorstore, or save with compression=None"):
        ckptcore.save(tmp_path / "c", state, layout=OcdbtLayout(compression="zstd", chunk_bytes=1000))
    assert list(tmp_path.iterdir()) == []
    ckptcore.save(tmp_path / "c", state, layout=OcdbtLayout(compression=None))
    assert ckptcore.load(tmp_path / "c")["packed"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "text", ['FAILED_PRECONDITION: "data_type": Unsupported data type: "int2"', 'Unsupported zarr dtype: "int2"']
)
def test_a_dtype_that_tensorstore_lacks_is_not_reported_as_damage(text: str) -> None:
    error = ReadErrors("packed").error(text)
    assert isinstance(error, UnsupportedLeafError) and "pip install --upgrade tensorstore" in str(error)


@pytest.mark.parametrize("compression", ["zstd", "zstd:-5"])
@pytest.mark.parametrize("chunk_bytes", [0, 1 << 20])
@pytest.mark.parametrize("layout", [OcdbtLayout, Zarr3Layout, ZarrLayout])
def test_whole_chunks_are_encoded_without_tensorstore(
    layout: type[OcdbtLayout | Zarr3Layout | ZarrLayout],
    chunk_bytes: int,
    compression: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """tensorstore reads them, as Orbax does: chunks with a CRC32C, and all chunks in memory."""
    opened: list[ChunkCodec] = []
    begin = ChunkCodec._open

    def noted_begin(codec: ChunkCodec) -> tuple[Any, Any]:
        opened.append(codec)
        return begin(codec)

    random = np.random.default_rng(0)
    state = {
        "large": random.integers(0, 9, (4, 1 << 19), np.int16),
        "noise": random.random((8, 1024)),
        "number": np.array(2.5, np.float32),
    }
    monkeypatch.setattr(ChunkCodec, "_open", noted_begin)
    for location in (f"memory://{tmp_path.name}/c", str(tmp_path / "c")):
        ckptcore.save(location, state, layout=layout(compression=compression, chunk_bytes=chunk_bytes or None))
        assert opened == []
        assert ckptcore.verify(location).ok
        loaded = ckptcore.load(location)
        for name, array in state.items():
            np.testing.assert_array_equal(loaded[name], array)
        opened.clear()


def test_memory_of_elements_is_used_again() -> None:
    """Each array would otherwise fault in pages for a copy of its elements."""
    arrays = [np.full((1 << 20,), number, np.float64) for number in range(12)]  # 96 MiB, 64 MiB at a time
    taken: set[int] = set()
    gather = ChunkSource.gather

    def noted_gather(source: ChunkSource, box: Box, memory: HostArray) -> HostArray:
        elements = gather(source, box, memory)
        taken.add(elements.ctypes.data)
        return elements

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChunkSource, "gather", noted_gather)
        _write(arrays, OcdbtLayout(compression="zstd"), _NullStore())
    assert len(taken) <= 9  # eight of 8 MiB, and one more is encoded when the oldest is waited for


def test_small_elements_do_not_keep_the_memory_of_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only their own bytes count among those that are encoded at a time."""
    monkeypatch.setattr(chunk_encoding, "_STARTED_BYTES", 1 << 20)
    kept: list[int] = []
    gather = ChunkSource.gather

    def noted_gather(source: ChunkSource, box: Box, memory: HostArray) -> HostArray:
        elements = gather(source, box, memory)
        assert elements.base is not None
        kept.append(elements.base.nbytes // elements.nbytes)
        return elements

    monkeypatch.setattr(ChunkSource, "gather", noted_gather)
    arrays = [np.full((1 << 20) >> number % 6, number, np.uint8) for number in range(48)]  # each half of the one before
    _write(arrays, OcdbtLayout(compression="zstd"), _NullStore())
    assert max(kept) == 2


_AFTER_MAIN = """
import sys, threading
import numpy as np
from ckptcore_orbax import OcdbtLayout, Zarr3Layout, ZarrLayout
import ckptcore

def run():
    threading.main_thread().join()
    for layout in (OcdbtLayout, Zarr3Layout):
        name = layout(compression="zstd").name
        ckptcore.save(f"{sys.argv[1]}/{name}", {"w": np.arange(8)}, layout=layout(compression="zstd"))

threading.Thread(target=run).start()
"""


@pytest.mark.system
def test_compressed_arrays_are_saved_after_the_main_thread_has_ended(tmp_path: Path) -> None:
    """The executors of `concurrent.futures` take no more work then."""
    done = subprocess.run(
        [sys.executable, "-c", _AFTER_MAIN, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    for name in ("ocdbt", "zarr3"):
        assert ckptcore.load(tmp_path / name)["w"].tolist() == list(range(8))


@pytest.mark.parametrize(
    ("frame", "trailer"), [(FrameFormat(3, False, False), False), (FrameFormat(3, True, True), True)]
)
def test_only_large_frames_that_fill_their_memory_stay_there(frame: FrameFormat, trailer: bool) -> None:
    random = np.random.default_rng(0).integers(0, 256, chunk_codec._LARGE_BYTES, np.uint8)
    kinds = []
    for elements in (random, random[:-1], np.zeros_like(random)):
        pieces = chunk_codec._encode_frame(elements, frame)
        kinds.append(type(pieces[0]))
        encoded = bytes(pieces[0])
        assert b"".join(pieces[1:]) == (google_crc32c.value(encoded).to_bytes(4, "little") if trailer else b"")
        assert zstandard.get_frame_parameters(encoded).content_size == len(elements)
        assert zstandard.ZstdDecompressor().decompress(encoded, max_output_size=1) == elements.tobytes()
    assert kinds == [memoryview, bytes, bytes]
