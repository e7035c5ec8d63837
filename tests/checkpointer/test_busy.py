"""Saves that begin while another save is running. Each failed save is reported once."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import pytest

import ckptcore
from ckptcore import Checkpointer
from ckptcore.errors import BackgroundSaveError, StorageError
from ckptcore.io.memory import StagingMemory
from ckptcore.policies import AnySave, ContinuousCheckpointing, EveryStep, PreemptionCheckpointing
from ckptcore.results import SaveHandle
from ckptcore.runtime import runtime_of
from tests.checkpointer.runs import Gate, Watch, assert_is_step, save_steps, through, tree, watched, writes_arrays


@contextmanager
def gated(
    directory: str, when_busy: Literal["wait", "skip", "queue"], **arguments: Any
) -> Iterator[tuple[Checkpointer, Gate]]:
    """Yield a run whose saves stop before they write, and the gate that releases them."""
    watch = Watch()
    gate = Gate(watch)
    with Checkpointer(through(directory), context=watched(watch), when_busy=when_busy, **arguments) as run:
        try:
            yield run, gate
        finally:
            gate.open()


class Copies:
    """A counter of snapshots in memory.

    Attributes:
        alive: the current number.
        most: the maximum.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.alive = self.most = 0
        lock = threading.Lock()
        begin, end = StagingMemory.__init__, StagingMemory.close

        def begun(memory: StagingMemory, *arguments: Any) -> None:
            begin(memory, *arguments)
            with lock:
                self.alive += 1
                self.most = max(self.most, self.alive)

        def ended(memory: StagingMemory) -> None:
            end(memory)
            with lock:
                self.alive -= 1

        monkeypatch.setattr(StagingMemory, "__init__", begun)
        monkeypatch.setattr(StagingMemory, "close", ended)


def in_background(work: Callable[[], object]) -> threading.Thread:
    """Run a function on a new thread."""
    thread = threading.Thread(target=work)
    thread.start()
    return thread


@pytest.mark.parametrize(("when_busy", "most"), [("wait", 1), ("queue", 2), ("skip", 1)])
def test_the_number_of_snapshots_is_limited(
    directory: str, monkeypatch: pytest.MonkeyPatch, when_busy: Literal["wait", "skip", "queue"], most: int
) -> None:
    copies = Copies(monkeypatch)
    with gated(directory, when_busy) as (run, gate):
        saved = in_background(lambda: [run.save(step, tree(step)) for step in range(6)])
        assert gate.arrived.wait(60)
        gate.open()
        saved.join()
        run.wait()
        assert copies.most <= most
        assert copies.alive == 0
        for step in run.steps:
            assert_is_step(run.load(step), step)
        if when_busy != "skip":
            assert run.steps == tuple(range(6))


def test_wait_blocks_before_it_reads_the_state(directory: str) -> None:
    with gated(directory, "wait") as (run, gate):
        run.save(1, tree(1))
        assert gate.arrived.wait(60)
        second: list[object] = []
        thread = in_background(lambda: second.append(run.save(2, tree(2))))
        thread.join(0.2)
        assert second == [], "no second copy was made while the first is held"
        gate.open()
        thread.join()
        assert second != []


def test_queue_copies_one_more_state_and_then_waits(directory: str) -> None:
    with gated(directory, "queue") as (run, gate):
        first = run.save(1, tree(1))
        assert gate.arrived.wait(60)
        second = run.save(2, tree(2))  # returns although the first save is running
        assert first is not None and not first.done() and second is not None
        third: list[object] = []
        thread = in_background(lambda: third.append(run.save(3, tree(3))))
        thread.join(0.2)
        assert third == []
        gate.open()
        thread.join()
        run.wait()
        assert list(run.steps) == [1, 2, 3]


def test_skip_drops_a_save(directory: str) -> None:
    with gated(directory, "skip") as (run, gate):
        assert run.save(1, tree(1)) is not None
        assert gate.arrived.wait(60)
        assert run.save(2, tree(2)) is None
        assert run.save_checkpointables(2, {"a": tree(2)}) is None
        assert run.save_blocking(2, tree(2)) is False
        assert not run.should_save(2)
        forced = in_background(lambda: run.save(3, tree(3), force=True))
        gate.open()
        forced.join()
        run.wait()
        assert run.should_save(4)
        assert run.save(4, tree(4)) is not None
        run.wait()
        assert list(run.steps) == [1, 3, 4]


