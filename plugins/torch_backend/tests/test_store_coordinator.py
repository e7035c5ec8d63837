"""Conformance tests of `StoreCoordinator` with a real store and real processes."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import ClassVar, TypeVar, cast

import pytest
import torch.distributed as dist
from ckptcore_testing import CoordinatorTests
from ckptcore_torch.store_coordinator import StoreCoordinator

from ckptcore.protocols import Coordinator

pytestmark = pytest.mark.system

T = TypeVar("T")
LARGEST_JOB = 4


@pytest.fixture(scope="module", autouse=True)
def processes() -> Iterator[None]:
    """Start processes that all tests reuse. Each runs one rank at a time."""
    with ProcessPoolExecutor(LARGEST_JOB, multiprocessing.get_context("forkserver")) as pool:
        TestStoreCoordinator.processes = pool
        yield


def _run_rank(job: bytes, port: int, rank: int, size: int, timeout_seconds: float) -> object:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    return pickle.loads(job)(StoreCoordinator(store, rank, size, timeout_seconds=timeout_seconds))


class TestStoreCoordinator(CoordinatorTests):
    processes: ClassVar[ProcessPoolExecutor]

    def run(self, size: int, job: Callable[[Coordinator], T], *, timeout_seconds: float) -> Sequence[T]:
        assert size <= LARGEST_JOB  # all ranks of a job run at once
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        work = pickle.dumps(job)
        ranks = [
            self.processes.submit(_run_rank, work, server.port, rank, size, timeout_seconds) for rank in range(size)
        ]
        errors = [error for rank in ranks if isinstance(error := rank.exception(), Exception)]
        if errors:
            raise ExceptionGroup(f"{len(errors)} of {size} ranks failed", errors)
        return [cast(T, rank.result()) for rank in ranks]
