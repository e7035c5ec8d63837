"""Saves into directories with files of other software, which can write at any time, and can read the checkpoints."""

from __future__ import annotations

import functools
import json
import logging
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pytest
import safetensors.numpy
import torch
from ckptcore_testing.faults import CrashAt, FailAt, FaultPlan, Operation, SimulatedCrash
from ckptcore_testing.locations import InterruptedPlan, faulty_context, through
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import ckptcore
from ckptcore.builtin.local import open_local
from ckptcore.commit.location import resolve_location
from ckptcore.commit.overwriting import PlacedObjects
from ckptcore.errors import CheckpointError, CheckpointNotFoundError, SaveLostError, StorageError
from ckptcore.protocols import StorageOptions
from ckptcore.runtime import runtime_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
]

_OLD, _NEW, _NEXT = 1, 2, 3
_ELEMENTS: Final = 12
_FAST: Final = ckptcore.Context(durability="none")
_DIVISIBLE: Final = ("place", "delete_unchanged", "delete_directory", "write_at")

_OTHERS: Final = {"notes.txt": "mine", "logs/1.txt": "log", "__7_0.distcp.bak": "copy", "model-card.md": "card"}


def _state(version: int) -> dict[str, Any]:
    return {"w": np.full(_ELEMENTS, version), "b": np.full(3, version), "n": version}


def _dcp_version(directory: Path) -> int | None:
    """Return the version that torch reads."""
    target = {"w": torch.zeros(_ELEMENTS, dtype=torch.int64), "b": torch.zeros(3, dtype=torch.int64)}
    if not (directory / ".metadata").exists():
        return None
    load(target, checkpoint_id=directory, no_dist=True)
    (version,) = {*target["w"].tolist(), *target["b"].tolist()}
    return int(version)


def _safetensors_version(directory: Path) -> int | None:
    """Return the version that Hugging Face reads: from a single file, or from the files in the index."""
    index = directory / "model.safetensors.index.json"
    if (directory / "model.safetensors").exists():
        names = ["model.safetensors"]
    elif index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        return None
    arrays = {key: array for name in names for key, array in safetensors.numpy.load_file(directory / name).items()}
    (version,) = {*arrays["w"].tolist(), *arrays["b"].tolist()}
    return int(version)


class _Case(NamedTuple):
    """An old checkpoint, a save, and a reader of other software.

    Attributes:
        before: the layout of the old checkpoint; "torch" or "weights" for a checkpoint of other software; None for no
            checkpoint.
        keeps: True if the old checkpoint was also saved next to other files.
        layout: the layout of the new checkpoint.
        version: returns the version that other software reads from the new layout.
    """

    before: str | None
    keeps: bool
    layout: Any
    version: Callable[[Path], int | None]


_TWO_FILES: Final = ckptcore.SafetensorsLayout(max_file_bytes=100)

_CASES: Final = {
    "dcp over dcp": _Case("dcp", False, "dcp", _dcp_version),
    "dcp over dcp beside others": _Case("dcp", True, "dcp", _dcp_version),
    "dcp over torch": _Case("torch", False, "dcp", _dcp_version),
    "dcp over nothing": _Case(None, False, "dcp", _dcp_version),
    "safetensors over one file": _Case("safetensors", False, "safetensors", _safetensors_version),
    "safetensors beside others": _Case("safetensors", True, "safetensors", _safetensors_version),
    "two files over one": _Case("safetensors", False, _TWO_FILES, _safetensors_version),
    "safetensors over weights": _Case("weights", False, "safetensors", _safetensors_version),
    "dcp over safetensors": _Case("safetensors", False, "dcp", _dcp_version),
    "zarr3 over safetensors": _Case("safetensors", True, "zarr3", lambda directory: None),
}  # fmt: skip


