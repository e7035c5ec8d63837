"""`Matching(keys="text")` matches our checkpoints by the text of keys, like those of other software."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import ckptcore
from ckptcore import AbstractArray, Matching
from ckptcore.errors import TreeMismatchError

TEXT = Matching(keys="text")


class Pair(NamedTuple):
    first: Any
    second: Any


class Nothing(NamedTuple):
    """A container without leaves."""


@pytest.mark.parametrize(
    ("stored", "requested"),
    [
        ({1: 2.5}, {"1": 0.0}),
        ({"1": 2.5}, {1: 0.0}),
        (Pair(1, 2), {"first": 0, "second": 0}),
        ({"first": 1, "second": 2}, Pair(0, 0)),
        ((1, 2), [0, 0]),
        ({"a": None, "b": 1}, {"a": Nothing(), "b": 0}),
        ({"a": Nothing(), "b": 1}, {"a": None, "b": 0}),
        ({"n": np.float32(2.5)}, {"n": 0.0}),
        ({"n": 3}, {"n": AbstractArray((), "int32")}),
    ],
)
def test_text_matching_builds_the_requested_containers(tmp_path: Path, stored: Any, requested: Any) -> None:
    ckptcore.save(tmp_path / "c", stored)
    if stored != {"first": 1, "second": 2} and stored != Pair(1, 2):  # attributes match names without this option
        with pytest.raises(TreeMismatchError):
            ckptcore.load(tmp_path / "c", requested, matching=Matching(values="error"))
    loaded = ckptcore.load(tmp_path / "c", requested, matching=TEXT)
    assert type(loaded) is type(requested)
    assert [float(leaf) for leaf in _leaves(loaded)] == [float(leaf) for leaf in _leaves(stored)]


def test_keys_without_a_match_are_still_an_error(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"a": 1, "b": 2})
    with pytest.raises(TreeMismatchError) as caught:
        ckptcore.load(tmp_path / "c", {"a": 1, "c": 2}, matching=TEXT)
    assert len(caught.value.differences) == 2


def _leaves(tree: Any) -> list[Any]:
    if tree is None:
        return []
    if isinstance(tree, dict):
        return [leaf for child in tree.values() for leaf in _leaves(child)]
    if isinstance(tree, list | tuple):
        return [leaf for child in tree for leaf in _leaves(child)]
    return [tree]
