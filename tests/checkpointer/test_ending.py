"""The end of a run: by `close`, by an error, in a forked child, and when another run needs its directory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

import ckptcore
from ckptcore import Checkpointer, CheckpointReader
from ckptcore.errors import CheckpointError, DirectoryInUseError, SaveLostError, StorageError
from ckptcore.policies import LatestN
from tests.checkpointer.runs import (
    Gate,
    Watch,
    assert_is_step,
    keys_of,
    remove,
    save_steps,
    through,
    tree,
    watched,
    writes_arrays,
)

pytestmark = pytest.mark.system

REPOSITORY: Final = Path(__file__).parents[2]


def test_close_waits_for_saves_and_releases_the_directory(directory: str) -> None:
    run = Checkpointer(directory)
    handle = run.save(1, tree(1))
    run.close()
    run.close()
    assert handle is not None and handle.done()
    with Checkpointer(directory) as other:
        assert_is_step(other.load(), 1)


def test_a_closed_checkpointer_can_load_but_not_save(directory: str) -> None:
    run = Checkpointer(directory)
    save_steps(run, [1, 2])
    run.close()
    for call in (
        lambda: run.save(3, tree(3)),
        lambda: run.save_checkpointables(3, {"a": tree(3)}),
        lambda: run.save_blocking(3, tree(3)),
        lambda: run.save(3, tree(3), force=True),
        lambda: run.should_save(3),
        lambda: run.delete(1),
    ):
        with pytest.raises(CheckpointError, match="is closed"):
            call()
    run.wait()
    assert list(run.steps) == [1, 2]
    assert_is_step(run.load(), 2)


def test_the_error_of_the_block_is_raised(directory: str) -> None:
    watch = Watch()

    def fail(name: str, keys: Sequence[str]) -> None:
        if writes_arrays(name, keys):
            raise StorageError("no room")

    with pytest.raises(ZeroDivisionError) as caught, Checkpointer(through(directory), context=watched(watch)) as run:
        save_steps(run, [1])
        watch.before = fail
        run.save(2, tree(2))
        raise ZeroDivisionError("the loss is zero")
    (note,) = caught.value.__notes__
    assert "StorageError: no room" in note and "was closed" in note
    with Checkpointer(directory) as run:
        assert run.latest == 1


def test_a_block_that_fails_waits_for_its_saves(directory: str) -> None:
    with pytest.raises(KeyboardInterrupt), Checkpointer(directory) as run:
        run.save(1, tree(1))
        raise KeyboardInterrupt
    with CheckpointReader(directory) as reader:
        assert_is_step(reader.load(), 1)


def test_a_directory_has_one_owner(directory: str) -> None:
    with Checkpointer(directory) as run:
        save_steps(run, [1])
        with pytest.raises(DirectoryInUseError, match="in use"):
            Checkpointer(directory)
        assert_is_step(CheckpointReader(directory).load(), 1)
        save_steps(run, [2])
    with Checkpointer(directory), Checkpointer(directory + "-2") as other:
        save_steps(other, [1])


def test_a_checkpointer_that_lost_its_directory_commits_nothing(directory: str) -> None:
    watch = Watch()
    gate = Gate(watch)
    run = Checkpointer(through(directory), context=watched(watch))
    handle = run.save(1, tree(1))
    assert handle is not None and gate.arrived.wait(60)
    (record,) = [key for key in keys_of(directory) if key.endswith("/owner.json")]
    remove(directory, record)
    gate.open()
    with pytest.raises(SaveLostError):
        handle.result()
    run.close()
    with Checkpointer(directory) as other:
        assert other.latest is None


def test_successful_saves_are_not_reported_at_the_end(directory: str, capsys: pytest.CaptureFixture[str]) -> None:
    with Checkpointer(directory, preservation_policy=LatestN(2)) as run:
        save_steps(run, range(10))
    assert capsys.readouterr() == ("", "")


FORKED: Final = """
import os, sys, threading, signal
from ckptcore import Checkpointer, CheckpointReader
from ckptcore.errors import CheckpointError
from ckptcore.policies import LatestN, PreemptionCheckpointing, AnySave, EveryStep
from tests.checkpointer.runs import Gate, Watch, assert_is_step, save_steps, through, tree, watched
directory = sys.argv[1]
watch = Watch()
gate = Gate(watch)
gate.open()
policy = AnySave([EveryStep(), PreemptionCheckpointing()])
context = watched(watch)
with Checkpointer(through(directory), context=context, save_policy=policy, preservation_policy=LatestN(1)) as run:
    save_steps(run, [1])
    gate.close()
    run.save(2, tree(2))
    assert gate.arrived.wait(60)
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        for call in (lambda: run.save(3, tree(3)), lambda: run.delete(1), lambda: run.should_save(3)):
            try:
                call()
            except CheckpointError as error:
                assert "forked" in str(error), error
            else:
                raise AssertionError
        run.wait()
        with run:
            pass
        assert_is_step(run.load(1), 1)
        assert_is_step(CheckpointReader(directory).load(), 1)
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    gate.open()
    save_steps(run, [3])
    assert list(run.steps) == [3], run.steps