class _Place:
    """A directory with an old checkpoint, files of other programs, and a record of the expected files."""

    def __init__(self, above: Path, case: _Case) -> None:
        self.directory = above / "step"
        self.location = f"file://{self.directory}"
        self.case = case
        self.others = dict(_OTHERS)
        self.empty = {"empty", "logs/empty"}
        if case.before == "torch":
            arrays = {name: torch.from_numpy(_state(_OLD)[name]) for name in ("w", "b")}
            save(arrays, checkpoint_id=self.directory, no_dist=True)
        elif case.before == "weights":
            self.directory.mkdir(parents=True)
            weights = {name: _state(_OLD)[name] for name in ("w", "b")}
            safetensors.numpy.save_file(weights, self.directory / "model.safetensors")
        elif case.before is not None:
            if case.keeps:
                self.directory.mkdir(parents=True)
                (self.directory / "notes.txt").write_text("mine")
            ckptcore.save(self.location, _state(_OLD), layout=case.before, overwrite="keep-other-files", context=_FAST)
        for name, text in self.others.items():
            self.write(name, text)
        for name in self.empty:
            (self.directory / name).mkdir(parents=True)

    def write(self, name: str, text: str | None) -> None:
        """Replace a file by a rename, or delete it, as another program does."""
        path = self.directory / name
        if text is None:
            path.unlink()
            self.others.pop(name)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.part")
        temporary.write_text(text)
        temporary.rename(path)
        self.others[name] = text

    def save(self, plan: FaultPlan, version: int = _NEW) -> None:
        """Save next to the other files, with the faults of a plan."""
        place = through(self.location)
        fixed = self.case.layout == "zarr3" and self.version() != _OLD
        ckptcore.save(
            place,
            _state(version),
            layout="dcp" if fixed else self.case.layout,
            overwrite="keep-other-files",
            context=faulty_context(self.location, plan),
        )

    def version(self) -> int | None:
        """Return the version that ckptcore reads. It must be complete."""
        try:
            loaded = ckptcore.load(self.location)
        except CheckpointNotFoundError:
            return None
        assert ckptcore.verify(self.location).ok
        (version,) = {*loaded["w"].tolist(), *loaded["b"].tolist(), loaded.get("n", int(loaded["w"][0]))}
        return int(version)

    def assert_others(self, at: object) -> None:
        """Assert that the files and empty directories of other programs are unchanged."""
        paths = {name: (self.directory / name) for name in self.others}
        assert {name: path.read_text() for name, path in paths.items() if path.exists()} == self.others, at
        for name in self.empty:
            assert (self.directory / name).is_dir() and not any((self.directory / name).iterdir()), at

    def assert_clean(self, at: object) -> None:
        """Assert that only the checkpoint and the files of other programs exist."""
        self.assert_others(at)
        own = {"checkpoint.json", *ckptcore.metadata(self.location).objects}
        index = {".metadata", "model.safetensors.index.json"}
        files = {path.relative_to(self.directory).as_posix() for path in self.directory.rglob("*") if path.is_file()}
        left = files - own - self.others.keys() - index
        left -= {".zgroup"}
        assert not left, at
        assert [path.name for path in self.directory.parent.iterdir()] == ["step"], at
        assert len(index & files) <= 1, at


def _operations(above: Path, case: _Case) -> list[Operation]:
    plan = FaultPlan()
    _Place(above / "first", case).save(plan)
    return plan.operations


def _crashes(operations: Sequence[Operation]) -> Iterator[CrashAt]:
    """Yield the crashes, without those that leave the same state as the crash before."""
    for operation in operations:
        if operation.changes:
            yield CrashAt(operation.number)
        if operation.name in _DIVISIBLE:
            yield CrashAt(operation.number, "midway")
    yield CrashAt(operations[-1].number, "after")


def _slow(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.slow)


def _change_others(place: _Place) -> None:
    """Act as another program: replace, create and delete files and empty directories."""
    place.write("notes.txt", "replaced")
    place.write("late/new.txt", "created")
    place.write("logs/1.txt", None)
    (place.directory / "late/empty").mkdir()
    (place.directory / "empty").rmdir()
    place.empty = {"logs/empty", "late/empty"}


