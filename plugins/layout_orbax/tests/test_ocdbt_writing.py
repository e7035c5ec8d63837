"""Databases that ckptcore encodes. tensorstore lists and reads them, writes to them, and copies from them."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
from ckptcore_orbax.ocdbt.cursor import ByteRange
from ckptcore_orbax.ocdbt.database import Database
from ckptcore_orbax.ocdbt.encoding import ValueRanges, encode_database
from ckptcore_orbax.ocdbt.manifest import Version, decode_manifest, encode_manifest
from ckptcore_orbax.ocdbt.node import NodeReference, Statistics, ValueLocation
from ckptcore_orbax.ocdbt.paths import DataFile
from ckptcore_testing.layout_stores import DirectoryReadStore
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptcore.errors import InvalidLocationError, NameCollisionError, UnsupportedLeafError
from plugins.layout_orbax.tests.ocdbt_files import put

_UUID = bytes(range(16))
_NODE_FILE = "d/00112233445566778899aabbccddeeff"
_ORBAX = {"max_inline_value_bytes": 1024, "max_decoded_node_bytes": 100_000_000, "manifest_kind": "single"}
"""Options with which Orbax opens databases for reads and writes."""


def _open(directory: Path, config: Mapping[str, Any] | None = None) -> Any:
    spec = {"driver": "ocdbt", "base": directory.as_uri() + "/", "config": dict(config or {})}
    return ts.KvStore.open(spec, context=ts.Context({"file_io_sync": False})).result()


def _contents(kvstore: Any) -> dict[bytes, bytes]:
    return {key: bytes(kvstore[key]) for key in sorted(kvstore.list().result())}


def _write(directory: Path, entries: Sequence[tuple[bytes, ValueLocation]], node_bytes: int = 1 << 20) -> None:
    database = encode_database(
        entries, uuid=_UUID, node_file=_NODE_FILE, created_ns=1_700_000_000_000_000_000, node_bytes=node_bytes
    )
    put(directory, "manifest.ocdbt", database.manifest)
    if database.nodes:
        put(directory, _NODE_FILE, database.nodes)


def _place(
    values: Mapping[bytes, bytes | None], files: Sequence[str], directory: Path, alignment: int
) -> list[tuple[bytes, ValueLocation]]:
    """Write values into the files in turn, aligned with padding. Return the entries. None gives an inline value."""
    contents = {file: bytearray(b"head") for file in files}
    entries = []
    for number, (key, value) in enumerate(values.items()):
        if value is None:
            inline = key[::-1] * (number % 4)
            entries.append((key, ValueLocation(inline, "", 0, len(inline))))
            continue
        file = files[number % len(files)]
        content = contents[file]
        content.extend(bytes(-len(content) % alignment))
        entries.append((key, ValueLocation(None, file, len(content), len(value))))
        content.extend(value)
    for file, content in contents.items():
        put(directory, file, bytes(content))
    return entries


_KEYS = st.one_of(
    st.builds(
        lambda name, index: f"{name}/c/{index}".encode(),
        st.sampled_from(["params", "params.w", "params.layers_0.mlp", "opt_state.mu.params.layers_10"]),
        st.integers(0, 2000),
    ),
    st.binary(max_size=5),
    st.integers(1, 700).map(lambda size: b"k" * size),
)
_CONTENTS = st.dictionaries(_KEYS, st.none() | st.binary(max_size=40), max_size=80)
_FILES = [
    ["d/0123"],
    ["ocdbt.process_0/d/0123", "ocdbt.process_1/d/4567", "ocdbt.process_10/d/89ab"],
    ["plain", "a/b/c", "é/d/x", "d/d/d"],
]


def _expected(
    values: Mapping[bytes, bytes | None], entries: Sequence[tuple[bytes, ValueLocation]]
) -> dict[bytes, bytes]:
    inlines = {key: value.inline for key, value in entries}
    return {key: (inlines[key] or b"") if value is None else value for key, value in sorted(values.items())}


@settings(deadline=None)
@given(
    _CONTENTS,
    st.sampled_from(_FILES),
    st.sampled_from([1, 64, 4096]),
    st.sampled_from([1, 100, 1000, 1 << 20]),
    st.randoms(),
)
def test_generated_databases(
    values: dict[bytes, bytes | None], files: list[str], alignment: int, node_bytes: int, random: Any
) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        entries = _place(values, files, directory, alignment)
        expected = _expected(values, entries)
        random.shuffle(entries)
        _write(directory, entries, node_bytes)
        kvstore = _open(directory)
        assert _contents(kvstore) == expected
        keys = list(expected)
        if len(keys) > 1:
            bounds = ts.KvStore.KeyRange(keys[len(keys) // 3], keys[len(keys) * 2 // 3])
            assert sorted(kvstore.list(bounds).result()) == keys[len(keys) // 3 : len(keys) * 2 // 3]
        for key in keys[::3]:
            assert not kvstore.read(key + b"\0x").result().value
        # ckptcore reads the same contents.
        database = Database.open(DirectoryReadStore(directory), "")
        assert [(key, database.read(value)) for key, value in database.range()] == list(expected.items())
        assert list(database.range()) == sorted(entries)
        assert database.num_keys == len(expected)


@pytest.mark.parametrize("node_bytes", [1, 200, 1 << 16, 1 << 30])
def test_statistics_of_nodes_equal_the_sums_over_their_children(tmp_path: Path, node_bytes: int) -> None:
    """tensorstore dumps the statistics of each node."""
    values: dict[bytes, bytes | None] = {
        f"params.{number % 13}/c/{number}".encode(): bytes(number % 50) for number in range(1000)
    }
    _write(tmp_path, _place(values, _FILES[1], tmp_path, 1), node_bytes)
    base = ts.KvStore.open(tmp_path.as_uri() + "/").result()

    def check(location: str, stated: Mapping[str, int], height: int) -> tuple[int, int, int]:
        node = ts.ocdbt.dump(base, location).result()
        assert node["height"] == height
        own = int(location.rpartition(":")[2])
        if height == 0:
            lengths = [int(entry["indirect_value"].rpartition(":")[2]) for entry in node["entries"]]
            totals = (len(lengths), own, sum(lengths))
        else:
            assert len(node["entries"]) >= 2
            parts = [check(entry["location"], entry["statistics"], height - 1) for entry in node["entries"]]
            totals = (
                sum(part[0] for part in parts),
                own + sum(part[1] for part in parts),
                sum(part[2] for part in parts),
            )
        assert stated == dict(zip(("num_keys", "num_tree_bytes", "num_indirect_value_bytes"), totals, strict=True))
        return totals

    manifest = ts.ocdbt.dump(base).result()
    assert manifest["config"] == {
        "uuid": _UUID.hex(),
        "compression": {"id": "zstd"},
        "version_tree_arity_log2": 4,
        "max_inline_value_bytes": 1024,
        "max_decoded_node_bytes": 100_000_000,
    }
    (version,) = manifest["versions"]
    assert (version["generation_number"], version["commit_time"]) == (1, 1_700_000_000_000_000_000)
    totals = check(version["root"]["location"], version["root"]["statistics"], version["root_height"])
    assert totals[:2] == (1000, (tmp_path / _NODE_FILE).stat().st_size)
    assert (version["root_height"] >= 3) == (node_bytes <= 200)


@pytest.mark.parametrize("count", [0, 1, 300])
def test_tensorstore_writes_to_an_encoded_database(tmp_path: Path, count: int) -> None:
    values: dict[bytes, bytes | None] = {
        f"{number:04d}".encode(): bytes([number % 256]) * 2000 for number in range(count)
    }
    _write(tmp_path, _place(values, _FILES[1], tmp_path, 4096), 1000)
    kvstore = _open(tmp_path, _ORBAX)
    kvstore[b"0005x"] = b"between"
    kvstore[b"zz"] = bytes(5000)
    transaction = ts.Transaction(atomic=True)
    for number in range(0, 300, 7):
        kvstore.with_transaction(transaction)[f"{number:04d}"] = b"replaced"
    transaction.commit_async().result()
    kvstore.delete_range(ts.KvStore.KeyRange("0100", "0200")).result()
    expected = {**values, b"0005x": b"between", b"zz": bytes(5000)}
    expected.update({f"{number:04d}".encode(): b"replaced" for number in range(0, 300, 7)})
    expected = {key: value for key, value in sorted(expected.items()) if not b"0100" <= key < b"0200"}
    assert _contents(_open(tmp_path)) == expected
    database = Database.open(DirectoryReadStore(tmp_path), "")
    assert {key: database.read(value) for key, value in database.range()} == expected


def test_tensorstore_copies_from_an_encoded_database_by_reference(tmp_path: Path) -> None:
    context = ts.Context({"file_io_sync": False})
    values: dict[bytes, bytes | None] = {
        f"{number:04d}".encode(): bytes([number % 256]) * 2000 for number in range(100)
    }
    own = tmp_path / "ocdbt.process_0"
    _write(own, _place(values, ["d/data"], own, 1), 1000)
    target, source = (
        ts.KvStore.open({"driver": "ocdbt", "base": path.as_uri() + "/", "config": _ORBAX}, context=context).result()
        for path in (tmp_path, own)
    )
    source.experimental_copy_range_to(target).result()
    assert _contents(target) == values
    database = Database.open(DirectoryReadStore(tmp_path), "")
    assert {value.file for _, value in database.range()} == {"ocdbt.process_0/d/data"}
    assert {key: database.read(value) for key, value in database.range()} == values


def test_nodes_in_another_directory_than_the_manifest(tmp_path: Path) -> None:
    """Names of files are relative to the base path of the node's own file, as in tensorstore."""
    values: dict[bytes, bytes | None] = {f"{number:04d}".encode(): bytes([number]) * 20 for number in range(100)}
    inner = tmp_path / "state" / "inner"
    _write(inner, _place(values, ["d/data"], inner, 1), 150)
    manifest = (inner / "manifest.ocdbt").read_bytes()
    version = decode_manifest(manifest, "", ByteRange("manifest", "manifest.ocdbt", 0, len(manifest))).newest
    assert version is not None and version.root is not None and version.root.height > 1
    root = NodeReference(
        DataFile(f"inner/{_NODE_FILE}", ""),
        version.root.offset,
        version.root.length,
        version.root.height,
        version.statistics,
    )
    put(tmp_path, "state/manifest.ocdbt", encode_manifest(_UUID, Version(1, root, version.statistics, 1)))
    assert _contents(_open(tmp_path / "state")) == values
    database = Database.open(DirectoryReadStore(tmp_path), "state")
    assert {key: database.read(value) for key, value in database.range()} == values
    assert {value.file for _, value in database.range()} == {"state/inner/d/data"}


