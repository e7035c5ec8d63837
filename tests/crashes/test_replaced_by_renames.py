"""Overwriting by two renames, on file systems that cannot exchange directories, by processes that are killed."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest
from ckptcore_testing.faults import CrashAt, FaultPlan, SimulatedCrash

import ckptcore
from ckptcore.errors import CheckpointExistsError, CheckpointNotFoundError
from tests.crashes.places import faulty_context, through
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
    with suppress(ckptcore.errors.CompositeCheckpointError):  # one tree, which was found
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


def test_other_files_in_the_place_of_the_checkpoint_do_not_delete_it(tmp_path: Path) -> None:
    killed = _Killed(tmp_path)
    killed.step.mkdir()
    (killed.step / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointExistsError):
        ckptcore.save(killed.place, make_state(_NEXT), context=_FAST)
    (killed.step / "notes.txt").unlink()
    assert version_at(killed.place) == _OLD


def test_a_reader_that_may_not_rename_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
