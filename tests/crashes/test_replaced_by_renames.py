"""Overwrites by two renames, on file systems that cannot exchange directories, in processes that are killed."""

from __future__ import annotations

import errno
import functools
import logging
import os
import random
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest
from ckptcore_testing.faults import CrashAt, FailAt, FaultPlan, Operation, SimulatedCrash
from ckptcore_testing.locations import InterruptedPlan, faulty_context, through

import ckptcore
from ckptcore.builtin.local_calls import local_error
from ckptcore.commit.location import resolve_location
from ckptcore.commit.method import find_partial
from ckptcore.errors import CheckpointExistsError, CheckpointNotFoundError, SaveLostError
from ckptcore.runtime import runtime_of
from tests.crashes.states import make_composite, make_state, version_at

_OLD, _NEW, _NEXT = 1, 2, 3
_FAST: Final = ckptcore.Context(durability="none")


def _save(location: str, context: ckptcore.Context) -> None:
    ckptcore.save(location, make_state(_NEW), overwrite="non-atomic", context=context)


def _save_async(location: str, context: ckptcore.Context) -> None:
    ckptcore.save_async(location, make_state(_NEW), overwrite="non-atomic", context=context).result()


def _save_composite(location: str, context: ckptcore.Context) -> None:
    ckptcore.save_checkpointables(location, make_composite(_NEW), overwrite="non-atomic", context=context)


def _copy(location: str, context: ckptcore.Context) -> None:
    ckptcore.copy(f"{location}-source", location, overwrite="non-atomic", context=context)


def _convert(location: str, context: ckptcore.Context) -> None:
    ckptcore.copy(f"{location}-source", location, layout="zarr3", overwrite="non-atomic", context=context)


_TASKS: Final = (_save, _save_async, _save_composite, _copy, _convert)


class _Killed:
    """A directory in which a process was killed between the two renames."""

    def __init__(self, directory: Path, task: Callable[[str, ckptcore.Context], None] = _save) -> None:
        self.step = directory / "7"
        self.place = f"file://{self.step}"
        ckptcore.save(self.place, make_state(_OLD), context=_FAST)
        ckptcore.save(f"{self.place}-source", make_state(_NEW), context=_FAST)
        plan = FaultPlan()
        task(through(self.place), self._context(plan))
        second = max([at.number for at in plan.operations if at.name == "rename" and at.keys[1] == "7"])
        ckptcore.delete(self.place)
        ckptcore.save(self.place, make_state(_OLD), context=_FAST)
        with pytest.raises(SimulatedCrash):
            self.run(task, CrashAt(second))
        assert not self.step.exists()

    def _context(self, plan: FaultPlan) -> ckptcore.Context:
        return faulty_context(self.place, plan, exchanges=False)

    def run(self, task: Callable[[str, ckptcore.Context], None], crash: CrashAt) -> None:
        task(through(self.place), self._context(FaultPlan(crash)))


@pytest.mark.parametrize("task", _TASKS)
def test_a_reader_finds_the_old_checkpoint_of_a_killed_save(tmp_path: Path, task: Callable[..., None]) -> None:
    killed = _Killed(tmp_path, task)
    assert version_at(killed.place) == _OLD
    assert sorted(path.name for path in tmp_path.iterdir() if path.name[0] != ".") == ["7", "7-source"]


@pytest.mark.parametrize(
    "read",
    [
        ckptcore.metadata,
        ckptcore.verify,
        ckptcore.open,
        ckptcore.load_checkpointables,
        lambda place: ckptcore.copy(place, f"{place}-copy"),
        lambda place: ckptcore.Checkpointer(place.removesuffix("/7")).load(7),
        lambda place: ckptcore.CheckpointReader(place.removesuffix("/7")).load(7),
        ckptcore.delete,
    ],
)
def test_every_reader_restores_the_old_checkpoint(tmp_path: Path, read: Callable[[str], object]) -> None:
    killed = _Killed(tmp_path)
    with suppress(ckptcore.errors.CompositeCheckpointError):  # the checkpoint is found, but it is one tree
        read(killed.place)
    if read is ckptcore.delete:
        with pytest.raises(CheckpointNotFoundError):
            ckptcore.load(killed.place)
    else:
        assert version_at(killed.place) == _OLD


