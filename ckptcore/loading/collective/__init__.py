"""Loads that the processes of a job make together: each reads for itself, or one reads and sends to others."""

from __future__ import annotations

from ckptcore.context import Context
from ckptcore.loading.collective.joint import CollectiveRead
from ckptcore.protocols import Coordinator

__all__ = ["CollectiveRead", "collective_read"]


def collective_read(context: Context, job: Coordinator) -> CollectiveRead:
    """Return how a job of several processes loads, by ``JobOptions.reads``."""
    if context.job.reads == "all":
        return CollectiveRead(job)
    from ckptcore.loading.collective.shared import SharedRead  # a tenth of the time of the import of ckptcore

    return SharedRead(job)
