"""Blocking saves of arrays that change meanwhile: elements may be of any time, but what is committed can be read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from ckptcore_dcp.layouts import DcpLayout
from ckptcore_tensorstore import OcdbtLayout, Zarr3Layout, ZarrLayout, codec

import ckptcore
from ckptcore import Context
from ckptcore.builtin import local_writer, memory
from ckptcore.commits.occupants import Overwrite
from ckptcore.protocols import Layout

LAYOUTS: Mapping[str, Layout] = {
    "safetensors": ckptcore.SafetensorsLayout(),
    "dcp": DcpLayout(),
    "ocdbt": OcdbtLayout(),
    "ocdbt zstd": OcdbtLayout(compression="zstd"),
    "zarr": ZarrLayout(),
    "zarr zstd": ZarrLayout(compression="zstd"),
    "zarr3": Zarr3Layout(),
    "zarr3 zstd": Zarr3Layout(compression="zstd"),
}

Array = npt.NDArray[np.int32]


class Owner:
    """Who owns the arrays of a state, and changes them whenever a byte of the save is encoded or written, before and after."""

    def __init__(self) -> None:
        contiguous: Array = np.arange(800_000, dtype=np.int32).reshape(800, 1000)
        self.state = {
            "large": contiguous,
            "medium": np.arange(50_000, dtype=np.int32),
            "small": np.arange(8, dtype=np.int32),
            "transposed": contiguous.T,
            "columns": contiguous[:, 100:300],
        }
        self.changes = 0

    def change(self) -> None:
        for name in ("large", "medium", "small"):
            self.state[name] += 1
        self.changes += 1

    def changing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.change()
            try:
                return function(*arguments, **options)
            finally:
                self.change()

        return call


@pytest.fixture
def owner(monkeypatch: pytest.MonkeyPatch) -> Iterator[Owner]:
    found = Owner()
    for writer in (local_writer.LocalWriter, memory._MemoryWriter):
        monkeypatch.setattr(writer, "write_at", found.changing(writer.write_at))
    monkeypatch.setattr(codec.ChunkCodec, "encode", found.changing(codec.ChunkCodec.encode))
    yield found
    assert found.changes  # or nothing was tested


@pytest.fixture(params=["disk", "memory"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path) if request.param == "disk" else f"memory://{tmp_path.name}"


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_what_was_committed_can_be_read(layout: Layout, directory: str, owner: Owner) -> None:
    path, context = f"{directory}/x", Context(durability="none")
    again: Overwrite = "non-atomic" if directory.startswith("memory:") else True
    for overwrite in (False, again):
        ckptcore.save(path, owner.state, layout=layout, overwrite=overwrite, context=context)
        assert ckptcore.verify(path, context=context).ok
        loaded = ckptcore.load(path, context=context)
        assert {name: array.shape for name, array in loaded.items()} == {
            name: array.shape for name, array in owner.state.items()
        }
