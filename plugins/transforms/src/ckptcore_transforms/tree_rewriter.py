"""`TreeRewriter`: a stored tree that transforms of this package change."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from ckptcore.commit.location import LocationLike
from ckptcore.errors import TransformError
from ckptcore.model.metadata import PLAIN_ARRAY, ArrayRecord, LeafRecord, TreeMetadata, ValueRecord
from ckptcore.model.tree import JSON, LEAF, Key, Node, NodeKind, Skeleton, TreePath, format_path
from ckptcore.protocols import DerivedArray, DerivedTree, TransformedTree
from ckptcore.tree.suggestions import NameSuggestions
from ckptcore_transforms.patterns import Fields, Template, path_text

_COMPUTED_KINDS: Final = (PLAIN_ARRAY, "numpy.scalar")
"""Kinds of arrays that transforms can compute with.

Arrays of other kinds have additional meaning, and can only be moved.
"""

_MAX_SHOWN: Final = 100
"""Maximum length of a name in an error, because names can be hostile."""


@dataclass(frozen=True, slots=True)
class ArrayLeaf:
    """An array.

    Attributes:
        array: the derived array.
        record: its record, with the same spec.
        held_by: see `TreeMetadata.held_by`; None for all processes.
    """

    array: DerivedArray
    record: ArrayRecord
    held_by: tuple[int, ...] | None = None

    @classmethod
    def of(cls, array: DerivedArray) -> ArrayLeaf:
        """Return the leaf of a computed array."""
        return cls(array, ArrayRecord(array.spec))


@dataclass(frozen=True, slots=True)
class ValueLeaf:
    """A leaf that is not an array: a value from the root, or one that a transform added.

    Attributes:
        record: the value.
        held_by: see `ArrayLeaf`.
        stored: number of the leaf in the loaded checkpoint; None if the value is not stored there.
    """

    record: ValueRecord
    held_by: tuple[int, ...] | None = None
    stored: int | None = None


Leaf: TypeAlias = ArrayLeaf | ValueLeaf


class NothingMatches(TransformError):  # used only in this package
    """A pattern matches no leaf."""


class TreeRewriter:
    """A tree that transforms change in place. Not thread-safe."""

    def __init__(self, derived: DerivedTree) -> None:
        """Start with a tree, possibly the result of other transforms."""
        self.source = derived.source
        """Opens other checkpoints, reads files of other software, and finds leaf handlers."""
        self._containers: dict[TreePath, Node] = {}
        self._empty: dict[TreePath, None] = {}
        self._sequence: dict[TreePath, int] = {}
        """Original order of leaves and empty containers."""
        self.leaves: dict[TreePath, Leaf] = _leaves_of(derived)
        """Leaves by path, in their order."""
        self._note_containers(derived.tree.skeleton, ())

    @classmethod
    def of(cls, tree: TransformedTree) -> TreeRewriter:
        """Return the tree itself if it is a TreeRewriter, or a new one."""
        return tree if isinstance(tree, cls) else cls(tree.finish())

    def _note_containers(self, node: Skeleton, path: TreePath) -> None:
        if not isinstance(node, Node):
            self._sequence[path] = len(self._sequence)
            return
        self._containers[path] = node
        if not node.children:
            self._sequence[path] = len(self._sequence)
            self._empty[path] = None
        for key, child in zip(node.keys, node.children, strict=True):
            self._note_containers(child, (*path, key))

    def open_other(self, location: LocationLike) -> Mapping[TreePath, Leaf]:
        """Return the leaves of another checkpoint, by path.

        Raises:
            CheckpointError: if it cannot be opened.
        """
        return _leaves_of(self.source.open(location))

    def read_config(self, key: str) -> Mapping[str, JSON]:
        """Return the JSON object in a file of other software next to the arrays.

        Raises:
            TransformError: if there is no such file.
            CorruptCheckpointError: if it is not a JSON object.
        """
        config = self.source.read_json(key)
        if config is None:
            raise TransformError(f"{key} is missing: this transform needs it in the directory of the arrays")
        return config

    def with_leaves(self, leaves: Mapping[TreePath, Leaf]) -> TreeRewriter:
        """Return a rewriter with other leaves, to search for arrays of another checkpoint."""
        other = copy.copy(self)
        other.leaves = dict(leaves)
        return other

    def find(self, template: Template) -> dict[TreePath, Fields]:
        """Return the leaves that match a pattern, with their fields.

        Raises:
            TransformError: if there are none; suggests similar names.
        """
        leaves = self.present(template)
        if not leaves:
            raise NothingMatches(f"{template} matches nothing; {_similar_names(template, self.leaves)}")
        return leaves

    def present(self, template: Template) -> dict[TreePath, Fields]:
        """Return the leaves that match a pattern, with their fields, possibly none."""
        return {path: fields for path in self.leaves if (fields := template.match(path)) is not None}

    def find_each(self, templates: Sequence[Template]) -> list[dict[TreePath, Fields]]:
        """Return the leaves that match each pattern, with their fields.

        Raises:
            TransformError: if a pattern has no matches. The type is NothingMatches if no pattern
                has any.
        """
        leaves = [self.present(template) for template in templates]
        for template, of_template in zip(templates, leaves, strict=True):
            if not of_template:
                kind = TransformError if any(leaves) else NothingMatches
                raise kind(f"{template} matches nothing; {_similar_names(template, self.leaves)}")
        return leaves

    def arrays(self, template: Template) -> Iterator[tuple[TreePath, Fields, DerivedArray]]:
        """Iterate over arrays that match a pattern, with their fields.

        Raises:
            TransformError: if there are none, or if another leaf matches.
        """
        for path, fields in self.find(template).items():
            yield path, fields, self.array(path)

    def array(self, path: TreePath) -> DerivedArray:
        """Return an array that a transform can compute with.

        Raises:
            TransformError: if the leaf is not an array, or if its kind has additional meaning.
        """
        leaf = self.leaves[path]
        if isinstance(leaf, ValueLeaf) or leaf.record.kind not in _COMPUTED_KINDS:
            raise TransformError(
                f"{format_path(path)} is not an array of numbers but a {leaf.record.kind}, "
                "which can only be moved or dropped"
            )
        return leaf.array

    def remove(self, template: Template) -> None:
        """Drop the leaves and the empty containers that match.

        Raises:
            TransformError: if nothing matches.
        """
        empty = [path for path in self._empty if template.match(path) is not None]
        for path in empty:
            del self._empty[path]
        for path in self.present(template) if empty else self.find(template):
            del self.leaves[path]

    def move(self, template: Template, to: Callable[[TreePath, Fields], TreePath]) -> None:
        """Rename the leaves and the empty containers that match.

        Raises:
            TransformError: if nothing matches, or if two leaves would have the same path.
        """
        empty = {path: to(path, fields) for path in self._empty if (fields := template.match(path)) is not None}
        matched = self.present(template) if empty else self.find(template)
        moved = {path: to(path, fields) for path, fields in matched.items()}
        self._empty = {empty.get(path, path): None for path in self._empty}
        both = {**moved, **empty}
        for path, new in both.items():
            self._move_containers(path, new)
        self._sequence.update({new: self._sequence[path] for path, new in both.items() if path in self._sequence})
        self.replace({path: {new: self.leaves[path]} for path, new in moved.items()})

    def _move_containers(self, path: TreePath, new: TreePath) -> None:
        """Keep the kinds and attributes of containers on a moved path, as far as both paths end with the same keys."""
        for length in range(len(path) + 1):
            if length and (length > len(new) or path[-length] != new[-length]):
                return
            node = self._containers.get(path[: len(path) - length])
            if node is not None:
                self._containers.setdefault(new[: len(new) - length], node)

    def replace(self, replacements: Mapping[TreePath, Mapping[TreePath, Leaf]]) -> None:
        """Replace leaves.

        Args:
            replacements: new leaves by old path; empty to drop the old leaf.

        Raises:
            TransformError: if two leaves would have the same path.
        """
        leaves: dict[TreePath, Leaf] = {}
        known = self._known_keys()
        for path, leaf in self.leaves.items():
            for new, put in replacements.get(path, {path: leaf}).items():
                own = new if path not in replacements else _with_known_keys(new, known)
                if own in leaves:
                    raise TransformError(
                        f"two leaves would have the path {format_path(own)}; drop or rename one of them first"
                    )
                leaves[own] = _with_framework_of(leaf, put)
        self.leaves = leaves

    def _known_keys(self) -> Mapping[TreePath, Mapping[str, Key]]:
        """Return the existing keys that are not text, such as integers, by container and by the key as text."""
        known: dict[TreePath, dict[str, Key]] = {}
        for path in self.leaves:
            for depth, key in enumerate(path):
                if not isinstance(key, str):
                    known.setdefault(path[:depth], {})[str(key)] = key
        return known

    def add(self, path: TreePath, leaf: Leaf) -> bool:
        """Add a leaf. Return False if its path exists, compared as text."""
        text = path_text(path)
        if any(path_text(own) == text for own in self.leaves):
            return False
        self.leaves[_with_known_keys(path, self._known_keys())] = leaf
        return True

    def finish(self) -> DerivedTree:
        """Return the changed tree. See `TransformedTree`.

        Raises:
            TransformError: if a leaf is also a container.
        """
        order: list[TreePath] = []
        skeleton = self._skeleton(order)
        leaves = [self.leaves[path] for path in order]
        records: list[LeafRecord] = [leaf.record for leaf in leaves]
        arrays: dict[int, DerivedArray] = {}
        aliases: dict[int, int] = {}
        first: dict[DerivedArray, int] = {}
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, ArrayLeaf):
                original = first.setdefault(leaf.array, number)
                if original == number:
                    arrays[number] = leaf.array
                else:
                    aliases[number] = original  # keep tied leaves tied
        held_by = {number: leaf.held_by for number, leaf in enumerate(leaves) if leaf.held_by is not None}
        values = {
            number: leaf.stored
            for number, leaf in enumerate(leaves)
            if isinstance(leaf, ValueLeaf) and leaf.stored is not None
        }
        return DerivedTree(TreeMetadata(skeleton, tuple(records), aliases, held_by), arrays, values, self.source)

    def _skeleton(self, order: list[TreePath]) -> Skeleton:
        """Build the containers, and append the paths of the leaves to `order`, in their new order."""
        if list(self.leaves) == [()]:
            order.append(())
            return LEAF
        if () in self.leaves:
            raise _leaf_and_container((), next(path for path in self.leaves if path))
        root = _Branch({})
        for path in self._paths():
            branch = root
            is_leaf = path in self.leaves
            for depth, key in enumerate(path[:-1] if is_leaf else path):
                below = branch.children.setdefault(key, _Branch({}))
                if below is None:
                    raise _leaf_and_container(path[: depth + 1], path)
                branch = below
            if is_leaf and branch.children.setdefault(path[-1], None) is not None:
                raise _leaf_and_container(path, path)
        return self._node(root, (), order)

    def _paths(self) -> Iterator[TreePath]:
        """Iterate over leaves and empty containers in their original order."""
        empty = deque(sorted(self._empty, key=lambda path: self._sequence[path]))
        for path in self.leaves:
            while empty and path in self._sequence and self._sequence[empty[0]] < self._sequence[path]:
                yield empty.popleft()
            yield path
        yield from empty

    def _node(self, branch: _Branch, path: TreePath, order: list[TreePath]) -> Node:
        known = self._containers.get(path)
        kind, note, attributes = (None, None, None) if known is None else (known.kind, known.type, known.attributes)
        keys = list(branch.children)
        numbers = {key for key in keys if type(key) is int}
        # A list or tuple becomes a dict if numbers are missing. A new container of all numbers from 0 becomes a list.
        is_sequence = len(numbers) == len(keys) and numbers == set(range(len(keys)))
        if kind in ("list", "tuple") or (kind is None and keys):
            now: NodeKind = (kind or "list") if is_sequence else "dict"
            kind, note = now, note if now == kind else None
        if kind in ("list", "tuple"):
            keys = list(range(len(keys)))
        children: list[Skeleton] = []
        for key in keys:
            below = branch.children[key]
            if below is None:
                order.append((*path, key))
            children.append(LEAF if below is None else self._node(below, (*path, key), order))
        return Node(kind or "dict", tuple(keys), tuple(children), note, attributes)


def _with_framework_of(old: Leaf, new: Leaf) -> Leaf:
    """Return a computed array with the framework of the leaf that it replaces."""
    if not isinstance(old, ArrayLeaf) or not isinstance(new, ArrayLeaf) or old.record.framework is None:
        return new
    if new.record.notes:
        return new
    return replace(new, record=new.record._replace(notes={"framework": old.record.framework}))


@dataclass(frozen=True, slots=True)
class _Branch:
    """The children of a container by key. A child that is None is a leaf."""

    children: dict[Key, _Branch | None]


def _leaves_of(derived: DerivedTree) -> dict[TreePath, Leaf]:
    """Return the leaves of a tree, by path."""
    tree, leaves = derived.tree, dict[TreePath, Leaf]()
    for number, path in enumerate(tree.paths):
        record, held_by = tree.leaves[number], tree.held_by.get(number)
        if isinstance(record, ValueRecord):
            leaves[path] = ValueLeaf(record, held_by, derived.values.get(number))
        else:
            leaves[path] = ArrayLeaf(derived.arrays[tree.aliases.get(number, number)], record, held_by)
    return leaves


def _with_known_keys(path: TreePath, known: Mapping[TreePath, Mapping[str, Key]]) -> TreePath:
    """Replace text keys of a path by existing keys with the same text."""
    keys: list[Key] = []
    for key in path:
        keys.append(known.get(tuple(keys), {}).get(key, key) if isinstance(key, str) else key)
    return tuple(keys)


def _leaf_and_container(above: TreePath, path: TreePath) -> TransformError:
    return TransformError(
        f"{format_path(above)} would be both a leaf and a container of {format_path(path)}; rename one of them"
    )


def _similar_names(template: Template, paths: Mapping[TreePath, Leaf]) -> str:
    """Return a hint with existing names similar to a pattern."""
    texts = [path_text(path) for path in paths]
    near = NameSuggestions(texts).nearest(str(template.pattern))
    shown = [near] if near is not None else [text[:_MAX_SHOWN] for text in texts[:3]]
    return (
        f"the tree has {len(paths)} leaves, such as {', '.join(map(repr, shown))}"
        if shown
        else "the tree has no leaves"
    )
