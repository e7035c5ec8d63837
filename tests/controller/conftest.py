"""Worker processes for the tests of a single controller. Tests share them, because they take seconds to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import ckptcore
from tests.controller.remote_arrays import RemoteArray, RemoteArrayHandler
from tests.controller.worker_processes import WorkerProcesses


@pytest.fixture(scope="session")
def workers() -> Iterator[WorkerProcesses]:
    """Start two shared workers. A test that kills a worker starts its own workers."""
    with WorkerProcesses(2) as started:
        yield started


@pytest.fixture
def context(workers: WorkerProcesses) -> ckptcore.Context:
    """Return the Context of a controller of the shared workers."""
    return controlling(workers)


def controlling(workers: WorkerProcesses) -> ckptcore.Context:
    """Return a Context for a controller of workers."""
    return ckptcore.Context(
        job=ckptcore.context.JobOptions(
            executor=workers, replicas=ckptcore.context.ReplicaOptions(piece_bytes=1 << 14)
        ),
        plugins=ckptcore.context.PluginOptions(handlers={RemoteArray: RemoteArrayHandler()}),
    )
