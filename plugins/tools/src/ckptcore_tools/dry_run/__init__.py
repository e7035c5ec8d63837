"""Saying what a save would write, without doing it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ckptcore.commit.location import LocationLike
from ckptcore.commit.occupants import Overwrite
from ckptcore.context import Context, default_context
from ckptcore.protocols import Layout
from ckptcore.saving.exports import Export
from ckptcore_tools.dry_run.jobs import Asked, plan_imagined_job, plan_running_job
from ckptcore_tools.dry_run.plans import ExportPlan, MemoryPlan, ObjectPlan, ProcessPlan, RequestCounts, SavePlan

__all__ = ["ExportPlan", "MemoryPlan", "ObjectPlan", "ProcessPlan", "RequestCounts", "SavePlan", "plan", "plan_job"]


def plan(
    state: object,
    *,
    location: LocationLike | None = None,
    layout: str | Layout = "safetensors",
    overwrite: Overwrite = False,
    exports: Sequence[Export] = (),
    context: Context | None = None,
) -> SavePlan:
    """Say what `save` and `save_async` would write, ask of the storage and hold in memory; a dry run. Touches no elements.

    In a job every process calls this, as it would save, and each gets the plan of all.

    Args:
        state: as for `save`; its arrays may be abstract (`jax.ShapeDtypeStruct`, tensors on the meta device, `AbstractArray`,
            `ShardedArray` without elements) or deleted.
        location: where the save would go. It is looked at, and refused as the save would be; nothing is written. None: nothing is
            looked at, and requests are counted for a storage of objects.
        layout, overwrite, exports, context: as for `save`. Exports are looked at only with a location.

    Raises:
        CheckpointExistsError, UnsupportedLeafError, UnsupportedKeyError, NameCollisionError: what the save would raise.
        CorruptCheckpointError: if what the processes hold does not make up the arrays.
        PluginError: if a layout cannot tell what it writes.
    """
    asked = Asked(location=location, layout=layout, overwrite=overwrite, exports=exports)
    return plan_running_job(asked, state, context or default_context())


def plan_job(
    state_of: Callable[[int], object],
    processes: int,
    *,
    location: LocationLike | None = None,
    layout: str | Layout = "safetensors",
    overwrite: Overwrite = False,
    exports: Sequence[Export] = (),
    context: Context | None = None,
) -> SavePlan:
    """Say what `plan` would in a job that does not run: one process plays all others.

    Args:
        state_of: the state of each process, by rank; called several times for each. One state for all will do where its leaves tell
            who holds what: host arrays, DTensors, arrays of JAX over devices of all processes. Of a `ShardedArray` every process
            gives its own.
        processes: how many there are.
        location, layout, overwrite, exports, context: as for `plan`; the coordinator is not asked.

    Raises:
        What `plan` does.
        ValueError: for less than one process.
    """
    if processes < 1:
        raise ValueError(f"plan_job(processes={processes}): give at least 1")
    asked = Asked(location=location, layout=layout, overwrite=overwrite, exports=exports)
    return plan_imagined_job(asked, state_of, processes, context or default_context())
