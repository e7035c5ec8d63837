"""Worker processes for the tests of a single controller; they take seconds to start, so tests share them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import ckptcore
from tests.controller.remote_arrays import RemoteArray, RemoteArrayHandler
from tests.controller.worker_processes import WorkerProcesses


@pytest.fixture(scope="session")
def workers() -> Iterator[WorkerProcesses]:
    """Two workers. A test that ends one starts its own."""
    with WorkerProcesses(2) as started:
        yield started


@pytest.fixture
def context(workers: WorkerProcesses) -> ckptcore.Context:
    """The Context of their controller."""
    return controlling(workers)


def controlling(workers: WorkerProcesses) -> ckptcore.Context:
    """A Context for a controller of workers."""
    return ckptcore.Context(
        job=ckptcore.context.JobOptions(
            executor=workers, replicas=ckptcore.context.ReplicaOptions(piece_bytes=1 << 14)
        ),
        plugins=ckptcore.context.PluginOptions(handlers={RemoteArray: RemoteArrayHandler()}),
    )
