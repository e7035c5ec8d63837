"""Plain values of a program whose type or length differs between the save and the load."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptcore
from ckptcore import Matching
from ckptcore.errors import TreeMismatchError

LAYOUTS = ["zarr3", "safetensors", "ocdbt", "dcp"]

CASES: dict[str, tuple[object, object, object]] = {
    # name: (requested, stored, loaded)
    "best becomes an array": (1e9, np.float32(0.5), 0.5),
    "best becomes a NumPy array": (1e9, np.array(0.5), 0.5),
    "int becomes float": (0, 0.73, 0.73),
    "int becomes a float array": (0, np.array(0.73), 0.73),
    "None becomes int": (None, 12, 12),
    "None becomes text": (None, "model-3", "model-3"),
    "int becomes None": (3, None, None),
    "float stays float": (0.5, 2, 2.0),
    "float becomes a huge int": (0.5, 2**70 + 1, 2**70 + 1),
    "flag becomes a number": (False, 3, 3),
    "number becomes a flag": (3, True, True),
    "text becomes a number": ("auto", 16, 16),
    "history grows": ([1.0], [1.0, 2, 3.5], [1.0, 2, 3.5]),
    "history is new": ([], [1.0, 2.0], [1.0, 2.0]),
    "history shrinks": ([1.0, 2.0, 3.0], [4.0], [4.0]),
    "history is empty": ([1.0], [], []),
    "history of NumPy numbers": ([], [np.float64(0.5), np.float64(0.25)], [0.5, 0.25]),
    "history by epoch": ({0: 0.1}, {1: 0.2, 2: 0.3}, {1: 0.2, 2: 0.3}),
    "history of dicts": ([], [{"loss": 0.5, "step": 1}], [{"loss": 0.5, "step": 1}]),
    "None becomes a list": (None, [1, 2], [1, 2]),
    "None becomes a dict": (None, {"a": 1}, {"a": 1}),
    "list becomes None": ([1, 2], None, None),
    "dict gains a key": ({"a": 1}, {"a": 2, "b": None}, {"a": 2, "b": None}),
    "tuple grows": ((1,), (1, 2), (1, 2)),
}


def equal(first: Any, second: Any) -> bool:
    if isinstance(first, dict):
        same = isinstance(second, dict) and first.keys() == second.keys()
        return same and all(equal(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return type(first) is type(second) and len(first) == len(second) and all(map(equal, first, second))
    return bool(first == second) and (isinstance(second, np.generic) or type(first) is type(second))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.brings(f"value: {case}", "Python", "same")) for case in CASES]
)
def test_the_stored_value_is_loaded(tmp_path: Path, layout: str, case: str) -> None:
    requested, stored, loaded = CASES[case]
    ckptcore.save(tmp_path / "c", {"w": np.ones(3), "value": stored}, layout=layout)
    target: dict[str, Any] = {"w": np.zeros(3), "value": requested}
    result = ckptcore.load(tmp_path / "c", target)
    assert equal(loaded, result["value"]), result["value"]
    before = requested.copy() if isinstance(requested, dict | list) else requested
    ckptcore.load_into(tmp_path / "c", target)
    assert equal(loaded, target["value"]), target["value"]
    assert target["w"].tolist() == [1, 1, 1]
    if type(requested) is type(loaded) and isinstance(requested, list | dict):
        assert target["value"] is requested  # other references see the loaded content
        requested.clear()
        requested.extend(before) if isinstance(requested, list) else requested.update(before)  # type: ignore[arg-type]
    if layout in ("zarr3", "safetensors"):  # other layouts store numbers as arrays, which match them
        with pytest.raises(TreeMismatchError):
            ckptcore.load(tmp_path / "c", {"w": np.zeros(3), "value": requested}, matching=Matching(values="error"))


@pytest.mark.brings("dataclass with values that were `None` or shorter", "Python", "same")
def test_values_in_objects_and_in_containers_that_cannot_change(tmp_path: Path) -> None:
    @dataclasses.dataclass
    class Loop:
        best: float | None = None
        history: list[float] = dataclasses.field(default_factory=list)

    ckptcore.save(tmp_path / "c", (Loop(0.5, [1.0, 2.0]), {"step": 3}))
    loop = Loop()
    history = loop.history
    ckptcore.load_into(tmp_path / "c", (loop, {"step": None}))
    assert (loop.best, loop.history) == (0.5, [1.0, 2.0])
    assert loop.history is history


def test_the_target_itself_may_be_a_list(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", [1, 2, 3])
    target: list[int] = []
    assert ckptcore.load_into(tmp_path / "c", target) is target
    assert target == [1, 2, 3]


@pytest.mark.brings("counter that the checkpoint lacks", "Python", "refused")
def test_a_counter_that_the_checkpoint_lacks_is_missing(tmp_path: Path) -> None:
    """The load must not keep its current value silently."""
    ckptcore.save(tmp_path / "c", {"loop": {"epoch": 3}})
    with pytest.raises(TreeMismatchError, match="loop/tokens is not stored"):
        ckptcore.load(tmp_path / "c", {"loop": {"epoch": 0, "tokens": 7}})
    loaded = ckptcore.load(tmp_path / "c", {"loop": {"epoch": 0, "tokens": 7}}, matching=Matching(missing="keep"))
    assert loaded == {"loop": {"epoch": 3, "tokens": 7}}


@pytest.mark.brings("list of arrays, loaded into a list of numbers", "Python", "refused")
def test_arrays_are_not_plain_values(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"value": [np.ones(3)]})
    requests: list[object] = [None, [], 3, {}, [1.0]]
    for requested in requests:
        with pytest.raises(TreeMismatchError):
            ckptcore.load(tmp_path / "c", {"value": requested})


def test_values_have_the_types_that_the_caller_requests(tmp_path: Path) -> None:
    """This also holds if other values in the same containers have another structure."""
    ckptcore.save(tmp_path / "c", {"best": np.float32(0.5), "epoch": 3, "losses": [0.9, [0.7]], "new": {"a": 1}})
    losses: list[Any] = [np.float64(0), []]
    inner = losses[1]
    loop = {"best": 1e9, "epoch": np.int64(0), "losses": losses}
    assert ckptcore.load_into(tmp_path / "c", loop) is loop
    assert loop == {"best": 0.5, "epoch": 3, "losses": [0.9, [0.7]], "new": {"a": 1}}
    assert [type(loop["best"]), type(loop["epoch"])] == [float, np.int64]
    assert loop["losses"] is losses
    assert losses[1] is inner
