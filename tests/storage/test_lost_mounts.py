"""Full disks, and mounts that disappear and return. A run continues, and creates nothing while its mount is gone."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from ckptcore_tiers import NearTier, TieredDirectory

import ckptcore
from ckptcore.builtin import local_mounts
from ckptcore.builtin.local_mounts import limits_of
from ckptcore.errors import AtomicityError, StorageError
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
    shutil.copytree(directory / "run" / "1", directory / "copied" / "1")  # this run has no owner files
    shutil.copytree(directory / "run" / "1", directory / "copied" / "2")
    fill(directory)
    with ckptcore.Checkpointer(directory / "run", metadata={"name": "a"}) as run:
        check(run.load(), 3)
        if kind != "bindfs":  # bindfs has leases, and a lease needs space
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
def test_a_run_continues_when_its_mount_returns(
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
    assert sum("is not there" in record.message for record in caplog.records) == 2  # one line for each loss


@pytest.mark.parametrize("kind", ["bind", "bindfs"])
def test_a_save_leaves_nothing_below_a_mount_point_if_the_mount_disappears(kind: str, mounts: Mounts) -> None:
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
    """This also holds in a directory that this process has not used yet."""
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


@pytest.mark.parametrize("later", ["bind", "bindfs"])
def test_the_abilities_of_a_file_system_are_tested_again_after_a_mount(later: str, mounts: Mounts) -> None:
    """The new file system can exchange directories and has locks, and the old one does not, or the reverse."""
    source = mounts.disk("ext4", 24)
    kinds = ["bindfs", "bind"] if later == "bind" else ["bind", "bindfs"]
    events: list[Event] = []
    view, context = mounts.view(source, kinds[0]), ckptcore.Context(durability="none", observers=[events.append])
    ckptcore.save(view.path / "a", state(0), context=context)
    for kind in kinds:
        if kind == later:
            view.take()
            view = mounts.view(source, kind)
        with ckptcore.Checkpointer(view.path / kind, context=context) as run:
            run.save_blocking(1, state(1))
            assert (source / kind / ".ckptcore/owner.json").exists() == (kind == "bindfs"), "leases"
        if kind == "bind":
            ckptcore.save(view.path / "a", state(2), overwrite=True, context=context)
            continue
        events.clear()
        with pytest.raises(AtomicityError):
            ckptcore.save(view.path / "a", state(2), overwrite=True, context=context)
        assert "write" not in {event.phase for event in events}


@pytest.mark.lives(
    "file systems that are mounted again while a run is open",
    "overlayfs on Linux 6.18, whose locks are others then; bind mounts and bindfs 1.14.7",
    "the run goes on, and has one owner",
    "an owner loses the run to a process that opened it before the owner came back",
)
def test_a_lock_of_an_old_mount_does_not_own_the_directory(mounts: Mounts) -> None:
    """After overlayfs was mounted again, its locks are new, even while files of the old mount are open."""
    view = mounts.overlay()
    names = {"lowerdir": "lower", "upperdir": "upper", "workdir": "work"}
    layers = ",".join(f"{option}={view.parent}/tmpfs/{name}" for option, name in names.items())

    def mount_again() -> None:
        mounts.run("umount", "-l", str(view))
        mounts.run("mount", "-t", "overlay", "-o", layers, "overlay", str(view))

    with ckptcore.Checkpointer(view / "run") as first:
        first.save_blocking(1, state(1))
        mount_again()
        first.save_blocking(2, state(2))
        with pytest.raises(ckptcore.errors.DirectoryInUseError):
            ckptcore.Checkpointer(view / "run")
        mount_again()
        with ckptcore.Checkpointer(view / "run") as second:
            with pytest.raises(ckptcore.errors.SaveLostError):
                first.save_blocking(3, state(0))
            second.save_blocking(3, state(3))
    check(ckptcore.CheckpointReader(view / "run").load(), 3)


def test_mounts_are_distinguished_without_statx(mounts: Mounts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux before 5.8 does not return mount ids from `statx`."""
    view = mounts.view(mounts.tmpfs())
    (view.path / "below").mkdir()
    for _ in range(2):
        limits_of_paths = [
            limits_of(str(path)) for path in (view.path, view.path / "below", view.path / "missing" / "x")
        ]
        assert [limits.is_mount_point for limits in limits_of_paths] == [True, False, False]
        assert limits_of_paths[0].mount != limits_of_paths[1].mount == limits_of_paths[2].mount
        monkeypatch.setattr(local_mounts, "c_function", lambda *_: None)


class _UploadFailures(logging.Handler):
    """A handler that sets `came` when an upload fails."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.came = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("cannot upload a step"):
            self.came.set()


@pytest.fixture
def failures() -> Iterator[_UploadFailures]:
    handler = _UploadFailures()
    logging.getLogger("ckptcore").addHandler(handler)
    yield handler
    logging.getLogger("ckptcore").removeHandler(handler)


def test_uploads_continue_when_the_far_tier_returns(mounts: Mounts, failures: _UploadFailures, tmp_path: Path) -> None:
    view = mounts.view(mounts.disk("ext4", 24))
    tiers = TieredDirectory(NearTier(tmp_path / "near", preservation_policy=LatestN(9)), view.path / "far")
    with ckptcore.Checkpointer(tiers) as run:
        run.save_blocking(1, state(1))
        tiers.wait_for_uploads(60)
        view.take()
        run.save_blocking(2, state(2))
        assert failures.came.wait(60) and tiers.uploads.error is not None
        view.give()
        tiers.wait_for_uploads(60)
        run.save_blocking(3, state(3))
        tiers.wait_for_uploads(60)
        assert tiers.uploads.uploaded == (1, 2, 3)
    assert ckptcore.CheckpointReader(view.path / "far").steps == (1, 2, 3)
