"""Checks for missing files and for files of a wrong size, without reading their contents."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from ckptcore_testing import FarStorage
from ckptcore_testing.faulty_storage import with_storage
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

import ckptcore
from ckptcore.commit import root_json
from ckptcore.commit.location import resolve_location
from ckptcore.commit.root import CompositeRoot, Member
from ckptcore.commit.root_json import summarize_root
from ckptcore.commit.stored_root import root_bytes
from ckptcore.commit.subdirectory import subdirectory
from ckptcore.context import Context
from ckptcore.errors import CorruptCheckpointError
from ckptcore.inspection.completeness import FileCheck, StoredFiles, has_expected_sizes
from ckptcore.opening.members import member_opener
from ckptcore.opening.open_checkpoints import ConsistentRead, open_either
from ckptcore.protocols import StorageOptions
from ckptcore.runtime import runtime_of

ARRAYS = {name: np.ones(100, np.float32) for name in "abc"}


def check(location: Path | str, context: Context | None = None) -> StoredFiles:
    """Check an open checkpoint, as `inspect` does."""
    context = context or Context()
    checkpoint = ConsistentRead(location, context, open_either).open()
    return FileCheck(context).check(checkpoint, location, member_opener(checkpoint, location, context))


def check_root(location: Path | str, context: Context | None = None) -> StoredFiles:
    """Check a checkpoint by its root, as `steps` does."""
    context = context or Context()
    store = resolve_location(location, runtime_of(context).storages).store
    data = root_bytes(store)
    assert data is not None
    return FileCheck(context).check_root(location, store, data, summarize_root(data))


CHECKS = pytest.mark.parametrize("find", [check, check_root])
Find = Callable[[Path], StoredFiles]


def messages(files: StoredFiles) -> list[str]:
    return [problem.message for problem in files.problems]


@CHECKS
@pytest.mark.parametrize("layout", ["safetensors", "dcp", "ocdbt", "zarr3"])
def test_a_complete_checkpoint_has_no_problem(tmp_path: Path, layout: str, find: Find) -> None:
    ckptcore.save(tmp_path / "c", ARRAYS, layout=layout)
    objects = ckptcore.metadata(tmp_path / "c").objects
    assert find(tmp_path / "c") == StoredFiles(sum(record.size for record in objects.values()))


@CHECKS
def test_missing_short_and_long_files(tmp_path: Path, find: Find) -> None:
    ckptcore.save(tmp_path / "c", ARRAYS)
    file = tmp_path / "c" / "model.safetensors"
    size = file.stat().st_size
    for wrong_size in (size - 1, size + 1):
        os.truncate(file, wrong_size)
        assert messages(find(tmp_path / "c")) == [f"model.safetensors has {wrong_size} bytes instead of {size}"]
    file.unlink()
    (problem,) = find(tmp_path / "c").problems
    assert (problem.key, problem.start, problem.stop) == ("model.safetensors", 0, size)
    assert problem.message == "model.safetensors is missing"
    assert not has_expected_sizes(tmp_path / "c", Context())


def test_missing_parts_of_the_root_are_reported(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {**ARRAYS, "text": [f"{number:x}" * 9 for number in range(20_000)]})
    (part,) = (tmp_path / "c").glob("checkpoint.*.tree.json")
    assert not check_root(tmp_path / "c").problems
    part.unlink()
    assert messages(check_root(tmp_path / "c")) == [f"{part.name} is missing"]
    with pytest.raises(CorruptCheckpointError, match="a part of the root, is missing"):
        check(tmp_path / "c")


@CHECKS
def test_problems_of_several_checkpointables_are_reported(tmp_path: Path, find: Find) -> None:
    ckptcore.save_checkpointables(tmp_path / "c", {"model": ARRAYS, "ema": ARRAYS, "old": ARRAYS})
    ckptcore.delete(tmp_path / "c" / "old")
    assert (find(tmp_path / "c").problems, find(tmp_path / "c").deleted) == ((), ("old",))
    (tmp_path / "c" / "ema" / "model.safetensors").unlink()
    assert messages(find(tmp_path / "c")) == ["ema/model.safetensors is missing"]
    shutil.rmtree(tmp_path / "c" / "ema")
    (lost,) = messages(find(tmp_path / "c"))
    assert lost.startswith("'ema' is listed but missing")


@CHECKS
def test_missing_states_of_processes_are_reported(tmp_path: Path, find: Find) -> None:
    state = {"data": ckptcore.PerProcess({"position": 3})}
    ckptcore.save_checkpointables(tmp_path / "c", state)
    with_processes(tmp_path / "c", 3)
    assert messages(find(tmp_path / "c")) == ["'data' has a state for each of 3 processes, but only 1 exist"]


def with_processes(directory: Path, processes: int) -> None:
    """Change a composite of one process into the first of several."""
    path = directory / "checkpoint.json"
    root = root_json.decode_root(path.read_bytes(), lambda key, size: b"")
    assert isinstance(root, CompositeRoot)
    object.__setattr__(root, "members", {"data": Member("tree", processes)})
    path.write_bytes(root_json.encode_root(root)[0])
    (directory / "data").rename(directory / "data.rank_0")


@CHECKS
def test_a_checkpointable_of_another_save_is_reported(tmp_path: Path, find: Find) -> None:
    for name in ("c", "d"):
        ckptcore.save_checkpointables(tmp_path / name, {"model": ARRAYS})
    (tmp_path / "c" / "model").rename(tmp_path / "before")
    (tmp_path / "d" / "model").rename(tmp_path / "c" / "model")
    assert messages(find(tmp_path / "c")) == ["model was replaced by another save"]


@CHECKS
def test_problems_of_the_bases_of_updates_are_reported(tmp_path: Path, find: Find) -> None:
    ckptcore.save(tmp_path / "1", ARRAYS)
    ckptcore.save(tmp_path / "2", {"a": ARRAYS["b"]}, strategy=ckptcore.Update(tmp_path / "1"))
    assert not find(tmp_path / "2").problems
    os.truncate(tmp_path / "1" / "model.safetensors", 9)
    (message,) = messages(find(tmp_path / "2"))
    assert message.startswith("../1/model.safetensors has 9 bytes instead of ")
    (tmp_path / "1" / "checkpoint.json").unlink()
    with pytest.raises(CorruptCheckpointError, match="which was deleted"):
        find(tmp_path / "2")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_files_of_other_software_may_be_longer_than_their_data(tmp_path: Path) -> None:
    save_distributed({"w": torch.ones(1000)}, checkpoint_id=tmp_path)
    assert check(tmp_path) == StoredFiles(4000)
    (file,) = tmp_path.glob("*.distcp")
    size = file.stat().st_size
    with file.open("ab") as appended:
        appended.write(b"more")
    assert not check(tmp_path).problems
    os.truncate(file, size - 9)
    assert messages(check(tmp_path)) == [f"{file.name} has {size - 9} bytes instead of at least {size}"]
    file.unlink()
    assert messages(check(tmp_path)) == [f"{file.name} is missing"]


class _Listed(FarStorage):
    """A remote storage whose listing can be outdated.

    Attributes:
        left_out: suffixes of keys that listings omit.
    """

    left_out: tuple[str, ...] = ()

    def list_sizes(self, prefix: str = "") -> dict[str, int]:
        return {key: size for key, size in super().list_sizes(prefix).items() if not key.endswith(self.left_out)}


@pytest.fixture
def far() -> tuple[_Listed, Context]:
    storage = _Listed(concurrency=8)

    def open_far(url: str, options: StorageOptions) -> object:
        return subdirectory(storage, url.partition("://")[2].strip("/"))

    return storage, with_storage(Context(), "far", open_far)  # type: ignore[arg-type]  # options are not used


@CHECKS
def test_a_remote_storage_is_listed_once(
    far: tuple[_Listed, Context], find: Callable[[str, Context], StoredFiles]
) -> None:
    storage, context = far
    ckptcore.save("far://run/c", ARRAYS, layout="zarr3", context=context)
    objects = ckptcore.metadata("far://run/c", context=context).objects
    assert len(objects) > 3
    storage.forget()
    assert not find("far://run/c", context).problems
    assert (storage.count("list"), storage.count("head")) == (1, 0)
    missing = sorted(objects)[1]
    storage.delete([f"run/c/{missing}"])
    storage.forget()
    assert messages(find("far://run/c", context)) == [f"{missing} is missing"]
    assert (storage.count("list"), storage.count("head")) == (1, 1)


@CHECKS
def test_all_checkpointables_are_listed_at_once(
    far: tuple[_Listed, Context], find: Callable[[str, Context], StoredFiles]
) -> None:
    storage, context = far
    ckptcore.save_checkpointables("far://run/c", dict.fromkeys("wxyz", ARRAYS), context=context)
    storage.forget()
    assert not find("far://run/c", context).problems
    assert (storage.count("list"), storage.count("head")) == (2, 0)  # one list for the names, one for all sizes


@CHECKS
def test_an_outdated_listing_is_not_trusted(
    far: tuple[_Listed, Context], find: Callable[[str, Context], StoredFiles]
) -> None:
    storage, context = far
    ckptcore.save("far://run/c", ARRAYS, layout="zarr3", context=context)
    storage.left_out = ("zarr.json",)
    assert not find("far://run/c", context).problems
