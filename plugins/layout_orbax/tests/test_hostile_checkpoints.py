"""Hostile checkpoints of other software. Loads read no other files, do not hang, and raise only ckptcore errors."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import json
import os
import struct
import threading
import tracemalloc
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import tensorstore
import zstandard
from ckptcore_orbax import OcdbtLayout, Zarr3Layout
from ckptcore_orbax.orbax.trees import tree_of_names
from ckptcore_orbax.zarr.chunk_codec import ChunkCodec, DecodingChunk

import ckptcore
from ckptcore.errors import ChecksumError, CorruptCheckpointError, InsufficientMemoryError, InvalidLocationError
from ckptcore.model import Box, HostArray, Node

LITTLE = [{"name": "bytes", "configuration": {"endian": "little"}}]
BIG = [{"name": "bytes", "configuration": {"endian": "big"}}]
"""tensorstore decodes `BIG`. ckptcore reads `LITTLE` directly."""


CODECS = {"direct": LITTLE, "decoded": BIG}


def zarr_json(shape: Sequence[int], chunk: Sequence[int] | None = None, **members: Any) -> dict[str, Any]:
    """Return the metadata of an array of uint16. `members` replace entries of the document."""
    return {
        "chunk_grid": {"configuration": {"chunk_shape": list(chunk or shape)}, "name": "regular"},
        "chunk_key_encoding": {"name": "default"},
        "codecs": LITTLE,
        "data_type": "uint16",
        "fill_value": 0,
        "node_type": "array",
        "shape": list(shape),
        "zarr_format": 3,
    } | members


def tree_file(names: Sequence[str] = ("a",), *, stores_fill_value: bool = True, **members: Any) -> bytes:
    """Return the file `_METADATA` of a dict of arrays."""
    table = {
        f"('{name}',)": {
            "key_metadata": [{"key": name, "key_type": 2}],
            "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
        }
        for name in names
    }
    document = {
        "tree_metadata": table,
        "use_ocdbt": False,
        "use_zarr3": True,
        "store_array_data_equal_to_fill_value": stores_fill_value,
    }
    return json.dumps(document | members).encode()


def checkpoint(location: Path, files: Mapping[str, bytes | Mapping[str, Any]]) -> Path:
    """Write a directory with these files, which are bytes or JSON. Add a file `_METADATA` if they have none."""
    for name, content in {"_METADATA": tree_file(), **files}.items():
        path = location / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return location


def database(location: Path, values: Mapping[str, bytes | Mapping[str, Any]]) -> Path:
    """Write arrays into a database. Its last value is in the file of the nodes."""
    checkpoint(location, {})
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": f"file://{location}/"}).result()
    for key, value in values.items():
        store.write(key, value if isinstance(value, bytes) else json.dumps(value).encode()).result()
    return location


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file outside of the directory of the checkpoints, which loads must not read."""
    path = tmp_path / "outside" / "0"
    path.parent.mkdir()
    path.write_bytes(b"0123456789abcdef")
    (tmp_path / "inside").mkdir()
    return path


@contextlib.contextmanager
def ended_pipe(path: Path) -> Iterator[None]:
    """Open and close a named pipe after 10 seconds, so that a blocked reader fails instead of hanging the tests."""

    def end() -> None:
        with contextlib.suppress(OSError):  # no reader is blocked
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))

    os.mkfifo(path)
    timer = threading.Timer(10, end)
    timer.start()
    yield
    timer.cancel()


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codecs", CODECS)
@pytest.mark.parametrize("what", ["file", "directory"])
@pytest.mark.parametrize("stores_fill_value", [True, False])
def test_chunk_link_to_outside(what: str, codecs: str, stores_fill_value: bool, secret: Path, tmp_path: Path) -> None:
    location = checkpoint(
        tmp_path / "inside" / "checkpoint",
        {
            "_METADATA": tree_file(stores_fill_value=stores_fill_value),
            "a/zarr.json": zarr_json([8], codecs=CODECS[codecs]),
        },
    )
    link = location / "a" / "c" if what == "directory" else location / "a" / "c" / "0"
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(secret.parent if what == "directory" else secret)
    with pytest.raises(InvalidLocationError, match="leads out"):
        ckptcore.load(location)


