"""Loads in place: check a target, restore its objects that may refuse their states, and fill its arrays."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from ckptcore.context import Context
from ckptcore.errors import CheckpointError, TargetUndefinedError, TreeMismatchError
from ckptcore.events import Recording, logger_named
from ckptcore.loading.load import DEFAULT_REQUEST, Load, LoadRequest, LoadTarget, transformed
from ckptcore.loading.new_values import check_shared_containers, flatten_like, match_value
from ckptcore.loading.reading import TreeRead
from ckptcore.loading.targets import refuse_framework
from ckptcore.matching.options import Matched
from ckptcore.model.arrays import StridedMemory
from ckptcore.model.tree import Node, Skeleton, TreePath, format_path
from ckptcore.opening.checkpoint import Checkpoint, Source
from ckptcore.runtime import runtime_of
from ckptcore.tree.flattening import STATE_OF, Flat
from ckptcore.tree.shapes import (
    LiveObject,
    Shape,
    first_fixed,
    lacks_object_at,
    objects_that_may_refuse,
    restore,
    shared_containers,
)

logger = logger_named("ckptcore.loading")


class Undo:
    """Restores objects that may refuse their states, and puts the old states back if an object refuses."""

    def __init__(self) -> None:
        """Begin without old states. `add` keeps them."""
        self._before: dict[int, tuple[LiveObject, Callable[[], None] | None]] = {}
        self._changed: set[int] = set()

    def add(self, live: LiveObject) -> None:
        """Keep the present state of an object. A repeated load keeps the state before its first attempt."""
        if id(live.node.like) not in self._before:
            self._before[id(live.node.like)] = live, live.undo()

    def restore(self, live: LiveObject, leaves: Sequence[object], source: Source) -> None:
        """Restore an object that was added.

        Args:
            live: the object.
            leaves: the leaves of the whole value.
            source: the location of the checkpoint, for errors.

        Raises:
            TreeMismatchError: the object refused the state.
        """
        self._changed.add(id(live.node.like))
        try:
            live.restore(leaves)
        except CheckpointError:
            raise
        except Exception as error:
            reason = f"refused its stored state: {type(error).__name__}: {error}"
            raise TreeMismatchError(
                f"{source}: {live.name}, {reason}. Create it with the options that it had when it was saved; or put "
                "PLACEHOLDER in its place to load everything else",
                [f"{live.name}: {reason}"],
            ) from error

    def run(self, cause: Exception) -> None:
        """Put all states back, because a load failed before it changed anything else.

        Raises:
            TargetUndefinedError: the old state of a changed object cannot be put back.
        """
        kept = []
        for key, (live, undo) in reversed(self._before.items()):
            try:
                if undo is not None:
                    undo()
                elif key in self._changed:
                    kept.append(live.name)
            except Exception as error:  # any error of the object's code: continue with the others, and raise below
                logger.warning("the old state of an object cannot be put back: %s", live.name, exc_info=error)
                kept.append(live.name)
        self._before.clear()
        self._changed.clear()
        if kept:
            raise TargetUndefinedError(
                f"{cause}. The load stopped after it changed {', '.join(kept)}, whose old state cannot be put back: "
                "create new objects before loading again. Nothing else was changed"
            ) from cause


def load_into_target(
    source: Source,
    target: object,
    context: Context,
    recording: Recording,
    request: LoadRequest = DEFAULT_REQUEST,
    undo: Undo | None = None,
) -> object:
    """Load a checkpoint into `target`, and fill its arrays in place. Returns the target.

    Objects that may refuse their state are restored before anything else is changed; `undo` can put their old states
    back.

    Raises:
        TargetUndefinedError: the load failed after it began to change the target.
        ValueError: `matching` replaces missing leaves by placeholders, which a target cannot have; or a framework is
            requested.
    """
    _refuse_placeholders(request)
    refuse_framework(request)
    undo = undo or Undo()
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
            self._flat = flat = flatten_like(checkpoint, self._target, load.context, load.request)
            matched = _match_target(checkpoint, flat, load.context, load.request)
        self._untouched = matched.untouched
        filled = [number is None for number in matched.numbers]  # unmatched leaves are kept
        return replace(matched, filled=filled, first=_refusing_leaves(flat.shape))

    def begin(self, load: Load[None], first: TreeRead) -> None:
        """Restore the objects that may refuse their state."""
        assert self._flat is not None  # set by `match`
        objects = [live for live in objects_that_may_refuse(self._flat.shape) if live.path not in self._untouched]
        for live in objects:
            self.undo.add(live)
        load.read_planned(first, load.context)
        for live in objects:
            self.undo.restore(live, first.leaves, load.location)

    def build(self, load: Load[None], reading: TreeRead) -> None:
        """Put the leaves that were not filled in place into the target."""
        flat = self._flat
        assert flat is not None and reading.filled is not None  # set by `match`
        with load.recording.phase("restore"):
            restore(flat.shape, reading.leaves, reading.filled, list(flat.paths()), self._untouched)


def check_target(checkpoint: Checkpoint, target: object, context: Context, request: LoadRequest) -> bool:
    """Check that the stored tree can be loaded into a target. Reads no array, and does not change the target.

    Returns:
        True if the load changes more than objects that may refuse their state.

    Raises:
        TransformError, TreeMismatchError, ValueError: the stored tree cannot be loaded; see `load_into_target`.
    """
    _refuse_placeholders(request)
    checkpoint = transformed(checkpoint, request.transforms, context)
    flat = flatten_like(checkpoint, target, context, request)
    matched = _match_target(checkpoint, flat, context, request)
    refusing = _refusing_leaves(flat.shape) or frozenset()
    return any(number is not None and position not in refusing for position, number in enumerate(matched.numbers))


def _refusing_leaves(shape: Shape) -> frozenset[int] | None:
    """Return the positions of the leaves of objects that may refuse their state; None if there are no such objects."""
    objects = objects_that_may_refuse(shape)
    return frozenset([position for live in objects for position in live.leaves]) if objects else None


def _match_target(checkpoint: Checkpoint, flat: Flat, context: Context, request: LoadRequest) -> Matched:
    """Find the stored leaf for each leaf of a target.

    Raises:
        TreeMismatchError: the trees do not match, or a leaf can be neither filled in place nor replaced.
    """
    matched = match_value(checkpoint, flat, context, request, in_place=True)
    if request.select is not None:
        from ckptcore.loading.selections import keeping_objects  # only selections need it

        matched = keeping_objects(checkpoint.location.display, flat, matched, runtime_of(context).registry)
    memory = [
        None if number is None or handler is None else handler.memory_to_fill(leaf)
        for number, handler, leaf in zip(matched.numbers, matched.handlers, flat.leaves, strict=True)
    ]
    replaced = [number is not None and parts is None for number, parts in zip(matched.numbers, memory, strict=True)]
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
    shared = shared_containers(flat.shape, lambda node: node.handler.replaceable(node.like))
    check_shared_containers(checkpoint, matched.numbers, shared, partial(_refusal, shared="one object"))
    return matched


def _check_inner_objects(checkpoint: Checkpoint, shape: Shape) -> None:
    """Refuse the state of an inner object that the target does not have: the outer object would get a dict instead.

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
        # Sweep by address: compare each part only with earlier parts that end after it starts.
        filled.sort(key=lambda entry: entry[0].start)
        before: list[tuple[range, int, StridedMemory]] = []
        for extent, number, part in filled:
            before = [entry for entry in before if entry[0].stop > extent.start]
            for _, other, other_part in before:
                if number == other and part.shares_bytes(other_part):
                    raise _refusal(checkpoint, number, number, "elements that share memory")
                if part == other_part:
                    if tree.aliases.get(number, number) != tree.aliases.get(other, other):
                        raise _refusal(checkpoint, other, number, "one array")
                elif part.shares_bytes(other_part):
                    raise _refusal(checkpoint, other, number, "arrays that overlap")
            before.append((extent, number, part))


def _refusal(checkpoint: Checkpoint, first: int, second: int, shared: str) -> TreeMismatchError:
    name, other = (format_path(checkpoint.tree.paths[number]) for number in (first, second))
    if first == second:
        reason, line = f"{name} of the target has {shared}: it cannot be filled", f"{name}: has {shared} in the target"
    else:
        reason = (
            f"{name} and {other} are {shared} in the target, but separate in {checkpoint.location.display}: they "
            "cannot both be filled"
        )
        line = f"{other}: {shared} with {name} in the target, not in the checkpoint"
    return TreeMismatchError(f"{reason}. Use load(), or a target without shared memory. Nothing was changed", [line])
