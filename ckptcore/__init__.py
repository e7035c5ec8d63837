"""Checkpointing for machine learning that belongs to no framework.

A map of the package:

- `save`, `save_async`, `load`, `load_async`, `load_into`, `metadata`, `delete`, `verify`: what users call (`ckptcore.api`, as
  the functions below)
- `save_checkpointables`, `save_checkpointables_async`, `load_checkpointables`, `checkpointables_metadata`: several objects in one checkpoint (`ckptcore.loading.composites`)
- `abstract`: what asks a load for a value like one that is there (`ckptcore.tree.abstract_values`)
- `save_partial`, `save_partial_async`, `finalize`: a checkpoint that is filled in several sessions (`ckptcore.commit.session_claims`)
- `save_update`, `save_update_async`: a checkpoint that refers to another one for what did not change (`ckptcore.commit.references`)
- `open`, `load_slice`: single arrays and parts of arrays, read as they are asked for (`ckptcore.loading.open_checkpoints`)
- `load_parts`: all arrays in boxes, one after the other, with little in memory (`ckptcore.loading.loaded_parts`)
- `ckptcore.select`: which leaves a load reads
- `Checkpointer`: a run's steps; `CheckpointReader`: the same for who only reads (`ckptcore.training.checkpointer`, `ckptcore.training.reader`)
- `NearTier`: a fast directory that steps are saved to, and uploaded from (`ckptcore.training.tiers`)
- `ckptcore.policies`, `ckptcore.step_names`: when to save, which steps to keep, how they are named
- `Context`, `MemoryOptions`, `ReplicaOptions`, `ReadGroups`: options (`ckptcore.context`, `ckptcore.planning.replicas`, `ckptcore.planning.read_groups`)
- `Export`, `StepExport`: further checkpoints of one save in other layouts (`ckptcore.saving.exports`)
- `ShardedArray`, `ArrayShard`: NumPy arrays of which each process holds a part
- `Matching`, `LoadReport`: which differences a load allows, and what it did (`ckptcore.loading.matching_options`, `ckptcore.loading.load_reports`); `LoadAs`: the same for one of several objects
- `ckptcore.transforms`: changes of a stored tree while it is loaded (in the distribution `ckptcore-transforms`)
- `AbstractArray`, `PLACEHOLDER`: what a load asks for; `PerProcess`: what differs from process to process
- `SafetensorsLayout`: the built-in layout with its options
- `ckptcore.errors`: every error
- `ckptcore.handlers`: what saves objects by their own methods, to choose among them; `ckptcore.events`: what a save is doing
- `copy`, `copy_steps`, `plan`: of the distribution that
  ``pip install 'ckptcore[tools]'`` adds
- `ckptcore.model`, `ckptcore.protocols`, `ckptcore.hookspecs`, `ckptcore.planning`: for authors of plugins
"""

import importlib
import logging
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ckptcore.api.descriptions import abstract, checkpointables_metadata, metadata
    from ckptcore.api.loads import load, load_async, load_checkpointables, load_into
    from ckptcore.api.parts import load_parts, load_slice, open
    from ckptcore.api.saves import save, save_async, save_checkpointables, save_checkpointables_async
    from ckptcore.api.sessions import finalize, save_partial, save_partial_async
    from ckptcore.api.updates import save_update, save_update_async
    from ckptcore.api.upkeep import delete, verify
    from ckptcore.builtin.safetensors import SafetensorsLayout
    from ckptcore.builtin.sharded_arrays import ArrayShard, ShardedArray
    from ckptcore.context import Context, MemoryOptions
    from ckptcore.distributions import copy as copy
    from ckptcore.distributions import copy_steps as copy_steps
    from ckptcore.distributions import plan as plan
    from ckptcore.distributions import transforms as transforms
    from ckptcore.errors import CheckpointError
    from ckptcore.hookspecs import hookimpl
    from ckptcore.io.background import LoadHandle, Progress, SaveHandle
    from ckptcore.loading.describe import CheckpointablesMetadata, CheckpointMetadata
    from ckptcore.loading.load_reports import LeafChange, LoadReport
    from ckptcore.loading.load_requests import LoadAs
    from ckptcore.loading.loaded_parts import LoadedPart
    from ckptcore.loading.matching_options import Matching
    from ckptcore.loading.open_checkpoints import OpenCheckpoint, StoredTree
    from ckptcore.loading.stored_arrays import StoredArray
    from ckptcore.loading.verify import Problem, VerifyReport
    from ckptcore.model import AbstractArray
    from ckptcore.planning.read_groups import ReadGroups
    from ckptcore.planning.replicas import ReplicaOptions
    from ckptcore.protocols import StatefulCheckpointable
    from ckptcore.saving.exports import Export, StepExport
    from ckptcore.step_names import StepNameFormat, StepNames
    from ckptcore.training.checkpointer import Checkpointer
    from ckptcore.training.reader import CheckpointReader
    from ckptcore.training.restoring import SkippedStep
    from ckptcore.training.tiers.near import NearTier
    from ckptcore.training.tiers.status import UploadStatus
    from ckptcore.tree.flattening import PLACEHOLDER
    from ckptcore.tree.per_process import PerProcess

