"""Arrays that change while they are saved.

A blocking save may mix elements of different times, but its checkpoint can be read. An asynchronous save stores the
elements as they were at the time of its call.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
import pytest
import torch
from ckptcore_dcp.layouts import DcpLayout
from ckptcore_orbax import OcdbtLayout, Zarr3Layout, ZarrLayout
from ckptcore_orbax.zarr import chunk_codec

import ckptcore
from ckptcore import Context
from ckptcore.builtin import local, memory
from ckptcore.commit.stored_root import Overwrite
from ckptcore.model import JSON, Box
from ckptcore.protocols import Layout, Snapshot, WriteStore

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
    """The owner of a state. It changes the arrays before and after each write or encoding of a save."""

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

    def opening(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that opens a writer. The arrays change before and after each of its writes."""

        def opened(*arguments: Any, **options: Any) -> Any:
            writer = function(*arguments, **options)
            writer.write_at = self.changing(writer.write_at)
            return writer

        return opened


@pytest.fixture
def owner(monkeypatch: pytest.MonkeyPatch) -> Iterator[Owner]:
    arrays = Owner()
    monkeypatch.setattr(local.LocalWriter, "write_at", arrays.changing(local.LocalWriter.write_at))
    for opens in ("open_writer", "open_new"):
        monkeypatch.setattr(memory.MemoryStorage, opens, arrays.opening(getattr(memory.MemoryStorage, opens)))
    monkeypatch.setattr(chunk_codec.ChunkCodec, "encode", arrays.changing(chunk_codec.ChunkCodec.encode))
    yield arrays
    assert arrays.changes  # otherwise the test shows nothing


@pytest.fixture(params=["disk", "memory"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path) if request.param == "disk" else f"memory://{tmp_path.name}"


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_checkpoint_of_changing_arrays_can_be_read(layout: Layout, directory: str, owner: Owner) -> None:
    path, context = f"{directory}/x", Context(durability="none")
    again: Overwrite = "non-atomic" if directory.startswith("memory:") else True
    for overwrite in (False, again):
        ckptcore.save(path, owner.state, layout=layout, overwrite=overwrite, context=context)
        assert ckptcore.verify(path, context=context).ok
        loaded = ckptcore.load(path, context=context)
        assert {name: array.shape for name, array in loaded.items()} == {
            name: array.shape for name, array in owner.state.items()
        }


@dataclasses.dataclass(frozen=True)
class LateLayout(ckptcore.SafetensorsLayout):
    """A layout that writes only after `may_write` is set."""

    may_write: threading.Event = dataclasses.field(default_factory=threading.Event)

    def write(self, snapshot: Snapshot, store: WriteStore) -> JSON:
        self.may_write.wait()
        return super().write(snapshot, store)


def read_only(array: Array) -> Array:
    view = array.view()
    view.flags.writeable = False
    return view


ALIASES: Mapping[str, Callable[[torch.Tensor], Any]] = {
    "JAX of PyTorch": jax.dlpack.from_dlpack,
    "PyTorch": lambda tensor: tensor,
    "PyTorch, negated lazily": lambda tensor: torch._neg_view(tensor.neg_()),
    "NumPy of PyTorch": lambda tensor: tensor.numpy(),
    "NumPy, a view that cannot be written": lambda tensor: read_only(tensor.numpy()),
    "NumPy over a memoryview": lambda tensor: np.frombuffer(tensor.numpy().data, np.int32),
    "a part of a ShardedArray": lambda tensor: ckptcore.ShardedArray(
        (1 << 18,), np.int32, [ckptcore.ArrayShard(Box.whole((1 << 18,)), tensor.numpy())]
    ),
}


@pytest.mark.parametrize("alias", ALIASES.values(), ids=ALIASES)
def test_changes_after_save_async_returned_are_not_saved(alias: Callable[[torch.Tensor], Any], tmp_path: Path) -> None:
    tensor = torch.full((1 << 18,), 7, dtype=torch.int32)
    leaf, layout = alias(tensor), LateLayout()
    handle = ckptcore.save_async(tmp_path / "x", {"x": leaf}, layout=layout, context=Context(durability="none"))
    tensor[:] = 8
    layout.may_write.set()
    handle.result()
    assert (np.asarray(ckptcore.load(tmp_path / "x")["x"]) == 7).all()
