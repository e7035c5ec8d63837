"""Readers while a job writes, deletes and is killed: no errors, no partial steps, no mixed steps."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

import ckptcore
from ckptcore import Checkpointer, CheckpointReader
from ckptcore.errors import StorageError
from ckptcore.policies import LatestN
from tests.checkpointer.runs import Watch, assert_is_step, keys_of, save_steps, through, tree, watched

REPOSITORY: Final = Path(__file__).parents[2]


def evaluate(directory: str, last: int, on_step: Callable[[], object]) -> list[int]:
    """Evaluate each step that can be pinned, up to step `last`. Return the evaluated steps.

    Call `on_step` for each listed step, before it is pinned, so that the writer can save and delete meanwhile.
    """
    reader = CheckpointReader(directory, context=ckptcore.Context(durability="none"))
    seen: list[int] = []
    for step in reader.new_steps(timeout=60, poll_seconds=0.001):
        on_step()
        try:
            with reader.pin(step):
                for _ in range(2):
                    assert_is_step(reader.load(step), step)
        except ckptcore.CheckpointError as error:
            # A step can be deleted only before it is pinned.
            assert isinstance(error, FileNotFoundError), error
            assert "has no committed step" in str(error), error
        else:
            seen.append(step)
        if step >= last:
            break
    return seen


def test_an_evaluator_reads_while_a_writer_saves(directory: str) -> None:
    results: list[list[int]] = []
    errors: list[BaseException] = []
    listed = threading.Semaphore(0)

    def run_evaluator() -> None:
        try:
            results.append(evaluate(directory, 60, listed.release))
        except BaseException as error:  # noqa: BLE001  # raised again below
            errors.append(error)

    threads = [threading.Thread(target=run_evaluator) for _ in range(2)]
    with Checkpointer(directory, preservation_policy=LatestN(1), context=ckptcore.Context(durability="none")) as run:
        for thread in threads:
            thread.start()
        for step in range(61):
            run.save(step, tree(step))
            assert listed.acquire(timeout=120), errors
        run.wait()
        for thread in threads:
            thread.join(120)
    assert not errors, errors
    for seen in results:
        assert seen == sorted(set(seen)) and seen[-1] == 60
    with Checkpointer(directory, preservation_policy=LatestN(1)) as run:
        save_steps(run, [61])
        assert list(run.steps) == [61], "no pin is left"


def test_the_newest_step_loads_while_steps_are_saved_and_deleted(directory: str) -> None:
    """The caller pins nothing. A load pins its step, and lists the steps again if the step was deleted."""
    stop = threading.Event()
    errors: list[BaseException] = []
    loads: list[int] = []
    loaded = threading.Semaphore(0)

    def read() -> None:
        reader = CheckpointReader(directory, context=ckptcore.Context(durability="none"))
        try:
            while not stop.is_set():
                value = reader.load()
                assert reader.restored_step is not None
                assert_is_step(value, reader.restored_step)
                assert reader.skipped_steps == ()
                loads.append(reader.restored_step)
                loaded.release()
        except BaseException as error:  # noqa: BLE001  # raised again below
            errors.append(error)

    with Checkpointer(directory, preservation_policy=LatestN(1), context=ckptcore.Context(durability="none")) as run:
        save_steps(run, [0])
        thread = threading.Thread(target=read)
        thread.start()
        for step in range(1, 60):
            run.save(step, tree(step))
            assert loaded.acquire(timeout=120), errors
        run.wait()
        stop.set()
        thread.join(120)
    assert not errors, errors
    assert loads and loads == sorted(loads)


WRITER: Final = """
import sys
import ckptcore
from ckptcore.policies import LatestN
from tests.checkpointer.runs import tree
context = ckptcore.Context(durability="none")
with ckptcore.Checkpointer(sys.argv[1], preservation_policy=LatestN(1), context=context) as run:
    for step in range(101):
        run.save(step, tree(step))
        sys.stdin.readline()  # the evaluator has listed a step
