"""Tests of the checkpoint engine for verl, with verl or with `fake_verl`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from ckptcore_versions import Publisher, labels

from ckptcore import Context
from ckptcore.errors import CoordinationTimeoutError, DirectoryInUseError

ACTORS, ROLLOUTS = 2, 2


def weights(number: int) -> dict[str, torch.Tensor]:
    """Return the weights of a step: `frozen` does not change."""
    return {
        "layers.0.weight": torch.full((4, 6), number / 8, dtype=torch.bfloat16),
        "layers.1.weight": torch.arange(5.0) + number,
        "frozen": torch.ones(3, dtype=torch.float16),
    }


class Drained:
    """An iterable of weights that uses one memory for all of them, and counts its iterations."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.ends = 0

    def __iter__(self) -> Any:
        for name, tensor in self.tensors.items():
            memory = tensor.clone()
            yield name, memory
            memory.zero_()
        self.ends += 1


class Workers:
    """The workers of a job, driven as verl's `CheckpointEngineManager` does."""

    def __init__(self, registry: Any, directory: Path, **options: Any) -> None:
        self.arguments = {
            "bucket_size": 1 << 20,
            "location": str(directory / "weights"),
            "cache": str(directory / "cache"),
            **options,
        }
        self.registry = registry
        self.actors = [self.new(is_master=rank == 0) for rank in range(ACTORS)]
        self.rollouts = [self.new() for _ in range(ROLLOUTS)]

    def new(self, **options: Any) -> Any:
        """Create the engine of a worker."""
        return self.registry.new("ckptcore", **{**self.arguments, **options})

    def build(self) -> None:
        """Prepare all workers, and build the topology."""
        metadata = [worker.prepare() for worker in (*self.actors, *self.rollouts)]
        kind = type(self.actors[0])
        for workers, arguments in zip(
            (self.actors, self.rollouts), kind.build_topology(ACTORS, ROLLOUTS, metadata), strict=True
        ):
            assert all(len(values) == len(workers) for values in arguments.values())
            for number, worker in enumerate(workers):
                worker.init_process_group(**{name: values[number] for name, values in arguments.items()})

    def update(self, tensors: Mapping[str, torch.Tensor], step: int) -> Sequence[dict[str, torch.Tensor]]:
        """Send weights, and return what each rollout worker received."""
        self.build()
        drained = [Drained(tensors) for _ in self.actors]

        async def run() -> Any:
            sends = [
                actor.send_weights(iterable, global_steps=step)
                for actor, iterable in zip(self.actors, drained, strict=True)
            ]
            receives = [collect(rollout.receive_weights(global_steps=step)) for rollout in self.rollouts]
            return (await asyncio.gather(*sends, *receives))[ACTORS:]

        received = asyncio.run(run())
        assert [iterable.ends for iterable in drained] == [1] * ACTORS
        for worker in (*self.actors, *self.rollouts):
            worker.finalize()
        return received  # type: ignore[no-any-return]

    def close(self) -> None:
        """Release the directory and the caches, as ends of the processes do."""
        for worker in (*self.actors, *self.rollouts):
            worker.close()


async def collect(weights: Any) -> dict[str, torch.Tensor]:
    """Return all weights that a worker yields."""
    return {name: tensor.clone() async for name, tensor in weights}


def equal(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> bool:
    """Return True if tensors have equal names, dtypes and elements."""
    return set(found) == set(expected) and all(
        found[name].dtype == tensor.dtype and torch.equal(found[name], tensor) for name, tensor in expected.items()
    )


class VerlCases:
    """The tests. A subclass has the fixture `registry`: that of verl, in which the engine is registered."""

    @pytest.fixture
    def workers(self, registry: Any, tmp_path: Path) -> Any:
        """Return a function that creates the workers of a job."""
        jobs: list[Workers] = []

        def create(**options: Any) -> Workers:
            jobs.append(Workers(registry, tmp_path, **options))
            return jobs[-1]

        yield create
        for job in jobs:
            job.close()

    def test_every_rollout_worker_receives_all_weights_of_each_step(self, workers: Callable[..., Workers]) -> None:
        job = workers()
        for step in (1, 2):
            for received in job.update(weights(step), step):
                assert equal(received, weights(step))

    def test_versions_are_labelled_with_the_step_and_old_ones_deleted(
        self, workers: Callable[..., Workers], tmp_path: Path
    ) -> None:
        job = workers(keep=2, full_every=1)
        for step in (10, 20, 30):
            job.update(weights(step), step)
        names = sorted(path.name for path in (tmp_path / "weights").glob("v*"))
        assert names == ["v000002", "v000003"]
        assert [labels(tmp_path / "weights" / name).step for name in names] == [20, 30]

    def test_only_arrays_that_changed_are_passed_on_if_asked_for(self, workers: Callable[..., Workers]) -> None:
        job = workers(only_changed=True)
        assert all(set(received) == set(weights(1)) for received in job.update(weights(1), 1))
        for received in job.update(weights(2), 2):
            assert set(received) == {"layers.0.weight", "layers.1.weight"}

    def test_after_weights_that_were_passed_on_in_part_all_are_passed_on(self, workers: Callable[..., Workers]) -> None:
        job = workers(only_changed=True)
        job.update(weights(1), 1)
        job.build()

        async def interrupted() -> None:
            await job.actors[0].send_weights(Drained(weights(2)))
            async for _ in job.rollouts[0].receive_weights():
                break

        asyncio.run(interrupted())
        received = job.update(weights(3), 3)
        assert equal(received[0], weights(3))
        assert {"layers.0.weight", "layers.1.weight"} <= set(received[1])  # it missed a version

    def test_a_run_that_resumes_at_an_earlier_step_sends_its_weights_and_not_those_before(
        self, workers: Callable[..., Workers]
    ) -> None:
        first = workers()
        for step in (1, 2):
            first.update(weights(step), step)
        first.close()
        for received in workers().update(weights(1), 1):
            assert equal(received, weights(1))

    def test_a_server_that_restarted_gets_the_weights_from_the_cache(self, workers: Callable[..., Workers]) -> None:
        job = workers()
        job.update(weights(1), 1)
        assert equal(asyncio.run(collect(job.rollouts[0].get_weights())), weights(1))
        added = job.new()
        job.rollouts.append(added)
        assert equal(asyncio.run(collect(added.get_weights())), weights(1))

    def test_weights_that_do_not_come_are_an_error_that_names_the_version(
        self, workers: Callable[..., Workers]
    ) -> None:
        job = workers(timeout=0.01)
        job.build()
        with pytest.raises(CoordinationTimeoutError, match="version 1 did not appear in .*weights within"):
            asyncio.run(collect(job.rollouts[0].receive_weights()))

    def test_a_first_worker_that_is_no_master_is_refused(self, workers: Callable[..., Workers]) -> None:
        job = workers()
        job.actors.reverse()
        with pytest.raises(ValueError, match="is not the master"):
            job.build()

    def test_another_job_that_owns_the_directory_is_refused(
        self, workers: Callable[..., Workers], tmp_path: Path
    ) -> None:
        with Publisher(tmp_path / "weights", context=Context(durability="none")), pytest.raises(DirectoryInUseError):
            workers().build()
