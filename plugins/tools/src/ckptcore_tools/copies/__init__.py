"""Copies of checkpoints: byte for byte, in another layout, or of a subtree for other software."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import overload

from ckptcore.builtin.safetensors import SafetensorsLayout
from ckptcore.commit.location import LocationLike, expect_directory_name
from ckptcore.commit.stored_root import Overwrite
from ckptcore.context import Context, default_context
from ckptcore.progress import ProgressCallback
from ckptcore.protocols import Layout, Transforms
from ckptcore.runtime import runtime_of
from ckptcore_tools.copies.consolidation import Consolidation, FilePath, TiedNames
from ckptcore_tools.copies.conversion import convert_checkpoint
from ckptcore_tools.copies.copying import CopyReport, CopyVerification, copy_whole
from ckptcore_tools.copies.manifests import refuse_differences
from ckptcore_tools.copies.steps import StepsCopyReport, copy_steps
from ckptcore_tools.subtrees import SubtreePath

__all__ = ["CopyReport", "StepsCopyReport", "copy", "copy_steps", "copy_whole"]


@overload
def copy(
    source: LocationLike,
    destination: LocationLike,
    *,
    overwrite: Overwrite = False,
    verify: CopyVerification = "passing",
    progress: bool | ProgressCallback = False,
    context: Context | None = None,
) -> CopyReport: ...


@overload
def copy(
    source: LocationLike,
    destination: LocationLike,
    *,
    layout: str | Layout,
    transforms: Transforms = (),
    leave_out: Collection[str] = (),
    overwrite: Overwrite = False,
    progress: bool | ProgressCallback = False,
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
    leave_out: Collection[str] = (),
    overwrite: Overwrite = False,
    progress: bool | ProgressCallback = False,
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
    leave_out: Collection[str] = (),
    overwrite: Overwrite = False,
    verify: CopyVerification = "passing",
    progress: bool | ProgressCallback = False,
    context: Context | None = None,
) -> CopyReport | None:
    """Copy a committed checkpoint to another location or storage. The source is never changed.

    - ``copy(source, destination)`` copies every object as it is.
    - ``copy(source, destination, layout=...)`` converts the checkpoint to another layout.
    - ``copy(source, destination, subtree=...)`` writes a subtree, or everything, as one directory of safetensors files
      for Hugging Face tools.

    **Byte for byte.** Everything in the directory is copied, except hidden directories. The copy has the same save id
    and root as the source, and is committed like a save. A checkpoint of other software has no root. Its copy is
    committed by a rename on file systems. On object stores, ckptcore does not load the copy before it is complete, but
    other software can see its files as they arrive. The copy of an `Update` is a new save in the same layout, with all
    arrays. Blocks are compared with their checksums before they are written. Only a few blocks are in memory at a time.
    To resume an interrupted copy, call `copy` again: complete objects are not sent again. The copy of an `Update`
    cannot resume. If the destination already has this save and `overwrite` is False, nothing is copied.

    **In another layout.** Only a few arrays are in memory at a time. If the checkpoint has several
    checkpointables, each tree is converted, and files are copied. Only this process writes.

    **A subtree.** Arrays are read in slices: about 192 MiB are in memory, or ``MemoryOptions.load_bytes``. In a job
    every process calls this with the same arguments. Each process writes whole files, balanced by bytes, and reads only
    the arrays of its files.

    Args:
        source, destination: paths or URLs.
        layout: the layout to write, as for `save`. With `subtree`: ``"safetensors"``, or a `SafetensorsLayout` with
            options for the size, names and metadata of files. None, the default: copy byte for byte; with `subtree`,
            safetensors.
        subtree: the part of the state to write, such as ``"model"`` or ``("model", "layers", 0)``. Names are relative
            to it. With several checkpointables it starts with the name of one. ``()`` is everything.
        transforms: changes to the tree, in this order; see `ckptcore.transforms`. Requires `layout` and a checkpoint of
            one tree.
        tied: ``"each"`` (the default) stores a tied array under each of its names, so that every loader finds all
            names. ``"once"`` stores it under the first name and lists the others in ``__metadata__``, like
            `safetensors.torch.save_model`. Requires `subtree`.
        files: local files of the leader to add under their names, such as ``config.json``. Requires `subtree`.
        leave_out: names or patterns of files not to copy, such as ``["optimizer.pt"]`` or ``["*"]``. For checkpoints of
            other software: the directory can contain files that are not part of the checkpoint. Also names or patterns
            of missing checkpointables that the checkpoint lists. Requires `layout` or `subtree`, because a copy byte
            for byte includes every file.
        overwrite: see `save`.
        verify: ``"passing"``: verify bytes as they are copied. ``"read-back"``: also read the copy and compare it. Only
            for copies byte for byte.
        progress: True to show a bar on stderr with rich or tqdm, on rank 0. Or a function that is called with the
            bytes done and the total bytes of this process. A copy byte for byte counts bytes of objects; other copies
            count bytes of arrays. The function is called from any thread; calls do not overlap. In the last call both
            numbers are equal. The function may raise an exception to stop the copy. If the source is replaced during
            the copy, the total grows by the bytes that are copied again.
        context: options.

    Returns:
        A report of a copy byte for byte; otherwise None.

    Raises:
        ValueError: for options that exclude each other.
        InvalidLocationError: if the destination is the source, contains it, or is one of its checkpointables; if a file
            of `files` does not exist. A copy byte for byte also fails if the source is one file, if it is a checkpoint
            of other software that is stored as differences from another, or if it would copy one of several
            checkpointables into another checkpoint.
        NameCollisionError: if the copy already uses the name of a file in `files`.
        CheckpointNotFoundError, UncommittedCheckpointError: if the source is not a committed checkpoint.
        CheckpointExistsError, AtomicityError: see `save`.
        CorruptCheckpointError: if the source is damaged or was replaced repeatedly during the copy, or if the copy
            differs from the source.
        TransformError, TreeMismatchError: if the transforms do not fit, or the subtree does not exist. Also if a copy
            of everything would lose files with state, or tensors that an index omits.
        RankFailedError: if another process failed. Nothing was committed.
        SaveLostError: if another process copied or saved to the destination at the same time.
        StorageError: if a storage fails. An existing checkpoint at the destination is not affected.
    """
    context = context or default_context()
    if subtree is None and (tied is not None or files):
        option = f"tied={tied!r}" if tied is not None else "files"
        raise ValueError(f"copy({option}) needs a subtree: pass subtree='model', or subtree=() for everything")
    if verify != "passing" and (layout is not None or subtree is not None):
        raise ValueError(f"copy(verify={verify!r}) applies only to copies byte for byte: omit layout and subtree")
    if leave_out and layout is None and subtree is None:
        raise ValueError("copy(leave_out=...) needs a layout or a subtree: without, every file is copied")
    if isinstance(leave_out, str):
        raise TypeError(f"copy(leave_out={leave_out!r}): expected a list of names, such as [{leave_out!r}]")
    expect_directory_name(destination)
    if subtree is not None:
        if transforms:
            raise ValueError("copy accepts transforms or a subtree, not both: copy twice, first with transforms")
        written = _safetensors(layout)
        names = tied or "each"
        if names not in ("each", "once"):
            raise ValueError(f"copy(tied={tied!r}): expected 'each' or 'once'")
        request = Consolidation(source, destination, subtree, written, names, files, leave_out, overwrite, context)
        with runtime_of(context).show_progress(progress, "consolidating") as report:
            request.run(report)
        return None
    if layout is not None:
        with runtime_of(context).show_progress(progress, "converting") as report:
            convert_checkpoint(source, destination, layout, overwrite, report, context, transforms, leave_out=leave_out)
        return None
    if transforms:
        raise ValueError("copy(transforms=...) needs a layout, because the arrays are written again")
    with runtime_of(context).show_progress(progress, "copying") as report:
        return copy_whole(
            source,
            destination,
            context,
            overwrite=overwrite,
            verify=verify,
            progress=report,
            check=refuse_differences,
        )


def _safetensors(layout: str | Layout | None) -> SafetensorsLayout:
    """Return the layout for a subtree."""
    if layout is None or layout == "safetensors":
        return SafetensorsLayout()
    if isinstance(layout, SafetensorsLayout) and layout.max_file_bytes > 0:
        return layout
    raise ValueError(
        f"copy(layout={layout!r}, subtree=...): a subtree is written as safetensors. Pass 'safetensors' or a "
        "SafetensorsLayout whose max_file_bytes is at least 1, or omit the subtree"
    )
