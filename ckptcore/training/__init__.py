"""Training runs: their steps, and the directories of these steps.

`RunDirectory` is the protocol of a directory of steps. `Checkpointer` and `CheckpointReader` accept a `RunDirectory`
instead of a path. `PathDirectory` is the implementation of the core. Other implementations can use it.
"""

from ckptcore.commit.location import expanded_location
from ckptcore.training.path_directory import PathDirectory
from ckptcore.training.run_directory import (
    OwnedRun,
    Ownership,
    RunDirectory,
    RunSaves,
    RunSteps,
    SavedStep,
    StepTarget,
)

__all__ = [
    "OwnedRun",
    "Ownership",
    "PathDirectory",
    "RunDirectory",
    "RunSaves",
    "RunSteps",
    "SavedStep",
    "StepTarget",
    "expanded_location",
]
