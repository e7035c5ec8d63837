"""Foreign and hostile safetensors files. Readers raise only CheckpointError."""

from __future__ import annotations

import contextlib
import json
import random
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from ckptcore_testing.hostile_json import tampered

import ckptcore
from ckptcore.errors import CheckpointError
from tests.corruption.checkpoints import bounded_memory

_MEMORY_BYTES: Final = 32 << 20
"""More than any of the small files below may make a load allocate, in bytes."""

_HEADER: Final[dict[str, Any]] = {
    "__metadata__": {"format": "pt", "note": "text"},
    "weight": {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]},
    "bias": {"dtype": "BF16", "shape": [5], "data_offsets": [48, 58]},
    "empty": {"dtype": "I64", "shape": [0, 7], "data_offsets": [58, 58]},
    "flags": {"dtype": "BOOL", "shape": [6], "data_offsets": [58, 64]},
}
_DATA: Final = bytes(range(64))


def _file(header: Any, data: bytes = _DATA) -> bytes:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + data


def _attempts(location: Path) -> Iterator[Callable[[], object]]:
    abstract = {"weight": ckptcore.AbstractArray((3, 4), "float32"), "bias": ..., "empty": ..., "flags": ...}
    yield lambda: ckptcore.load(location)
    yield lambda: ckptcore.load(location, abstract)
    yield lambda: ckptcore.load_into(location, {"weight": np.zeros((3, 4), np.float32), "bias": ...})
    yield lambda: ckptcore.metadata(location).nbytes
    yield lambda: ckptcore.verify(location).ok


def _assert_harmless(location: Path) -> None:
    for attempt in _attempts(location):
        tracemalloc.start(1)
        try:
            with (
                bounded_memory(location if location.is_dir() else location.parent),
                contextlib.suppress(CheckpointError),
            ):
                attempt()
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < _MEMORY_BYTES, f"{peak} bytes of memory were taken"


def _assert_refused(location: Path) -> None:
    _assert_harmless(location)
    with pytest.raises(CheckpointError):
        ckptcore.load(location)