__all__ = [
    "PLACEHOLDER",
    "AbstractArray",
    "ArrayShard",
    "CheckpointError",
    "CheckpointMetadata",
    "CheckpointReader",
    "CheckpointablesMetadata",
    "Checkpointer",
    "Context",
    "Export",
    "LeafChange",
    "LoadAs",
    "LoadHandle",
    "LoadReport",
    "LoadedPart",
    "Matching",
    "MemoryOptions",
    "NearTier",
    "OpenCheckpoint",
    "PerProcess",
    "Problem",
    "Progress",
    "ReadGroups",
    "ReplicaOptions",
    "SafetensorsLayout",
    "SaveHandle",
    "ShardedArray",
    "SkippedStep",
    "StatefulCheckpointable",
    "StepExport",
    "StepNameFormat",
    "StepNames",
    "StoredArray",
    "StoredTree",
    "UploadStatus",
    "VerifyReport",
    "abstract",
    "checkpointables_metadata",
    "delete",
    "finalize",
    "hookimpl",
    "load",
    "load_async",
    "load_checkpointables",
    "load_into",
    "load_parts",
    "load_slice",
    "metadata",
    "open",
    "save",
    "save_async",
    "save_checkpointables",
    "save_checkpointables_async",
    "save_partial",
    "save_partial_async",
    "save_update",
    "save_update_async",
    "verify",
]

# A library is silent unless the program asks; without this, Python prints warnings for it.
logging.getLogger("ckptcore").addHandler(logging.NullHandler())

_NAMES: Final[dict[str, tuple[str, ...]]] = {
    "ckptcore.api.descriptions": ("abstract", "checkpointables_metadata", "metadata"),
    "ckptcore.api.loads": ("load", "load_async", "load_checkpointables", "load_into"),
    "ckptcore.api.parts": ("load_parts", "load_slice", "open"),
    "ckptcore.api.saves": ("save", "save_async", "save_checkpointables", "save_checkpointables_async"),
    "ckptcore.api.sessions": ("finalize", "save_partial", "save_partial_async"),
    "ckptcore.api.updates": ("save_update", "save_update_async"),
    "ckptcore.api.upkeep": ("delete", "verify"),
    "ckptcore.io.background": (
        "LoadHandle",
        "Progress",
        "SaveHandle",
    ),
    "ckptcore.builtin.safetensors": ("SafetensorsLayout",),
    "ckptcore.builtin.sharded_arrays": (
        "ArrayShard",
        "ShardedArray",
    ),
    "ckptcore.training.checkpointer": ("Checkpointer",),
    "ckptcore.context": (
        "Context",
        "MemoryOptions",
    ),
    "ckptcore.loading.describe": (
        "CheckpointMetadata",
        "CheckpointablesMetadata",
    ),
    "ckptcore.errors": ("CheckpointError",),
    "ckptcore.saving.exports": (
        "Export",
        "StepExport",
    ),
    "ckptcore.tree.flattening": ("PLACEHOLDER",),
    "ckptcore.hookspecs": ("hookimpl",),
    "ckptcore.loading.load_reports": ("LeafChange", "LoadReport"),
    "ckptcore.loading.load_requests": ("LoadAs",),
    "ckptcore.loading.loaded_parts": ("LoadedPart",),
    "ckptcore.loading.matching_options": ("Matching",),
    "ckptcore.model": ("AbstractArray",),
    "ckptcore.loading.open_checkpoints": (
        "OpenCheckpoint",
        "StoredTree",
    ),
    "ckptcore.tree.per_process": ("PerProcess",),
    "ckptcore.protocols": ("StatefulCheckpointable",),
    "ckptcore.planning.read_groups": ("ReadGroups",),
    "ckptcore.training.reader": ("CheckpointReader",),
    "ckptcore.training.restoring": ("SkippedStep",),
    "ckptcore.planning.replicas": ("ReplicaOptions",),
    "ckptcore.step_names": (
        "StepNameFormat",
        "StepNames",
    ),
    "ckptcore.loading.stored_arrays": ("StoredArray",),
    "ckptcore.training.tiers.near": ("NearTier",),
    "ckptcore.training.tiers.status": ("UploadStatus",),
    "ckptcore.loading.verify": (
        "Problem",
        "VerifyReport",
    ),
}
"""The names of this page, by where they are defined. Each is imported with its first use: a program that imports this package, or a plugin, and saves nothing
does not wait for it."""

_MODULES: Final = (
    "errors",
    "events",
    "handlers",
    "hookspecs",
    "model",
    "planning",
    "policies",
    "protocols",
    "select",
    "step_names",
)
"""The modules that are public, which need no import of their own."""

_HOMES: Final = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        found: object = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = found
        return found
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if not name.startswith("_"):
        # Imported here, because most programs use no such name.
        from ckptcore.distributions import import_name, lazy_names

        if name in lazy_names():
            return import_name(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