def test_the_last_save_before_a_preemption_is_not_skipped(directory: str) -> None:
    told: list[int] = []

    def notice(step: int) -> bool:
        told.append(step)
        return step >= 3

    policy = AnySave([EveryStep(), PreemptionCheckpointing()])
    with gated(directory, "skip", save_policy=policy, preemption_notice=notice) as (run, gate):
        assert run.save(1, tree(1)) is not None
        assert gate.arrived.wait(60)
        assert run.save(2, tree(2)) is None and not run.preempted
        assert run.save(3, tree(3)) is not None and run.preempted
        gate.open()
        run.wait()
        assert list(run.steps) == [1, 3]
        assert told == [1, 2, 3]
        assert run.should_save(4) and run.preempted
        assert told == [1, 2, 3], "once told is enough"


def test_continuous_saves_never_overlap(directory: str) -> None:
    with gated(directory, "wait", save_policy=ContinuousCheckpointing()) as (run, gate):
        assert run.save(1, tree(1)) is not None
        assert gate.arrived.wait(60)
        assert [run.save(step, tree(step)) for step in (2, 3)] == [None, None]
        gate.open()
        run.wait()
        assert run.save(4, tree(4)) is not None


def broken_after(watch: Watch, steps: Sequence[str]) -> None:
    """Make the saves of these steps fail when they write."""

    def fail(name: str, keys: Sequence[str]) -> None:
        if writes_arrays(name, keys) and any(
            f".{step}." in keys[0] or keys[0].startswith(f"{step}/") for step in steps
        ):
            raise StorageError(f"no room for {keys[0]}")

    watch.before = fail


@pytest.mark.parametrize("hearer", ["save", "save_blocking", "wait", "close", "exit", "handle"])
def test_a_failed_save_is_reported_once(directory: str, hearer: str, capsys: pytest.CaptureFixture[str]) -> None:
    watch = Watch()
    broken_after(watch, ["1"])
    context = watched(watch)
    run = Checkpointer(through(directory), context=context)
    handle = run.save(1, tree(1))
    assert handle is not None
    runtime_of(context).saves.wait()  # waits until the save has failed; nothing has reported the error
    if hearer == "save":
        with pytest.raises(BackgroundSaveError, match="no room"):
            run.save(2, tree(2))
    elif hearer == "save_blocking":
        with pytest.raises(BackgroundSaveError, match="no room"):
            run.save_blocking(2, tree(2))
    elif hearer == "wait":
        with pytest.raises(StorageError, match="no room"):
            run.wait()
    elif hearer == "handle":
        with pytest.raises(StorageError, match="no room"):
            handle.result()
        run.wait()
    elif hearer == "close":
        with pytest.raises(StorageError, match="no room"):
            run.close()
        run.close()
        return
    else:
        with pytest.raises(StorageError, match="no room"), run:
            pass
        return
    save_steps(run, [2, 3])
    run.close()
    assert list(run.steps) == [2, 3]


def test_every_failed_save_is_reported(directory: str) -> None:
    watch = Watch()
    broken_after(watch, ["1", "2"])
    run = Checkpointer(through(directory), context=watched(watch), when_busy="queue")
    gate = threading.Event()
    failing = watch.before

    def wait_first(name: str, keys: Sequence[str]) -> None:
        if writes_arrays(name, keys):
            assert gate.wait(60)
        failing(name, keys)

    watch.before = wait_first
    run.save(1, tree(1))
    run.save(2, tree(2))
    gate.set()
    with pytest.raises(StorageError) as caught:
        run.close()
    assert "and then: StorageError: no room" in caught.value.__notes__[0]


def test_a_failed_save_leaves_no_files_and_can_be_retried(directory: str) -> None:
    watch = Watch()
    broken_after(watch, ["1"])
    with Checkpointer(through(directory), context=watched(watch)) as run:
        run.save(1, tree(1))
        with pytest.raises(StorageError):
            run.wait()
        assert run.latest is None
        watch.before = lambda name, keys: None
        save_steps(run, [1])
        assert_is_step(run.load(), 1)


def test_an_interrupted_wait_can_be_repeated(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with gated(directory, "wait") as (run, gate):
        handle = run.save(1, tree(1))
        assert handle is not None
        waits = SaveHandle.exception

        def interrupt(self: SaveHandle, timeout: float | None = None) -> BaseException | None:
            raise KeyboardInterrupt

        monkeypatch.setattr(SaveHandle, "exception", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run.wait()
        monkeypatch.setattr(SaveHandle, "exception", waits)
        gate.open()
        run.close()
        assert handle.done(), "closing waited for it"
        assert run.latest == 1


def test_memory_and_files_do_not_grow_over_a_thousand_saves(near: str) -> None:
    counts: list[int] = []
    with Checkpointer(near, context=ckptcore.Context(durability="none")) as run:
        for step in range(1000):
            run.save(step % 7, {"x": step}, overwrite="non-atomic")
            if step % 50 == 49:
                run.wait()
                gc.collect()
                counts.append(len(gc.get_objects()))
        assert run.steps == tuple(range(7))
    assert counts[-1] - counts[9] < 250, "less than one object for two saves"
