"""Shapes of flattened values: their containers and objects.

A load uses them to build a similar value or to restore the value in place.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final, TypeAlias, cast

from ckptcore.errors import CheckpointError
from ckptcore.model.tree import Attribute, Key, TreePath, format_path
from ckptcore.protocols import CheckpointableHandler, ContainerHandler
from ckptcore.records import NamedTuple


class Container(NamedTuple):
    """A container in a flattened value: itself, its handler, its children, and the leaves below it. See `Shape`."""

    like: object
    handler: ContainerHandler
    keys: tuple[Key, ...]
    children: tuple[Shape, ...]
    leaves: int
    order: tuple[int, ...] | None


class ObjectNode(NamedTuple):
    """An object in a flattened value: itself, its handler, its state, and the leaves below it. See `Shape`."""

    like: object
    handler: CheckpointableHandler
    state: Shape
    leaves: int
    may_refuse: bool


class NewContainer(NamedTuple):
    """A container that a load builds, because the stored container has another structure. It contains no objects.

    Attributes:
        content: the container to build.
        own: a list or dict of the value that receives the content; None: replace the container of the value.
        leaves: the number of leaves in it.
    """

    content: Container
    own: Any
    leaves: int


Shape: TypeAlias = Container | NewContainer | ObjectNode | None
"""A node of a flattened value: a container, a checkpointable with its state, or None for a leaf.

