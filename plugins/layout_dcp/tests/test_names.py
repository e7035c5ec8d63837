"""Names of entries equal those of torch, for every tree that torch supports."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from typing import Any

import pytest
import torch
from ckptcore_dcp.names import TreeEntries, tree_entries, tree_of_names
from ckptcore_dcp.pickles import write_pickle
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict

from ckptcore.builtin.host_leaves import HostValueHandler
from ckptcore.errors import CorruptCheckpointError, NameCollisionError
from ckptcore.model import (
    LEAF,
    ArrayRecord,
    ArraySpec,
    Attribute,
    LeafRecord,
    Node,
    Skeleton,
    TreeMetadata,
    ValueRecord,
)

_ARRAY = ArrayRecord(ArraySpec((2,), "float32"))
_TENSOR = torch.zeros(2)


def _tree(value: object) -> TreeMetadata:
    leaves: list[LeafRecord] = []

    def visit(value: Any) -> Skeleton:
        if isinstance(value, dict):
            kind = "OrderedDict" if isinstance(value, OrderedDict) else "dict"
            return Node(kind, tuple(value), tuple([visit(child) for child in value.values()]))
        if isinstance(value, list | tuple):
            kind = "list" if isinstance(value, list) else "tuple"
            return Node(kind, tuple(range(len(value))), tuple([visit(child) for child in value]))
        leaves.append(_ARRAY if isinstance(value, torch.Tensor) else HostValueHandler().describe(value))
        return LEAF

    return TreeMetadata(visit(value), tuple(leaves))


def _values(names: TreeEntries) -> dict[str, Any]:
    """Return the pickled values, read with torch's own unpickler."""
    return {value.name: pickle.loads(write_pickle(value.value, protocol=2)) for value in names.values}


_PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 80), 1 << 80),
    st.floats(allow_nan=False),
    st.complex_numbers(allow_nan=False),
    st.text(max_size=3),
    st.binary(max_size=3),
)
_KEYS = st.text("ab01", min_size=1, max_size=2) | st.integers(0, 3)


