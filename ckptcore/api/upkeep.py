"""Verifying and deleting what is there."""

from __future__ import annotations

from ckptcore.commit.delete import delete_checkpoint
from ckptcore.commit.location import LocationLike, resolve_location
from ckptcore.context import Context, default_context
from ckptcore.loading.verify import ProgressCallback, VerifyReport, verify_checkpoint
from ckptcore.other_libraries import explains_arguments
from ckptcore.runtime import runtime_of

__all__ = ["delete", "verify"]


@explains_arguments
def verify(
    location: LocationLike, *, progress: ProgressCallback | None = None, context: Context | None = None
) -> VerifyReport:
    """Read every byte of a checkpoint and check it.

    Args:
        location: a path or URL.
        progress: called with bytes checked and bytes in all, from any thread.
        context: options.

    Raises:
        CheckpointNotFoundError, UncommittedCheckpointError: if there is nothing to verify.
    """
    return verify_checkpoint(location, context or default_context(), progress)


@explains_arguments
def delete(location: LocationLike, *, context: Context | None = None) -> None:
    """Delete a checkpoint of ours, also an unfinished or a damaged one; it is never there in part.

    Every file in its directory is deleted with it, but never another checkpoint.

    Raises:
        CheckpointNotFoundError: if there is nothing.
        CheckpointExistsError: if the location holds no checkpoint of ckptcore, or if another checkpoint is inside its
            directory. Nothing is deleted.
        CheckpointReferredError: if checkpoints beside it have arrays in it; names them. Those elsewhere cannot be
            known.
    """
    chosen = context or default_context()
    runtime = runtime_of(chosen)
    resolved = resolve_location(location, runtime.storages, to_write=True)
    delete_checkpoint(resolved, runtime.io_threads)
