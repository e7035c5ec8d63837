"""The installed Orbax: its public module, and the internal names that the replacement needs.

No other module imports Orbax's internals. The names are from version 0.12.8.
"""

# mypy: disable-error-code="import-untyped"

from orbax.checkpoint import AsyncCheckpointer as V0AsyncCheckpointer
from orbax.checkpoint import args as v0_args
from orbax.checkpoint._src.asyncio_utils import run_sync
from orbax.checkpoint.experimental import v1
from orbax.checkpoint.experimental.v1._src.context.context import get_context
from orbax.checkpoint.experimental.v1._src.deletion.execution import start as start_deletion
from orbax.checkpoint.experimental.v1._src.deletion.metadata import ensure_available
from orbax.checkpoint.experimental.v1._src.deletion.validation import validate_arguments as validate_deletion
from orbax.checkpoint.experimental.v1._src.handlers.pytree_handler import PartialSaveReplacementError
from orbax.checkpoint.experimental.v1._src.handlers.registration import resolve_handler_for_save
from orbax.checkpoint.experimental.v1._src.handlers.types import typestr
from orbax.checkpoint.experimental.v1._src.layout.checkpoint_layout import (
    METRICS_CHECKPOINTABLE_KEY,
    PYTREE_METADATA_FILE,
    STATE_CHECKPOINTABLE_KEY,
)
from orbax.checkpoint.experimental.v1._src.partial.path import (
    add_partial_save_suffix,
    is_partial_save_path,
    remove_partial_save_suffix,
)
from orbax.checkpoint.experimental.v1._src.saving.validation import validate_save_checkpointables, validate_state

__all__ = [
    "METRICS_CHECKPOINTABLE_KEY",
    "PYTREE_METADATA_FILE",
    "STATE_CHECKPOINTABLE_KEY",
    "PartialSaveReplacementError",
    "V0AsyncCheckpointer",
    "add_partial_save_suffix",
    "ensure_available",
    "get_context",
    "is_partial_save_path",
    "remove_partial_save_suffix",
    "resolve_handler_for_save",
    "run_sync",
    "start_deletion",
    "typestr",
    "v0_args",
    "v1",
    "validate_deletion",
    "validate_save_checkpointables",
    "validate_state",
]
