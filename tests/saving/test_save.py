"""Saves: stored trees and refused values."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import json
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from ckptcore_testing import run_ranks
from ckptcore_testing.trees import same_value

import ckptcore
from ckptcore.errors import (
    AtomicityError,
    CheckpointExistsError,
    InvalidLocationError,
    UnknownPluginError,
    UnsupportedKeyError,
    UnsupportedLeafError,
)
from ckptcore.model import ArrayRecord, Attribute, Node


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass(frozen=True, slots=True)
class State:
    step: int
    weights: Any
    name: str = "x"


TREES: dict[str, Any] = {
    "one array": np.arange(6).reshape(2, 3),
    "empty dict": {},
    "empty containers": {"a": {}, "b": [], "c": (), "d": collections.OrderedDict(), "e": [{}, ()]},
    "keys kept apart": {1: np.int8(1), "1": np.int16(1), "a.b": np.zeros(1), "a": {"b": np.ones(1)}, "": 0, "é\n/": 1},
    "ordered": collections.OrderedDict([("b", 1), ("a", np.zeros(2))]),
    "values": [True, False, None, 0, -1, 10**400, -(2**53), 2**53, 1.5, -0.0, float("inf"), float("nan"), 1e-320],
    "complex values": [1 + 2j, complex("nan"), complex(0.0, -0.0)],
    "text": ["", "é\ud800\0", "x" * 5000, "y" * 100_000, "é" * 20_000],
    "bytes": [b"", b"\0\xff", b"z" * 100_000],
    "numpy scalars": [np.float32(1.5), np.int8(-3), np.bool_(True), np.complex128(1j), ml_dtypes.bfloat16(2.5)],
    "times": [np.datetime64("2024-01-02T03:04:05", "ns"), np.array(["NaT", "2020"], "M8[D]"), np.timedelta64(5, "us")],
    "fixed text": [np.array(["ab", "é"]), np.array([b"abc", b"d"]), np.array("x")],
    "shapes": [np.zeros(()), np.zeros((0,)), np.zeros((3, 0, 2)), np.zeros((1,) * 10), np.float64(3.0)],
    "surrogates": {"\ud83d\ude00": "\ud83d\ude00", "\U0001f600": "\ud800", "\ud800": np.ones(1), "é": np.zeros(1)},
    "reserved name": {"__metadata__": np.ones(2)},
}


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("scheme", ["local", "memory"])
def test_a_tree_comes_back_as_it_was(name: str, scheme: str, tmp_path: Path) -> None:
    location = str(tmp_path / "c") if scheme == "local" else f"memory://{tmp_path.name}/c"
    ckptcore.save(location, TREES[name])
    assert same_value(ckptcore.load(location), TREES[name])
    assert same_value(ckptcore.load(location, TREES[name]), TREES[name])
    assert same_value(ckptcore.load(location, ckptcore.metadata(location).abstract), TREES[name])
    assert ckptcore.verify(location).ok


DTYPES = [
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
    "complex64", "complex128", "bfloat16", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn",
    "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn", "int4", "uint4",
    "int2", "uint2",
]  # fmt: skip


def every_bit_pattern(dtype: str) -> np.ndarray[Any, Any]:
    made = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    if dtype in ("bool", "int4", "uint4", "int2", "uint2", "float4_e2m1fn"):
        return np.arange(-8 if dtype.startswith("int") else 0, 8).astype(made)
    return np.random.default_rng(0).integers(0, 256, 24 * made.itemsize, np.uint8).view(made)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back_bit_for_bit(dtype: str, tmp_path: Path) -> None:
    array = every_bit_pattern(dtype)
    tree = {"whole": array, "strided": array[::-2], "matrix": array[:8].reshape(2, 4).T, "scalar": array[3]}
    ckptcore.save(tmp_path / "c", tree)
    assert same_value(
        ckptcore.load(tmp_path / "c"), {**tree, "strided": tree["strided"].copy(), "matrix": tree["matrix"].copy()}
    )


def test_another_byte_order_is_converted_and_noted(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"w": np.arange(5, dtype=">i4")})
    loaded = ckptcore.load(tmp_path / "c")["w"]
    assert loaded.dtype == np.dtype("<i4") and loaded.tolist() == [0, 1, 2, 3, 4]
    record = ckptcore.metadata(tmp_path / "c").tree.leaves[0]
    assert isinstance(record, ArrayRecord) and record.notes == {"converted": "byte order"}


def test_ranks_may_note_different_conversions(tmp_path: Path) -> None:
    def job(rank: int, context: ckptcore.Context) -> None:
        order = "<i4" if rank == 0 else ">i4"
        ckptcore.save(tmp_path / "c", {"w": np.arange(5, dtype=order)}, context=context)

    run_ranks(2, job, timeout_seconds=30)
    assert ckptcore.load(tmp_path / "c")["w"].tolist() == [0, 1, 2, 3, 4]


def test_other_types_load_as_plain_containers_with_a_note(tmp_path: Path) -> None:
    tree = {"pair": Pair(np.ones(2), 3), "state": State(7, [np.zeros(1)]), "counts": collections.defaultdict(int, a=1)}
    ckptcore.save(tmp_path / "c", tree)
    loaded = ckptcore.load(tmp_path / "c")
    assert same_value(loaded["pair"], {"first": np.ones(2), "second": 3})
    assert same_value(loaded["state"], {"step": 7, "weights": [np.zeros(1)], "name": "x"})
    assert same_value(loaded["counts"], {"a": 1})
    skeleton = ckptcore.metadata(tmp_path / "c").tree.skeleton
    assert isinstance(skeleton, Node)
    pair = skeleton.children[0]
    assert isinstance(pair, Node) and pair.type is not None and pair.type.endswith("Pair")
    assert pair.keys == (Attribute("first"), Attribute("second"))
    exact = ckptcore.load(tmp_path / "c", tree)
    assert type(exact["pair"]) is Pair and type(exact["state"]) is State
    assert exact["counts"].default_factory is int


def test_tied_arrays_are_stored_once_and_tied_again(tmp_path: Path) -> None:
    weights = np.arange(1000.0)
    ckptcore.save(tmp_path / "c", {"in": weights, "out": weights, "view": weights[:], "half": weights[:500]})
    metadata = ckptcore.metadata(tmp_path / "c")
    assert dict(metadata.tree.aliases) == {1: 0, 2: 0}
    assert metadata.nbytes == 8000 + 4000
    assert (tmp_path / "c" / "model.safetensors").stat().st_size < 12_000 + 1000
    loaded = ckptcore.load(tmp_path / "c")
    assert loaded["in"] is loaded["out"] is loaded["view"]
    assert same_value(loaded["half"], weights[:500])


def test_a_strided_view_is_stored_as_its_own_array(tmp_path: Path) -> None:
    base = np.arange(64.0).reshape(8, 8)
    tree = {
        "rows": base[::2],
        "columns": base[:, ::3],
        "back": base[::-1, ::-1],
        "one": np.broadcast_to(np.float32(2), (3, 4)),
    }
    ckptcore.save(tmp_path / "c", tree)
    loaded = ckptcore.load(tmp_path / "c")
    for name, array in tree.items():
        assert np.array_equal(loaded[name], array)


class Strange:
    pass


@pytest.mark.parametrize(
    ("tree", "error", "said"),
    [
        ({"a": [1, Strange()]}, UnsupportedLeafError, r"a\[1\] is a .*Strange"),
        ({"a": np.array([None])}, UnsupportedLeafError, "a: dtype object cannot be stored"),
        ({"a": np.zeros(2, "i4,f4")}, UnsupportedLeafError, "a: dtype .*structured"),
        ({"a": np.zeros(2, "V8")}, UnsupportedLeafError, "a: dtype .*V8"),
        ({"a": np.ma.masked_array([1, 2])}, UnsupportedLeafError, "a: a masked array"),
        ({"a": ckptcore.AbstractArray((2,), "int8")}, UnsupportedLeafError, "a: an AbstractArray has no elements"),
        ({"a": ...}, UnsupportedLeafError, "a is a builtins.ellipsis"),
        ({"a": slice(1)}, UnsupportedLeafError, "a is a builtins.slice"),
        ({(1, 2.5): 1}, UnsupportedKeyError, "tuple"),
        ({None: 1}, UnsupportedKeyError, "NoneType"),
        ({"a": {1.5: 1}}, UnsupportedKeyError, "a has the key 1.5"),
    ],
)
@pytest.mark.parametrize("begin", [ckptcore.save, ckptcore.save_async])
def test_unsupported_values_are_refused_by_path_before_anything_is_written(
    tree: Any, error: type[Exception], said: str, begin: Any, tmp_path: Path
) -> None:
    with pytest.raises(error, match=said):
        begin(tmp_path / "c", tree)
    assert list(tmp_path.iterdir()) == []


def test_every_refused_leaf_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedLeafError, match=r"a is a .*; b is a "):
        ckptcore.save(tmp_path / "c", {"a": Strange(), "b": Strange()})


def test_a_tree_that_contains_itself_is_refused(tmp_path: Path) -> None:
    tree: dict[str, Any] = {}
    tree["again"] = tree
    with pytest.raises(UnsupportedLeafError, match="deeper"):
        ckptcore.save(tmp_path / "c", tree)


def test_a_checkpoint_is_replaced_only_with_overwrite(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"w": np.ones(2)})
    with pytest.raises(CheckpointExistsError, match="overwrite=True"):
        ckptcore.save(tmp_path / "c", {"w": np.zeros(2)})
    ckptcore.save(tmp_path / "c", {"v": np.zeros(3)}, overwrite=True)
    assert same_value(ckptcore.load(tmp_path / "c"), {"v": np.zeros(3)})
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_files_of_other_software_are_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "thesis.txt").write_text("years of work")
    (tmp_path / "d").write_text("a file")
    for name, said in (("c", r"thesis\.txt"), ("d", "is a file")):
        with pytest.raises(CheckpointExistsError, match=said):
            ckptcore.save(tmp_path / name, {"w": np.ones(2)}, overwrite=True)
    with pytest.raises(CheckpointExistsError, match="not written by ckptcore"):
        ckptcore.delete(tmp_path / "c")
    assert (tmp_path / "c" / "thesis.txt").read_text() == "years of work"


def test_a_save_into_an_empty_directory_works(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    ckptcore.save(tmp_path / "c", {"w": np.ones(2)})
    assert same_value(ckptcore.load(tmp_path / "c"), {"w": np.ones(2)})


def test_storage_without_rename_replaces_only_with_non_atomic() -> None:
    location = "memory://saving/non-atomic"
    ckptcore.save(location, {"w": np.ones(2)})
    with pytest.raises(AtomicityError, match="non-atomic"):
        ckptcore.save(location, {"w": np.zeros(2)}, overwrite=True)
    assert same_value(ckptcore.load(location), {"w": np.ones(2)})
    ckptcore.save(location, {"v": np.zeros(3)}, overwrite="non-atomic")
    assert same_value(ckptcore.load(location), {"v": np.zeros(3)})
    ckptcore.delete(location)
    with pytest.raises(ckptcore.errors.CheckpointNotFoundError):
        ckptcore.load(location)


def test_a_save_to_a_link_writes_to_its_target(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    ckptcore.save(tmp_path / "link", {"w": np.ones(2)})
    ckptcore.save(tmp_path / "link", {"w": np.zeros(2)}, overwrite=True)
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "checkpoint.json").exists()
    assert same_value(ckptcore.load(tmp_path / "link"), {"w": np.zeros(2)})


@pytest.mark.parametrize("location", ["", "/", "memory://", "memory://x", "a\0b", "file://host/x", 5])
def test_an_invalid_location_is_refused(location: Any) -> None:
    with pytest.raises(InvalidLocationError):
        ckptcore.save(location, {})


@pytest.mark.parametrize("name", [".model.0123456789abcdef.ckptcore", ".model.partial.ckptcore"])
@pytest.mark.parametrize("place", ["file", "memory"])
def test_the_names_of_uncommitted_saves_are_refused(name: str, place: str, tmp_path: Path) -> None:
    """Loads do not accept such a name, and a save to the name inside it would remove the checkpoint."""
    where = str(tmp_path) if place == "file" else f"memory://save/{tmp_path.name}"
    ckptcore.save(f"{where}/source", {"a": np.ones(3)})
    for save in (
        lambda: ckptcore.save(f"{where}/{name}", {"a": np.ones(3)}),
        lambda: ckptcore.save_async(f"{where}/{name}", {"a": np.ones(3)}).result(),
        lambda: ckptcore.partial(f"{where}/{name}").save({"a": np.ones(3)}),
        lambda: ckptcore.save(f"{where}/{name}", {}, strategy=ckptcore.Update(f"{where}/source")),
        lambda: ckptcore.copy(f"{where}/source", f"{where}/{name}"),
        lambda: ckptcore.copy(f"{where}/source", f"{where}/{name}", layout="safetensors"),
    ):
        with pytest.raises(
            InvalidLocationError, match="uncommitted save.*Save to a name that does not begin with a dot"
        ):
            save()
    assert place == "memory" or {path.name for path in tmp_path.iterdir()} <= {"source", ".ckptcore"}


def test_the_error_for_an_unknown_scheme_or_layout_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UnknownPluginError, match="memory://"):
        ckptcore.save("nowhere://x/y", {})
    with pytest.raises(UnknownPluginError, match="safetensors"):
        ckptcore.save(tmp_path / "c", {}, layout="punched cards")


def test_a_file_url_is_a_path(tmp_path: Path) -> None:
    ckptcore.save(f"file://{tmp_path}/a%20b", {"w": np.ones(1)})
    assert (tmp_path / "a b" / "checkpoint.json").exists()
    assert same_value(ckptcore.load(tmp_path / "a b"), {"w": np.ones(1)})


def test_metadata_of_the_user_comes_back(tmp_path: Path) -> None:
    custom: dict[str, Any] = {"step": 5, "loss": 0.25, "tags": ["a", None], "nested": {"é": True}}
    ckptcore.save(tmp_path / "c", {}, metadata=custom)
    stored = ckptcore.metadata(tmp_path / "c")
    assert stored.custom == custom
    assert stored.created is not None and datetime.datetime.fromisoformat(stored.created).tzinfo is not None


@pytest.mark.parametrize("custom", [{1: 2}, {"a": float("nan")}, {"a": b"x"}, {"a": {2: 3}}])
def test_metadata_that_is_not_json_is_refused_before_anything_is_written(custom: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="metadata="):
        ckptcore.save(tmp_path / "c", {}, metadata=custom)
    assert list(tmp_path.iterdir()) == []


def test_deeply_nested_metadata_is_refused(tmp_path: Path) -> None:
    nested: Any = 0
    for _ in range(200_000):
        nested = [nested]
    with pytest.raises(ValueError, match="metadata= must be JSON"):
        ckptcore.save(tmp_path / "x", {"a": 1}, metadata={"nested": nested})
    assert not list(tmp_path.iterdir())


def test_the_root_is_json_that_names_everything(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"w": np.ones((2, 3), np.float32)})
    root = json.loads((tmp_path / "c" / "checkpoint.json").read_text())
    assert root["format"] == "ckptcore" and root["version"] == 1 and root["state"] == "committed"
    assert root["tables"]["objects"]["key"] == ["model.safetensors"]


def test_large_tables_go_into_parts(tmp_path: Path) -> None:
    tree = {f"layer.{number}.a_long_name_for_a_weight": np.float32(number) for number in range(9000)}
    ckptcore.save(tmp_path / "c", tree)
    parts = [path.name for path in (tmp_path / "c").iterdir() if path.name.startswith("checkpoint.")]
    assert len(parts) > 1
    assert (tmp_path / "c" / "checkpoint.json").stat().st_size < 1 << 20
    assert same_value(ckptcore.load(tmp_path / "c"), tree)


def test_files_with_a_maximum_size_get_an_index(tmp_path: Path) -> None:
    tree = {f"w{number}": np.full(1000, number, np.float32) for number in range(10)}
    ckptcore.save(tmp_path / "c", tree, layout=ckptcore.SafetensorsLayout(max_file_bytes=9000))
    names = sorted(path.name for path in (tmp_path / "c").iterdir())
    assert names[1:] == [f"model-0000{n}-of-00005.safetensors" for n in range(1, 6)] + ["model.safetensors.index.json"]
    assert same_value(ckptcore.load(tmp_path / "c"), tree)
    assert ckptcore.verify(tmp_path / "c").objects == 7
