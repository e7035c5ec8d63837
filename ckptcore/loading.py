"""Loading: match, plan, read, build."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ckptcore.builtin.files_layout import FilesLayout
from ckptcore.context import Context
from ckptcore.engine.memory import allocate
from ckptcore.errors import (
    CorruptCheckpointError,
    PluginError,
    TargetUndefinedError,
    TreeMismatchError,
    UnsupportedLeafError,
)
from ckptcore.events import Recording
from ckptcore.fetching import WantedAtWorkers, fetch_leaves
from ckptcore.flattening import PLACEHOLDER, Flat, first_stuck, flatten, rebuild, restore, unflatten
from ckptcore.locations import Place
from ckptcore.matching import match_leaves
from ckptcore.model.arrays import AbstractArray, ArraySpec, Box, HostArray
from ckptcore.model.metadata import ArrayRecord, LeafRecord, TreeMetadata, ValueRecord
from ckptcore.model.tree import MAX_DEPTH, Attribute, TreePath, format_path
from ckptcore.opening import Opened, Source, file_pieces, while_unchanged
from ckptcore.planning import plan_read
from ckptcore.plugins import Plugins
from ckptcore.protocols import Executor, LeafHandler, WantedLeaf
from ckptcore.scalars import are_interchangeable, array_of, value_of

__all__ = [
    "abstract_leaves",
    "abstract_tree",
    "check_sizes",
    "check_target",
    "check_tree_of_objects",
    "holds_objects",
    "load_into_target",
    "load_value",
    "read_leaves",
    "recorded_load",
]


@dataclass(slots=True)
class _Unit:
    """One stored array that is read and built once, for one or more leaves.

    Attributes:
        leaf: its number in the stored tree.
        handler, abstract: who builds it, and as what.
        positions: of the leaves that get it, in the value.
        boxes: the boxes it is read by.
        number: the array without axes, where a number is stored in its place and nothing is to be read.
        kind: the kind of number that is built of the array; None where an array is.
        buffers: the memory they are read into.
        waiting: how many boxes are still to come.
        at_workers: by worker of this controller, the boxes that it reads; None where the array is read here.
    """

    leaf: int
    record: ArrayRecord
    handler: LeafHandler
    abstract: object
    positions: list[int]
    boxes: Sequence[Box]
    number: HostArray | None = None
    kind: str | None = None
    buffers: list[HostArray] = field(default_factory=list)
    waiting: int = 0
    at_workers: tuple[tuple[Box, ...], ...] | None = None

    @property
    def fetched(self) -> WantedAtWorkers | None:
        """What workers are asked for; None where the array is read here."""
        if self.at_workers is None:
            return None
        return WantedAtWorkers(self.leaf, WantedLeaf(self.abstract, self.record), self.at_workers)

    @property
    def nbytes(self) -> int:
        if self.number is not None:
            return 0
        if (fetched := self.fetched) is not None:
            return fetched.nbytes
        return sum(box.size for box in self.boxes) * self.record.spec.numpy_dtype.itemsize


@contextmanager
def recorded_load(location: Place, context: Context, *, step: int | None = None) -> Iterator[Recording]:
    """Record a load, from here to the end of the block."""
    recording = Recording("load", str(location), context.observers, step=step, rank=context.job().rank)
    try:
        yield recording
    except BaseException as error:
        recording.finish(error=error)
        raise
    recording.finish()


def load_value(location: Source, abstract: object, context: Context, recording: Recording) -> object:
    """The value of the checkpoint, as `abstract` asks; NumPy leaves in the structure that was saved if it is None."""

    def attempt(opened: Opened) -> object:
        tree = opened.tree
        if _is_files(opened):
            if abstract is not None:
                raise _files_instead(opened)
            with recording.phase("read"):
                return {key: b"".join(file_pieces(opened, record)) for key, record in opened.objects.items()}
        if abstract is None:
            array, value = abstract_leaves(context.registry)
            handlers = [array if isinstance(record, ArrayRecord) else value for record in tree.leaves]
            numbers: list[int | None] = list(range(len(tree.leaves)))
            with recording.phase("read") as phase:
                leaves = read_leaves(opened, numbers, handlers, [None] * len(handlers), context)
                phase.nbytes = tree.nbytes
            return rebuild(tree.skeleton, leaves)
        with recording.phase("open"):
            flat = flatten(
                abstract, context.registry, placeholders=True, stored_at=_stored_at(opened, context.registry)
            )
            numbers = match_leaves(flat, tree, opened.location.display, by_name=opened.root is None)
        units, leaves = _plan_units(opened, numbers, flat.handlers, flat.leaves, context.workers(), into=False)
        with recording.phase("read", sum(unit.nbytes for unit in units)):
            _perform(opened, units, leaves, context, None)
        return unflatten(flat.shape, leaves)

    return while_unchanged(location, context, attempt)


def _is_files(opened: Opened) -> bool:
    return opened.layout.name == FilesLayout.name


def _files_instead(opened: Opened) -> TreeMismatchError:
    return TreeMismatchError(
        f"{opened.location.display} holds files that an object wrote, and no tree: load it with load_checkpointables and an object "
        "like the one that was saved, or with load() and nothing else for the files as bytes",
        ["files are stored, a tree is asked for"],
    )


def check_target(opened: Opened, target: object, context: Context) -> None:
    """Refuse a target that what is stored cannot be loaded into. Changes and reads nothing.

    Raises:
        TreeMismatchError
    """
    flat = flatten(target, context.registry, placeholders=True, stored_at=_stored_at(opened, context.registry))
    _match_target(opened, flat)


def holds_objects(tree: object, registry: Plugins) -> bool:
    """Whether a tree has an object with a state of its own below it. The tree itself is none."""
    return _holds_objects(tree, registry, MAX_DEPTH)


def _holds_objects(node: object, registry: Plugins, depth: int) -> bool:
    container = registry.dispatch(node).container
    if container is None or depth == 0:
        return False  # what is too deep is refused as it is flattened
    return any(
        registry.dispatch(child).checkpointable is not None or _holds_objects(child, registry, depth - 1)
        for child in container.flatten(node).children
    )


def check_tree_of_objects(opened: Opened, tree: object, context: Context) -> None:
    """Refuse a tree with objects in it that cannot be loaded into. Changes and reads nothing.

    Raises:
        TreeMismatchError: also if a leaf beside the objects may have to be replaced, and nothing that holds it can be changed.
    """
    flat = flatten(tree, context.registry, placeholders=True, stored_at=_stored_at(opened, context.registry))
    stuck = first_stuck(flat.shape, [handler is not None for handler in flat.handlers])
    if stuck is not None:
        path = format_path(list(flat.paths())[stuck])
        raise TreeMismatchError(
            f"{path} stands beside objects that are restored in place, in a {type(tree).__qualname__} that cannot be changed; save "
            "and load each object under a name of its own, or hold them in a dict. Nothing was changed",
            [f"{path}: cannot be replaced beside objects that are restored in place"],
        )
    _match_target(opened, flat)


def _match_target(opened: Opened, flat: Flat) -> list[int | None]:
    """For each leaf of a target the number of the stored one.

    Raises:
        TreeMismatchError: also if a leaf can be filled neither in place nor replaced.
    """
    numbers = match_leaves(flat, opened.tree, opened.location.display, by_name=opened.root is None)
    # Also an array that is stored where a number is asked for is replaced, and a number that becomes an array fills one.
    replaced = [
        number is not None
        and handler is not None
        and isinstance(_other_form(opened, number, handler, leaf) or opened.tree.leaves[number], ValueRecord)
        for number, handler, leaf in zip(numbers, flat.handlers, flat.leaves, strict=True)
    ]
    stuck = first_stuck(flat.shape, replaced)
    if stuck is not None:
        path = format_path(list(flat.paths())[stuck])
        raise TreeMismatchError(
            f"{path} of the target cannot be filled in place, and nothing that holds it can be changed; "
            "use load() and keep its result. The target is as it was",
            [f"{path}: cannot be filled in place"],
        )
    return numbers


def load_into_target(location: Source, target: object, context: Context, recording: Recording) -> None:
    """Make `target` hold the value of the checkpoint, its arrays filled in place.

    Raises:
        TargetUndefinedError: if it failed after it began to change the target.
    """
    began = False

    def attempt(opened: Opened) -> None:
        nonlocal began
        if _is_files(opened):
            raise _files_instead(opened)
        with recording.phase("open"):
            flat = flatten(target, context.registry, placeholders=True, stored_at=_stored_at(opened, context.registry))
            numbers = _match_target(opened, flat)
        units, leaves = _plan_units(opened, numbers, flat.handlers, flat.leaves, context.workers(), into=True)
        began = True
        filled = [number is None for number in numbers]  # these stay as they are
        with recording.phase("read", sum(unit.nbytes for unit in units)):
            _perform(opened, units, leaves, context, filled)
        with recording.phase("restore"):
            restore(flat.shape, leaves, filled, list(flat.paths()))

    try:
        while_unchanged(location, context, attempt)
    except Exception as error:
        if not began:
            raise
        raise TargetUndefinedError(
            f"loading {location} into its target failed half-way, and the target now holds a mix of what it held and what "
            f"was stored; load again before using it: {error}"
        ) from error


def abstract_leaves(registry: Plugins) -> tuple[LeafHandler, LeafHandler]:
    """The handlers that build arrays and values where no abstract tree is given."""
    array, value = registry.dispatch(AbstractArray((), "bool")).leaf, registry.dispatch("").leaf
    if array is None or value is None:
        raise PluginError("no plugin builds NumPy arrays and values; the built-in plugin is missing")
    return array, value


def abstract_tree(tree: TreeMetadata, registry: Plugins) -> Any:
    """What is stored, in Python's own containers: `AbstractArray` for arrays, and small values themselves."""
    _, value_handler = abstract_leaves(registry)
    leaves = [
        _abstract_leaf(record) if isinstance(record, ArrayRecord) else value_handler.build(None, record, ())
        for record in tree.leaves
    ]
    return rebuild(tree.skeleton, leaves)


