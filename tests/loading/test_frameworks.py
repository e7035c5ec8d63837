"""Loads without an abstract tree into arrays of a framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import torch
from ckptcore_jax.testing import enable_x64

import ckptcore
from ckptcore.context import PluginOptions
from ckptcore.errors import UnknownPluginError
from ckptcore.model import ArrayRecord

ARRAYS: Mapping[str, Any] = {
    "matrix": np.arange(6, dtype=np.float32).reshape(2, 3),
    "half": np.arange(4).astype(ml_dtypes.bfloat16),
    "scalar": np.array(7, np.int32),
    "empty": np.zeros((0, 3), np.float16),
}
LAYOUTS = ("safetensors", "dcp", "ocdbt", "zarr3")


def state() -> dict[str, Any]:
    return {**ARRAYS, "nested": [{"w": np.ones(3, np.float32)}, (np.zeros(2, np.uint8),)], "step": 3, "name": "run"}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("framework", "array_type"), [("torch", torch.Tensor), ("jax", jax.Array)])
def test_loaded_arrays_are_of_the_requested_framework(
    layout: str, framework: str, array_type: type, tmp_path: Path
) -> None:
    ckptcore.save(tmp_path / "c", state(), layout=layout)
    loaded = ckptcore.load(tmp_path / "c", framework=framework)
    assert list(loaded) == list(state())
    assert (loaded["step"], loaded["name"]) == (3, "run")
    assert isinstance(loaded["nested"][0]["w"], array_type)
    for name, expected in ARRAYS.items():
        assert isinstance(loaded[name], array_type)
        again = loaded[name].view(torch.int16).numpy() if loaded[name].dtype is torch.bfloat16 else loaded[name]
        assert np.asarray(again).tobytes() == expected.tobytes()
        assert tuple(loaded[name].shape) == expected.shape


def test_numpy_is_the_default(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", state())
    by_name, by_default = ckptcore.load(tmp_path / "c", framework="numpy"), ckptcore.load(tmp_path / "c")
    for name in ARRAYS:
        assert type(by_name[name]) is type(by_default[name]) is np.ndarray
        assert by_name[name].tobytes() == by_default[name].tobytes()


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_arrays_that_the_framework_lacks_are_numpy_arrays(framework: str, tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"text": np.array(["a", "bc"]), "scalar": np.float32(2), "long": "x" * (1 << 15)})
    loaded = ckptcore.load(tmp_path / "c", framework=framework)
    assert loaded["text"].tolist() == ["a", "bc"]
    assert type(loaded["scalar"]) is np.float32
    assert loaded["long"] == "x" * (1 << 15)


def test_wide_numbers_are_numpy_arrays_while_jax_does_not_support_them(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"w": np.arange(3)})
    assert type(ckptcore.load(tmp_path / "c", framework="jax")["w"]) is np.ndarray
    with enable_x64():
        assert isinstance(ckptcore.load(tmp_path / "c", framework="jax")["w"], jax.Array)


def test_random_keys_and_raw_dtypes_keep_their_types(tmp_path: Path) -> None:
    packed = torch.arange(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    key = jax.random.key(7)
    ckptcore.save(tmp_path / "c", {"key": key, "packed": packed})
    assert ckptcore.load(tmp_path / "c", framework="torch")["packed"].dtype is torch.float4_e2m1fn_x2
    assert ckptcore.load(tmp_path / "c", framework="jax")["key"].dtype == key.dtype


def test_saved_shardings_are_restored(tmp_path: Path) -> None:
    spec: Any = jax.sharding.PartitionSpec  # the constructor is untyped in JAX
    sharding = jax.sharding.NamedSharding(jax.make_mesh((len(jax.devices()),), ("x",)), spec("x"))
    array = jax.device_put(np.arange(8 * len(jax.devices()), dtype=np.float32), sharding)
    ckptcore.save(tmp_path / "c", {"w": array})
    assert ckptcore.load(tmp_path / "c", framework="jax")["w"].sharding.is_equivalent_to(sharding, 1)


def test_only_selected_leaves_are_read(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", state())
    report = ckptcore.results.LoadReport()
    loaded = ckptcore.load(
        tmp_path / "c", framework="torch", select=ckptcore.select.names("matrix", "nested/1"), report=report
    )
    assert isinstance(loaded["matrix"], torch.Tensor)
    assert isinstance(loaded["nested"][1][0], torch.Tensor)
    assert set(loaded) == {"matrix", "nested"}
    assert sorted(report.restored) == ["matrix", "nested[1][0]"]


def test_steps_and_single_objects_take_a_framework(tmp_path: Path) -> None:
    with ckptcore.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, state())
        checkpointer.wait()
        assert isinstance(checkpointer.load(framework="torch")["matrix"], torch.Tensor)
    ckptcore.save_checkpointables(tmp_path / "several", {"a": state(), "b": state()})
    loaded = ckptcore.load_checkpointables(tmp_path / "several", {"a": ckptcore.LoadAs(None, framework="torch")})
    assert isinstance(loaded["a"]["matrix"], torch.Tensor)


def test_a_handle_of_a_load_takes_a_framework(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", state())
    assert isinstance(ckptcore.load_async(tmp_path / "c", framework="torch").result()["matrix"], torch.Tensor)


def test_an_unknown_framework_is_an_error(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", state())
    with pytest.raises(UnknownPluginError, match=r"framework='mlx': .* Installed: jax, numpy, torch"):
        ckptcore.load(tmp_path / "c", framework="mlx")


def test_a_framework_excludes_an_abstract_tree_and_a_target(tmp_path: Path) -> None:
    ckptcore.save_checkpointables(tmp_path / "c", {"a": dict(ARRAYS)})
    with pytest.raises(ValueError, match="pass only one of the two"):
        ckptcore.load(tmp_path / "c" / "a", dict(ARRAYS), framework="torch")
    with pytest.raises(ValueError, match="pass only one of the two"):
        ckptcore.load_checkpointables(tmp_path / "c", into={"a": ckptcore.LoadAs(dict(ARRAYS), framework="torch")})


def test_a_plugin_adds_a_framework(tmp_path: Path) -> None:
    class Doubles:
        @staticmethod
        @ckptcore.hookimpl
        def ckpt_frameworks() -> Mapping[str, ckptcore.protocols.AbstractLeaves]:
            def doubles(stored: Sequence[ArrayRecord]) -> Sequence[object]:
                return [ckptcore.AbstractArray(record.spec.shape, record.spec.dtype) for record in stored]

            return {"doubles": doubles}

    ckptcore.save(tmp_path / "c", {"w": np.ones(3)})
    context = ckptcore.Context(plugins=PluginOptions(extra=(Doubles(),)))
    assert ckptcore.load(tmp_path / "c", framework="doubles", context=context)["w"].tolist() == [1, 1, 1]