def test_the_valid_file_loads(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(_file(_HEADER))
    for location in (file, tmp_path):
        loaded = ckptcore.load(location)
        assert loaded["weight"].tobytes() == _DATA[:48]
        assert list(loaded) == ["weight", "bias", "empty", "flags"]


def _tamper(directory: Path, count: int) -> None:
    file = directory / "model.safetensors"
    for number, header in enumerate(tampered(_HEADER, count)):
        file.write_bytes(_file(header))
        try:
            _assert_harmless(file if number % 2 else directory)
        except BaseException as error:
            error.add_note(f"the header was {json.dumps(header)[:3000]}")
            raise


def test_tampered_headers_are_refused_or_load(tmp_path: Path) -> None:
    _tamper(tmp_path, 200)


@pytest.mark.slow
def test_many_tampered_headers_are_refused_or_load(full: bool, tmp_path: Path) -> None:
    _tamper(tmp_path, 10_000 if full else 4_000)


def _damage(directory: Path, count: int) -> None:
    file = directory / "model.safetensors"
    whole = _file(_HEADER)
    choices = random.Random(0)
    for number in range(count):
        changed = bytearray(whole)
        for _ in range(choices.choice((1, 1, 2, 9))):
            changed[choices.randrange(len(changed) - len(_DATA))] = choices.choice(
                (0, 255, 91, 123, choices.randrange(256))
            )
        if number % 3 == 0:
            changed = changed[: choices.randrange(len(changed))]
        file.write_bytes(changed)
        try:
            _assert_harmless(file)
        except BaseException as error:
            error.add_note(f"damage {number}: {bytes(changed)!r}")
            raise


def test_damaged_files_are_refused_or_load(tmp_path: Path) -> None:
    _damage(tmp_path, 200)


@pytest.mark.slow
def test_many_damaged_files_are_refused_or_load(full: bool, tmp_path: Path) -> None:
    _damage(tmp_path, 10_000 if full else 4_000)


def test_files_truncated_anywhere_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    whole = _file(_HEADER)
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            ckptcore.load(file)
        with pytest.raises(CheckpointError):
            ckptcore.load(tmp_path)


def _entry(**changes: Any) -> dict[str, Any]:
    return {**_HEADER, "weight": {**_HEADER["weight"], **changes}}


_IMPOSSIBLE: Final[dict[str, bytes]] = {
    "nothing": b"",
    "a header of no length": bytes(8) + _DATA,
    "a header longer than the file": (1 << 40).to_bytes(8, "little") + b"{}" + _DATA,
    "a header of any length": b"\xff" * 8 + b"{}" + _DATA,
    "a header of a list": _file([]),
    "a header that is no text": _file(b"\xff\xfe{}"),
    "a header with a key twice": _file(b'{"a":{"dtype":"U8","shape":[32],"data_offsets":[0,32]},'
                                       b'"a":{"dtype":"U8","shape":[64],"data_offsets":[0,64]}}'),
    "a header of great depth": _file(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "a very long number": _file(b'{"a":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,64]}}'),
    "bytes that nobody describes": _file({}),
    "elements that overlap": _file(_entry(data_offsets=[16, 64])),
    "elements behind the end": _file(_entry(data_offsets=[1 << 50, (1 << 50) + 48])),
    "negative offsets": _file(_entry(data_offsets=[-48, 0])),
    "offsets in the wrong order": _file(_entry(data_offsets=[48, 0])),
    "a petabyte": _file(_entry(shape=[1 << 48], data_offsets=[0, 1 << 50])),
    "a shape that overflows": _file(_entry(shape=[1 << 32, 1 << 32, 12])),
    "nothing of very much": _file({**_HEADER,
    "empty": {"dtype": "I64", "shape": [0, 1 << 62], "data_offsets": [58, 58]}}),
    "a negative shape": _file(_entry(shape=[-3, -4])),
    "a shape of truths": _file(_entry(shape=[True, 12])),
    "a dtype of nobody": _file(_entry(dtype="F 33")),
    "a dtype that is a list": _file(_entry(dtype=["F32"])),
    "metadata that is no text": _file({**_HEADER, "__metadata__": {"a": 1}}),
    "metadata that is a list": _file({**_HEADER, "__metadata__": []}),
}  # fmt: skip


@pytest.mark.parametrize("name", _IMPOSSIBLE)
def test_impossible_files_are_refused(name: str, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(_IMPOSSIBLE[name])
    _assert_refused(file)
    _assert_refused(tmp_path)


_INDEXES: Final[dict[str, Any]] = {
    "no map": {"metadata": {}},
    "a map that is a list": {"weight_map": []},
    "a file that is a number": {"weight_map": {"weight": 3}},
    "a file that is not there": {"weight_map": {"weight": "other.safetensors"}},
    "a tensor that is not there": {"weight_map": {"other": "model-00001-of-00001.safetensors"}},
    "a file above": {"weight_map": {"weight": "../secret.safetensors"}},
    "a file anywhere": {"weight_map": {"weight": "/secret.safetensors"}},
    "a file of no name": {"weight_map": {"weight": ""}},
    "itself": {"weight_map": {"weight": "model.safetensors.index.json"}},
    "a list": [],
}


@pytest.mark.parametrize("name", _INDEXES)
def test_impossible_indexes_are_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "secret.safetensors").write_bytes(_file(_HEADER))
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "model-00001-of-00001.safetensors").write_bytes(_file(_HEADER))
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps(_INDEXES[name]))
    _assert_refused(index)
    _assert_refused(directory)


@pytest.mark.slow
def test_tampered_indexes_are_refused_or_load(tmp_path: Path) -> None:
    (tmp_path / "one.safetensors").write_bytes(_file(_HEADER))
    weight_map = {name: "one.safetensors" for name in _HEADER if name != "__metadata__"}
    index = tmp_path / "model.safetensors.index.json"
    for document in tampered({"metadata": {"total_size": 64}, "weight_map": weight_map}, 200):
        index.write_text(json.dumps(document))
        _assert_harmless(index)
