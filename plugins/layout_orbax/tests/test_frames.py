"""Reads of zstd frames: the same results as tensorstore's, each byte read once, and no copy of the elements."""

from __future__ import annotations

import json
import threading
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import zstandard
from ckptcore_orbax import Zarr3Layout
from ckptcore_orbax.zarr import chunk_decoding, chunk_index, frame_reading
from ckptcore_orbax.zarr.array_files import inner_array, parse_zarr2, parse_zarr3
from ckptcore_orbax.zarr.codecs import is_framed
from ckptcore_orbax.zarr.state import ArraysState, ZarrArray
from ckptcore_testing.layout_stores import DirectoryReadStore, local_directory

from ckptcore.errors import CorruptCheckpointError
from ckptcore.io.reader import ObjectReader
from ckptcore.io.threads import IOThreads
from ckptcore.model import LEAF, ArrayRecord, Box, HostArray, Node, ReadItem, TreeMetadata
from ckptcore.protocols import ChunkIndex

_LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
_ZSTD = {"name": "zstd", "configuration": {"level": 1, "checksum": False}}


class _CountingStore(DirectoryReadStore):
    """Reads ranges of files, and records them."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._directory = directory
        self.ranges: list[tuple[str, int, int]] = []

    def size(self, key: str) -> int:
        return (self._directory / key).stat().st_size

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        with (self._directory / key).open("rb") as file:
            file.seek(start)
            data = file.read(-1 if stop is None else stop - start)
        self.ranges.append((key, start, start + len(data)))
        return data


def _array(directory: Path, shape: Sequence[int], chunk: Sequence[int], dtype: str, codecs: Sequence[Any]) -> ZarrArray:
    """Create an array without chunks."""
    document = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk)}},
        "chunk_key_encoding": {"name": "default"},
        "fill_value": False if dtype == "bool" else 0,
        "codecs": list(codecs),
    }
    path = directory / "array" / "zarr.json"
    path.parent.mkdir()
    path.write_text(json.dumps(document))
    return ZarrArray("array", parse_zarr3(path.read_bytes(), "array"))


def _index(stored: ZarrArray) -> ChunkIndex:
    tree = TreeMetadata(Node("dict", ("array",), (LEAF,)), (ArrayRecord(stored.format.spec),))
    state = ArraysState(directory="", storage="objects", missing="error", source="other", arrays={0: stored})
    return Zarr3Layout().index(tree, state.to_json())


def _read(store: DirectoryReadStore, stored: ZarrArray, *boxes: Box) -> Sequence[HostArray]:
    buffers = [np.zeros(box.shape, stored.format.spec.numpy_dtype) for box in boxes]
    items = [ReadItem(0, box) for box in boxes]
    assert sorted(store.read_boxes(_index(stored), items, buffers)) == list(range(len(boxes)))
    return buffers


def _tensorstore(directory: Path) -> Any:
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(directory / "array")}}
    return tensorstore.open(spec, open=True).result()


def _write(directory: Path, elements: HostArray) -> None:
    _tensorstore(directory).write(elements).result()


@pytest.fixture
def _without_tensorstore(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(chunk_decoding, "read_natively")


@pytest.mark.usefixtures("_without_tensorstore")
def test_bytes_are_read_once_and_elements_are_not_copied(tmp_path: Path) -> None:
    elements = np.random.default_rng(0).integers(0, 1 << 14, (6, 1 << 20), np.int16)
    stored = _array(tmp_path, elements.shape, (3, 1 << 20), "int16", [_LITTLE, _ZSTD])
    _write(tmp_path, elements)
    store, buffer = _CountingStore(tmp_path), np.zeros(elements.shape, np.int16)
    index = _index(stored)
    tracemalloc.start()
    try:
        assert list(store.read_boxes(index, [ReadItem(0, Box.whole(elements.shape))], [buffer])) == [0]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert np.array_equal(buffer, elements)
    for key in ("array/c/0/0", "array/c/1/0"):
        ranges = sorted([(start, stop) for name, start, stop in store.ranges if name == key])
        size = (tmp_path / key).stat().st_size
        assert [start for start, _ in ranges] == list(range(0, size, 1 << 20)), "a byte is read twice, or not at all"
        assert ranges[-1][1] == size
    assert peak < 5 << 20, "pieces of two frames are in memory, but no frame and no chunk, which have 5 and 6 MiB"


@pytest.mark.usefixtures("_without_tensorstore")
def test_boxes_of_one_chunk_decode_it_once(tmp_path: Path) -> None:
    elements = np.arange(64, dtype=np.float32).reshape(8, 8)
    stored = _array(tmp_path, (8, 8), (8, 8), "float32", [_LITTLE, _ZSTD])
    _write(tmp_path, elements)
    store = _CountingStore(tmp_path)
    boxes = [Box((0, 0), (8, 4)), Box((0, 4), (8, 8)), Box((2, 2), (3, 7))]
    for box, read in zip(boxes, _read(store, stored, *boxes), strict=True):
        assert np.array_equal(read, elements[box.slices])
    assert len(store.ranges) == 1


class _WaitingStore(_CountingStore):
    """Its threads are busy: they begin work only when the test asks for it."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.waiting: list[Callable[[], None]] = []

    def start(self, work: Callable[[], None]) -> None:
        self.waiting.append(work)


