"""Real file systems that are mounted for the test: they work, also if they are full or read-only."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import pytest

import ckptcore
from ckptcore.errors import StorageError, StorageFullError
from tests.storage.missing_program import attempt, check, state, steps
from tests.storage.mounts import Mounts, fill, mounts, unfill

__all__ = ["mounts"]

pytestmark = pytest.mark.system

_FAST: Final = ckptcore.Context(durability="none")


_KINDS: Final[dict[str, Callable[[Mounts], Path]]] = {
    "tmpfs": lambda mounts: mounts.tmpfs(),
    "xfs": lambda mounts: mounts.disk("xfs", 320),
    "ext4": lambda mounts: mounts.disk("ext4", 64),
    "overlay": lambda mounts: mounts.overlay(),
    "bindfs": lambda mounts: mounts.bindfs(),
}


@pytest.mark.lives(
    "tmpfs",
    "Linux 6.18",
    "saves, loads, overwriting, sessions, runs, deletion",
    "lost with the machine",
)
@pytest.mark.lives(
    "XFS",
    "Linux 6.18, on a loop device",
    "saves, loads, overwriting, sessions, runs, deletion",
    "nothing",
)
@pytest.mark.lives(
    "ext4",
    "Linux 6.18, on a loop device",
    "saves, loads, overwriting, sessions, runs, deletion",
    "nothing",
)
@pytest.mark.lives(
    "overlayfs",
    "Linux 6.18, without redirect_dir",
    "saves, loads, overwriting, sessions, runs, deletion",
    "a checkpoint of a lower layer: see below",
)
@pytest.mark.lives(
    "FUSE",
    "bindfs 1.14.7",
    'saves, loads, sessions, runs, deletion; `overwrite="best-effort"`, as trainers and replacements save',
    "no exchange of directories: `overwrite=True` is refused, others replace by two renames. Leases in place of locks: "
    'after a kill, a job with `if_in_use="take over"`, as adapters pass it, waits about a minute',
)
@pytest.mark.parametrize("kind", _KINDS)
def test_everything_works(kind: str, mounts: Mounts) -> None:
    directory = _KINDS[kind](mounts)
    happened = {name: attempt(work) for name, work in steps(directory / "here", _FAST)}
    if kind == "bindfs":
        assert all(happened.pop(name).startswith("AtomicityError: ") for name in ("overwrite", "run"))
    assert set(happened.values()) == {"done"}, happened


@pytest.mark.parametrize("kind", _KINDS)
def test_checkpoints_are_replaced_as_the_file_system_permits(
    kind: str, mounts: Mounts, caplog: pytest.LogCaptureFixture
) -> None:
    """There is one warning for the directory, not one for each checkpoint."""
    directory = _KINDS[kind](mounts) / "here"
    for number in (1, 2, 3):
        for name in ("one", "other"):
            ckptcore.save(directory / name, state(number), overwrite="best-effort", context=_FAST)
            check(ckptcore.load(directory / name), number)
    warned = [record for record in caplog.records if "is replaced by two renames" in record.getMessage()]
    assert len(warned) == (1 if kind == "bindfs" else 0)
    assert sorted(os.listdir(directory)) == ["one", "other"]


@pytest.mark.lives(
    "overlayfs, a checkpoint of a lower layer",
    "Linux 6.18, without redirect_dir",
    "loads; deletion",
    '`overwrite=True` is refused before anything is written; `overwrite="non-atomic"` deletes the old one in place',
)
def test_a_checkpoint_of_a_lower_layer_is_replaced_and_deleted(mounts: Mounts) -> None:
    """The directory of the checkpoint cannot be renamed."""
    lower = mounts.overlay() / "lower"
    check(ckptcore.load(lower), 1)
    with pytest.raises(ckptcore.errors.AtomicityError, match="Nothing was changed"):
        ckptcore.save(lower, state(2), overwrite=True)
    check(ckptcore.load(lower), 1)
    ckptcore.save(lower, state(2), overwrite="non-atomic")
    check(ckptcore.load(lower), 2)
    ckptcore.save(lower, state(3), overwrite=True)
    check(ckptcore.load(lower), 3)
    assert os.listdir(lower.parent) == ["lower"]


def test_a_checkpoint_of_a_lower_layer_is_deleted(mounts: Mounts) -> None:
    lower = mounts.overlay() / "lower"
    ckptcore.delete(lower)
    assert os.listdir(lower.parent) == []


def _tmpfs_of_few_files(mounts: Mounts) -> Path:
    directory = mounts.tmpfs(16)
    mounts.run("mount", "-o", "remount,nr_inodes=150", str(directory))
    return directory


@pytest.mark.parametrize("kind", ["tmpfs", "xfs", "ext4"])
def test_everything_but_saves_works_on_a_full_disk(kind: str, mounts: Mounts) -> None:
    if kind == "ext4":
        directory = mounts.disk("ext4", 24)
    else:
        directory = _tmpfs_of_few_files(mounts) if kind == "tmpfs" else _KINDS[kind](mounts)
    for name in ("old", "other"):
        ckptcore.save(directory / name, state(1))
    run = ckptcore.Checkpointer(directory / "run")
    for step in (1, 2):
        run.save(step, state(step))
    run.wait()
    fill(directory)
    for name, overwrite in (("new", False), ("old", True)):
        with pytest.raises(StorageFullError, match=r"(?s)full.*Free some space.*intact") as caught:
            ckptcore.save(directory / name, state(2), overwrite=overwrite)
        assert str(directory) in str(caught.value)
    check(ckptcore.load(directory / "old"), 1)
    assert ckptcore.open(directory / "old")["w"][5] == 1
    assert ckptcore.verify(directory / "old").ok
    check(ckptcore.CheckpointReader(directory / "run").load(), 2)
    check(run.load(), 2)
    run.delete(1)  # as the error advises
    run.wait()
    ckptcore.delete(directory / "other")
    ckptcore.save(directory / "old", state(3), overwrite=True)
    check(ckptcore.load(directory / "old"), 3)
    run.save(3, state(3))
    run.close()
    unfill(directory)
    assert {path.name for path in directory.iterdir()} - {"lost+found"} == {"old", "run"}
    assert run.steps == (2, 3)


def test_checkpoints_on_a_read_only_file_system_can_be_read(mounts: Mounts) -> None:
    directory = mounts.tmpfs()
    ckptcore.save(directory / "old", state(1))
    with ckptcore.Checkpointer(directory / "run") as run:
        run.save(1, state(1))
    mounts.run("mount", "-o", "remount,ro", str(directory))
    check(ckptcore.load(directory / "old"), 1)
    assert np.array_equal(ckptcore.open(directory / "old")["w"][:9], state(1)["w"][:9])
    assert ckptcore.verify(directory / "old").ok
    check(ckptcore.CheckpointReader(directory / "run").load(), 1)
    changes: list[Callable[[], object]] = [
        lambda: ckptcore.save(directory / "new", state(2)),
        lambda: ckptcore.save(directory / "old", state(2), overwrite=True),
        lambda: ckptcore.delete(directory / "old"),
        lambda: ckptcore.Checkpointer(directory / "run"),
        lambda: ckptcore.Checkpointer(directory / "other"),
        lambda: ckptcore.copy(directory / "old", directory / "new"),
    ]
    for change in changes:
        with pytest.raises(StorageError, match="mounted read-only.*CheckpointReader.*mount") as caught:
            change()
        assert str(directory) in str(caught.value) and ".ckptcore" not in str(caught.value)
    check(ckptcore.load(directory / "old"), 1)
