"""Checkpointing for machine learning that belongs to no framework.

A map of the package:

- `save`, `save_async`, `load`, `load_async`, `load_into`, `metadata`, `delete`, `verify`, `convert`: what users call (`ckptcore.api`)
- `save_checkpointables`, `save_checkpointables_async`, `load_checkpointables`, `checkpointables_metadata`: several objects in one checkpoint
- `Context`, `MemoryOptions`: options (`ckptcore.context`)
- `AbstractArray`, `PLACEHOLDER`: what a load asks for; `PerProcess`: what differs from process to process
- `SafetensorsLayout`: the built-in layout with its options
- `ckptcore.errors`: every error
- `ckptcore.model`, `ckptcore.protocols`, `ckptcore.hookspecs`, `ckptcore.planning`, `ckptcore.testing`: for authors of plugins
"""

from ckptcore.api import (
    CheckpointablesMetadata,
    CheckpointMetadata,
    checkpointables_metadata,
    convert,
    delete,
    load,
    load_async,
    load_checkpointables,
    load_into,
    metadata,
    save,
    save_async,
    save_checkpointables,
    save_checkpointables_async,
    verify,
)
from ckptcore.background import LoadHandle, Progress, SaveHandle
from ckptcore.builtin.safetensors import SafetensorsLayout
from ckptcore.context import Context, MemoryOptions
from ckptcore.errors import CheckpointError
from ckptcore.flattening import PLACEHOLDER
from ckptcore.hookspecs import hookimpl
from ckptcore.model import AbstractArray
from ckptcore.parts import PerProcess
from ckptcore.protocols import StatefulCheckpointable
from ckptcore.verification import Problem, VerifyReport

__all__ = [
    "PLACEHOLDER",
    "AbstractArray",
    "CheckpointError",
    "CheckpointMetadata",
    "CheckpointablesMetadata",
    "Context",
    "LoadHandle",
    "MemoryOptions",
    "PerProcess",
    "Problem",
    "Progress",
    "SafetensorsLayout",
    "SaveHandle",
    "StatefulCheckpointable",
    "VerifyReport",
    "checkpointables_metadata",
    "convert",
    "delete",
    "hookimpl",
    "load",
    "load_async",
    "load_checkpointables",
    "load_into",
    "metadata",
    "save",
    "save_async",
    "save_checkpointables",
    "save_checkpointables_async",
    "verify",
]
