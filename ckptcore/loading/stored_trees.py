"""Stored trees: the tree of a checkpoint as an abstract tree, after transforms, or with selected leaves."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckptcore.builtin.host_leaves import abstract_of_stored
from ckptcore.context import Context
from ckptcore.distributions import import_name
from ckptcore.errors import CheckpointError, TreeMismatchError
from ckptcore.loading.reading import default_handlers
from ckptcore.model.metadata import UNREADABLE, ArrayRecord, LeafRecord, TreeMetadata, unreadable_error
from ckptcore.model.tree import (
    LEAF,
    Attribute,
    Key,
    Node,
    Skeleton,
    TreePath,
    are_indices,
    empty_nodes,
    format_path,
    leaf_count,
)
from ckptcore.opening.checkpoint import Checkpoint
from ckptcore.plugins import Plugins
from ckptcore.protocols import Transforms
from ckptcore.runtime import runtime_of
from ckptcore.tree.flattening import PLACEHOLDER, rebuild

if TYPE_CHECKING:
    from ckptcore.select import Selection


def abstract_tree(tree: TreeMetadata, registry: Plugins) -> Any:
    """Return a stored tree in standard Python containers, with `AbstractArray` for arrays, and small values.

    It has `PLACEHOLDER` for leaves that cannot be loaded.
    """
    return rebuild(tree.skeleton, _abstract_leaves_of(tree, registry))


def _abstract_leaves_of(tree: TreeMetadata, registry: Plugins) -> list[object]:
    """Return the leaves of `abstract_tree`. Tied leaves share one abstract leaf."""
    _, value_handler = default_handlers(registry)

    def leaf_of(record: LeafRecord) -> object:
        if isinstance(record, ArrayRecord):
            return abstract_of_stored(record)
        return PLACEHOLDER if record.kind == UNREADABLE else value_handler.build(None, record, ())

    leaves = list(map(leaf_of, tree.leaves))
    for number, original in tree.aliases.items():
        if tree.leaves[number] == tree.leaves[original]:
            leaves[number] = leaves[original]
    return leaves


def stored_in(checkpoint: Checkpoint, selection: Selection | None, context: Context) -> Callable[[TreePath], object]:
    """Return a function that looks up the stored abstract tree at a path, or returns None if no path matches.

    It returns `PLACEHOLDER` if the selection chooses nothing below the path. It raises UnsupportedLeafError, or
    CorruptCheckpointError, if a selected part of that tree cannot be loaded.
    """
    registry = runtime_of(context).registry
    find = stored_at(checkpoint.tree, registry, lambda: _unreadable_leaves(checkpoint, selection, context))
    if selection is None:
        return find
    tree = checkpoint.tree
    paths = [*tree.paths, *[path for path, _ in empty_nodes(tree.skeleton)]]
    chosen = [_plain(paths[number]) for number in chosen_leaves(checkpoint, selection, context)]
    tops = {path[:length] for path in chosen for length in range(len(path) + 1)}

    def find_chosen(path: TreePath) -> object:
        found = find(path)
        return PLACEHOLDER if found is not None and _plain(path) not in tops else found

    return find_chosen


def stored_at(
    tree: TreeMetadata, registry: Plugins, unreadable: Callable[[], Mapping[TreePath, CheckpointError]] = dict
) -> Callable[[TreePath], object]:
    """Return a function that looks up the abstract tree at a path of a tree; see `stored_in`.

    Args:
        tree: the tree.
        registry: its plugins build values.
        unreadable: returns the errors of leaves that cannot be loaded, by their paths.
    """
    whole = functools.cache(lambda: rebuild(tree.skeleton, _abstract_leaves_of(tree, registry), names_objects=True))
    errors = functools.cache(unreadable)

    def find(path: TreePath) -> object:
        found = whole()
        for key in path:
            if isinstance(found, list | tuple):
                found = dict(enumerate(found))
            if not isinstance(found, dict):
                return None
            found = found.get(key.name if isinstance(key, Attribute) else key)
        for leaf, error in errors().items():
            if leaf[: len(path)] == _plain(path):
                raise type(error)(
                    f"{format_path(leaf)} cannot be loaded, which is a part of the stored state at "
                    f"{format_path(path)}: {error}"
                ) from error
        return found

    return find


def _unreadable_leaves(
    checkpoint: Checkpoint, selection: Selection | None, context: Context
) -> dict[TreePath, CheckpointError]:
    """Return the errors of selected leaves that cannot be loaded, by their paths with names instead of attributes."""
    tree = checkpoint.tree
    errors = {number: error for number, record in enumerate(tree.leaves) if (error := unreadable_error(record))}
    if errors and selection is not None:
        chosen = chosen_leaves(checkpoint, selection, context)
        errors = {number: error for number, error in errors.items() if number in chosen}
    return {_plain(tree.paths[number]): error for number, error in errors.items()}


def _plain(path: TreePath) -> TreePath:
    return tuple([key.name if isinstance(key, Attribute) else key for key in path])


def files_instead(checkpoint: Checkpoint) -> TreeMismatchError:
    """Return the error for files where a tree is expected."""
    return TreeMismatchError(
        f"{checkpoint.location.display} has files of an object instead of a tree: use load_checkpointables with an "
        "object like the one that was saved, or load() without other arguments to get the files as bytes",
        ["files are stored, a tree is requested"],
    )


def transformed(checkpoint: Checkpoint, transforms: Transforms, context: Context) -> Checkpoint:
    """Apply transforms to a checkpoint. Returns the same checkpoint if there are none. Reads no array.

    Raises:
        TransformError: a transform does not match the stored tree.
        TreeMismatchError: files are stored.
    """
    if not transforms:
        return checkpoint
    if checkpoint.is_files:
        raise files_instead(checkpoint)
    apply_transforms: Any = import_name("apply_transforms", purpose="a load with transforms")
    changed: Checkpoint = apply_transforms(checkpoint, transforms, context)
    return changed


def chosen_leaves(checkpoint: Checkpoint, selection: Selection, context: Context) -> frozenset[int]:
    """Return the numbers of the selected leaves of a checkpoint. Reads nothing.

    A selection uses the names of the stored tree. A leaf that is derived from several stored leaves is selected if all
    of these are selected. A leaf that needs none, such as a constant or an array of an additional checkpoint, is always
    selected.

    Args:
        checkpoint: the checkpoint, which may be derived from the stored one.
        selection: the selection.
        context: its plugins describe the leaves.

    Returns:
        The numbers of leaves. Numbers above are those of containers without children, for `prune`.

    Raises:
        TypeError: `selection` is not a selection.
        TreeMismatchError: `selection` selects nothing, or names leaves that are not stored.
    """
    from ckptcore.select import Selection  # only selections need it

    if not isinstance(selection, Selection):
        raise TypeError(
            f"select={selection!r}: expected a selection of ckptcore.select, such as select.names('params') or "
            "~select.glob('opt_state')"
        )
    chosen = _chosen(checkpoint, selection, context)
    if not chosen and checkpoint.tree.leaves:
        raise TreeMismatchError(
            f"{checkpoint.location.display}: nothing is selected by {selection!r}. Correct the selection: "
            "metadata(location).abstract is the stored tree. Nothing was read",
            ["nothing is selected"],
        )
    return chosen


def _chosen(checkpoint: Checkpoint, selection: Selection, context: Context) -> frozenset[int]:
    from ckptcore.select import LeafTable  # only selections need it

    tree, derived = checkpoint.tree, checkpoint.derived
    empty = list(empty_nodes(tree.skeleton))
    if derived is None or derived.is_builtin:
        registry = runtime_of(context).registry

        def describe() -> list[object]:
            return [*_abstract_leaves_of(tree, registry), *[rebuild(node, ()) for _, node in empty]]

        return selection.leaves(LeafTable([*tree.paths, *[path for path, _ in empty]], describe))
    below = derived.sources[0]  # names refer to the loaded checkpoint, not to additional sources
    kept = _chosen(below, selection, context)
    count = len(tree.leaves)
    chosen = {leaf for leaf in range(count) if kept.issuperset(derived.stored((leaf,)).get(0, ()))}
    if empty:
        first = len(below.tree.leaves)
        stored = {path: first + number for number, (path, _) in enumerate(empty_nodes(below.tree.skeleton))}
        near = functools.cache(lambda: _Neighbours(tree.paths, chosen))  # only moved containers need it
        chosen |= {
            count + number
            for number, (path, _) in enumerate(empty)
            if (stored[path] in kept if path in stored else near().has_chosen(path))
        }
    return frozenset(chosen)


class _Neighbours:
    """Leaves near containers without children, which a transform moves together with these leaves."""

    def __init__(self, leaves: Sequence[TreePath], chosen: Collection[int]) -> None:
        self._all = {leaf[:depth] for leaf in leaves for depth in range(len(leaf))}
        self._chosen = {leaves[number][:depth] for number in chosen for depth in range(len(leaves[number]))}

    def has_chosen(self, path: TreePath) -> bool:
        """Return True if a leaf is chosen in the nearest container above a path that has leaves."""
        above = [path[:depth] for depth in reversed(range(len(path))) if path[:depth] in self._all]
        return not above or above[0] in self._chosen


def prune(skeleton: Skeleton, chosen: frozenset[int]) -> tuple[Skeleton, list[int | None]]:
    """Remove unselected leaves from a tree. In a list or tuple, a placeholder replaces each removed child.

    Containers of which nothing is selected are removed in the same way.

    Args:
        skeleton: the tree.
        chosen: as `chosen_leaves` returns it.

    Returns:
        The tree, and for each of its leaves the number of the stored leaf, or None for a placeholder.
    """
    walk = _Pruning(chosen, leaf_count(skeleton))
    pruned = walk.node(skeleton)
    return (LEAF, [None]) if pruned is None else (pruned, walk.numbers)


class _Pruning:
    def __init__(self, chosen: frozenset[int], leaves: int) -> None:
        self._chosen = chosen
        self._next = 0
        self._next_empty = leaves
        self.numbers: list[int | None] = []

    def node(self, skeleton: Skeleton) -> Skeleton | None:
        """Return the remaining part of a node; None if nothing remains."""
        if not isinstance(skeleton, Node):
            number = self._next
            self._next += 1
            if number not in self._chosen:
                return None
            self.numbers.append(number)
            return LEAF
        if not skeleton.children:
            self._next_empty += 1
            return skeleton if self._next_empty - 1 in self._chosen else None
        before = len(self.numbers)
        keys: list[Key] = []
        children: list[Skeleton] = []
        keeps_positions = _is_sequence(skeleton)
        found = False
        for key, child in zip(skeleton.keys, skeleton.children, strict=True):
            left = self.node(child)
            found = found or left is not None
            if left is None and keeps_positions:
                self.numbers.append(None)
                left = LEAF
            if left is not None:
                keys.append(key)
                children.append(left)
        if not found:
            del self.numbers[before:]
            return None
        return skeleton._replace(keys=tuple(keys), children=tuple(children))


def _is_sequence(node: Node) -> bool:
    """Return True if `ckptcore.tree.flattening.rebuild` builds a list or tuple of its children."""
    return node.kind in ("list", "tuple") or (node.kind == "object" and are_indices(node.keys))
