"""Dry run of a save: predicts its objects, requests and memory."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import FunctionType, MethodType

from ckptcore.commit.location import LocationLike
from ckptcore.commit.stored_root import Overwrite
from ckptcore.context import Context, default_context
from ckptcore.protocols import Layout
from ckptcore_tools.dry_run.jobs import PlanRequest, plan_running_job, plan_simulated_job
from ckptcore_tools.dry_run.plans import ExportPlan, MemoryPlan, ObjectPlan, ProcessPlan, RequestCounts, SavePlan
from ckptcore_tools.dry_run.writes import ForecastingLayout, WriteForecast
from ckptcore_tools.exports import Export

__all__ = [
    "ExportPlan",
    "ForecastingLayout",
    "MemoryPlan",
    "ObjectPlan",
    "ProcessPlan",
    "RequestCounts",
    "SavePlan",
    "WriteForecast",
    "plan",
]


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
    """Predict the objects, requests and memory of `save` and `save_async`. Reads no elements.

    In a job every process calls this, like `save`, and each returns the plan of the whole job. With `processes`, one
    process plans a job that is not running, without a coordinator.

    Args:
        state: see `save`. Its arrays may be abstract (`jax.ShapeDtypeStruct`, tensors on the meta device,
            `AbstractArray`, `ShardedArray` without elements) or deleted. With `processes`: the state of every process,
            or a function from rank to state, which is called several times per rank. One state is enough if its leaves
            describe all processes: host arrays, DTensors, JAX arrays on devices of all processes. A `ShardedArray`
            needs the function.
        processes: number of processes of the job. None: the running job.
        location: the location of the save. It is checked as in a save, but nothing is written. None: no location is
            checked, and requests are counted for an object store.
        layout, overwrite, context: see `save`.
        exports: see `WithExports`. The locations of exports are checked only if `location` is given.

    Raises:
        CheckpointExistsError, UnsupportedLeafError, UnsupportedKeyError, NameCollisionError: like the save.
        CorruptCheckpointError: if the shards of all processes do not cover the arrays.
        PluginError: if a layout does not support dry runs.
        ValueError: if `processes` is less than 1.
    """
    request = PlanRequest(location=location, layout=layout, overwrite=overwrite, exports=exports)
    context = context or default_context()
    if processes is None:
        return plan_running_job(request, state, context)
    if processes < 1:
        raise ValueError(f"plan(processes={processes}): expected at least 1")
    # A function cannot be a leaf, so it is never a state.
    state_of = state if isinstance(state, FunctionType | MethodType | functools.partial) else lambda rank: state
    return plan_simulated_job(request, state_of, processes, context)