def _containers(children: st.SearchStrategy[Any], tuples: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    mappings = st.dictionaries(_KEYS, children, max_size=3)
    return st.one_of(
        mappings,
        mappings.map(OrderedDict),
        st.lists(children, max_size=3),
        st.lists(tuples, max_size=3).map(tuple),
    )


_VALUES = st.recursive(_PLAIN, lambda children: _containers(children, children), max_leaves=6)
_TREES = st.recursive(_VALUES | st.just(_TENSOR), lambda children: _containers(children, _VALUES), max_leaves=12)


@given(st.dictionaries(st.text("ab01.", min_size=1, max_size=3), _TREES, max_size=4))
def test_names_and_values_equal_those_of_torch(state: dict[str, Any]) -> None:
    try:
        flat, paths = flatten_state_dict(state)
    except ValueError:  # torch rejects duplicate names
        return
    names = tree_entries(_tree(state))
    assert list(names.paths.items()) == list(paths.items())
    assert {array.name for array in names.arrays} == {name for name, value in flat.items() if value is _TENSOR}
    expected = {name: value for name, value in flat.items() if value is not _TENSOR}
    values = _values(names)
    assert values == expected and str(values) == str(expected)  # the text distinguishes 1 from True, and 0.0 from -0.0


@given(st.dictionaries(st.text("ab", min_size=1, max_size=2), _TREES, max_size=4))
def test_every_leaf_is_listed_once(state: dict[str, Any]) -> None:
    tree = _tree(state)
    names = tree_entries(tree)
    leaves = [array.leaf for array in names.arrays] + [leaf for value in names.values for leaf in value.leaves]
    assert sorted(leaves) == list(range(len(tree.leaves)))
    assert all(isinstance(tree.leaves[array.leaf], ArrayRecord) for array in names.arrays)


@given(st.dictionaries(st.text("ab", min_size=1, max_size=2), _TREES, max_size=4))
def test_names_give_the_tree_that_torch_rebuilds(state: dict[str, Any]) -> None:
    try:
        flat, paths = flatten_state_dict(state)
        expected = unflatten_state_dict(dict(flat), paths)
    except (ValueError, TypeError, AttributeError, LookupError, RuntimeError):
        return  # the mapping has both 1 and "1" as keys, so torch stores values in a tensor, or in a value
    if any(path != other and other[: len(path)] == path for path in paths.values() for other in paths.values()):
        return  # ckptcore rejects it, while torch loses one of the two entries without an error
    subtrees = {name: _tree(value) for name, value in flat.items()}
    skeleton, order = tree_of_names({name: tree.skeleton for name, tree in subtrees.items()}, paths)
    assert sorted(order) == sorted(flat)
    leaves = [leaf for name in order for leaf in subtrees[name].leaves]
    wanted = _tree(expected)
    if "None" not in str(expected):  # torch has None in place of an empty mapping in a list
        assert (skeleton, leaves) == (wanted.skeleton, list(wanted.leaves))


def test_tuples_with_arrays_have_an_entry_for_each_item() -> None:
    names = tree_entries(_tree({"a": (_TENSOR, 3, ({"b": _TENSOR}, [1, 2])), "c": [(1, _TENSOR)]}))
    assert dict(names.paths) == {
        "a.0": ("a", 0),
        "a.1": ("a", 1),
        "a.2.0.b": ("a", 2, 0, "b"),
        "a.2.1": ("a", 2, 1),
        "c.0.0": ("c", 0, 0),
        "c.0.1": ("c", 0, 1),
    }
    assert _values(names) == {"a.1": 3, "a.2.1": [1, 2], "c.0.0": 1}


def test_objects_are_stored_as_mappings() -> None:
    node = Node("object", (Attribute("mu"), Attribute("nu")), (LEAF, LEAF), "optax.Adam")
    tree = TreeMetadata(
        Node("dict", ("o", "t"), (node, Node("tuple", (0,), (node,)))), (_ARRAY, *[ValueRecord("int", 1)] * 3)
    )
    names = tree_entries(tree)
    assert dict(names.paths) == {"o.mu": ("o", "mu"), "o.nu": ("o", "nu"), "t": ("t",)}
    assert _values(names) == {"o.nu": 1, "t": ({"mu": 1, "nu": 1},)}


def test_colliding_names_are_escaped() -> None:
    names = tree_entries(_tree({"a.b": _TENSOR, "a": {"b": 1}, "x": {1: _TENSOR, "1": _TENSOR}}))
    assert len(names.paths) == 4 and names.paths["a.b"] == ("a", "b")
    assert all(name == ".".join(map(str, path)) for name, path in names.paths.items())
    assert [names.paths[array.name] for array in names.arrays] == [("a\\.b",), ("x", "1"), ("x.'1'",)]


def test_a_field_and_a_key_with_equal_names_are_refused() -> None:
    node = Node("tuple", (0,), (Node("object", (Attribute("a"), "a"), (LEAF, LEAF)),))
    with pytest.raises(NameCollisionError, match="a field and a key of one name"):
        tree_entries(TreeMetadata(Node("dict", ("t",), (node,)), (ValueRecord("int", 1),) * 2))


def test_trees_other_than_dicts_get_names_too() -> None:
    assert dict(tree_entries(_tree([_TENSOR, (1, 2)])).paths) == {"0": ("0",), "1": ("1",)}
    assert dict(tree_entries(_tree(_TENSOR)).paths) == {"array": ("array",)}
    assert dict(tree_entries(_tree(3)).paths) == {"value": ("value",)}
    assert dict(tree_entries(_tree({})).paths) == {}


def test_tied_arrays_are_listed_under_each_name() -> None:
    tree = TreeMetadata(Node("dict", ("a", "b"), (LEAF, LEAF)), (_ARRAY, _ARRAY), {1: 0})
    assert [(array.leaf, array.name) for array in tree_entries(tree).arrays] == [(0, "a"), (1, "b")]


@pytest.mark.parametrize(
    "record", [ValueRecord("int", "x"), ValueRecord("bool", 1), ValueRecord("bytes", "?"), ValueRecord("float", None)]
)
def test_invalid_value_records_are_refused(record: ValueRecord) -> None:
    with pytest.raises(CorruptCheckpointError, match="cannot be read"):
        tree_entries(TreeMetadata(Node("dict", ("a",), (LEAF,)), (record,)))


def test_values_of_other_plugins_are_stored_as_json() -> None:
    tree = TreeMetadata(Node("dict", ("a",), (LEAF,)), (ValueRecord("torch.thing", {"b": [1, None]}),))
    assert _values(tree_entries(tree)) == {"a": {"b": [1, None]}}


def test_contradictory_paths_are_ignored() -> None:
    entries = {"a": LEAF, "a.0": LEAF, "b": Node("list", (0,), (LEAF,))}
    flat = Node("dict", ("a", "a.0", "b"), (LEAF, LEAF, entries["b"]))
    for paths in (
        {"a": ("a",), "a.0": ("a", 0)},
        {"a": ("x",), "a.0": ("x",)},
        {"a": ("x", 0), "a.0": ("x", "y")},
        None,
    ):
        assert tree_of_names(entries, paths) == (flat, ["a", "a.0", "b"])


def test_lists_with_gaps_become_small_dicts() -> None:
    skeleton, order = tree_of_names(
        {"a": LEAF, "b": LEAF, "c": LEAF}, {"a": ("l", 1 << 60), "b": ("l", 1), "c": ("m", 0)}
    )
    inner = Node("dict", (1, 1 << 60), (LEAF, LEAF)), Node("list", (0,), (LEAF,))
    assert (skeleton, order) == (Node("dict", ("l", "m"), inner), ["b", "a", "c"])