def test_steps_are_listed_as_before(tmp_path: Path) -> None:
    _Killed(tmp_path)
    assert ckptcore.CheckpointReader(tmp_path).steps == (7,)


def test_a_save_finds_the_old_checkpoint(tmp_path: Path) -> None:
    killed = _Killed(tmp_path)
    with pytest.raises(CheckpointExistsError):
        ckptcore.save(killed.place, make_state(_NEXT), context=_FAST)
    assert version_at(killed.place) == _OLD
    ckptcore.save(killed.place, make_state(_NEXT), overwrite=True, context=_FAST)
    assert version_at(killed.place) == _NEXT
    assert sorted(path.name for path in tmp_path.iterdir()) == ["7", "7-source"]


@pytest.mark.parametrize("task", _TASKS)
def test_a_series_of_killed_saves_loses_nothing(tmp_path: Path, task: Callable[..., None]) -> None:
    killed = _Killed(tmp_path, task)
    choices = random.Random(0)
    for _ in range(30):
        with suppress(SimulatedCrash):
            killed.run(task, CrashAt(choices.randrange(60), choices.choice(("before", "midway"))))
        assert killed.step.exists() or (tmp_path / ".7.replaced.ckptcore").exists()
    assert version_at(killed.place) in (_OLD, _NEW)
    ckptcore.save(killed.place, make_state(_NEXT), overwrite=True, context=_FAST)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["7", "7-source"]


def test_other_files_in_place_of_the_checkpoint_do_not_delete_it(tmp_path: Path) -> None:
    killed = _Killed(tmp_path)
    killed.step.mkdir()
    (killed.step / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointExistsError):
        ckptcore.save(killed.place, make_state(_NEXT), context=_FAST)
    (killed.step / "notes.txt").unlink()
    assert version_at(killed.place) == _OLD


