"""A job of processes of this machine, which exchange payloads over a socket file that rank 0 serves."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Any

from ckptcore_testing.thread_coordinator import ThreadCoordinator, ThreadJob

from ckptcore.protocols import Coordinator


class _Manager(BaseManager):
    """Serves the job of rank 0 to the other processes."""


class _RemoteJob(ThreadJob):
    """The job of rank 0, in another process."""

    def __init__(self, size: int, proxy: Any) -> None:
        super().__init__(size)
        self._proxy = proxy

    def _give(self, key: str, rank: int, payload: bytes) -> None:
        self._proxy._give(key, rank, payload)

    def _missing(self, key: str, ranks: Sequence[int]) -> Sequence[int]:
        missing: Sequence[int] = self._proxy._missing(key, ranks)
        return missing

    def _take(self, key: str, ranks: Sequence[int], size: int, timeout_seconds: float) -> Sequence[bytes]:
        payloads: Sequence[bytes] = self._proxy._take(key, ranks, size, timeout_seconds)
        return payloads


def serve_job(path: Path, size: int) -> Coordinator:
    """Return the coordinator of rank 0. Other processes can connect once this returns.

    Args:
        path: a new file, in a directory with a short name.
        size: the number of processes.
    """
    job = ThreadJob(size)
    exposed = ("_give", "_take", "_missing")
    _Manager.register("job", callable=lambda: job, exposed=exposed)
    opening = f"{path}.new"
    server = _Manager(opening, authkey=b"test").get_server()
    os.link(opening, path)  # only now, because a socket has its name before it listens
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return ThreadCoordinator(job, 0)


def join_job(path: Path, rank: int, size: int) -> Coordinator:
    """Return the coordinator of another rank.

    Raises:
        FileNotFoundError: rank 0 does not serve the job yet.
    """
    _Manager.register("job")
    manager = _Manager(str(path), authkey=b"test")
    manager.connect()
    return ThreadCoordinator(_RemoteJob(size, manager.job()), rank)  # type: ignore[attr-defined]
