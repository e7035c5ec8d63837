"""Reads of databases that tensorstore and Orbax wrote. They return the same keys and values as tensorstore."""

from __future__ import annotations

import tempfile
from bisect import bisect_left
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tensorstore as ts
from ckptcore_orbax.ocdbt.database import Database
from ckptcore_testing.layout_stores import DirectoryReadStore
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptcore.errors import ObjectNotFoundError


def _context() -> Any:
    return ts.Context({"file_io_sync": False})


def _open(directory: Path, config: Mapping[str, Any], context: Any) -> Any:
    spec = {"driver": "ocdbt", "base": directory.as_uri() + "/", "config": dict(config)}
    return ts.KvStore.open(spec, context=context).result()


def _contents(kvstore: Any) -> dict[bytes, bytes]:
    return {key: bytes(kvstore[key]) for key in sorted(kvstore.list().result())}


def _assert_same(store: DirectoryReadStore, directory: str, expected: Mapping[bytes, bytes]) -> None:
    """Compare a database with its expected contents: all keys, single and missing keys, and ranges."""
    database = Database.open(store, directory)
    listed = list(database.range())
    keys = list(expected)
    assert [key for key, _ in listed] == keys
    assert database.num_keys == len(keys)
    for key, value in listed:
        assert database.read(value) == expected[key]
        assert value.length == len(expected[key])
        assert (value.inline is None) == bool(value.file)
    fresh = Database.open(store, directory)
    for key, value in listed:
        assert fresh.get(key) == value
        for other in (key + b"\0", key[:-1], key[:-1] + b"\xff", b"\xff" + key):
            assert (fresh.get(other) is not None) == (other in expected)
    bounds = sorted(
        {
            b"",
            b"\xff" * 3,
            *keys[::3],
            *(key[: len(key) // 2] for key in keys[::5]),
            *(key + b"\0" for key in keys[::7]),
        }
    )
    for start in bounds[:: max(1, len(bounds) // 8)]:
        for stop in [None, *bounds[:: max(1, len(bounds) // 8)]]:
            part = (
                keys[bisect_left(keys, start) :]
                if stop is None
                else keys[bisect_left(keys, start) : bisect_left(keys, stop)]
            )
            assert [key for key, _ in Database.open(store, directory).range(start, stop)] == part


_COMPRESSIONS = [None, {"id": "zstd"}, {"id": "zstd", "level": 0}, {"id": "zstd", "level": 9}]
_CONFIGS = st.fixed_dictionaries(
    {
        "max_decoded_node_bytes": st.sampled_from([1, 60, 200, 1000, 8 << 20]),
        "max_inline_value_bytes": st.sampled_from([0, 1, 10, 100, 1 << 20]),
        "version_tree_arity_log2": st.sampled_from([1, 4, 16]),
        "manifest_kind": st.sampled_from(["single", "numbered"]),
        "compression": st.sampled_from(_COMPRESSIONS),
    }
)
_NAMES = st.builds(
    lambda parts, end: "/".join([*parts, end]).encode(),
    st.lists(st.sampled_from(["params", "params.w", "opt_state", "0", "1", "c", "é", "a" * 40]), max_size=4),
    st.text("0123456789", max_size=3),
)
_KEYS = st.one_of(_NAMES, _NAMES, st.binary(max_size=6), st.binary(min_size=200, max_size=300))
_VALUES = st.one_of(st.binary(max_size=4), st.binary(min_size=5, max_size=40), st.integers(0, 3000).map(bytes))


@dataclass(frozen=True, slots=True)
class _Change:
    """Operations on a database: one transaction of puts and deletes, then a deleted range and a copied range."""

    puts: Mapping[bytes, bytes]
    deletes: frozenset[bytes]
    deleted_range: tuple[bytes, bytes] | None
    copied_range: tuple[bytes, bytes, bytes] | None


_CHANGES = st.lists(
    st.builds(
        _Change,
        st.dictionaries(_KEYS, _VALUES, max_size=30),
        st.frozensets(_KEYS, max_size=3),
        st.none() | st.tuples(_KEYS, _KEYS).map(lambda pair: (min(pair), max(pair))),
        st.none() | st.tuples(_NAMES, _NAMES, _NAMES).map(lambda three: (min(three[:2]), max(three[:2]), three[2])),
    ),
    max_size=8,
)


def _apply(change: _Change, kvstore: Any) -> None:
    transaction = ts.Transaction(atomic=True)
    within = kvstore.with_transaction(transaction)
    for key, value in change.puts.items():
        within[key] = value
    for key in change.deletes:
        del within[key]
    transaction.commit_async().result()
    if (
        change.deleted_range is not None
    ):  # outside of the transaction, in which tensorstore 0.1.86 crashes on some ranges
        kvstore.delete_range(ts.KvStore.KeyRange(*change.deleted_range)).result()
    if change.copied_range is not None:
        start, stop, target = change.copied_range
        source = ts.KvStore.KeyRange(start, stop)
        kvstore.experimental_copy_range_to(kvstore / target.decode(), source).result()


def _check(config: Mapping[str, Any], changes: list[_Change]) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name, "state")
        kvstore = _open(directory, config, _context())
        if not changes:
            kvstore[b"key"] = b"deleted"
            del kvstore[b"key"]
        for change in changes:
            _apply(change, kvstore)
        expected = _contents(kvstore)
        if not (directory / "manifest.ocdbt").exists():
            assert not expected  # nothing was written
            with pytest.raises(ObjectNotFoundError):
                Database.open(DirectoryReadStore(Path(name)), "state")
            return
        _assert_same(DirectoryReadStore(Path(name)), "state", expected)


@settings(max_examples=8, deadline=None)
@given(_CONFIGS, _CHANGES)
def test_generated_databases(config: Mapping[str, Any], changes: list[_Change]) -> None:
    _check(config, changes)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(_CONFIGS, _CHANGES)
def test_many_generated_databases(config: Mapping[str, Any], changes: list[_Change]) -> None:
    _check(config, changes)


@pytest.mark.parametrize("compression", _COMPRESSIONS[:2], ids=["raw", "zstd"])
def test_trees_of_several_levels_are_read(tmp_path: Path, compression: object) -> None:
    config = {"max_decoded_node_bytes": 500, "max_inline_value_bytes": 4, "compression": compression}
    kvstore = _open(tmp_path, config, _context())
    transaction = ts.Transaction(atomic=True)
    for number in range(600):
        kvstore.with_transaction(transaction)[f"params.layer_{number % 7}/c/{number}"] = bytes(number % 9)
    transaction.commit_async().result()
    assert ts.ocdbt.dump(kvstore.base).result()["versions"][-1]["root_height"] >= 3
    _assert_same(DirectoryReadStore(tmp_path), "", _contents(kvstore))


@pytest.mark.parametrize("kind", ["single", "numbered"])
def test_the_newest_of_many_versions_is_read(tmp_path: Path, kind: str) -> None:
    """The test writes so many versions that older versions are in version nodes of several heights."""
    kvstore = _open(tmp_path, {"manifest_kind": kind, "version_tree_arity_log2": 1}, _context())
    for number in range(60):
        kvstore[f"{number % 8}"] = bytes([number])
        if number % 5 == 0:
            _assert_same(DirectoryReadStore(tmp_path), "", _contents(kvstore))
    expected = {f"{number % 8}".encode(): bytes([number]) for number in range(52, 60)}
    _assert_same(DirectoryReadStore(tmp_path), "", dict(sorted(expected.items())))


def test_a_database_keeps_the_version_it_was_opened_at(tmp_path: Path) -> None:
    kvstore = _open(tmp_path, {}, _context())
    kvstore[b"a"] = b"old"
    database = Database.open(DirectoryReadStore(tmp_path), "")
    kvstore[b"a"] = b"new"
    kvstore[b"b"] = b"new"
    location = database.get(b"a")
    assert location is not None and database.read(location) == b"old"
    assert database.get(b"b") is None


def test_databases_that_are_merged_as_in_orbax_are_read(tmp_path: Path) -> None:
    """Each process writes a database. The merged database refers to their files in leaf nodes and by base paths."""
    context = _context()
    config = {"max_inline_value_bytes": 8, "max_decoded_node_bytes": 300, "manifest_kind": "single"}
    merged = _open(tmp_path / "state", config, context)
    expected: dict[bytes, bytes] = {}
    transaction = ts.Transaction(atomic=True)
    copies = []
    for process in range(3):
        own = _open(tmp_path / "state" / f"ocdbt.process_{process}", config, context)
        for number in range(40):
            key, value = f"params.w/c/{process}/{number}", bytes([process, number]) * (number % 9)
            own[key] = value
            expected[key.encode()] = value
        copies.append(own.experimental_copy_range_to(merged.with_transaction(transaction)))
    for copy in copies:
        copy.result()
    transaction.commit_async().result()
    store = DirectoryReadStore(tmp_path)
    assert _contents(merged) == dict(sorted(expected.items()))
    _assert_same(store, "state", dict(sorted(expected.items())))
    files = {value.file for _, value in Database.open(store, "state").range() if value.file}
    assert {file.split("/")[1] for file in files} == {f"ocdbt.process_{process}" for process in range(3)}
    _assert_same(
        store, "state/ocdbt.process_1", {key: value for key, value in sorted(expected.items()) if b"/c/1/" in key}
    )


def test_several_threads_read_one_database(tmp_path: Path) -> None:
    config = {"max_decoded_node_bytes": 300, "max_inline_value_bytes": 4}
    kvstore = _open(tmp_path, config, _context())
    transaction = ts.Transaction(atomic=True)
    for number in range(500):
        kvstore.with_transaction(transaction)[f"{number:04d}"] = bytes(number % 9)
    transaction.commit_async().result()
    database = Database.open(DirectoryReadStore(tmp_path), "")

    def look(thread: int) -> int:
        keys = 0
        for number in range(thread, 500, 3):
            value = database.get(f"{number:04d}".encode())
            assert value is not None and value.length == number % 9
            keys += len(list(database.range(f"{number:04d}".encode(), f"{number + 1:04d}".encode())))
        return keys

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(look, range(8))) == [len(range(thread, 500, 3)) for thread in range(8)]


def test_a_missing_database_raises_an_error(tmp_path: Path) -> None:
    with pytest.raises(ObjectNotFoundError):
        Database.open(DirectoryReadStore(tmp_path), "state")


_GOLDEN = sorted((Path(__file__).parent / "golden").rglob("manifest.ocdbt"))


@pytest.mark.parametrize(
    "manifest", _GOLDEN, ids=lambda path: "/".join(path.parts[path.parts.index("golden") + 1 : -1])
)
def test_databases_of_golden_checkpoints_are_read(manifest: Path) -> None:
    place = manifest.parent
    kvstore = ts.KvStore.open({"driver": "ocdbt", "base": place.as_uri() + "/"}).result()
    _assert_same(DirectoryReadStore(place.parent), place.name, _contents(kvstore))


def test_the_list_of_golden_checkpoints_is_not_empty() -> None:
    assert len(_GOLDEN) > 30


@pytest.mark.slow
def test_databases_of_a_new_checkpoint_of_orbax_are_read(tmp_path: Path) -> None:
    jax_numpy = pytest.importorskip("jax.numpy")
    orbax = pytest.importorskip("orbax.checkpoint.experimental.v1")
    state = {
        f"layer_{number}": {"w": jax_numpy.arange(number * 50 + 1.0), "b": jax_numpy.ones(())} for number in range(30)
    }
    orbax.save(tmp_path / "checkpoint", state)
    places = [path.parent for path in sorted((tmp_path / "checkpoint").rglob("manifest.ocdbt"))]
    assert len(places) == 2  # the merged database, and that of the process
    for place in places:
        kvstore = ts.KvStore.open({"driver": "ocdbt", "base": place.as_uri() + "/"}).result()
        contents = _contents(kvstore)
        assert len(contents) == 4 * 30
        _assert_same(DirectoryReadStore(tmp_path), place.relative_to(tmp_path).as_posix(), contents)
