"""Damaged databases. Checksums detect all random damage. Damage with valid checksums raises only ckptcore errors."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Final

import pytest
import tensorstore as ts
from ckptcore_orbax.ocdbt.database import Database
from ckptcore_orbax.ocdbt.encoding import encode_database
from ckptcore_orbax.ocdbt.frame import MANIFEST_MAGIC, NODE_MAGIC, encode_frame
from ckptcore_orbax.ocdbt.node import ValueLocation
from ckptcore_testing.layout_stores import DirectoryReadStore

from ckptcore.errors import CheckpointError, ChecksumError, CorruptCheckpointError, UnsupportedVersionError
from plugins.layout_orbax.tests.ocdbt_files import put

_NODE_FILE: Final = "d/0123"
_UUID: Final = bytes(range(16))
_ENTRIES: Final = [
    (
        f"params.layer_{number}/c/{number % 3}".encode(),
        ValueLocation(None, f"ocdbt.process_{number % 3}/d/x", 100 * number, number),
    )
    if number % 4
    else (f"params.layer_{number}/zarr.json".encode(), ValueLocation(b"{}" * (number % 5), "", 0, 2 * (number % 5)))
    for number in range(60)
]


def _list(directory: Path, most: int = 100_000) -> list[tuple[bytes, ValueLocation]]:
    return list(islice(Database.open(DirectoryReadStore(directory), "").range(), most))


# --- random damage, which checksums detect ----------------------------------------------------------------------------


def _written_by_tensorstore(directory: Path, compression: object) -> None:
    config = {"max_decoded_node_bytes": 400, "max_inline_value_bytes": 8, "compression": compression}
    spec = {"driver": "ocdbt", "base": directory.as_uri() + "/", "config": config}
    kvstore = ts.KvStore.open(spec, context=ts.Context({"file_io_sync": False})).result()
    transaction = ts.Transaction(atomic=True)
    for key, value in _ENTRIES:
        kvstore.with_transaction(transaction)[key] = bytes(value.length)
    transaction.commit_async().result()


def _written_here(directory: Path) -> None:
    database = encode_database(_ENTRIES, uuid=_UUID, node_file=_NODE_FILE, created_ns=1, node_bytes=400)
    put(directory, "manifest.ocdbt", database.manifest)
    put(directory, _NODE_FILE, database.nodes)


_WRITERS: dict[str, Callable[[Path], None]] = {
    "ours": _written_here,
    "raw": lambda directory: _written_by_tensorstore(directory, None),
    "zstd": lambda directory: _written_by_tensorstore(directory, {"id": "zstd"}),
}


def _damaged(data: bytes, chance: random.Random) -> bytes:
    damaged = bytearray(data)
    at = chance.randrange(len(data))
    match chance.randrange(5):
        case 0:
            damaged[at] ^= 1 << chance.randrange(8)
        case 1:
            damaged[at] = (damaged[at] + chance.randrange(1, 256)) % 256
        case 2:
            del damaged[at:]
        case 3:
            del damaged[at : at + chance.randrange(1, 9)]
        case _:
            damaged[at:at] = chance.randbytes(chance.randrange(1, 9))
    return bytes(damaged)


@pytest.mark.parametrize("writer", _WRITERS)
def test_all_random_damage_is_detected(tmp_path: Path, writer: str) -> None:
    _WRITERS[writer](tmp_path)
    expected = _list(tmp_path)
    assert len(expected) == len(_ENTRIES)
    chance = random.Random(writer)
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    seen = 0
    for _ in range(200):
        path = chance.choice(files)
        data = path.read_bytes()
        path.write_bytes(_damaged(data, chance))
        try:
            # Files of tensorstore also contain values and older nodes, which are not read.
            assert _list(tmp_path) == expected
        except CorruptCheckpointError as error:
            assert error.key == path.relative_to(tmp_path).as_posix()
            seen += 1
        except UnsupportedVersionError:
            pytest.fail("the version was read before the checksum was verified")
        path.write_bytes(data)
    assert seen > (195 if writer == "ours" else 100)
    assert _list(tmp_path) == expected


def test_a_wrong_checksum_raises_a_checksum_error(tmp_path: Path) -> None:
    _written_here(tmp_path)
    nodes = bytearray((tmp_path / _NODE_FILE).read_bytes())
    nodes[-1] ^= 1
    (tmp_path / _NODE_FILE).write_bytes(nodes)
    with pytest.raises(ChecksumError, match=_NODE_FILE) as caught:
        _list(tmp_path)
    assert caught.value.stop == len(nodes)


@pytest.mark.parametrize("missing", ["nodes", "numbered"])
def test_missing_files_raise_an_error_with_a_remedy(tmp_path: Path, missing: str) -> None:
    if missing == "nodes":
        _written_here(tmp_path)
        (tmp_path / _NODE_FILE).unlink()
    else:
        spec = {"driver": "ocdbt", "base": tmp_path.as_uri() + "/", "config": {"manifest_kind": "numbered"}}
        ts.KvStore.open(spec).result()[b"a"] = b"b"
        for path in tmp_path.glob("manifest.0*"):
            path.unlink()
    with pytest.raises(CorruptCheckpointError, match="restore"):
        _list(tmp_path)


def test_numbered_manifests_of_another_database(tmp_path: Path) -> None:
    for name in "ab":
        spec = {"driver": "ocdbt", "base": (tmp_path / name).as_uri() + "/", "config": {"manifest_kind": "numbered"}}
        ts.KvStore.open(spec).result()[b"a"] = b"b"
    assert [key for key, _ in _list(tmp_path / "a")] == [b"a"]
    (tmp_path / "a" / "manifest.ocdbt").write_bytes((tmp_path / "b" / "manifest.ocdbt").read_bytes())
    with pytest.raises(CorruptCheckpointError, match="does not belong to the database"):
        _list(tmp_path / "a")


def test_values_in_missing_or_short_files(tmp_path: Path) -> None:
    _written_here(tmp_path)
    database = Database.open(DirectoryReadStore(tmp_path), "")
    with pytest.raises(CorruptCheckpointError, match="ocdbt.process_0/d/x") as caught:
        database.read(ValueLocation(None, "ocdbt.process_0/d/x", 0, 10))
    assert caught.value.key == "ocdbt.process_0/d/x"
    put(tmp_path, "ocdbt.process_0/d/x", bytes(9))
    for length in (10, (1 << 62) - 1):
        with pytest.raises(CorruptCheckpointError, match="ends after 9"):
            database.read(ValueLocation(None, "ocdbt.process_0/d/x", 0, length))
    assert database.read(ValueLocation(None, "ocdbt.process_0/d/x", 2, 7)) == bytes(7)


# --- intentional damage with valid checksums --------------------------------------------------------------------------


def _change(body: bytes, chance: random.Random) -> bytes:
    for _ in range(chance.randrange(1, 4)):
        body = _damaged(body, chance) or b"\0"
    return body


def _tampered(data: bytes, magic: bytes, chance: random.Random, *, keep_length: bool) -> bytes:
    body = _change(data[14:-4], chance)
    if keep_length:
        body = body[: len(data) - 18].ljust(len(data) - 18, b"\0")
    return encode_frame(body, magic)


def test_tampered_databases_raise_only_checkpoint_errors(tmp_path: Path) -> None:
    _tamper(tmp_path, random.Random(1), 150)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_many_tampered_databases_raise_only_checkpoint_errors(tmp_path: Path, seed: int) -> None:
    _tamper(tmp_path, random.Random(seed), 1000)


def _tamper(tmp_path: Path, chance: random.Random, times: int) -> None:
    """Tamper with a database, and correct its checksums. Damage may stay undetected, but must raise no other errors."""
    _written_here(tmp_path)
    manifest = (tmp_path / "manifest.ocdbt").read_bytes()
    nodes = (tmp_path / _NODE_FILE).read_bytes()
    frames = []
    position = 0
    while position < len(nodes):
        nbytes = int.from_bytes(nodes[position + 4 : position + 12], "little")
        frames.append(nodes[position : position + nbytes])
        position += nbytes
    assert len(frames) > 4
    refused = 0
    tracemalloc.start()
    for _ in range(times):
        changed = list(frames)
        at = chance.randrange(-1, len(frames))
        if at >= 0:
            changed[at] = _tampered(frames[at], NODE_MAGIC, chance, keep_length=True)
        (tmp_path / _NODE_FILE).write_bytes(b"".join(changed))
        new = _tampered(manifest, MANIFEST_MAGIC, chance, keep_length=False) if at < 0 else manifest
        (tmp_path / "manifest.ocdbt").write_bytes(new)
        refused += _is_refused(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 20
    assert refused > times // 2


def _is_refused(directory: Path) -> bool:
    store = DirectoryReadStore(directory)
    try:
        database = Database.open(store, "")
        listed = list(islice(database.range(), 100_000))
    except CheckpointError:
        return True
    keys = [key for key, _ in listed]
    assert keys == sorted(set(keys))
    assert len(keys) == database.num_keys
    for key, value in listed:
        assert database.get(key) == value
        assert value.inline is not None or {"", ".", ".."}.isdisjoint(value.file.split("/"))
        assert 0 <= value.offset < 1 << 62 and 0 <= value.length < 1 << 62
    return False
