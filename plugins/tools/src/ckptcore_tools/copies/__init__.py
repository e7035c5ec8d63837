"""Writing a checkpoint again: as it is, in another layout, or for other software."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ckptcore.builtin.safetensors import SafetensorsLayout
from ckptcore.commit.location import LocationLike
from ckptcore.commit.occupants import Overwrite
from ckptcore.commit.ownership import IfInUse
from ckptcore.context import Context, default_context
from ckptcore.loading.verify import ProgressCallback
from ckptcore.protocols import Layout, Transforms
from ckptcore.step_names import StepNames
from ckptcore.tree.subtrees import SubtreePath
from ckptcore_tools.copies.consolidation import FilePath, TiedNames, consolidate_checkpoint
from ckptcore_tools.copies.conversion import convert_checkpoint
from ckptcore_tools.copies.copying import CopyReport, CopyVerification
from ckptcore_tools.copies.steps import StepProgressCallback, StepsCopyReport, copy_run
from ckptcore_tools.copies.whole_copies import copy_whole

__all__ = ["CopyReport", "StepsCopyReport", "consolidate", "convert", "copy", "copy_steps", "copy_whole"]


def copy(
    source: LocationLike,
    destination: LocationLike,
    *,
    overwrite: Overwrite = False,
    verify: CopyVerification = "passing",
    progress: ProgressCallback | None = None,
    context: Context | None = None,
) -> CopyReport:
    """Copy a committed checkpoint to another place or storage, object by object, every byte as it is.

    All that stands in its directory is copied, but hidden directories. The copy is the same save, with the same root, and counts once that is
    there: it is committed as a save is. What other software wrote has no root: where directories are renamed it comes there as a
    whole; elsewhere ckptcore does not load it before all is there, but other software sees its files as they come.

    Of one that refers to others (`save_update`) the copy is another save, in the same layout, that has all arrays itself.

    Blocks are compared with their checksums before they are written. A few pieces are in memory at a time, and nothing on disk.

    A copy that died, failed or was interrupted leaves what it wrote: copying again goes on with it. Objects that are there with their
    sizes are not sent again. Their bytes are compared first where a storage shows objects that are not complete, as a file system
    does, and those of objects without checksums everywhere. A save to the destination removes what was left. A
    checkpoint that is at the destination already, as the same save, is left as it is.

    Args:
        source, destination: paths or URLs.
        overwrite: as for `save`.
        verify: ``"passing"``; or ``"read-back"``: everything is read at the destination, too, and compared.
        progress: called with bytes at the destination and bytes in all, from any thread.
        context: options.

    Raises:
        InvalidLocationError: for a destination that is the source, is around it, or is one of its checkpointables; for a source that is one
            file; for one of several checkpointables that is to stand in another checkpoint.
        CheckpointNotFoundError, UncommittedCheckpointError: if there is nothing to copy.
        CheckpointExistsError, AtomicityError: as for `save`.
        CorruptCheckpointError: if the source is damaged, was replaced too often meanwhile, or what is at the destination is not what was sent.
        SaveLostError: if another process copies the same to there, or saved there meanwhile.
        StorageError: if a storage fails. What was at the destination before is there still.
    """
    return copy_whole(
        source, destination, context or default_context(), overwrite=overwrite, verify=verify, progress=progress
    )


def copy_steps(
    source: LocationLike,
    destination: LocationLike,
    *,
    steps: Collection[int] | None = None,
    names: StepNames | None = None,
    overwrite: Overwrite = False,
    verify: CopyVerification = "passing",
    if_in_use: IfInUse = "error",
    progress: StepProgressCallback | None = None,
    context: Context | None = None,
) -> StepsCopyReport:
    """Copy the committed steps of a run to another directory, each as `copy` does, under the name that it has; and the run's metadata.

    The oldest come first, so that a copy that died is the run as it was at some time. Copying again goes on, and also brings steps that
    were saved since; what is at the destination already is left as it is. This process owns the destination meanwhile.

    Args:
        source, destination: the directories of steps, as paths or URLs.
        steps: which ones; None: all that are committed.
        names: how steps are named, if in no usual way.
        overwrite, verify: as for `copy`; with `overwrite` the metadata of the destination is replaced, too.
        if_in_use: as for `Checkpointer`, where another job owns the destination.
        progress: called with a step, its bytes at the destination and its bytes in all, from any thread.
        context: options.

    Raises:
        CheckpointNotFoundError: if a step is not there, or none is. One that is deleted meanwhile is in the report.
        CheckpointExistsError: if another save of a step is at the destination. Steps before it are copied.
        DirectoryInUseError: if another job writes steps to the destination.
        What `copy` does; of a step that is damaged at the source the report tells.
    """
    return copy_run(
        source,
        destination,
        context or default_context(),
        steps=steps,
        names=names,
        overwrite=overwrite,
        verify=verify,
        if_in_use=if_in_use,
        progress=progress,
    )


def convert(
    source: LocationLike,
    destination: LocationLike,
    *,
    layout: str | Layout = "safetensors",
    overwrite: Overwrite = False,
    progress: ProgressCallback | None = None,
    context: Context | None = None,
    transforms: Transforms = (),
) -> None:
    """Write a checkpoint again in another layout or place; holds few arrays at a time.

    Args:
        source, destination: paths or URLs.
        layout, overwrite: as for `save`.
        progress: called with bytes written and bytes in all, from any thread.
        context: options.
        transforms: what is changed of the tree on the way, in this order: see `ckptcore.transforms`. Of one tree only.

    Raises:
        TransformError: as for `load`. Nothing was converted.
        What `load` and `save` do; the source is never changed.
    """
    convert_checkpoint(source, destination, layout, overwrite, progress, context or default_context(), transforms)


def consolidate(
    source: LocationLike,
    destination: LocationLike,
    *,
    subtree: SubtreePath = (),
    max_file_bytes: int = 5_000_000_000,
    stem: str = "model",
    metadata: Mapping[str, str] | None = None,
    tied: TiedNames = "each",
    files: Sequence[FilePath] = (),
    overwrite: Overwrite = False,
    progress: ProgressCallback | None = None,
    context: Context | None = None,
) -> None:
    """Write a checkpoint of any layout, sharded or not, as one directory of safetensors for Hugging Face tools.

    Streams: of arrays that can be read in parts, about 192 MiB are in memory at a time, or ``MemoryOptions.load_bytes``. In a job
    every process calls this with the same arguments: each writes whole files, balanced by bytes, and reads what is in those.

    Args:
        source, destination: paths or URLs.
        subtree: which part of the state, such as ``"model"`` or ``("model", "layers", 0)``; names begin there. Of several
            checkpointables it begins with a name. Empty: all of it.
        max_file_bytes: the most elements a file holds, in bytes, unless one array is larger.
        stem: what the names of files begin with.
        metadata: entries to add to the ``__metadata__`` of every file, ``{"format": "pt"}`` by default.
        tied: ``"each"`` stores an array that has several names under each of them, so that every loader finds all
            names. ``"once"`` stores it under the first name, with the others in the ``__metadata__``, as
            `safetensors.torch.save_model` does.
        files: local files that go along under their names, such as ``config.json``; those of the leader.
        overwrite: as for `save`.
        progress: called with bytes written and bytes in all, of this process, from any thread.
        context: options.

    Raises:
        TreeMismatchError: if the subtree is not there.
        NameCollisionError, InvalidLocationError: for files that cannot go along, and for a destination that is the source, is around it, or
            is one of its checkpointables.
        CorruptCheckpointError: also if the source was replaced meanwhile.
        RankFailedError: if another process failed. Nothing was committed.
        What `load` and `save` do; the source is never changed.
    """
    if max_file_bytes < 1:
        raise ValueError(f"consolidate(max_file_bytes={max_file_bytes}): give a number of bytes above 0")
    if tied not in ("each", "once"):
        raise ValueError(f"consolidate(tied={tied!r}): give 'each' or 'once'")
    layout = SafetensorsLayout(max_file_bytes, stem, metadata or {})
    consolidate_checkpoint(
        source, destination, subtree, layout, tied, files, overwrite, progress, context or default_context()
    )