def test_the_error_of_a_reader_that_may_not_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    killed = _Killed(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", refuse)
        assert ckptcore.CheckpointReader(tmp_path).steps == ()
        with pytest.raises(CheckpointNotFoundError) as raised:
            ckptcore.load(killed.place)
        assert "hidden the old checkpoint, which cannot be restored" in "".join(raised.value.__notes__)
    assert version_at(killed.place) == _OLD


def _replace(place: str, version: int, plan: FaultPlan) -> None:
    context = faulty_context(place, plan, exchanges=False)
    ckptcore.save(through(place), make_state(version), overwrite="non-atomic", context=context)


def _new_place(directory: Path) -> str:
    place = f"file://{directory / '7'}"
    ckptcore.save(place, make_state(_OLD), context=_FAST)
    return place


def _commit_of(operations: list[Operation]) -> Iterator[Operation]:
    """Return the changes of a save from the start of its commit."""
    first = min(at.number for at in operations if at.name == "sync_directory")
    return (at for at in operations[first:] if at.changes)


def test_a_save_killed_between_the_renames_of_another_save_loses_nothing(tmp_path: Path) -> None:
    """The other save has committed. Afterwards it continues or is killed."""

    def meanwhile(place: str, plan: FaultPlan) -> None:
        with suppress(SimulatedCrash, SaveLostError):
            _replace(place, _NEXT, plan)

    first, second = FaultPlan(), FaultPlan()
    _replace(_new_place(tmp_path / "first"), _NEW, first)
    last = max(at.number for at in first.operations if (at.name, at.keys[-1]) == ("rename", "7"))
    place = _new_place(tmp_path / "second")
    _replace(place, _NEW, InterruptedPlan(len(first.operations) - 1, functools.partial(meanwhile, place, second)))
    assert version_at(place) == _NEXT
    crashes = [at for at in _commit_of(second.operations) if at.name in ("rename", "delete_directory")]
    for other in first.operations[last + 1 :]:
        for operation in crashes if other.changes else ():
            for goes_on in (False, True):
                directory = tmp_path / f"{other.number} {operation.number} {goes_on}"
                place = _new_place(directory)
                plan = InterruptedPlan if goes_on else _KilledAfter
                crash = FaultPlan(CrashAt(operation.number))
                with suppress(SimulatedCrash, SaveLostError):
                    _replace(place, _NEW, plan(other.number, functools.partial(meanwhile, place, crash)))
                assert version_at(place) in (_NEW, _NEXT), f"{other}; {operation}"
                ckptcore.save(place, make_state(4), overwrite=True, context=_FAST)
                assert [path.name for path in directory.iterdir()] == ["7"], f"{other}; {operation}"


class _KilledAfter(InterruptedPlan):
    """A plan that kills the process after the interruption, before its operation."""

    def __init__(self, operation: int, meanwhile: Callable[[], None]) -> None:
        super().__init__(operation, meanwhile)
        self._faults[operation] = [CrashAt(operation)]


@pytest.mark.parametrize("exchanges", [False, True])
def test_a_commit_before_any_operation_of_a_restoration_wins(exchanges: bool, tmp_path: Path) -> None:
    def overwrite(place: str, plan: FaultPlan) -> None:
        context = faulty_context(place, plan, exchanges=exchanges)
        ckptcore.save(through(place), make_state(_NEXT), overwrite="non-atomic", context=context)

    plan = FaultPlan()
    overwrite(_Killed(tmp_path / "first").place, plan)
    begun = [
        at.number for at in plan.operations if (at.name, at.keys[-1]) == ("lock_directory", ".7.replaced.ckptcore")
    ]
    renamed = [at.number for at in plan.operations if (at.name, at.keys[-1]) == ("rename", "7")]
    for operation in plan.operations[begun[0] : renamed[0] + 2]:
        place = _Killed(tmp_path / str(operation.number)).place

        def commit(place: str = place) -> None:
            ckptcore.save(place, make_state(_NEW), overwrite=True, context=_FAST)

        overwrite(place, InterruptedPlan(operation.number, commit))
        assert version_at(place) == _NEXT, operation


@pytest.fixture
def lower_layer(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Return a set of inodes of directories that cannot be renamed, as in a lower layer of overlayfs."""
    inodes: set[int] = set()
    rename = os.rename

    def refuse(source: str, destination: str) -> None:
        if os.lstat(source).st_ino in inodes:
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        rename(source, destination)

    monkeypatch.setattr(os, "rename", refuse)
    return inodes


def test_a_directory_that_cannot_be_renamed_is_replaced_whole(tmp_path: Path, lower_layer: set[int]) -> None:
    def new_place(name: str) -> str:
        lower_layer.clear()
        place = _new_place(tmp_path / name)
        lower_layer.add((tmp_path / name / "7").stat().st_ino)
        return place

    plan = FaultPlan()
    _replace(new_place("first"), _NEW, plan)
    versions = set()
    for operation in _commit_of(plan.operations):
        for moment in ("before", "midway"):
            at = f"{operation.number} {moment}"
            place = new_place(at)
            with pytest.raises(SimulatedCrash):
                _replace(place, _NEW, FaultPlan(CrashAt(operation.number, moment)))
            versions.add(version_at(place))
            assert ckptcore.verify(place).ok, at
            lower_layer.clear()  # the system may reuse the inode
            ckptcore.save(place, make_state(_NEXT), overwrite="non-atomic", context=_FAST)
            assert version_at(place) == _NEXT, at
            assert [path.name for path in (tmp_path / at).iterdir()] == ["7"], at
            assert "checkpoint.replaces" not in [path.name for path in (tmp_path / at / "7").iterdir()], at
    assert versions == {_OLD, _NEW}


def test_sessions_of_directory_that_cannot_be_renamed_are_deleted_whole(tmp_path: Path, lower_layer: set[int]) -> None:
    def new_place(name: str) -> str:
        lower_layer.clear()
        place = f"file://{tmp_path / name / '7'}"
        ckptcore.partial(place, context=_FAST).save(make_state(_OLD))
        lower_layer.add((tmp_path / name / ".7.partial.ckptcore").stat().st_ino)
        return place

    plan, place = FaultPlan(), new_place("first")
    ckptcore.delete(through(place), context=faulty_context(place, plan))
    for operation in plan.operations:
        place = new_place(str(operation.number))
        with suppress(SimulatedCrash):
            ckptcore.delete(
                through(place), context=faulty_context(place, FaultPlan(CrashAt(operation.number, "midway")))
            )
        lower_layer.clear()
        location = resolve_location(place, runtime_of(_FAST).storages)
        if find_partial(location) is not None:
            ckptcore.partial(place, context=_FAST).finalize()
            assert version_at(place) == _OLD and ckptcore.verify(place).ok, operation


def test_a_session_that_begins_while_a_save_sweeps_stays(tmp_path: Path) -> None:
    """A killed first session left an empty directory."""

    def save(place: str, plan: FaultPlan) -> None:
        ckptcore.save(through(place), make_state(_NEW), context=faulty_context(place, plan))

    def new_place(name: str) -> str:
        (tmp_path / name / ".7.partial.ckptcore").mkdir(parents=True)
        return f"file://{tmp_path / name / '7'}"

    plan = FaultPlan()
    save(new_place("first"), plan)
    last = next(at.number for at in plan.operations if at.name == "hide_from_others")
    begun: list[int] = []
    refused: list[int] = []
    for number in range(last):
        place = new_place(str(number))

        def begin(place: str = place, number: int = number) -> None:
            with suppress(SaveLostError):  # the sweep has locked the directory
                ckptcore.partial(place, context=_FAST).save(make_state(_OLD))
                begun.append(number)

        try:
            save(place, InterruptedPlan(number, begin))
        except CheckpointExistsError:
            refused.append(number)
        location = resolve_location(place, runtime_of(_FAST).storages)
        assert (find_partial(location) is not None) == (number in begun), number
    assert refused and set(refused) < set(begun)


def test_a_session_is_hidden_from_users_who_cannot_read_its_location(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir(mode=0o700)
    ckptcore.partial(tmp_path / "7", context=_FAST).save(make_state(_OLD))
    assert stat.S_IMODE((tmp_path / ".7.partial.ckptcore").stat().st_mode) == 0o700


@pytest.mark.parametrize("name", ["lock_directory", "rename"])
def test_a_hidden_directory_of_another_user_stays(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hidden = ".7.0123456789abcdef.ckptcore"
    (tmp_path / hidden).mkdir()
    place = f"file://{tmp_path / '7'}"

    def save(version: int, plan: FaultPlan) -> None:
        ckptcore.save(through(place), make_state(version), overwrite=True, context=faulty_context(place, plan))

    plan = FaultPlan()
    save(_OLD, plan)
    number = next(at.number for at in plan.operations if (at.name, at.keys[0]) == (name, hidden))
    (tmp_path / hidden).mkdir()
    ckptcore.delete(place)
    (tmp_path / hidden).mkdir()
    denied = local_error(PermissionError(errno.EACCES, "Permission denied"), "lock", hidden)
    with caplog.at_level(logging.WARNING, logger="ckptcore"):
        save(_NEW, FaultPlan(FailAt(number, denied)))
    assert "the directory of a save by another user, stays" in caplog.text
    assert version_at(place) == _NEW and (tmp_path / hidden).is_dir()
