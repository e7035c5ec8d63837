"""Policies: when to save, and which steps to keep. Pure: no clock, no storage, no state.

::

    saving        EveryStep, FixedInterval, ...: whether to save at a SaveContext
    preservation  PreserveAll, LatestN, ...: which of the steps (StepInfo) garbage collection keeps
    collection    what_to_delete, explain: what garbage collection does with such a policy

The names are those of Orbax. A policy of your own is any object with the methods of `SavePolicy` or `PreservationPolicy`, or a
function in `CustomSave` or `CustomPreservation`.
"""

from ckptcore.policies.preservation import (
    AnyPreservation,
    BestN,
    CustomPreservation,
    CustomSteps,
    EveryNSeconds,
    EveryNSteps,
    EveryNStepsClosest,
    LatestDuration,
    LatestN,
    PreservationPolicy,
    PreserveAll,
    StepInfo,
    explain,
    what_to_delete,
)
from ckptcore.policies.saving import (
    AnySave,
    ContinuousCheckpointing,
    CustomSave,
    EpochInterval,
    EveryStep,
    FixedInterval,
    InitialSave,
    PreemptionCheckpointing,
    SaveContext,
    SavePolicy,
    SpecificSteps,
    TimeInterval,
)

__all__ = [
    "AnyPreservation",
    "AnySave",
    "BestN",
    "ContinuousCheckpointing",
    "CustomPreservation",
    "CustomSave",
    "CustomSteps",
    "EpochInterval",
    "EveryNSeconds",
    "EveryNSteps",
    "EveryNStepsClosest",
    "EveryStep",
    "FixedInterval",
    "InitialSave",
    "LatestDuration",
    "LatestN",
    "PreemptionCheckpointing",
    "PreservationPolicy",
    "PreserveAll",
    "SaveContext",
    "SavePolicy",
    "SpecificSteps",
    "StepInfo",
    "TimeInterval",
    "explain",
    "what_to_delete",
]
