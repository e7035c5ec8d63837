"""Long lists, tuples and dicts of plain numbers are one leaf in every layout, and load as before."""

from __future__ import annotations

import json
import os
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_testing.trees import comparable, same_value

import ckptcore
from ckptcore import PLACEHOLDER, Matching, PerProcess
from ckptcore.context import Context, PluginOptions
from ckptcore.errors import TreeMismatchError
from ckptcore.model import ArrayRecord
from ckptcore.model.columns import COLUMN_VALUES
from ckptcore.protocols import LeafHandler

LAYOUTS = ["safetensors", "zarr3", "zarr", "ocdbt", "dcp"]
MANY = COLUMN_VALUES


def state() -> dict[str, Any]:
    """Return a state with columns of all kinds, and with containers that do not become columns."""
    numbers = random.Random(0)
    return {
        "w": np.arange(3.0),
        "ints": [numbers.randrange(-(1 << 40), 1 << 40) for _ in range(MANY)],
        "floats": tuple(numbers.random() for _ in range(MANY)),
        "flags": [number % 3 == 0 for number in range(MANY)],
        "seen": {number * 7: number / 3 for number in range(MANY)},
        "names": {f"sample {number}": number for number in range(MANY)},
        "mixed": [1, 2.5, None, True, "text", 1 << 80, -0.0, float("nan")] * MANY,
        "rows": [[float(number), -0.0] for number in range(MANY)],
        "betas": (0.9, 0.999),
        "short": [1, 2, 3],
        "large": [1 << 64] * MANY,
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.brings("a thousand and more plain numbers", "Python", "same")
def test_values_come_back_exactly(layout: str, tmp_path: Path) -> None:
    saved = state()
    ckptcore.save(tmp_path / "c", saved, layout=layout)
    loaded = ckptcore.load(tmp_path / "c")
    assert np.array_equal(loaded.pop("w"), saved.pop("w"))
    assert same_value(loaded, saved)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_column_is_one_leaf(layout: str, tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", state(), layout=layout)
    tree = ckptcore.metadata(tmp_path / "c").tree
    kinds = {path[0]: record.kind for path, record in zip(tree.paths, tree.leaves, strict=True) if len(path) == 1}
    assert kinds == {
        "w": "array", "ints": "list", "floats": "tuple", "flags": "list", "seen": "dict", "names": "dict",
        "mixed": "list", "rows": "list", "large": "list",
    }  # fmt: skip
    assert [path for path in tree.paths if len(path) > 1] == [
        ("betas", 0), ("betas", 1), ("short", 0), ("short", 1), ("short", 2),
    ]  # fmt: skip


def test_many_numbers_take_few_bytes(tmp_path: Path) -> None:
    numbers = random.Random(0)
    saved = {"v": [numbers.random() for _ in range(100 * MANY)]}
    ckptcore.save(tmp_path / "c", saved)
    nbytes = sum(os.path.getsize(path) for path in (tmp_path / "c").iterdir())
    assert nbytes < 100 * MANY * 8 * 1.4
    (part,) = (tmp_path / "c").glob("checkpoint.*.tree.json")
    tree = json.loads(part.read_bytes())
    assert tree["count"] == 1
    assert len(tree["values"]) == 1
    assert isinstance(ckptcore.load(tmp_path / "c")["v"][0], float)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("target", [[], [0], [0] * 3, [None, 2.5], list(range(5 * MANY)), [[1], (2,)]])
def test_a_live_list_of_another_length_gets_the_stored_numbers(target: list[Any], layout: str, tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"v": list(range(MANY))}, layout=layout)
    into, same = {"v": target.copy()}, None
    same = into["v"]
    ckptcore.load_into(tmp_path / "c", into)
    assert into["v"] is same
    assert into == {"v": list(range(MANY))}
    assert ckptcore.load(tmp_path / "c", {"v": target}) == into


def test_live_dicts_and_tuples_get_the_stored_numbers(tmp_path: Path) -> None:
    saved = {"d": {number: number / 2 for number in range(MANY)}, "t": tuple(range(MANY))}
    ckptcore.save(tmp_path / "c", saved)
    into: dict[str, Any] = {"d": {7: None}, "t": ()}
    same = into["d"]
    ckptcore.load_into(tmp_path / "c", into)
    assert into == saved
    assert into["d"] is same


def test_containers_of_other_types_get_the_stored_numbers(tmp_path: Path) -> None:
    class Numbers(list[int]):
        name = ""

    numbers = Numbers([1])
    numbers.name = "kept"
    ckptcore.save(tmp_path / "c", {"l": list(range(MANY)), "d": dict.fromkeys(range(MANY), 1)})
    loaded = ckptcore.load(tmp_path / "c", {"l": numbers, "d": OrderedDict()})
    assert type(loaded["l"]) is Numbers
    assert loaded["l"].name == "kept"
    assert loaded["l"] == list(range(MANY))
    assert loaded["d"] == OrderedDict.fromkeys(range(MANY), 1)
    assert type(loaded["d"]) is OrderedDict
    assert numbers == [1]


def test_a_shared_list_is_filled_once(tmp_path: Path) -> None:
    shared = list(range(MANY))
    ckptcore.save(tmp_path / "c", {"a": shared, "b": shared})
    live = [0]
    into = {"a": live, "b": live}
    ckptcore.load_into(tmp_path / "c", into)
    assert live == shared
    assert into["a"] is into["b"] is live


def test_a_long_list_and_a_long_tuple_differ_as_short_ones_do(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"v": tuple(range(MANY))})
    with pytest.raises(TreeMismatchError, match=r"v: sequence: a list is requested, a tuple is stored") as caught:
        ckptcore.load(tmp_path / "c", {"v": [0]})
    assert "sequences='either'" in str(caught.value) or 'sequences="either"' in str(caught.value)
    either = Matching(sequences="either")
    assert ckptcore.load(tmp_path / "c", {"v": [0]}, matching=either) == {"v": list(range(MANY))}


