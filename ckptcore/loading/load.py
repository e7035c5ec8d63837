"""Loading: match, plan, read, build."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from ckptcore.builtin.files import FilesLayout
from ckptcore.builtin.host_leaves import abstract_of_stored
from ckptcore.commit.location import Place
from ckptcore.context import Context
from ckptcore.errors import PluginError, TargetUndefinedError, TreeMismatchError
from ckptcore.events import Recording
from ckptcore.loading.checkpoint import Checkpoint, Source, file_pieces
from ckptcore.loading.consistent_read import while_tree_unchanged
from ckptcore.loading.load_requests import AS_IT_IS, LoadRequest
from ckptcore.loading.matching import Matched, match_leaves
from ckptcore.loading.reading import Planned, Reading, perform, plan_reading
from ckptcore.model.arrays import AbstractArray
from ckptcore.model.metadata import ArrayRecord, TreeMetadata
from ckptcore.model.tree import MAX_DEPTH, Attribute, Skeleton, TreePath, format_path
from ckptcore.plugins import Plugins
from ckptcore.protocols import LeafHandler, MutableContainerHandler, Transforms
from ckptcore.runtime import runtime_of
from ckptcore.tree.flattening import Flat, first_stuck, flatten, rebuild, restore, unflatten

if TYPE_CHECKING:
    from ckptcore.loading.load_accounts import LoadAccount
    from ckptcore.select import Selection

__all__ = [
    "abstract_leaves",
    "abstract_tree",
    "account_of",
    "check_target",
    "chosen_of",
    "holds_objects",
    "is_files",
    "load_into_target",
    "load_nothing",
    "load_value",
    "recorded_load",
    "refuse_files",
    "transformed",
]

T = TypeVar("T")


@contextmanager
def recorded_load(location: Place, context: Context, *, step: int | None = None) -> Iterator[Recording]:
    """Record a load, from here to the end of the block."""
    recording = Recording("load", str(location), context.observers, step=step, rank=runtime_of(context).job().rank)
    try:
        yield recording
    except BaseException as error:
        recording.finish(error=error)
        raise
    recording.finish()


def load_value(
    location: Source, abstract: object, context: Context, recording: Recording, request: LoadRequest = AS_IT_IS
) -> object:
    """The value of the checkpoint, as `abstract` asks; NumPy leaves in the structure that was saved if it is None."""
    account = account_of(request)

    def plan(opened: Checkpoint) -> Planned[object]:
        if is_files(opened):
            if abstract is not None or request.transforms or request.select is not None:
                raise _files_instead(opened)
            if account is not None:
                account.planned(opened, Matched((), ()), opened.tree.skeleton)
            with recording.phase("read"):
                files = {key: b"".join(file_pieces(opened, record)) for key, record in opened.objects.items()}
            return Planned(Reading(opened, (), []), lambda leaves: files)
        if request.transforms:
            with recording.phase("open"):
                opened = transformed(opened, request.transforms, context)
        tree = opened.tree
        if abstract is None:
            array, value = abstract_leaves(runtime_of(context).registry)
            handlers = [array if isinstance(record, ArrayRecord) else value for record in tree.leaves]
            numbers: list[int | None] = list(range(len(tree.leaves)))
            matched, skeleton = Matched(numbers, handlers), tree.skeleton
            if request.select is not None:
                matched, skeleton = _chosen_alone(opened, request.select, handlers, context)
            reading = plan_reading(
                opened, matched.numbers, matched.handlers, [None] * len(matched.numbers), runtime_of(context).workers()
            )
            if account is not None:
                account.planned(opened, matched, skeleton)
            return Planned(reading, _checking(opened, functools.partial(rebuild, skeleton)))
        with recording.phase("open"):
            flat = flatten(
                abstract,
                runtime_of(context).registry,
                placeholders=True,
                stored_at=_stored_at(opened, runtime_of(context).registry),
            )
            matched = _match(opened, flat, context, request)
        made = _adjusted(opened, matched, context)
        reading = plan_reading(made, matched.numbers, matched.handlers, flat.leaves, runtime_of(context).workers())
        if account is not None:
            account.planned(opened, matched, flat.skeleton)
        return Planned(reading, _checking(opened, functools.partial(unflatten, flat.shape)))

    value = _load(location, context, recording, plan)
    if account is not None:
        account.done()
    return value


def transformed(opened: Checkpoint, transforms: Transforms, context: Context) -> Checkpoint:
    """A checkpoint as transforms make it; itself where there are none. Reads no array.

    Raises:
        TransformError: if they do not fit what is stored.
    """
    if not transforms:
        return opened
    from ckptcore.loading.transformed import apply_transforms  # only who transforms waits for it

    return apply_transforms(opened, transforms, context)


def _checking(opened: Checkpoint, finish: Callable[[list[object]], T]) -> Callable[[list[object]], T]:
    """What finishes a load, after a look whether every checkpoint that was read is still the one that was opened."""
    if opened.derived is None:
        return finish

    def check_and_finish(leaves: list[object]) -> T:
        from ckptcore.loading.derived import check_beside  # is there by now

        check_beside(opened)
        return finish(leaves)

    return check_and_finish


def account_of(request: LoadRequest) -> LoadAccount | None:
    """What keeps the account of a load; None where nobody asks for it."""
    if request.report is None:
        return None
    from ckptcore.loading.load_accounts import LoadAccount  # only who asks for a report waits for it

    return LoadAccount(request.report)


def load_nothing(location: Source, context: Context, recording: Recording) -> None:
    """Be there while the other processes of a job load together something that this one wants nothing of."""
    _load(location, context, recording, lambda opened: Planned(Reading(opened, (), []), lambda leaves: None))


def _load(location: Source, context: Context, recording: Recording, plan: Callable[[Checkpoint], Planned[T]]) -> T:
    """Open a checkpoint and load what is planned of it: here, or together with the other processes of the job."""
    job = runtime_of(context).job() if context.job.reads != "alone" else None
    if job is not None and job.size > 1:
        from ckptcore.loading.joint_loading import JointAttempt, load_jointly  # only jobs need it

        attempt_type = JointAttempt
        if context.job.reads != "all":
            from ckptcore.loading.shared_loading import SharedAttempt  # costs as much to import as a tenth of the rest

            attempt_type = SharedAttempt
        return load_jointly(location, context, recording, job, plan, attempt_type)

    def attempt(opened: Checkpoint) -> T:
        planned = plan(opened)
        planned.begin()
        with recording.phase("read", planned.reading.nbytes):
            perform(planned.reading, context)
        return planned.finish(planned.reading.leaves)

    return while_tree_unchanged(location, context, attempt)


def is_files(opened: Checkpoint) -> bool:
    """Whether a checkpoint holds files that an object wrote, and no tree."""
    return opened.layout.name == FilesLayout.name


def refuse_files(opened: Checkpoint) -> None:
    """Refuse a checkpoint that holds no tree.

    Raises:
        TreeMismatchError: if it holds files.
    """
    if is_files(opened):
        raise _files_instead(opened)


def _files_instead(opened: Checkpoint) -> TreeMismatchError:
    return TreeMismatchError(
        f"{opened.location.display} holds files that an object wrote, and no tree: load it with load_checkpointables and an object "
        "like the one that was saved, or with load() and nothing else for the files as bytes",
        ["files are stored, a tree is asked for"],
    )


def check_target(opened: Checkpoint, target: object, context: Context, request: LoadRequest) -> None:
    """Refuse a target that what is stored cannot be loaded into. Changes and reads nothing.

    Raises:
        TransformError, TreeMismatchError, ValueError: as `load_into_target` does.
    """
    _refuse_placeholders(request)
    opened = transformed(opened, request.transforms, context)
    flat = flatten(
        target,
        runtime_of(context).registry,
        placeholders=True,
        stored_at=_stored_at(opened, runtime_of(context).registry),
    )
    _match_target(opened, flat, context, request)


def holds_objects(tree: object, registry: Plugins) -> bool:
    """Return whether a tree is, or has in it, an object that is restored in place."""
    return _holds_objects(tree, registry, MAX_DEPTH)


def _holds_objects(node: object, registry: Plugins, depth: int) -> bool:
    found = registry.dispatch(node)
    if found.checkpointable is not None:
        return True
    container = found.container
    if container is None or depth == 0:
        return False  # flattening refuses a tree that is too deep
    if isinstance(container, MutableContainerHandler) and container.is_object(node):
        return True
    return any(_holds_objects(child, registry, depth - 1) for child in container.flatten(node).children)


def _match(opened: Checkpoint, flat: Flat, context: Context, request: LoadRequest) -> Matched:
    """Which stored leaf each leaf of an abstract tree is."""
    job = runtime_of(context).job()
    return match_leaves(
        flat,
        opened.tree,
        opened.location.display,
        by_name=opened.root is None,
        matching=request.matching,
        place=(job.rank, job.size),
        chosen=None if request.select is None else chosen_of(opened, request.select, context),
    )


def chosen_of(opened: Checkpoint, selection: Selection, context: Context) -> frozenset[int]:
    """The numbers of the leaves that are selected. Reads nothing.

    Raises:
        TypeError, TreeMismatchError: see `ckptcore.loading.chosen_trees.chosen_leaves`.
    """
    from ckptcore.loading.chosen_trees import chosen_leaves  # only who selects waits for it

    return chosen_leaves(opened, selection, lambda one: _abstract_leaves_of(one.tree, runtime_of(context).registry))


def _chosen_alone(
    opened: Checkpoint, selection: Selection, handlers: Sequence[LeafHandler], context: Context
) -> tuple[Matched, Skeleton]:
    """What is loaded where no abstract tree is given, and the tree that it makes; `handlers` are those of the stored leaves."""
    from ckptcore.loading.chosen_trees import prune  # only who selects waits for it

    chosen = chosen_of(opened, selection, context)
    skeleton, numbers = prune(opened.tree.skeleton, chosen)
    ignored = [number for number in range(len(handlers)) if number not in chosen]
    return Matched(numbers, [None if number is None else handlers[number] for number in numbers], (), ignored), skeleton


def _adjusted(opened: Checkpoint, matched: Matched, context: Context) -> Checkpoint:
    """The checkpoint with what was matched as it is asked for."""
    if not matched.adjustments:
        return opened
    from ckptcore.loading.adjustments import adjusted  # only where something differs

    return adjusted(opened, matched.adjustments, context)


def _match_target(opened: Checkpoint, flat: Flat, context: Context, request: LoadRequest) -> Matched:
    """Which stored leaf each leaf of a target is.

    Raises:
        TreeMismatchError: also if a leaf can be filled neither in place nor replaced.
    """
    matched = _match(opened, flat, context, request)
    memory = [
        None if number is None or handler is None else handler.memory_to_fill(leaf)
        for number, handler, leaf in zip(matched.numbers, matched.handlers, flat.leaves, strict=True)
    ]
    replaced = [number is not None and found is None for number, found in zip(matched.numbers, memory, strict=True)]
    stuck = first_stuck(flat.shape, replaced)
    if stuck is not None:
        path = format_path(list(flat.paths())[stuck])
        raise TreeMismatchError(
            f"{path} of the target cannot be filled in place, and no container that holds it can be changed; use "
            "load() and keep its result, or hold the leaf in a dict. To restore other objects of the target in place, "
            "save each under its own name with save_checkpointables. Nothing was changed",
            [f"{path}: cannot be filled in place"],
        )
    from ckptcore.loading.load_requests import check_shared_containers, check_shared_memory  # only a target needs it

    check_shared_memory(opened, matched.numbers, memory)
    check_shared_containers(opened, matched.numbers, flat.shape)
    return matched


def _refuse_placeholders(request: LoadRequest) -> None:
    if request.matching.missing == "placeholder":
        raise ValueError(
            'nothing puts placeholders into a target that is filled in place: expected Matching(missing="error") or "keep", '
            'found "placeholder"'
        )


def load_into_target(
    location: Source, target: object, context: Context, recording: Recording, request: LoadRequest = AS_IT_IS
) -> None:
    """Make `target` hold the value of the checkpoint, its arrays filled in place.

    Raises:
        TargetUndefinedError: if it failed after it began to change the target.
        ValueError: if placeholders are to come where nothing is stored: a target keeps what it has.
    """
    _refuse_placeholders(request)
    account = account_of(request)
    began = False

    def begin() -> None:
        nonlocal began
        began = True

    def plan(opened: Checkpoint) -> Planned[None]:
        refuse_files(opened)
        with recording.phase("open"):
            opened = transformed(opened, request.transforms, context)
            flat = flatten(
                target,
                runtime_of(context).registry,
                placeholders=True,
                stored_at=_stored_at(opened, runtime_of(context).registry),
            )
            matched = _match_target(opened, flat, context, request)
        if account is not None:
            account.planned(opened, matched, flat.skeleton)
        filled = [number is None for number in matched.numbers]  # these stay as they are

        def finish(leaves: list[object]) -> None:
            with recording.phase("restore"):
                restore(flat.shape, leaves, filled, list(flat.paths()))

        reading = plan_reading(
            _adjusted(opened, matched, context),
            matched.numbers,
            matched.handlers,
            flat.leaves,
            runtime_of(context).workers(),
            filled=filled,
        )
        return Planned(reading, _checking(opened, finish), begin)

    try:
        _load(location, context, recording, plan)
    except Exception as error:
        if not began:
            raise
        raise TargetUndefinedError(
            f"loading {location} into its target failed half-way, and the target now holds a mix of what it held and what "
            f"was stored; load again before using it: {error}"
        ) from error
    if account is not None:
        account.done()


def abstract_leaves(registry: Plugins) -> tuple[LeafHandler, LeafHandler]:
    """The handlers that build arrays and values where no abstract tree is given."""
    array, value = registry.dispatch(AbstractArray((), "bool")).leaf, registry.dispatch("").leaf
    if array is None or value is None:
        raise PluginError("no plugin builds NumPy arrays and values; the built-in plugin is missing")
    return array, value


def abstract_tree(tree: TreeMetadata, registry: Plugins) -> Any:
    """What is stored, in Python's own containers: `AbstractArray` for arrays, and small values themselves."""
    return rebuild(tree.skeleton, _abstract_leaves_of(tree, registry))


def _abstract_leaves_of(tree: TreeMetadata, registry: Plugins) -> list[object]:
    """The leaves of `abstract_tree`."""
    _, value_handler = abstract_leaves(registry)
    return [
        abstract_of_stored(record) if isinstance(record, ArrayRecord) else value_handler.build(None, record, ())
        for record in tree.leaves
    ]


def _stored_at(opened: Checkpoint, registry: Plugins) -> Callable[[TreePath], object]:
    """Finds what is stored at a path; None where nothing is."""
    whole = functools.cache(lambda: abstract_tree(opened.tree, registry))

    def find(path: TreePath) -> object:
        found = whole()
        for key in path:
            if isinstance(found, list | tuple):
                found = dict(enumerate(found))
            if not isinstance(found, dict):
                return None
            found = found.get(key.name if isinstance(key, Attribute) else key)
        return found

    return find
