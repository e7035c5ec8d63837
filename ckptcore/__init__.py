"""Checkpointing for machine learning that belongs to no framework.

A map of the package:

- `save`, `save_async`, `load`, `load_async`, `load_into`, `metadata`, `delete`, `verify`, `convert`: what users call (`ckptcore.api`)
- `Context`, `MemoryOptions`: options (`ckptcore.context`)
- `AbstractArray`, `PLACEHOLDER`: what a load asks for
- `SafetensorsLayout`: the built-in layout with its options
- `ckptcore.errors`: every error
- `ckptcore.model`, `ckptcore.protocols`, `ckptcore.hookspecs`, `ckptcore.planning`, `ckptcore.testing`: for authors of plugins
"""

from ckptcore.api import (
    CheckpointMetadata,
    convert,
    delete,
    load,
    load_async,
    load_into,
    metadata,
    save,
    save_async,
    verify,
)
from ckptcore.background import LoadHandle, Progress, SaveHandle
from ckptcore.builtin.safetensors import SafetensorsLayout
from ckptcore.context import Context, MemoryOptions
from ckptcore.errors import CheckpointError
from ckptcore.flattening import PLACEHOLDER
from ckptcore.hookspecs import hookimpl
from ckptcore.model import AbstractArray
from ckptcore.verification import Problem, VerifyReport

__all__ = [
    "PLACEHOLDER",
    "AbstractArray",
    "CheckpointError",
    "CheckpointMetadata",
    "Context",
    "LoadHandle",
    "MemoryOptions",
    "Problem",
    "Progress",
    "SafetensorsLayout",
    "SaveHandle",
    "VerifyReport",
    "convert",
    "delete",
    "hookimpl",
    "load",
    "load_async",
    "load_into",
    "metadata",
    "save",
    "save_async",
    "verify",
]
