"""Replacement for `orbax.checkpoint.v1` that saves and loads with ckptcore.

Types, options, handlers, errors and policies are those of the installed Orbax. The functions that save, load and
delete, `partial`, and `training.Checkpointer` are replaced.

    saving    `save`, `save_checkpointables`: one commit of ckptcore, and its `AsyncResponse`
    trees     `load`, `load_checkpointables`, `metadata`: Orbax's functions, with `TreeHandler`
    library   the installed Orbax
    settings  Orbax's options, translated to those of ckptcore
    deletion  `delete`
    partial   `partial.save`, `partial.finalize`
    training  `training.Checkpointer`
"""

from ckptcore_integrations.orbax_v1 import partial, training
from ckptcore_integrations.orbax_v1.deletion import delete, delete_async
from ckptcore_integrations.orbax_v1.library import v1
from ckptcore_integrations.orbax_v1.saving import (
    save,
    save_async,
    save_checkpointables,
    save_checkpointables_async,
    save_pytree,
    save_pytree_async,
)
from ckptcore_integrations.orbax_v1.trees import (
    PLACEHOLDER,
    checkpointables_metadata,
    is_orbax_checkpoint,
    load,
    load_async,
    load_checkpointables,
    load_checkpointables_async,
    load_pytree,
    load_pytree_async,
    metadata,
    pytree_metadata,
)

AbstractCheckpointable = v1.AbstractCheckpointable
AsyncResponse = v1.AsyncResponse
Checkpointable = v1.Checkpointable
CheckpointableHandler = v1.CheckpointableHandler
CheckpointMetadata = v1.CheckpointMetadata
Context = v1.Context
PyTreeMetadata = v1.PyTreeMetadata
StatefulCheckpointable = v1.StatefulCheckpointable
arrays = v1.arrays
errors = v1.errors
handlers = v1.handlers
multihost = v1.multihost
options = v1.options
path = v1.path
tree = v1.tree

__all__ = [
    "PLACEHOLDER",
    "AbstractCheckpointable",
    "AsyncResponse",
    "CheckpointMetadata",
    "Checkpointable",
    "CheckpointableHandler",
    "Context",
    "PyTreeMetadata",
    "StatefulCheckpointable",
    "arrays",
    "checkpointables_metadata",
    "delete",
    "delete_async",
    "errors",
    "handlers",
    "is_orbax_checkpoint",
    "load",
    "load_async",
    "load_checkpointables",
    "load_checkpointables_async",
    "load_pytree",
    "load_pytree_async",
    "metadata",
    "multihost",
    "options",
    "partial",
    "path",
    "pytree_metadata",
    "save",
    "save_async",
    "save_checkpointables",
    "save_checkpointables_async",
    "save_pytree",
    "save_pytree_async",
    "training",
    "tree",
]
