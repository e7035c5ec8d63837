"""Remedies in errors about runs and their steps. Each test follows the text of a remedy."""

from __future__ import annotations

import os
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
from ckptcore_testing.cases import refused
from ckptcore_testing.trees import same_value

import ckptcore
from ckptcore import Checkpointer, CheckpointReader
from ckptcore.builtin.local import open_local
from ckptcore.builtin.memory import MemoryStorages
from ckptcore.commit.location import commit_method
from ckptcore.commit.subdirectory import subdirectory
from ckptcore.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointReferredError,
    DirectoryInUseError,
    SaveLostError,
    StepPinnedError,
)
from ckptcore.protocols import StorageOptions
from tests.errors.refusals import ONE, TWO, interrupted
from tests.ownership.fake_clock import FakeClock


def test_a_step_that_a_reader_pins(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "run") as checkpointer:
        for step in (1, 2):
            checkpointer.save_blocking(step, {"w": ONE * step})
        with CheckpointReader(tmp_path / "run") as reader, reader.pin(1):
            refused(lambda: checkpointer.delete(1), "is pinned by a reader; delete it later", error=StepPinnedError)
            assert same_value(reader.load(1), {"w": ONE})
        checkpointer.delete(1)
        checkpointer.wait()
        assert list(checkpointer.steps) == [2]


def test_a_step_that_is_being_saved(tmp_path: Path) -> None:
    writing, refusal = threading.Event(), threading.Event()

    def wait() -> None:
        writing.set()
        assert refusal.wait(60)

    with Checkpointer(tmp_path / "run") as checkpointer:
        for step in (1, 2):
            checkpointer.save_blocking(step, {"w": ONE})
    context = interrupted("file", "exchange", "1", wait)
    with Checkpointer(tmp_path / "run", context=context) as checkpointer:
        checkpointer.save(1, {"w": TWO}, overwrite=True)
        assert writing.wait(60)
        try:
            refused(lambda: checkpointer.delete(1), "is being saved; delete it later", error=StepPinnedError)
        finally:
            refusal.set()
        checkpointer.wait()
        assert same_value(checkpointer.load(1), {"w": TWO})
        checkpointer.delete(1)
        checkpointer.wait()
        assert list(checkpointer.steps) == [2]


def test_a_step_that_is_being_deleted(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "run") as checkpointer:
        for step in (1, 2):
            checkpointer.save_blocking(step, {"w": ONE * step})
    steps = subdirectory(open_local(str(tmp_path), StorageOptions()), "run")
    locks = commit_method(steps).locks(str(tmp_path / "run"))
    deletion = locks.intend_deletion("1")
    assert deletion is not None
    with deletion:
        refused(lambda: locks.pin("1", wait_seconds=0), "load another step", error=CheckpointNotFoundError)
        with locks.pin("2"), CheckpointReader(tmp_path / "run") as reader:
            assert same_value(reader.load(2), {"w": ONE * 2})


def test_a_path_that_is_neither_a_file_nor_a_directory(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "run") as checkpointer:
        os.mkfifo(tmp_path / "run" / "1")
        advice = "such as a named pipe; remove it and save again"
        refused(lambda: checkpointer.save_blocking(1, {"w": ONE}), advice, error=SaveLostError)
        (tmp_path / "run" / "1").unlink()
        checkpointer.save_blocking(1, {"w": ONE})
        assert same_value(checkpointer.load(1), {"w": ONE})


