"""Damaged checkpoints of other software. Operations on them raise only CheckpointErrors, and loads of
files with checksums never return wrong elements.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from ckptcore_orbax import OcdbtLayout, Zarr3Layout
from ckptcore_orbax.crc32c import CRC32C
from ckptcore_orbax.ocdbt.database import Database
from ckptcore_orbax.ocdbt.encoding import encode_database
from ckptcore_orbax.ocdbt.frame import MANIFEST_MAGIC, NODE_MAGIC
from ckptcore_orbax.ocdbt.node import ValueLocation
from ckptcore_testing.hostile_json import tampered
from ckptcore_testing.layout_stores import DirectoryReadStore

import ckptcore
from ckptcore.errors import CheckpointError
from ckptcore.io.memory import allocate
from ckptcore.model import ArraySpec, HostArray
from ckptcore.protocols import Layout

pytestmark = pytest.mark.system

_GOLDEN: Final = Path(__file__).parent / "golden"
_NAMES: Final = sorted(path.stem for path in _GOLDEN.glob("*.json"))
_MEMORY_BYTES: Final = 64 << 20
"""Limit of one allocation, which is more than any golden checkpoint needs."""

_CONTEXT: Final = ckptcore.Context(io=ckptcore.context.IOOptions(threads=1))


def _location(name: str, directory: Path) -> Path:
    """Copy a golden checkpoint, so that the test can damage the copy. Return its location."""
    expected = json.loads((_GOLDEN / f"{name}.json").read_text())
    shutil.copytree(_GOLDEN / name, directory / name)
    location: Path = directory / name / expected.get("directory", expected.get("file", ""))
    return location


def _files(location: Path) -> list[Path]:
    return [path for path in sorted(location.rglob("*")) if path.is_file()] or [location]


@pytest.fixture(autouse=True)
def _little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail allocations that are larger than the golden checkpoints need."""

    def limited(spec: ArraySpec) -> HostArray:
        if spec.nbytes > _MEMORY_BYTES:
            raise MemoryError(f"no memory for {spec}")
        return allocate(spec)

    monkeypatch.setattr("ckptcore.loading.reading.allocate", limited)


def _attempts(location: Path) -> Iterator[Callable[[], object]]:
    yield lambda: ckptcore.load(location, context=_CONTEXT)
    yield lambda: ckptcore.load_checkpointables(location, context=_CONTEXT)
    yield lambda: ckptcore.metadata(location, context=_CONTEXT)
    yield lambda: ckptcore.verify(location, context=_CONTEXT)


def _assert_harmless(location: Path, done: str) -> int:
    """Assert that all operations succeed or raise CheckpointErrors. Return the number of errors."""
    count = 0
    for attempt in _attempts(location):
        try:
            attempt()
        except CheckpointError:
            count += 1
        except BaseException as error:
            error.add_note(done)
            raise
    return count


# --- any bytes --------------------------------------------------------------------------------------------------------


def _changed(content: bytes, choices: random.Random) -> bytes:
    start = choices.randrange(len(content) + 1)
    stop = min(len(content), start + choices.choice((1, 1, 4, 64)))
    match choices.randrange(5):
        case 0:
            return content[:start]
        case 1:
            return content[:start] + content[stop:]
        case 2:
            return content[:start] + choices.randbytes(choices.choice((1, 8))) + content[start:]
        case _:
            filler = choices.choice((choices.randbytes(stop - start), bytes(stop - start), b"9" * (stop - start)))
            return _with_checksums(content[:start] + filler + content[stop:])


def _with_checksums(content: bytes) -> bytes:
    """Correct the checksums of manifests and nodes, so that damage reaches the code that decodes them."""
    for magic in (MANIFEST_MAGIC, NODE_MAGIC):
        start = content.find(magic)
        while start >= 0:
            length = int.from_bytes(content[start + 4 : start + 12], "little")
            if 16 <= length <= len(content) - start:
                covered = content[start : start + length - 4]
                crc = CRC32C.encode(CRC32C.of(memoryview(covered)))
                content = content[:start] + covered + crc + content[start + length :]
            start = content.find(magic, start + 1)
    return content


