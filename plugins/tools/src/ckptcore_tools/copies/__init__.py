"""Copies of checkpoints: byte for byte, in another layout, or a part of one for other software."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, overload

from ckptcore.builtin.safetensors import SafetensorsLayout
from ckptcore.commit.location import LocationLike
from ckptcore.commit.locks import IfInUse
from ckptcore.commit.target import Overwrite
from ckptcore.context import Context, default_context
from ckptcore.loading.verify import ProgressCallback
from ckptcore.protocols import Layout, Transforms
from ckptcore.step_names import StepNames
from ckptcore_tools.copies.consolidation import FilePath, TiedNames, consolidate_checkpoint
from ckptcore_tools.copies.conversion import convert_checkpoint
from ckptcore_tools.copies.copying import CopyReport, CopyVerification, copy_whole
from ckptcore_tools.copies.steps import StepProgressCallback, StepsCopyReport, copy_run
from ckptcore_tools.subtrees import SubtreePath

if TYPE_CHECKING:
    from ckptcore.protocols import Transforms

__all__ = ["CopyReport", "StepsCopyReport", "copy", "copy_steps", "copy_whole"]


@overload
def copy(
    source: LocationLike,
    destination: LocationLike,
    *,
    overwrite: Overwrite = False,
    verify: CopyVerification = "passing",
    progress: ProgressCallback | None = None,
    context: Context | None = None,
) -> CopyReport: ...


@overload
def copy(
    source: LocationLike,
    destination: LocationLike,
    *,
    layout: str | Layout,
    transforms: Transforms = (),
    overwrite: Overwrite = False,
    progress: ProgressCallback | None = None,
    context: Context | None = None,
) -> None: ...


@overload
def copy(
    source: LocationLike,
    destination: LocationLike,
    *,
    subtree: SubtreePath,
    layout: str | Layout = "safetensors",
    tied: TiedNames = "each",
    files: Sequence[FilePath] = (),
    overwrite: Overwrite = False,
    progress: ProgressCallback | None = None,
    context: Context | None = None,
) -> None: ...


def copy(
    source: LocationLike,
    destination: LocationLike,
    *,
    layout: str | Layout | None = None,
    subtree: SubtreePath | None = None,
    transforms: Transforms = (),
    tied: TiedNames | None = None,
    files: Sequence[FilePath] = (),
    overwrite: Overwrite = False,
    verify: CopyVerification = "passing",
    progress: ProgressCallback | None = None,
    context: Context | None = None,
) -> CopyReport | None:
    """Copy a committed checkpoint to another location or storage. The source is never changed.

    - ``copy(source, destination)`` copies every object as it is.
    - ``copy(source, destination, layout=...)`` writes the checkpoint again in another layout.
    - ``copy(source, destination, subtree=...)`` writes a part of it, or all, as one directory of safetensors for
      Hugging Face tools.

    **Byte for byte.** Everything in the directory is copied, except hidden directories. The copy is the same save, with
    the same root, and is committed as a save is. A checkpoint that other software wrote has no root: where directories
    are renamed it appears as a whole; elsewhere ckptcore does not load it before it is complete, but other software
    sees its files as they arrive. The copy of a checkpoint that refers to others (`Update`) is another save in the same
    layout, which contains all arrays. Blocks are compared with their checksums before they are written. A few pieces
    are in memory at a time. An interrupted copy resumes when it is called again: complete objects are not sent again.
    A checkpoint that is at the destination already, as the same save, is left as it is.

    **In another layout.** Few arrays are in memory at a time. Of several checkpointables each one is written, and files
    that objects wrote are copied. Only this process writes.

    **A subtree.** Arrays are read in pieces: about 192 MiB are in memory, or ``MemoryOptions.load_bytes``. In a job
    every process calls this with the same arguments. Each writes whole files, balanced by bytes, and reads only what is
    in those.

    Args:
        source, destination: paths or URLs.
        layout: the layout to write, as for `save`. With `subtree`, ``"safetensors"`` or a `SafetensorsLayout`, whose
            options are the size of files, their names and their metadata. None: as stored, or safetensors with
            `subtree`.
        subtree: the part of the state to write, such as ``"model"`` or ``("model", "layers", 0)``; names begin below
            it. Of several checkpointables it begins with a name. ``()`` is everything.
        transforms: changes to the tree, in this order; see `ckptcore.transforms`. Needs `layout`, and one tree.
        tied: ``"each"`` (the default) stores an array that has several names under each of them, so that every loader
            finds all names. ``"once"`` stores it under the first, with the others in the ``__metadata__``, as
            `safetensors.torch.save_model` does. Needs `subtree`.
        files: local files to add under their names, such as ``config.json``; those of the leader. Needs `subtree`.
        overwrite: as for `save`.
        verify: ``"passing"``, or ``"read-back"``: everything is also read at the destination and compared. For copies
            byte for byte.
        progress: called with bytes done and bytes in all, from any thread; with `subtree` those of this process.
        context: options.

    Returns:
        A report of a copy byte for byte; otherwise None.

    Raises:
        ValueError: for options that exclude each other.
        InvalidLocationError: for a destination that is the source, contains it, or is one of its checkpointables; for
            files that do not exist. Byte for byte also for a source that is one file, and for one of several
            checkpointables whose copy would be inside another checkpoint.
        NameCollisionError: for files whose names are taken.
        CheckpointNotFoundError, UncommittedCheckpointError: if there is nothing to copy.
        CheckpointExistsError, AtomicityError: as for `save`.
        CorruptCheckpointError: if the source is damaged or was replaced too often meanwhile, or the destination is not
            what was sent.
        TransformError, TreeMismatchError: if the transforms do not fit, or the subtree does not exist.
        RankFailedError: if another process failed. Nothing was committed.
        SaveLostError: if another process copied or saved to the destination meanwhile.
        StorageError: if a storage fails. What was at the destination before is still there.
    """
    context = context or default_context()
    if subtree is None and (tied is not None or files):
        option = f"tied={tied!r}" if tied is not None else "files"
        raise ValueError(f"copy({option}) needs a subtree: pass subtree='model', or subtree=() for everything")
    if verify != "passing" and (layout is not None or subtree is not None):
        raise ValueError(f"copy(verify={verify!r}) is for copies byte for byte: leave out layout and subtree")
    if subtree is not None:
        if transforms:
            raise ValueError("copy takes either transforms or a subtree: copy twice, first with transforms")
        written = _safetensors(layout)
        names = tied or "each"
        if names not in ("each", "once"):
            raise ValueError(f"copy(tied={tied!r}): give 'each' or 'once'")
        consolidate_checkpoint(source, destination, subtree, written, names, files, overwrite, progress, context)
        return None
    if layout is not None:
        convert_checkpoint(source, destination, layout, overwrite, progress, context, transforms)
        return None
    if transforms:
        raise ValueError("copy(transforms=...) needs a layout, because it writes the checkpoint again")
    return copy_whole(source, destination, context, overwrite=overwrite, verify=verify, progress=progress)


def _safetensors(layout: str | Layout | None) -> SafetensorsLayout:
    """Return the layout that a subtree is written in."""
    if layout is None or layout == "safetensors":
        return SafetensorsLayout()
    if isinstance(layout, SafetensorsLayout) and layout.max_file_bytes > 0:
        return layout
    raise ValueError(
        f"copy(layout={layout!r}, subtree=...): a subtree is written as safetensors; pass 'safetensors' or a "
        "SafetensorsLayout with files of at least one byte, or leave out the subtree"
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

    The oldest come first, so that a copy that died is the run as it was at some time. Copying again goes on, and also
    brings steps that were saved since; what is at the destination already is left as it is. This process owns the
    destination meanwhile.

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