@pytest.mark.parametrize("codecs", CODECS)
def test_a_chunk_that_is_a_named_pipe(codecs: str, tmp_path: Path) -> None:
    """No process writes to the pipe, so opening it for reading would block forever."""
    location = checkpoint(tmp_path / "checkpoint", {"a/zarr.json": zarr_json([8], codecs=CODECS[codecs])})
    (location / "a" / "c").mkdir()
    with ended_pipe(location / "a" / "c" / "0"), pytest.raises(CorruptCheckpointError, match="expected a file"):
        ckptcore.load(location)


@pytest.mark.parametrize("codecs", CODECS)
@pytest.mark.parametrize("what", ["link", "pipe"])
def test_a_data_file_of_a_database_that_is_a_link_or_pipe(what: str, codecs: str, secret: Path, tmp_path: Path) -> None:
    elements = np.arange(1 << 12, dtype="<u2").tobytes()  # too many for an inline value
    location = database(
        tmp_path / "inside" / "checkpoint",
        {"a/c/0": elements, "a/zarr.json": zarr_json([1 << 12], codecs=CODECS[codecs])},
    )
    assert ckptcore.load(location)["a"].shape == (1 << 12,)
    (path,) = [path for path in (location / "d").iterdir() if elements in path.read_bytes()]
    secret.write_bytes(path.read_bytes())
    path.unlink()
    if what == "link":
        path.symlink_to(secret)
        with pytest.raises(InvalidLocationError, match="leads out"):
            ckptcore.load(location)
    else:
        with ended_pipe(path), pytest.raises(CorruptCheckpointError, match="expected a file|the object is missing"):
            ckptcore.load(location)


@pytest.mark.parametrize(
    "name", ["%2e%2e", "%2E%2E%2Felsewhere", "elsewhere%2f", "x%00", "a?b", "a#b", "a|ocdbt:", "%zz", "\udcff"]
)
@pytest.mark.parametrize("below", [True, False])
def test_names_of_directories_with_special_characters_of_urls(name: str, below: bool, tmp_path: Path) -> None:
    """ckptcore passes the directory to tensorstore as a URL."""
    array = {"a/zarr.json": zarr_json([8], codecs=BIG)}
    for elsewhere in ("a", "elsewhere/a", "x/elsewhere/a", "a/a"):
        checkpoint(tmp_path / elsewhere, {"zarr.json": zarr_json([8], codecs=BIG), "c/0": b"\1" * 16})
    around = tmp_path / "x" / "checkpoint" if below else tmp_path / "x" / name
    location = checkpoint(around / name if below else around, {**array, "a/c/0": bytes(16)})
    if below:
        for marker in ("orbax.checkpoint", "_CHECKPOINT_METADATA"):
            (around / marker).write_bytes(b"")
        (loaded,) = ckptcore.load_checkpointables(around).values()
    else:
        loaded = ckptcore.load(location)
    np.testing.assert_array_equal(loaded["a"], np.zeros(8, np.uint16))


# --- trees ------------------------------------------------------------------------------------------------------------


def test_names_of_many_dots_take_little_memory() -> None:
    names = [f"{number}{'.' * 20_000}" for number in range(10)]
    tracemalloc.start()
    try:
        tree = tree_of_names(names, "manifest.ocdbt")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [leaf.name for leaf in tree.leaves] == names
    assert peak < 5_000_000


@pytest.mark.parametrize("names", [["a.b", "a.c"], ["a", "a.b"], ["a.b.c", "a.b"], ["a", "b.c"], ["", ".a"]])
def test_names_of_arrays_nest_if_no_name_is_the_start_of_another(names: list[str]) -> None:
    nested = names in (["a.b", "a.c"], ["a", "b.c"])
    tree = tree_of_names(names, "manifest.ocdbt")
    assert isinstance(tree.skeleton, Node)
    assert (tree.skeleton.keys == tuple(sorted(names))) == (not nested)


def test_an_index_of_axlearn_that_repeats_the_step(tmp_path: Path) -> None:
    """An earlier version took quadratic time."""
    (tmp_path / "gda").mkdir()
    (tmp_path / "index").write_text(json.dumps([["step", 1]] * 200_000))
    assert ckptcore.load(tmp_path) == {}


