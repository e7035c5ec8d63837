"""Planning is pure: coverage, ownership and names."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptcore.errors import CorruptCheckpointError, NameCollisionError
from ckptcore.model.arrays import ArraySpec, Box, Shard
from ckptcore.model.metadata import ArrayRecord, TreeMetadata, ValueRecord
from ckptcore.model.transfer import Receipt, WriteItem
from ckptcore.model.tree import LEAF, Attribute, Node, TreePath
from ckptcore.planning import check_coverage, cuts_of, leaf_names, plan_read, plan_write, uncovered

SHAPE = (5, 4)
RANGES = st.tuples(st.integers(0, 5), st.integers(0, 5)).map(sorted)


def _box(rows: list[int], columns: list[int]) -> Box:
    return Box((rows[0], min(columns[0], 4)), (rows[1], min(columns[1], 4)))


@given(st.lists(st.builds(_box, RANGES, RANGES), max_size=6))
def test_coverage_is_found_as_by_counting(boxes: list[Box]) -> None:
    counts = np.zeros(SHAPE, int)
    for box in boxes:
        counts[box.slices] += 1
    assert (uncovered(ArraySpec(SHAPE, "float32"), boxes) is None) == bool((counts == 1).all())


@given(st.sets(st.integers(1, 4)), st.sets(st.integers(1, 3)), st.randoms())
def test_any_grid_covers(rows: set[int], columns: set[int], chooser: object) -> None:
    first, second = [0, *sorted(rows), 5], [0, *sorted(columns), 4]
    boxes = [Box((a, c), (b, d)) for a, b in itertools.pairwise(first) for c, d in itertools.pairwise(second)]
    chooser.shuffle(boxes)  # type: ignore[attr-defined]  # a random.Random
    assert uncovered(ArraySpec(SHAPE, "float32"), boxes) is None
    if len(boxes) > 1:
        assert uncovered(ArraySpec(SHAPE, "float32"), boxes[1:]) is not None
        assert cuts_of(SHAPE, boxes) == (tuple(sorted(rows)), tuple(sorted(columns)))


def test_boxes_outside_and_of_other_rank_are_found() -> None:
    assert "outside" in (uncovered(ArraySpec((2,), "int8"), [Box((0,), (3,))]) or "")
    assert "outside" in (uncovered(ArraySpec((2,), "int8"), [Box((0, 0), (2, 1))]) or "")
    assert uncovered(ArraySpec((), "int8"), []) is not None
    assert uncovered(ArraySpec((0, 3), "int8"), []) is None


TREE = TreeMetadata(
    Node("dict", ("a", "b", "c"), (LEAF, LEAF, LEAF)),
    (ArrayRecord(ArraySpec((4,), "int8")), ValueRecord("int", 1), ArrayRecord(ArraySpec((4,), "int8"))),
    {2: 0},
)


def test_only_replica_0_is_written_and_aliases_are_not() -> None:
    shards = {0: [Shard(Box((0,), (2,)), 0, 2), Shard(Box((2,), (4,)), 1, 2)], 2: [Shard(Box((0,), (4,)))]}
    plan = plan_write(TREE, shards, rank=0, size=2, save_id="0" * 16)
    assert plan.items == (WriteItem(0, ArraySpec((4,), "int8"), (Box((0,), (2,)),)),)


def test_an_alias_is_read_where_it_is_stored() -> None:
    plan = plan_read(TREE, [(2, [Box((0,), (4,))]), (0, [Box((1,), (2,))])])
    assert [item.leaf for item in plan.items] == [0, 0]


def test_a_gap_names_the_array() -> None:
    receipt = Receipt(0, (WriteItem(0, ArraySpec((4,), "int8"), (Box((0,), (2,)),)),), None, ())
    with pytest.raises(CorruptCheckpointError, match=r"a \(int8\[4\]\) is incomplete: .*: 2 of 4 elements"):
        check_coverage(TREE, [receipt])


KEYS = st.one_of(
    st.sampled_from([0, 1, "0", "1", "a", "a.b", "b", "a\\", "\\", "", "'0'", ".", "\\@a", "__metadata__"]),
    st.sampled_from(["a", "b", "0"]).map(Attribute),
)


@given(st.sets(st.lists(KEYS, max_size=3).map(tuple), max_size=8))
def test_names_are_never_one_for_the_other(paths: set[TreePath]) -> None:
    numbered = dict(enumerate(sorted(paths, key=repr)))
    try:
        names = leaf_names(numbered, reserved=("__metadata__",))
    except NameCollisionError:
        return
    assert len(set(names.values())) == len(numbered)
    assert "__metadata__" not in names.values()


def test_names_are_what_hugging_face_expects_unless_they_collide() -> None:
    assert leaf_names({0: ("encoder", "layer", 0, "w"), 1: ("encoder.bias",)}) == {
        0: "encoder.layer.0.w",
        1: "encoder.bias",
    }
    names = leaf_names({0: ("a.b",), 1: ("a", "b"), 2: ("c",)})
    assert names == {0: "a\\.b", 1: "a.b", 2: "c"}
    assert leaf_names({0: (0,), 1: ("0",)}) == {0: "0", 1: "'0'"}
