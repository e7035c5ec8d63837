"""A step that is a link, or that the storage cannot read or delete, does not stop the deletion of other steps."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from ckptcore_tools.cli.application import application
from click.testing import CliRunner

import ckptcore
from ckptcore import Checkpointer, CheckpointReader
from ckptcore.errors import StorageError
from ckptcore.policies import LatestN
from tests.checkpointer.runs import Watch, save_steps, through, watched
from tests.checkpointer.test_collecting import step_names

_LATEST = LatestN(2)


def _damage(kind: str, run: Path) -> None:
    """Replace step 3 by something unusable."""
    other, step = run.parent / "other", run / "3"
    shutil.rmtree(step)
    if kind == "link out":
        step.symlink_to(other)
    elif kind == "link in":
        step.symlink_to(run / "2")
    elif kind == "broken link":
        step.symlink_to(run.parent / "nothing")
    elif kind == "file":
        step.write_text("x")
    elif kind == "root in a link":
        step.mkdir()
        (step / "checkpoint.json").symlink_to(other / "checkpoint.json")
    else:
        (step / "checkpoint.json").mkdir(parents=True)


@pytest.mark.parametrize(
    "kind", ["link out", "link in", "broken link", "file", "root in a link", "directory in place of the root"]
)
@pytest.mark.parametrize("is_open", [False, True])
def test_an_unusable_step_directory_does_not_stop_the_run(
    kind: str, is_open: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    ckptcore.save(tmp_path / "other", {"n": 3})
    for step in (1, 2, 3):
        ckptcore.save(run / str(step), {"n": step})
    if not is_open:
        _damage(kind, run)
    with Checkpointer(run, preservation_policy=_LATEST) as checkpointer:
        if is_open:
            _damage(kind, run)
            checkpointer.reload()
        save_steps(checkpointer, range(4, 9))
        checkpointer.wait()
    with Checkpointer(run, preservation_policy=_LATEST) as checkpointer:
        checkpointer.save(9, {"n": 9})
    assert {path.name for path in run.iterdir()} == {"3", "8", "9", ".ckptcore"}
    assert ckptcore.load(tmp_path / "other") == {"n": 3}
    assert CheckpointReader(run).load() == {"n": 9}
    said = {record.getMessage().split(":")[0] for record in caplog.records if record.levelno >= logging.WARNING}
    if "link" in kind and kind != "broken link":
        assert said & {f"3 in {run} is passed over and left alone", f"step 3 in {run} is left alone"}


@pytest.mark.parametrize("kind", ["link out", "root in a link"])
def test_a_link_out_of_a_run_does_not_stop_deletions_or_the_command(kind: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    ckptcore.save(tmp_path / "other", {"n": 3})
    for step in (1, 2, 3, 4, 5):
        ckptcore.save(run / str(step), {"n": step})
    _damage(kind, run)
    ckptcore.delete(run / "1")
    ended = CliRunner().invoke(application, ["gc", str(run), "--policy", "latest_n=1", "--yes"])
    assert ended.exit_code == 0, ended.output
    assert {path.name for path in run.iterdir()} == {"3", "5", ".ckptcore"}
    assert ckptcore.load(tmp_path / "other") == {"n": 3}


def test_an_unreadable_step_does_not_stop_the_run(directory: str) -> None:
    """The unreadable step is kept. Steps that could be its bases are deleted, because the run does not know them."""
    watch = Watch()
    refused = StorageError("permission denied by the test")
    refused.errno = 13

    def fail(name: str, keys: Sequence[str]) -> None:
        if keys[0].startswith("2/"):
            raise refused

    with Checkpointer(through(directory), context=watched(watch)) as run:
        save_steps(run, range(1, 5))
    watch.before = fail
    with Checkpointer(through(directory), preservation_policy=_LATEST, context=watched(watch)) as run:
        save_steps(run, [5, 6])
        run.wait()
    assert step_names(directory) == ["2", "5", "6"]


def test_a_step_that_cannot_be_deleted_does_not_stop_the_run(directory: str) -> None:
    watch = Watch()

    def fail(name: str, keys: Sequence[str]) -> None:
        if name in ("rename", "put") and keys[0].startswith("2"):
            raise StorageError("the test said so")

    with Checkpointer(through(directory), context=watched(watch)) as run:
        save_steps(run, range(1, 5))
    watch.before = fail
    run = Checkpointer(through(directory), preservation_policy=_LATEST, context=watched(watch))
    run.save(5, {"n": 5})
    with pytest.raises(StorageError, match="the test said so"):
        run.close()
    assert step_names(directory) == ["2", "4", "5"]