def _abstract_leaf(record: ArrayRecord) -> object:
    """What asks for an array as what it was saved as, where the core knows that."""
    if record.kind == "numpy.scalar":
        return np.zeros((), record.spec.numpy_dtype)[()]
    if record.kind in ("str", "bytes"):
        return "" if record.kind == "str" else b""
    return AbstractArray(record.spec.shape, record.spec.dtype)


def _stored_at(opened: Opened, registry: Plugins) -> Callable[[TreePath], object]:
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


def read_leaves(
    opened: Opened,
    numbers: Sequence[int | None],
    handlers: Sequence[LeafHandler | None],
    abstracts: Sequence[object],
    context: Context,
) -> list[object]:
    """Read and build leaves.

    Args:
        opened: the checkpoint.
        numbers: of stored leaves; None for what is not loaded and stays as its abstract is.
        handlers, abstracts: for each, who builds it and as what.
        context: its bound on memory is kept.
    """
    units, leaves = _plan_units(opened, numbers, handlers, abstracts, context.workers(), into=False)
    _perform(opened, units, leaves, context, None)
    return leaves


def _plan_units(
    opened: Opened,
    numbers: Sequence[int | None],
    handlers: Sequence[LeafHandler | None],
    abstracts: Sequence[object],
    executor: Executor | None,
    *,
    into: bool,
) -> tuple[Sequence[_Unit], list[object]]:
    """What is to be read, and the leaves, of which values are there already. Reads nothing and changes nothing.

    Raises:
        TreeMismatchError: if two leaves of a target are one array in memory and two in the checkpoint.
    """
    tree = opened.tree
    leaves: list[object] = [PLACEHOLDER] * len(numbers)
    units: list[_Unit] = []
    tied: dict[tuple[object, ...], _Unit] = {}
    in_memory: dict[object, int] = {}
    for position, (number, handler, abstract) in enumerate(zip(numbers, handlers, abstracts, strict=True)):
        if handler is None:
            continue
        if number is None:
            leaves[position] = abstract  # None is asked for, and nothing is stored
            continue
        record, array = tree.leaves[number], None
        asked = _other_form(opened, number, handler, abstract)
        kind = asked.kind if isinstance(asked, ValueRecord) else None
        if isinstance(record, ValueRecord):
            if not isinstance(asked, ArrayRecord):
                with _naming(tree, number):
                    leaves[position] = handler.build(abstract, record, ())
                continue
            array = array_of(record, asked.spec)
            record = ArrayRecord(asked.spec)
        there = executor if executor is not None and executor.makes(abstract) and array is None else None
        at_workers: tuple[tuple[Box, ...], ...] | None = None
        boxes: Sequence[Box] = ()
        with _naming(tree, number):
            if kind is not None:
                boxes = (Box.whole(record.spec.shape),)
            elif there is not None:
                workers = range(len(there.workers))
                at_workers = tuple([tuple(there.wanted(abstract, record, worker)) for worker in workers])
            else:
                boxes = handler.wanted(abstract, record)
        original = tree.aliases.get(number, number)
        memory: object = None
        if into:
            memory = (handler if there is None else there).identity(abstract) or position
            if in_memory.setdefault((id(handler), memory), original) != original:
                other = format_path(tree.paths[in_memory[id(handler), memory]])
                own = format_path(tree.paths[number])
                raise TreeMismatchError(
                    f"{other} and {own} are one array in the target and two in {opened.location.display}: they cannot both be "
                    "filled; use load(), or a target in which they are apart. The target is as it was",
                    [f"{own}: tied to {other} in the target, not in the checkpoint"],
                )
        if not tree.aliases:
            units.append(
                _Unit(number, record, handler, abstract, [position], boxes, array, kind, at_workers=at_workers)
            )
            continue
        # Leaves that were tied are built once and tied again. What is filled in place is one only if its memory is.
        key = (original, id(handler), tuple(boxes), _request(handler if there is None else there, abstract), memory)
        if key in tied:
            tied[key].positions.append(position)
            continue
        tied[key] = _Unit(original, record, handler, abstract, [position], boxes, array, kind, at_workers=at_workers)
        units.append(tied[key])
    return units, leaves