def test_an_array_of_msgpack_with_an_impossible_shape(tmp_path: Path) -> None:
    part = msgpack.ExtType(1, msgpack.packb([[0], "float32", b""]))
    shape = {"0": 0, "1": (1 << 63) - 1, "2": (1 << 63) - 1}
    chunked = {"__msgpack_chunked_array__": True, "shape": shape, "chunks": {"0": part}}
    (tmp_path / "checkpoint").write_bytes(msgpack.packb({"a": chunked}))
    with pytest.raises(CorruptCheckpointError, match="shape"):
        ckptcore.metadata(tmp_path)


# --- sizes ------------------------------------------------------------------------------------------------------------


def test_only_few_chunks_larger_than_their_arrays_are_decoded_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of eight arrays has 8 elements, and one chunk of a few bytes that expands to 128 MiB of zeros."""
    codecs = [*LITTLE, {"name": "zstd", "configuration": {"level": 1, "checksum": False}}]
    zeros = zstandard.compress(bytes(128 << 20))
    names = [f"a{number}" for number in range(8)]
    files = {f"{name}/zarr.json": zarr_json([8], [64 << 20], codecs=codecs) for name in names}
    location = checkpoint(
        tmp_path / "checkpoint",
        {"_METADATA": tree_file(names, stores_fill_value=False)} | files | {f"{name}/c/0": zeros for name in names},
    )
    running: list[int] = [0]
    decode, result = ChunkCodec.decode, DecodingChunk.result

    def counted(codec: ChunkCodec, data: bytes, part: Box, elements: HostArray) -> DecodingChunk:
        running.append(running[-1] + 1)
        return decode(codec, data, part, elements)

    def done(decoding: DecodingChunk) -> None:
        running.append(running[-1] - 1)
        result(decoding)

    monkeypatch.setattr(ChunkCodec, "decode", counted)
    monkeypatch.setattr(DecodingChunk, "result", done)
    assert ckptcore.load(location).keys() == set(names)
    assert running[-1] == 0
    assert max(running) <= 3


_HUGE = 12 << 40

_ENCODED: dict[str, tuple[int, Any, bytes]] = {
    "zlib": (2, {"id": "zlib", "level": 1}, zlib.compress(bytes(100))),
    "bz2": (2, {"id": "bz2", "level": 1}, bz2.compress(bytes(100))),
    "zstd of zarr 2": (2, {"id": "zstd", "level": 1}, zstandard.compress(bytes(100))),
    "blosc": (
        2,
        {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1, "blocksize": 0},
        bytes([2, 1, 2, 1]) + (100).to_bytes(4, "little") * 2 + (116).to_bytes(4, "little") + bytes(100),
    ),
    "raw": (2, None, bytes(100)),
    "gzip": (3, [*LITTLE, {"name": "gzip", "configuration": {"level": 1}}], gzip.compress(bytes(100))),
    "zstd": (
        3,
        [*LITTLE, {"name": "zstd", "configuration": {"level": 1, "checksum": False}}],
        zstandard.compress(bytes(100)),
    ),
    "big endian": (3, BIG, bytes(100)),
    "a shard of huge chunks": (
        3,
        [
            {
                "name": "sharding_indexed",
                "configuration": {"chunk_shape": [_HUGE // 2], "codecs": BIG, "index_codecs": LITTLE},
            }
        ],
        bytes(100) + struct.pack("<QQQQ", 0, 100, 0, 100),
    ),
    "a shard of very many chunks": (
        3,
        [
            {
                "name": "sharding_indexed",
                "configuration": {"chunk_shape": [1], "codecs": BIG, "index_codecs": LITTLE},
            }
        ],
        bytes(100),
    ),
    "a shard in a shard": (
        3,
        [
            {
                "name": "sharding_indexed",
                "configuration": {
                    "chunk_shape": [_HUGE],
                    "codecs": [
                        {
                            "name": "sharding_indexed",
                            "configuration": {"chunk_shape": [_HUGE], "codecs": BIG, "index_codecs": LITTLE},
                        }
                    ],
                    "index_codecs": LITTLE,
                },
            }
        ],
        struct.pack("<QQ", 2**64 - 1, 2**64 - 1) + struct.pack("<QQ", 0, 16),
    ),
}  # fmt: skip


def _huge_chunk(location: Path, name: str, extent: int, *, fills: bool) -> Path:
    """Write an array with one chunk that claims `_HUGE` elements, and has few bytes."""
    version, codecs, data = _ENCODED[name]
    files: dict[str, Any] = {"_METADATA": tree_file(stores_fill_value=not fills, use_zarr3=version == 3)}
    if version == 3:
        return checkpoint(location, files | {"a/zarr.json": zarr_json([extent], [_HUGE], codecs=codecs), "a/c/0": data})
    document = {
        "zarr_format": 2, "shape": [extent], "chunks": [_HUGE], "dtype": "<u2" if codecs else ">u2",
        "compressor": codecs, "filters": None, "fill_value": 0, "order": "C",
    }  # fmt: skip
    return checkpoint(location, files | {"a/.zarray": document, "a/0": data})


@pytest.mark.parametrize("fills", [False, True])
@pytest.mark.parametrize("extent", [8, _HUGE // 4, _HUGE])
@pytest.mark.parametrize("name", _ENCODED)
def test_a_chunk_of_few_bytes_that_claims_a_huge_size(name: str, extent: int, fills: bool, tmp_path: Path) -> None:
    """tensorstore allocates the memory of a chunk before decoding, and aborts the process if that fails."""
    location = _huge_chunk(tmp_path / "checkpoint", name, extent, fills=fills)
    with ckptcore.open(location) as view:
        for read in (
            lambda: view["a"][0],
            lambda: view["a"][:4],
            lambda: next(view.iter_boxes()),
            lambda: ckptcore.load(location),
            lambda: ckptcore.load(location, {"a": ckptcore.AbstractArray((extent,), "uint16")}),
            lambda: ckptcore.diff(location, location),
            lambda: ckptcore.copy(location, tmp_path / "copy", layout="safetensors"),
            lambda: ckptcore.copy(location, tmp_path / "copy", layout="zarr3"),
        ):
            with pytest.raises(
                (CorruptCheckpointError, InsufficientMemoryError), match=r"\ba\b.*(bytes|memory|chunks)"
            ):
                read()
    assert not ckptcore.verify(location).ok


@pytest.mark.parametrize("inline", [0, 1024])
def test_a_small_value_next_to_a_large_one_in_a_data_file(inline: int, tmp_path: Path) -> None:
    """Values of a database share files, so a large file does not prove that a chunk in it is large."""
    codecs = [*LITTLE, {"name": "gzip", "configuration": {"level": 1}}]
    large, count = np.random.default_rng(1).integers(0, 1 << 16, 1 << 18, np.uint16).tobytes(), 32 << 20
    location = checkpoint(tmp_path / "checkpoint", {"_METADATA": tree_file(("a", "b"), use_ocdbt=True)})
    spec = {"driver": "ocdbt", "base": f"file://{location}", "config": {"max_inline_value_bytes": inline}}
    with tensorstore.Transaction() as transaction:
        database = tensorstore.KvStore.open(spec).result().with_transaction(transaction)
        for name, extent, data in (("a", 1 << 18, gzip.compress(large, 0)), ("b", count, gzip.compress(b""))):
            database[f"{name}/zarr.json"] = json.dumps(zarr_json([extent], codecs=codecs)).encode()
            database[f"{name}/c/0"] = data
    small = len(gzip.compress(b""))
    with pytest.raises(CorruptCheckpointError, match=f"'b' cannot be decoded.* and one has {small} encoded bytes"):
        ckptcore.load(location)


@pytest.mark.parametrize("codec", ["gzip", "zstd"])
def test_chunks_with_the_highest_compression_are_read(codec: str, tmp_path: Path) -> None:
    """Zeros have the highest compression, so the check of sizes must accept their chunks."""
    codecs = [*LITTLE, {"name": codec, "configuration": {"level": 9}}]
    zeros = bytes(64 << 20)
    data = gzip.compress(zeros) if codec == "gzip" else zstandard.compress(zeros, 19)
    assert len(zeros) // len(data) > 1000
    location = checkpoint(
        tmp_path / "checkpoint", {"a/zarr.json": zarr_json([8], [len(zeros) // 2], codecs=codecs), "a/c/0": data}
    )
    assert ckptcore.load(location)["a"].tolist() == [0] * 8


# --- mixed saves ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "chunk_bytes"),
    [
        ((64, 1024), 1 << 16),
        ((1 << 21,), 1 << 20),
        ((13, 7), 64),
    ],
)
@pytest.mark.parametrize("layout", [Zarr3Layout, OcdbtLayout])
def test_a_data_file_of_another_save(
    layout: type[Zarr3Layout | OcdbtLayout], shape: tuple[int, ...], chunk_bytes: int, tmp_path: Path
) -> None:
    """The file itself is valid. Only the checksums in the root show that it belongs to another save."""
    random = np.random.default_rng(0)
    for name in ("one", "other"):
        state = {"w": random.integers(0, 255, shape, np.uint8)}
        ckptcore.save(tmp_path / name, state, layout=layout(chunk_bytes=chunk_bytes))
    pattern = "w/c/**/*" if layout is Zarr3Layout else "ocdbt.process_0/d/*"
    (path,), (other,) = (
        [file for file in (tmp_path / name / "state").glob(pattern) if file.is_file()] for name in ("one", "other")
    )
    assert path.stat().st_size == other.stat().st_size
    path.write_bytes(other.read_bytes())
    assert not ckptcore.verify(tmp_path / "one").ok
    with pytest.raises(ChecksumError):
        ckptcore.load(tmp_path / "one")


def test_a_shape_larger_than_memory_raises_an_error_that_names_it(tmp_path: Path) -> None:
    """A few bytes can claim any shape, so the load checks the shape before it allocates memory."""
    array = tmp_path / "w"
    array.mkdir()
    document = {
        "zarr_format": 3, "node_type": "array", "shape": [1 << 50], "data_type": "float32", "fill_value": 0,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1 << 40]}},
        "chunk_key_encoding": {"name": "default"}, "codecs": LITTLE,
    }  # fmt: skip
    (array / "zarr.json").write_text(json.dumps(document))
    with pytest.raises(InsufficientMemoryError, match="w of .*: not enough memory for float32"):
        ckptcore.load(tmp_path)
    with pytest.raises(InsufficientMemoryError, match="w of .*: not enough memory for float32"):
        ckptcore.verify(tmp_path)  # not reported as damaged, because another machine may have enough memory


def test_an_array_of_very_many_chunks(tmp_path: Path) -> None:
    """A table of 1 GB may have a chunk for each row of 512 bytes. The test stores only one of the rows."""
    rows = 2_000_000
    location = checkpoint(
        tmp_path / "checkpoint",
        {
            "_METADATA": tree_file(stores_fill_value=False),
            "a/zarr.json": zarr_json([rows, 256], [1, 256]),
            f"a/c/{rows - 1}/0": np.arange(256, dtype="<u2").tobytes(),
        },
    )
    with ckptcore.open(location) as view:
        assert view["a"][rows - 1, 3:5].tolist() == [3, 4]
        assert not view["a"][rows // 2].any()
    location = checkpoint(
        tmp_path / "more", {"_METADATA": tree_file(), "a/zarr.json": zarr_json([1 << 25], [1]), "a/c/7": b"\7\0"}
    )
    with ckptcore.open(location) as view:
        with pytest.raises(CorruptCheckpointError, match="33554432 chunks, of which at most 16777216 are read at a"):
            view["a"][:]
        assert view["a"][7] == 7  # the error says to read a part


def test_iter_boxes_of_more_chunks_than_the_limit_of_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {f"a/c/{number}": bytes((number, 0)) for number in range(200)}
    location = checkpoint(
        tmp_path / "checkpoint", {"_METADATA": tree_file(), "a/zarr.json": zarr_json([200], [1]), **files}
    )
    planned = []
    for most in (200, 199):
        monkeypatch.setattr("ckptcore.on_demand.boxes.MAX_PLANNED_CHUNKS", most)
        with ckptcore.open(location) as view:
            boxes = list(view.iter_boxes())
        assert np.sort(np.concatenate([part.elements for part in boxes])).tolist() == list(range(200))
        planned.append(len(boxes))
    assert planned == [200, 1]
