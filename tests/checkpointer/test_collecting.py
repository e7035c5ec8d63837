"""Steps that are deleted by a policy or by name, and steps that are always kept."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import pytest

from ckptcore import Checkpointer, CheckpointReader
from ckptcore.commit.root import Claim
from ckptcore.commit.root_json import encode_claim
from ckptcore.errors import CheckpointError, CheckpointNotFoundError, OnlyStepError, StepPinnedError, StorageError
from ckptcore.policies import AnyPreservation, BestN, CustomPreservation, EveryNSteps, LatestN, StepInfo
from tests.checkpointer.runs import (
    ROOT,
    Gate,
    Watch,
    array_key,
    assert_is_step,
    flip,
    keys_of,
    remove,
    save_steps,
    store_of,
    through,
    tree,
    watched,
)

REPOSITORY: Final = Path(__file__).parents[2]


def step_names(directory: str) -> list[str]:
    """Return the names of all directories of steps, including hidden ones."""
    return [name[:-1] for name in store_of(directory).list_names() if name.endswith("/") and name != ".ckptcore/"]


def test_the_policy_decides_which_steps_are_deleted(directory: str) -> None:
    with Checkpointer(directory, preservation_policy=AnyPreservation([LatestN(2), EveryNSteps(3)])) as run:
        save_steps(run, range(1, 9))
        assert list(run.steps) == [3, 6, 7, 8]
    assert step_names(directory) == ["3", "6", "7", "8"]
    for step in (3, 6, 7, 8):
        assert_is_step(CheckpointReader(directory).load(step), step)


def test_metrics_of_earlier_runs_count(directory: str) -> None:
    policy = AnyPreservation([BestN(2, "loss", "min", keep_unmeasured=False), LatestN(1)])
    for step, loss in [(1, 0.1), (2, 0.9), (3, math.nan), (4, 0.2), (5, math.inf), (6, 0.8)]:
        with Checkpointer(directory, preservation_policy=policy) as run:
            run.save(step, tree(step), metrics={"loss": loss})
    assert step_names(directory) == ["1", "4", "6"]


def test_a_pinned_step_is_kept_until_the_pin_is_released(directory: str) -> None:
    reader = CheckpointReader(directory)
    with Checkpointer(directory, preservation_policy=LatestN(1)) as run:
        save_steps(run, [1])
        reader.reload()
        with reader.pin(1):
            save_steps(run, [2, 3])
            assert list(run.steps) == [1, 3]
            with pytest.raises(StepPinnedError, match="pinned"):
                run.delete(1)
            assert_is_step(reader.load(1), 1)
        save_steps(run, [4])
        assert list(run.steps) == [4]
        with pytest.raises(CheckpointNotFoundError), reader.pin(1):
            pass
        with pytest.raises(CheckpointNotFoundError), reader.pin(77):
            pass


def test_the_newest_and_the_last_saved_step_are_kept_after_loading_an_older_step(directory: str) -> None:
    with Checkpointer(directory) as run:
        save_steps(run, [10, 20, 30])
    with Checkpointer(directory, preservation_policy=LatestN(1)) as run:
        assert_is_step(run.load(10), 10)
        save_steps(run, [11])
        assert list(run.steps) == [11, 30]
        save_steps(run, [12])
        assert list(run.steps) == [12, 30]
    with Checkpointer(directory, preservation_policy=LatestN(0)) as run:
        save_steps(run, [13])
        assert list(run.steps) == [13, 30]


def test_a_policy_that_keeps_nothing_keeps_the_newest(directory: str) -> None:
    def nothing(steps: Sequence[StepInfo], now: float) -> Iterable[int]:
        return ()

    with Checkpointer(directory, preservation_policy=CustomPreservation(nothing)) as run:
        save_steps(run, [1, 2, 3])
        assert list(run.steps) == [3]


def test_an_error_of_a_policy_is_reported_and_loses_no_save(directory: str) -> None:
    def fails(steps: Sequence[StepInfo], now: float) -> Iterable[int]:
        raise ZeroDivisionError("my policy")

    run = Checkpointer(directory, preservation_policy=CustomPreservation(fails))
    for step in (1, 2, 3):
        run.save(step, tree(step))
    with pytest.raises(ZeroDivisionError, match="my policy") as caught:
        run.wait()
    assert set(getattr(caught.value, "__notes__", ())) <= {"and then: ZeroDivisionError: my policy"}
    run.wait()  # the error is reported once
    run.close()
    assert CheckpointReader(directory).steps == (1, 2, 3)


def test_broken_steps_are_not_deleted_and_not_counted(directory: str) -> None:
    with Checkpointer(directory) as run:
        save_steps(run, [1, 2, 3, 4])
    store_of(directory).put(f"3/{ROOT}", b"nonsense")
    flip(directory, array_key(directory, "4"))
    with Checkpointer(directory, preservation_policy=LatestN(2)) as run:
        assert_is_step(run.load(), 2)
        assert [skip.step for skip in run.skipped_steps] == [4, 3]
        save_steps(run, [5])
        assert list(run.steps) == [2, 3, 4, 5], "two that are whole, and the broken ones"


def test_delete_removes_the_named_steps(directory: str) -> None:
    with Checkpointer(directory) as run:
        with pytest.raises(CheckpointNotFoundError, match="no committed step 1"):
            run.delete(1)
        save_steps(run, [1, 2])
        run.delete(1)
        assert list(run.steps) == [2], "it is gone for this process at once"
        with pytest.raises(CheckpointNotFoundError):
            run.delete(1)
        with pytest.raises(OnlyStepError, match="only valid"):
            run.delete(2)
        run.wait()
        assert list(run.steps) == [2]
    assert step_names(directory) == ["2"]


def test_two_concurrent_deletions_keep_one_step(directory: str) -> None:
    with Checkpointer(directory) as run:
        save_steps(run, [1, 2])
        run.delete(2)
        with pytest.raises(OnlyStepError):
            run.delete(1)
        run.wait()
        assert list(run.steps) == [1]


def test_the_last_valid_step_is_kept_if_newer_steps_are_broken(directory: str) -> None:
    with Checkpointer(directory) as run:
        save_steps(run, [1, 2])
        flip(directory, array_key(directory, "2"))
        assert_is_step(run.load(), 1)
        with pytest.raises(OnlyStepError):
            run.delete(1)
        run.delete(2)
        run.wait()
        assert list(run.steps) == [1]


def test_a_step_can_be_saved_again_right_after_it_was_deleted(directory: str) -> None:
    with Checkpointer(directory) as run:
        save_steps(run, [0])
        for number in range(1, 20):
            run.save(1, tree(number))
            run.wait()
            run.delete(1)
        run.save(1, tree(99))
        run.wait()
        assert run.load(1)["step"] == 99
    assert step_names(directory) == ["0", "1"]


def test_a_failed_deletion_is_reported_once_and_existing_steps_are_listed(directory: str) -> None:
    watch = Watch()
    run = Checkpointer(through(directory), context=watched(watch))
    save_steps(run, [1, 2])

    def fail(name: str, keys: Sequence[str]) -> None:
        if name in ("rename", "put") and keys[0].startswith("1"):
            raise StorageError("the test said so")

    watch.before = fail
    run.delete(1)
    with pytest.raises(StorageError, match="the test said so"):
        run.wait()
    run.wait()
    assert list(run.steps) == [1, 2]
    watch.before = lambda name, keys: None
    run.delete(1)
    run.close()
    assert step_names(directory) == ["2"]


def test_a_deletion_that_fails_after_the_step_vanished(directory: str) -> None:
    watch = Watch()
    run = Checkpointer(through(directory), context=watched(watch))
    save_steps(run, [1, 2])

    def fail(name: str, keys: Sequence[str]) -> None:
        removes = name in ("delete", "delete_directory") and keys[0] != ".1.replaced.ckptcore"
        if removes and any(key.startswith((".1.", "1/")) for key in keys):
            raise StorageError("the test said so")

    watch.before = fail
    run.delete(1)
    with pytest.raises(StorageError, match="the test said so"):
        run.wait()
    assert list(run.steps) == [2]
    watch.before = lambda name, keys: None
    run.close()
    with Checkpointer(directory) as other:
        other.wait()
    assert step_names(directory) == ["2"]


def test_a_save_does_not_wait_for_a_deletion(directory: str) -> None:
    watch = Watch()
    deleting, goes_on = threading.Event(), threading.Event()

    def stop(name: str, keys: Sequence[str]) -> None:
        if threading.current_thread().name.startswith("ckptcore-clean") and name in ("rename", "delete"):
            deleting.set()
            assert goes_on.wait(60)

    with Checkpointer(through(directory), context=watched(watch)) as run:
        save_steps(run, [1, 2])
        watch.before = stop
        run.delete(1)
        assert deleting.wait(60)
        run.save_blocking(3, tree(3))
        assert list(run.steps) == [2, 3]
        goes_on.set()


def test_a_step_that_is_being_replaced_is_not_deleted(local: str) -> None:
    """Two later saves have begun, so the step is neither the last saved step nor the last begun step."""
    watch = Watch()
    begun, collected = threading.Event(), threading.Event()

    def stop(name: str, keys: Sequence[str]) -> None:
        if threading.current_thread().name.startswith("ckptcore-clean"):
            assert begun.wait(60)
        if name == "open_new" and keys[0].startswith(".2."):
            assert collected.wait(60)

    policy = LatestN(1)
    with Checkpointer(through(local), context=watched(watch), when_busy="queue", preservation_policy=policy) as run:
        save_steps(run, [2])
        watch.before = stop
        run.save(3, tree(3))
        run.save(2, tree(99), overwrite=True)
        run.save(4, tree(4))  # waits until step 3 is saved, and until the steps to delete are known
        begun.set()
        assert run._run.take_errors() == []
        assert list(run.steps) == [2, 3]
        collected.set()
        run.wait()
        assert run.steps[-1] == 4


KILLED: Final = """
import os, signal, sys
from ckptcore import Checkpointer
from ckptcore.builtin.local import LocalStorage
from ckptcore.policies import LatestN
from tests.checkpointer.runs import tree, save_steps
run = Checkpointer(sys.argv[1])
save_steps(run, [1, 2, 3])
real = LocalStorage.delete_directory
def half(self, key):
    if ".1." in key:
        self.delete([next(iter(self.list(key)))])
        os.kill(os.getpid(), signal.SIGKILL)
    real(self, key)