def _other_form(opened: Opened, number: int, handler: LeafHandler, abstract: object) -> LeafRecord | None:
    """What is asked for, where that is a number of Python and an array without axes is stored, or the other way round; else None.

    A checkpoint of ours tells one from the other: it was not matched if this differs.
    """
    stored = opened.tree.leaves[number]
    if opened.root is not None or abstract is None or (isinstance(stored, ArrayRecord) and stored.spec.shape):
        return None
    asked = handler.describe(abstract)
    return asked if are_interchangeable(asked, stored) else None


def _request(handler: LeafHandler | Executor, abstract: object) -> object:
    """Equal for two abstract leaves only if one leaf can be built for both: placement and all else included."""
    if abstract is None:
        return None
    identity = handler.identity(abstract)
    if identity is not None:
        return identity
    try:
        hash(abstract)
    except TypeError:
        return id(abstract)
    return (type(abstract), abstract)


def _perform(
    opened: Opened, units: Sequence[_Unit], leaves: list[object], context: Context, filled: list[bool] | None
) -> None:
    """Read and build units into leaves; with `filled`, fill what can be filled in place and mark it."""
    for batch in _batches(units, context.memory.load_bytes):
        for unit in _read(opened, [unit for unit in batch if unit.at_workers is None], into=filled is not None):
            with _naming(opened.tree, unit.leaf):
                _finish(unit, leaves, filled)
        _fetch(opened, batch, leaves, context)


