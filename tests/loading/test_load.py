"""Loads of abstract trees: results and errors."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from ckptcore_testing.hostile_json import sealed

import ckptcore
from ckptcore import PLACEHOLDER, AbstractArray, Matching, ShardedArray
from ckptcore.builtin.sharded_arrays import ArrayShard
from ckptcore.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    TargetUndefinedError,
    TreeMismatchError,
    UnsupportedLeafError,
    UnsupportedVersionError,
)
from ckptcore.model import Box
from ckptcore.runtime import runtime_of


class Pair(NamedTuple):
    mu: Any
    nu: Any


@dataclasses.dataclass
class State:
    step: int
    pair: Pair


@pytest.fixture
def location(tmp_path: Path) -> Path:
    tree = {
        "a": np.arange(6.0).reshape(2, 3),
        "b": [np.ones(4, np.int32), 7, "text"],
        "s": State(3, Pair(np.zeros(2), np.ones(2))),
    }
    ckptcore.save(tmp_path / "c", tree)
    return tmp_path / "c"


def abstract() -> dict[str, Any]:
    pair = Pair(AbstractArray((2,), "float64"), AbstractArray((2,), "float64"))
    return {"a": AbstractArray((2, 3), "float64"), "b": [np.empty(4, np.int32), 0, ""], "s": State(0, pair)}


def test_the_result_has_the_structure_of_the_abstract_tree(location: Path) -> None:
    loaded = ckptcore.load(location, abstract())
    assert type(loaded["s"]) is State and type(loaded["s"].pair) is Pair
    assert loaded["s"].step == 3 and loaded["s"].pair.nu.tolist() == [1, 1]
    assert loaded["b"][1:] == [7, "text"]


def test_keys_are_in_the_order_of_the_abstract_tree(location: Path) -> None:
    asked = abstract()
    loaded = ckptcore.load(location, {name: asked[name] for name in ("s", "b", "a")})
    assert list(loaded) == ["s", "b", "a"]


def test_a_placeholder_skips_a_leaf_or_a_subtree(location: Path) -> None:
    loaded = ckptcore.load(location, {**abstract(), "a": PLACEHOLDER, "s": PLACEHOLDER})
    assert loaded["a"] is PLACEHOLDER and loaded["s"] is PLACEHOLDER and loaded["b"][1] == 7
    assert ckptcore.load(location, PLACEHOLDER) is PLACEHOLDER


def test_every_difference_is_listed_at_once(location: Path) -> None:
    asked = abstract()
    asked["a"] = AbstractArray((3, 2), "float64")
    asked["b"] = [AbstractArray((4,), "int64"), 1.5, ""]
    asked["steps"] = 0
    asked["s"] = State(0, Pair(AbstractArray((2,), "float64"), 5))
    with pytest.raises(TreeMismatchError) as caught:
        ckptcore.load(location, asked, matching=Matching(values="error"))
    assert caught.value.differences == (
        "missing: steps is not stored",
        "a: shape: float64[3, 2] is requested, float64[2, 3] is stored",
        "b[0]: dtype: int64[4] is requested, int32[4] is stored; casts are not allowed by default",
        "b[1]: kind: float is requested, int is stored",
        "s.pair.nu: kind: int is requested, array float64[2] is stored",
    )
    assert str(location) in str(caught.value)


def test_stored_leaves_that_are_not_requested_are_differences(location: Path) -> None:
    asked = abstract()
    del asked["b"]
    asked["pair"] = 1
    with pytest.raises(TreeMismatchError, match=r"unexpected: b\[0\] is stored") as caught:
        ckptcore.load(location, asked)
    assert len(caught.value.differences) == 4


def test_near_names_are_suggested(location: Path) -> None:
    ckptcore.save(location.parent / "n", {"encoder": np.ones(1)})
    with pytest.raises(TreeMismatchError, match="did you mean encoder"):
        ckptcore.load(location.parent / "n", {"encodr": np.ones(1)})


def test_int_keys_do_not_match_text_keys(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"0": np.ones(1)})
    with pytest.raises(TreeMismatchError, match=r"key: \[0\] is requested, \['0'\] is stored"):
        ckptcore.load(tmp_path / "c", {0: np.ones(1)})


def test_attributes_match_the_keys_that_a_plain_load_returns(location: Path) -> None:
    loaded = ckptcore.load(location)
    assert loaded["s"]["pair"]["nu"].tolist() == [1, 1]
    again = ckptcore.load(location, loaded)
    assert again["s"] == {"step": 3, "pair": again["s"]["pair"]}


def test_load_into_fills_memory_in_place(location: Path) -> None:
    target = {"a": np.zeros((2, 3)), "b": [np.zeros(4, np.int32), 0, ""], "s": State(0, Pair(np.ones(2), np.zeros(2)))}
    before, count, state, mu = target["a"], target["b"][0], target["s"], target["s"].pair.mu  # type: ignore[index,attr-defined]  # the dict has values of several types
    assert ckptcore.load_into(location, target) is target
    assert target["a"] is before and before.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert count.tolist() == [1, 1, 1, 1] and target["b"][1:] == [7, "text"]
    assert mu.tolist() == [0, 0] and target["s"].pair.nu.tolist() == [1, 1]
    assert state.pair.mu is mu  # type: ignore[attr-defined]  # the value is a State


def test_load_into_fills_strided_arrays(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"w": np.arange(6.0).reshape(2, 3)})
    base = np.zeros((3, 4))
    ckptcore.load_into(tmp_path / "c", {"w": base.T[1:3]})
    assert base[:, 1:3].tolist() == [[0, 3], [1, 4], [2, 5]] and base[:, 0].sum() == 0


def test_load_into_fills_every_tied_name(tmp_path: Path) -> None:
    weights = np.arange(4.0)
    ckptcore.save(tmp_path / "c", {"in": weights, "out": weights})
    target = {"in": np.zeros(4), "out": np.zeros(4)}
    ckptcore.load_into(tmp_path / "c", target)
    assert target["in"].tolist() == target["out"].tolist() == [0, 1, 2, 3]
    shared = np.zeros(4)
    ckptcore.load_into(tmp_path / "c", {"in": shared, "out": shared})
    assert shared.tolist() == [0, 1, 2, 3]


def test_a_mismatch_leaves_the_target_as_it_was(location: Path) -> None:
    target = {"a": np.zeros((2, 3))}
    with pytest.raises(TreeMismatchError):
        ckptcore.load_into(location, target)
    assert not target["a"].any()


def test_the_error_of_a_partial_load_into_says_that_the_target_changed(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"a": np.ones(1 << 18), "b": np.ones(1 << 18)})
    file = tmp_path / "c" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    with pytest.raises(TargetUndefinedError, match="mix of old and loaded") as caught:
        ckptcore.load_into(tmp_path / "c", {"a": np.zeros(1 << 18), "b": np.zeros(1 << 18)})
    assert isinstance(caught.value.__cause__, CorruptCheckpointError)


def test_a_read_only_target_is_refused(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", np.ones(3))
    frozen = np.zeros(3)
    frozen.flags.writeable = False
    with pytest.raises(TreeMismatchError, match="<root> of the target cannot be filled in place"):
        ckptcore.load_into(tmp_path / "c", frozen)


def test_a_value_in_a_tuple_is_refused_before_the_target_changes(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", (np.ones(3), 4, [5]))
    array = np.zeros(3)
    with pytest.raises(TreeMismatchError, match=r"\[1\] of the target cannot be filled"):
        ckptcore.load_into(tmp_path / "c", (array, 0, [0]))
    assert not array.any()
    target = {"in": (array, 0, [0])}
    ckptcore.save(tmp_path / "d", {"in": (np.ones(3), 4, [5])})
    ckptcore.load_into(tmp_path / "d", target)
    assert target["in"][1:] == (4, [5]) and target["in"][0] is array and array.all()


def test_a_target_that_ties_separately_stored_arrays_is_refused(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"a": np.zeros(3), "b": np.ones(3)})
    shared = np.full(3, 7.0)
    with pytest.raises(TreeMismatchError, match="a and b are one array in the target, but separate in"):
        ckptcore.load_into(tmp_path / "c", {"a": shared, "b": shared})
    assert (shared == 7).all()


@pytest.mark.parametrize(
    "parts",
    [
        lambda x: (x[:3], x[1:4]),
        lambda x: (x[2:5], x[:3]),
        lambda x: (x[1:6:2], x[::-2][:3]),
        lambda x: (x[:3], x[1:4].view(np.int64).view(np.float64)),
        lambda x: (np.lib.stride_tricks.as_strided(x, (3,), (0,)), np.zeros(3)),
        lambda x: (np.lib.stride_tricks.as_strided(x, (2, 3), (8, 8))[1], x[3:6]),
    ],
)
def test_a_target_whose_arrays_overlap_is_refused(parts: Any, tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"a": np.zeros(3), "b": np.ones(3)})
    memory = np.full(8, 7.0)
    first, second = parts(memory)
    with pytest.raises(TreeMismatchError, match="that overlap in the target|elements that share memory"):
        ckptcore.load_into(tmp_path / "c", {"a": first, "b": second})
    assert (memory == 7).all()


@pytest.mark.parametrize("parts", [lambda x: (x[::2], x[1::2]), lambda x: (x[4:], x[3::-1]), lambda x: (x[:4], x[4:])])
def test_arrays_of_a_target_may_interleave(parts: Any, tmp_path: Path) -> None:
    saved = {"a": np.arange(4.0), "b": -np.arange(4.0)}
    ckptcore.save(tmp_path / "c", saved)
    first, second = parts(np.full(8, 7.0))
    ckptcore.load_into(tmp_path / "c", {"a": first, "b": second})
    assert first.tolist() == saved["a"].tolist() and second.tolist() == saved["b"].tolist()


def test_an_array_whose_elements_share_memory_is_refused(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", np.arange(6.0).reshape(2, 3))
    memory = np.full(8, 7.0)
    with pytest.raises(TreeMismatchError, match="elements that share memory"):
        ckptcore.load_into(tmp_path / "c", np.lib.stride_tricks.as_strided(memory, (2, 3), (8, 8)))
    assert (memory == 7).all()


def test_shards_of_one_array_that_share_memory_are_refused(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", np.arange(8.0))
    memory = np.full(6, 7.0)
    shards = [ArrayShard(Box((0,), (4,)), memory[:4]), ArrayShard(Box((4,), (8,)), memory[2:])]
    with pytest.raises(TreeMismatchError, match="elements that share memory"):
        ckptcore.load_into(tmp_path / "c", ShardedArray((8,), np.float64, shards))
    assert (memory == 7).all()


def test_the_error_names_an_abstract_leaf_of_an_unsupported_type(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"a": np.zeros((1, 2))})
    with pytest.raises(UnsupportedLeafError, match=r"^a: a numpy.matrix has more data than its elements"):
        ckptcore.load(tmp_path / "c", {"a": np.zeros((1, 2)).view(np.matrix)})


def test_tied_arrays_in_two_byte_orders_of_one_memory_are_refused(tmp_path: Path) -> None:
    tied = np.arange(3.0)
    ckptcore.save(tmp_path / "c", {"a": tied, "b": tied})
    memory = np.full(3, 7.0)
    with pytest.raises(TreeMismatchError, match="a and b are arrays that overlap"):
        ckptcore.load_into(tmp_path / "c", {"a": memory, "b": memory.view(memory.dtype.newbyteorder())})
    assert (memory == 7).all()


def test_tied_arrays_that_overlap_in_the_target_are_refused(tmp_path: Path) -> None:
    tied = np.arange(3.0)
    ckptcore.save(tmp_path / "c", {"a": tied, "b": tied})
    memory = np.full(8, 7.0)
    with pytest.raises(TreeMismatchError, match="a and b are arrays that overlap"):
        ckptcore.load_into(tmp_path / "c", {"a": memory[:3], "b": memory[1:4]})
    assert (memory == 7).all()


def test_a_container_at_two_paths_of_a_target_needs_equal_stored_values(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"a": {"n": 1, "x": [2]}, "b": {"n": 1, "x": [3]}})
    shared: dict[str, Any] = {"n": 0, "x": [0]}
    with pytest.raises(TreeMismatchError, match=r"a/x\[0\] and b/x\[0\] are one object"):
        ckptcore.load_into(tmp_path / "c", {"a": shared, "b": shared})
    assert shared == {"n": 0, "x": [0]}
    ckptcore.save(tmp_path / "d", {"a": {"n": 1, "x": [2]}, "b": {"n": 1, "x": [2]}})
    ckptcore.load_into(tmp_path / "d", {"a": shared, "b": shared})
    assert shared == {"n": 1, "x": [2]}


def test_requesting_a_plain_array_returns_a_plain_array(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"s": np.float32(2), "t": "x" * 20_000})
    asked = {"s": np.zeros((), np.float32), "t": AbstractArray((20_000,), "uint8")}
    loaded = ckptcore.load(tmp_path / "c", asked)
    assert type(loaded["s"]) is np.ndarray and loaded["t"].tobytes() == b"x" * 20_000
    assert type(ckptcore.load(tmp_path / "c")["s"]) is np.float32


def test_a_placeholder_skips_a_subtree_of_a_foreign_checkpoint(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"a": {"w": np.ones(2)}, "b": {"w": np.zeros(2), "v": np.zeros(2)}})
    file = tmp_path / "c" / "model.safetensors"
    loaded = ckptcore.load(file, {"a": {"w": np.empty(2)}, "b": PLACEHOLDER})
    assert loaded["a"]["w"].tolist() == [1, 1] and loaded["b"] is PLACEHOLDER


def test_a_root_without_objects_is_refused_before_memory_is_allocated(tmp_path: Path) -> None:
    from ckptcore.commit.root import Root
    from ckptcore.commit.root_json import encode_root
    from ckptcore.model import ArrayRecord, ArraySpec, TreeMetadata
    from ckptcore.model.tree import LEAF

    tree = TreeMetadata(LEAF, (ArrayRecord(ArraySpec((1 << 46,), "uint8")),))
    state: Any = {"files": ["model.safetensors"], "leaf": [0], "file": [0], "offset": [0]}
    root = Root(
        save_id="0" * 16,
        created="2026-01-01T00:00:00+00:00",
        writer={},
        layout="safetensors",
        state=state,
        tree=tree,
        objects={},
    )
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "model.safetensors").write_bytes(bytes(100))
    (tmp_path / "c" / "checkpoint.json").write_bytes(encode_root(root)[0])
    with pytest.raises(CorruptCheckpointError, match="all objects together have 0"):
        ckptcore.load(tmp_path / "c")


def test_the_nearest_handler_of_a_context_is_used(tmp_path: Path) -> None:
    from ckptcore.builtin.host_leaves import HostArrayHandler

    class Base(np.ndarray[Any, Any]):
        pass

    class Sub(Base):
        pass

    base, sub = HostArrayHandler(), HostArrayHandler()
    context = ckptcore.Context(
        plugins=ckptcore.context.PluginOptions(handlers={np.ndarray: HostArrayHandler(), Base: base, Sub: sub})
    )
    assert runtime_of(context).registry.dispatch(np.zeros(2).view(Sub)).leaf is sub
    assert runtime_of(context).registry.dispatch(np.zeros(2).view(Base)).leaf is base
    assert hash(context) != hash(ckptcore.Context())


def test_damage_names_file_array_and_range(tmp_path: Path) -> None:
    tree = {"first": np.ones(300_000), "second": np.zeros(300_000)}
    ckptcore.save(tmp_path / "c", tree)
    file = tmp_path / "c" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[4_000_000] ^= 0x10
    file.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors.*second"):
        ckptcore.load(tmp_path / "c")
    report = ckptcore.verify(tmp_path / "c")
    (problem,) = report.problems
    assert not report.ok and problem.key == "model.safetensors" and problem.arrays == ("second",)
    assert problem.start is not None and problem.stop is not None and problem.start <= 4_000_000 < problem.stop
    assert problem.stop - problem.start <= 1 << 20
    loaded = ckptcore.load(tmp_path / "c", {"first": tree["first"], "second": PLACEHOLDER})
    assert (loaded["first"] == 1).all()  # undamaged arrays can be loaded
    unchecked = ckptcore.load(tmp_path / "c", context=ckptcore.Context(io=ckptcore.context.IOOptions(verify=False)))
    assert (unchecked["second"] != 0).sum() == 1


@pytest.mark.parametrize("load", [ckptcore.load, ckptcore.load_into])
def test_a_failed_load_keeps_no_target_in_memory(load: Callable[..., object], tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"w": np.ones(1000)})
    data = tmp_path / "c" / "model.safetensors"
    data.write_bytes(data.read_bytes()[:-8] + b"damaged!")
    target = {"w": np.zeros(1000)}
    held = weakref.ref(target["w"])
    gc.collect()
    gc.disable()  # so that a reference cycle would keep the target alive
    try:
        with pytest.raises(CheckpointError) as failed:
            load(tmp_path / "c", target)
        del failed, target
        assert held() is None
    finally:
        gc.enable()


def test_a_missing_checkpoint_is_an_error(tmp_path: Path) -> None:
    for location in (tmp_path / "nothing", tmp_path, "memory://loading/nothing"):
        with pytest.raises(CheckpointNotFoundError):
            ckptcore.load(location)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("x")
    with pytest.raises(CheckpointNotFoundError, match="not a checkpoint that an installed layout reads"):
        ckptcore.load(tmp_path / "other")


def test_a_newer_format_version_is_refused(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {})
    document = {"format": "ckptcore", "version": 2, "state": "committed"}
    (tmp_path / "c" / "checkpoint.json").write_bytes(sealed(document))
    with pytest.raises(UnsupportedVersionError, match="upgrade"):
        ckptcore.load(tmp_path / "c")


def test_copying_to_another_layout_keeps_the_tree(location: Path) -> None:
    told: list[tuple[int, int]] = []
    ckptcore.copy(
        location, location.parent / "d", layout="safetensors", progress=lambda done, total: told.append((done, total))
    )
    first, second = ckptcore.metadata(location), ckptcore.metadata(location.parent / "d")
    assert second.tree == first.tree and second.save_id != first.save_id
    assert ckptcore.load(location.parent / "d")["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert told and told[-1][0] == told[-1][1]
