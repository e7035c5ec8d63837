"""Copies of checkpoints of any tree and layout, between any two storages, load with the saved values."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, Final

import hypothesis
import pytest
from ckptcore_testing import assert_same_tree
from ckptcore_testing.locations import new_place, objects_at
from ckptcore_testing.strategies import trees
from hypothesis import strategies as st

import ckptcore
from ckptcore.errors import UnsupportedKeyError, UnsupportedLeafError

_LAYOUTS: Final = ("safetensors", "ocdbt", "zarr", "zarr3", "dcp")
_PAIRS: Final = list(itertools.product(["file", "memory"], repeat=2))


@pytest.mark.parametrize("layout", _LAYOUTS)
@hypothesis.settings(max_examples=6, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(tree=trees(), pair=st.sampled_from(_PAIRS), several=st.booleans())
def test_copy_loads_like_original(layout: str, tree: Any, pair: tuple[str, str], several: bool, tmp_path: Path) -> None:
    here, there = (new_place(scheme, tmp_path) for scheme in pair)
    context = ckptcore.Context(durability="none")
    try:
        if several:
            ckptcore.save_checkpointables(here, {"a": {"x": tree}, "b": {"y": 1}}, layout=layout, context=context)
        else:
            ckptcore.save(here, tree, layout=layout, context=context)
    except (UnsupportedLeafError, UnsupportedKeyError):
        hypothesis.reject()
    ckptcore.copy(here, there, verify="read-back", context=context)
    assert objects_at(there) == objects_at(here)
    assert ckptcore.verify(there).ok
    load = ckptcore.load_checkpointables if several else ckptcore.load
    assert_same_tree(load(there), load(here))
