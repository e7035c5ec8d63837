"""Checkpoints that Orbax writes with items other than arrays: JSON, protobuf and random keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptcore
from ckptcore.errors import CompositeCheckpointError
from plugins.tools.tests.cli.conftest import Run

jax = pytest.importorskip("jax")
ocp = pytest.importorskip("orbax.checkpoint")

LAYOUTS = ("safetensors", "dcp", "zarr", "zarr3", "ocdbt")
META = {"epoch": 3, "names": ["a", {"x": None}], "rate": 0.5}
STATE = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.arange(3, dtype=np.int64)}


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step with every kind of item that Orbax has a handler for."""
    message = pytest.importorskip("google.protobuf.struct_pb2").Struct()
    message["a"] = 1
    directory = tmp_path_factory.mktemp("orbax") / "step"
    items = ocp.args.Composite(
        state=ocp.args.StandardSave(STATE),
        meta=ocp.args.JsonSave(META),
        proto=ocp.args.ProtoSave(message),
        array=ocp.args.ArraySave(np.arange(5, dtype=np.int16)),
        key=ocp.args.JaxRandomKeySave(jax.random.key(3)),
        generator=ocp.args.NumpyRandomKeySave(np.random.RandomState(1).get_state()),
    )
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(directory, items, custom_metadata={"run": "a"})
    return directory


def expect_items(items: dict[str, Any]) -> None:
    np.testing.assert_equal(items["state"], STATE)
    assert items["meta"] == META
    assert "number_value: 1.0" in items["proto"]
    np.testing.assert_array_equal(items["array"], np.arange(5, dtype=np.int16))
    np.testing.assert_array_equal(np.asarray(items["key"]), jax.random.key_data(jax.random.key(3)))
    np.testing.assert_equal(tuple(items["generator"]), np.random.RandomState(1).get_state())


@pytest.mark.parametrize("layout", [None, *LAYOUTS])
def test_copies_load_like_the_original(step: Path, tmp_path: Path, layout: str | None) -> None:
    first, second = tmp_path / "copy", tmp_path / "again"
    if layout is None:
        ckptcore.copy(step, first)
    else:
        ckptcore.copy(step, first, layout=layout)
    ckptcore.copy(first, second, layout="zarr3")
    for place in (step, first, second):
        np.testing.assert_equal(ckptcore.load(place), STATE)  # the default item of Orbax
        expect_items(dict(ckptcore.load_checkpointables(place)))
        metadata = ckptcore.metadata(place)
        assert metadata.is_composite
        assert set(metadata.abstract) == set(STATE)
        assert metadata.custom == {"run": "a"}
    assert ckptcore.verify(first).ok


@pytest.mark.parametrize("layout", LAYOUTS)
def test_single_items_are_copied(step: Path, tmp_path: Path, layout: str) -> None:
    items = {}
    for name in ("state", "meta", "proto", "array", "key", "generator"):
        ckptcore.copy(step / name, tmp_path / name, layout=layout)
        items[name] = ckptcore.load(tmp_path / name)
    expect_items(items)


def test_a_composite_without_a_default_item_has_none_in_its_copy(tmp_path: Path) -> None:
    items = ocp.args.Composite(
        model=ocp.args.StandardSave(STATE), ema=ocp.args.StandardSave(STATE), meta=ocp.args.JsonSave(META)
    )
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "step", items)
    ckptcore.copy(tmp_path / "step", tmp_path / "copy", layout="dcp")
    for place in (tmp_path / "step", tmp_path / "copy"):
        with pytest.raises(CompositeCheckpointError, match="load one by its own location"):
            ckptcore.load(place)


def test_a_consolidation_of_everything_loses_no_item(step: Path, tmp_path: Path) -> None:
    with pytest.raises(CompositeCheckpointError, match="name one of them, such as subtree='state'"):
        ckptcore.copy(step, tmp_path / "all", subtree=())
    ckptcore.copy(step, tmp_path / "state", subtree="state")
    np.testing.assert_equal(ckptcore.load(tmp_path / "state"), STATE)
    ckptcore.copy(step / "state", tmp_path / "by location", subtree=())
    np.testing.assert_equal(ckptcore.load(tmp_path / "by location"), STATE)


def test_the_commands_name_the_form_of_an_item(step: Path, run: Run) -> None:
    shown = run("inspect", str(step)).output
    assert "meta  Orbax (JSON), 4 values" in shown
    assert "proto  Orbax (text of protobuf), 1 value" in shown
    assert "array  zarr, 1 array" in shown
    alone = run("inspect", str(step / "meta")).output
    assert "Orbax (JSON)" in alone
    assert "zarr" not in alone
    meta, proto = [line for line in run("ls", str(step)).output.splitlines() if line.startswith(("meta", "proto"))]
    assert "zarr" not in meta + proto
    assert "the same" in run("diff", str(step), str(step)).output


def test_a_copy_whose_default_item_was_deleted_names_the_others(step: Path, tmp_path: Path) -> None:
    ckptcore.copy(step, tmp_path / "c", layout="ocdbt")
    default = next(name for name in ckptcore.metadata(tmp_path / "c").checkpointables if name in ("state", "default"))
    ckptcore.delete(tmp_path / "c" / default)
    with pytest.raises(ckptcore.CheckpointError, match="has several checkpointables"):
        ckptcore.load(tmp_path / "c")
