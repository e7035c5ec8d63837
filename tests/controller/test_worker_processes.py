"""The executor of `worker_processes` satisfies the protocol."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from ckptcore_jax.executor_tests import ExecutorTests
from ckptcore_jax.staged_executor import StagedExecutor

import ckptcore
from ckptcore.context import PluginOptions
from ckptcore.model import ArraySpec, Box, HostArray
from tests.controller.elements import Given
from tests.controller.remote_arrays import RemoteArray, RemoteArrayHandler
from tests.controller.worker_processes import WorkerProcesses

COUNT = 2


class TestWorkerProcesses(ExecutorTests):
    @pytest.fixture
    def executor(self, workers: WorkerProcesses, request: pytest.FixtureRequest) -> Iterator[StagedExecutor]:
        if "lost" not in request.node.name:
            yield workers
            return
        with WorkerProcesses(COUNT) as own:
            yield own

    def context(self, executor: StagedExecutor) -> ckptcore.Context:
        return replace(super().context(executor), plugins=PluginOptions(handlers={RemoteArray: RemoteArrayHandler()}))

    def split(self, executor: StagedExecutor, elements: HostArray) -> RemoteArray:
        return self._made(executor, elements, self.abstract(executor, _spec(elements)).boxes)

    def replicated(self, executor: StagedExecutor, elements: HostArray) -> RemoteArray:
        return self._made(executor, elements, ((Box.whole(elements.shape),),) * COUNT)

    def alone(self, executor: StagedExecutor, elements: HostArray) -> RemoteArray:
        return self._made(executor, elements, ((Box.whole(elements.shape),), ()))

    def _made(self, executor: StagedExecutor, elements: HostArray, boxes: tuple[tuple[Box, ...], ...]) -> RemoteArray:
        assert isinstance(executor, WorkerProcesses)
        return executor.make(_spec(elements), boxes, Given(elements))

    def elements(self, executor: StagedExecutor, leaf: RemoteArray) -> HostArray:
        assert isinstance(executor, WorkerProcesses)
        return executor.elements(leaf)

    def disturb(self, executor: StagedExecutor, leaf: RemoteArray) -> None:
        assert isinstance(executor, WorkerProcesses)
        executor.change(leaf)

    def lose(self, executor: StagedExecutor, worker: int) -> None:
        assert isinstance(executor, WorkerProcesses)
        executor.kill(worker)

    def abstract(self, executor: StagedExecutor, spec: ArraySpec) -> RemoteArray:
        rows = spec.shape[0] // COUNT
        boxes = [(Box((rows * worker, 0), (rows * worker + rows, spec.shape[1])),) for worker in range(COUNT)]
        return RemoteArray(spec, tuple(boxes))


def _spec(elements: HostArray) -> ArraySpec:
    return ArraySpec(elements.shape, elements.dtype.name)
