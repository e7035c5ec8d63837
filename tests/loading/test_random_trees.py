"""Random trees of all containers and leaves: complete reports, exact selections and exact transforms."""

from __future__ import annotations

import zlib
from typing import Any

import pytest
from ckptcore_testing import assert_same_tree
from ckptcore_testing.strategies import trees
from ckptcore_transforms import Cast, Drop, IfPresent, Rename, Transform, inverse
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import ckptcore
from ckptcore import PLACEHOLDER, select
from ckptcore.errors import CheckpointError, TransformError, TreeMismatchError
from ckptcore.results import LoadReport

LOCATION = "memory://loading/random-trees"
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


def saved(data: st.DataObject) -> tuple[Any, LoadReport]:
    """Save a random tree. Return it as loaded without options, and the report of the load."""
    try:
        ckptcore.save(LOCATION, data.draw(trees()), overwrite="non-atomic")
    except CheckpointError:  # a key that the layout cannot store
        assume(False)
    report = LoadReport()
    return ckptcore.load(LOCATION, report=report), report


@settings(deadline=None, suppress_health_check=SLOW)
@given(data=st.data())
def test_a_report_accounts_for_each_leaf(data: st.DataObject) -> None:
    plain, report = saved(data)
    count = len(ckptcore.metadata(LOCATION).tree.leaves)
    assert len(set(report.restored)) == len(report.restored) == count and not report.ignored
    abstract = ckptcore.metadata(LOCATION).abstract
    assert_same_tree(ckptcore.load(LOCATION, abstract, report=report), plain)
    assert len(report.restored) == count
    salt = data.draw(st.binary(max_size=2))
    some = select.where(lambda path, leaf: zlib.crc32(path.encode("utf-8", "surrogatepass") + salt) % 2 == 0)
    alone, asked = LoadReport(), LoadReport()
    try:
        ckptcore.load(LOCATION, select=some, report=alone)
    except TreeMismatchError as error:
        assert "nothing is selected" in str(error)
        return
    ckptcore.load(LOCATION, abstract, select=some, report=asked)
    assert sorted([*alone.restored, *alone.ignored]) == sorted(set(alone.restored) | set(alone.ignored))
    assert len(alone.restored) + len(alone.ignored) == len(asked.restored) + len(asked.skipped) == count
    assert len(asked.restored) == len(alone.restored)
    skipped = ckptcore.load(LOCATION, PLACEHOLDER, report=asked)
    assert skipped is PLACEHOLDER and not asked.restored and not asked.bytes_read


@settings(deadline=None, suppress_health_check=SLOW)
@given(data=st.data())
def test_transforms_keep_other_leaves(data: st.DataObject) -> None:
    plain, _ = saved(data)
    nothing: list[Transform] = [IfPresent(Drop("no such leaf")), IfPresent(Cast("**/no such leaf", "int8"))]
    assert_same_tree(ckptcore.load(LOCATION, transforms=nothing), plain)
    assume(all(map("/".join, [map(str, path) for path in ckptcore.metadata(LOCATION).tree.paths])))
    into: list[Transform] = [Rename("{path...}", "top/{path}")]
    try:
        moved = ckptcore.load(LOCATION, transforms=into)
    except TransformError as error:  # the tree has no leaves, or is a leaf
        assert "matches nothing" in str(error)
        return
    if isinstance(moved, dict) and isinstance(plain, dict) and all(isinstance(key, str) for key in plain):
        assert_same_tree(moved["top"], plain)
    assert_same_tree(ckptcore.load(LOCATION, transforms=[*into, *inverse(into)]), plain)


def test_empty_containers_keep_their_positions() -> None:
    state = {"a": {}, "b": 1, "c": [{}, 2, ()], "d": {"x": {}, "y": 3}}
    ckptcore.save(LOCATION, state, overwrite="non-atomic")
    loaded = ckptcore.load(LOCATION, transforms=[Rename("b", "e")])
    assert list(loaded) == ["a", "e", "c", "d"] and list(loaded["d"]) == ["x", "y"] and loaded["c"] == [{}, 2, ()]


@pytest.mark.parametrize("layout", ["dcp", "zarr3", "ocdbt"])
def test_random_trees_in_other_layouts(layout: str, tmp_path: Any) -> None:
    state = {"a": [{}, (1, 2.5)], 3: {"b/c": "text", "": None}, "t": ({"x": {}}, [True])}
    ckptcore.save(tmp_path / "c", state, layout=layout)
    report = LoadReport()
    loaded = ckptcore.load(tmp_path / "c", transforms=[Rename("t/{rest...}", "u/{rest}")], report=report)
    assert_same_tree(loaded, {"a": state["a"], 3: state[3], "u": state["t"]})
    assert report.restored == ["a[1][0]", "a[1][1]", "[3]['b/c']", "[3]['']", "u[1][0]"]