@pytest.mark.parametrize(
    "name", [name if name in ("dcp over dcp", "safetensors over one file") else _slow(name) for name in _CASES]
)
def test_a_kill_between_any_two_operations_leaves_both_readers_a_checkpoint(name: str, tmp_path: Path) -> None:
    case = _CASES[name]
    versions = set()
    for number, crash in enumerate(_crashes(_operations(tmp_path, case))):
        above = tmp_path / str(number)
        place, at = _Place(above, case), f"{name}: {crash}"
        before, foreign = place.version(), case.version(place.directory)
        with suppress(SimulatedCrash):  # after the last operation, the save may not notice the crash
            place.save(FaultPlan(crash))
        place.assert_others(at)
        version = place.version()
        assert version in (before, _NEW), at
        assert case.version(place.directory) in (foreign, _NEW), at
        versions.add(version)
        place.write("late.txt", "after the kill")
        place.save(FaultPlan(), _NEXT)
        assert place.version() == _NEXT, at
        assert case.version(place.directory) in (None, _NEXT), at
        place.assert_clean(at)
        shutil.rmtree(above)
    assert versions >= {_NEW}


@pytest.mark.parametrize("name", ["dcp over dcp", _slow("safetensors over one file"), _slow("zarr3 over safetensors")])
def test_an_error_at_any_operation_leaves_the_old_or_the_new_checkpoint(name: str, tmp_path: Path) -> None:
    case = _CASES[name]
    for number, operation in enumerate(_operations(tmp_path, case)):
        place, at = _Place(tmp_path / str(number), case), f"{name}: {operation} failed"
        try:
            place.save(FaultPlan(FailAt(number, StorageError("the test lets it fail"))))
        except CheckpointError:
            assert place.version() in (_OLD, _NEW), at
        else:
            assert place.version() == _NEW, at
        assert case.version(place.directory) in (_OLD, _NEW, None), at
        place.assert_others(at)
        place.save(FaultPlan(), _NEXT)
        assert place.version() == _NEXT, at
        place.assert_clean(at)


@pytest.mark.parametrize("name", ["dcp over dcp beside others", "dcp over nothing", _slow("safetensors over one file")])
def test_files_that_others_write_between_any_two_operations_are_kept(name: str, tmp_path: Path) -> None:
    case = _CASES[name]
    for operation in _operations(tmp_path, case):
        above = tmp_path / str(operation.number)
        place = _Place(above, case)
        place.save(InterruptedPlan(operation.number, functools.partial(_change_others, place)))
        assert place.version() == _NEW
        place.assert_clean(f"interrupted at {operation}")
        shutil.rmtree(above)


def test_files_written_after_a_kill_are_not_deleted(tmp_path: Path) -> None:
    """Other software may also write files with the names of the old checkpoint."""
    case = _CASES["dcp over torch"]
    for number, crash in enumerate(_crashes(_operations(tmp_path, case))):
        place = _Place(tmp_path / str(number), case)
        with suppress(SimulatedCrash):
            place.save(FaultPlan(crash))
        arrays = {"w": torch.full((_ELEMENTS,), 9), "b": torch.full((3,), 9)}
        save(arrays, checkpoint_id=place.directory, no_dist=True)
        with suppress(CheckpointError):
            ckptcore.save(place.location, _state(_NEW), context=_FAST)  # deletes remains, then refuses to overwrite
        assert _dcp_version(place.directory) == 9, f"{crash}"
        place.save(FaultPlan(), _NEXT)
        assert place.version() == _NEXT and _dcp_version(place.directory) == _NEXT


@pytest.mark.parametrize("task", ["keep", "overwrite", _slow("delete")])
def test_another_process_at_any_operation_leaves_a_whole_checkpoint(task: str, tmp_path: Path) -> None:
    case = _CASES["dcp over dcp"]
    outcomes = set()
    for number, operation in enumerate(_operations(tmp_path, case)):
        place, at = _Place(tmp_path / str(number), case), f"{task} before {operation}"

        def meanwhile(place: _Place = place) -> None:
            if task == "delete":
                ckptcore.delete(place.location, other_files=True)
            else:
                overwrite: Any = "with-other-files" if task == "overwrite" else "keep-other-files"
                ckptcore.save(place.location, _state(_NEXT), layout="dcp", overwrite=overwrite, context=_FAST)

        try:
            place.save(InterruptedPlan(number, meanwhile))
            outcomes.add("saved")
        except SaveLostError:
            outcomes.add("lost")
        version = place.version()
        assert version in (None, _NEW, _NEXT), at
        assert version == _dcp_version(place.directory), at
        if version is not None:
            place.save(FaultPlan(), 4)
            assert place.version() == _dcp_version(place.directory) == 4, at
    assert "saved" in outcomes