def test_many_keys_take_few_bytes_in_nodes(tmp_path: Path) -> None:
    count = 30_000
    entries = [
        (f"params.layer_{number // 9}.kernel/c/{number % 9}".encode(), ValueLocation(None, "d/x", 7 * number, 7))
        for number in range(count)
    ]
    _write(tmp_path, entries)
    put(tmp_path, "d/x", bytes(7 * count))
    assert sorted(_open(tmp_path).list().result()) == sorted(key for key, _ in entries)
    database = Database.open(DirectoryReadStore(tmp_path), "")
    assert list(database.range()) == sorted(entries)
    assert (tmp_path / _NODE_FILE).stat().st_size < 40 * count


def test_keys_and_inline_values_of_the_maximum_length(tmp_path: Path) -> None:
    entries = [
        (bytes([number]) * 65535, ValueLocation(bytes([number]) * (1 << 20), "", 0, 1 << 20)) for number in range(3)
    ]
    entries += [(b"\0" * size, ValueLocation(b"", "", 0, 0)) for size in (0, 1, 600, 65534)]
    _write(tmp_path, entries)
    expected = {key: value.inline for key, value in sorted(entries)}
    assert _contents(_open(tmp_path)) == expected
    assert {key: value.inline for key, value in Database.open(DirectoryReadStore(tmp_path), "").range()} == expected


