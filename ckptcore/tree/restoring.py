"""Restore a flattened value: put loaded leaves into its containers and objects, in place."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final

from ckptcore.errors import CheckpointError
from ckptcore.model.tree import TreePath, format_path
from ckptcore.tree.shapes import Container, NewContainer, ObjectNode, Shape, objects_in, unflatten


def restore(
    shape: Shape,
    leaves: Sequence[object],
    filled: Sequence[bool],
    paths: Sequence[TreePath],
    untouched: Collection[TreePath] = (),
) -> None:
    """Store other leaves in the flattened value, in place. Objects that may refuse a state were restored before.

    Args:
        shape: the shape of the value.
        leaves: the new leaves.
        filled: for each leaf, True if it was filled in place and stays.
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
    """Return the first leaf to replace that no container above it can replace; None if all can be replaced.

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
    """Return True if a container returns its children themselves, and does not build new ones each time."""
    again = shape.handler.flatten(shape.like).children
    return all(now is _like_of(child, now) for now, child in zip(again, shape.children, strict=True))


def _like_of(shape: Shape, other: object) -> object:
    """Return the value of a node; `other` for a leaf, and for a container that is replaced."""
    if isinstance(shape, NewContainer):
        return other if shape.own is None else shape.own
    return other if shape is None else shape.like


def _replaceable(shape: Container) -> Collection[int]:
    """Return the positions of the children that can be replaced in the container itself."""
    return shape.handler.replaceable(shape.like)


def shared_containers(shape: Shape, is_shared: Callable[[Container], object]) -> Sequence[tuple[range, range]]:
    """Find containers that are at several paths of a value. Return pairs of leaf ranges.

    A pair has the leaves below the first path of a container, and the leaves below a further path.

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
        return _find_shared(shape.state, start, {}, [], is_shared)  # the object builds a new state each time
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
        if all(filled[number] for number in numbers):  # nothing of it is stored
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
        # The container does not have the changed children, but builds new ones each time.
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
