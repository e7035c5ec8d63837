"""Dry run of a save: what it would write, request and hold in memory."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import FunctionType, MethodType

from ckptcore.commit.location import LocationLike
from ckptcore.commit.target import Overwrite
from ckptcore.context import Context, default_context
from ckptcore.protocols import Layout
from ckptcore_tools.dry_run.jobs import Asked, plan_running_job, plan_simulated_job
from ckptcore_tools.dry_run.plans import ExportPlan, MemoryPlan, ObjectPlan, ProcessPlan, RequestCounts, SavePlan
from ckptcore_tools.exports import Export

__all__ = ["ExportPlan", "MemoryPlan", "ObjectPlan", "ProcessPlan", "RequestCounts", "SavePlan", "plan"]


def plan(
    state: object,
    *,
    processes: int | None = None,
    location: LocationLike | None = None,
    layout: str | Layout = "safetensors",
    overwrite: Overwrite = False,
    exports: Sequence[Export] = (),
    context: Context | None = None,
) -> SavePlan:
    """Return what `save` and `save_async` would write, request and hold in memory. A dry run: it reads no elements.

    In a job every process calls this, as it would save, and each gets the plan of all. With `processes` one process
    plans a job that is not running; the coordinator is not used.

    Args:
        state: as for `save`; its arrays may be abstract (`jax.ShapeDtypeStruct`, tensors on the meta device,
            `AbstractArray`, `ShardedArray` without elements) or deleted. With `processes` it is the state of each
            process, or a function that returns it for a rank, called several times for each. One state is enough if its
            leaves describe all processes: host arrays, DTensors, arrays of JAX on devices of all processes. A
            `ShardedArray` needs the function.
        processes: how many processes the job would have; None: the job that is running.
        location: where the save would go. It is examined, and refused as the save would be; nothing is written. None:
            nothing is examined, and requests are counted for an object storage.
        layout, overwrite, context: as for `save`.
        exports: as for `WithExports`. The locations of exports are examined only with a location.

    Raises:
        CheckpointExistsError, UnsupportedLeafError, UnsupportedKeyError, NameCollisionError: what the save would raise.
        CorruptCheckpointError: if the shards of the processes do not make up the arrays.
        PluginError: if a layout does not support planning.
        ValueError: for less than one process.
    """
    asked = Asked(location=location, layout=layout, overwrite=overwrite, exports=exports)
    context = context or default_context()
    if processes is None:
        return plan_running_job(asked, state, context)
    if processes < 1:
        raise ValueError(f"plan(processes={processes}): give at least 1")
    # No leaf is a function, so there is no state that is one.
    state_of = state if isinstance(state, FunctionType | MethodType | functools.partial) else lambda rank: state
    return plan_simulated_job(asked, state_of, processes, context)
