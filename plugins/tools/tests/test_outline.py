"""Outlines of trees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from ckptcore_tools.outline import Outline, outline_of

import ckptcore


def outline(state: Any, tmp_path: Path) -> Outline:
    ckptcore.save(tmp_path / "checkpoint", state)
    return outline_of(ckptcore.metadata(tmp_path / "checkpoint").tree)


def drawn(outline: Outline) -> list[str]:
    """Return the rows as lines, indented."""
    rows = zip(outline.depths, outline.names, outline.leaves, outline.parameters, strict=True)
    return [f"{'  ' * depth}{name} {leaf} {parameters}" for depth, name, leaf, parameters in rows]


def test_keys_with_dots_are_folded(tmp_path: Path) -> None:
    ones = np.ones(3, np.float32)
    names = ["layers.0.weight", "layers.0.bias", "head.weight", "layers.1.weight", "layers.1.bias", "scale"]
    assert drawn(outline(dict.fromkeys(names, 0) | {name: ones.copy() for name in names}, tmp_path)) == [
        "<root> -1 18",
        "  layers -1 12",
        "    0 -1 6",
        "      weight 0 3",
        "      bias 1 3",
        "    1 -1 6",
        "      weight 3 3",
        "      bias 4 3",
        "  head.weight 2 3",
        "  scale 5 3",
    ]


def test_containers_lists_and_objects(tmp_path: Path) -> None:
    tree = outline({"a": [np.ones(2), {"x.y": 1, "x.z": 2}], "b": {}, 3: "text", "": None}, tmp_path)
    assert drawn(tree) == [
        "<root> -1 2",
        "  a -1 2",
        "    [0] 0 2",
        "    [1] -1 0",
        "      x -1 0",
        "        y 1 0",
        "        z 2 0",
        "  b -1 0",
        "  [3] 3 0",
        "  '' 4 0",
    ]
    assert tree.kinds == {0: "dict", 1: "list", 3: "dict", 7: "dict"}
    assert [tree.names[row] for row in tree.children(1)] == ["[0]", "[1]"]
    assert list(tree.children(7)) == []


def test_a_leaf_and_a_group_with_the_same_name(tmp_path: Path) -> None:
    assert drawn(outline({"a": 1, "a.b": 2, "a.c": 3}, tmp_path)) == [
        "<root> -1 0",
        "  a 0 0",
        "  a -1 0",
        "    b 1 0",
        "    c 2 0",
    ]


def test_names_with_empty_or_too_many_parts_are_not_split(tmp_path: Path) -> None:
    names = [".a", "a.", "a..b", "...", "..", "x." * 40 + "y"]
    assert sorted(outline(dict.fromkeys(names, 1), tmp_path).names[1:]) == sorted(names)


def test_tied_arrays_count_once(tmp_path: Path) -> None:
    array = np.ones((2, 5), np.float32)
    tree = outline({"a": array, "b": array}, tmp_path)
    assert (tree.arrays[0], tree.parameters[0], tree.nbytes[0]) == (1, 10, 40)


def test_the_whole_tree_is_one_leaf(tmp_path: Path) -> None:
    tree = outline(np.ones(4, np.int8), tmp_path)
    assert drawn(tree) == ["<root> 0 4"]
    assert tree.kinds == {}


def test_an_empty_tree(tmp_path: Path) -> None:
    assert drawn(outline({}, tmp_path)) == ["<root> -1 0"]


def test_rows_down_to_a_depth(tmp_path: Path) -> None:
    tree = outline({"a": {"b": 1, "c.d": 2, "c.e": 3}, "f": 4}, tmp_path)
    names = [[tree.names[row] for row in tree.rows(depth)] for depth in (0, 1, 2, None)]
    assert names == [
        ["<root>"], ["<root>", "a", "f"], ["<root>", "a", "b", "c", "f"], ["<root>", "a", "b", "c", "d", "e", "f"],
    ]  # fmt: skip


def test_some_leaves_with_the_rows_above_them(tmp_path: Path) -> None:
    state = {"a": {"x": np.ones(2), "y": 1}, "b": [np.ones(3, np.int8)], "c.d": np.ones(4), "c.e": np.ones(5), "f": {}}
    tree = outline(state, tmp_path)
    some = tree.only({0, 2, 4})
    assert drawn(some) == [
        "<root> -1 10",
        "  a -1 2",
        "    x 0 2",
        "  b -1 3",
        "    [0] 2 3",
        "  c -1 5",
        "    e 4 5",
    ]
    assert (some.kinds, some.nbytes[0], some.arrays[0]) == ({0: "dict", 1: "dict", 3: "list"}, 59, 3)
    assert [some.names[row] for row in some.children(0)] == ["a", "b", "c"]
    assert tree.only(range(6)).stops[0] == len(tree) - 1  # the empty container is not included
    assert drawn(tree.only(())) == ["<root> -1 0"]