LocalStorage.delete_directory = half
run.delete(1)
run.wait()
"""


@pytest.mark.system
def test_a_deletion_that_was_killed_is_finished_by_the_next_run(local: str) -> None:
    process = subprocess.run([sys.executable, "-c", KILLED, local], cwd=REPOSITORY, check=False, capture_output=True)
    assert process.returncode == -signal.SIGKILL, process.stderr
    assert [name for name in step_names(local) if name.startswith(".1.")]
    assert CheckpointReader(local).steps == (2, 3)
    with Checkpointer(local) as run:
        run.wait()
        assert list(run.steps) == [2, 3]
    assert step_names(local) == ["2", "3"]
    assert not [key for key in keys_of(local, ".ckptcore") if "deleting" in key or "pins" in key]


def test_leftover_claims_are_removed_by_the_next_owner(memory: str) -> None:
    with Checkpointer(memory) as run:
        save_steps(run, [1, 2])
    claim = encode_claim(Claim("0" * 16, "2026-01-01T00:00:00+00:00"))
    store = store_of(memory)
    store.put(f"2/{ROOT}", claim)  # as after a failed deletion
    store.put(f"5/{ROOT}", claim)  # as after a failed save
    store.put("5/model.safetensors", b"half")
    with Checkpointer(memory) as run:
        run.wait()
        assert list(run.steps) == [1]
    assert sorted({key.partition("/")[0] for key in keys_of(memory)} - {".ckptcore"}) == ["1"]


def test_a_claim_of_a_running_save_is_not_removed(memory: str) -> None:
    watch = Watch()
    gate = Gate(watch)
    with Checkpointer(memory) as before:
        save_steps(before, [1])
    store_of(memory).put(f"5/{ROOT}", encode_claim(Claim("0" * 16, "2026-01-01T00:00:00+00:00")))
    cleaning, goes_on = threading.Event(), threading.Event()
    stopped = watch.before

    def stop(name: str, keys: Sequence[str]) -> None:
        stopped(name, keys)
        if name == "list_names" and threading.current_thread().name.startswith("ckptcore-clean"):
            cleaning.set()
            assert goes_on.wait(60)

    watch.before = stop
    with Checkpointer(through(memory), context=watched(watch)) as run:
        assert cleaning.wait(60)  # the cleaner has not read the claims yet
        run.save(5, tree(5))
        assert gate.arrived.wait(60)
        goes_on.set()
        assert run._run.take_errors() == []
        gate.open()
        run.wait()
        assert_is_step(run.load(), 5)


def test_collecting_ignores_a_step_that_was_deleted_meanwhile(local: str) -> None:
    with Checkpointer(local, preservation_policy=LatestN(1)) as run:
        save_steps(run, [1])
        for key in keys_of(local, "1"):
            remove(local, key)
        with pytest.raises(CheckpointError):
            run.load(1)
        save_steps(run, [2, 3])
        assert run.steps[-1] == 3
