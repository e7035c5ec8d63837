"""Round trips of any tree of built-in containers and host leaves, through every installed layout."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from ckptcore_testing import SaveLoadMatrixTests, assert_same_tree, strategies
from hypothesis import HealthCheck, assume, given, settings

import ckptcore
from ckptcore.errors import NameCollisionError, UnsupportedKeyError, UnsupportedLeafError

LAYOUTS = list(SaveLoadMatrixTests().layouts())
QUICK = ckptcore.Context(durability="none")


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(suppress_health_check=list(HealthCheck))
@given(tree=strategies.trees())
def test_any_tree_has_an_exact_round_trip(layout: str, tree: Any) -> None:
    location = f"memory://any-tree-{uuid.uuid4().hex}/checkpoint"
    try:
        ckptcore.save(location, tree, layout=layout, context=QUICK)
    except (NameCollisionError, UnsupportedKeyError, UnsupportedLeafError):
        assume(False)  # the layout refused the tree before it wrote anything
    try:
        assert_same_tree(ckptcore.load(location, tree), tree)
        assert_same_tree(ckptcore.load(location, ckptcore.abstract(tree)), tree)
        assert_same_tree(ckptcore.load(location, ckptcore.metadata(location).abstract), ckptcore.load(location))
        assert ckptcore.verify(location).ok
    finally:
        ckptcore.delete(location)


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(suppress_health_check=list(HealthCheck))
@given(tree=strategies.trees())
def test_an_asynchronous_save_of_any_tree_has_an_exact_round_trip(layout: str, tree: Any) -> None:
    location = f"memory://any-tree-{uuid.uuid4().hex}/checkpoint"
    try:
        ckptcore.save_async(location, tree, layout=layout, context=QUICK).result(timeout=120)
    except (NameCollisionError, UnsupportedKeyError, UnsupportedLeafError):
        assume(False)
    try:
        assert_same_tree(ckptcore.load_async(location, tree).result(timeout=120), tree)
    finally:
        ckptcore.delete(location)
