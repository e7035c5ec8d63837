"""Checkpoints as groups of zarr: zarr-python lists their arrays, and xarray does for zarr 3."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import zarr
from ckptcore_orbax import OcdbtLayout, Zarr3Layout, ZarrLayout
from ckptcore_testing import run_ranks

import ckptcore

LAYOUTS: Mapping[str, Any] = {"zarr": ZarrLayout, "zarr3": Zarr3Layout}
KEYS = {"zarr": ".zgroup", "zarr3": "zarr.json"}

# zarr-python warns about each object that is neither an array nor a group.
pytestmark = pytest.mark.filterwarnings("ignore:Object at .* is not recognized:UserWarning")


def _state() -> dict[str, Any]:
    return {
        "params": {"w": np.arange(12, dtype=np.float32).reshape(3, 4), "layers": [np.ones(4), np.zeros((0, 3))]},
        "a/b": {"c/d": np.arange(5), "e": np.full((2, 2), 7, np.int16)},
        "p%q": np.arange(3, dtype=np.uint8),
        "..": np.arange(2),
        "step": 3,
    }


EXPECTED = {
    "params.w": "params.w",
    "params.layers.0": "params.layers.0",
    "params.layers.1": "params.layers.1",
    "a/b.c/d": "a/b.c/d",
    "a/b.e": "a/b.e",
    "p%q": "p%q",
    "..": "%..",
    "step": "step",
}
"""Paths of arrays in the group, by the keys of leaves joined with dots."""


def _arrays(group: zarr.Group) -> dict[str, Any]:
    return {name: node[...] for name, node in group.members(max_depth=None) if isinstance(node, zarr.Array)}


def _batches(group: zarr.Group) -> set[str]:
    return {name for name, node in group.members(max_depth=None) if isinstance(node, zarr.Group)}


def _replace_arrays() -> dict[str, Any]:
    state = _state()
    return {
        "params.w": state["params"]["w"],
        "params.layers.0": state["params"]["layers"][0],
        "params.layers.1": state["params"]["layers"][1],
        "a/b.c/d": state["a/b"]["c/d"],
        "a/b.e": state["a/b"]["e"],
        "p%q": state["p%q"],
        "..": state[".."],
        "step": np.asarray(3),
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("item", ["state", ""])
def test_zarr_lists_the_tree(tmp_path: Path, layout: str, item: str) -> None:
    ckptcore.save(tmp_path / "c", _state(), layout=LAYOUTS[layout](item=item))
    within = f"{item}/" if item else ""
    for place in (tmp_path / "c", tmp_path / "c" / item):
        group = zarr.open_group(str(place), mode="r")
        prefix = within if place == tmp_path / "c" else ""
        arrays = _arrays(group)
        assert set(arrays) == {f"{prefix}{name}" for name in EXPECTED.values()}
        for name, array in _replace_arrays().items():
            assert np.array_equal(arrays[f"{prefix}{EXPECTED[name]}"], array)
        inner = {f"{prefix}a", f"{prefix}a/b.c"}
        assert _batches(group) == (inner | {item} if prefix else inner)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_groups_are_objects_of_the_checkpoint(tmp_path: Path, layout: str) -> None:
    ckptcore.save(tmp_path / "c", _state(), layout=layout)
    key = KEYS[layout]
    root = json.loads((tmp_path / "c" / "checkpoint.json").read_text())
    assert {key, f"state/{key}", f"state/a/{key}", f"state/a/b.c/{key}"} <= set(json.dumps(root).split('"'))
    assert ckptcore.verify(tmp_path / "c").ok
    (tmp_path / "c" / "state" / key).write_bytes(b"{}")
    report = ckptcore.verify(tmp_path / "c")
    assert not report.ok


@pytest.mark.parametrize("layout", LAYOUTS)
def test_orbax_and_tensorstore_read_checkpoints_with_groups(tmp_path: Path, layout: str) -> None:
    v1 = pytest.importorskip("orbax.checkpoint").v1
    state: dict[str, Any] = {"params": {"w": np.arange(12, dtype=np.float32).reshape(3, 4)}, "a/b": np.arange(5)}
    ckptcore.save(tmp_path / "c", state, layout=layout)
    loaded = v1.load(tmp_path / "c", state)
    assert np.array_equal(loaded["params"]["w"], state["params"]["w"]) and np.array_equal(loaded["a/b"], state["a/b"])
    driver = "zarr3" if layout == "zarr3" else "zarr"
    store = {"driver": "file", "path": str(tmp_path / "c" / "state" / "params.w")}
    stored = tensorstore.open({"driver": driver, "kvstore": store}, read=True, open=True).result()
    assert np.array_equal(stored.read().result(), state["params"]["w"])
    (tmp_path / "c" / "checkpoint.json").unlink()
    inspected: Any = ckptcore.load(tmp_path / "c")
    assert set(inspected) == {"params", "a/b"} and np.array_equal(inspected["params"]["w"], state["params"]["w"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tree_of_one_array_is_not_a_group(tmp_path: Path, layout: str) -> None:
    ckptcore.save(tmp_path / "c", np.arange(6), layout=LAYOUTS[layout](item=""))
    array: Any = zarr.open_array(str(tmp_path / "c"), mode="r")[...]
    assert array.tolist() == list(range(6))
    ckptcore.save(tmp_path / "in an item", np.arange(6), layout=layout)
    assert list(_arrays(zarr.open_group(str(tmp_path / "in an item"), mode="r"))) == ["state"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tree_without_arrays_is_an_empty_group(tmp_path: Path, layout: str) -> None:
    ckptcore.save(tmp_path / "c", {"name": "text"}, layout=layout)
    assert _batches(zarr.open_group(str(tmp_path / "c"), mode="r")) == {"state"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_of_several_checkpointables_is_a_group(tmp_path: Path, layout: str) -> None:
    values = {"model": {"w": np.arange(3)}, "optimizer": {"m": np.ones(2)}}
    ckptcore.save_checkpointables(tmp_path / "c", values, layout=layout)
    group = zarr.open_group(str(tmp_path / "c"), mode="r")
    assert _batches(group) == {"model", "optimizer"}
    assert set(_arrays(group)) == {"model/w", "optimizer/m"}
    assert ckptcore.load_checkpointables(tmp_path / "c")["model"]["w"].tolist() == [0, 1, 2]


def test_a_checkpointable_may_have_the_name_of_a_metadata_file(tmp_path: Path) -> None:
    ckptcore.save_checkpointables(tmp_path / "c", {"zarr.json": {"w": np.arange(3)}}, layout="zarr3")
    assert ckptcore.load_checkpointables(tmp_path / "c")["zarr.json"]["w"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_keys_with_names_of_metadata_files_are_leaves(tmp_path: Path, layout: str) -> None:
    state = {
        ".zgroup": np.arange(2),
        "zarr.json": np.arange(3),
        "x": {".zgroup": np.arange(4)},
        "y/.zgroup": np.ones(1),
    }
    ckptcore.save(tmp_path / "c", state, layout=layout)
    loaded = ckptcore.load(tmp_path / "c")
    assert loaded[".zgroup"].tolist() == [0, 1] and loaded["y/.zgroup"].tolist() == [1]
    assert sorted(map(len, _arrays(zarr.open_group(str(tmp_path / "c"), mode="r")).values())) == [1, 2, 3, 4]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_job_writes_the_groups(tmp_path: Path, layout: str) -> None:
    def work(rank: int, context: ckptcore.Context) -> None:
        ckptcore.save(tmp_path / "c", _state(), layout=layout, context=context)

    run_ranks(3, work, timeout_seconds=60)
    assert set(_arrays(zarr.open_group(str(tmp_path / "c"), mode="r"))) == {
        f"state/{name}" for name in EXPECTED.values()
    }
    assert ckptcore.verify(tmp_path / "c").ok


@pytest.mark.parametrize("layout", LAYOUTS)
def test_partial_saves_and_updates_have_groups(tmp_path: Path, layout: str) -> None:
    ckptcore.partial(tmp_path / "p", layout=layout).save({"a": {"x/y": np.arange(3)}})
    ckptcore.partial(tmp_path / "p", layout=layout).save({"b": np.arange(4)})
    ckptcore.partial(tmp_path / "p").finalize()
    arrays = _arrays(zarr.open_group(str(tmp_path / "p"), mode="r"))
    assert set(map(len, arrays.values())) == {3, 4}
    ckptcore.save(tmp_path / "u", {"b": np.zeros(4)}, strategy=ckptcore.Update(tmp_path / "p"), layout=layout)
    assert ckptcore.load(tmp_path / "u")["a"]["x/y"].tolist() == [0, 1, 2]
    assert ckptcore.verify(tmp_path / "u").ok
    assert list(_arrays(zarr.open_group(str(tmp_path / "u"), mode="r"))) == ["state/b"]


def test_xarray_opens_the_tree(tmp_path: Path) -> None:
    import xarray  # a slow import that other tests do not need

    state = _state()
    state["params"]["square"] = np.arange(16, dtype=np.int64).reshape(4, 4)
    state["text"] = np.array(["ab", "c"])  # stored with an additional axis of bytes
    ckptcore.save(tmp_path / "c", state, layout=Zarr3Layout(chunk_bytes=16))
    expected = {**_replace_arrays(), "params.square": state["params"]["square"]}
    with xarray.open_datatree(tmp_path / "c", engine="zarr", consolidated=False) as tree:
        for name, array in expected.items():
            group, _, variable = f"state/{EXPECTED.get(name, name)}".rpartition("/")
            data = tree[group].dataset[variable]
            assert data.dtype == array.dtype and np.array_equal(data.values, array)
        assert tree["state"].dataset["params.square"].dims == ("axis0_4", "axis1_4")
        assert tree["state"].dataset["text"].dims == ("axis0_2", "axis1_8")
        assert tree["state"].dataset["step"].dims == ()
    with xarray.open_dataset(tmp_path / "c", engine="zarr", group="state", consolidated=False) as dataset:
        assert np.array_equal(dataset["params.w"].values, state["params"]["w"])


def test_similar_arrays_of_zarr_3_share_their_metadata_in_the_root(tmp_path: Path) -> None:
    """Names of axes contain only the number and the length of the axis, so they are equal for all arrays."""
    ckptcore.save(tmp_path / "c", {f"w{number}": np.ones((2, 3)) for number in range(10)}, layout="zarr3")
    root = (tmp_path / "c" / "checkpoint.json").read_text()
    assert root.count('"axis0_2"') == root.count('"axis1_3"') == 1


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_arrays_without_axis_names_load(tmp_path: Path, compression: str | None) -> None:
    """Axis names are optional in zarr 3. With zstd, tensorstore itself reads the metadata files."""
    state: dict[str, Any] = {"params": {"w": np.arange(12, dtype=np.float32).reshape(3, 4)}, "a/b": np.arange(5)}
    ckptcore.save(tmp_path / "c", state, layout=Zarr3Layout(compression=compression))
    ours: Any = ckptcore.load(tmp_path / "c")
    (tmp_path / "c" / "checkpoint.json").unlink()
    named: Any = ckptcore.load(tmp_path / "c")
    for path in (tmp_path / "c").rglob("zarr.json"):
        document = json.loads(path.read_text())
        assert ("dimension_names" in document) == (document["node_type"] == "array")
        document.pop("dimension_names", None)
        path.write_text(json.dumps(document))
    unnamed: Any = ckptcore.load(tmp_path / "c")
    for loaded in (ours, named, unnamed):
        assert np.array_equal(loaded["params"]["w"], state["params"]["w"])
        assert loaded["a/b"].tolist() == [0, 1, 2, 3, 4]


def test_a_database_has_no_groups(tmp_path: Path) -> None:
    """Readers of zarr cannot open a database. tensorstore can, but it opens arrays and not groups."""
    ckptcore.save(tmp_path / "c", _state(), layout=OcdbtLayout())
    store = {"driver": "ocdbt", "base": f"file://{tmp_path}/c/state/"}
    database = tensorstore.KvStore.open(store).result()
    assert not [key for key in database.list().result() if key in (b"zarr.json", b"a/zarr.json")]
    assert "dimension_names" not in json.loads(database[b"params.w/zarr.json"])
