"""Tree metadata as columns of JSON."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import replace
from typing import Any

import pytest

from ckptcore.errors import CorruptCheckpointError, UnsupportedLeafError
from ckptcore.model.arrays import ArraySpec
from ckptcore.model.metadata import ArrayRecord, TreeMetadata, ValueRecord
from ckptcore.model.tree import JSON, LEAF, Attribute, Node

TREE = TreeMetadata(
    Node(
        "dict",
        ("w", 3, "c", "v"),
        (LEAF, LEAF, Node("object", (Attribute("mu"), Attribute("nu")), (LEAF, LEAF), "optax.State"), LEAF),
    ),
    (
        ArrayRecord(ArraySpec((4, 3), "bfloat16"), cuts=((2,), ())),
        ValueRecord("int", 5),
        ArrayRecord(ArraySpec((), "uint32"), "jax.key", notes={"impl": "threefry2x32"}),
        ArrayRecord(ArraySpec((4, 3), "bfloat16")),
        ValueRecord("str", "é\ud800"),
    ),
    {3: 0},
)


def test_tree_metadata_has_an_exact_round_trip_through_json() -> None:
    again = TreeMetadata.from_json(json.loads(json.dumps(TREE.to_json())))
    assert again == TREE
    assert again.paths == TREE.paths
    assert again.nbytes == 4 * 3 * 2 + 4


SHARDED: dict[str, JSON] = {"sharding": {"type": "NamedSharding", "mesh": {"data": 4}, "spec": ["data", None]}}

NOTED = TreeMetadata(
    Node("dict", ("a", "b", "c", "d", "e", "f", "g"), (LEAF,) * 7),
    (
        ArrayRecord(ArraySpec((4, 3), "float32"), notes=SHARDED),
        ValueRecord("int", 1),
        ArrayRecord(ArraySpec((4, 5), "float32"), cuts=((2,), ()), notes=copy.deepcopy(SHARDED)),
        ArrayRecord(ArraySpec((), "float32")),
        ArrayRecord(ArraySpec((), "float32"), notes={"weak_type": True}),
        ArrayRecord(ArraySpec((2,), "uint32"), "jax.key", notes={"impl": "threefry2x32"}),
        ArrayRecord(ArraySpec((4, 3), "int8"), notes=SHARDED),
    ),
)


def test_notes_that_arrays_share_are_stored_once() -> None:
    encoded: Any = json.loads(json.dumps(NOTED.to_json()))
    assert encoded["notes"] == [SHARDED, {"weak_type": True}, {"impl": "threefry2x32"}]
    assert encoded["note"] == [0, 0, None, 1, 2, 0]
    assert encoded["extras"] == {"2": {"cuts": [[2], []]}, "5": {"kind": "jax.key"}}
    again = TreeMetadata.from_json(encoded)
    assert again == NOTED
    notes = [record.notes for record in again.leaves if isinstance(record, ArrayRecord)]
    assert notes[0] is notes[1] is notes[5]


def test_a_tree_without_notes_has_no_table_of_them() -> None:
    plain = [leaf._replace(notes={}) if isinstance(leaf, ArrayRecord) else leaf for leaf in TREE.leaves]
    assert not {"notes", "note"} & set(replace(TREE, leaves=tuple(plain)).to_json())


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("note", [0, 0, None, 1, None]),  # too short
        ("note", [0, 0, None, 1, None, 0, 0]),
        ("note", [0, 0, None, 3, None, 0]),  # the table has three rows
        ("note", [0, 0, None, -1, None, 0]),
        ("note", [0, 0, None, True, None, 0]),
        ("note", None),
        ("notes", {"0": {}}),
        ("notes", [1, 2]),
        ("notes", None),
    ],
)
def test_a_damaged_table_of_notes_is_refused(member: str, value: Any) -> None:
    encoded: Any = json.loads(json.dumps(NOTED.to_json()))
    encoded[member] = value
    with pytest.raises(CorruptCheckpointError):
        TreeMetadata.from_json(encoded)


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("dtype", True),
        ("dtype", 0.0),
        ("dtype", "0"),
        ("shape", "12"),
        ("shape", [1.0]),
        ("shape", [True]),
        ("shape", [-1]),
    ],
)
def test_numbers_of_equal_arrays_are_checked_separately(member: str, value: Any) -> None:
    """A cache of known arrays must not accept equal numbers of another type, such as True for 1."""
    tree = TreeMetadata(Node("list", (0, 1), (LEAF, LEAF)), (ArrayRecord(ArraySpec((1,), "int8")),) * 2)
    encoded: Any = json.loads(json.dumps(tree.to_json()))
    assert TreeMetadata.from_json(encoded) == tree
    encoded[member][1] = value
    with pytest.raises(CorruptCheckpointError):
        TreeMetadata.from_json(encoded)


def _places(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    places = [place] if place else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        places.extend(_places(child, (*place, key)))
    return places


@pytest.mark.parametrize("tree", [TREE, NOTED])
def test_any_other_value_in_any_place_is_refused_or_harmless(tree: TreeMetadata) -> None:
    encoded: Any = json.loads(json.dumps(tree.to_json()))
    strange: list[Any] = [None, True, -1, 1 << 70, 1.5, "x", [], {}, [[]], [1, 2, 3], {"a": 1}, ["list", None, 9]]
    chooser = random.Random(0)
    refused = 0
    for place in _places(encoded):
        for value in chooser.sample(strange, 6):
            changed = copy.deepcopy(encoded)
            holder = changed
            for key in place[:-1]:
                holder = holder[key]
            holder[place[-1]] = value
            try:
                TreeMetadata.from_json(changed)
            except (CorruptCheckpointError, UnsupportedLeafError):
                refused += 1
    assert refused > 100


@pytest.mark.parametrize("aliases", [[[0, 3]], [[1, 0]], [[3, 3]], [[3, 2]], [[9, 0]]])
def test_an_alias_must_refer_to_an_earlier_equal_array(aliases: list[list[int]]) -> None:
    encoded: Any = json.loads(json.dumps(TREE.to_json()))
    encoded["aliases"] = aliases
    with pytest.raises(CorruptCheckpointError):
        TreeMetadata.from_json(encoded)
