"""Symbolic links from a checkpoint to files outside it. No reader, verification or copy follows them."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from ckptcore_tools.cli.application import application
from click.testing import CliRunner
from safetensors.numpy import save_file

import ckptcore
from ckptcore.errors import CheckpointError, NotMappableError
from ckptcore.model import ArrayRecord
from tests.corruption.checkpoints import FAST, ORIGINALS

_MOST_FILES: Final = 12


def _save_dcp(location: Path) -> None:
    ckptcore.save(location, {"w": np.arange(600.0), "v": [np.ones(3), 5, "text"]}, layout="dcp", context=FAST)


def _save_composite(location: Path) -> None:
    ckptcore.save_checkpointables(location, {"model": {"w": np.arange(600.0)}, "info": {"step": 3}}, context=FAST)


_SAVES: Final[Mapping[str, Callable[[Path], Any]]] = {
    **ORIGINALS,
    "dcp": _save_dcp,
}


def _readers(location: Path) -> Mapping[str, Callable[[], object]]:
    """Return all functions that read a checkpoint, by name."""
    unverified = ckptcore.Context(io=ckptcore.context.IOOptions(verify=False, threads=1))
    there = location.parent / "copy"
    return {
        "load": lambda: ckptcore.load(location, context=FAST),
        "load unverified": lambda: ckptcore.load(location, context=unverified),
        "load_checkpointables": lambda: ckptcore.load_checkpointables(location, context=FAST),
        "metadata": lambda: ckptcore.metadata(location).nbytes,
        "copy": lambda: ckptcore.copy(location, there, context=FAST),
        "convert": lambda: ckptcore.copy(location, there, layout="safetensors", context=FAST),
        "iter_boxes": lambda: [part.elements.tobytes() for part in ckptcore.open(location, context=FAST).iter_boxes()],
        "slices": lambda: _slices(location),
        "memory_map": lambda: _mapped(location),
        "verify": lambda: _verify(location),
        "command": lambda: _run("inspect", location) + _run("verify", location) + _run("copy", location, there),
    }


def _arrays_of(location: Path) -> Iterator[Any]:
    with ckptcore.open(location, context=FAST) as checkpoint:
        tree = ckptcore.metadata(location).tree
        for path, record in zip(tree.paths, tree.leaves, strict=True):
            if isinstance(record, ArrayRecord) and record.kind != "str":
                yield checkpoint[path]


def _slices(location: Path) -> object:
    return [array[...].tobytes() for array in _arrays_of(location)]


def _mapped(location: Path) -> object:
    maps = []
    for array in _arrays_of(location):
        with contextlib.suppress(NotMappableError):
            maps.append(array.memory_map().tobytes())
    return maps


def _verify(location: Path) -> object:
    report = ckptcore.verify(location)
    if not report.ok:
        raise CheckpointError(f"{report.problems}")
    return None


def _run(*arguments: object) -> str:
    result = CliRunner().invoke(application, [str(argument) for argument in arguments])
    if result.exit_code:
        raise CheckpointError(result.output)
    return result.output


def _outcome(read: Callable[[], object], location: Path) -> str:
    """Return the result of a reader, or its error, which must be a CheckpointError."""
    try:
        return repr(read())
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        shutil.rmtree(location.parent / "copy", ignore_errors=True)


@pytest.mark.slow
@pytest.mark.parametrize("has_root", [True, False], ids=["with root", "without root"])
@pytest.mark.parametrize("name", _SAVES)
def test_a_link_to_a_file_next_to_the_checkpoint_is_refused(name: str, has_root: bool, tmp_path: Path) -> None:
    location = tmp_path / "runs" / "step_1"
    _SAVES[name](location)
    _expect_links_refused(location, has_root)


@pytest.mark.slow
def test_a_link_to_a_file_next_to_a_composite_is_refused(tmp_path: Path) -> None:
    location = tmp_path / "runs" / "step_1"
    _save_composite(location)
    _expect_links_refused(location, True)


def _expect_links_refused(location: Path, has_root: bool) -> None:
    """Replace each file by a link to a copy. Each reader refuses the link, or returns the same as without the file."""
    if not has_root:
        for root in location.rglob("checkpoint.json"):
            root.unlink()
    files = sorted(path for path in location.rglob("*") if path.is_file())
    if len(files) > _MOST_FILES:
        files = files[:: len(files) // _MOST_FILES + 1]
    beside = location.parent / "beside"
    refused = 0
    for path in files:
        path.rename(beside)
        path.symlink_to(os.path.relpath(beside, path.parent))
        linked = {reader: _outcome(read, location) for reader, read in _readers(location).items()}
        path.unlink()
        for reader, read in _readers(location).items():
            if "leads out" in linked[reader]:
                refused += 1
            else:
                assert _outcome(read, location) == linked[reader], f"{reader} of {path.name}"
        beside.rename(path)
    assert refused >= 4, "the files are read"


@pytest.mark.parametrize("name", ["base", "checkpoint.json", "model.safetensors"])
def test_a_base_that_is_a_link_is_refused(name: str, tmp_path: Path) -> None:
    """A link is refused even if it leads to the right save in the same directory."""
    runs = tmp_path / "runs"
    ckptcore.save(runs / "base", {"a": np.arange(600.0), "b": np.ones(3)})
    ckptcore.save(runs / "update", {"b": np.zeros(3)}, strategy=ckptcore.Update(runs / "base"))
    assert ckptcore.load(runs / "update")["a"][5] == 5
    path = runs / "base" if name == "base" else runs / "base" / name
    path.rename(runs / "moved")
    path.symlink_to(runs / "moved")
    for reader, read in _readers(runs / "update").items():
        # It has no names, it has no array in one piece, and no metadata is in that file.
        unfit = reader in ("load_checkpointables", "memory_map") or (reader, name) == ("metadata", "model.safetensors")
        if not unfit:
            assert "leads out" in _outcome(read, runs / "update"), reader


def test_links_next_to_a_checkpoint_are_ignored(tmp_path: Path) -> None:
    """A run may contain a link to its last step."""
    ckptcore.save(tmp_path / "step_1", {"a": np.ones(3)})
    ckptcore.save(tmp_path / "step_2", {"a": np.ones(3)})
    (tmp_path / "latest").symlink_to("step_2")
    (tmp_path / "elsewhere").symlink_to("/nowhere")
    assert ckptcore.load(tmp_path / "latest")["a"].tolist() == [1, 1, 1]
    assert ckptcore.verify(tmp_path / "latest").ok
    ckptcore.delete(tmp_path / "step_1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "latest", "step_2"]


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_a_file_given_by_its_path_may_be_a_link(suffix: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    file = tmp_path / "data" / f"model.{suffix}"
    if suffix == "pt":
        torch.save({"w": torch.arange(4)}, file)
    else:
        save_file({"w": np.arange(4)}, file)
    (tmp_path / "links").mkdir()
    link = tmp_path / "links" / f"x.{suffix}"
    link.symlink_to("../data/" + file.name)
    assert [int(element) for element in ckptcore.load(link)["w"]] == [0, 1, 2, 3]
    assert ckptcore.verify(link).ok
    assert ckptcore.metadata(link).nbytes == 32


@pytest.mark.parametrize("target", ["../secrets/key", "{above}/secrets/key"])
def test_a_link_out_of_a_downloaded_directory_is_refused(target: str, tmp_path: Path) -> None:
    (tmp_path / "secrets").mkdir()
    save_file({"key": np.arange(4)}, tmp_path / "secrets/key")
    (tmp_path / "downloaded").mkdir()
    (tmp_path / "downloaded/model.safetensors").symlink_to(target.format(above=tmp_path))
    for reader, read in _readers(tmp_path / "downloaded").items():
        assert "leads out" in _outcome(read, tmp_path / "downloaded"), reader


def test_a_snapshot_in_the_cache_of_the_hub_loads(tmp_path: Path) -> None:
    """Load the whole snapshot, a directory in it, and one of its files."""
    repository = tmp_path / "hub/models--owner--name"
    snapshot = repository / "snapshots/0123abcd"
    (snapshot / "unet").mkdir(parents=True)
    (repository / "blobs").mkdir()
    save_file({"w": np.arange(4)}, repository / "blobs/ffff.safetensors")
    (snapshot / "unet/model.safetensors").symlink_to("../../../blobs/ffff.safetensors")
    (snapshot / "model.safetensors").symlink_to("../../blobs/ffff.safetensors")
    for location in (snapshot, snapshot / "unet", snapshot / "model.safetensors"):
        assert ckptcore.load(location)["w"].tolist() == [0, 1, 2, 3]
        assert ckptcore.verify(location).ok
        assert _slices(location) == [np.arange(4).tobytes()]
        assert _mapped(location) == [np.arange(4).tobytes()]
