"""An entry of a directory that this process cannot read does not block the other entries."""

from __future__ import annotations

import errno
import json
import logging
import os
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from ckptcore_testing.locations import store_at
from ckptcore_tools.cli import command as cli_command
from ckptcore_tools.cli.application import application
from ckptcore_tools.run_steps import find_steps, read_steps
from ckptcore_view.documents import DOCUMENTS, Request
from ckptcore_view.viewed import Viewed
from click.testing import CliRunner, Result

import ckptcore
from ckptcore import Checkpointer, CheckpointReader
from ckptcore.errors import CheckpointReferredError, ObjectUnavailableError, StorageError, StoragePermissionError
from ckptcore.policies import LatestN
from ckptcore.step_names import StepNames
from tests.checkpointer.runs import Watch, array_key, assert_is_step, cut, save_steps, through, tree, watched


def archived() -> StorageError:
    return ObjectUnavailableError("403: the object is in an archive")


def closed() -> StorageError:
    return StoragePermissionError("403: the object belongs to another account")


def dead_mount() -> StorageError:
    error = StorageError(os.strerror(errno.ENOTCONN))
    error.errno = errno.ENOTCONN
    return error


class Doors:
    """A run whose entries can be closed.

    Attributes:
        directory: the directory of the run, for a Context with `context`.
        context: the Context for the directory.
        names: the closed entries.
        error: returns the error of a closed entry.
        is_object_store: True if closed entries can be listed.
        closes: returns True for the key of a closed object. By default, these are the objects in closed entries.
    """

    def __init__(self, directory: str, error: Callable[[], StorageError]) -> None:
        watch = Watch()
        watch.before = self._look
        self.directory, self.context, self.names = through(directory), watched(watch), set[str]()
        self.is_object_store = directory.startswith("memory")
        self.error = error
        self.closes: Callable[[str], bool] = lambda key: key.partition("/")[0] in self.names

    def _look(self, name: str, keys: Sequence[str]) -> None:
        if self.is_object_store and not name.startswith("get"):
            if name == "put":
                self.names.difference_update(key.partition("/")[0] for key in keys)
            return  # archived objects can be listed, replaced and deleted
        if any(map(self.closes, keys)):
            raise self.error()

    def reader(self) -> CheckpointReader:
        return CheckpointReader(self.directory, context=self.context)

    def run(self, **options: Any) -> Checkpointer:
        return Checkpointer(self.directory, context=self.context, **options)


@pytest.fixture(
    params=[("local", closed), ("local", dead_mount), ("memory", closed), ("memory", archived)],
    ids=["file", "dead-mount", "object", "archived-object"],
)
def doors(request: pytest.FixtureRequest, tmp_path: Path) -> Doors:
    kind, error = request.param
    doors = Doors(str(tmp_path / "run") if kind == "local" else f"memory://{uuid.uuid4().hex}/run", error)
    with doors.run() as run:
        save_steps(run, [1, 2, 3])
    return doors


def test_the_other_steps_are_listed_loaded_and_yielded(doors: Doors, caplog: pytest.LogCaptureFixture) -> None:
    doors.names.add("2")
    reader = doors.reader()
    for _ in range(3):
        assert reader.steps == (1, 3) and reader.latest == 3
        assert_is_step(reader.load(), 3)
        assert list(reader.new_steps(timeout=0)) == [1, 3]
    with pytest.raises(StorageError, match="403|endpoint"):
        reader.load(2)
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1 and "step 2" in warnings[0].message


def test_a_load_does_not_skip_an_unreadable_newest_step(doors: Doors) -> None:
    doors.names.add("3")
    reader = doors.reader()
    assert reader.steps == (1, 2) and reader.wait_for_new_step(0, timeout=0) == 2
    with pytest.raises(StorageError, match="403|endpoint"):
        _ = reader.latest
    with pytest.raises(StorageError, match="403|endpoint"):
        reader.load()
    assert_is_step(reader.load(2), 2)


def test_a_run_with_a_closed_step_continues(doors: Doors) -> None:
    doors.names.add("3")
    with doors.run(preservation_policy=LatestN(2)) as run:
        assert_is_step(run.load(2), 2)
        save_steps(run, [4, 5])
        run.wait()
        assert run.steps == (4, 5)
    doors.names.clear()
    assert doors.reader().steps == (3, 4, 5), "what cannot be read is not deleted"


def test_a_run_without_a_readable_step_is_an_error(doors: Doors) -> None:
    doors.names.update("123")
    with pytest.raises(StorageError, match="403|endpoint"):
        _ = doors.reader().steps
    with pytest.raises(StorageError, match="403|endpoint"):
        _ = doors.reader().latest


