"""Keys of dicts: ints, bools, text, and tuples of them."""

from __future__ import annotations

import enum
import json
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from ckptcore_testing.hostile_json import sealed
from ckptcore_testing.trees import assert_same_tree
from ckptcore_tools.cli.application import application
from ckptcore_view.documents import Request, document_of
from ckptcore_view.notebook import to_html
from ckptcore_view.viewed import Viewed
from click.testing import CliRunner

import ckptcore
from ckptcore import transforms
from ckptcore.context import default_context
from ckptcore.errors import CorruptCheckpointError, TreeMismatchError, UnknownPathError, UnsupportedKeyError
from ckptcore.select import glob, names

LAYOUTS = ["safetensors", "dcp", "ocdbt", "zarr", "zarr3"]


class Place(NamedTuple):
    layer: str
    number: int


class Part(enum.StrEnum):
    HEAD = "head"


def tree(fill: float) -> dict[Any, Any]:
    def array() -> Any:
        return np.full(2, fill)

    return {
        "flat": {("params", "dense/0", "kernel"): array(), ("params", "dense.1"): {"w": array()}, (): array()},
        "labels": {True: {"mu": array()}, False: array()},
        "texts": {"True": array(), "('a', 1)": array(), "1": array()},
        "alike": {("a", 1): array(), "('a', 1)": array(), ("a", "1"): array(), True: array(), "True": array(), "1": 3},
        "nested": OrderedDict({(("a", (True,)), 7): [array(), {(1,): fill}]}),
        ("top", False): fill,
        "values": ({("é", "\ud800", "\n"): fill}, {False: "text"}),
    }


def keys(value: Any) -> Any:
    """Return the structure of a tree. Keys are texts, because the keys True and 1 are equal."""
    if isinstance(value, dict):
        return [(repr(key), keys(child)) for key, child in value.items()]
    if isinstance(value, list | tuple):
        return [keys(child) for child in value]
    return type(value).__name__


