"""Placeholders in containers: an update changes the same container of its base.

It never loses or adds other children.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_testing.locations import new_place, objects_at
from ckptcore_testing.trees import same_value

import ckptcore
from ckptcore import PLACEHOLDER
from ckptcore.errors import TreeMismatchError


@pytest.fixture
def run(tmp_path: Path) -> str:
    return new_place("memory", tmp_path)


@pytest.mark.parametrize(
    "state", [np.arange(3.0), (np.ones(2), 1), [], {}, {"a": {}}, 7, {"e": {}, "l": [], "a": np.ones(2)}]
)
def test_a_placeholder_for_the_whole_state_keeps_it(state: Any, run: str) -> None:
    ckptcore.save(f"{run}/1", state)
    ckptcore.save(f"{run}/2", PLACEHOLDER, strategy=ckptcore.Update(f"{run}/1"))
    assert same_value(ckptcore.load(f"{run}/2"), state)
    ckptcore.save(f"{run}/3", {}, strategy=ckptcore.Update(f"{run}/2"))
    assert same_value(ckptcore.load(f"{run}/3"), state)


def test_a_placeholder_for_a_container_without_leaves(run: str) -> None:
    state: dict[str, Any] = {"e": {}, "l": [(), []], "a": np.ones(2)}
    ckptcore.save(f"{run}/1", state)
    update = {"e": PLACEHOLDER, "l": [PLACEHOLDER, PLACEHOLDER], "a": np.zeros(1)}
    ckptcore.save(f"{run}/2", update, strategy=ckptcore.Update(f"{run}/1"))
    assert same_value(ckptcore.load(f"{run}/2"), {**state, "a": np.zeros(1)})


@pytest.mark.parametrize(
    "given",
    [
        (PLACEHOLDER, 5),
        (PLACEHOLDER,),
        [PLACEHOLDER, 5, [PLACEHOLDER, 2]],
        (PLACEHOLDER, 5, [PLACEHOLDER]),
        (PLACEHOLDER, 5, [1, 2, PLACEHOLDER]),
        (6, [PLACEHOLDER, 2]),
        ([PLACEHOLDER, 2], 5),
        ({"x": PLACEHOLDER}, 5, 6),
    ],
)
def test_another_container_with_placeholders_is_refused(given: Any, run: str) -> None:
    """The save is refused, because the children of the base to keep are ambiguous."""
    state: Any = {"t": (np.ones(3), 5, [np.ones(1), 2])}
    ckptcore.save(f"{run}/1", state)
    with pytest.raises(TreeMismatchError, match="the state does not fit its base"):
        ckptcore.save(f"{run}/2", {"t": given}, strategy=ckptcore.Update(f"{run}/1"))
    assert objects_at(f"{run}/2") == {}


def test_the_same_container_with_placeholders_keeps_the_rest(run: str) -> None:
    first, second = np.ones(3), np.ones(1)
    ckptcore.save(f"{run}/1", {"t": (first, 5, [second, 2])})
    ckptcore.save(f"{run}/2", {"t": (PLACEHOLDER, 6, [PLACEHOLDER, 3])}, strategy=ckptcore.Update(f"{run}/1"))
    assert same_value(ckptcore.load(f"{run}/2"), {"t": (first, 6, [second, 3])})
    ckptcore.save(f"{run}/3", {"t": (PLACEHOLDER, PLACEHOLDER, [np.zeros(2)])}, strategy=ckptcore.Update(f"{run}/2"))
    assert same_value(ckptcore.load(f"{run}/3"), {"t": (first, 6, [np.zeros(2)])})