def _fetch(opened: Opened, units: Sequence[_Unit], leaves: list[object], context: Context) -> None:
    """Let workers read and make those of the units that are theirs."""
    wanted = [(unit, fetched) for unit in units if (fetched := unit.fetched) is not None]
    executor = context.workers() if wanted else None
    if executor is None:
        return
    check_sizes(opened, {unit.leaf for unit, _ in wanted})
    made = fetch_leaves(opened, executor, [fetched for _, fetched in wanted], context)
    for (unit, _), leaf in zip(wanted, made, strict=True):
        for position in unit.positions:
            leaves[position] = leaf


class _naming:  # a context manager, written as a class because it is entered for every leaf
    """Lets a handler's refusal say which leaf it refuses."""

    __slots__ = ("_leaf", "_tree")

    def __init__(self, tree: TreeMetadata, leaf: int) -> None:
        self._tree = tree
        self._leaf = leaf

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, UnsupportedLeafError):
            raise UnsupportedLeafError(f"{format_path(self._tree.paths[self._leaf])}: {error}") from error


def _finish(unit: _Unit, leaves: list[object], filled: list[bool] | None) -> None:
    boxes = list(zip(unit.boxes, unit.buffers, strict=True))
    unit.buffers = []
    if unit.kind is not None:
        ((_, array),) = boxes
        made = unit.handler.build(unit.abstract, value_of(array, unit.kind), ())
        for position in unit.positions:
            leaves[position] = made
        return
    if filled is not None and unit.handler.fill(unit.abstract, unit.record, boxes):
        for position in unit.positions:
            filled[position] = True
            leaves[position] = unit.abstract
        return
    made = unit.handler.build(unit.abstract, unit.record, boxes)
    for position in unit.positions:
        leaves[position] = made