def test_parts_of_a_tree_with_columns(tmp_path: Path) -> None:
    saved = {"v": list(range(MANY)), "w": np.arange(3)}
    ckptcore.save(tmp_path / "c", saved)
    assert ckptcore.load(tmp_path / "c", select=ckptcore.select.names("v")) == {"v": saved["v"]}
    loaded = ckptcore.load(tmp_path / "c", {"v": PLACEHOLDER, "w": np.zeros(3, int)})
    assert loaded["v"] is PLACEHOLDER
    with ckptcore.open(tmp_path / "c") as checkpoint:
        assert checkpoint["v"] == saved["v"]
    assert ckptcore.metadata(tmp_path / "c").abstract["v"] == saved["v"]
    abstract = ckptcore.abstract(saved)
    assert abstract["v"] == saved["v"]
    assert abstract["v"] is not saved["v"]
    assert ckptcore.load(tmp_path / "c", abstract)["v"] == saved["v"]


@pytest.mark.parametrize("value", [[1] * MANY, (1.5,) * MANY, dict.fromkeys(range(MANY), True)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_whole_checkpoint_may_be_a_column(value: Any, layout: str, tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", value, layout=layout)
    assert comparable(ckptcore.load(tmp_path / "c")) == comparable(value)
    assert comparable(ckptcore.load(tmp_path / "c", type(value)(value))) == comparable(value)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies_and_conversions_keep_columns(layout: str, tmp_path: Path) -> None:
    saved = state()
    ckptcore.save(tmp_path / "c", saved)
    ckptcore.copy(tmp_path / "c", tmp_path / "d", layout=layout)
    ckptcore.copy(tmp_path / "d", tmp_path / "e", layout="safetensors")
    loaded = ckptcore.load(tmp_path / "e")
    del loaded["w"], saved["w"]
    assert same_value(loaded, saved)


def test_transforms_move_columns_of_numbers(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"old": {"v": list(range(MANY))}})
    rename = ckptcore.transforms.Rename("old/v", "new/v")
    into: dict[str, Any] = {"new": {"v": []}}
    ckptcore.load_into(tmp_path / "c", into, transforms=[rename])
    assert into == {"new": {"v": list(range(MANY))}}


def test_updates_keep_and_replace_columns(tmp_path: Path) -> None:
    saved = {"v": list(range(MANY)), "d": dict.fromkeys(range(MANY), 1), "w": np.arange(3)}
    ckptcore.save(tmp_path / "a", saved)
    changed = {"v": PLACEHOLDER, "d": {1: 2}, "w": np.arange(3)}
    ckptcore.save(tmp_path / "b", changed, strategy=ckptcore.Update(tmp_path / "a"))
    loaded = ckptcore.load(tmp_path / "b")
    assert loaded["v"] == saved["v"]
    assert loaded["d"] == {1: 2}


def test_sessions_merge_long_dicts(tmp_path: Path) -> None:
    partial = ckptcore.partial(tmp_path / "c")
    first, second = dict.fromkeys(range(MANY), 1), dict.fromkeys(range(MANY, 2 * MANY), 2)
    partial.save({"d": first, "v": list(range(MANY))})
    partial.save({"d": second})
    partial.finalize()
    assert ckptcore.load(tmp_path / "c") == {"d": first | second, "v": list(range(MANY))}


def test_a_handler_of_numbers_still_gets_every_number(tmp_path: Path) -> None:
    from ckptcore.builtin.host_leaves import HostValueHandler

    class Counting(HostValueHandler):
        seen = 0

        def describe(self, leaf: Any) -> Any:
            self.seen += 1
            return super().describe(leaf)

    counting: LeafHandler = Counting()
    context = Context(plugins=PluginOptions(handlers={int: counting}))
    ckptcore.save(tmp_path / "c", {"v": list(range(MANY))}, context=context)
    assert counting.seen == MANY  # type: ignore[attr-defined]
    assert len(ckptcore.metadata(tmp_path / "c").tree.leaves) == MANY


def test_numpy_scalars_are_leaves(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"v": [np.float32(1)] * MANY})
    records = ckptcore.metadata(tmp_path / "c").tree.leaves
    assert len(records) == MANY
    assert all(isinstance(record, ArrayRecord) for record in records)


def test_per_process_values_are_columns(tmp_path: Path) -> None:
    saved = {"v": PerProcess({"d": dict.fromkeys(range(MANY), 1)})}
    ckptcore.save(tmp_path / "c", saved)
    assert len(ckptcore.metadata(tmp_path / "c").tree.leaves) == 1
    assert ckptcore.load(tmp_path / "c", {"v": PerProcess({"d": {}})}) == saved


def test_strict_matching_compares_the_values_of_a_column(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"v": [1] * 1000})
    strict = ckptcore.Matching(values="error")
    assert ckptcore.load(tmp_path / "c", {"v": [0] * 1000}, matching=strict) == {"v": [1] * 1000}
    other: list[list[float]] = [[0.5] * 1000, [0, 0, 0], []]
    for requested in other:
        with pytest.raises(TreeMismatchError, match="other values is requested"):
            ckptcore.load(tmp_path / "c", {"v": requested}, matching=strict)


def test_a_name_that_a_column_lacks_is_missing(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"v": {f"n{number}": number for number in range(1000)}})
    with pytest.raises(TreeMismatchError, match="missing: 'own' is not stored"):
        ckptcore.load(tmp_path / "c", {"v": {"n1": 0, "own": 7}})
    assert ckptcore.load(tmp_path / "c", {"v": {"n1": 0}})["v"]["n999"] == 999