def test_bases_of_a_closed_entry_are_kept(doors: Doors, caplog: pytest.LogCaptureFixture) -> None:
    base, update = f"{doors.directory}/1", {"b": tree(1)["b"]}
    ckptcore.save(f"{doors.directory}/4", update, strategy=ckptcore.Update(base), context=doors.context)
    doors.names.add("4")
    with pytest.raises(CheckpointReferredError, match="because 4"):
        ckptcore.delete(base, context=doors.context)
    with doors.run(preservation_policy=LatestN(1)) as run:
        save_steps(run, [5])
        run.wait()
    assert "4 in the same directory cannot be read; what it needs stays: 1" in caplog.text
    doors.names.clear()
    assert doors.reader().steps == (1, 4, 5), "no other step stays"
    assert_is_step(ckptcore.load(f"{doors.directory}/4", context=doors.context), 1)
    ckptcore.delete(f"{doors.directory}/4", context=doors.context)
    doors.names.add("4")
    ckptcore.delete(base, context=doors.context)


def test_a_step_in_an_archive_can_be_deleted(doors: Doors) -> None:
    if "archive" not in str(doors.error()):
        pytest.skip("others are refused by their owner")
    doors.names.add("2")
    ckptcore.delete(f"{doors.directory}/2", context=doors.context)
    assert doors.reader().steps == (1, 3)


def test_a_closed_neighbour_does_not_prevent_deletions(doors: Doors, caplog: pytest.LogCaptureFixture) -> None:
    ckptcore.save(f"{doors.directory}/lost+found", tree(1), context=doors.context)
    doors.names.add("lost+found")
    ckptcore.delete(f"{doors.directory}/1", context=doors.context)
    assert "lost+found in the same directory cannot be read" in caplog.text
    with doors.run() as run:
        run.delete(2)
        run.wait()
        assert run.steps == (3,)


def test_a_broken_link_is_skipped(tmp_path: Path) -> None:
    directory = str(tmp_path)
    with Checkpointer(directory) as run:
        save_steps(run, [1, 2])
    os.symlink("loop", f"{directory}/loop")
    assert CheckpointReader(directory).steps == (1, 2)
    ckptcore.delete(f"{directory}/1")


def test_a_damaged_step_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = str(tmp_path)
    with Checkpointer(directory, preservation_policy=LatestN(30)) as run:
        save_steps(run, [1, 100])
        cut(directory, array_key(directory, "100"))
        for step in range(2, 22):
            assert_is_step(run.load(), step - 1)
            run.save_blocking(step, tree(step))
        run.wait()
    warnings = {record.message for record in caplog.records if record.levelno >= logging.WARNING}
    assert len([message for message in warnings if "step 100" in message]) <= 3, warnings
    counted = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(counted) == len(warnings), "each is said once"


def test_a_closed_step_is_listed_as_unreadable(doors: Doors) -> None:
    doors.names.add("2")
    steps = find_steps(doors.directory, StepNames(), doors.context)
    statuses = read_steps(steps, steps.candidates(), doors.context)
    assert [status.state for status in statuses] == ["committed", "unreadable", "committed"]
    assert "403" in str(statuses[1].error) or "not connected" in str(statuses[1].error)
    doors.names.update("13")
    assert [status.state for status in read_steps(steps, steps.candidates(), doors.context)] == ["unreadable"] * 3


Command = Callable[..., Result]