@pytest.mark.usefixtures("_without_tensorstore")
def test_a_frame_is_decoded_once_although_its_thread_is_late(tmp_path: Path) -> None:
    stored = _array(tmp_path, (3, 8), (1, 8), "float32", [_LITTLE, _ZSTD])
    elements = np.arange(24, dtype=np.float32).reshape(3, 8)
    _write(tmp_path, elements)
    store = _WaitingStore(tmp_path)
    (read,) = _read(store, stored, Box.whole((3, 8)))
    assert np.array_equal(read, elements)
    assert len(store.waiting) == len(store.ranges) == 3
    read[:] = 0  # the caller owns it now
    for work in store.waiting:
        work()
    assert len(store.ranges) == 3
    assert not read.any()


@pytest.mark.usefixtures("_without_tensorstore")
def test_no_frame_is_decoded_after_an_error(tmp_path: Path) -> None:
    stored = _array(tmp_path, (3, 8), (1, 8), "float32", [_LITTLE, _ZSTD])
    _write(tmp_path, np.ones((3, 8), np.float32))
    (tmp_path / "array" / "c" / "0" / "0").write_bytes(b"damaged")
    store, buffer = _WaitingStore(tmp_path), np.zeros((3, 8), np.float32)
    with pytest.raises(CorruptCheckpointError, match="array"):
        list(store.read_boxes(_index(stored), [ReadItem(0, Box.whole((3, 8)))], [buffer]))
    for work in store.waiting:
        work()
    assert not buffer.any()


@pytest.mark.usefixtures("_without_tensorstore")
def test_the_threads_of_the_context_decode_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = _array(tmp_path, (64, 8), (1, 8), "float32", [_LITTLE, _ZSTD])
    _write(tmp_path, np.ones((64, 8), np.float32))
    threads: set[threading.Thread] = set()
    decompress = frame_reading._decompress

    def note(*arguments: Any) -> str:
        threads.add(threading.current_thread())
        return decompress(*arguments)

    monkeypatch.setattr(frame_reading, "_decompress", note)
    reader = ObjectReader(local_directory(tmp_path), {}, IOThreads(1))
    buffer = np.zeros((64, 8), np.float32)
    assert list(reader.read_boxes(_index(stored), [ReadItem(0, Box.whole((64, 8)))], [buffer])) == [0]
    assert buffer.all()
    assert len(threads - {threading.current_thread()}) <= 1
    assert {thread.name for thread in threads} <= {threading.current_thread().name, "ckptcore-io"}


