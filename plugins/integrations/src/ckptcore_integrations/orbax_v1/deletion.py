"""Deletions: Orbax checks and records them, and ckptcore deletes whole checkpoints that it wrote."""

from __future__ import annotations

import functools
from typing import Any

import ckptcore
from ckptcore.training import expanded_location
from ckptcore_integrations.orbax_v1.library import get_context, start_deletion, v1, validate_deletion

_ROOT = "checkpoint.json"


def delete(path: Any, *, checkpointable_name: str | None = None, missing_ok: bool = False) -> bool:
    """Delete a checkpoint, or one of its checkpointables. See `orbax.checkpoint.v1.delete`."""
    deleted: bool = delete_async(path, checkpointable_name=checkpointable_name, missing_ok=missing_ok).result()
    return deleted


def delete_async(
    path: Any, *, checkpointable_name: str | None = None, missing_ok: bool = False
) -> v1.AsyncResponse[bool]:
    """Begin to delete a checkpoint, or one of its checkpointables. See `orbax.checkpoint.v1.delete_async`."""
    validate_deletion(checkpointable_name, missing_ok)
    path = expanded_location(path)
    context = get_context()
    moves = context.deletion.gcs_deletion_options.todelete_full_path is not None
    if checkpointable_name is not None or moves or not is_from_ckptcore(context.file.path_class(path)):
        return v1.delete_async(path, checkpointable_name=checkpointable_name, missing_ok=missing_ok)
    # ckptcore deletes it, so that no process can load it once its deletion has begun.
    remove = functools.partial(ckptcore.delete, path, other_files=True)  # as Orbax does
    return start_deletion(path, checkpointable_name=None, missing_ok=missing_ok, whole_delete=remove)


def is_from_ckptcore(path: Any) -> bool:
    """Return True if ckptcore wrote the checkpoint at a path of Orbax."""
    return bool((path / _ROOT).exists())
