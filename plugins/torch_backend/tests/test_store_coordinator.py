"""Conformance tests of the coordinator over a torch.distributed store, with real processes."""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import pytest
import torch.distributed as dist
from ckptcore_testing import CoordinatorTests
from ckptcore_torch.store_coordinator import StoreCoordinator

from ckptcore.protocols import Coordinator

pytestmark = pytest.mark.system

T = TypeVar("T")


def _rank(file: str, rank: int, size: int, timeout_seconds: float, job: bytes, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    work = pickle.loads(job)
    try:
        result = work(StoreCoordinator(store, rank, size, timeout_seconds=timeout_seconds))
        outcome: tuple[bool, object] = (True, result)
    except Exception as error:  # noqa: BLE001  # the parent raises it again
        outcome = (False, error)
    Path(file).write_bytes(pickle.dumps(outcome))


class TestStoreCoordinator(CoordinatorTests):
    def run(self, size: int, job: Callable[[Coordinator], T], *, timeout_seconds: float) -> Sequence[T]:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("forkserver")
        with tempfile.TemporaryDirectory() as directory:
            files = [f"{directory}/{rank}" for rank in range(size)]
            processes = [
                context.Process(target=_rank, args=(file, rank, size, timeout_seconds, pickle.dumps(job), server.port))
                for rank, file in enumerate(files)
            ]
            for process in processes:
                process.start()
            for process in processes:
                process.join()
            outcomes = [pickle.loads(Path(file).read_bytes()) for file in files]
        errors = [value for ok, value in outcomes if not ok]
        if errors:
            raise ExceptionGroup(f"{len(errors)} of {size} ranks failed", errors)
        return [value for _, value in outcomes]
