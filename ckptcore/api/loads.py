"""Loading a checkpoint, whole or what is asked for of it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ckptcore.commit.location import LocationLike
from ckptcore.context import Context, default_context
from ckptcore.io.background import LoadHandle
from ckptcore.loading.composites import Abstracts, CompositeLoad, Wanted
from ckptcore.loading.load import recorded_load
from ckptcore.loading.load_requests import EXACT, LoadReport, LoadRequest, Matching
from ckptcore.loading.targets import load_into_target, load_value
from ckptcore.protocols import Transforms
from ckptcore.runtime import runtime_of

if TYPE_CHECKING:
    from ckptcore.select import Selection

__all__ = ["load", "load_async", "load_checkpointables", "load_into"]


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
    return runtime_of(context).saves.load(
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

    Leaves that cannot be changed (numbers, jax.Arrays) are replaced in their dict, list or object. So are containers
    that cannot be changed: tuples, frozen dataclasses. A target whose arrays overlap in memory is refused.

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


def load_checkpointables(
    location: LocationLike,
    abstract: Abstracts = None,
    *,
    into: Mapping[str, object] | None = None,
    context: Context | None = None,
) -> dict[str, Any]:
    """Load objects by name from a checkpoint that `save_checkpointables` wrote.

    Args:
        location: a path or URL.
        abstract: objects to build anew, as `load` does: abstract trees by name, or a list of names. None as an abstract
            tree builds the object in types of Python and NumPy (files as bytes by their paths), and `PLACEHOLDER` leaves
            it out. Without `abstract` and `into`, every object is loaded.
        into: objects to restore in place, by name: modules, optimizers, iterators, and trees as for `load_into`.
        context: options.

    `LoadAs` around an abstract tree or an object gives it a selection, transforms, and allowed differences.

    Returns:
        The loaded objects by name; those of `into` are the same objects.

    Raises:
        CheckpointNotFoundError: if a name was not saved, or was deleted since. Nothing was changed.
        CompositeCheckpointError: if the checkpoint is one tree.
        TypeError: if `abstract` has an object with a state, which belongs into `into`.
        TransformError, TreeMismatchError, CorruptCheckpointError: as for `load`.
        TargetUndefinedError: if it failed after an object was changed.
    """
    wanted = Wanted(abstract, into)
    context = context or default_context()
    with recorded_load(location, context) as recording:
        return CompositeLoad(location, wanted, context, recording).run()
