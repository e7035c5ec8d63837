"""The number of requests of a checkpoint on a far storage, and how many requests run at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ckptcore_testing import FarStorage

import ckptcore
from ckptcore.commit.subdirectory import subdirectory
from ckptcore.errors import CheckpointError, CorruptCheckpointError
from ckptcore.model import HostArray
from ckptcore.protocols import StorageBackend, StorageOptions

LOCATION = "far://bucket/run"
MOST_TO_LOAD = 10


class Far:
    """A plugin with a far storage."""

    def __init__(self, **options: Any) -> None:
        self.storage = FarStorage(**options)
        self.context = ckptcore.Context(plugins=ckptcore.context.PluginOptions(extra=[self]))

    @ckptcore.hookimpl
    def ckpt_storages(self) -> dict[str, Any]:
        return {"far": self.open}

    def open(self, url: str, options: StorageOptions) -> StorageBackend:
        return subdirectory(self.storage, url.partition("://")[2])


def small_arrays(count: int) -> dict[str, HostArray]:
    return {f"w{number:04}": np.full(250, number, np.float32) for number in range(count)}


@pytest.mark.parametrize(
    ("layout", "most_written"), [("safetensors", 5), ("dcp", 6), ("ocdbt", 12)], ids=["safetensors", "dcp", "ocdbt"]
)
def test_a_thousand_small_arrays_take_few_requests(layout: str, most_written: int) -> None:
    far = Far(part_bytes=8 << 20, request_bytes=8 << 20)
    state = small_arrays(1000)
    ckptcore.save(LOCATION, state, layout=layout, context=far.context)
    # Includes the claim, two puts that test conditions and are refused, and the root.
    assert far.storage.count("put", "begin", "part", "complete") <= most_written
    assert far.storage.count("delete", "abort") == 0
    far.storage.forget()
    loaded = ckptcore.load(LOCATION, context=far.context)
    assert far.storage.count() < MOST_TO_LOAD
    assert all(np.array_equal(loaded[name], array) for name, array in state.items())


@pytest.mark.parametrize("root", ["root of ours", "none, as of other software"])
def test_many_objects_are_written_and_read_at_once(root: str) -> None:
    far = Far(part_bytes=1 << 20, request_bytes=1 << 20, latency=0.05, concurrency=16)
    state = small_arrays(60)
    ckptcore.save(LOCATION, state, layout="zarr3", context=far.context)
    assert 8 < far.storage.peak_at_once <= 16
    if root != "root of ours":
        far.storage.delete(["bucket/run/checkpoint.json"])
    far.storage.forget()
    loaded = ckptcore.load(LOCATION, context=far.context)
    assert 8 < far.storage.peak_at_once <= 16
    assert all(np.array_equal(loaded[name], array) for name, array in state.items())


def test_a_large_state_is_uploaded_in_parts_without_a_whole_copy() -> None:
    far = Far(part_bytes=1 << 20, request_bytes=1 << 20, latency=0.05, concurrency=16)
    state = {f"w{number}": np.random.default_rng(number).random((3 << 17) + number) for number in range(6)}
    ckptcore.save(LOCATION, state, context=far.context)
    assert far.storage.peak_held_bytes <= 1 << 20  # only small objects: the claim and the root
    nbytes = far.storage.size("bucket/run/model.safetensors")
    assert far.storage.count("part") == -(-nbytes // (1 << 20))
    assert 8 < far.storage.peak_at_once <= 16
    far.storage.forget()
    loaded = ckptcore.load(LOCATION, context=far.context)
    assert all(np.array_equal(loaded[name], array) for name, array in state.items())
    assert 8 < far.storage.peak_at_once <= 16


def test_sizes_are_requested_only_for_large_objects() -> None:
    far = Far(part_bytes=1 << 20, request_bytes=1 << 20)
    state = {**small_arrays(40), "large": np.zeros(3 << 20, np.uint8)}
    ckptcore.save(LOCATION, state, layout="zarr3", context=far.context)
    far.storage.forget()
    loaded = ckptcore.load(LOCATION, context=far.context)
    assert [request.key for request in far.storage.requests if request.kind == "head"] == ["bucket/run/state/large/c/0"]
    assert all(np.array_equal(loaded[name], array) for name, array in state.items())


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("layout", ["safetensors", "zarr3", "dcp", "ocdbt"])
@pytest.mark.parametrize("left", [0, 700, None])
def test_error_for_a_truncated_or_missing_object_names_its_arrays(layout: str, verify: bool, left: int | None) -> None:
    far = Far(part_bytes=8 << 20, request_bytes=8 << 20)
    state = small_arrays(5)
    ckptcore.save(LOCATION, state, layout=layout, context=far.context)
    objects = {key: far.storage.get(key) for key in far.storage.list() if "checkpoint.json" not in key}
    key = max(objects, key=lambda key: (len(objects[key]), key))
    far.storage.delete([key])
    if left is not None:
        far.storage.put(key, objects[key][:left])
    context = ckptcore.Context(
        plugins=ckptcore.context.PluginOptions(extra=[far]), io=ckptcore.context.IOOptions(verify=verify)
    )
    with pytest.raises(CorruptCheckpointError, match="a data file is missing" if left is None else r"w000\d"):
        ckptcore.load(LOCATION, context=context)
    target = {name: np.zeros_like(array) for name, array in state.items()}
    with pytest.raises(CheckpointError):
        ckptcore.load_into(LOCATION, target, context=context)
