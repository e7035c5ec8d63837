"""The Ray plugin: the hook. Importing it does not import Ray.

::

    jobs          make_job and find_job: RayJob, the job as seen by the driver
    coordinator   RayCoordinator: one rank of a job
    membership    join_job: sets the rank of this process, for the hook
    job_actor     the actor through which the ranks of a job communicate
    exchanges     the exchanges of one incarnation of a job and their outcomes, without Ray
    progress      progress of the ranks, for the driver
"""

from __future__ import annotations

import sys

from ckptcore.hookspecs import hookimpl
from ckptcore.protocols import Coordinator

__all__ = ["ckpt_coordinator"]


@hookimpl
def ckpt_coordinator() -> Coordinator | None:
    """Return the coordinator of the job that this process joined with `ckptcore_ray.membership.join_job`."""
    # Check for the function too: another thread may still be importing the module.
    if not hasattr(sys.modules.get("ckptcore_ray.membership"), "joined_coordinator"):
        return None
    from ckptcore_ray.membership import joined_coordinator

    return joined_coordinator()