@pytest.mark.slow
def test_a_killed_copy_next_to_other_files_is_resumed(tmp_path: Path) -> None:
    def copy(place: _Place, plan: FaultPlan) -> None:
        options: Any = {"overwrite": "keep-other-files", "context": faulty_context(place.location, plan)}
        ckptcore.copy(source, through(place.location), **options)

    source = tmp_path / "source"
    ckptcore.save(source, _state(_NEW), layout="zarr3", context=_FAST)
    case = _CASES["dcp over dcp"]
    plan = FaultPlan()
    copy(_Place(tmp_path / "first", case), plan)
    for number, crash in enumerate(_crashes(plan.operations)):
        place = _Place(tmp_path / str(number), case)
        with suppress(SimulatedCrash):
            copy(place, FaultPlan(crash))
        version = place.version()
        assert version in (_OLD, _NEW), crash
        if version == _OLD:
            copy(place, FaultPlan())
        place.save(FaultPlan(), _NEXT)
        assert place.version() == _dcp_version(place.directory) == _NEXT, crash
        place.assert_others(crash)
        assert [path.name for path in place.directory.parent.iterdir()] == ["step"], crash


_OWN: Final = _CASES["dcp over dcp beside others"]


def _number(operations: Sequence[Operation], name: str, last: str) -> int:
    """Return the number of the operation with this name and this last key."""
    (number,) = [at.number for at in operations if at.name == name and at.keys[-1] == last]
    return number


class _Suspended:
    """A save that is suspended before an operation of its commit. It has no lock, unless the test takes the lock."""

    def __init__(self, above: Path, operation: int) -> None:
        self.place = _Place(above, _OWN)
        with pytest.raises(SimulatedCrash):
            self.place.save(FaultPlan(CrashAt(operation)))
        (self.hidden,) = [path.name for path in above.iterdir() if path.name.startswith(".step.")]
        self.storage = open_local(str(above), StorageOptions(durable=False))
        self.stamps = self.storage.stamps(["step/checkpoint.json"])

    def replace_root(self) -> bool:
        """Continue the rename of the root. Return False if it fails."""
        root = "step/checkpoint.json"
        try:
            self.storage.replace(f"{self.hidden}/checkpoint.json", root, self.stamps[root])
        except StorageError:
            return False
        return True

    def complete(self) -> None:
        """Continue after the rename of the root."""
        PlacedObjects(self.storage, self.storage, "step", self.hidden).complete()


def test_a_save_that_lost_its_lock_commits_everything_or_nothing(tmp_path: Path) -> None:
    """A sweep can delete a save during its commit if a lease expired, or if other hosts do not see its lock."""

    def sweep(save: _Suspended, plan: FaultPlan) -> None:
        context = faulty_context(save.place.location, plan)
        location = resolve_location(through(save.place.location), runtime_of(context).storages)
        location.commit_method.sweep(location)

    number = _number(_operations(tmp_path, _OWN), "replace", "step/checkpoint.json")
    plan = FaultPlan()
    sweep(_Suspended(tmp_path / "swept", number), plan)
    outcomes = set()
    for operation in plan.operations:
        save = _Suspended(tmp_path / str(operation.number), number)
        committed: list[bool] = []

        def commit(save: _Suspended = save, committed: list[bool] = committed) -> None:
            committed.append(save.replace_root())
            if committed[0]:
                save.complete()

        sweep(save, InterruptedPlan(operation.number, commit))
        expected = _NEW if committed[0] else _OLD
        assert save.place.version() == _dcp_version(save.place.directory) == expected, operation
        save.place.assert_clean(operation)
        outcomes.add(expected)
    assert outcomes == {_OLD, _NEW}


