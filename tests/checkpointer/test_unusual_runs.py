"""Unusual runs: runs that go back, damaged steps, and unusual directories and programs."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from ckptcore_testing import run_ranks

import ckptcore
from ckptcore import Checkpointer, CheckpointReader
from ckptcore.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    InvalidLocationError,
    OnlyStepError,
    StepPinnedError,
)
from ckptcore.policies import CustomSave, EpochInterval, FixedInterval, LatestN, SaveContext
from tests.checkpointer.runs import (
    ROOT,
    Gate,
    Watch,
    array_key,
    assert_is_step,
    cut,
    keys_of,
    remove,
    save_steps,
    store_of,
    through,
    tree,
    watched,
)

REPOSITORY: Final = Path(__file__).parents[2]


def run_program(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a separate process."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


# --- runs that go back ------------------------------------------------------------------------------------------------


def test_a_step_that_is_replaced_is_not_deleted_by_an_older_plan(directory: str) -> None:
    with Checkpointer(directory) as run:
        save_steps(run, range(8))
    watch = Watch()
    stopped, go_on = threading.Event(), threading.Event()

    def stop(name: str, keys: Sequence[str]) -> None:
        is_cleaner = threading.current_thread().name.startswith("ckptcore-clean")
        if is_cleaner and name in ("rename", "delete", "delete_directory"):
            stopped.set()
            assert go_on.wait(60)

    with Checkpointer(through(directory), context=watched(watch), preservation_policy=LatestN(2)) as run:
        run.wait()
        run.load(2)
        watch.before = stop
        save_again(run, 3, 103)
        assert stopped.wait(60), "the steps that go were chosen by now: 0, 1, 2, 4, 5"
        save_again(run, 4, 104)
        save_again(run, 5, 105)
        go_on.set()
        run.wait()
        assert run.steps == (5, 6, 7)
        assert_is_step(run.load(5), 105)
    assert_is_step(CheckpointReader(directory).load(5), 105)


def save_again(run: Checkpointer, step: int, value: int) -> None:
    """Replace a step, on any storage, and wait until it is committed."""
    handle = run.save(step, tree(value), overwrite="non-atomic")
    assert handle is not None
    handle.result()


def test_a_step_that_is_being_replaced_cannot_be_deleted(directory: str) -> None:
    watch = Watch()
    gate = Gate(watch)
    gate.open()
    with Checkpointer(through(directory), context=watched(watch)) as run:
        save_steps(run, [1, 2])
        gate.close()
        run.save(2, tree(102), overwrite="non-atomic")
        assert gate.arrived.wait(60)
        # In memory, a step does not exist while it is being replaced.
        with pytest.raises((StepPinnedError, CheckpointNotFoundError)):
            run.delete(2)
        gate.open()
        run.wait()
        assert run.steps == (1, 2)
        assert_is_step(run.load(), 102)


def test_policies_count_from_the_loaded_step(directory: str) -> None:
    asked: list[SaveContext] = []

    def note(context: SaveContext) -> bool:
        asked.append(context)
        return context.last_step is None or context.step // 1000 > context.last_step // 1000

    with Checkpointer(directory) as run:
        save_steps(run, [1001, 2002, 3003, 9009])
    with Checkpointer(directory, save_policy=CustomSave(note, needs_agreement=False)) as run:
        assert not run.should_save(3004)
        run.load(2002)
        assert not run.should_save(2009)
        assert run.should_save(3004)
        run.load()
        assert not run.should_save(9010)
        run.load(1001)
        assert run.should_save(2003)
    assert [context.last_step for context in asked] == [9009, 2002, 2002, 9009, 1001]


def test_epochs_are_counted_from_the_loaded_step(directory: str) -> None:
    with Checkpointer(directory) as run:
        for step in (10, 20, 30):
            run.save(step, tree(step), epoch=step // 10)
    with Checkpointer(directory, save_policy=EpochInterval(1)) as run:
        run.load(10)
        assert not run.should_save(11, epoch=1)
        assert run.should_save(20, epoch=2)


def test_a_save_below_a_newer_step_logs_a_warning(directory: str, caplog: pytest.LogCaptureFixture) -> None:
    with Checkpointer(directory) as run:
        save_steps(run, [10, 20, 30, 40])
    with caplog.at_level(logging.WARNING, "ckptcore"):
        with Checkpointer(directory) as run:
            run.load(20)
            save_steps(run, [25])
            save_steps(run, [26])  # no second warning
        assert len(caplog.records) == 1
        assert "step 25 is saved below step 40" in caplog.messages[0]
        caplog.clear()
        with Checkpointer(directory) as run:
            run.load(20)
            for step in run.steps:
                if step > 20:
                    run.delete(step)
            run.wait()
            save_steps(run, [25, 30])
        assert not caplog.messages
    assert CheckpointReader(directory).steps == (10, 20, 25, 30)


def test_a_job_can_go_back_as_documented(directory: str) -> None:
    def work(rank: int, context: ckptcore.Context) -> tuple[int, ...]:
        with Checkpointer(directory, preservation_policy=LatestN(4), context=context) as run:
            save_steps(run, range(1, 8))
            run.wait()
            run.reload()
            run.load(5)
            for step in run.steps:
                if step > 5:
                    run.delete(step)
            run.wait()
            run.reload()
            return run.steps

    assert run_ranks(2, work, timeout_seconds=30) == [(4, 5), (4, 5)]


# --- damaged steps ----------------------------------------------------------------------------------------------------


def cut_off(directory: str, step: str) -> None:
    """Truncate a file of a step."""
    cut(directory, array_key(directory, step))


def gone(directory: str, step: str) -> None:
    """Delete a file of a step."""
    remove(directory, array_key(directory, step))


@pytest.mark.parametrize("damage", [cut_off, gone])
@pytest.mark.parametrize("kind", ["tree", "several"])
def test_only_step_with_complete_files_is_kept(directory: str, kind: str, damage: Callable[[str, str], None]) -> None:
    testing = pytest.importorskip("click.testing")
    pytest.importorskip("rich")
    from ckptcore_tools.cli.application import application

    with Checkpointer(directory) as run:
        for step in (5, 10, 20):
            if kind == "tree":
                run.save(step, tree(step))
            else:
                run.save_checkpointables(step, {"model": tree(step)})
    damage(directory, "20")
    with Checkpointer(directory) as run:
        run.delete(5)  # step 10 is kept
        run.wait()
        with pytest.raises(OnlyStepError):
            run.delete(10)
    collected = testing.CliRunner().invoke(application, ["gc", directory, "--policy", "latest_n=1", "--yes"])
    assert collected.exit_code == 0, collected.output
    with Checkpointer(directory) as run:
        assert run.steps == (10, 20)
        assert_is_step(run.load() if kind == "tree" else run.load_checkpointables()["model"], 10)


def test_a_step_of_several_checkpointables_without_a_root_is_reported_and_replaced(directory: str) -> None:
    def train(until: int) -> tuple[int | None, list[int]]:
        """Train with a save every ten steps. Return the resumed step, and the skipped steps."""
        rng = np.random.default_rng(0)
        with Checkpointer(directory, save_policy=FixedInterval(10)) as run:
            if run.latest is not None:
                run.load_checkpointables(abstract={"model": None}, into={"rng": rng})
            restored, skipped = run.restored_step, [skip.step for skip in run.skipped_steps]
            for step in range((restored or 0) + 1, until + 1):
                run.save_checkpointables(step, {"model": tree(step), "rng": rng})
        return restored, skipped

    assert train(40) == (None, [])
    remove(directory, f"40/{ROOT}")
    assert train(60) == (30, [40])
    assert train(70) == (60, [])
    assert CheckpointReader(directory).steps == (10, 20, 30, 40, 50, 60, 70)
    assert_is_step(CheckpointReader(directory).load_checkpointables(40)["model"], 40)


class Position:
    """An object with a different state in each process."""

    def __init__(self) -> None:
        self.position = 7

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def test_processes_agree_on_the_named_step(directory: str) -> None:
    def work(rank: int, context: ckptcore.Context) -> tuple[str, int | None, int | None]:
        with Checkpointer(directory, context=context) as run:
            for step in (1, 2):
                run.save_checkpointables(step, {"model": tree(step), "data": Position()})
            run.wait()
            if rank == 0:
                for key in keys_of(directory, "2/data.rank_1/"):
                    store_of(directory).put(key, b"x")
            run.reload()  # waits for the leader
            data = Position()
            with pytest.raises(CheckpointError) as caught:
                run.load_checkpointables(2, ["model"], into={"data": data})
            after = run.restored_step
            assert_is_step(run.load_checkpointables(abstract=["model"], into={"data": data})["model"], 1)
            return type(caught.value).__name__, after, run.restored_step

    outcomes = run_ranks(2, work, timeout_seconds=30)
    assert [outcome[1:] for outcome in outcomes] == [(None, 1), (None, 1)], outcomes


# --- directories ------------------------------------------------------------------------------------------------------


def test_a_relative_directory_is_resolved_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "first")
    with Checkpointer("run", preservation_policy=LatestN(2)) as run:
        save_steps(run, [1])
        reader = CheckpointReader("run")
        monkeypatch.chdir(tmp_path / "second")
        save_steps(run, [2, 3])
        run.reload()
        assert run.steps == (2, 3) and run.directory == "run"
        assert_is_step(run.load(2), 2)
        assert_is_step(reader.load(), 3)
        with reader.pin(3):
            assert list((tmp_path / "first" / "run" / ".ckptcore" / "pins").iterdir())
    assert not list((tmp_path / "second").iterdir())
    assert CheckpointReader(tmp_path / "first" / "run").steps == (2, 3)


@pytest.mark.parametrize("step", ["50", "60"])
def test_a_step_is_not_a_directory_of_steps(directory: str, step: str) -> None:
    with Checkpointer(directory) as run:
        run.save_checkpointables(50, {"model": tree(50)})
        run.save(60, tree(60))
    place = f"{directory}/{step}"
    before = keys_of(place)
    for kind in (Checkpointer, CheckpointReader):
        with pytest.raises(InvalidLocationError, match="is a checkpoint itself"):
            kind(place)
    assert keys_of(place) == before
    assert ckptcore.verify(place).ok
    if "://" not in directory:
        assert not (Path(place) / ".ckptcore").exists()


def test_a_pin_of_a_missing_step_creates_no_files(directory: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError), CheckpointReader(directory).pin(5):
        raise AssertionError
    assert keys_of(directory) == []
    assert list(tmp_path.iterdir()) == []


def test_a_reader_loads_steps_that_were_committed_after_it_opened(directory: str) -> None:
    with Checkpointer(directory) as run:
        save_steps(run, [1])
        reader = CheckpointReader(directory)
        save_steps(run, [2])
        assert_is_step(reader.load(), 2)
        assert reader.restored_step == 2 and reader.skipped_steps == ()
        into = tree(0)
        save_steps(run, [3])
        assert_is_step(reader.load_into(into), 3)


# --- programs that end ------------------------------------------------------------------------------------------------

ENDS_WHILE_SAVING: Final = """
import atexit, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from ckptcore import Checkpointer, verify
from ckptcore.policies import LatestN
from tests.checkpointer.runs import Gate, Watch, save_steps, through, tree, watched
watch = Watch()
gate = Gate(watch)
gate.open()
run = Checkpointer(through(sys.argv[1]), context=watched(watch), preservation_policy=LatestN(1))
save_steps(run, [1])
gate.close()
handle = run.save(2, tree(2))
assert gate.arrived.wait(60)
def open_when_nothing_can_begin():
    pool = ThreadPoolExecutor(1)
    try:
        while True:
            pool.submit(int)
            time.sleep(0.01)
    except RuntimeError:
        gate.open()
