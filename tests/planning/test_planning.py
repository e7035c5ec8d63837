"""Planning, which is pure: coverage of arrays, ownership of shards, and names of leaves."""

from __future__ import annotations

import itertools
import json
import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptcore.errors import CorruptCheckpointError, NameCollisionError
from ckptcore.model.arrays import ArraySpec, Box, Shard
from ckptcore.model.metadata import ArrayRecord, TreeMetadata, ValueRecord
from ckptcore.model.transfer import IntegerColumn, Receipt, WriteItem
from ckptcore.model.tree import LEAF, Attribute, Node, TreePath
from ckptcore.planning import (
    ChunkColumns,
    ChunkTable,
    boxes_of_range,
    check_coverage,
    cuts_of,
    leaf_names,
    plan_read,
    plan_write,
    uncovered,
)
from ckptcore.planning.partition import covers_exactly

SHAPE = (5, 4)
RANGES = st.tuples(st.integers(0, 5), st.integers(0, 5)).map(sorted)


def _box(rows: list[int], columns: list[int]) -> Box:
    return Box((rows[0], min(columns[0], 4)), (rows[1], min(columns[1], 4)))


@given(st.lists(st.builds(_box, RANGES, RANGES), max_size=6))
def test_coverage_agrees_with_counting(boxes: list[Box]) -> None:
    counts = np.zeros(SHAPE, int)
    for box in boxes:
        counts[box.slices] += 1
    assert (uncovered(ArraySpec(SHAPE, "float32"), boxes) is None) == bool((counts == 1).all())


@given(st.sets(st.integers(1, 4)), st.sets(st.integers(1, 3)), st.randoms())
def test_any_grid_covers_the_array(rows: set[int], columns: set[int], chooser: object) -> None:
    first, second = [0, *sorted(rows), 5], [0, *sorted(columns), 4]
    boxes = [Box((a, c), (b, d)) for a, b in itertools.pairwise(first) for c, d in itertools.pairwise(second)]
    chooser.shuffle(boxes)  # type: ignore[attr-defined]  # a random.Random
    assert uncovered(ArraySpec(SHAPE, "float32"), boxes) is None
    if len(boxes) > 1:
        assert uncovered(ArraySpec(SHAPE, "float32"), boxes[1:]) is not None
        assert cuts_of(SHAPE, boxes) == (tuple(sorted(rows)), tuple(sorted(columns)))


def _tiling(chooser: random.Random, shape: tuple[int, ...], count: int) -> list[Box]:
    """Return boxes that cover an array, by cutting it repeatedly at random positions."""
    boxes = [Box.whole(shape)]
    while len(boxes) < count:
        box = boxes.pop(chooser.choice([number for number, box in enumerate(boxes) if box.size > 1]))
        axis = max(range(len(shape)), key=lambda axis: (box.shape[axis], chooser.random()))
        cut = chooser.randrange(box.start[axis] + 1, box.stop[axis])
        boxes += [box.band(axis, box.start[axis], cut), box.band(axis, cut, box.stop[axis])]
    return boxes


@pytest.mark.parametrize("damage", ["none", "missing", "twice", "moved"])
@given(st.randoms(use_true_random=False), st.sampled_from([(400,), (30, 20), (8, 9, 10)]), st.integers(17, 60))
def test_coverage_of_many_boxes_agrees_with_counting(
    damage: str, chooser: random.Random, shape: tuple[int, ...], count: int
) -> None:
    boxes = _tiling(chooser, shape, count)
    if damage == "missing":
        boxes.pop()
    elif damage == "twice":
        boxes[0] = boxes[1]
    elif damage == "moved":
        box, axis = boxes[0], chooser.randrange(len(shape))
        start = max(box.start[axis] - 1, 0)
        boxes[0] = box.band(axis, start, start + box.shape[axis])
    counts = np.zeros(shape, int)
    for box in boxes:
        counts[box.slices] += 1
    reason = uncovered(ArraySpec(shape, "int8"), boxes)
    assert (reason is None) == bool((counts == 1).all())
    starts, stops = (np.array([getattr(box, bound) for box in boxes]) for bound in ("start", "stop"))
    assert covers_exactly(shape, starts, stops) == (reason is None)
    if reason is not None and reason.startswith("the element"):
        assert counts[tuple(json.loads(reason.removeprefix("the element ").removesuffix(" is in no box")))] == 0


def test_coverage_of_very_many_axes() -> None:
    """Each box halves the rest along the next axis. The time of the check must not be exponential in the axes."""
    axes = 60
    boxes = [
        Box((0,) * axis + (1,) + (0,) * (axes - axis - 1), (1,) * axis + (2,) * (axes - axis)) for axis in range(axes)
    ]
    boxes.append(Box((0,) * axes, (1,) * axes))
    spec = ArraySpec((2,) * axes, "int8")
    assert uncovered(spec, boxes) is None
    assert "overlap" in (uncovered(spec, [*boxes, boxes[5]]) or "")
    assert "are in no box" in (uncovered(spec, boxes[1:]) or "")


def test_coverage_of_an_array_beyond_64_bits() -> None:
    bounds = np.zeros((20, 1), np.int64), np.ones((20, 1), np.int64)
    assert not covers_exactly((1 << 70,), *bounds)
    assert "are in no box" in (uncovered(ArraySpec((1 << 70,), "int8"), [Box((0,), (1,))] * 20) or "")


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


def test_only_replica_0_is_written_and_no_alias() -> None:
    shards = {0: [Shard(Box((0,), (2,)), 0, 2), Shard(Box((2,), (4,)), 1, 2)], 2: [Shard(Box((0,), (4,)))]}
    plan = plan_write(TREE, shards, rank=0, size=2, save_id="0" * 16)
    assert plan.items == (WriteItem(0, ArraySpec((4,), "int8"), (Box((0,), (2,)),)),)


