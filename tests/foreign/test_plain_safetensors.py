"""Plain safetensors files: headers equal those of the library, and writes replace files atomically."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import assume, given
from hypothesis import strategies as st

import ckptcore
from ckptcore.builtin import safetensors_files
from ckptcore.builtin.safetensors_files import parse_json_object
from ckptcore.errors import CorruptCheckpointError, StorageError, StorageFullError
from ckptcore.plain_safetensors import DTYPE_BITS, DTYPES, FileHeader, encode_header, read_header, replace_file

WITH_BYTES = sorted(DTYPES.values())


def theirs(tensors: dict[str, tuple[str, Sequence[int]]], metadata: dict[str, str] | None) -> bytes:
    """Return the header that the library writes."""
    names = {stored: name for name, stored in DTYPES.items()}
    data = bytearray(1 << 16)
    address = np.frombuffer(data, np.uint8).ctypes.data
    specs = {
        name: safetensors.TensorSpec(
            dtype=names[dtype],
            shape=list(shape),
            data_ptr=address,
            data_len=int(np.prod(shape, dtype=int)) * DTYPE_BITS[dtype] // 8,
        )
        for name, (dtype, shape) in tensors.items()
    }
    whole: bytes = safetensors.serialize(specs, metadata)
    return whole[: 8 + int.from_bytes(whole[:8], "little")]


def parse(data: bytes) -> FileHeader:
    """Read the header of a file in memory."""
    return read_header(lambda start, stop: data[start:stop], len(data), "the file")


def with_header(header: object, nbytes: int) -> bytes:
    """Return a file with this header and a number of bytes of elements."""
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + bytes(nbytes)


@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"])).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(WITH_BYTES), st.lists(st.integers(0, 4), max_size=3)),
        max_size=6,
    ),
    st.none() | st.dictionaries(st.text(), st.text(st.characters(exclude_categories=["Cs"])), max_size=1),
)
def test_headers_equal_those_of_the_library(
    tensors: dict[str, tuple[str, list[int]]], metadata: dict[str, str] | None
) -> None:
    assume(tensors or metadata != {})  # otherwise the library writes a header that is no JSON
    encoded, names = encode_header(tensors, metadata)
    assert encoded == theirs(dict(tensors), metadata)
    header = parse(encoded + bytes(sum(np.prod(s, dtype=int) * DTYPE_BITS[d] // 8 for d, s in tensors.values())))
    assert {name: (entry.dtype, list(entry.shape)) for name, entry in header.tensors.items()} == dict(tensors)
    assert header.metadata == metadata
    assert header.nbytes == len(encoded)
    position = len(encoded)
    for name in names:
        assert header.tensors[name].start == position
        position = header.tensors[name].stop


HEADERS = [
    encode_header({"a": ("F32", (2, 3)), "b": ("F32", ()), "c": ("I8", (3,))})[0][8:],
    encode_header({"a": ("F32", (0, 3)), "b": ("F4", (2,))}, {"a": "b", "c": "}"})[0][8:],
    b'{"__metadata__":{"a":"b"}}',
]


@given(
    st.sampled_from(HEADERS),
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 2), st.sampled_from('0123"{}[],:\\ bc_FA\n')), max_size=3),
)
def test_a_changed_header_is_parsed_like_json(header: bytes, changes: list[tuple[int, int, str]]) -> None:
    text = header.decode()
    for position, dropped, inserted in changes:
        text = text[:position] + inserted + text[position + dropped :]
    nbytes = {0: 31, 1: 1, 2: 0}[HEADERS.index(header)]
    with mock.patch.object(safetensors_files, "parse_json_object", wraps=parse_json_object) as as_json:
        try:
            scanned = parse(with_header(text.encode(), nbytes))
        except CorruptCheckpointError:
            scanned = None
        if scanned is None or as_json.called:
            assert changes, "the header of the library was not scanned"
            return
        # Only the JSON parser accepts a space after the brace, which moves all bytes by one.
        parsed = parse(with_header(f"{text[:1]} {text[1:]}".encode(), nbytes))
        assert as_json.called
    moved = {
        name: entry._replace(start=entry.start + 1, stop=entry.stop + 1) for name, entry in scanned.tensors.items()
    }
    assert parsed == (moved, scanned.metadata, scanned.nbytes + 1)
    assert list(parsed.tensors) == list(scanned.tensors)


def test_the_order_of_dtypes_is_that_of_the_library() -> None:
    tensors: dict[str, tuple[str, Sequence[int]]] = {dtype.lower(): (dtype, (8,)) for dtype in WITH_BYTES}
    shuffled = dict(random.Random(0).sample(sorted(tensors.items()), len(tensors)))
    assert encode_header(shuffled)[0] == theirs(dict(tensors), None)


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
DAMAGED: dict[str, bytes] = {
    "empty": b"",
    "short": b"\2\0\0\0",
    "header_beyond_the_file": (1 << 20).to_bytes(8, "little") + b"{}",
    "header_beyond_the_limit": (1 << 63).to_bytes(8, "little") + b"{}",
    "no_json": with_header(b"{]", 0),
    "no_object": with_header([], 0),
    "no_utf_8": with_header(b'{"\xff":{}}', 0),
    "utf_16": with_header(json.dumps({"x": ENTRY}).encode("utf-16-le"), 8),
    "gap": with_header({"x": ENTRY | {"data_offsets": [4, 12]}}, 12),
    "overlap": with_header({"x": ENTRY, "y": ENTRY | {"data_offsets": [4, 12]}}, 12),
    "rest": with_header({"x": ENTRY}, 9),
    "cut_off": with_header({"x": ENTRY}, 7),
    "backwards": with_header({"x": ENTRY | {"data_offsets": [8, 0]}}, 8),
    "negative": with_header({"x": ENTRY | {"data_offsets": [-8, 0]}}, 0),
    "negative_extents": with_header({"x": ENTRY | {"shape": [-1, -2]}}, 8),
    "another_length": with_header({"x": ENTRY | {"shape": [3]}}, 8),
    "huge": with_header({"x": ENTRY | {"shape": [1 << 62, 1 << 62]}}, 8),
    "fractions": with_header({"x": ENTRY | {"shape": [2.0]}}, 8),
    "truth": with_header({"x": ENTRY | {"data_offsets": [False, 8]}}, 8),
    "no_bytes": with_header({"x": {"dtype": "F6_E2M3", "shape": [1], "data_offsets": [0, 0]}}, 0),
    "axes": with_header({"x": ENTRY | {"shape": [2] + [1] * 64}}, 8),
    "name_twice": with_header(b'{"x":%b,"x":%b}' % (json.dumps(ENTRY).encode(), json.dumps(ENTRY).encode()), 8),
    "lacks_the_shape": with_header({"x": {"dtype": "F32", "data_offsets": [0, 8]}}, 8),
    "no_dict": with_header({"x": 1}, 0),
    "metadata": with_header({"__metadata__": {"a": 1}}, 0),
    "infinite": with_header({"x": ENTRY | {"shape": [float("inf")]}}, 8),
    "deep": with_header(b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", 0),
    "digits": with_header(b'{"x":' + b"9" * 5000 + b"}", 0),
}


@pytest.mark.parametrize("data", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_header_is_an_error(data: bytes) -> None:
    with pytest.raises(CorruptCheckpointError) as caught:
        parse(data)
    assert caught.value.key == "the file"


@pytest.mark.parametrize(
    ("tensors", "metadata", "error"),
    [
        ({"x": ("C128", (1,))}, None, ValueError),
        ({"x": ("F4", (1,))}, None, ValueError),
        ({"__metadata__": ("F32", ())}, None, ValueError),
        ({1: ("F32", ())}, None, TypeError),
        ({}, {"a": 1}, TypeError),
        ({"x" * 100_000_000: ("F32", ())}, None, ValueError),
    ],
    ids=["dtype", "part_of_a_byte", "reserved", "name", "metadata", "size"],
)
def test_a_header_that_readers_refuse_is_not_encoded(tensors: Any, metadata: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        encode_header(tensors, metadata)


@pytest.mark.parametrize("durability", ["full", "none"])
@pytest.mark.parametrize(
    "sizes",
    [[], [0], [5], [3, 0, 4 << 20, 1], [10 << 20, 7], [1] * 3000],
    ids=lambda sizes: f"{len(sizes)}-{sum(sizes)}",
)
def test_a_write_replaces_the_file(tmp_path: Path, durability: Any, sizes: list[int]) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    pieces = [random.Random(size).randbytes(size) for size in sizes]
    replace_file(path, pieces, context=ckptcore.Context(durability=durability))
    assert path.read_bytes() == b"".join(pieces)
    assert os.listdir(tmp_path) == ["file"]


def test_a_relative_path_without_a_directory_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    replace_file("file", [b"new"])
    assert Path("file").read_bytes() == b"new"


def full(*_: object) -> int:
    raise OSError(errno.ENOSPC, "no space")


def denied(*_: object) -> None:
    raise OSError(errno.EACCES, "denied")


@pytest.mark.parametrize(
    ("call", "fail", "error"), [("writev", full, StorageFullError), ("rename", denied, StorageError)]
)
def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, fail: Callable[..., object], error: type[Exception]
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, call, fail)
    with pytest.raises(error):
        replace_file(path, [b"new"])
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_short_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writev = os.writev
    monkeypatch.setattr(os, "writev", lambda descriptor, group: writev(descriptor, [memoryview(group[0])[:1]]))
    replace_file(tmp_path / "file", [b"ab", b"cd"])
    assert (tmp_path / "file").read_bytes() == b"abcd"


def test_a_missing_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError):
        replace_file(tmp_path / "missing" / "file", [b"new"])
    assert not (tmp_path / "missing").exists()


@pytest.mark.system
@pytest.mark.parametrize("call", ["writev", "fdatasync", "rename"])
def test_a_kill_leaves_the_old_file(tmp_path: Path, call: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    program = (
        "import os, signal, sys\n"
        "from ckptcore.plain_safetensors import replace_file\n"
        f"os.{call} = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "replace_file(sys.argv[1], [bytes(2 << 20)])\n"
    )
    killed = subprocess.run([sys.executable, "-c", program, str(path)], check=False)
    assert killed.returncode == -9
    assert path.read_bytes() == b"old"
    assert {name for name in os.listdir(tmp_path) if not name.startswith(".ckptcore-put-")} == {"file"}