def _damage(name: str, directory: Path, count: int) -> None:
    location = _location(name, directory)
    files = _files(location)
    assert _assert_harmless(location, "nothing was done") < 4, "the undamaged checkpoint does not load"
    choices = random.Random(name)
    for number in range(count):
        path = choices.choice(files)
        content = path.read_bytes()
        path.write_bytes(_changed(content, choices))
        _assert_harmless(location, f"damage {number} of {path.relative_to(location)}")
        path.write_bytes(content)


@pytest.mark.parametrize("name", _NAMES)
def test_damage(name: str, tmp_path: Path) -> None:
    _damage(name, tmp_path, 8)


@pytest.mark.slow
@pytest.mark.parametrize("name", _NAMES)
def test_many_changed_bytes_raise_only_checkpoint_errors(name: str, full: bool, tmp_path: Path) -> None:
    _damage(name, tmp_path, 400 if full else 100)


@pytest.mark.parametrize("name", _NAMES)
def test_missing_files_raise_only_checkpoint_errors(name: str, tmp_path: Path) -> None:
    location = _location(name, tmp_path)
    for path in _files(location):
        content = path.read_bytes()
        path.unlink()
        _assert_harmless(location, f"{path.relative_to(location)} is gone")
        path.write_bytes(content)


# --- documents with invalid contents ----------------------------------------------------------------------------------


def _documents(location: Path) -> Iterator[tuple[Path, Any]]:
    for path in _files(location):
        with contextlib.suppress(ValueError, UnicodeDecodeError):
            yield path, json.loads(path.read_bytes())


def _tamper(name: str, directory: Path, count: int) -> None:
    location = _location(name, directory)
    for path, document in list(_documents(location)):
        content = path.read_bytes()
        for changed in tampered(document, count, seed=len(content)):
            path.write_bytes(json.dumps(changed).encode("utf-8", "surrogatepass"))
            _assert_harmless(location, f"{path.relative_to(location)} is {json.dumps(changed)[:2000]}")
        path.write_bytes(content)


