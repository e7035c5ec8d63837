"""Loads: of one tree, anew or in place, and of several objects."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ckptcore.commit.location import LocationLike
from ckptcore.context import Context, default_context
from ckptcore.io.background import LoadHandle
from ckptcore.loading.load import recorded_load
from ckptcore.loading.load_requests import EXACT, LoadReport, LoadRequest, Matching
from ckptcore.loading.targets import load_into_target, load_value
from ckptcore.other_libraries import explains_arguments
from ckptcore.protocols import ReadStrategy, Transforms
from ckptcore.runtime import runtime_of

if TYPE_CHECKING:
    from ckptcore.loading.composites import Abstracts
    from ckptcore.select import Selection

__all__ = ["load", "load_async", "load_checkpointables", "load_into"]


@explains_arguments
def load(
    location: LocationLike,
    abstract: Any = None,
    *,
    context: Context | None = None,
    select: Selection | None = None,
    transforms: Transforms = (),
    matching: Matching = EXACT,
    report: LoadReport | None = None,
    strategy: ReadStrategy | None = None,
) -> Any:
    """Load a checkpoint.

    Args:
        location: a path or URL: a checkpoint of ours, or of any format that an installed layout reads, also one file.
        abstract: a tree like the result: each leaf gives shape, dtype, framework and placement (an array itself, a
            `jax.ShapeDtypeStruct`, a tensor on the meta device, an `AbstractArray`). `PLACEHOLDER` skips a part.
            None: NumPy leaves in the structure that was saved.
        context: options.
        select: the stored leaves to load, by `ckptcore.select`; nothing of the others is read. Without an abstract
            tree, dicts lose the others, and lists and tuples get `PLACEHOLDER`; with one, `PLACEHOLDER` replaces them.
        transforms: changes of the stored tree, applied in this order before it is matched: see
            `ckptcore.transforms`. Without an abstract tree, the tree that they make is loaded.
        matching: allowed differences between the abstract tree and the stored one; by default none.
        report: filled when the load has succeeded, with the treatment of each leaf and the bytes read.
        strategy: how the load reads, such as through a cache: see `ckptcore.protocols.ReadStrategy`. None: as
            ``JobOptions(reads=...)`` says.

    Raises:
        CheckpointNotFoundError, UncommittedCheckpointError: if there is nothing to load.
        TransformError: if a transform does not fit the stored tree, or matches nothing of it.
        TreeMismatchError: if the abstract tree and the stored one differ in other ways than allowed; lists every
            difference. Also if nothing is selected.
        CorruptCheckpointError: if bytes differ from those written; names file, array and range.
    """
    context = context or default_context()
    with recorded_load(location, context) as recording:
        return load_value(
            location,
            abstract,
            context,
            recording,
            LoadRequest(select=select, transforms=transforms, matching=matching, report=report, strategy=strategy),
        )


@explains_arguments
def load_async(
    location: LocationLike,
    abstract: Any = None,
    *,
    context: Context | None = None,
    select: Selection | None = None,
    transforms: Transforms = (),
    matching: Matching = EXACT,
    report: LoadReport | None = None,
    strategy: ReadStrategy | None = None,
) -> LoadHandle[Any]:
    """Load a checkpoint in the background. See `load`; the result of the handle raises what `load` does.

    A report is filled by the time the handle has the result.
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
            strategy=strategy,
        )
    )


@explains_arguments
def load_into(
    location: LocationLike,
    target: Any,
    *,
    context: Context | None = None,
    select: Selection | None = None,
    transforms: Transforms = (),
    matching: Matching = EXACT,
    report: LoadReport | None = None,
    strategy: ReadStrategy | None = None,
) -> Any:
    """Load a checkpoint into an existing value: arrays and tensors are filled in place. Returns the target.

    Leaves that cannot be changed (numbers, jax.Arrays) are replaced in their dict, list or object. So are containers
    that cannot be changed: tuples, frozen dataclasses. A target whose arrays overlap in memory is refused.

    Args:
        location: as for `load`.
        target: the value to change. Parts that are `PLACEHOLDER` are not loaded.
        context: options.
        select: as for `load`; the target keeps its other leaves.
        transforms, report, strategy: as for `load`.
        matching: as for `load`; with ``missing="keep"`` the target keeps leaves that are not stored.

    Raises:
        TransformError, TreeMismatchError, CheckpointNotFoundError: before anything is changed.
        ValueError: if placeholders are to replace missing leaves: a target takes none.
        TargetUndefinedError: if it fails half-way; the target then holds a mix.
    """
    context = context or default_context()
    with recorded_load(location, context) as recording:
        return load_into_target(
            location,
            target,
            context,
            recording,
            LoadRequest(select=select, transforms=transforms, matching=matching, report=report, strategy=strategy),
        )


@explains_arguments
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
            tree builds the object in types of Python and NumPy (files as bytes by their paths), and `PLACEHOLDER`
            leaves it out. Without `abstract` and `into`, every object is loaded.
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
    from ckptcore.loading.composites import CompositeLoad, Wanted  # loads of one tree do not need it

    wanted = Wanted(abstract, into)
    context = context or default_context()
    with recorded_load(location, context) as recording:
        return CompositeLoad(location, wanted, context, recording).run()
