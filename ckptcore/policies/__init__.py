"""Policies: when to save, and which steps to keep. Pure: no clock, no storage, no state.

::

    saving        EveryStep, FixedInterval, ...: decide from a SaveContext whether to save
    preservation  PreserveAll, LatestN, ...: decide from StepInfos which steps to keep;
                  what_to_delete and explain apply such a policy

Most names are the same as in Orbax. A policy of your own is any object with the members of `SavePolicy` or
`PreservationPolicy`, or a function in `CustomSave` or `CustomPreservation`.
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
