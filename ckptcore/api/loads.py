"""Loads of one tree, as a new value or in place, and of several objects."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ckptcore.commit.location import LocationLike
from ckptcore.context import Context, default_context
from ckptcore.io.background import LoadHandle
from ckptcore.loading.load import Load, LoadRequest, recorded_load
from ckptcore.loading.targets import load_value
from ckptcore.matching.options import EXACT, LoadReport, Matching
from ckptcore.other_libraries import explains_arguments
from ckptcore.progress import ProgressCallback
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
    framework: str | None = None,
    context: Context | None = None,
    select: Selection | None = None,
    transforms: Transforms = (),
    matching: Matching = EXACT,
    report: LoadReport | None = None,
    strategy: ReadStrategy[Load[Any]] | None = None,
    progress: bool | ProgressCallback = False,
) -> Any:
    """Load a checkpoint.

    Args:
        location: a path or URL of a checkpoint of ckptcore, or of any other format that an installed layout reads. It
            can be a single file.
        abstract: a tree with the structure of the result. Each leaf states shape, dtype, framework and placement: an
            array, a `jax.ShapeDtypeStruct`, a tensor on the meta device, or an `AbstractArray`. `PLACEHOLDER` skips a
            leaf or subtree. None: load arrays in the saved structure.
        framework: without an abstract tree, the framework of the arrays: ``"numpy"`` (the default), ``"torch"`` for
            tensors on the CPU, ``"jax"`` for arrays with their saved sharding if the devices allow it, or else on the
            default device. Numbers and text remain values of Python. Arrays that the framework does not support are
            loaded as NumPy arrays: arrays of text, and of 64-bit numbers in JAX while jax_enable_x64 is off.
        context: options.
        select: the stored leaves to load, by `ckptcore.select`. Other leaves are not read. With an abstract tree,
            `PLACEHOLDER` replaces the other leaves. Without an abstract tree, they are removed from dicts, and replaced
            by `PLACEHOLDER` in lists and tuples.
        transforms: changes of the stored tree, applied in this order before it is matched: see
            `ckptcore.transforms`. Without an abstract tree, the transformed tree is loaded.
        matching: allowed differences between the abstract tree and the stored tree. By default, only plain values may
            differ: see `Matching`.
        report: filled when the load has succeeded: how each leaf was handled, and the number of bytes read.
        strategy: changes how the load reads, for instance through a cache: see `ckptcore.protocols.ReadStrategy`. None:
            selected by ``JobOptions(reads=...)``.
        progress: True to show a bar on stderr with rich or tqdm, on rank 0. Or a function that is called with the bytes
            of arrays that this process has loaded so far, and with the total. It is called from any thread; calls do
            not overlap. The last call has two equal numbers. It may raise an exception to stop the load. If the
            checkpoint is replaced during the load, the total grows by the bytes that are read again. Files of objects
            are not counted.

    Raises:
        CheckpointNotFoundError, UncommittedCheckpointError: there is no checkpoint to load.
        UnknownPluginError: no installed plugin has the framework.
        TransformError: a transform does not fit the stored tree, or matches no leaf.
        TreeMismatchError: the abstract tree and the stored tree have differences that are not allowed; lists all
            differences. Also raised if nothing is selected.
        CorruptCheckpointError: bytes differ from those written; names file, array and range.
    """
    context = context or default_context()
    with (
        runtime_of(context).show_progress(progress, "loading") as report_progress,
        recorded_load(location, context, report=report_progress) as recording,
    ):
        return load_value(
            location,
            abstract,
            context,
            recording,
            LoadRequest(
                select=select,
                transforms=transforms,
                matching=matching,
                report=report,
                strategy=strategy,
                framework=framework,
            ),
        )


@explains_arguments
def load_async(
    location: LocationLike,
    abstract: Any = None,
    *,
    framework: str | None = None,
    context: Context | None = None,
    select: Selection | None = None,
    transforms: Transforms = (),
    matching: Matching = EXACT,
    report: LoadReport | None = None,
    strategy: ReadStrategy[Load[Any]] | None = None,
) -> LoadHandle[Any]:
    """Load a checkpoint in the background. See `load`; the handle raises the errors of `load`.

    The report, if any, is filled before the result of the handle is available. The load uses the settings of the
    calling thread that affect loaded leaves, such as the default device of JAX.
    """
    settings = runtime_of(context or default_context()).registry.thread_settings()
    # Import on this thread what only some loads need: a process that is forked while another thread imports a module
    # inherits the unfinished import, and hangs if it imports the module too.
    if abstract is not None:
        importlib.import_module("ckptcore.loading.new_values")
    if select is not None:
        importlib.import_module("ckptcore.loading.selections")

    def run(progress: ProgressCallback) -> Any:
        with settings:
            return load(
                location,
                abstract,
                framework=framework,
                context=context,
                select=select,
                transforms=transforms,
                matching=matching,
                report=report,
                strategy=strategy,
                progress=progress,
            )

    return LoadHandle(run)


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
    strategy: ReadStrategy[Load[Any]] | None = None,
    progress: bool | ProgressCallback = False,
) -> Any:
    """Load a checkpoint into an existing value: arrays and tensors are filled in place. Returns the target.

    Leaves that cannot be changed (numbers, jax.Arrays) are replaced in their dict, list or object. Containers that
    cannot be changed (tuples, frozen dataclasses) are replaced, too. Arrays of the target must not overlap in memory,
    except tied arrays, which must also be tied in the checkpoint.

    Args:
        location: see `load`.
        target: the value to change. `PLACEHOLDER` leaves are not loaded.
        context: options.
        select: see `load`; the target keeps its other leaves, and so do objects in it, such as modules. An object that
            has no value for an unselected leaf, such as a new optimizer, must be selected as a whole.
        transforms, report, strategy, progress: see `load`.
        matching: see `load`; with ``missing="keep"`` the target keeps leaves that are not stored.

    Raises:
        TransformError, TreeMismatchError, CheckpointNotFoundError: before anything is changed.
        ValueError: ``matching`` has ``missing="placeholder"``, which a target does not support.
        TargetUndefinedError: the load failed after it began to change the target, which then has a mix of old and
            loaded data.
    """
    from ckptcore.loading.in_place import load_into_target  # loads of new values do not need it

    context = context or default_context()
    with (
        runtime_of(context).show_progress(progress, "loading") as report_progress,
        recorded_load(location, context, report=report_progress) as recording,
    ):
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
    progress: bool | ProgressCallback = False,
    context: Context | None = None,
) -> dict[str, Any]:
    """Load objects by name from a checkpoint that `save_checkpointables` or other software wrote.

    Args:
        location: a path or URL.
        abstract: objects to load as new values: abstract trees by name (see `load`), or a list of names. None as
            an abstract tree loads Python and NumPy types (files as a dict of bytes by path), and `PLACEHOLDER` skips
            the object. Without `abstract` and `into`, every object is loaded; objects that were deleted since the save
            are skipped with a warning.
        into: objects to restore in place, by name: modules, optimizers, iterators, and trees (see `load_into`).
        progress: see `load`. Until an object is loaded, the total includes all its arrays, even arrays to be skipped.
        context: options.

    Wrap an abstract tree or an object in `LoadAs` to pass a selection, transforms, and allowed differences for it.

    Returns:
        The loaded objects by name. Objects of `into` are returned themselves.

    Raises:
        CheckpointNotFoundError: a name was not saved, or was deleted later. Nothing was changed.
        CompositeCheckpointError: the checkpoint is one tree.
        TypeError: `abstract` has an object with a state, which belongs to `into`.
        TransformError, TreeMismatchError, CorruptCheckpointError: see `load`.
        TargetUndefinedError: the load failed after an object was changed.
    """
    from ckptcore.loading.composites import CompositeLoad, CompositeRequest  # loads of one tree do not need it

    wanted = CompositeRequest(abstract, into)
    context = context or default_context()
    with (
        runtime_of(context).show_progress(progress, "loading") as report_progress,
        recorded_load(location, context, report=report_progress) as recording,
    ):
        return CompositeLoad(location, wanted, context, recording).run()
