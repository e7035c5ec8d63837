"""Ray for ckptcore: the hook. Importing this imports no Ray; the modules that do are imported on first use.

::

    jobs          make_job and find_job: what the driver has of a job, RayJob
    coordinator   RayCoordinator: one rank of a job
    membership    join_job: the rank that this process is, for the hook
    job_actor     the actor that the ranks of a job agree through
    exchanges     the exchanges of one incarnation of a job, without Ray
    outcomes      how an exchange ends
    progress      what the driver is told of the ranks
"""

from __future__ import annotations

import sys

from ckptcore.hookspecs import hookimpl
from ckptcore.protocols import Coordinator

__all__ = ["ckpt_coordinator"]


@hookimpl
def ckpt_coordinator() -> Coordinator | None:
    """The coordinator with which this process joined a job by `ckptcore_ray.membership.join_job`."""
    # A process that joined has imported the module, all of it: the function is looked for, too.
    if not hasattr(sys.modules.get("ckptcore_ray.membership"), "joined_coordinator"):
        return None
    from ckptcore_ray.membership import joined_coordinator

    return joined_coordinator()
