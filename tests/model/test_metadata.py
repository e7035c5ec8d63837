"""The tree's records as columns of JSON."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest

from ckptcore.errors import CorruptCheckpointError, UnsupportedLeafError
from ckptcore.model.arrays import ArraySpec
from ckptcore.model.metadata import ArrayRecord, TreeMetadata, ValueRecord
from ckptcore.model.tree import LEAF, Attribute, Node

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


def test_a_tree_comes_back_from_json() -> None:
    again = TreeMetadata.from_json(json.loads(json.dumps(TREE.to_json())))
    assert again == TREE
    assert again.paths == TREE.paths
    assert again.nbytes == 4 * 3 * 2 + 4


def _places(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [place] if place else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        found.extend(_places(child, (*place, key)))
    return found


def test_anything_else_in_any_place_is_refused_or_harmless() -> None:
    encoded: Any = json.loads(json.dumps(TREE.to_json()))
    strange: list[Any] = [None, True, -1, 1 << 70, 1.5, "x", [], {}, [[]], [1, 2, 3], {"a": 1}, ["list", None, 9]]
    chooser = random.Random(0)
    refused = 0
    for place in _places(encoded):
        for found in chooser.sample(strange, 6):
            changed = copy.deepcopy(encoded)
            holder = changed
            for key in place[:-1]:
                holder = holder[key]
            holder[place[-1]] = found
            try:
                TreeMetadata.from_json(changed)
            except (CorruptCheckpointError, UnsupportedLeafError):
                refused += 1
    assert refused > 100


@pytest.mark.parametrize("aliases", [[[0, 3]], [[1, 0]], [[3, 3]], [[3, 2]], [[9, 0]]])
def test_an_alias_must_be_of_an_earlier_equal_array(aliases: list[list[int]]) -> None:
    encoded: Any = json.loads(json.dumps(TREE.to_json()))
    encoded["aliases"] = aliases
    with pytest.raises(CorruptCheckpointError):
        TreeMetadata.from_json(encoded)