@pytest.mark.usefixtures("_without_tensorstore")
@pytest.mark.parametrize(("limit", "most"), [(0, 1), (79, 2), (96, 3)])
def test_frames_that_are_copied_have_a_limit_of_memory(
    limit: int, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = _array(tmp_path, (6, 8), (1, 8), "float32", [_LITTLE, _ZSTD])  # chunks of 32 bytes
    _write(tmp_path, np.ones((6, 8), np.float32))
    monkeypatch.setattr(frame_reading, "_COPIED_BYTES", limit)
    store = _WaitingStore(tmp_path)
    started: list[int] = []
    decompress = frame_reading._decompress

    def note(*arguments: Any) -> str:
        started.append(len(store.waiting) - len(started))
        return decompress(*arguments)

    monkeypatch.setattr(frame_reading, "_decompress", note)
    assert _read(store, stored, Box((0, 0), (6, 4)))[0].all()
    assert max(started) == most
    started.clear()
    store.waiting.clear()
    assert _read(store, stored, Box.whole((6, 8)))[0].all()
    assert max(started) == 6, "frames that are decoded into place need no memory"


@pytest.mark.usefixtures("_without_tensorstore")
def test_codecs_are_examined_once_per_array(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = _array(tmp_path, (8, 8), (8, 8), "float32", [_LITTLE, _ZSTD])
    _write(tmp_path, np.ones((8, 8), np.float32))
    examined: list[Any] = []

    def examine(inner: Any) -> bool:
        examined.append(inner)
        return True

    monkeypatch.setattr(chunk_index, "is_framed", examine)
    _read(_CountingStore(tmp_path), stored, *[Box((row, 0), (row + 1, 8)) for row in range(8)])
    assert len(examined) == 1


@pytest.mark.usefixtures("_without_tensorstore")
@pytest.mark.parametrize(
    ("shape", "chunk", "codecs"),
    [
        ((), (), [_LITTLE, _ZSTD]),
        ((5, 7), (2, 3), [_LITTLE, _ZSTD]),
        ((5, 7), (5, 7), [{"name": "transpose", "configuration": {"order": [0, 1]}}, _LITTLE, _ZSTD]),
        ((8, 6), (4, 6), [{"name": "sharding_indexed", "configuration": {
            "chunk_shape": [2, 3], "codecs": [_LITTLE, _ZSTD],
            "index_codecs": [_LITTLE, {"name": "crc32c"}]}}]),
    ],
)  # fmt: skip
def test_chunks_at_edges_and_in_shards(
    shape: tuple[int, ...], chunk: tuple[int, ...], codecs: Sequence[Any], tmp_path: Path
) -> None:
    elements = np.random.default_rng(0).random(shape, np.float32) + np.float32(1)
    stored = _array(tmp_path, shape, chunk, "float32", codecs)
    _write(tmp_path, np.asarray(elements))
    boxes = [Box.whole(shape)]
    if len(shape) == 2:
        boxes += [Box((1, 2), (4, 5)), Box((0, 0), (1, 1))]
    for box, read in zip(boxes, _read(_CountingStore(tmp_path), stored, *boxes), strict=True):
        assert np.array_equal(read, np.asarray(elements)[(*box.slices, ...)])


_RAW = np.arange(1, 1001, dtype=np.float32).tobytes()
_FRAME = zstandard.ZstdCompressor(level=3).compress(_RAW)
_CHECKED = zstandard.ZstdCompressor(level=3, write_checksum=True).compress(_RAW)
_CASES: Mapping[str, bytes] = {
    "frame": _FRAME,
    "no size": zstandard.ZstdCompressor(write_content_size=False).compress(_RAW),
    "checksum": _CHECKED,
    "wrong checksum": _CHECKED[:-1] + bytes([_CHECKED[-1] ^ 1]),
    "without checksum": _CHECKED[:-4],
    "half a checksum": _CHECKED[:-2],
    "too short": zstandard.compress(_RAW[:-4]),
    "too long": zstandard.compress(_RAW + b"abcd"),
    "far too long": zstandard.compress(_RAW + bytes(1 << 24)),
    "cut off": _FRAME[:-1],
    "cut in half": _FRAME[: len(_FRAME) // 2],
    "header": _FRAME[:3],
    "empty": b"",
    "no frame": b"abcdefgh" * 100,
    "raw": _RAW,
}


@pytest.mark.parametrize("case", _CASES)
def test_damaged_frames_are_refused_as_by_tensorstore(case: str, tmp_path: Path) -> None:
    stored = _array(tmp_path, (1000,), (1000,), "float32", [_LITTLE, _ZSTD])
    chunk = tmp_path / "array" / "c" / "0"
    chunk.parent.mkdir()
    chunk.write_bytes(_CASES[case])
    try:
        expected = _tensorstore(tmp_path).read().result()
    except ValueError:
        with pytest.raises(CorruptCheckpointError, match="array"):
            _read(_CountingStore(tmp_path), stored, Box.whole((1000,)))
    else:
        assert np.array_equal(_read(_CountingStore(tmp_path), stored, Box.whole((1000,)))[0], expected)


def test_a_chunk_may_have_several_frames(tmp_path: Path) -> None:
    """RFC 8878, 3: the decoded contents of frames are joined. tensorstore refuses them."""
    stored = _array(tmp_path, (1000,), (1000,), "float32", [_LITTLE, _ZSTD])
    chunk = tmp_path / "array" / "c" / "0"
    chunk.parent.mkdir()
    chunk.write_bytes(zstandard.compress(_RAW[:2000]) + zstandard.compress(_RAW[2000:]))
    assert _read(_CountingStore(tmp_path), stored, Box.whole((1000,)))[0].tobytes() == _RAW


def test_no_bytes_may_follow_a_frame(tmp_path: Path) -> None:
    """tensorstore ignores them."""
    stored = _array(tmp_path, (1000,), (1000,), "float32", [_LITTLE, _ZSTD])
    chunk = tmp_path / "array" / "c" / "0"
    chunk.parent.mkdir()
    for after in (b"abc", _FRAME, bytes(100), zstandard.compress(b"end of the chunk")):
        chunk.write_bytes(_FRAME + after)
        with pytest.raises(CorruptCheckpointError, match="'array' cannot be decoded: .*in its chunk at"):
            _read(_CountingStore(tmp_path), stored, Box.whole((1000,)))


@pytest.mark.parametrize("window_log", [27, 28, 31])
def test_windows_of_all_sizes_are_read_as_by_tensorstore(window_log: int, tmp_path: Path) -> None:
    stored = _array(tmp_path, (1000,), (1000,), "float32", [_LITTLE, _ZSTD])
    chunk = tmp_path / "array" / "c" / "0"
    chunk.parent.mkdir()
    parameters = zstandard.ZstdCompressionParameters(window_log=window_log, write_content_size=False)
    encoder = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    chunk.write_bytes(encoder.compress(_RAW) + encoder.flush())
    assert zstandard.get_frame_parameters(chunk.read_bytes()).window_size == 1 << window_log
    assert _tensorstore(tmp_path).read().result().tobytes() == _RAW
    assert _read(_CountingStore(tmp_path), stored, Box.whole((1000,)))[0].tobytes() == _RAW


@pytest.mark.parametrize(
    ("dtype", "codecs", "expected"),
    [
        ("float32", [_LITTLE, _ZSTD], True),
        ("bfloat16", [_LITTLE, _ZSTD], True),
        ("int8", [{"name": "bytes"}, _ZSTD], True),
        ("float32", [{"name": "bytes", "configuration": {"endian": "big"}}, _ZSTD], False),
        ("float32", [_LITTLE, _ZSTD, {"name": "crc32c"}], False),
        ("float32", [_LITTLE, {"name": "crc32c"}, _ZSTD], False),
        ("float32", [{"name": "transpose", "configuration": {"order": [1, 0]}}, _LITTLE, _ZSTD], False),
        ("float32", [_LITTLE, {"name": "zstd", "configuration": {"level": 1, "dictionary": 7}}], False),
        ("float32", [_LITTLE, {"name": "gzip", "configuration": {"level": 1}}], False),
        ("float32", [_LITTLE], False),
        ("float32", [{"name": "transpose", "configuration": {"order": [0, 1]}}], False),  # damaged
        ("bool", [{"name": "bytes"}, _ZSTD], False),  # tensorstore refuses bytes other than 0 and 1
        ("int4", [{"name": "bytes"}, _ZSTD], False),  # tensorstore extends the sign
    ],
)
def test_chains_of_zarr_3(dtype: str, codecs: Sequence[Any], expected: bool, tmp_path: Path) -> None:
    assert is_framed(inner_array(_array(tmp_path, (2, 3), (2, 3), dtype, codecs).format)) is expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"order": "F"}, False),
        ({"dtype": ">f4"}, False),
        ({"dtype": "|b1"}, False),
        ({"compressor": None}, False),
        ({"compressor": {"id": "zlib", "level": 1}}, False),
        ({"filters": [{"id": "delta", "dtype": "<f4"}]}, False),
    ],
)
def test_arrays_of_zarr_2(changes: Mapping[str, Any], expected: bool) -> None:
    document = {
        "zarr_format": 2,
        "shape": [2, 3],
        "chunks": [2, 3],
        "dtype": "<f4",
        "order": "C",
        "compressor": {"id": "zstd", "level": 1},
        "filters": None,
        "fill_value": None,
    }
    assert is_framed(inner_array(parse_zarr2(json.dumps({**document, **changes}).encode(), "array"))) is expected
