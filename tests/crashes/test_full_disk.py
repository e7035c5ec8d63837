"""A full disk, and other reasons for failed saves: the error is clear, and the existing checkpoint is unchanged."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from ckptcore_orbax import OcdbtLayout, Zarr3Layout

import ckptcore
from ckptcore.builtin.host_leaves import HostArrayHandler
from ckptcore.builtin.safetensors import SafetensorsLayout
from ckptcore.errors import CheckpointError, StorageFullError, UnsupportedLeafError
from ckptcore.model import JSON, Box, HostArray, Pending, Receipt, Shard, TreeMetadata
from ckptcore.protocols import Layout, Snapshot, WriteStore
from tests.crashes.states import make_state, version_at

_OLD, _NEW = 1, 2
_FAST: Final = ckptcore.Context(durability="none", io=ckptcore.context.IOOptions(threads=1))
_DISK_BYTES: Final = 4 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 4 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    options = f"size={_DISK_BYTES}"
    if os.name != "posix" or os.geteuid() != 0:
        pytest.skip("mounting a small file system takes root")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def _assert_intact(location: Path) -> None:
    assert version_at(str(location)) == _OLD
    assert [path.name for path in location.parent.iterdir()] == [location.name], "leftovers"


@pytest.mark.parametrize("layout", [OcdbtLayout(), OcdbtLayout(compression="zstd"), Zarr3Layout()], ids=repr)
def test_a_full_disk_fails_saves_of_every_layout(layout: Layout, small_disk: Path) -> None:
    location = small_disk / "step_1"
    ckptcore.save(location, make_state(_OLD, 500_000), layout=layout)
    for save in (ckptcore.save, ckptcore.save_async):
        with pytest.raises(StorageFullError, match="full") as caught:
            handle = save(location, make_state(_NEW, 2_000_000), layout=layout, overwrite=True)
            assert handle is not None
            handle.result()
        assert "intact" in str(caught.value) and str(location.parent) in str(caught.value)
        _assert_intact(location)
    ckptcore.save(location, make_state(_NEW, 500_000), layout=layout, overwrite=True)
    assert version_at(str(location)) == _NEW


@pytest.mark.parametrize("durability", ["full", "none"])
@pytest.mark.parametrize("elements", [900_000, 2_000_000])
def test_a_full_disk_fails_the_save(elements: int, durability: Any, small_disk: Path) -> None:
    """A large file does not fit, with and without allocation in advance."""
    context = ckptcore.Context(durability=durability)
    location = small_disk / "step_1"
    ckptcore.save(location, make_state(_OLD, 500_000))
    for save in (_save, _save_in_background):
        with pytest.raises(StorageFullError, match="full") as caught:
            save(location, make_state(_NEW, elements), context)
        assert "intact" in str(caught.value) and str(location.parent) in str(caught.value)
        _assert_intact(location)
    ckptcore.save(location, make_state(_NEW, 500_000), overwrite=True, context=context)
    assert version_at(str(location)) == _NEW


@pytest.mark.parametrize("layout", [SafetensorsLayout(), OcdbtLayout(), Zarr3Layout()], ids=repr)
def test_a_disk_full_of_small_files_fails_the_save(layout: Layout, small_disk: Path) -> None:
    location = small_disk / "step_1"
    ckptcore.save(location, make_state(_OLD), layout=layout)
    (small_disk / "other").write_bytes(bytes(_DISK_BYTES - (600 << 10)))
    room = os.statvfs(small_disk)
    for size in range(0, room.f_bavail * room.f_frsize, 8 << 10):
        (small_disk / "filler").write_bytes(bytes(room.f_bavail * room.f_frsize - size))
        try:
            ckptcore.save(location, make_state(_NEW), layout=layout, overwrite=True)
        except StorageFullError:
            assert version_at(str(location)) == _OLD
        else:
            assert version_at(str(location)) == _NEW
            assert size > 0
            break
        assert {path.name for path in small_disk.iterdir()} == {"filler", "other", "step_1"}
    else:
        pytest.fail("a save that fits did not succeed")


def _save(location: Path, state: Any, context: ckptcore.Context) -> None:
    ckptcore.save(location, state, overwrite=True, context=context)


def _save_in_background(location: Path, state: Any, context: ckptcore.Context) -> None:
    ckptcore.save_async(location, state, overwrite=True, context=context).result()


def test_a_file_size_limit_fails_the_save(tmp_path: Path) -> None:
    """A limit on the size of files is another error than a full disk, and needs no mounted disk."""
    location = tmp_path / "run" / "step_1"
    ckptcore.save(location, make_state(_OLD), context=_FAST)
    program = (
        "import resource, signal, sys, ckptcore\n"
        "from tests.crashes.states import make_state\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))\n"
        "try:\n"
        "    ckptcore.save(sys.argv[1], make_state(2, 5000), overwrite=True)\n"
        "except ckptcore.errors.StorageError as error:\n"
        "    print(error)\n"
    )
    root = Path(__file__).parents[2]
    ran = subprocess.run(
        [sys.executable, "-c", program, str(location)], cwd=root, capture_output=True, text=True, check=True
    )
    assert "model.safetensors" in ran.stdout and "large" in ran.stdout, ran.stderr
    _assert_intact(location)


class _BrokenLeaves(HostArrayHandler):
    """A handler that reports another part of an array than the process holds."""

    def shards(self, leaf: Any, rank: int, size: int) -> Sequence[Shard]:
        return (Shard(Box((0,), (leaf.shape[0] - 1,)), rank, size),)


class _FailingLeaves(HostArrayHandler):
    """A handler of a device that fails during a transfer."""

    def view_on_host(self, leaf: Any, boxes: Sequence[Box]) -> Sequence[Pending[HostArray]]:
        raise RuntimeError("the device is gone")

    def copy_to_host(self, leaf: Any, boxes: Sequence[Box], memory: Any) -> Sequence[Pending[HostArray]]:
        raise RuntimeError("the device is gone")


class _FailingWrite(SafetensorsLayout):
    def write(self, snapshot: Snapshot, store: WriteStore) -> JSON:
        super().write(snapshot, store)
        raise RuntimeError("the layout is broken")


class _FailingFinish(SafetensorsLayout):
    def finish(self, tree: TreeMetadata, receipts: Sequence[Receipt], store: WriteStore) -> JSON:
        raise RuntimeError("the layout is broken")


class _StateThatIsNoJSON(SafetensorsLayout):
    def finish(self, tree: TreeMetadata, receipts: Sequence[Receipt], store: WriteStore) -> JSON:
        return {"not": {"JSON"}}  # type: ignore[dict-item]  # not JSON


class _Strange:
    """A class that no plugin handles."""


def _with(**options: Any) -> dict[str, Any]:
    return {"state": make_state(_NEW), "layout": SafetensorsLayout(), "context": _FAST} | options


_FAILURES: Final[dict[str, tuple[Callable[[], dict[str, Any]], type[Exception]]]] = {
    "an unsupported leaf": (lambda: _with(state={"fine": np.zeros(3), "odd": _Strange()}), UnsupportedLeafError),
    "an unsupported dtype": (lambda: _with(state={"odd": np.zeros(3, object)}), UnsupportedLeafError),
    "a leaf that is not whole": (
        lambda: _with(
            state=[np.zeros(9)],
            context=ckptcore.Context(plugins=ckptcore.context.PluginOptions(handlers={np.ndarray: _BrokenLeaves()})),
        ),
        CheckpointError,
    ),
    "a transfer that fails": (
        lambda: _with(
            state=[np.zeros(9)],
            context=ckptcore.Context(plugins=ckptcore.context.PluginOptions(handlers={np.ndarray: _FailingLeaves()})),
        ),
        RuntimeError,
    ),
    "a layout that fails to write": (lambda: _with(layout=_FailingWrite()), RuntimeError),
    "a layout that fails to finish": (lambda: _with(layout=_FailingFinish()), RuntimeError),
    "a layout whose state is no JSON": (lambda: _with(layout=_StateThatIsNoJSON()), Exception),
    "metadata that is no JSON": (lambda: _with(metadata={"a": {1, 2}}), ValueError),
}


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("name", _FAILURES)
def test_a_failed_overwrite_leaves_the_old_checkpoint(name: str, background: bool, tmp_path: Path) -> None:
    location = tmp_path / "run" / "step_1"
    ckptcore.save(location, make_state(_OLD), context=_FAST)
    options, error = _FAILURES[name]
    arguments = options()
    state = arguments.pop("state")
    with pytest.raises(error):
        if background:
            ckptcore.save_async(location, state, overwrite=True, **arguments).result()
        else:
            ckptcore.save(location, state, overwrite=True, **arguments)
    _assert_intact(location)


@pytest.mark.parametrize("save_bytes", [None, 8])
def test_a_failed_copy_is_reported_once(save_bytes: int | None, tmp_path: Path) -> None:
    location = tmp_path / "run" / "step_1"
    memory = ckptcore.context.MemoryOptions(save_bytes=save_bytes)
    context = ckptcore.Context(
        plugins=ckptcore.context.PluginOptions(handlers={np.ndarray: _FailingLeaves()}),
        memory=memory,
        durability="none",
    )
    with pytest.raises(RuntimeError, match="gone"):
        ckptcore.save_async(location, [np.zeros(9)], context=context)
    assert not location.parent.exists() or list(location.parent.iterdir()) == [], "leftovers"
    ckptcore.save_async(location, [1, 2], context=context).result()
    assert ckptcore.load(location) == [1, 2]