``leaves`` is the number of leaves below a node. ``order`` has the positions of the children that are not leaves, in the
order of visits; None if that is the order of the keys. See `_visiting_order`.
"""


def rank_of_key(key: Key) -> tuple[int, int, str, tuple[Any, ...]]:
    """Return a sort key for keys of all types: first numbers, then text, then tuples."""
    if isinstance(key, int):
        return 0, key, "", ()
    if isinstance(key, tuple):
        return 2, 0, "", tuple(map(rank_of_key, key))
    return 1, 0, key.name if isinstance(key, Attribute) else key, ()


def unflatten(shape: Shape, leaves: Sequence[object]) -> object:
    """Build a value with exactly the types and static content of the flattened value, but with other leaves."""
    return _unflatten(shape, iter(leaves), lambda node, state: node.handler.unflatten(node.like, state), {})


def unflatten_states(shape: Shape, leaves: Sequence[object]) -> object:
    """Build a value like `unflatten`, but with the states of objects in place of the objects."""
    return _unflatten(shape, iter(leaves), _state_of_object, {})


def _state_of_object(node: ObjectNode, state: object) -> object:
    return state if node.handler.is_object else node.handler.unflatten(node.like, state)


def _unflatten(
    shape: Shape,
    leaves: Iterator[object],
    of_state: Callable[[ObjectNode, object], object],
    made: dict[int, object],
) -> object:
    """Build a node. `made` maps the ids of flattened containers to new ones, so that a shared one stays so."""
    if shape is None:
        return next(leaves)
    if isinstance(shape, ObjectNode):
        return of_state(shape, _unflatten(shape.state, leaves, of_state, made))
    if isinstance(shape, NewContainer):
        shape = shape.content
    children = _in_order(shape, leaves, lambda child, below: _unflatten(child, below, of_state, made))
    if not shape.handler.keeps_identity(shape.like):
        return shape.handler.unflatten(shape.like, children)
    if id(shape.like) not in made:
        made[id(shape.like)] = shape.handler.unflatten(shape.like, children)
    return made[id(shape.like)]


def _in_order(
    shape: Container, leaves: Iterator[object], make: Callable[[Shape, Iterator[object]], object]
) -> list[object]:
    """Return the children of a container, in the order of its keys. `make` is called in the visiting order."""
    if shape.order is None:
        return [next(leaves) if child is None else make(child, leaves) for child in shape.children]
    children = [
        next(leaves) if child is None else list(itertools.islice(leaves, child.leaves)) for child in shape.children
    ]
    for position in shape.order:
        below = cast("list[object]", children[position])
        children[position] = make(shape.children[position], iter(below))
    return children


class Part(NamedTuple):
    """A container or an object in a value.

    Attributes:
        path: its path.
        like: the container or the object.
        leaves: the positions of its leaves.
        is_object: True for a module or another object that is restored as a whole.
    """

    path: TreePath
    like: object
    leaves: range
    is_object: bool


class LiveObject(NamedTuple):
    """An object in a value.

    Attributes:
        path: its path.
        node: the object with its state.
        leaves: the positions of the leaves of its state.
    """

    path: TreePath
    node: ObjectNode
    leaves: range

    @property
    def name(self) -> str:
        """Its path and type, for messages."""
        return f"{format_path(self.path)}, a {type(self.node.like).__qualname__}"

    def undo(self) -> Callable[[], None] | None:
        """Return a function that puts the present state back; None if a handler has none. See `CheckpointableHandler`.

        The function also puts back the objects in the state, because a restore changes them too.
        """
        nodes = [self.node, *[inner.node for inner in _inner_objects(self.node.state)]]
        functions = [node.handler.undo(node.like) for node in nodes]

        def undo() -> None:
            for function in functions:
                if function is not None:
                    function()

        return None if None in functions else undo

    def restore(self, leaves: Sequence[object]) -> None:
        """Restore the objects in the state, then the object itself. `leaves` are the leaves of the whole value."""
        state = _unflatten(self.node.state, iter([leaves[position] for position in self.leaves]), _restored, {})
        self.node.handler.restore(self.node.like, state)


def _restored(node: ObjectNode, state: object) -> object:
    """Restore an object in the state of another object, and return it. If `is_object` is False, build a new value."""
    if not node.handler.is_object:
        return node.handler.unflatten(node.like, state)
    node.handler.restore(node.like, state)
    return node.like


def objects_that_may_refuse(shape: Shape) -> Sequence[LiveObject]:
    """Return the objects in a value that may refuse a loaded state, in the order of visits. See `_visiting_order`."""
    return [live for live in objects_in(shape) if live.node.may_refuse]


def objects_in(shape: Shape) -> Sequence[LiveObject]:
    """Return the outermost objects in a value, in the order of visits.

    The order is the same on every process of a job, because `load_state_dict` may be collective.
    """
    return sorted(_find_objects(shape), key=lambda live: [rank_of_key(key) for key in live.path])


def _find_objects(shape: Shape, path: TreePath = (), start: int = 0) -> Iterator[LiveObject]:
    if isinstance(shape, ObjectNode):
        yield LiveObject(path, shape, range(start, start + shape.leaves))
    elif isinstance(shape, Container):
        for key, child in zip(shape.keys, shape.children, strict=True):
            if child is not None:
                yield from _find_objects(child, (*path, key), start)
            start += 1 if child is None else child.leaves


def outer_objects(shape: Shape) -> Iterator[tuple[TreePath, object, range]]:
    """Yield the outermost modules and other objects in a value, with their paths and leaves."""
    for part in outer_parts(shape):
        if part.is_object:
            yield part.path, part.like, part.leaves


def outer_parts(shape: Shape, path: TreePath = (), start: int = 0) -> Iterator[Part]:
    """Yield the containers and objects in a value, outer before inner. Does not enter objects.

    Args:
        shape: the shape of the value.
        path, start: the path of the value in a larger value, and the position of its first leaf there.
    """
    if not isinstance(shape, ObjectNode | Container):
        return
    is_object = shape.handler.is_object if isinstance(shape, ObjectNode) else shape.handler.is_object(shape.like)
    yield Part(path, shape.like, range(start, start + shape.leaves), is_object)
    if isinstance(shape, Container) and not is_object:
        for key, child in zip(shape.keys, shape.children, strict=True):
            if child is not None:
                yield from outer_parts(child, (*path, key), start)
            start += 1 if child is None else child.leaves


def lacks_object_at(shape: Shape, path: TreePath) -> bool:
    """Return True if a path is inside the state of an object in a value, and the path itself has no object."""
    inside = False
    for key in path:
        while isinstance(shape, ObjectNode):
            inside, shape = True, shape.state
        if not isinstance(shape, Container) or key not in shape.keys:
            return inside
        shape = shape.children[shape.keys.index(key)]
    return inside and not isinstance(shape, ObjectNode)


def _inner_objects(state: Shape) -> Iterator[LiveObject]:
    """Yield the objects in the state of another object, at any depth."""
    for inner in _find_objects(state):
        if inner.node.handler.is_object:
            yield inner
            yield from _inner_objects(inner.node.state)


def holds_refusing(shape: Shape) -> bool:
    """Return True if an object in the state of another object may refuse its own state."""
    return any(True for inner in _find_objects(shape) if inner.node.may_refuse)


def restore(
    shape: Shape,
    leaves: Sequence[object],
    filled: Sequence[bool],
    paths: Sequence[TreePath],
    untouched: Collection[TreePath] = (),
) -> None:
    """Put new leaves into the flattened value, in place. The caller has restored objects that may refuse a state.

    Args:
        shape: the shape of the value.
        leaves: the new leaves.
        filled: for each leaf, True if it stays, because it was filled in place or is not loaded.
        paths: the paths of the leaves, for errors.
        untouched: the paths of objects that stay as they are.

    Raises:
        CheckpointError: names a leaf that can be replaced neither in place nor in its container.
    """
    fixed = first_fixed(shape, [not done for done in filled])
    if fixed is not None:
        raise CheckpointError(
            f"{format_path(paths[fixed])} can be changed neither in place nor in its container; use load() and keep "
            "its result"
        )
    _restore(shape, leaves, filled, iter(range(len(leaves))))
    for live in objects_in(shape):
        if not live.node.may_refuse and not _is_replaced(live.node) and live.path not in untouched:
            live.restore(leaves)


def first_fixed(shape: Shape, changed: Sequence[bool]) -> int | None:
    """Return the first leaf that must be replaced, but cannot be replaced in its containers; None if there is none.

    Args:
        shape: the shape of the value.
        changed: for each leaf, True if it must be replaced.
    """
    return _first_fixed(shape, changed, iter(range(len(changed))), live=True)


def _first_fixed(shape: Shape, changed: Sequence[bool], position: Iterator[int], *, live: bool) -> int | None:
    if shape is None:
        number = next(position)
        return number if changed[number] else None
    if isinstance(shape, ObjectNode):
        if not _is_replaced(shape):
            _skip(shape, position)
            return None
        numbers = list(itertools.islice(position, shape.leaves))
        return next((number for number in numbers if changed[number]), None)
    if isinstance(shape, NewContainer):
        numbers = list(itertools.islice(position, shape.leaves))
        return numbers[0] if numbers and shape.own is None else None
    replaceable = _replaceable(shape) if live else ()
    if len(replaceable) == len(shape.children):
        _skip(shape, position)
        return None
    live = live and _children_are_live(shape)
    for number, child in enumerate(shape.children):
        if number in replaceable:
            _skip(child, position)
            continue
        fixed = _first_fixed(child, changed, position, live=live)
        if fixed is not None:
            return fixed
    return None


def _is_replaced(node: ObjectNode) -> bool:
    """Return True for a value that cannot be restored in place, such as a sparse tensor on a meta device."""
    return not node.handler.is_object and not node.handler.has_memory(node.like)


def _children_are_live(shape: Container) -> bool:
    """Return True if a container returns the same children each time; False if it builds new children."""
    again = shape.handler.flatten(shape.like).children
    return all(now is _like_of(child, now) for now, child in zip(again, shape.children, strict=True))


def _like_of(shape: Shape, other: object) -> object:
    """Return the value of a node; `other` for a leaf and for a container that is replaced."""
    if isinstance(shape, NewContainer):
        return other if shape.own is None else shape.own
    return other if shape is None else shape.like


def _replaceable(shape: Container) -> Collection[int]:
    """Return the positions of the children that can be replaced in the container itself."""
    return shape.handler.replaceable(shape.like)


def shared_containers(shape: Shape, is_shared: Callable[[Container], object]) -> Sequence[tuple[range, range]]:
    """Find containers that are at several paths of a value. Return pairs of leaf ranges.

    The first range of a pair is below the first path of a container. The second range is below another path.

    Args:
        shape: the shape of the value.
        is_shared: chooses the containers to return.
    """
    pairs: list[tuple[range, range]] = []
    _find_shared(shape, 0, {}, pairs, is_shared)
    return pairs


def _find_shared(
    shape: Shape,
    start: int,
    firsts: dict[int, range],
    pairs: list[tuple[range, range]],
    is_shared: Callable[[Container], object],
) -> int:
    """Add the shared containers of a node whose leaves start at `start`. Return the end of its leaves."""
    if shape is None:
        return start + 1
    if isinstance(shape, ObjectNode):
        # Ignore shared containers in a state, because the object builds a new state each time.
        return _find_shared(shape.state, start, {}, [], is_shared)
    if isinstance(shape, NewContainer):
        return start + shape.leaves
    stop = start
    for child in shape.children:
        stop = stop + 1 if child is None else _find_shared(child, stop, firsts, pairs, is_shared)
    first = firsts.setdefault(id(shape.like), range(start, stop))
    if first.start != start and is_shared(shape):
        pairs.append((first, range(start, stop)))
    return stop


def _skip(shape: Shape, position: Iterator[int]) -> None:
    """Advance past the leaves of a node."""
    deque(itertools.islice(position, 1 if shape is None else shape.leaves), maxlen=0)


class _Unreplaced:
    __slots__ = ()


_KEPT: Final = _Unreplaced()
_CHANGED: Final = _Unreplaced()


def _restore(
    shape: Shape,
    leaves: Sequence[object],
    filled: Sequence[bool],
    position: Iterator[int],
) -> object:
    """Return the new value of a node for its container; `_KEPT` or `_CHANGED` if the node itself remains."""
    if shape is None:
        number = next(position)
        return _KEPT if filled[number] else leaves[number]
    if isinstance(shape, ObjectNode):
        if not _is_replaced(shape):
            _skip(shape, position)
            return _KEPT
        numbers = list(itertools.islice(position, shape.leaves))
        if all(filled[number] for number in numbers):  # no leaf of the value is loaded
            return _KEPT
        return unflatten(shape, [leaves[number] for number in numbers])
    if isinstance(shape, NewContainer):
        children: list[object] = []
        for child in shape.content.children:
            if child is None:
                children.append(leaves[next(position)])
                continue
            new = _restore(child, leaves, filled, position)
            children.append(_like_of(child, None) if new is _KEPT or new is _CHANGED else new)
        built: Any = shape.content.handler.unflatten(shape.content.like, children)
        if isinstance(shape.own, list):
            shape.own[:] = built
        elif shape.own is not None:
            shape.own.clear()
            shape.own.update(built)
        return built if shape.own is None else _CHANGED
    replaced = [_restore(child, leaves, filled, position) for child in shape.children]
    if all(child is _KEPT for child in replaced):
        return _KEPT
    others = {number: child for number, child in enumerate(replaced) if child is not _KEPT and child is not _CHANGED}
    if len(others) < len(replaced) and any(child is _CHANGED for child in replaced) and not _children_are_live(shape):
        # The container builds new children each time, so the changed children must be put into it.
        changed = [number for number, child in enumerate(replaced) if child is _CHANGED]
        others.update({number: _like_of(shape.children[number], None) for number in changed})
    replaceable = _replaceable(shape) if others else ()
    if all(number in replaceable for number in others):
        if others:
            shape.handler.replace(shape.like, others)
        return _CHANGED
    merged = list(shape.handler.flatten(shape.like).children)
    for number, new in others.items():
        merged[number] = new
    return shape.handler.unflatten(shape.like, merged)
