"""The union of the trees of all ranks: one tree that has every leaf of every rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptcore.builtin.host_leaves import leaf_handler
from ckptcore.errors import CorruptCheckpointError, TreeMismatchError
from ckptcore.model import ArrayRecord, ArraySpec, TreeMetadata, ValueRecord, format_path
from ckptcore.plugins import installed_plugins
from ckptcore.tree.flattening import flatten
from ckptcore.tree.merge import merge_trees


def _tree(value: Any, aliases: dict[int, int] | None = None) -> TreeMetadata:
    flat = flatten(value, installed_plugins())
    records = []
    for leaf in flat.leaves:
        handler = leaf_handler(type(leaf))
        assert handler is not None
        records.append(handler.describe(leaf))
    return TreeMetadata(flat.skeleton, tuple(records), aliases or {})


def _unite(*values: Any) -> TreeMetadata:
    trees = [value if isinstance(value, TreeMetadata) else _tree(value) for value in values]
    return merge_trees(trees, [[rank] for rank in range(len(trees))], size=len(trees))


def _paths(tree: TreeMetadata) -> list[str]:
    return [format_path(path) for path in tree.paths]


def test_mappings_are_merged_by_key() -> None:
    first, second = {"in": 1, "layers": {0: 1, 1: 1}, "step": 7}, {"layers": {2: 1, 1: 1}, "out": 1, "step": 7}
    tree = _unite(first, second)
    assert _paths(tree) == ["in", "layers[0]", "layers[1]", "layers[2]", "step", "out"]
    assert tree.held_by == {0: (0,), 1: (0,), 3: (1,), 5: (1,)}


def test_lists_and_tuples_keep_their_children() -> None:
    tree = _unite({"x": [{"a": 1}, ({"b": 2},)]}, {"x": [{}, ({"b": 2, "c": 3},)]})
    assert _paths(tree) == ["x[0]/a", "x[1][0]/b", "x[1][0]/c"] and tree.held_by == {0: (0,), 2: (1,)}


def test_many_ranks_that_have_the_same_tree() -> None:
    trees = [_tree({"a": 1, "c": 3}), _tree({"b": 2, "c": 3})]
    tree = merge_trees(trees, [[0, 3], [1, 2]], size=4)
    assert tree.held_by == {0: (0, 3), 2: (1, 2)}


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        ({"step": 3}, {"step": 4}, "step: int 3 on rank 0; int 4 on rank 1"),
        ({"x": 1}, {"x": 1.0}, "x: int 1 on rank 0; float 1.0 on rank 1"),
        ({"x": 0.0}, {"x": -0.0}, "x: float 0.0 on rank 0; float -0.0 on rank 1"),
        ({"x": None}, {"x": {}}, "x: a leaf on rank 0; dict on rank 1"),
        ({"x": [1]}, {"x": [1, 2]}, "x: list of 1 on rank 0; list of 2 on rank 1"),
        ({"x": [1]}, {"x": (1,)}, "x: list on rank 0; tuple on rank 1"),
        ({"w": np.zeros(2)}, {"w": np.zeros(3)}, "w: float64[2] on rank 0; float64[3] on rank 1"),
        ({"w": np.zeros(2)}, {"w": np.zeros(2, "f4")}, "w: float64[2] on rank 0; float32[2] on rank 1"),
        ({"w": np.zeros(())}, {"w": np.float64(0)}, "w: float64[] on rank 0; float64[] (numpy.scalar) on rank 1"),
    ],
)
def test_differences_are_listed_with_their_ranks(first: Any, second: Any, told: str) -> None:
    with pytest.raises(TreeMismatchError, match="PerProcess") as caught:
        _unite(first, second)
    assert caught.value.differences == (told,)


def test_containers_that_differ_are_listed_also_above_tied_arrays() -> None:
    tied = _tree({"x": {"a": np.ones(2), "b": np.ones(2)}}, {1: 0})
    with pytest.raises(TreeMismatchError) as caught:
        _unite(tied, {"x": [1]})
    assert caught.value.differences == ("x: dict on rank 0; list on rank 1",)


def test_arrays_with_other_cuts_differ() -> None:
    def cut(at: int) -> TreeMetadata:
        return TreeMetadata(_tree({"w": 1}).skeleton, (ArrayRecord(ArraySpec((4,), "int8"), cuts=((at,),)),))

    with pytest.raises(
        TreeMismatchError, match=r"int8\[4\] cut at \(\(1,\),\) on ranks 0, 2; int8\[4\] cut at .* on rank 1"
    ):
        merge_trees([cut(1), cut(2)], [[0, 2], [1]], size=3)


def test_an_error_has_every_difference_but_its_message_shows_only_some() -> None:
    with pytest.raises(TreeMismatchError, match="and 30 more") as caught:
        _unite({str(key): 1 for key in range(50)}, {str(key): 2 for key in range(50)})
    assert len(caught.value.differences) == 50


def _arrays(*names: str) -> dict[str, Any]:
    return {name: np.zeros(2) for name in names}


@pytest.mark.parametrize(
    ("trees", "expected"),
    [
        # One rank has both arrays tied, and the other has only one of them: they stay tied.
        ([_tree(_arrays("a", "b"), {1: 0}), _tree(_arrays("b"))], {1: 0}),
        # One rank has the arrays tied, and the other has them separate.
        ([_tree(_arrays("a", "b"), {1: 0}), _tree(_arrays("a", "b"))], {}),
        # Two arrays are tied to the same third array, but no rank has all three.
        ([_tree(_arrays("a", "b"), {1: 0}), _tree(_arrays("b", "c"), {1: 0})], {1: 0, 2: 0}),
        ([_tree(_arrays("a", "b"), {1: 0}), _tree(_arrays("b", "c"), {1: 0}), _tree(_arrays("a", "c"))], {}),
        # The leaves have another order.
        ([_tree(_arrays("a", "b", "c"), {2: 0}), _tree(_arrays("c", "a"), {1: 0})], {2: 0}),
    ],
)
def test_arrays_stay_tied_unless_a_rank_has_them_separate(trees: list[TreeMetadata], expected: dict[int, int]) -> None:
    tree = _unite(*trees)
    assert tree.aliases == expected
    assert TreeMetadata.from_json(tree.to_json() | {"held_by": _as_json(tree)}).aliases == expected


def _knowing(size: int, *known: tuple[TreeMetadata, list[int]]) -> TreeMetadata:
    trees, elsewhere = zip(*known, strict=True)
    return merge_trees(trees, [[rank] for rank in range(size)], size=size, remote_leaves=elsewhere)


def test_ranks_without_a_shard_of_an_array_do_not_hold_it() -> None:
    tree = _tree(_arrays("a", "b", "c"))
    united = _knowing(3, (tree, [1]), (tree, [0, 1]), (tree, []))
    assert united.held_by == {0: (0, 2), 1: (2,)}


def test_ranks_without_shards_do_not_separate_tied_arrays() -> None:
    tied, apart = _tree(_arrays("a", "b"), {1: 0}), _tree(_arrays("a", "b"))
    assert _knowing(2, (apart, [0, 1]), (tied, [])).aliases == {1: 0}
    assert _knowing(2, (apart, [1]), (tied, [])).aliases == {1: 0}
    assert _knowing(2, (apart, []), (tied, [])).aliases == {}
    assert _knowing(2, (tied, [0, 1]), (apart, [])).aliases == {}


def test_an_array_that_no_rank_holds_is_refused() -> None:
    tree = _tree(_arrays("a", "b"))
    with pytest.raises(TreeMismatchError) as caught:
        _knowing(2, (tree, [0, 1]), (tree, [1]))
    assert caught.value.differences == ("b: an array that only other processes hold on ranks 0-1",)


def _as_json(tree: TreeMetadata) -> list[Any]:
    return [[list(ranks), [leaf]] for leaf, ranks in tree.held_by.items()]


@settings(max_examples=20)
@given(st.lists(st.dictionaries(st.sampled_from("abcde"), st.dictionaries(st.integers(0, 3), st.just(1))), min_size=1))
def test_a_union_has_the_leaves_of_all_trees_and_their_ranks(values: list[dict[str, dict[int, int]]]) -> None:
    tree = _unite(*values)
    expected = {(key, number) for value in values for key, of in value.items() for number in of}
    assert set(tree.paths) == expected and len(tree.paths) == len(expected)
    for leaf, (key, number) in enumerate(tree.paths):
        having = tuple([rank for rank, value in enumerate(values) if number in value.get(str(key), {})])
        assert tree.held_by.get(leaf, tuple(range(len(values)))) == having


@pytest.mark.parametrize(
    "held_by", [[[[1, 0], [0]]], [[[], [0]]], [[[0], [9]]], [[[0], [0, 0]]], [[[-1], [0]]], 7, [[0, 0]], [[[0]]]]
)
def test_hostile_ranks_are_refused(held_by: Any) -> None:
    encoded = TreeMetadata(_tree({"a": 1}).skeleton, (ValueRecord("int", 1),)).to_json() | {"held_by": held_by}
    with pytest.raises(CorruptCheckpointError):
        TreeMetadata.from_json(encoded)