def test_columns_of_ranges_are_encoded_like_entries() -> None:
    random = np.random.default_rng(0)
    files = [f"ocdbt.process_{number}/d/{number:032x}" for number in range(9)]
    keys = [f"params.{number // 100}/c/{number % 100}".encode() for number in random.permutation(1000)]
    numbers = random.integers(0, len(files), len(keys))
    offsets, lengths = random.integers(0, 1 << 40, (2, len(keys)))
    columns = zip(keys, numbers.tolist(), offsets.tolist(), lengths.tolist(), strict=True)
    listed = [(key, ValueLocation(None, files[number], offset, length)) for key, number, offset, length in columns]
    others = [(f"params.{number}/zarr.json".encode(), ValueLocation(b"{}", "", 0, 2)) for number in range(10)]
    fixed: dict[str, Any] = {"uuid": _UUID, "node_file": _NODE_FILE, "created_ns": 0, "node_bytes": 4000}
    ranges = ValueRanges(keys, files, numbers, offsets, lengths)
    assert encode_database(others, ranges, **fixed) == encode_database([*others, *listed], **fixed)
    with pytest.raises(NameCollisionError):
        encode_database(listed[:1], ranges, **fixed)
    lengths[7] = -1
    with pytest.raises(InvalidLocationError, match=f"{files[numbers[7]]}.*length=-1"):
        encode_database(others, ranges, **fixed)


