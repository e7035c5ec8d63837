"""Paths and skeletons, and their JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptcore.errors import CorruptCheckpointError
from ckptcore.model.tree import (
    LEAF,
    MAX_DEPTH,
    MAX_KEY_DEPTH,
    MAX_KEY_PARTS,
    Attribute,
    Node,
    Skeleton,
    format_path,
    leaf_count,
    leaf_paths,
    skeleton_from_json,
    skeleton_to_json,
)

PLAIN_KEYS = st.one_of(st.integers(), st.booleans(), st.text(max_size=4))
KEYS = st.one_of(
    PLAIN_KEYS,
    st.text(max_size=4).map(Attribute),
    st.recursive(PLAIN_KEYS, lambda parts: st.lists(parts, max_size=3).map(tuple), max_leaves=5),
)


ATTRIBUTES = st.dictionaries(
    st.text(max_size=4),
    st.recursive(
        st.none() | st.integers() | st.text(max_size=3),
        lambda below: st.dictionaries(st.text(max_size=3), below, max_size=2),
        max_leaves=4,
    ),
    min_size=1,
    max_size=2,
)


def _nodes(children: st.SearchStrategy[Skeleton]) -> st.SearchStrategy[Skeleton]:
    mapping = st.lists(st.tuples(KEYS, children), max_size=4, unique_by=lambda item: item[0]).flatmap(
        lambda items: st.builds(
            Node,
            st.sampled_from(["dict", "OrderedDict", "object"]),
            st.just(tuple(key for key, _ in items)),
            st.just(tuple(child for _, child in items)),
            st.none() | st.text(max_size=5),
            st.none() | ATTRIBUTES,
        )
    )
    sequence = st.lists(children, max_size=4).flatmap(
        lambda items: st.builds(
            Node,
            st.sampled_from(["list", "tuple"]),
            st.just(tuple(range(len(items)))),
            st.just(tuple(items)),
            st.none(),
            st.none(),
        )
    )
    return mapping | sequence


SKELETONS = st.recursive(st.just(LEAF), _nodes, max_leaves=12)


@given(SKELETONS)
def test_a_skeleton_has_an_exact_round_trip_through_json(skeleton: Skeleton) -> None:
    encoded = json.loads(json.dumps(skeleton_to_json(skeleton)))
    # Compare representations, because False == 0.
    assert repr(skeleton_from_json(encoded, leaf_count(skeleton))) == repr(skeleton)


@given(SKELETONS)
def test_every_leaf_has_a_distinct_path(skeleton: Skeleton) -> None:
    paths = list(leaf_paths(skeleton))
    assert len(paths) == leaf_count(skeleton)
    assert len({*paths}) == len(paths)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_any_json_is_accepted_as_a_skeleton_or_refused(encoded: Any) -> None:
    try:
        skeleton = skeleton_from_json(encoded, 10)
    except CorruptCheckpointError:
        return
    assert skeleton_from_json(json.loads(json.dumps(skeleton_to_json(skeleton))), 10) == skeleton


def test_a_list_with_more_items_than_leaves_is_refused() -> None:
    with pytest.raises(CorruptCheckpointError, match="cannot be read"):
        skeleton_from_json(["list", None, 1 << 40], 5)


def test_a_tree_that_is_too_deep_is_refused() -> None:
    encoded: Any = 0
    for _ in range(MAX_DEPTH + 2):
        encoded = ["list", None, [encoded]]
    with pytest.raises(CorruptCheckpointError, match="deeper"):
        skeleton_from_json(encoded, 1)


def _nested(depth: int) -> Any:
    key: Any = "a"
    for _ in range(depth):
        key = [key]
    return key


@pytest.mark.parametrize(
    ("key", "is_accepted"),
    [
        (_nested(MAX_KEY_DEPTH), True),
        (_nested(MAX_KEY_DEPTH + 1), False),
        ([0] * MAX_KEY_PARTS, True),
        ([0] * (MAX_KEY_PARTS + 1), False),
        ([None], False),
        ([1.5], False),
        ([{"attr": "a"}], False),
        ([{"utf8": "not base64"}], False),
    ],
    ids=["deep", "too deep", "long", "too long", "None", "float", "attribute", "no text"],
)
def test_keys_are_tuples_within_limits(key: Any, is_accepted: bool) -> None:
    if is_accepted:
        (parsed,) = skeleton_from_json(["dict", [key], 1], 1).keys  # type: ignore[union-attr]
        assert json.loads(json.dumps(parsed)) == key and isinstance(parsed, tuple)
    else:
        with pytest.raises(CorruptCheckpointError):
            skeleton_from_json(["dict", [key], 1], 1)


def test_true_and_one_are_duplicate_keys() -> None:
    with pytest.raises(CorruptCheckpointError, match="duplicate key"):
        skeleton_from_json(["dict", [True, 1], 2], 2)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ((), "<root>"),
        (("params", "w"), "params/w"),
        (("params", "a.b", 0, Attribute("mu")), "params['a.b'][0].mu"),
        ((Attribute("step"),), "step"),
        ((0, "0"), "[0]['0']"),
        ((True, ("a", 1, ("b",)), "x"), "[True][('a', 1, ('b',))]/x"),
    ],
)
def test_paths_are_formatted_like_python_expressions(path: tuple[Any, ...], text: str) -> None:
    assert format_path(path) == text


def test_keys_of_different_types_differ() -> None:
    assert len({1, "1", Attribute("1")}) == 3