def test_an_alias_is_read_where_it_is_stored() -> None:
    plan = plan_read(TREE, [(2, [Box((0,), (4,))]), (0, [Box((1,), (2,))])])
    assert [item.leaf for item in plan.items] == [0, 0]


def test_the_error_for_a_gap_names_the_array() -> None:
    receipt = Receipt(0, (WriteItem(0, ArraySpec((4,), "int8"), (Box((0,), (2,)),)),), None, ())
    with pytest.raises(CorruptCheckpointError, match=r"a \(int8\[4\]\) is incomplete: .*: 2 of 4 elements"):
        check_coverage(TREE, [receipt])


KEYS = st.one_of(
    st.sampled_from([0, 1, "0", "1", "a", "a.b", "b", "a\\", "\\", "", "'0'", ".", "\\@a", "__metadata__"]),
    st.sampled_from(["a", "b", "0"]).map(Attribute),
)


@given(st.sets(st.lists(KEYS, max_size=3).map(tuple), max_size=8))
def test_names_of_different_leaves_are_different(paths: set[TreePath]) -> None:
    numbered = dict(enumerate(sorted(paths, key=repr)))
    try:
        names = leaf_names(numbered, reserved=("__metadata__",))
    except NameCollisionError:
        return
    assert len(set(names.values())) == len(numbered)
    assert "__metadata__" not in names.values()


def test_names_are_those_of_hugging_face_unless_they_collide() -> None:
    assert leaf_names({0: ("encoder", "layer", 0, "w"), 1: ("encoder.bias",)}) == {
        0: "encoder.layer.0.w",
        1: "encoder.bias",
    }
    names = leaf_names({0: ("a.b",), 1: ("a", "b"), 2: ("c",)})
    assert names == {0: "a\\.b", 1: "a.b", 2: "c"}
    assert leaf_names({0: (0,), 1: ("0",)}) == {0: "0", 1: "'0'"}


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (2, 3, 5), (4, 1, 2, 3)])
def test_the_boxes_of_a_range_have_its_elements_in_order(shape: tuple[int, ...]) -> None:
    array = np.arange(math.prod(shape)).reshape(shape)
    for start, stop in itertools.combinations(range(array.size + 1), 2):
        boxes = list(boxes_of_range(shape, start, stop))
        parts = [array[tuple(map(slice, box.start, box.stop))].ravel() for box in boxes]
        assert np.concatenate(parts).tolist() == list(range(start, stop))
        assert len(boxes) <= max(1, 2 * len(shape) - 1)
    assert list(boxes_of_range((3, 4), 5, 5)) == []


def test_merged_chunks_are_those_of_all_processes_without_some_leaves() -> None:
    shapes = ((), (4,), (2, 3))
    records = tuple(ArrayRecord(ArraySpec(shape, "float32")) for shape in shapes)
    tree = TreeMetadata(Node("list", (0, 1, 2), (LEAF, LEAF, LEAF)), records)
    first, second = ChunkColumns(), ChunkColumns()
    first.add(2, "left-out", 0, Box((0, 0), (2, 3)))
    first.add(1, "a", 8, Box((0,), (2,)))
    first.add(0, "b", 16, Box((), ()))
    second.add(1, "c", 24, Box((2,), (4,)))
    merged = ChunkColumns.merged([first.to_json(), second.to_json()], tree, {2: 0})
    assert merged["files"] == ["a", "b", "c"] and json.loads(json.dumps(merged)) == merged
    table = ChunkTable(tree, merged)
    chunks = [
        (chunk.key, chunk.offset, chunk.box) for leaf in (0, 1) for chunk in table.boxes(leaf, Box.whole(shapes[leaf]))
    ]
    assert chunks == [("b", 16, Box((), ())), ("a", 8, Box((0,), (2,))), ("c", 24, Box((2,), (4,)))]
    assert ChunkColumns.merged([], tree) == {"files": [], "leaf": [], "file": [], "offset": [], "box": []}


@pytest.mark.parametrize("without", [(), (1,)])
@pytest.mark.parametrize(
    "changes",
    [
        # The lengths of the columns of two processes are wrong, and cancel each other.
        [{"file": [0], "offset": [0, 8]}, {"file": [0, 1, 1]}],
        [{"file": [-1, 0]}],
        [{"file": [0, 2]}],
        [{"offset": [0.9, 8.7]}],
        [{"offset": [True, False]}],
        [{"offset": ["1", "2"]}],
        [{"offset": [0, 1 << 63]}],
        [{"leaf": [0, 7]}],
        [{"leaf": [0, -1]}],
        [{"box": [0, 2, 2]}],
    ],
)
def test_inconsistent_states_of_processes_are_not_merged(
    changes: list[dict[str, Any]], without: tuple[int, ...]
) -> None:
    record = ArrayRecord(ArraySpec((4,), "float32"))
    tree = TreeMetadata(Node("list", (0, 1), (LEAF, LEAF)), (record, record))
    state: dict[str, Any] = {
        "files": ["a", "b"], "leaf": [0, 0], "file": [0, 1], "offset": [0, 0], "box": [0, 2, 2, 4],
    }  # fmt: skip
    columns = {name: IntegerColumn(np.array(column)) for name, column in state.items() if name != "files"}
    assert ChunkColumns.merged([{**state, **columns}], tree, without) == state, "as another process sends it"
    with pytest.raises((TypeError, ValueError, IndexError, OverflowError)):
        ChunkColumns.merged([{**state, **change} for change in changes], tree, without)
