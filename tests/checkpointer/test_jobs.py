"""Several processes share a run: they make the same decisions, save and fall back together, and fail together."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest
from ckptcore_testing import ThreadJob, run_ranks
from ckptcore_testing.faulty_storage import with_faults

import ckptcore
from ckptcore import Checkpointer, CheckpointReader
from ckptcore.builtin.local import open_local
from ckptcore.commit.location import open_directory
from ckptcore.context import JobOptions, PluginOptions
from ckptcore.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DirectoryInUseError,
    InvalidLocationError,
    OnlyStepError,
    RankFailedError,
    StepPinnedError,
    StorageError,
    TargetUndefinedError,
)
from ckptcore.events import Event
from ckptcore.hookspecs import hookimpl
from ckptcore.loading.load import Load
from ckptcore.loading.reading import TreeRead
from ckptcore.policies import AnySave, EveryStep, FixedInterval, LatestN, PreemptionCheckpointing, TimeInterval
from ckptcore.protocols import Coordinator, StorageBackend, StorageOpener, StorageOptions
from ckptcore.runtime import runtime_of
from tests.checkpointer.runs import Gate, Watch, assert_is_step, save_steps, through, tree, watched, writes_arrays

SIZE: Final = 3


def job(
    directory: str, work: Callable[[Checkpointer, int], Any], **arguments: Any
) -> tuple[Sequence[Any], list[Watch]]:
    """Run `work` on every rank with its own Checkpointer. Return the results and the storage requests by rank."""
    watches = [Watch() for _ in range(SIZE)]

    def run_rank(coordinator: Coordinator) -> Any:
        context = watched(watches[coordinator.rank], coordinator)
        ranked = {
            name: value[coordinator.rank] if name == "preemption_notice" else value for name, value in arguments.items()
        }
        with Checkpointer(through(directory), context=context, **ranked) as run:
            run.watch = watches[coordinator.rank]  # type: ignore[attr-defined]
            return work(run, coordinator.rank)

    return ThreadJob(SIZE, timeout_seconds=30).run(run_rank), watches


def watch_of(run: Checkpointer) -> Watch:
    """Return the storage requests of this rank."""
    watch: Watch = run.watch  # type: ignore[attr-defined]
    return watch


def test_all_ranks_save_and_load_together(directory: str) -> None:
    def work(run: Checkpointer, rank: int) -> list[int]:
        save_steps(run, [1, 2, 3])
        assert run.latest == 3
        run.save_checkpointables(4, {"model": tree(4), "mine": ckptcore.PerProcess({"rank": rank})})
        run.wait()
        loaded = run.load_checkpointables(abstract={"model": None, "mine": ckptcore.PerProcess(None)})
        assert_is_step(loaded["model"], 4)
        assert loaded["mine"] == {"rank": rank}
        assert_is_step(run.load(2), 2)
        return list(run.steps)

    steps, _ = job(directory, work)
    assert steps == [[1, 2, 3, 4]] * SIZE


def test_only_the_leader_lists_owns_and_deletes(directory: str) -> None:
    with Checkpointer(directory) as run:
        save_steps(run, [1, 2])

    def work(run: Checkpointer, rank: int) -> list[int]:
        save_steps(run, [3, 4])
        run.reload()
        run.wait()
        run.delete(4)
        run.wait()
        run.reload()
        return list(run.steps)

    steps, watches = job(directory, work, preservation_policy=LatestN(2))
    assert steps[0] == [3]
    assert watches[0].count("list_names") > 0
    for watch in watches[1:]:
        assert watch.count("list_names") == 0
        names = {operation.name for operation in watch.operations}
        assert names <= {"size", "get", "get_with_tag", "get_into", "open_reader"}, names


def test_all_ranks_fall_back_to_the_same_step(directory: str) -> None:
    """Only one process sees the damage."""
    with Checkpointer(directory) as run:
        save_steps(run, [1, 2, 3])

    def work(run: Checkpointer, rank: int) -> Any:
        def damage(name: str, keys: Sequence[str]) -> None:
            if rank == 1 and name == "get_into" and keys[0].startswith("3/"):
                raise CorruptCheckpointError("a bad cable")

        watch_of(run).before = damage
        assert_is_step(run.load(), 2)
        assert run.restored_step == 2
        (skipped,) = run.skipped_steps
        assert skipped.step == 3 and "a bad cable" in skipped.reason
        watch_of(run).before = lambda name, keys: None
        save_steps(run, [3])  # all ranks replace a step that is damaged on one rank
        assert_is_step(run.load(), 3)
        return run.skipped_steps

    results, _ = job(directory, work)
    assert results == [()] * SIZE


def test_all_ranks_raise_an_error_if_one_finds_no_valid_step(directory: str) -> None:
    with Checkpointer(directory) as run:
        save_steps(run, [1, 2])

    def work(run: Checkpointer, rank: int) -> list[type]:
        def damage(name: str, keys: Sequence[str]) -> None:
            if rank == 2 and name == "get_into":
                raise CorruptCheckpointError("a bad cable")

        watch_of(run).before = damage
        with pytest.raises(CorruptCheckpointError, match="step 2: .*step 1: ") as first:
            run.load()
        # Some ranks have filled their target with a step that the job did not load.
        with pytest.raises(TargetUndefinedError if rank != 2 else CheckpointError) as second:
            run.load_into(tree(0))
        return [type(first.value), type(second.value)]

    job(directory, work)


def test_an_error_other_than_damage_is_raised_on_all_ranks(directory: str) -> None:
    with Checkpointer(directory) as run:
        save_steps(run, [1, 2])

    def work(run: Checkpointer, rank: int) -> None:
        def unplug(name: str, keys: Sequence[str]) -> None:
            if rank == 1 and name == "get_into":
                raise StorageError("unplugged")

        watch_of(run).before = unplug
        with pytest.raises(StorageError if rank == 1 else RankFailedError, match="unplugged"):
            run.load()
        assert run.restored_step is None and run.skipped_steps == ()
        watch_of(run).before = lambda name, keys: None
        assert_is_step(run.load(), 2)

    job(directory, work)


def test_the_leader_decides_by_its_clock(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = {f"rank {rank}": itertools.count(1_000_000.0 * (rank + 1), 1.0 + rank) for rank in range(SIZE)}

    class Time:
        """A replacement of the module `time` with another clock for each rank."""

        @staticmethod
        def time() -> float:
            return next(clocks.get(threading.current_thread().name, clocks["rank 0"]))

    import ckptcore.training.save_decisions

    monkeypatch.setattr(ckptcore.training.save_decisions, "time", Time)

    def work(run: Checkpointer, rank: int) -> list[bool]:
        return [run.save(step, tree(step)) is not None for step in range(12)]

    decisions, _ = job(directory, work, save_policy=TimeInterval(5))
    assert decisions[0] == decisions[1] == decisions[2]
    assert 1 < sum(decisions[0]) < 12


def test_a_preemption_notice_of_one_rank_applies_to_all(directory: str) -> None:
    notices = [lambda step: False, lambda step: step >= 4, lambda step: False]

    def work(run: Checkpointer, rank: int) -> int:
        step = 0
        while not run.preempted:
            step += 1
            run.save(step, tree(step))
        run.wait()
        return step

    for policy in (AnySave([FixedInterval(100), PreemptionCheckpointing()]), EveryStep(), FixedInterval(3)):
        place = f"{directory}-{type(policy).__name__}"
        ends, _ = job(place, work, save_policy=policy, preemption_notice=notices)
        assert ends == [4] * SIZE
    assert CheckpointReader(f"{directory}-AnySave").latest == 4


def test_a_failing_preemption_notice_is_raised_on_all_ranks(directory: str) -> None:
    """The other ranks do not wait for the timeout, as they do for a missing rank."""

    def broken(step: int) -> bool:
        if step == 2:
            raise OSError("the metadata server does not answer")
        return False

    notices = [lambda step: False, broken, lambda step: False]

    def work(run: Checkpointer, rank: int) -> tuple[int, ...]:
        save_steps(run, [1])
        with pytest.raises(OSError if rank == 1 else RankFailedError, match="metadata server"):
            run.save(2, tree(2))
        save_steps(run, [3])
        return run.steps

    results, _ = job(directory, work, preemption_notice=notices)
    assert results == [(1, 3)] * SIZE


def test_an_error_of_the_leader_in_listing_is_raised_on_all_ranks(directory: str) -> None:
    with Checkpointer(directory) as run:
        save_steps(run, [1, 5])

    def work(run: Checkpointer, rank: int) -> None:
        run.load(1)
        run.wait()  # waits for the cleaner, which would otherwise fail, too, and report it

        def unplug(name: str, keys: Sequence[str]) -> None:
            if rank == 0:
                raise StorageError("unplugged")

        watch_of(run).before = unplug
        with pytest.raises(StorageError if rank == 0 else RankFailedError, match="unplugged"):
            run.save(2, tree(2))
        watch_of(run).before = lambda name, keys: None
        save_steps(run, [3])

    job(directory, work)


def test_a_preemption_notice_of_one_rank_applies_to_forced_saves_of_all(directory: str) -> None:
    notices = [lambda step: False, lambda step: False, lambda step: True]

    def work(run: Checkpointer, rank: int) -> bool:
        run.save(1, tree(1), force=True)
        return run.preempted

    assert job(directory, work, preemption_notice=notices)[0] == [True] * SIZE


def test_all_ranks_skip_the_same_save(directory: str) -> None:
    gates: dict[int, Gate] = {}
    together = threading.Barrier(SIZE)

    def work(run: Checkpointer, rank: int) -> list[bool]:
        gates[rank] = Gate(watch_of(run))
        saved = [run.save(1, tree(1)) is not None]
        if rank == 0:  # in this layout, only rank 0 writes arrays
            assert gates[0].arrived.wait(60)
        together.wait()
        saved.append(run.save(2, tree(2)) is not None)
        gates[rank].open()
        run.wait()
        together.wait()
        saved.append(run.save(3, tree(3)) is not None)
        run.wait()
        return saved

    assert job(directory, work, when_busy="skip")[0] == [[True, False, True]] * SIZE


def test_a_second_job_is_refused_on_every_rank(directory: str) -> None:
    with Checkpointer(directory):
        with pytest.raises(ExceptionGroup) as caught:
            job(directory, lambda run, rank: None)
        kinds = sorted(type(error).__name__ for error in caught.value.exceptions)
        assert kinds == ["DirectoryInUseError", "RankFailedError", "RankFailedError"]
        assert all("in use" in str(error) for error in caught.value.exceptions)
    job(directory, lambda run, rank: None)
    with pytest.raises(ExceptionGroup) as caught:
        job(directory, lambda run, rank: Checkpointer(through(directory), context=run._context))
    assert any(isinstance(error, DirectoryInUseError) for error in caught.value.exceptions)


def test_a_refusal_of_the_leader_is_raised_on_all_ranks(directory: str) -> None:
    def work(run: Checkpointer, rank: int) -> None:
        save_steps(run, [1])
        refused: list[tuple[Callable[[], object], type[Exception]]] = [
            (lambda: run.save(1, tree(1)), FileExistsError),
            (lambda: run.delete(1), OnlyStepError),
            (lambda: run.delete(7), CheckpointNotFoundError),
        ]
        for call, error in refused:
            with pytest.raises(error if rank == 0 else RankFailedError):
                call()
        save_steps(run, [2])
        assert list(run.steps) == [1, 2]

    job(directory, work)


def _at_removal(then: Callable[[], None]) -> Callable[[str, Sequence[str]], None]:
    """Return an action that calls `then` before a rename, or a claim in place of the root, removes a checkpoint."""

    def look(name: str, keys: Sequence[str]) -> None:
        if name == "rename" or (name == "put" and keys[0].endswith("checkpoint.json")):
            then()

    return look


def test_a_failed_deletion_on_the_leader_fails_on_all_ranks(directory: str) -> None:
    def unplug() -> None:
        raise StorageError("unplugged")

    def work(run: Checkpointer, rank: int) -> None:
        save_steps(run, [1, 2, 3])
        watch_of(run).before = _at_removal(unplug)
        run.delete(1)
        with pytest.raises(StorageError if rank == 0 else RankFailedError, match="unplugged"):
            run.wait()
        watch_of(run).before = lambda name, keys: None
        assert list(run.steps) == [1, 2, 3]
        assert_is_step(run.load(1), 1)
        save_steps(run, [4])
        run.delete(1)
        run.wait()
        assert list(run.steps) == [2, 3, 4]

    job(directory, work)


def test_all_ranks_wait_until_the_leader_has_deleted(directory: str) -> None:
    waiting = threading.Barrier(SIZE)
    gone = threading.Event()

    def hesitate() -> None:
        waiting.wait(60)
        threading.Event().wait(0.2)  # time for the other ranks to enter `wait`
        gone.set()

    def work(run: Checkpointer, rank: int) -> bool:
        save_steps(run, [1, 2])
        if rank == 0:
            watch_of(run).before = _at_removal(hesitate)
        run.delete(1)
        if rank:
            waiting.wait(60)
        run.wait()
        return gone.is_set()

    assert job(directory, work)[0] == [True] * SIZE


def test_a_save_that_fails_on_one_rank_fails_on_all(directory: str) -> None:
    def work(run: Checkpointer, rank: int) -> None:
        def full(name: str, keys: Sequence[str]) -> None:
            if writes_arrays(name, keys):
                raise StorageError("no room")

        watch_of(run).before = full
        handle = run.save(1, tree(1))
        assert handle is not None
        with pytest.raises(StorageError if rank == 0 else RankFailedError, match="no room"):
            handle.result()
        watch_of(run).before = lambda name, keys: None
        assert run.latest is None
        save_steps(run, [1])
        assert run.latest == 1

    job(directory, work)


def test_readers_wait_together(directory: str) -> None:
    """The readers have different clocks and listings, but they see the same steps, and time out at the same time."""

    def read(rank: int, context: ckptcore.Context) -> list[Any]:
        reader = CheckpointReader(directory, context=context)
        seen: list[Any] = []
        for step in itertools.islice(reader.new_steps(timeout=60 + rank, poll_seconds=0.005), 20):
            with reader.pin(step):
                seen.append(reader.load(step)["step"])
        seen += reader.new_steps(after=19, timeout=0.05 * (1 + rank), poll_seconds=0.005)
        seen.append(reader.wait_for_new_step(timeout=0.05 * (3 - rank), poll_seconds=0.01))
        return seen

    with Checkpointer(directory, preservation_policy=LatestN(30)) as run:
        save_steps(run, [0])
        saving = threading.Thread(target=lambda: save_steps(run, range(1, 20)))
        saving.start()
        results = run_ranks(SIZE, read, timeout_seconds=30)
        saving.join()
    assert results[0] == results[1] == results[2] == [*range(20), None]


def test_one_process_pins_a_step_for_all(directory: str) -> None:
    """The pin is there until the last process has read."""
    pins: list[Sequence[str]] = []

    def look(name: str, keys: Sequence[str]) -> None:
        if any(key.endswith(".safetensors") for key in keys):
            pins.append(pins_of())

    def pins_of() -> Sequence[str]:
        return open_directory(directory, runtime_of(ckptcore.Context()).storages).list_names(".ckptcore/pins")

    def work(run: Checkpointer, rank: int) -> None:
        save_steps(run, [1])
        watch_of(run).before = look
        assert_is_step(run.load(), 1)

    job(directory, work)
    assert len(pins) >= SIZE and {len(names) for names in pins} == {1}
    assert not pins_of()


class _HostDisk:
    """A plugin whose URLs are directories on the disk of one host."""

    def __init__(self, disk: Path, watch: Watch) -> None:
        self._disk = disk
        self._watch = watch

    @hookimpl
    def ckpt_storages(self) -> Mapping[str, StorageOpener]:
        return {"disk": self._open}

    def _open(self, url: str, options: StorageOptions) -> StorageBackend:
        return with_faults(open_local(str(self._disk / url.removeprefix("disk://")), options), self._watch)


def test_each_host_pins_its_own_copy_of_a_step(tmp_path: Path) -> None:
    """Two hosts have different directories with the same path, as the near directories of a run."""
    disks = [tmp_path / "first", tmp_path / "second"]
    disk_of_rank = [0, 0, 1, 1]
    kept: list[int] = []

    with Checkpointer(disks[0] / "run") as first, Checkpointer(disks[1] / "run") as second:
        owners = [first, second]
        for owner in owners:
            save_steps(owner, [1, 2])

        def read(rank: int, context: ckptcore.Context) -> None:
            disk = disk_of_rank[rank]

            def delete(name: str, keys: Sequence[str]) -> None:
                if any(key.endswith(".safetensors") for key in keys):
                    with pytest.raises(StepPinnedError):
                        owners[disk].delete(1)
                    kept.append(rank)

            watch = Watch()
            watch.before = delete
            plugins = PluginOptions(extra=(_HostDisk(disks[disk], watch),))
            reader = CheckpointReader("disk://run", context=dataclasses.replace(context, plugins=plugins))
            assert_is_step(reader.load(1), 1)

        run_ranks(len(disk_of_rank), read, timeout_seconds=60)
        assert {*kept} == {*range(len(disk_of_rank))}
        for owner in owners:
            owner.delete(1)
            owner.wait()
            assert owner.steps == (2,), "no pin is left"


@pytest.mark.parametrize("error", [InvalidLocationError("the pins are elsewhere"), MemoryError("no memory")])
@pytest.mark.parametrize("step", [None, 1])
def test_a_process_that_cannot_pin_loads_without_a_pin(directory: str, step: int | None, error: Exception) -> None:
    """The others wait in the load meanwhile, so an error would leave them waiting until the deadline."""

    def work(run: Checkpointer, rank: int) -> bool:
        save_steps(run, [1])
        failed: list[str] = []

        def fail(name: str, keys: Sequence[str]) -> None:
            if rank == 1 and any(".ckptcore/pins" in key for key in keys):
                failed.append(name)
                raise error

        watch_of(run).before = fail
        assert_is_step(run.load(step), 1)
        return bool(failed)

    assert job(directory, work)[0] == [rank == 1 for rank in range(SIZE)]


class _Counted:
    """A coordinator that counts its exchanges by the last words of their keys."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self.rank, self.size = coordinator.rank, coordinator.size
        self.names: list[str] = []

    def gather(self, key: str, payload: bytes) -> Sequence[bytes] | None:
        self.names.append(key.rpartition("/")[2])
        return self._coordinator.gather(key, payload)

    def broadcast(self, key: str, payload: bytes | None) -> bytes:
        self.names.append(key.rpartition("/")[2])
        return self._coordinator.broadcast(key, payload)


