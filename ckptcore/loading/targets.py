"""Targets of a load: a new value, a value filled in place, an object restored from files, or nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ckptcore.context import Context
from ckptcore.errors import (
    CheckpointError,
    CorruptCheckpointError,
    StorageError,
    TargetUndefinedError,
    TreeMismatchError,
)
from ckptcore.events import Recording, logger_named
from ckptcore.loading.load import DEFAULT_REQUEST, Load, LoadRequest, LoadTarget
from ckptcore.loading.reading import TreeRead, default_handlers
from ckptcore.loading.stored_trees import (
    chosen_leaves,
    files_instead,
    prune,
    stored_in,
    transformed,
)
from ckptcore.loading.stored_values import with_stored_values
from ckptcore.matching.leaf_matching import Matched, match_leaves
from ckptcore.model.arrays import StridedMemory
from ckptcore.model.metadata import ArrayRecord, LeafRecord, ValueRecord
from ckptcore.model.tree import MAX_DEPTH, Node, Skeleton, TreePath, format_path
from ckptcore.opening.checkpoint import Checkpoint, Source, file_pieces
from ckptcore.other_libraries import REFUSING_NUMPY, hint_of_framework
from ckptcore.plugins import Plugins
from ckptcore.protocols import FilesHandler, LeafHandler
from ckptcore.runtime import Runtime, runtime_of
from ckptcore.tree.columns import requested_columns
from ckptcore.tree.flattening import STATE_OF, Flat, flatten, own_values, per_process_values, rebuild
from ckptcore.tree.restoring import first_fixed, restore, shared_containers
from ckptcore.tree.shapes import Shape, lacks_object_at, objects_that_may_refuse, unflatten

if TYPE_CHECKING:
    from ckptcore.loading.undo import Undo

logger = logger_named("ckptcore.loading")


def load_value(
    source: Source, abstract: object, context: Context, recording: Recording, request: LoadRequest = DEFAULT_REQUEST
) -> object:
    """Load a new value with the structure of an abstract tree.

    If `abstract` is None, loads arrays of the requested framework in the saved structure. For files, loads a dict of
    bytes by path.

    Raises:
        ValueError: both an abstract tree and a framework are requested.
    """
    if abstract is not None:
        _refuse_framework(request)
    target = _StoredValue() if abstract is None else _NewValue(abstract)
    try:
        return Load(source, target, context, recording, request).run()
    except TreeMismatchError as error:
        if isinstance(abstract, str):
            error.add_note(f"The second argument is an abstract tree. A framework is named by framework={abstract!r}")
        raise


def load_nothing(source: Source, context: Context, recording: Recording) -> None:
    """Take part in a collective load without requesting any data."""
    Load(source, _NoValue(), context, recording, DEFAULT_REQUEST).run()


def load_into_target(
    source: Source,
    target: object,
    context: Context,
    recording: Recording,
    request: LoadRequest = DEFAULT_REQUEST,
    undo: Undo | None = None,
) -> object:
    """Load a checkpoint into `target`, and fill its arrays in place. Returns the target.

    Objects that may refuse their state are restored before anything else is changed; `undo` can put it back.

    Raises:
        TargetUndefinedError: the load failed after it began to change the target.
        ValueError: `matching` replaces missing leaves by placeholders, which a target cannot have; or a framework is
            requested.
    """
    _refuse_placeholders(request)
    _refuse_framework(request)
    if undo is None:
        from ckptcore.loading.undo import Undo  # only loads in place

        undo = Undo()
    load = Load(source, _FilledValue(target, undo), context, recording, request)
    try:
        load.run()
    except Exception as error:
        if not load.has_begun:
            undo.run(error)
            raise
        raise TargetUndefinedError(
            f"{source}: the load failed after it began to change the target, which now has a mix of old and loaded "
            f"data. Before using it, load a sound checkpoint into it, or create it again: {error}"
        ) from error
    return target


def load_files_into(
    source: Source, name: str, target: object, handler: FilesHandler, context: Context, recording: Recording
) -> object:
    """Restore an object from stored files. Returns the result of its handler.

    Args:
        source: the checkpoint with the files.
        name: the name of the object, for errors.
        target: the object.
        handler: restores it from a local directory.
        context: options.
        recording: records the phases.

    Raises:
        TargetUndefinedError: the load failed after the object began to change.
    """
    files = _RestoredFiles(name, target, handler)
    try:
        return Load(source, files, context, recording, DEFAULT_REQUEST).run()
    except Exception as error:
        if not files.has_begun or isinstance(error, TargetUndefinedError):
            raise
        raise TargetUndefinedError(
            f"{source} was replaced or deleted while {name!r} was restored from it, and loading again failed: {error}. "
            f"{name!r} may have a mix of two states. Before using it, load a sound checkpoint into it, or create it "
            "again"
        ) from error


def _refuse_framework(request: LoadRequest) -> None:
    if request.framework is not None:
        raise ValueError(
            f"framework={request.framework!r} is for a load without an abstract tree or target, whose leaves state "
            "their own framework; pass only one of the two"
        )


class _StoredValue(LoadTarget[object]):
    """The stored value in the saved structure, with arrays of a framework; for files, their bytes by path."""

    def __init__(self) -> None:
        self._skeleton: Skeleton | None = None
        self._files: dict[str, bytes] = {}

    def match(self, load: Load[object], checkpoint: Checkpoint) -> Matched:
        """Match all leaves, or the selected ones."""
        tree = checkpoint.tree
        if checkpoint.is_files:
            return self._match_files(load, checkpoint)
        array, value = default_handlers(load.runtime.registry)
        handlers = [array if isinstance(record, ArrayRecord) else value for record in tree.leaves]
        leaves: list[object] = [None] * len(handlers)
        if load.request.framework is not None:
            _choose_framework(load.request.framework, tree.leaves, load.runtime.registry, handlers, leaves)
        elif not REFUSING_NUMPY.isdisjoint(sys.modules):
            for record in tree.leaves:
                if isinstance(record, ArrayRecord) and record.notes.get("framework") in REFUSING_NUMPY:
                    _hint_of_framework(str(record.framework), load.runtime)
                    break
        job = load.runtime.job()
        selected: Skeleton = tree.skeleton
        numbers: Sequence[int | None] = range(len(handlers))
        if load.request.select is not None:
            chosen = chosen_leaves(checkpoint, load.request.select, load.context)
            selected, numbers = prune(tree.skeleton, chosen)
        self._skeleton, numbers = own_values(selected, numbers, job.rank, job.size)
        if load.request.select is None and len(numbers) == len(handlers):
            return Matched(numbers, handlers, skeleton=self._skeleton, leaves=leaves)
        kept = set(numbers)
        return Matched(
            numbers,
            [None if number is None else handlers[number] for number in numbers],
            ignored=[number for number in range(len(handlers)) if number not in kept],
            skeleton=self._skeleton,
            leaves=[None if number is None else leaves[number] for number in numbers],
        )

    def _match_files(self, load: Load[object], checkpoint: Checkpoint) -> Matched:
        """Read the files now, because collective loads check after this stage whether the checkpoint was replaced."""
        if load.request.select is not None:
            raise files_instead(checkpoint)
        with load.recording.phase("read", sum([record.size for record in checkpoint.objects.values()])):
            self._files = {key: b"".join(file_pieces(checkpoint, record)) for key, record in checkpoint.objects.items()}
        self._skeleton = None  # an earlier attempt may have found a tree
        return Matched((), (), skeleton=checkpoint.tree.skeleton)

    def build(self, load: Load[object], reading: TreeRead) -> object:
        """Put the leaves into standard Python containers."""
        return self._files if self._skeleton is None else rebuild(self._skeleton, reading.leaves)


def _hint_of_framework(name: str, runtime: Runtime) -> None:
    """Log once how to load arrays in the framework in which they were saved."""
    if (hint := hint_of_framework(name)) not in runtime.hints:
        runtime.hints.add(hint)
        logger.warning("%s", hint)


def _choose_framework(
    name: str,
    records: Sequence[LeafRecord],
    registry: Plugins,
    handlers: list[LeafHandler],
    leaves: list[object],
) -> None:
    """Replace the handlers and abstract leaves of the arrays that a framework can have."""
    arrays = {number: record for number, record in enumerate(records) if isinstance(record, ArrayRecord)}
    abstract = registry.framework(name)(list(arrays.values()))
    for number, leaf in zip(arrays, abstract, strict=True):
        if leaf is not None:
            handler = registry.dispatch(leaf).leaf
            assert handler is not None  # the plugin of a framework handles its abstract leaves
            leaves[number], handlers[number] = leaf, handler


class _NewValue(LoadTarget[object]):
    """A new value like an abstract tree."""

    def __init__(self, abstract: object) -> None:
        self._abstract = abstract
        self._shape: Shape | None = None
        self._same: Mapping[int, int] = {}

    def match(self, load: Load[object], checkpoint: Checkpoint) -> Matched:
        """Find the stored leaf for each abstract one."""
        with load.recording.phase("open"):
            flat = _flatten_like(checkpoint, self._abstract, load.context, load.request)
            self._shape = flat.shape
            matched = _match(checkpoint, flat, load.context, load.request)
            shared = shared_containers(flat.shape, lambda found: found.handler.keeps_identity(found.like))
            _check_shared_containers(checkpoint, matched.numbers, shared, _two_values)
            self._same = _loaded_elsewhere(matched.numbers, shared)
            return matched

    def build(self, load: Load[object], reading: TreeRead) -> object:
        """Put the leaves into containers like those of the abstract tree."""
        for position, loaded in self._same.items():
            reading.leaves[position] = reading.leaves[loaded]
        return unflatten(self._shape, reading.leaves)


class _FilledValue(LoadTarget[None]):
    """A value whose arrays are filled in place, and whose other leaves are replaced.

    Attributes:
        undo: puts back the states of objects that were restored before anything else was changed.
    """

    def __init__(self, target: object, undo: Undo) -> None:
        self.undo = undo
        self._target = target
        self._flat: Flat | None = None
        self._untouched: frozenset[TreePath] = frozenset()

    def match(self, load: Load[None], checkpoint: Checkpoint) -> Matched:
        """Find the stored leaf for each leaf of the target."""
        with load.recording.phase("open"):
            self._flat = flat = _flatten_like(checkpoint, self._target, load.context, load.request)
            matched = _match_target(checkpoint, flat, load.context, load.request)
        self._untouched = matched.untouched
        filled = [number is None for number in matched.numbers]  # unmatched leaves are kept
        return replace(matched, filled=filled, first=_refusing_leaves(flat.shape))

    def begin(self, load: Load[None], first: TreeRead) -> None:
        """Restore the objects that may refuse their state."""
        assert self._flat is not None  # set by `match`
        objects = [one for one in objects_that_may_refuse(self._flat.shape) if one.path not in self._untouched]
        for found in objects:
            self.undo.add(found)
        load.read_planned(first, load.context)
        for found in objects:
            self.undo.restore(found, first.leaves, load.location)

    def build(self, load: Load[None], reading: TreeRead) -> None:
        """Put the leaves that were not filled in place into the target."""
        flat = self._flat
        assert flat is not None and reading.filled is not None  # set by `match`
        with load.recording.phase("restore"):
            restore(flat.shape, reading.leaves, reading.filled, list(flat.paths()), self._untouched)


class _NoValue(LoadTarget[None]):
    """No result: this process takes part in a collective load without requesting data."""

    def match(self, load: Load[None], checkpoint: Checkpoint) -> Matched:
        """Match no leaf."""
        return Matched((), ())

    def build(self, load: Load[None], reading: TreeRead) -> None:
        """Build nothing."""


class _RestoredFiles(LoadTarget[object]):
    """An object that restores itself from files.

    Attributes:
        has_begun: True once the object may have changed.
    """

    def __init__(self, name: str, target: object, handler: FilesHandler) -> None:
        self.has_begun = False
        self._name = name
        self._target = target
        self._handler = handler

    def match(self, load: Load[object], checkpoint: Checkpoint) -> Matched:
        """Refuse a tree. Reads no file yet."""
        if not checkpoint.is_files:
            raise CorruptCheckpointError(
                f"{checkpoint.location.display} has a tree instead of files of an object: it was replaced or is "
                "damaged. Load again, or load another checkpoint"
            )
        return Matched((), ())

    def build(self, load: Load[object], reading: TreeRead) -> object:
        """Copy and verify the files in a local directory, and restore the object from it."""
        from ckptcore.builtin.staging import StagingDirectory  # only objects that write files need it

        checkpoint, directory = reading.opened, StagingDirectory()
        try:
            with load.recording.phase("read", sum([record.size for record in checkpoint.objects.values()])):
                _copy_out(checkpoint, directory.path)
            self.has_begun = True
            with load.recording.phase("restore"):
                return self._restore(load.location, directory.path)
        finally:
            directory.close()

    def _restore(self, source: Source, directory: Path) -> object:
        try:
            return self._handler.load(self._target, directory)
        except Exception as error:
            raise TargetUndefinedError(
                f"{self._name!r} failed to restore itself from {source}: {type(error).__name__}: {error}. It may "
                "have a mix of two states: create a new object, and load this or another checkpoint into it"
            ) from error


def check_target(checkpoint: Checkpoint, target: object, context: Context, request: LoadRequest) -> bool:
    """Check that the stored tree can be loaded into a target. Reads no array, and does not change the target.

    Returns:
        True if the load changes more than objects that may refuse their state.

    Raises:
        TransformError, TreeMismatchError, ValueError: the stored tree cannot be loaded; see `load_into_target`.
    """
    _refuse_placeholders(request)
    checkpoint = transformed(checkpoint, request.transforms, context)
    flat = _flatten_like(checkpoint, target, context, request)
    matched = _match_target(checkpoint, flat, context, request)
    refusing = _refusing_leaves(flat.shape) or frozenset()
    return any(number is not None and position not in refusing for position, number in enumerate(matched.numbers))


def _refusing_leaves(shape: Shape) -> frozenset[int] | None:
    """Return the positions of the leaves of objects that may refuse their state; None if there are no such objects."""
    objects = objects_that_may_refuse(shape)
    return frozenset([position for found in objects for position in found.leaves]) if objects else None


def holds_objects(tree: object, registry: Plugins) -> bool:
    """Return True if a tree is, or contains, an object that must be restored in place."""
    return _holds_objects(tree, registry, MAX_DEPTH)


def _holds_objects(node: object, registry: Plugins, depth: int) -> bool:
    found = registry.dispatch(node)
    if found.checkpointable is not None:
        return found.checkpointable.is_object
    container = found.container
    if container is None or depth == 0:
        return False  # flattening raises an error for such a tree
    if container.is_object(node):
        return True
    return any(_holds_objects(child, registry, depth - 1) for child in container.flatten(node).children)


def _flatten_like(checkpoint: Checkpoint, value: object, context: Context, request: LoadRequest) -> Flat:
    """Flatten an abstract tree or a target. Handlers of objects in it can look up their stored abstract trees.

    Plain values have their stored structure, unless the caller wants them strictly, or selects leaves.

    Raises:
        TreeMismatchError: files are stored.
    """
    if checkpoint.is_files:
        raise files_instead(checkpoint)
    runtime = runtime_of(context)
    registry, job = runtime.registry, runtime.job()
    found = stored_in(checkpoint, request.select, context)
    columns = requested_columns(checkpoint.tree)
    flat = flatten(value, registry, rank=job.rank, placeholders=True, stored_at=found, columns=columns)
    for path in per_process_values(flat.shape):
        _expect_processes(checkpoint, path, job.size)
    if request.matching.values == "error" or request.select is not None:
        return flat
    by_name = _is_by_name(checkpoint, request)
    return with_stored_values(flat, checkpoint.tree, registry, by_name=by_name)


def _is_by_name(checkpoint: Checkpoint, request: LoadRequest) -> bool:
    """Return True if leaves are matched by the texts of their keys."""
    return checkpoint.root is None or request.matching.keys == "text"


def _expect_processes(checkpoint: Checkpoint, path: TreePath, size: int) -> None:
    """Check that the processes that saved a `PerProcess` value are those of this job. All ranks decide equally.

    Raises:
        TreeMismatchError: it is another one.
    """
    node = checkpoint.tree.skeleton
    for key in path:
        if not isinstance(node, Node) or key not in node.keys:
            return  # a difference that is found later
        node = node.children[node.keys.index(key)]
    ranks = [key for key in node.keys if isinstance(key, int)] if isinstance(node, Node) else []
    if ranks and sorted(ranks) != list(range(size)):
        name = format_path(path)
        raise TreeMismatchError(
            f"{name} in {checkpoint.location.display} has a separate value for each of {max(ranks) + 1} processes, but "
            f"this job has {size}. Request the values that this process needs as a dict by rank, such as "
            f"{{{ranks[0]}: ...}}, instead of PerProcess(...)",
            [f"{name}: {max(ranks) + 1} processes saved it, {size} load it"],
        )


def _match(
    checkpoint: Checkpoint, flat: Flat, context: Context, request: LoadRequest, *, in_place: bool = False
) -> Matched:
    """Find the stored leaf for each leaf of an abstract tree."""
    job = runtime_of(context).job()
    return match_leaves(
        flat,
        checkpoint.tree,
        checkpoint.location.display,
        by_name=_is_by_name(checkpoint, request),
        matching=request.matching,
        rank_and_size=(job.rank, job.size),
        chosen=None if request.select is None else chosen_leaves(checkpoint, request.select, context),
        in_place=in_place,
    )


def _match_target(checkpoint: Checkpoint, flat: Flat, context: Context, request: LoadRequest) -> Matched:
    """Find the stored leaf for each leaf of a target.

    Raises:
        TreeMismatchError: also if a leaf can be neither filled in place nor replaced.
    """
    matched = _match(checkpoint, flat, context, request, in_place=True)
    if request.select is not None:
        from ckptcore.loading.selected_objects import keeping_objects  # only selections need it

        matched = keeping_objects(checkpoint.location.display, flat, matched, runtime_of(context).registry)
    memory = [
        None if number is None or handler is None else handler.memory_to_fill(leaf)
        for number, handler, leaf in zip(matched.numbers, matched.handlers, flat.leaves, strict=True)
    ]
    replaced = [number is not None and found is None for number, found in zip(matched.numbers, memory, strict=True)]
    stuck = first_fixed(flat.shape, replaced)
    if stuck is not None:
        path = format_path(list(flat.paths())[stuck])
        raise TreeMismatchError(
            f"{path} of the target cannot be filled in place, and none of its containers can be changed. Use the "
            "result of load(), or put the leaf into a dict. To restore other objects of the target in place, save each "
            "under its own name with save_checkpointables. Nothing was changed",
            [f"{path}: cannot be filled in place"],
        )
    _check_inner_objects(checkpoint, flat.shape)
    _check_shared_memory(checkpoint, matched.numbers, memory)
    shared = shared_containers(flat.shape, lambda found: found.handler.replaceable(found.like))
    _check_shared_containers(checkpoint, matched.numbers, shared, partial(_refusal, shared="one object"))
    return matched


def _check_inner_objects(checkpoint: Checkpoint, shape: Shape) -> None:
    """Refuse the stored state of an object inside another one that does not have that object: it would get a dict.

    Raises:
        TreeMismatchError: names the first such object.
    """
    for path, node in _states_of_inner_objects(checkpoint.tree.skeleton, ()):
        if lacks_object_at(shape, path):
            name = format_path(path)
            kind = str(node.type).removeprefix(STATE_OF)
            raise TreeMismatchError(
                f"{name} in {checkpoint.location.display} is the state of a {kind}, which the target does not have "
                "there yet. Create that object before the load, for example by the step of the program that creates "
                "it. Nothing was changed",
                [f"{name}: the state of a {kind} is stored, and the target has no such object"],
            )


def _states_of_inner_objects(node: Skeleton, path: TreePath) -> Iterator[tuple[TreePath, Node]]:
    if isinstance(node, Node):
        if node.type is not None and node.type.startswith(STATE_OF):
            yield path, node
        for key, child in zip(node.keys, node.children, strict=True):
            yield from _states_of_inner_objects(child, (*path, key))


def _refuse_placeholders(request: LoadRequest) -> None:
    if request.matching.missing == "placeholder":
        raise ValueError(
            'Matching(missing="placeholder"): a target that is filled in place cannot have placeholders; use '
            'missing="error" or missing="keep"'
        )


def _check_shared_memory(
    checkpoint: Checkpoint, numbers: Sequence[int | None], memory: Sequence[Sequence[StridedMemory] | None]
) -> None:
    """Refuse leaves of a target that share memory, unless they are tied in both the target and the checkpoint.

    Args:
        checkpoint: the checkpoint.
        numbers: by leaf of the target, the stored leaf.
        memory: by leaf of the target, the memory that is filled; None if the leaf is replaced or not loaded.

    Raises:
        TreeMismatchError: names both leaves.
    """
    tree = checkpoint.tree
    spaces: dict[Hashable, list[tuple[range, int, StridedMemory]]] = {}
    for number, parts in zip(numbers, memory, strict=True):
        for part in parts or ():
            assert number is not None  # only loaded leaves have memory to fill
            if part.overlaps_itself():
                raise _refusal(checkpoint, number, number, "elements that share memory")
            if extent := part.extent:
                spaces.setdefault(part.space, []).append((extent, number, part))
    for filled in spaces.values():
        filled.sort(key=lambda one: one[0].start)
        before: list[tuple[range, int, StridedMemory]] = []
        for extent, number, part in filled:
            before = [one for one in before if one[0].stop > extent.start]
            for _, other, others in before:
                if number == other and part.shares_bytes(others):
                    raise _refusal(checkpoint, number, number, "elements that share memory")
                if part == others:
                    if tree.aliases.get(number, number) != tree.aliases.get(other, other):
                        raise _refusal(checkpoint, other, number, "one array")
                elif part.shares_bytes(others):
                    raise _refusal(checkpoint, other, number, "arrays that overlap")
            before.append((extent, number, part))


def _check_shared_containers(
    checkpoint: Checkpoint,
    numbers: Sequence[int | None],
    shared: Sequence[tuple[range, range]],
    refusal: Callable[[Checkpoint, int, int], TreeMismatchError],
) -> None:
    """Refuse a container that occurs twice in a target, or in a request, if the checkpoint has two values for it.

    Args:
        checkpoint: the checkpoint.
        numbers: by leaf, the number of the stored leaf, or None.
        shared: the leaves of each two occurrences. See `ckptcore.tree.restoring.shared_containers`.
        refusal: returns the error for the numbers of two stored leaves.

    Raises:
        TreeMismatchError: names a leaf of each occurrence.
    """
    for first, second in shared:
        for one, other in zip(first, second, strict=True):
            number, others = numbers[one], numbers[other]
            if number is not None and others is not None and _stored(checkpoint, number) != _stored(checkpoint, others):
                raise refusal(checkpoint, number, others)


def _loaded_elsewhere(numbers: Sequence[int | None], shared: Sequence[tuple[range, range]]) -> Mapping[int, int]:
    """Return leaves that are not loaded in one place of a shared container, each with a place where it is loaded."""
    return {
        one: other
        for pair in shared
        for places in zip(*pair, strict=True)
        for one, other in (places, places[::-1])
        if numbers[one] is None and numbers[other] is not None
    }


def _stored(checkpoint: Checkpoint, number: int) -> LeafRecord | int:
    """Return the value of a stored leaf, or the number of its array."""
    record = checkpoint.tree.leaves[number]
    return record if isinstance(record, ValueRecord) else checkpoint.tree.aliases.get(number, number)


def _two_values(checkpoint: Checkpoint, first: int, second: int) -> TreeMismatchError:
    one, other = (format_path(checkpoint.tree.paths[number]) for number in (first, second))
    return TreeMismatchError(
        f"{one} and {other} are one object in the request, but separate in {checkpoint.location.display}: the object "
        "cannot have both values. Request two objects, or PLACEHOLDER in one of the two places",
        [f"{other}: one object with {one} in the request, not in the checkpoint"],
    )


def _refusal(checkpoint: Checkpoint, first: int, second: int, shared: str) -> TreeMismatchError:
    one, other = (format_path(checkpoint.tree.paths[number]) for number in (first, second))
    if first == second:
        reason, line = f"{one} of the target has {shared}: it cannot be filled", f"{one}: has {shared} in the target"
    else:
        reason = (
            f"{one} and {other} are {shared} in the target, but separate in {checkpoint.location.display}: they cannot "
            "both be filled"
        )
        line = f"{other}: {shared} with {one} in the target, not in the checkpoint"
    return TreeMismatchError(
        f"{reason}. Use load(), or a target without shared memory. Nothing was changed",
        [line],
    )


def _copy_out(checkpoint: Checkpoint, directory: Path) -> None:
    """Copy every file to a local directory and verify it. Also creates the directories that were saved empty.

    Raises:
        CorruptCheckpointError: a file is damaged, or two files have conflicting paths.
        StorageError: the file cannot be written to the local disk, or the storage failed.
    """
    from ckptcore.builtin.files import empty_directories  # only files of objects need it

    empty = dict.fromkeys(empty_directories(checkpoint.state))
    for key, record in [*checkpoint.objects.items(), *empty.items()]:
        path = os.path.join(directory, *key.split("/"))
        try:
            os.makedirs(path if record is None else os.path.dirname(path), exist_ok=True)
            if record is not None:
                with open(path, "xb") as file:
                    file.writelines(file_pieces(checkpoint, record))
        except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
            raise CorruptCheckpointError(
                f"{checkpoint.location.display} lists the file {key!r} twice, or also as a directory: {error}. Load "
                "another checkpoint",
                key=key,
            ) from error
        except CheckpointError:
            raise
        except OSError as error:
            raise StorageError(
                error.errno,
                f"cannot copy {key!r} of {checkpoint.location.display} to {path}: {error}. Nothing was changed",
            ) from error
