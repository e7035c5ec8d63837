"""The functions that users call: save, load, look at, verify, convert and delete checkpoints."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckptcore.background import LoadHandle, SaveHandle
from ckptcore.builtin.safetensors import SafetensorsLayout
from ckptcore.composites import load_composite
from ckptcore.context import Context, default_context
from ckptcore.describing import (
    CheckpointablesMetadata,
    CheckpointMetadata,
    describe_checkpoint,
    describe_checkpointables,
)
from ckptcore.exports import Export
from ckptcore.load_requests import LoadRequest
from ckptcore.loading import load_into_target, load_value, recorded_load
from ckptcore.locations import LocationLike
from ckptcore.matching_options import EXACT, Matching
from ckptcore.model.arrays import Box, HostArray
from ckptcore.model.tree import JSON
from ckptcore.occupants import Overwrite
from ckptcore.protocols import Layout
from ckptcore.save_plans import SavePlan
from ckptcore.save_requests import OneTree, SaveRequest
from ckptcore.saving import begin_save, perform_save
from ckptcore.subtrees import SubtreePath
from ckptcore.wanted import Wanted

if TYPE_CHECKING:
    from ckptcore.consolidation import FilePath
    from ckptcore.copying import CopyReport, CopyVerification
    from ckptcore.holds.ownership import IfInUse
    from ckptcore.load_reports import LoadReport
    from ckptcore.loaded_parts import LoadedPart
    from ckptcore.open_checkpoints import OpenCheckpoint, StoredPath
    from ckptcore.select import Selection
    from ckptcore.step_copies import StepProgressCallback, StepsCopyReport
    from ckptcore.step_names import StepNames
    from ckptcore.transforms import Transforms
    from ckptcore.verification import ProgressCallback, VerifyReport

__all__ = [
    "abstract",
    "checkpointables_metadata",
    "consolidate",
    "convert",
    "copy",
    "copy_steps",
    "delete",
    "finalize",
    "load",
    "load_async",
    "load_checkpointables",
    "load_into",
    "load_parts",
    "load_slice",
    "metadata",
    "open",
    "plan",
    "plan_job",
    "save",
    "save_async",
    "save_checkpointables",
    "save_checkpointables_async",
    "save_partial",
    "save_partial_async",
    "save_update",
    "save_update_async",
    "verify",
]


def save(
    location: LocationLike,
    state: object,
    *,
    layout: str | Layout = "safetensors",
    overwrite: Overwrite = False,
    metadata: Mapping[str, JSON] | None = None,
    exports: Sequence[Export] = (),
    context: Context | None = None,
) -> None:
    """Save a tree and return once it is committed. Arrays in host memory are not copied; do not change them meanwhile.

    Args:
        location: a path or URL; a directory is made there.
        state: a tree of containers and leaves that the installed plugins handle.
        layout: how arrays are laid out: a name, or a layout object with options.
        overwrite: whether a checkpoint that is there is replaced, with every file that stands in its directory: True: atomically; ``"non-atomic"``: also where the storage
            cannot do so, and a crash would leave neither.
        metadata: JSON of the user's, kept with the checkpoint.
        exports: further checkpoints of the state or of parts of it, in other layouts, that are written from the same copy in host
            memory once this one is committed. What replaces and describes this one does so for them. The error of one says that
            this one is committed.
        context: options.

    Raises:
        CheckpointExistsError: if something is there that is not to be replaced.
        UnsupportedLeafError, UnsupportedKeyError, NameCollisionError: for what cannot be saved; nothing was written.
        BackgroundSaveError: if an earlier asynchronous save failed unnoticed; call again to save.
        StorageError: if the storage fails. What was there before is there still.
    """
    request = SaveRequest(
        location=location, values=OneTree(state), layout=layout, overwrite=overwrite, custom=metadata, exports=exports
    )
    perform_save(request, context or default_context())


def save_async(
    location: LocationLike,
    state: object,
    *,
    layout: str | Layout = "safetensors",
    overwrite: Overwrite = False,
    metadata: Mapping[str, JSON] | None = None,
    exports: Sequence[Export] = (),
    context: Context | None = None,
) -> SaveHandle:
    """Begin to save a tree and return once the save owns its memory: what changes afterwards is not in the checkpoint.

    Writing and the commit go on in the background; the handle tells when they are done. An error that nobody asks the
    handle for is raised by the next save of the Context, and printed when the program ends.

    Takes and raises what `save` does, as far as it is known before the writing begins.
    """
    request = SaveRequest(
        location=location, values=OneTree(state), layout=layout, overwrite=overwrite, custom=metadata, exports=exports
    )
    return begin_save(request, context or default_context())


def save_partial(
    location: LocationLike,
    state: object,
    *,
    layout: str | Layout = "safetensors",
    context: Context | None = None,
) -> None:
    """Save a part of a tree: a session of a checkpoint that several fill, one after the other, until `finalize` commits it.

    Returns once the session is durable and counts. Until `finalize` there is no checkpoint: a load says which sessions there are.
    Each session may be of another process, or of a whole job in which every process calls this. Mappings are united by key; every other
    container, and every value that is in several sessions, must be the same in all of them. Of an array that tells its boxes
    (`ShardedArray`, arrays of a job) sessions may have different ones.

    A session that fails or dies does not count, and those before it do. Nothing replaces a partial save: not `save`, not the collection
    of a `Checkpointer`; `delete` removes it.

    Args:
        location: a path or URL, the same in every session; nothing may be there when the first one begins.
        state: what this session has.
        layout: as for `save`, the same with the same options in every session.
        context: options.

    Raises:
        TreeMismatchError: for an array that an earlier session has, and for what does not fit the trees of those. Nothing was written.
        CheckpointExistsError: if something is there that is no partial save.
        SaveLostError: if another session is under way there, or took over from this one.
        CheckpointError: if the layout is another one than before, or cannot be written in sessions.
        What `save` does.
    """
    perform_save(_session(location, state, layout), context or default_context())


def save_partial_async(
    location: LocationLike,
    state: object,
    *,
    layout: str | Layout = "safetensors",
    context: Context | None = None,
) -> SaveHandle:
    """Begin a session of a partial save and return once it owns its memory, as `save_async` does. Takes and raises what `save_partial` does."""
    return begin_save(_session(location, state, layout), context or default_context())


def _session(location: LocationLike, state: object, layout: str | Layout) -> SaveRequest:
    return SaveRequest(
        location=location, values=OneTree(state), layout=layout, overwrite=False, custom=None, partial=True
    )


def save_update(
    location: LocationLike,
    state: object,
    *,
    base: LocationLike,
    layout: str | Layout = "safetensors",
    overwrite: Overwrite = False,
    metadata: Mapping[str, JSON] | None = None,
    context: Context | None = None,
) -> None:
    """Save a checkpoint of which only what is given is written, and all other arrays are those of a base. Returns once it is committed.

    It is loaded, sliced, transformed, verified and converted as any other, as long as its base is there as it was; `copy` makes one that
    needs none. Software that reads the layout sees only what was written. References are one deep: what the base refers to is referred to where it is.

    Args:
        location: a path or URL; a directory is made there.
        state: what is new. Keys of mappings that are left out, and what a `PLACEHOLDER` stands for, are those of the base; other keys are
            added. A container that is no mapping is given whole, or with placeholders.
        base: the checkpoint that has the rest, of one tree, in the same directory; elsewhere in the same storage with
            ``Context(bases="anywhere")``.
        layout, overwrite, metadata, context: as for `save`. The layout may be another one than that of the base.

    Raises:
        TreeMismatchError: if the state does not go over the base. Nothing was written.
        InvalidLocationError: if the base is where none may be.
        SaveLostError: if the base was deleted or replaced meanwhile.
        What `save` does, and for the base what `load` does.
    """
    perform_save(_update(location, state, base, layout, overwrite, metadata), context or default_context())


def save_update_async(
    location: LocationLike,
    state: object,
    *,
    base: LocationLike,
    layout: str | Layout = "safetensors",
    overwrite: Overwrite = False,
    metadata: Mapping[str, JSON] | None = None,
    context: Context | None = None,
) -> SaveHandle:
    """Begin to save an update and return once it owns its memory, as `save_async` does. Takes and raises what `save_update` does."""
    return begin_save(_update(location, state, base, layout, overwrite, metadata), context or default_context())


def _update(
    location: LocationLike,
    state: object,
    base: LocationLike,
    layout: str | Layout,
    overwrite: Overwrite,
    metadata: Mapping[str, JSON] | None,
) -> SaveRequest:
    return SaveRequest(
        location=location, values=OneTree(state), layout=layout, overwrite=overwrite, custom=metadata, base=base
    )


def finalize(
    location: LocationLike,
    *,
    layout: str | Layout | None = None,
    metadata: Mapping[str, JSON] | None = None,
    context: Context | None = None,
) -> None:
    """Commit what sessions of `save_partial` wrote as one checkpoint, as if one save had written it. Moves no element of an array.

    In a job every process calls this. One that died is called again. Sessions stay as they are where it fails, and further ones may come.

    Args:
        location: as for `save_partial`.
        layout: the one that the sessions have, with its options; None: with its defaults.
        metadata: JSON of the user's, kept with the checkpoint.
        context: options.

    Raises:
        CheckpointNotFoundError: if there is no partial save, or no session of it is complete.
        TreeMismatchError: if arrays are not whole: names them.
        CheckpointError: if the layout has other options than the sessions.
        SaveLostError: if a session is under way there, or began meanwhile.
        CorruptCheckpointError: if what says what sessions wrote is damaged.
    """
    from ckptcore.finalizing import finalize_sessions  # only who saves in sessions needs it

    finalize_sessions(location, layout, metadata, context or default_context())


def plan(
    state: object,
    *,
    location: LocationLike | None = None,
    layout: str | Layout = "safetensors",
    overwrite: Overwrite = False,
    exports: Sequence[Export] = (),
    context: Context | None = None,
) -> SavePlan:
    """Say what `save` and `save_async` would write, ask of the storage and hold in memory; a dry run. Touches no elements.

    In a job every process calls this, as it would save, and each gets the plan of all.

    Args:
        state: as for `save`; its arrays may be abstract (`jax.ShapeDtypeStruct`, tensors on the meta device, `AbstractArray`,
            `ShardedArray` without elements) or deleted.
        location: where the save would go. It is looked at, and refused as the save would be; nothing is written. None: nothing is
            looked at, and requests are counted for a storage of objects.
        layout, overwrite, exports, context: as for `save`. Exports are looked at only with a location.

    Raises:
        CheckpointExistsError, UnsupportedLeafError, UnsupportedKeyError, NameCollisionError: what the save would raise.
        CorruptCheckpointError: if what the processes hold does not make up the arrays.
        PluginError: if a layout cannot tell what it writes.
    """
    from ckptcore.rehearsals.jobs import Asked, plan_running_job  # who only saves or loads need not wait for it

    asked = Asked(location=location, layout=layout, overwrite=overwrite, exports=exports)
    return plan_running_job(asked, state, context or default_context())


def plan_job(
    state_of: Callable[[int], object],
    processes: int,
    *,
    location: LocationLike | None = None,
    layout: str | Layout = "safetensors",
    overwrite: Overwrite = False,
    exports: Sequence[Export] = (),
    context: Context | None = None,
) -> SavePlan:
    """Say what `plan` would in a job that does not run: one process plays all others.

    Args:
        state_of: the state of each process, by rank; called several times for each. One state for all will do where its leaves tell
            who holds what: host arrays, DTensors, arrays of JAX over devices of all processes. Of a `ShardedArray` every process
            gives its own.
        processes: how many there are.
        location, layout, overwrite, exports, context: as for `plan`; the coordinator is not asked.

    Raises:
        What `plan` does.
        ValueError: for less than one process.
    """
    if processes < 1:
        raise ValueError(f"plan_job(processes={processes}): give at least 1")
    from ckptcore.rehearsals.jobs import Asked, plan_imagined_job  # who only saves or loads need not wait for it

    asked = Asked(location=location, layout=layout, overwrite=overwrite, exports=exports)
    return plan_imagined_job(asked, state_of, processes, context or default_context())


def save_checkpointables(
    location: LocationLike,
    checkpointables: Mapping[str, object],
    *,
    layout: str | Layout = "safetensors",
    overwrite: Overwrite = False,
    metadata: Mapping[str, JSON] | None = None,
    exports: Sequence[Export] = (),
    context: Context | None = None,
) -> None:
    """Save several objects into one checkpoint, each under its name and in its own way; return once it is committed.

    Args:
        location: a path or URL; a directory is made there, with one for each name in it.
        checkpointables: by name: trees, objects that have a state (modules, optimizers, iterators), objects that write
            files of their own. What is a tree is by itself a checkpoint at ``location/name``.
        layout: how arrays are laid out.
        overwrite, metadata, exports, context: as for `save`.

    Raises:
        InvalidLocationError: if something cannot be a name.
        What `save` does, and what the objects themselves raise; nothing was committed.
    """
    request = SaveRequest(
        location=location, values=checkpointables, layout=layout, overwrite=overwrite, custom=metadata, exports=exports
    )
    perform_save(request, context or default_context())


def save_checkpointables_async(
    location: LocationLike,
    checkpointables: Mapping[str, object],
    *,
    layout: str | Layout = "safetensors",
    overwrite: Overwrite = False,
    metadata: Mapping[str, JSON] | None = None,
    exports: Sequence[Export] = (),
    context: Context | None = None,
) -> SaveHandle:
    """Begin to save several objects and return once the save owns all it needs: they may change or advance afterwards.

    Takes and raises what `save_checkpointables` does, as far as it is known before the writing begins.
    """
    request = SaveRequest(
        location=location, values=checkpointables, layout=layout, overwrite=overwrite, custom=metadata, exports=exports
    )
    return begin_save(request, context or default_context())


def load_checkpointables(
    location: LocationLike, wanted: Wanted = None, *, context: Context | None = None
) -> dict[str, Any]:
    """Load objects by name from a checkpoint that `save_checkpointables` made.

    Args:
        location: a path or URL.
        wanted: None for all there are, names, or names with what each is to be loaded as: an object that has a state of its own
            (a module, an optimizer, an iterator) is restored in place, and so is a tree that has such objects in it; any other
            tree is built anew as `load` does, None gives
            what was saved in Python's and NumPy's own types (files as bytes by their paths), `PLACEHOLDER` leaves it out. `LoadAs`
            around any of them gives it a selection, transforms, and differences that are allowed.
        context: options.

    Returns:
        By name what was loaded; an object that was restored is that object.

    Raises:
        CheckpointNotFoundError: if a name was not saved, or was deleted since. Nothing was changed.
        CompositeCheckpointError: if the checkpoint is one tree.
        TransformError, TreeMismatchError, CorruptCheckpointError: as for `load`.
        TargetUndefinedError: if it failed after an object was changed.
    """
    context = context or default_context()
    with recorded_load(location, context) as recording:
        return load_composite(location, wanted, context, recording)


def load(
    location: LocationLike,
    abstract: Any = None,
    *,
    context: Context | None = None,
    select: Selection | None = None,
    transforms: Transforms = (),
    matching: Matching = EXACT,
    report: LoadReport | None = None,
) -> Any:
    """Load a checkpoint.

    Args:
        location: a path or URL: a checkpoint of ours, or of any format an installed layout reads, also one file.
        abstract: a tree like the one wanted: each leaf tells shape, dtype, framework and placement (an array itself will do,
            a `jax.ShapeDtypeStruct`, a tensor on the meta device, an `AbstractArray`). `PLACEHOLDER` stands for parts not
            to be loaded. None: NumPy leaves in the structure that was saved.
        context: options.
        select: which stored leaves are loaded, by `ckptcore.select`; nothing of the others is read. Without an abstract tree dicts
            lose the others, and in lists and tuples `PLACEHOLDER` stands for them; with one, it comes where they are asked for.
        transforms: what is changed of the stored tree before it is matched, in this order: see `ckptcore.transforms`. Where there
            is no abstract tree, what they make is loaded.
        matching: which differences between the abstract tree and the stored one are allowed; by itself none is.
        report: is told what was done with each leaf, and how much was read, once the load is done.

    Raises:
        CheckpointNotFoundError, UncommittedCheckpointError: if there is nothing to load.
        TransformError: if a transform does not fit what is stored, or matches nothing of it.
        TreeMismatchError: if the abstract tree and the stored one differ in what is not allowed; lists every difference. Also if
            nothing is selected.
        CorruptCheckpointError: if bytes are not what was written; names file, array and range.
    """
    context = context or default_context()
    with recorded_load(location, context) as recording:
        return load_value(
            location,
            abstract,
            context,
            recording,
            LoadRequest(select=select, transforms=transforms, matching=matching, report=report),
        )


def load_async(
    location: LocationLike,
    abstract: Any = None,
    *,
    context: Context | None = None,
    select: Selection | None = None,
    transforms: Transforms = (),
    matching: Matching = EXACT,
    report: LoadReport | None = None,
) -> LoadHandle[Any]:
    """Begin to load a checkpoint in the background; takes what `load` does, and the handle's result raises what it does.

    A report is told by the time the handle has the result.
    """
    context = context or default_context()
    return context.saves.load(
        functools.partial(
            load,
            location,
            abstract,
            context=context,
            select=select,
            transforms=transforms,
            matching=matching,
            report=report,
        )
    )


def load_into(
    location: LocationLike,
    target: Any,
    *,
    context: Context | None = None,
    select: Selection | None = None,
    transforms: Transforms = (),
    matching: Matching = EXACT,
    report: LoadReport | None = None,
) -> Any:
    """Load a checkpoint into what is there: arrays and tensors are filled in place; returns the target.

    Leaves that cannot be changed (numbers, jax.Arrays) are replaced in their dict, list or object.

    Args:
        location: as for `load`.
        target: what is changed. Where a `PLACEHOLDER` stands in it, nothing is loaded.
        context: options.
        select: as for `load`; the target keeps what it has in the place of the others.
        transforms: as for `load`.
        matching: as for `load`; with ``missing="keep"`` the target keeps what is not stored.
        report: as for `load`.

    Raises:
        TransformError, TreeMismatchError, CheckpointNotFoundError: before anything is changed.
        ValueError: if placeholders are to come where something is missing: a target takes none.
        TargetUndefinedError: if it fails half-way; the target then holds a mix.
    """
    context = context or default_context()
    with recorded_load(location, context) as recording:
        load_into_target(
            location,
            target,
            context,
            recording,
            LoadRequest(select=select, transforms=transforms, matching=matching, report=report),
        )
    return target


def open(location: LocationLike, *, context: Context | None = None) -> OpenCheckpoint:
    """Open a checkpoint to look at it, and to read parts of its arrays as they are indexed. Reads no array.

    What is given is a mapping of the tree: ``opened["params/w"][0:16]`` reads just those rows. It is to be closed, best by ``with``.

    Args:
        location: as for `load`.
        context: options; checksums are compared as loads do.

    Raises:
        CheckpointNotFoundError, UncommittedCheckpointError, CorruptCheckpointError
        CompositeCheckpointError: if it holds several checkpointables: open one by its own location.
    """
    from ckptcore.open_checkpoints import OpenCheckpoint  # who only saves or loads need not wait for it

    return OpenCheckpoint(location, context or default_context())


def load_slice(location: LocationLike, path: StoredPath, box: Box, *, context: Context | None = None) -> HostArray:
    """Load a box of one array; reads nothing of the others.

    Args:
        location: as for `load`.
        path: of the array, as for ``open(location)[path]``.
        box: which elements.
        context: options.

    Raises:
        UnknownPathError: if nothing is at the path.
        TreeMismatchError: if it is no array, or the box does not lie in it.
        CheckpointNotFoundError, UncommittedCheckpointError, CorruptCheckpointError
    """
    from ckptcore.open_checkpoints import load_box  # who only saves or loads need not wait for it

    return load_box(location, path, box, context or default_context())


def load_parts(
    location: LocationLike,
    *,
    context: Context | None = None,
    select: Selection | None = None,
    transforms: Transforms = (),
    first: Selection | Sequence[Selection] = (),
    report: LoadReport | None = None,
) -> Iterator[LoadedPart]:
    """Load the arrays of a checkpoint in boxes, one after the other, on a machine that need not have memory for all of them.

    Reads ahead of who takes the parts: together with those that were not taken yet, about ``MemoryOptions.load_bytes`` are in memory, or
    128 MiB. What can only be read whole (a compressed chunk, what other software stored with one checksum) may exceed that, alone. Boxes
    come in the order in which they are stored, and no byte is read twice for them. Small values are in ``metadata(location).abstract``.

    Args:
        location: as for `load`.
        context: options.
        select: as for `load`.
        transforms: as for `load`; boxes are those of what they make.
        first: what comes before all else; of several selections one after the other.
        report: is told what was read when the last part was taken, or the iterator is closed; values count as skipped.

    Raises:
        What `load` does, as long as nothing is read; while parts are taken, and then the ones before are what was stored:
        CorruptCheckpointError: if bytes are not what was written.
        CheckpointNotFoundError: if the checkpoint was replaced or deleted meanwhile. Of a checkpoint without checksums also parts
            that were given before may then be of another save.
    """
    from ckptcore.loaded_parts import load_in_parts  # who only saves or loads need not wait for it

    request = LoadRequest(select=select, transforms=transforms, report=report)
    return load_in_parts(location, context or default_context(), request, first)


def abstract(state: Any, *, context: Context | None = None) -> Any:
    """The abstract tree of a value: given to `load`, it asks for a value like this one. Touches no elements and allocates none.

    Containers are of the same types, and have for every leaf what says its type, shape, dtype and placement: `AbstractArray` for NumPy
    arrays, a `ShardedArray` without elements for one with, `jax.ShapeDtypeStruct` with its sharding for arrays of JAX, tensors on the
    meta device and FakeTensors for those of PyTorch. Numbers, text and None stay: they are what is asked for by their kind. What is
    tied stays tied. What is abstract already stays as it is, and so does `PLACEHOLDER`.

    An object that has a state of its own (a module, an optimizer) stands as its state, under the names that it is saved by: what is
    loaded is such a state. It is the state that it has now: an optimizer that made no step has none. Where it can have more, give
    `load` the object itself. An object that writes files of its own has no abstract: give `load_checkpointables` that object.

    Args:
        state: a tree of containers and leaves that the installed plugins handle. Arrays in it may be deleted, donated, or still be
            computed.
        context: options.

    Raises:
        UnsupportedLeafError: lists, by path, every leaf that cannot be saved or loaded, and those that nothing abstract stands for.
        UnsupportedKeyError: if a key is neither an int nor a str.
    """
    from ckptcore.abstract_values import abstract_value  # who only saves or loads need not wait for it

    return abstract_value(state, (context or default_context()).registry)


def metadata(
    location: LocationLike, *, context: Context | None = None, transforms: Transforms = ()
) -> CheckpointMetadata:
    """What a checkpoint says of itself; reads no array.

    Args:
        location: a path or URL.
        context: options.
        transforms: as for `load`: the tree that is told is the one that they make.

    Raises:
        TransformError: as for `load`.
        CheckpointNotFoundError, UncommittedCheckpointError, CorruptCheckpointError
        CompositeCheckpointError: if it holds several checkpointables: use `checkpointables_metadata`.
    """
    return describe_checkpoint(location, context or default_context(), transforms)


def checkpointables_metadata(location: LocationLike, *, context: Context | None = None) -> CheckpointablesMetadata:
    """What a checkpoint of several checkpointables says of itself; reads no array.

    Raises:
        CompositeCheckpointError: if it is one tree: use `metadata`.
        CheckpointNotFoundError, UncommittedCheckpointError, CorruptCheckpointError
    """
    return describe_checkpointables(location, context or default_context())


def delete(location: LocationLike, *, context: Context | None = None) -> None:
    """Delete a checkpoint of ours, also an unfinished or a damaged one; it is never there in part.

    Every file in its directory goes with it.

    Raises:
        CheckpointNotFoundError: if there is nothing.
        CheckpointExistsError: if what is there is no checkpoint of ckptcore; it is left alone.
        CheckpointReferredError: if checkpoints beside it have arrays in it; names them. Those elsewhere cannot be known.
    """
    from ckptcore.deletion import delete_checkpoint  # who only saves or loads need not wait for it

    delete_checkpoint(location, context or default_context())


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
    from ckptcore.verification import verify_checkpoint  # who only saves or loads need not wait for it

    return verify_checkpoint(location, context or default_context(), progress)


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
    from ckptcore.conversion import convert_checkpoint  # who only saves or loads need not wait for it

    convert_checkpoint(source, destination, layout, overwrite, progress, context or default_context(), transforms)


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
    from ckptcore.whole_copies import copy_whole  # who only saves or loads need not wait for it

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
    from ckptcore.step_copies import copy_run  # who only saves or loads need not wait for it

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


def consolidate(
    source: LocationLike,
    destination: LocationLike,
    *,
    subtree: SubtreePath = (),
    max_file_bytes: int = 5_000_000_000,
    stem: str = "model",
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
    from ckptcore.consolidation import consolidate_checkpoint  # who only saves or loads need not wait for it

    if max_file_bytes < 1:
        raise ValueError(f"consolidate(max_file_bytes={max_file_bytes}): give a number of bytes above 0")
    layout = SafetensorsLayout(max_file_bytes, stem)
    consolidate_checkpoint(
        source, destination, subtree, layout, files, overwrite, progress, context or default_context()
    )
