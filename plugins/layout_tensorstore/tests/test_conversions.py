"""Conversion between every pair of layouts, and onto a storage that tensorstore does not know."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from ckptcore_tensorstore import OcdbtLayout, Zarr3Layout, ZarrLayout

import ckptcore
from ckptcore.protocols import Layout

LAYOUTS: Mapping[str, str | Layout] = {
    "safetensors": "safetensors",
    "zarr": "zarr",
    "zarr-blosc": ZarrLayout(compression="blosc"),
    "zarr3": "zarr3",
    "zarr3-chunks": Zarr3Layout(chunk_bytes=64),
    "ocdbt": "ocdbt",
    "ocdbt-zstd": OcdbtLayout(compression="zstd", chunk_bytes=128),
    "ocdbt-flat": OcdbtLayout(item="", zarr_format=2),
}
PAIRS = list(itertools.permutations(LAYOUTS, 2))
GOLDEN = Path(__file__).parent / "golden"


def state() -> dict[str, Any]:
    shared = np.arange(60, dtype=np.float32).reshape(5, 12)
    return {
        "params": {"w": shared, "tied": shared, "b": np.arange(9).astype(ml_dtypes.bfloat16), "a/b": np.int8([1, 2])},
        "odd": [np.zeros((0, 3)), np.array(["ab", "c"]), np.datetime64("2020-01-02", "D"), np.complex64(1j)],
        "values": (1, 2.5, True, None, "hi", b"\x00", 2**70, {}),
    }


def assert_same(found: Any, saved: Any) -> None:
    if isinstance(saved, dict):
        assert list(found) == list(saved)
        for key in saved:
            assert_same(found[key], saved[key])
    elif isinstance(saved, list | tuple):
        assert type(found) is type(saved)
        for one, other in zip(found, saved, strict=True):
            assert_same(one, other)
    elif isinstance(saved, np.ndarray | np.generic):
        assert type(found) is type(saved) and found.dtype == saved.dtype and found.shape == saved.shape
        assert found.tobytes() == saved.tobytes()
    else:
        assert type(found) is type(saved) and found == saved


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=map(" to ".join, PAIRS))
def test_every_layout_into_every_other(source: str, target: str, tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "source", state(), layout=LAYOUTS[source], metadata={"x": 1})
    ckptcore.convert(tmp_path / "source", tmp_path / "target", layout=LAYOUTS[target])
    assert_same(ckptcore.load(tmp_path / "target"), state())
    about = ckptcore.metadata(tmp_path / "target")
    assert (about.layout, about.custom) == (target.split("-")[0], {"x": 1})
    assert ckptcore.verify(tmp_path / "target").ok


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_storage_that_tensorstore_does_not_know(name: str, tmp_path: Path) -> None:
    there = f"memory://conversions/{name}"
    ckptcore.save(there, state(), layout=LAYOUTS[name])
    assert_same(ckptcore.load(there), state())
    ckptcore.convert(there, tmp_path / "c", layout="zarr3")
    ckptcore.convert(tmp_path / "c", f"{there}-again", layout=LAYOUTS[name])
    assert_same(ckptcore.load(f"{there}-again"), state())


@pytest.mark.parametrize(
    "name",
    ["v1_default", "v0_standard", "v0_pytree_plain", "v1_zarr3_plain", "legacy_msgpack", "axlearn/step_00000004"],
)
@pytest.mark.parametrize("target", ["safetensors", "ocdbt", "zarr"])
def test_what_other_software_wrote(name: str, target: str, tmp_path: Path) -> None:
    source = GOLDEN / name
    ckptcore.convert(source, tmp_path / "c", layout=LAYOUTS[target])
    assert_same(ckptcore.load(tmp_path / "c"), ckptcore.load(source))


def test_several_checkpointables(tmp_path: Path) -> None:
    several = {"model": state(), "data": {"position": 3}}
    ckptcore.save_checkpointables(tmp_path / "source", several, layout="ocdbt")
    for target in ("zarr", "safetensors", "ocdbt"):
        ckptcore.convert(tmp_path / "source", tmp_path / target, layout=target)
        assert_same(dict(ckptcore.load_checkpointables(tmp_path / target)), several)