threading.Thread(target=open_when_nothing_can_begin).start()
atexit.register(lambda: print(repr(handle).split()[-1], verify(sys.argv[1] + "/2").ok))
"""


@pytest.mark.system
def test_a_save_finished_at_exit_is_not_reported_as_failed(local: str) -> None:
    ended = run_program(ENDS_WHILE_SAVING, local)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "committed> True\n", "")
    assert CheckpointReader(local).latest == 2


DROPPED: Final = """
import gc, os, signal, sys
from ckptcore import Checkpointer
from ckptcore.policies import PreemptionCheckpointing
{before}
def train():
    run = Checkpointer(sys.argv[1], save_policy=PreemptionCheckpointing())
    run.wait()
    raise RuntimeError("the training failed")
try:
    train()
except RuntimeError:
    pass
gc.collect()
print("ready", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
print("alive", flush=True)
"""


@pytest.mark.system
@pytest.mark.parametrize(
    ("before", "printed", "code"),
    [
        ("", "ready\n", -15),
        ("signal.signal(signal.SIGTERM, signal.SIG_IGN)", "ready\nalive\n", 0),
        ("signal.signal(signal.SIGTERM, lambda *a: print('heard', flush=True))", "ready\nheard\nalive\n", 0),
    ],
)
def test_a_dropped_checkpointer_restores_the_sigterm_handler(local: str, before: str, printed: str, code: int) -> None:
    ended = run_program(DROPPED.format(before=before), local)
    assert (ended.stdout, ended.returncode) == (printed, code), ended.stderr