def test_a_checkpointer_in_another_process(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save_blocking(1, {"w": ONE})
        advice = "Pass the directory, and read it with CheckpointReader in the other process"
        refused(lambda: pickle.dumps(checkpointer), advice, error=TypeError)
        with CheckpointReader(pickle.loads(pickle.dumps(checkpointer.directory))) as reader:
            assert same_value(reader.load(), {"w": ONE})


def test_a_run_that_continues_from_an_earlier_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The error for an existing step, and the warning for a new earlier step, name the steps to delete."""
    with Checkpointer(tmp_path / "run") as checkpointer:
        for step in (1, 3, 5):
            checkpointer.save_blocking(step, {"w": ONE * step})
    with Checkpointer(tmp_path / "run") as checkpointer:
        assert same_value(checkpointer.load(1), {"w": ONE})
        refused(
            lambda: checkpointer.save_blocking(3, {"w": TWO}),
            "To continue from an earlier step, first delete this step and all later ones: a resume loads the newest",
            error=CheckpointExistsError,
        )
        checkpointer.save_blocking(2, {"w": TWO})
        assert "delete the steps after the one that the run was set back to" in caplog.text
        for step in (3, 5):
            checkpointer.delete(step)
        checkpointer.wait()
        checkpointer.save_blocking(3, {"w": TWO * 3})
    with Checkpointer(tmp_path / "run") as checkpointer:
        assert same_value(checkpointer.load(), {"w": TWO * 3})
        assert list(checkpointer.steps) == [1, 2, 3]


@pytest.mark.parametrize("content", ["", "[]", '{"a": '])
def test_damaged_metadata_of_a_run(content: str, tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "run", metadata={"a": 1}) as checkpointer:
        checkpointer.save_blocking(1, {"w": ONE})
    file = tmp_path / "run" / ".ckptcore" / "metadata.json"
    for follow in ("write", "remove"):
        file.write_text(content)
        with CheckpointReader(tmp_path / "run") as reader:
            advice = "write it again with Checkpointer(directory, metadata=...), or remove it"
            refused(lambda: reader.root_metadata, ".ckptcore/metadata.json", advice)  # called in this iteration
            assert same_value(reader.load(), {"w": ONE})
        if follow == "write":
            Checkpointer(tmp_path / "run", metadata={"b": 2}).close()
        else:
            file.unlink()
        with CheckpointReader(tmp_path / "run") as reader:
            assert reader.root_metadata == ({"b": 2} if follow == "write" else {})


def test_a_step_that_others_refer_to(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "run") as checkpointer:
        for step in (1, 3):
            checkpointer.save_blocking(step, {"w": ONE, "v": TWO})
        for name in ("update", "another"):
            update = ckptcore.Update(base=tmp_path / "run" / "1")
            ckptcore.save(tmp_path / "run" / name, {"w": TWO}, strategy=update)
        advice = "delete them first, or replace them with copies (ckptcore.copy), which need no base"
        refused(lambda: checkpointer.delete(1), advice, error=CheckpointReferredError)
        ckptcore.delete(tmp_path / "run" / "another")
        ckptcore.copy(tmp_path / "run" / "update", tmp_path / "copy")
        ckptcore.delete(tmp_path / "run" / "update")
        (tmp_path / "copy").rename(tmp_path / "run" / "update")
        checkpointer.delete(1)
        checkpointer.wait()
        assert list(checkpointer.steps) == [3]
    assert same_value(ckptcore.load(tmp_path / "run" / "update"), {"w": TWO, "v": TWO})


def test_an_abstract_tree_as_the_step(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save_blocking(1, {"w": ONE})
        wrong: Any = {"w": TWO}
        refused(lambda: checkpointer.load(wrong), "pass the abstract tree as abstract=", error=TypeError)
        assert same_value(checkpointer.load(abstract=wrong), {"w": ONE})


def test_preemption_on_another_thread(tmp_path: Path) -> None:
    policy = ckptcore.policies.PreemptionCheckpointing()
    refusals = []

    def create() -> None:
        refusals.append(refused(lambda: Checkpointer(tmp_path / "run", save_policy=policy), "", error=ValueError))
        with Checkpointer(tmp_path / "run", save_policy=policy, preemption_notice=lambda step: True) as checkpointer:
            assert checkpointer.save(1, {"w": ONE}) is not None

    thread = threading.Thread(target=create)
    thread.start()
    thread.join()
    assert (
        "create the Checkpointer there, or pass preemption_notice=, a function of the step that returns True"
        in refusals[0]
    )
    assert same_value(ckptcore.load(tmp_path / "run" / "1"), {"w": ONE})
    with Checkpointer(tmp_path / "run", save_policy=policy) as checkpointer:
        assert checkpointer.save(2, {"w": ONE}) is None


def test_a_run_of_a_process_that_failed() -> None:
    """The run is on an object store. The clock of the first process does not advance, as if it were suspended."""
    store = MemoryStorages().open("memory://remedies", StorageOptions())
    first = commit_method(store).locks("run", clock=FakeClock()).own()
    locks = commit_method(store).locks("run", clock=FakeClock())
    text = refused(locks.own, "If that process has failed, pass if_in_use='take over'", error=DirectoryInUseError)
    options = eval(f"dict({text.partition('pass ')[2].partition(',')[0]})")
    with locks.own(**options) as second:
        refused(
            first.check,
            "Only one of the two may write: end this job, or end the other one and open it again",
            error=SaveLostError,
        )
        second.check()
    with commit_method(store).locks("run", clock=FakeClock()).own() as again:
        again.check()
