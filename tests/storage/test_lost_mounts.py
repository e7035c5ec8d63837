"""Full disks, and mounts that go and return: a run is opened, goes on, and creates nothing where its mount is gone."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
from ckptcore_tiers import NearTier, TieredDirectory

import ckptcore
from ckptcore.errors import StorageError
from ckptcore.events import Event
from ckptcore.policies import LatestN
from tests.storage.missing_program import check, state
from tests.storage.mounts import Mounts, fill, mounts, unfill

__all__ = ["mounts"]

pytestmark = pytest.mark.system


@pytest.mark.parametrize("kind", ["tmpfs", "xfs", "ext4", "bindfs"])
def test_a_run_is_opened_loaded_and_pruned_on_a_full_disk(
    kind: str, mounts: Mounts, caplog: pytest.LogCaptureFixture
) -> None:
    if kind == "ext4":
        directory = mounts.disk("ext4", 24)
    elif kind == "bindfs":
        directory = mounts.view(mounts.disk("ext4", 24), "bindfs").path
    else:
        directory = mounts.tmpfs(16, files=150) if kind == "tmpfs" else mounts.disk("xfs", 320)
    with ckptcore.Checkpointer(directory / "run", metadata={"name": "a"}) as run:
        for step in (1, 2, 3):
            run.save(step, state(step))
    shutil.copytree(directory / "run" / "1", directory / "copied" / "1")  # without the files of an owner
    shutil.copytree(directory / "run" / "1", directory / "copied" / "2")
    fill(directory)
    with ckptcore.Checkpointer(directory / "run", metadata={"name": "a"}) as run:
        check(run.load(), 3)
        if kind != "bindfs":  # a lease takes room
            with pytest.raises(ckptcore.errors.DirectoryInUseError):
                ckptcore.Checkpointer(directory / "run")
        run.delete(1)
        run.wait()
        assert run.steps == (2, 3)
    with ckptcore.Checkpointer(directory / "copied") as copied:
        copied.delete(1)
        copied.wait()
        assert copied.steps == (2,)
        with ckptcore.Checkpointer(directory / "run") as run:
            unfill(directory)
            run.save_blocking(4, state(4))
            copied.save_blocking(4, state(4))
            with pytest.raises(ckptcore.errors.DirectoryInUseError):
                ckptcore.Checkpointer(directory / "copied")
    for name in ("run", "copied"):
        check(ckptcore.CheckpointReader(directory / name).load(), 4)


@pytest.mark.parametrize("place", ["below", "itself"])
@pytest.mark.parametrize("kind", ["bind", "bindfs"])
def test_a_run_goes_on_when_its_mount_is_back(
    kind: str, place: str, mounts: Mounts, caplog: pytest.LogCaptureFixture
) -> None:
    source = mounts.disk("ext4", 24)
    view = mounts.view(source, kind)
    directory = view.path / "a" / "run" if place == "below" else view.path
    with ckptcore.Checkpointer(directory, preservation_policy=LatestN(3)) as run:
        run.save_blocking(1, state(1))
        for step in (2, 5):
            run.wait()
            view.take()
            for _ in range(2):
                with pytest.raises(StorageError, match="is not there"):
                    run.save_blocking(step, state(step))
            with pytest.raises(StorageError, match="is not there"):
                run.reload()
            assert list(view.path.iterdir()) == []
            view.give()
            for number in range(step, step + 3):
                run.save_blocking(number, state(number))
        run.reload()
        run.wait()
        check(run.load(), 7)
        assert run.steps == (5, 6, 7)
        with pytest.raises(ckptcore.errors.DirectoryInUseError):
            ckptcore.Checkpointer(directory)
    assert sum("is not there" in record.message for record in caplog.records) == 2  # once for each time


@pytest.mark.parametrize("kind", ["bind", "bindfs"])
def test_a_save_leaves_nothing_below_a_mount_point_if_the_mount_goes(kind: str, mounts: Mounts) -> None:
    view = mounts.view(mounts.disk("ext4", 24), kind)
    left = iter(range(4))

    def take(event: Event) -> None:
        if event.phase == "claim" and next(left, None) == 2:
            view.take()

    with ckptcore.Checkpointer(view.path / "run", context=ckptcore.Context(observers=[take])) as run:
        for step in (1, 2):
            run.save_blocking(step, state(step))
        with pytest.raises(StorageError):
            run.save_blocking(3, state(3))
        assert list(view.path.iterdir()) == []
        view.give()
        run.save_blocking(3, state(3))
    check(ckptcore.CheckpointReader(view.path / "run").load(), 3)


@pytest.mark.parametrize("name", ["a", "below/b"])
def test_a_plain_save_creates_nothing_below_a_mount_that_is_gone(name: str, mounts: Mounts) -> None:
    """Also in a directory that this process has not used yet."""
    view = mounts.view(mounts.tmpfs())
    context = ckptcore.Context(durability="none")
    ckptcore.save(view.path / "a", state(1), context=context)
    shutil.rmtree(view.path / "a")
    view.take()
    with pytest.raises(StorageError, match="is not mounted now"):
        ckptcore.save(view.path / name, state(2), overwrite=True, context=context)
    assert list(view.path.iterdir()) == []
    view.give()
    ckptcore.save(view.path / name, state(2), context=context)
    check(ckptcore.load(view.path / name, context=context), 2)


def test_uploads_go_on_when_the_far_tier_is_back(mounts: Mounts, tmp_path: Path) -> None:
    view = mounts.view(mounts.disk("ext4", 24))
    tiers = TieredDirectory(NearTier(tmp_path / "near", preservation_policy=LatestN(9)), view.path / "far")
    with ckptcore.Checkpointer(tiers) as run:
        run.save_blocking(1, state(1))
        tiers.wait_for_uploads(60)
        view.take()
        run.save_blocking(2, state(2))
        while tiers.uploads.error is None:
            time.sleep(0.01)
        view.give()
        tiers.wait_for_uploads(60)
        run.save_blocking(3, state(3))
        tiers.wait_for_uploads(60)
        assert tiers.uploads.uploaded == (1, 2, 3)
    assert ckptcore.CheckpointReader(view.path / "far").steps == (1, 2, 3)