def _batches(units: Sequence[_Unit], limit: int | None) -> Iterator[Sequence[_Unit]]:
    if limit is None:
        yield units
        return
    batch: list[_Unit] = []
    held = 0
    for unit in units:
        if batch and held + unit.nbytes > limit:
            yield batch
            batch, held = [], 0
        batch.append(unit)
        held += unit.nbytes
    yield batch


def _read(opened: Opened, units: Sequence[_Unit], *, into: bool) -> Iterator[_Unit]:
    """Fill the buffers of units; yields each as it is complete."""
    tree = opened.tree
    check_sizes(opened, {unit.leaf for unit in units})
    owners: list[_Unit] = []
    buffers: list[HostArray] = []
    for unit in units:
        if unit.number is not None:
            unit.buffers = [unit.number for _ in unit.boxes]  # an array without axes has one box at most
            yield unit
            continue
        dtype = unit.record.spec.dtype
        unit.buffers = []
        for box in unit.boxes:
            buffer = unit.handler.destination(unit.abstract, unit.record, box) if into else None
            if buffer is None:
                buffer = _allocate(opened, unit.leaf, ArraySpec(box.shape, dtype))
            elif not _fits(buffer, box, unit.record):
                raise PluginError(
                    f"{type(unit.handler).__name__}.destination gave memory of {buffer.dtype}{buffer.shape} for "
                    f"{unit.record.spec}; it must be of the stored dtype, of the box's shape, contiguous and writable"
                )
            unit.buffers.append(buffer)
            owners.append(unit)
            buffers.append(buffer)
        unit.waiting = len(unit.boxes)
        if not unit.boxes:
            yield unit
    plan = plan_read(tree, opened.state, [(unit.leaf, unit.boxes) for unit in units if unit.number is None])
    for number in opened.layout.read(plan, buffers, opened.store):
        unit = owners[number]
        unit.waiting -= 1
        if unit.waiting == 0:
            yield unit
    late = [unit for unit in units if unit.waiting > 0]
    if late:
        raise CorruptCheckpointError(
            f"the layout {opened.layout.name} did not read {format_path(tree.paths[late[0].leaf])} whole"
        )


def _allocate(opened: Opened, leaf: int, spec: ArraySpec) -> HostArray:
    """Memory for what a checkpoint states.

    Raises:
        MemoryError: for what ckptcore saved, and has compared with its objects.
        CorruptCheckpointError: for what other software did: a few hostile bytes may state any shape.
    """
    try:
        return allocate(spec)
    except MemoryError as error:
        if opened.root is not None:
            raise
        raise CorruptCheckpointError(
            f"{format_path(opened.tree.paths[leaf])} of {opened.location.display} is said to be {spec}, {spec.nbytes} bytes, and there "
            "is no memory for that; if it is as large, load a part of it, or where there is more memory, and else the checkpoint "
            "is damaged"
        ) from error


def _fits(buffer: HostArray, box: Box, record: ArrayRecord) -> bool:
    whole = buffer.shape == box.shape and buffer.dtype == record.spec.numpy_dtype
    return whole and buffer.flags.c_contiguous and buffer.flags.writeable


def check_sizes(opened: Opened, wanted: Collection[int]) -> None:
    """Refuse arrays that the objects cannot hold before memory is taken for them: a hostile root may state any shape.

    Args:
        opened: the checkpoint.
        wanted: numbers of leaves.

    Raises:
        CorruptCheckpointError: names the first such array.
    """
    if opened.root is None:
        return  # its layout has looked at its files itself
    sizes: dict[str, int] = {}
    taken: dict[str, int] = {}
    for leaf, key, start, stop in opened.layout.extents(opened.tree, opened.state):
        if leaf not in wanted:
            continue
        if key not in sizes:
            # What the object really has: it may be cut off, and a hostile root may state anything.
            sizes[key] = opened.location.store.size(key) if key in opened.objects else 0
        # No two arrays share bytes, so together they are no larger than the object either.
        taken[key] = taken.get(key, 0) + stop - start
        if max(stop, taken[key]) > sizes[key]:
            raise CorruptCheckpointError(
                f"{format_path(opened.tree.paths[leaf])} would end at byte {stop} of {key}, which has {sizes[key]} bytes",
                key=key, start=min(sizes[key], stop), stop=stop,
            )  # fmt: skip