@pytest.fixture
def command(doors: Doors, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Return a function that runs a command of the command line with the Context of the run."""
    monkeypatch.setattr(cli_command, "default_context", lambda: doors.context)
    return lambda *arguments: CliRunner().invoke(application, [str(argument) for argument in arguments])


def states(result: Result, key: str) -> list[str]:
    return [entry["state"] for entry in json.loads(result.stdout)[key]]


@pytest.mark.parametrize("closed", ["2", "123"])
def test_the_command_line_lists_the_other_steps(doors: Doors, command: Command, closed: str) -> None:
    doors.names.update(closed)
    expected = ["unreadable" if step in closed else "committed" for step in "123"]
    for name, key in (("ls", "checkpoints"), ("steps", "steps")):
        result = command(name, doors.directory, "--json")
        failed = name == "steps" and closed == "123"  # a script must notice that it cannot read any step
        assert (result.exit_code, states(result, key)) == (6 if failed else 0, expected), result.output
    result = command("steps", doors.directory, "--verify", "--json")
    sound = [entry["sound"] for entry in json.loads(result.stdout)["steps"]]
    assert (result.exit_code, sound) == (
        6 if closed == "123" else 1,
        [None if step in closed else True for step in "123"],
    )
    lines = command("steps", doors.directory, "--verify").stdout.splitlines()[1:4]
    assert ["unknown" in line for line in lines] == [step in closed for step in "123"]
    assert not any("damaged" in line for line in lines)
    for options in (["--dry-run"], ["--yes"]):
        result = command("gc", doors.directory, "--policy", "latest_n=1", *options, "--json")
        actions = [entry["action"] for entry in json.loads(result.stdout)["steps"]]
        assert actions == (["keep"] * 3 if closed == "123" else ["delete", "keep", "keep"]), result.output
    doors.names.clear()
    assert doors.reader().steps == ((1, 2, 3) if closed == "123" else (2, 3))


def test_a_closed_neighbour_is_listed(doors: Doors, command: Command) -> None:
    ckptcore.save(f"{doors.directory}/lost+found", tree(1), context=doors.context)
    doors.names.add("lost+found")
    result = command("ls", doors.directory)
    assert result.exit_code == 0
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("lost+found")]
    assert "unreadable" in line and ("403" in line or "not connected" in line)


def test_the_other_steps_are_copied(doors: Doors, command: Command, tmp_path: Path) -> None:
    doors.names.add("2")
    for options in ([], ["--steps", "1,2"]):
        copy = str(tmp_path / f"copy{len(options)}")
        result = command("copy", doors.directory, copy, *options, "--json")
        wanted = ["copied", "failed"] if options else ["copied", "failed", "copied"]
        assert (result.exit_code, states(result, "steps")) == (1, wanted), result.output
        assert CheckpointReader(copy).steps == ((1,) if options else (1, 3))
    result = command("copy", doors.directory, str(tmp_path / "copy0"))
    assert result.exit_code == 1 and "step 2  failed: " in result.stdout
    doors.names.clear()
    assert command("copy", doors.directory, str(tmp_path / "copy0")).exit_code == 0
    assert CheckpointReader(str(tmp_path / "copy0")).steps == (1, 2, 3)


def test_a_copy_of_steps_that_are_all_closed_is_an_error(doors: Doors, command: Command, tmp_path: Path) -> None:
    doors.names.update("123")
    result = command("copy", doors.directory, str(tmp_path / "copy"))
    assert result.exit_code not in (0, 1) and ("403" in result.stderr or "endpoint" in result.stderr)


def test_steps_with_arrays_in_an_archive(doors: Doors, command: Command, tmp_path: Path) -> None:
    """Services move single objects into archives, so a root can be readable while arrays are not."""
    doors.closes = lambda key: key.startswith("2/") and key != "2/checkpoint.json"
    result = command("copy", doors.directory, str(tmp_path / "copy"), "--json")
    assert (result.exit_code, states(result, "steps")) == (1, ["copied", "failed", "copied"]), result.output
    result = command("steps", doors.directory, "--verify", "--json")
    assert [entry["sound"] for entry in json.loads(result.stdout)["steps"]] == [True, None, True]
    with pytest.raises(StorageError, match="403|endpoint"):
        ckptcore.verify(f"{doors.directory}/2", context=doors.context)
    with doors.run() as run:
        run.delete(1)
    assert doors.reader().steps == (2, 3)


@pytest.mark.parametrize("closed", ["2", "123"])
def test_the_page_of_a_run_lists_closed_steps(doors: Doors, closed: str) -> None:
    doors.names.update(closed)
    viewed = Viewed(doors.directory, doors.context, policy="latest_n=1")
    document: Any = DOCUMENTS["run"](viewed, Request({"policy": "latest_n=1"}))
    expected = ["unreadable" if step in closed else "committed" for step in "123"]
    assert [step["state"] for step in document["steps"]] == expected


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_the_notes_of_updates_are_deleted_with_the_updates(kind: str, tmp_path: Path) -> None:
    directory = str(tmp_path / "run") if kind == "file" else f"memory://{uuid.uuid4().hex}/run"
    with Checkpointer(directory, preservation_policy=LatestN(1)) as run:
        save_steps(run, [1])
        for step in (2, 3, 4):
            update = ckptcore.Update(f"{directory}/1")
            ckptcore.save(f"{directory}/{step}", {"b": tree(1)["b"]}, strategy=update)
        assert sorted(noted_in(directory)) == ["2/1", "3/1", "4/1"]
        ckptcore.delete(f"{directory}/4")
        run.reload()
        save_steps(run, [7])
        run.wait()
        assert run.steps == (7,)
    assert noted_in(directory) == []


def noted_in(directory: str) -> list[str]:
    """Return the notes of updates about their bases."""
    return list(store_at(f"{directory}/.ckptcore/bases").list())