def test_invalid_entries_are_refused() -> None:
    def encode(*entries: tuple[bytes, ValueLocation], node_file: str = _NODE_FILE) -> None:
        encode_database(entries, uuid=_UUID, node_file=node_file, created_ns=0)

    there = ValueLocation(None, "d/x", 0, 1)
    with pytest.raises(NameCollisionError, match="b'a'"):
        encode((b"a", there), (b"b", there), (b"a", there))
    with pytest.raises(InvalidLocationError, match="65536"):
        encode((bytes(65536), there))
    with pytest.raises(UnsupportedLeafError, match="1048577"):
        encode((b"a", ValueLocation(bytes((1 << 20) + 1), "", 0, 0)))
    for file in ("/x", "../x", "d/../x", "a//x", "x/", "a\0b", "", "x" * 65536):
        with pytest.raises(InvalidLocationError):
            encode((b"a", ValueLocation(None, file, 0, 1)))
        with pytest.raises(InvalidLocationError):
            encode((b"a", there), node_file=file)
    for offset, length in ((-1, 1), (0, -1), (1 << 62, 0), (0, 1 << 62)):
        with pytest.raises(InvalidLocationError):
            encode((b"a", ValueLocation(None, "d/x", offset, length)))
    with pytest.raises(ValueError, match="16 bytes"):
        encode_database((), uuid=b"short", node_file=_NODE_FILE, created_ns=0)


def test_the_statistics_of_an_empty_database() -> None:
    database = encode_database((), uuid=_UUID, node_file=_NODE_FILE, created_ns=0)
    assert database.nodes == b""
    assert database.manifest == encode_manifest(_UUID, Version(1, None, Statistics(0, 0, 0), 0))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")  # Orbax warns of loads without shardings
def test_orbax_loads_a_checkpoint_with_an_encoded_database(tmp_path: Path) -> None:
    jax_numpy = pytest.importorskip("jax.numpy")
    orbax = pytest.importorskip("orbax.checkpoint.experimental.v1")
    saved = {f"layer_{number}": jax_numpy.arange(number * 500 + 1.0) for number in range(30)}
    place = tmp_path / "checkpoint"
    orbax.save(place, saved)
    (manifest,) = place.glob("*/manifest.ocdbt")
    state = manifest.parent
    entries = list(Database.open(DirectoryReadStore(state), "").range())
    manifest.unlink()
    for path in (state / "d").iterdir():
        path.unlink()
    _write(state, entries, 500)
    loaded = orbax.load(place)
    assert loaded.keys() == saved.keys()
    for name, array in saved.items():
        assert (loaded[name] == array).all()
