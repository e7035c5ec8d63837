"""Verify and delete checkpoints."""

from __future__ import annotations

from ckptcore.commit.delete import delete_checkpoint
from ckptcore.commit.location import LocationLike, resolve_location
from ckptcore.context import Context, default_context
from ckptcore.inspection.verify import VerifyReport, verify_checkpoint
from ckptcore.other_libraries import explains_arguments
from ckptcore.progress import ProgressCallback
from ckptcore.runtime import runtime_of

__all__ = ["delete", "verify"]


@explains_arguments
def verify(
    location: LocationLike, *, progress: bool | ProgressCallback = False, context: Context | None = None
) -> VerifyReport:
    """Read and check every byte of a checkpoint. The report lists damage, which is not raised as an error.

    Args:
        location: a path or URL.
        progress: True to show a bar on stderr with rich or tqdm, on rank 0. Or a function of the bytes checked so far
            and the total, called from any thread. The last call has two equal numbers.
        context: options.

    Raises:
        CheckpointNotFoundError, UncommittedCheckpointError: there is no checkpoint to verify.
        StorageError: something cannot be read here, so that it is not known if it is damaged.
    """
    context = context or default_context()
    with runtime_of(context).show_progress(progress, "verifying") as report:
        return verify_checkpoint(location, context, report)


@explains_arguments
def delete(location: LocationLike, *, other_files: bool = False, context: Context | None = None) -> None:
    """Delete a checkpoint of ckptcore, also an unfinished or damaged one.

    No process can load a partly deleted checkpoint. Never deletes another checkpoint.

    Args:
        location: a path or URL.
        other_files: True to delete also files in its directory that no save wrote, such as a tokenizer.
        context: options.

    Raises:
        CheckpointNotFoundError: the location is empty.
        CheckpointExistsError: the location has no checkpoint of ckptcore, or its directory contains another checkpoint,
            or files that no save wrote. Nothing is deleted.
        CheckpointReferredError: other checkpoints in the same parent directory refer to its arrays; names them.
            References from elsewhere are not detected.
    """
    chosen = context or default_context()
    runtime = runtime_of(chosen)
    resolved = resolve_location(location, runtime.storages, to_write=True)
    delete_checkpoint(resolved, runtime.io_threads, other_files=other_files)