"""


@pytest.mark.system
def test_an_evaluator_can_run_in_another_process(local: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, local],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    assert process.stdin is not None
    write = process.stdin.write
    try:
        seen = evaluate(local, 100, lambda: write("\n"))
    finally:
        _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert seen[-1] == 100
    # The evaluator can have pinned two steps while the last step was saved. The next save deletes them.
    with Checkpointer(local, preservation_policy=LatestN(1)) as run:
        assert run.latest == 100 and len(run.steps) <= 3
        save_steps(run, [101])
        assert list(run.steps) == [101]


def test_wait_for_a_step_returns_new_steps(directory: str) -> None:
    reader = CheckpointReader(directory)
    assert reader.wait_for_new_step(timeout=0) is None
    assert reader.wait_for_new_step(timeout=0.02, poll_seconds=0.005) is None
    assert list(reader.new_steps(timeout=0)) == []
    with Checkpointer(directory) as run:
        save_steps(run, [1, 2])
        assert reader.wait_for_new_step(timeout=0) == 2, "what was not known is new"
        assert reader.wait_for_new_step(timeout=0) is None
        assert reader.wait_for_new_step(1, timeout=0) == 2
        assert reader.wait_for_new_step(2, timeout=0) is None
        assert list(reader.new_steps(timeout=0)) == [1, 2]
        assert list(reader.new_steps(1, timeout=0)) == [2]
        late = threading.Timer(0.05, lambda: save_steps(run, [3]))
        late.start()
        assert reader.wait_for_new_step(poll_seconds=0.005) == 3
        late.join()


def test_a_deleted_step_is_skipped(directory: str) -> None:
    reader = CheckpointReader(directory)
    with Checkpointer(directory) as run:
        save_steps(run, [1, 2, 3])
        steps = reader.new_steps(timeout=0)
        assert next(steps) == 1
        run.delete(2)
        run.wait()
        assert list(steps) == [3]


def test_a_directory_that_cannot_be_written_is_read_without_pins(directory: str) -> None:
    with Checkpointer(directory) as run:
        save_steps(run, [1, 2])
    before = keys_of(directory)
    watch = Watch()

    def read_only(name: str, keys: Sequence[str]) -> None:
        if name in ("put", "lock_directory", "delete", "open_writer", "delete_directory", "rename"):
            error = StorageError("read-only file system")
            error.errno = 30
            raise error

    watch.before = read_only
    reader = CheckpointReader(through(directory), context=watched(watch))
    assert list(reader.steps) == [1, 2]
    assert_is_step(reader.load(), 2)
    assert_is_step(reader.load(1), 1)
    target = tree(0)
    assert_is_step(reader.load_into(target), 2)
    with pytest.raises(StorageError, match="If you cannot write there, read without a pin"), reader.pin(1):
        pass
    with pytest.raises(StorageError):
        Checkpointer(through(directory), context=watched(watch))
    assert keys_of(directory) == before


def test_a_reader_changes_no_checkpoint_and_leaves_no_files(directory: str) -> None:
    with Checkpointer(directory) as run:
        save_steps(run, [1, 2])
    before = keys_of(directory)
    with CheckpointReader(directory) as reader:
        reader.load()
        reader.metadata(1)
        reader.step_info(2)
        with reader.pin(1):
            pass
    assert keys_of(directory) == before


def test_a_reader_of_a_missing_directory_creates_no_files(tmp_path: Path) -> None:
    reader = CheckpointReader(tmp_path / "none")
    assert (reader.latest, reader.steps, reader.root_metadata) == (None, (), {})
    with pytest.raises(FileNotFoundError):
        reader.load()
    for call in (lambda: reader.load(3), lambda: reader.metadata(3), lambda: reader.step_info(3)):
        with pytest.raises(FileNotFoundError, match="no committed step 3"):
            call()
    assert not (tmp_path / "none").exists()


def test_a_step_has_its_metadata(directory: str) -> None:
    with Checkpointer(directory) as run:
        run.save_blocking(1, tree(1), metadata={"a": 1})
        run.save_checkpointables(2, {"model": tree(2)}, metadata={"b": 2})
        run.wait()
        first: Any = run.metadata(1)
        second: Any = run.metadata(2)
        assert first.custom == {"a": 1} and second.custom == {"b": 2}
        assert_is_step(run.load(1, first.abstract), 1)