@pytest.mark.parametrize("killed", [False, True])
def test_a_save_while_another_is_between_its_root_and_its_index(killed: bool, tmp_path: Path) -> None:
    """The suspended save continues at any operation of this save. Afterwards, this save continues or is killed."""
    number = _number(_operations(tmp_path, _OWN), "replace", "step/.metadata")

    def run(above: Path, plan: Callable[[Callable[[], None]], FaultPlan]) -> FaultPlan:
        other = _Suspended(above, number)
        place, used = other.place, plan(other.complete)
        lock = other.storage.lock_directory(other.hidden)
        assert lock is not None
        with lock, suppress(SimulatedCrash):
            place.save(used, _NEXT)
        if killed:
            other.complete()
        assert place.version() in ((_NEW, _NEXT) if killed else (_NEXT,)), above.name
        assert _dcp_version(place.directory) in ((_OLD, _NEW, _NEXT) if killed else (_NEXT,)), above.name
        place.save(FaultPlan(), 4)
        assert place.version() == _dcp_version(place.directory) == 4, above.name
        place.assert_clean(above.name)
        return used

    for operation in run(tmp_path / "all", lambda complete: FaultPlan()).operations:
        at = operation.number
        if killed and operation.changes:
            run(tmp_path / str(at), lambda complete, at=at: FaultPlan(CrashAt(at)))  # type: ignore[misc]
        elif not killed:
            run(tmp_path / str(at), lambda complete, at=at: InterruptedPlan(at, complete))  # type: ignore[misc]


def test_objects_in_an_index_that_other_software_replaced_are_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = _Place(tmp_path, _OWN)
    number = _number(_operations(tmp_path / "first", _OWN), "replace", "step/.metadata")

    def touch() -> None:  # a new file with equal content, like a restored backup
        shutil.copy(place.directory / ".metadata", tmp_path / "copy")
        os.replace(tmp_path / "copy", place.directory / ".metadata")

    with caplog.at_level(logging.WARNING, logger="ckptcore"):
        place.save(InterruptedPlan(number, touch))
    assert "other software has replaced or removed an index" in caplog.text
    assert place.version() == _NEW and _dcp_version(place.directory) == _OLD
    place.save(FaultPlan(), _NEXT)
    assert place.version() == _dcp_version(place.directory) == _NEXT


def test_links_of_other_software_are_replaced(tmp_path: Path) -> None:
    """In a snapshot of Hugging Face, the files are links to another directory."""
    (tmp_path / "blobs").mkdir()
    place = _Place(tmp_path / "snapshots", _CASES["two files over one"])
    place.save(FaultPlan(), _OLD)
    (place.directory / "checkpoint.json").unlink()
    for path in place.directory.glob("model*.*"):
        path.rename(tmp_path / "blobs" / path.name)
        path.symlink_to(f"../../blobs/{path.name}")
    blobs = {path.name: path.read_bytes() for path in (tmp_path / "blobs").iterdir()}
    for version in (_NEW, _NEXT):
        place.save(FaultPlan(), version)
        assert place.version() == _safetensors_version(place.directory) == version
    assert not (place.directory / "model.safetensors.index.json").is_symlink()
    assert {path.name: path.read_bytes() for path in (tmp_path / "blobs").iterdir()} == blobs


def test_private_files_of_other_software_stay_private(tmp_path: Path) -> None:
    case = _CASES["dcp over torch"]
    number = next(at.number for at in _operations(tmp_path, case) if at.name == "stamps")
    place = _Place(tmp_path / "place", case)
    place.directory.chmod(0o755)
    for path in [*place.directory.glob("*.distcp"), place.directory / ".metadata"]:
        path.chmod(0o600)
    modes = []

    def look() -> None:
        (hidden,) = tmp_path.glob("place/.step.*")
        modes.append(stat.S_IMODE(hidden.stat().st_mode))

    place.save(InterruptedPlan(number, look))
    assert modes == [0o700]
    assert place.version() == _dcp_version(place.directory) == _NEW
    written = [*place.directory.glob("*.distcp"), place.directory / ".metadata"]
    assert [stat.S_IMODE(path.stat().st_mode) for path in written] == [0o600] * 2


def test_an_error_after_the_commit_is_only_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    operations = _operations(tmp_path / "first", _OWN)
    committed = _number(operations, "replace", "step/checkpoint.json")
    for operation in operations[committed + 1 :]:
        place = _Place(tmp_path / str(operation.number), _OWN)
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="ckptcore"):
            place.save(FaultPlan(FailAt(operation.number, StorageError("the test lets it fail"))))
        assert "is saved, but its index for other software may be missing" in caplog.text, operation
        assert place.version() == _NEW and _dcp_version(place.directory) in (_OLD, _NEW), operation
        place.save(FaultPlan(), _NEXT)
        assert place.version() == _dcp_version(place.directory) == _NEXT, operation
        place.assert_clean(operation)