def test_a_load_of_the_newest_step_is_nine_exchanges(directory: str) -> None:
    """The leader chooses and pins the step; the processes agree after opening, planning, reading and building."""

    def work(coordinator: Coordinator) -> Sequence[str]:
        counted = _Counted(coordinator)
        context = ckptcore.Context(job=JobOptions(coordinator=counted))
        with Checkpointer(directory, context=context) as run:
            save_steps(run, [1])
            counted.names.clear()
            assert_is_step(run.load(), 1)
            names = list(counted.names)
            counted.names.clear()
            run.load_into(tree(0))
            assert counted.names[:9] == names[:9]
        return names

    stages = ["open-0", "plan-0", "read-0", "load"]
    both = [name for stage in stages for name in (stage, "verdict")]
    assert [names[:9] for names in ThreadJob(SIZE).run(work)] == [["choose", *both]] * SIZE


def test_all_ranks_skip_a_step_that_was_deleted_before_it_is_pinned(directory: str) -> None:
    with Checkpointer(directory) as run:
        save_steps(run, [1, 2])

    def work(run: Checkpointer, rank: int) -> Sequence[Any]:
        deleted: list[bool] = []

        def delete(name: str, keys: Sequence[str]) -> None:
            if rank == 0 and not deleted and any(".ckptcore/pins" in key for key in keys):
                deleted.append(True)
                ckptcore.delete(f"{directory}/2")

        watch_of(run).before = delete
        assert_is_step(run.load(), 1)
        assert run.restored_step == 1
        return [bool(deleted), [skipped.step for skipped in run.skipped_steps]]

    results, _ = job(directory, work)
    assert results == [[rank == 0, [2]] for rank in range(SIZE)]


