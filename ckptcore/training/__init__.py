"""Training runs: their steps, and where these are.

`RunDirectory` is the protocol of a place for the steps of a run: `Checkpointer` and `CheckpointReader` take one instead
of a path. `PathDirectory` is the one of the core; others can be composed of it.
"""

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
]