print("done")
"""


def test_a_forked_child_neither_owns_nor_waits(local: str) -> None:
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED, local], cwd=REPOSITORY, capture_output=True, text=True,
        check=False,
        timeout=120,
    )  # fmt: skip
    assert process.stdout == "done\n", process.stderr
    with Checkpointer(local) as run:
        assert list(run.steps) == [3]


ENDED: Final = """
import sys
from ckptcore import Checkpointer
from tests.checkpointer.runs import tree
run = Checkpointer(sys.argv[1])
run.save(1, tree(1))
"""


def test_a_program_without_close_still_saves(local: str) -> None:
    subprocess.run([sys.executable, "-c", ENDED, local], cwd=REPOSITORY, check=True, timeout=120)
    with Checkpointer(local) as run:
        assert_is_step(run.load(), 1)


KILLED: Final = """
import os, signal, sys
from ckptcore import Checkpointer
from tests.checkpointer.runs import Gate, Watch, save_steps, through, tree, watched
watch = Watch()
gate = Gate(watch)
gate.open()
run = Checkpointer(through(sys.argv[1]), context=watched(watch))
save_steps(run, [1])
gate.close()
run.save(2, tree(2))
assert gate.arrived.wait(60)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_leftovers_of_a_killed_run_are_removed_by_the_next(local: str) -> None:
    subprocess.run([sys.executable, "-c", KILLED, local], cwd=REPOSITORY, check=False, timeout=120)
    assert [name for name in os.listdir(local) if name.startswith(".2.")]
    with Checkpointer(local) as run:
        assert_is_step(run.load(), 1)
        run.wait()
        assert sorted(os.listdir(local)) == [".ckptcore", "1"]
        save_steps(run, [2])


def test_different_paths_of_one_directory_are_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    spellings: list[str | Path] = ["run", "./run/", tmp_path / "run", f"file://{tmp_path}/run"]
    for number, spelling in enumerate(spellings):
        with Checkpointer(spelling) as run:
            assert list(run.steps) == list(range(number))
            save_steps(run, [number])
            assert_is_step(run.load(), number)
            with pytest.raises(DirectoryInUseError):
                Checkpointer("run")


def test_no_files_remain_besides_the_steps(local: str) -> None:
    with Checkpointer(local, preservation_policy=LatestN(2)) as run:
        save_steps(run, range(5))
        run.load()
    names = sorted({key.partition("/")[0] for key in keys_of(local)})
    assert names == [".ckptcore", "3", "4"]
    assert keys_of(local, ".ckptcore") == [".ckptcore/owner/owner.json"]
    assert not os.listdir(f"{local}/.ckptcore/pins")
    assert not os.listdir(f"{local}/.ckptcore/deleting")


def test_the_repr_contains_the_directory(directory: str) -> None:
    with Checkpointer(directory) as run:
        assert repr(run) == f"<Checkpointer {directory!r}>" and run.directory == directory
    assert repr(CheckpointReader(directory)) == f"<CheckpointReader {directory!r}>"
    assert isinstance(run, CheckpointReader) and ckptcore.Checkpointer is Checkpointer