@pytest.mark.parametrize("step", [None, 1])
def test_if_building_fails_on_one_rank_the_target_of_all_is_undefined(
    directory: str, step: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = Load.build

    def fail(load: Load[Any], reading: TreeRead) -> Any:
        if load.runtime.job().rank == 1:
            raise RuntimeError("no room for it")
        return build(load, reading)

    monkeypatch.setattr(Load, "build", fail)

    def work(run: Checkpointer, rank: int) -> None:
        save_steps(run, [1])
        with pytest.raises(TargetUndefinedError, match="no room for it"):
            run.load_into(tree(0), step=step)

    job(directory, work)


@pytest.mark.parametrize("step", [None, 2])
@pytest.mark.parametrize("error", [RuntimeError, CorruptCheckpointError])
def test_events_of_all_ranks_say_that_an_attempt_failed_on_one(
    directory: str, step: int | None, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    build = Load.build

    def fail(load: Load[Any], reading: TreeRead) -> Any:
        if load.runtime.job().rank == 1 and load.recording.step == 2:
            raise error("no room for it")
        return build(load, reading)

    monkeypatch.setattr(Load, "build", fail)

    def work(coordinator: Coordinator) -> Sequence[Any]:
        loads: list[Any] = []

        def see(event: Event) -> None:
            if event.operation == event.phase == "load":
                loads.append([event.step, event.error and event.error.partition(":")[0]])

        context = ckptcore.Context(job=JobOptions(coordinator=coordinator), observers=(see,))
        with Checkpointer(directory, context=context) as run:
            save_steps(run, [1, 2])
            with suppress(RuntimeError, CheckpointError):
                assert_is_step(run.load(step), 1)
        return loads

    attempts = [[[2, error.__name__ if rank == 1 else "RankFailedError"]] for rank in range(SIZE)]
    if step is None and error is CorruptCheckpointError:
        attempts = [[*failed, [1, None]] for failed in attempts]
    assert ThreadJob(SIZE).run(work) == attempts