@pytest.mark.parametrize("name", _NAMES)
def test_tampered_documents_raise_only_checkpoint_errors(name: str, tmp_path: Path) -> None:
    _tamper(name, tmp_path, 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", _NAMES)
def test_many_tampered_documents_raise_only_checkpoint_errors(name: str, full: bool, tmp_path: Path) -> None:
    _tamper(name, tmp_path, 100 if full else 40)


# --- intact databases with wrong contents -----------------------------------------------------------------------------

_DATABASES: Final = [name for name in _NAMES if list((_GOLDEN / name).rglob("manifest.ocdbt"))]


def _tampered_values(
    entries: Sequence[tuple[bytes, ValueLocation]], choices: random.Random
) -> Sequence[tuple[bytes, ValueLocation]]:
    """Return the entries of a database, with one entry changed."""
    number = choices.randrange(len(entries))
    key, value = entries[number]
    last = key.rpartition(b"/")[2]
    if last in (b"zarr.json", b".zarray") and value.inline is not None and choices.randrange(8):
        count = 40
        documents = list(tampered(json.loads(value.inline), count, seed=choices.randrange(1 << 30)))
        data = json.dumps(choices.choice(documents)).encode("utf-8", "surrogatepass")
        value = ValueLocation(data, "", 0, len(data))
    else:
        match choices.randrange(6):
            case 0:
                value = ValueLocation(b"x" * choices.choice((0, 1, 48)), "", 0, 0)
                value = replace(value, length=len(value.inline or b""))
            case 1 if value.inline is None:
                value = replace(value, offset=choices.choice((0, 1, value.offset + 1, 1 << 40)))
            case 2 if value.inline is None:
                value = replace(value, length=choices.choice((0, 1, value.length - 1, value.length + 1, 1 << 40)))
            case 3 if value.inline is None:
                value = replace(
                    value, file=choices.choice(("d/none", "manifest.ocdbt", "_METADATA", "ocdbt.process_0/x"))
                )
            case 4:
                key = choices.choice((key + b"x", key[1:] or b"k", b"\xff" + key, key[:-1] or b"k"))
            case _:
                other = choices.choice(entries)[1]
                value = other
    if any(key == known for known, _ in entries[:number]) or any(key == known for known, _ in entries[number + 1 :]):
        return [*entries[:number], *entries[number + 1 :]]
    return [*entries[:number], (key, value), *entries[number + 1 :]]


def _change_entries(name: str, directory: Path, count: int) -> None:
    location = _location(name, directory)
    choices = random.Random(name)
    manifests = [path for path in location.rglob("manifest.ocdbt") if "ocdbt.process_" not in str(path)]
    for number in range(count):
        manifest = choices.choice(manifests)
        store = DirectoryReadStore(manifest.parent)
        entries = list(Database.open(store, "").range())
        data = [(key, _inline_documents(key, value, store)) for key, value in entries]
        made = encode_database(
            _tampered_values(data, choices), uuid=bytes(16), node_file="d/lies", created_ns=1, node_bytes=200
        )
        content = manifest.read_bytes()
        manifest.write_bytes(made.manifest)
        nodes = manifest.parent / "d" / "lies"
        nodes.parent.mkdir(exist_ok=True)
        nodes.write_bytes(made.nodes)
        _assert_harmless(location, f"lie {number} of {manifest.relative_to(location)}")
        nodes.unlink()
        manifest.write_bytes(content)


def _inline_documents(key: bytes, value: ValueLocation, store: DirectoryReadStore) -> ValueLocation:
    """Move array metadata into inline values, so that `_tampered_values` can change them."""
    if value.inline is not None or not key.endswith((b"zarr.json", b".zarray")):
        return value
    data = store.get(value.file, value.offset, value.offset + value.length)
    return ValueLocation(data, "", 0, len(data))


@pytest.mark.parametrize("name", _DATABASES)
def test_wrong_database_entries_raise_only_checkpoint_errors(name: str, tmp_path: Path) -> None:
    _change_entries(name, tmp_path, 8)


@pytest.mark.slow
@pytest.mark.parametrize("name", _DATABASES)
def test_many_wrong_database_entries_raise_only_checkpoint_errors(name: str, full: bool, tmp_path: Path) -> None:
    _change_entries(name, tmp_path, 1500 if full else 200)


# --- checksums of the format ------------------------------------------------------------------------------------------

_CHECKED: Final = {
    "ocdbt": OcdbtLayout(),
    "ocdbt in pieces": OcdbtLayout(chunk_bytes=256),
    "ocdbt compressed": OcdbtLayout(chunk_bytes=256, compression="zstd"),
    "zarr3 in pieces": Zarr3Layout(chunk_bytes=256),
    "zarr3 compressed": Zarr3Layout(compression="gzip"),
}


@pytest.mark.parametrize("name", _CHECKED)
def test_flipped_bits_are_detected_without_a_root(name: str, tmp_path: Path) -> None:
    """Without a root, ckptcore reads its checkpoint like one that Orbax wrote with the same codecs."""
    layout: Layout = _CHECKED[name]
    location = tmp_path / "checkpoint"
    random_elements = np.random.default_rng(0)
    state = {"w": random_elements.standard_normal((40, 30)), "b": random_elements.integers(0, 9, 77, np.int16)}
    ckptcore.save(location, state, layout=layout, context=_CONTEXT)
    for path in location.glob("checkpoint.*"):
        path.unlink()
    data = [path for path in _files(location / "state") if "ocdbt.process_0" in str(path) or "/c/" in str(path)]
    choices = random.Random(0)
    seen = 0
    for _ in range(150):
        path = choices.choice(data)
        content = bytearray(path.read_bytes())
        content[choices.randrange(len(content))] ^= 1 << choices.randrange(8)
        original = path.read_bytes()
        path.write_bytes(content)
        try:
            loaded = ckptcore.load(location, context=_CONTEXT)
        except CheckpointError:
            seen += 1
        else:  # loads do not read bytes between chunks, or beyond the edge of an array
            assert all(np.array_equal(loaded[key], state[key]) for key in state), f"{path.name} is damaged"
        path.write_bytes(original)
    assert seen > 100