@pytest.mark.parametrize("layout", LAYOUTS)
def test_keys_come_back_exactly(layout: str, tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", tree(1.0), layout=layout)
    loads: list[Callable[[], Any]] = [
        lambda: ckptcore.load(tmp_path / "c"),
        lambda: ckptcore.load(tmp_path / "c", tree(0.0)),
        lambda: ckptcore.load(tmp_path / "c", ckptcore.abstract(tree(0.0))),
    ]
    for load in loads:
        loaded = load()
        assert_same_tree(loaded, tree(1.0))
        assert keys(loaded) == keys(tree(1.0))
    target = tree(0.0)
    ckptcore.load_into(tmp_path / "c", target)
    assert_same_tree(target, tree(1.0))
    assert keys(ckptcore.metadata(tmp_path / "c").abstract)[0][0] == "'flat'"
    assert ckptcore.verify(tmp_path / "c").ok


def test_keys_that_equal_supported_keys_become_them(tmp_path: Path) -> None:
    value = {Place("a", 1): 1, (Part.HEAD, np.int64(3)): 2, np.bool_(True): 3, torch.Size([2, 3]): 4}
    ckptcore.save(tmp_path / "c", value)
    loaded = ckptcore.load(tmp_path / "c")
    assert loaded == value and repr(list(loaded)) == "[('a', 1), ('head', 3), True, (2, 3)]"
    assert ckptcore.load(tmp_path / "c", dict.fromkeys(value, 0)) == value


def test_long_and_unsupported_keys_are_refused(tmp_path: Path) -> None:
    deep: Any = "a"
    for _ in range(20):
        deep = (deep,)
    for key in (deep, ("a",) * 20_000, ("a", 1.5), (None,), (b"a",)):
        with pytest.raises(UnsupportedKeyError, match="keys are int, bool, str or tuples of them"):
            ckptcore.save(tmp_path / "c", {key: 1})
    assert list(tmp_path.iterdir()) == []


def test_an_open_checkpoint_has_the_keys(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", tree(1.0))
    with ckptcore.open(tmp_path / "c") as checkpoint:
        for key in tree(1.0):
            assert key in checkpoint
            assert checkpoint[key] is not None
        flat = checkpoint["flat"]
        assert list(flat) == list(tree(1.0)["flat"])
        for key in flat:
            assert flat[key] is not None
        path = ("flat", ("params", "dense.1"), "w")
        assert np.all(checkpoint[path][:] == 1) and checkpoint[path].path == path
        assert np.all(flat[("params", "dense.1")]["w"][:] == 1)
        assert np.all(checkpoint["flat/('params', 'dense.1')/w"][:] == 1)
        assert np.all(checkpoint["labels"][True]["mu"][:] == 1) and np.all(checkpoint["labels/True/mu"][:] == 1)
        assert len(checkpoint["flat"][("params", "dense.1")]) == 1
        with pytest.raises(UnknownPathError):
            checkpoint["texts"][True]


def test_an_empty_container_below_a_tuple_is_found(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {("a", "b"): {}, "a": {"b": np.ones(1)}})
    with ckptcore.open(tmp_path / "c") as checkpoint:
        assert dict(checkpoint[("a", "b")]) == {}
        assert np.all(checkpoint["a"]["b"][:] == 1)


def test_selections_match_the_keys(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", tree(1.0))
    key = ("params", "dense.1")
    for selection in (
        names(("flat", key)),
        names("flat/('params', 'dense.1')"),
        glob("flat/*dense.1*"),
        names("flat/('params', 'dense.1')/w"),
    ):
        assert keys(ckptcore.load(tmp_path / "c", select=selection)) == keys({"flat": {key: {"w": np.ones(2)}}})
    chosen = ckptcore.load(tmp_path / "c", select=names(("labels", True), "labels/False"))
    assert keys(chosen) == keys({"labels": tree(1.0)["labels"]})


def test_transforms_keep_the_keys(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", tree(1.0))
    rename = transforms.Rename("labels/{rest...}", "moved/{rest}")
    loaded = ckptcore.load(tmp_path / "c", transforms=[rename, transforms.Drop("values/**")])
    assert keys(loaded["moved"]) == keys(tree(1.0)["labels"])
    assert keys(loaded["flat"]) == keys(tree(1.0)["flat"])
    exact = transforms.RenameTable({"labels/True/mu": "labels/True/nu"})
    assert True in ckptcore.load(tmp_path / "c", transforms=[exact])["labels"]
    within = transforms.Rename("flat/('params', 'dense.1')/w", "flat/('params', 'dense.1')/v")
    assert list(ckptcore.load(tmp_path / "c", transforms=[within])["flat"][("params", "dense.1")]) == ["v"]


@pytest.mark.parametrize("key", ["a", True, ("a", "b")])
@pytest.mark.parametrize("count", [3, 2000])
def test_other_keys_of_plain_values_are_not_lost(key: Any, count: int, tmp_path: Path) -> None:
    """A load drops number keys that the checkpoint lacks, such as epochs, but no other keys."""
    ckptcore.save(tmp_path / "c", {"counts": dict.fromkeys(range(2, count), 1.0)})
    with pytest.raises(TreeMismatchError, match="missing"):
        ckptcore.load(tmp_path / "c", {"counts": {key: 0.0}})
    ckptcore.save(tmp_path / "d", {"counts": {key: 1.0, ("more", 1): 2.0, 5: 3.0}})
    expected = {"counts": {key: 1.0, ("more", 1): 2.0, 5: 3.0}}
    assert ckptcore.load(tmp_path / "d", {"counts": {key: 0.0, 7: 0.0}}) == expected
    target: dict[str, Any] = {"counts": {key: 0.0}}
    ckptcore.load_into(tmp_path / "d", target)
    assert target == expected


@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies_keep_the_keys(layout: str, tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", tree(1.0))
    ckptcore.copy(tmp_path / "c", tmp_path / "d", layout=layout)
    assert keys(ckptcore.load(tmp_path / "d")) == keys(tree(1.0))


def test_a_subtree_is_found_by_its_keys(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", tree(1.0))
    for number, subtree in enumerate((("flat", ("params", "dense.1")), "flat/('params', 'dense.1')", "labels/True")):
        ckptcore.copy(tmp_path / "c", tmp_path / str(number), subtree=subtree)
        assert len(ckptcore.load(tmp_path / str(number))) == 1


def test_the_command_line_and_the_viewer_show_the_keys(tmp_path: Path) -> None:
    def run(*arguments: str) -> str:
        return CliRunner().invoke(application, arguments).output

    first, second = str(tmp_path / "c"), str(tmp_path / "d")
    ckptcore.save(first, tree(1.0))
    shown = run("inspect", first)
    assert "[('params', 'dense/0', 'kernel')]" in shown and "[True]" in shown
    assert "dense/0" in run("inspect", first, "--filter", "dense/0")
    paths = [leaf["keys"] for leaf in json.loads(run("inspect", first, "--json"))["leaves"]]
    assert ["flat", ["params", "dense/0", "kernel"]] in paths and ["labels", True, "mu"] in paths
    ckptcore.save(second, {**tree(1.0), ("top", False): 2.0})
    assert "[('top', False)]" in run("diff", first, second)
    viewed = Viewed(second, default_context())
    for name, parameters in (("tree", {"at": ""}), ("array", {"at": "", "leaf": "0"})):
        assert "dense/0" in json.dumps(document_of(viewed, name, Request(parameters)))
    with ckptcore.open(second) as checkpoint:
        assert "dense/0" in to_html(checkpoint["flat"])


def test_other_keys_of_a_hostile_root_are_refused(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {("a", "b"): np.ones(2)})
    root = json.loads((tmp_path / "c" / "checkpoint.json").read_bytes())
    del root["checksum"]
    body = json.dumps(root, separators=(",", ":"))
    assert '[["a","b"]]' in body
    for key in ('["a","c"]', '["a",null]', '["a",1.5]', "[" * 20 + "]" * 20, "[" * 5000 + "]" * 5000, '[{"attr":"a"}]'):
        (tmp_path / "c" / "checkpoint.json").write_bytes(sealed(body.replace('[["a","b"]]', f"[{key}]").encode()))
        if key == '["a","c"]':
            assert ckptcore.metadata(tmp_path / "c").tree.paths == ((("a", "c"),),)
            continue
        with pytest.raises(CorruptCheckpointError):
            ckptcore.metadata(tmp_path / "c")


def test_a_file_of_torch_has_the_keys(tmp_path: Path) -> None:
    state = {
        ("layer", 0): torch.ones(2),
        "by label": {True: torch.zeros(3), False: {(1, ("a", True)): 3}},
        "ordered": OrderedDict({("a", "b"): torch.ones(1), ("c",): 2}),
        "mixed": {("a", 1.5): 1, "b": 2},
    }
    torch.save(state, tmp_path / "state.pt")
    loaded = ckptcore.load(tmp_path / "state.pt")
    mixed = loaded.pop("mixed")
    expected = {key: value for key, value in state.items() if key != "mixed"}
    assert keys(mixed) == keys([[["a", 1.5], 1], ["b", 2]])  # 1.5 cannot be in a key, so the dict is a list of pairs
    assert [key for key, _ in keys(loaded)] == [key for key, _ in keys(expected)]
    assert repr(list(loaded["by label"])) == "[True, False]" and list(loaded["ordered"]) == [("a", "b"), ("c",)]
    new = {**expected, ("layer", 0): torch.zeros(2)}
    assert torch.equal(ckptcore.load(tmp_path / "state.pt", {**new, "mixed": ...})[("layer", 0)], torch.ones(2))
