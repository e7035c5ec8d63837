"""Arrays of worker processes for the tests of controllers, and their expected digests."""

from __future__ import annotations

from ckptcore.model import ArraySpec, Box
from tests.controller.elements import counted
from tests.controller.remote_arrays import RemoteArray
from tests.controller.worker_processes import WorkerProcesses

SPEC = ArraySpec((64, 1024), "float32")
"""256 KiB."""

ROWS = tuple((Box((start, 0), (start + 32, 1024)),) for start in (0, 32))
"""Each of two workers has half of the rows."""

COLUMNS = tuple((Box((0, start), (64, start + 512)),) for start in (0, 512))
"""Each has half of the columns."""

WHOLE = ((Box.whole(SPEC.shape),),) * 2
"""Each has all of it."""


def make_rows(workers: WorkerProcesses) -> RemoteArray:
    """Return an array whose rows are divided between two workers."""
    return workers.make(SPEC, ROWS, counted)


def make_whole(workers: WorkerProcesses) -> RemoteArray:
    """Return an array that both workers hold whole."""
    return workers.make(SPEC, WHOLE, counted)


def digests_of(boxes: tuple[tuple[Box, ...], ...]) -> list[dict[Box, str]]:
    """Return for each worker the digest of `counted` elements in each of its boxes."""
    return [{box: WorkerProcesses.digest(counted(SPEC, box)) for box in held} for held in boxes]
