"""TreeRewriter: a stored tree while the transforms of this package change it."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from ckptcore.commit.location import LocationLike
from ckptcore.errors import TransformError
from ckptcore.model.metadata import PLAIN_ARRAY, ArrayRecord, LeafRecord, TreeMetadata, ValueRecord
from ckptcore.model.tree import JSON, LEAF, Key, Node, NodeKind, Skeleton, TreePath, format_path
from ckptcore.protocols import DerivedArray, DerivedTree, TransformedTree
from ckptcore.tree.suggestions import NearNames
from ckptcore_transforms.patterns import Fields, Template, path_text

__all__ = ["ArrayLeaf", "Leaf", "NothingMatches", "TreeRewriter", "ValueLeaf"]

_COMPUTED_KINDS: Final = (PLAIN_ARRAY, "numpy.scalar")
"""Arrays of other kinds mean more than their elements, and are only moved."""

_SHOWN: Final = 100
"""How many characters of a name an error shows: it may be hostile."""


@dataclass(frozen=True, slots=True)
class ArrayLeaf:
    """An array.

    Attributes:
        array: how it is made.
        record: what is said of it; of the same spec.
        held_by: see `TreeMetadata.held_by`; None where every process held it.
    """

    array: DerivedArray
    record: ArrayRecord
    held_by: tuple[int, ...] | None = None

    @classmethod
    def of(cls, array: DerivedArray) -> ArrayLeaf:
        """One that was computed."""
        return cls(array, ArrayRecord(array.spec))


@dataclass(frozen=True, slots=True)
class ValueLeaf:
    """A leaf that lives in the root.

    Attributes:
        record: the value.
        held_by: as of a `ArrayLeaf`.
        stored: the number of the leaf that it is in the checkpoint that is loaded; None where it is of none.
    """

    record: ValueRecord
    held_by: tuple[int, ...] | None = None
    stored: int | None = None


Leaf: TypeAlias = ArrayLeaf | ValueLeaf


class NothingMatches(TransformError):  # told apart here only
    """A pattern matches no leaf."""


class TreeRewriter:
    """A tree whose leaves and arrays transforms change in place. One thread."""

    def __init__(self, derived: DerivedTree) -> None:
        """Begin with a tree as other transforms, or none, have made it."""
        self.source = derived.source
        """Further checkpoints, files and handlers."""
        self._containers: dict[TreePath, tuple[NodeKind, str | None]] = {}
        self._empty: dict[TreePath, None] = {}
        self._sequence: dict[TreePath, int] = {}
        """The order of leaves and empty containers at the beginning, as far as it is known."""
        self.leaves: dict[TreePath, Leaf] = _leaves_of(derived)
        """By path; the order means nothing but which came first."""
        self._note_containers(derived.tree.skeleton, ())

    @classmethod
    def of(cls, tree: TransformedTree) -> TreeRewriter:
        """Return the tree itself if it can be changed in place, and one that begins with it otherwise."""
        return tree if isinstance(tree, cls) else cls(tree.finish())

    def _note_containers(self, node: Skeleton, path: TreePath) -> None:
        if not isinstance(node, Node):
            self._sequence[path] = len(self._sequence)
            return
        self._containers[path] = (node.kind, node.type)
        if not node.children:
            self._sequence[path] = len(self._sequence)
            self._empty[path] = None
        for key, child in zip(node.keys, node.children, strict=True):
            self._note_containers(child, (*path, key))

    def open_beside(self, location: LocationLike) -> Mapping[TreePath, Leaf]:
        """The leaves of a further checkpoint, by path.

        Raises:
            What opening it does.
        """
        return _leaves_of(self.source.open(location))

    def config_beside(self, key: str) -> Mapping[str, JSON]:
        """The JSON object in a file that other software wrote beside its arrays.

        Raises:
            TransformError: if there is no such file.
            CorruptCheckpointError: if there is no JSON object in it.
        """
        config = self.source.read_json(key)
        if config is None:
            raise TransformError(f"there is no {key} beside the arrays")
        return config

    def with_leaves(self, leaves: Mapping[TreePath, Leaf]) -> TreeRewriter:
        """A rewriter of other leaves, to find arrays in that this one is put together with."""
        other = copy.copy(self)
        other.leaves = dict(leaves)
        return other

    def find(self, template: Template) -> dict[TreePath, Fields]:
        """The leaves that a pattern matches, with its fields.

        Raises:
            TransformError: if there are none; names the nearest.
        """
        found = self.present(template)
        if not found:
            raise NothingMatches(f"{template} matches nothing; {_nearest(template, self.leaves)}")
        return found

    def present(self, template: Template) -> dict[TreePath, Fields]:
        """The leaves that a pattern matches, with its fields; there may be none."""
        return {path: fields for path in self.leaves if (fields := template.match(path)) is not None}

    def find_each(self, templates: Sequence[Template]) -> list[dict[TreePath, Fields]]:
        """By pattern, the leaves that it matches, with its fields.

        Raises:
            TransformError: if one of them has none. Where no pattern has any, nothing is there for the transform.
        """
        found = [self.present(template) for template in templates]
        for template, of_template in zip(templates, found, strict=True):
            if not of_template:
                kind = TransformError if any(found) else NothingMatches
                raise kind(f"{template} matches nothing; {_nearest(template, self.leaves)}")
        return found

    def arrays(self, template: Template) -> Iterator[tuple[TreePath, Fields, DerivedArray]]:
        """The arrays that a pattern matches, with its fields, to be computed with.

        Raises:
            TransformError: if there are none, or something else matches.
        """
        for path, fields in self.find(template).items():
            yield path, fields, self.array(path)

    def array(self, path: TreePath) -> DerivedArray:
        """An array, to be computed with.

        Raises:
            TransformError: if it is none, or one that means more than its elements.
        """
        leaf = self.leaves[path]
        if isinstance(leaf, ValueLeaf) or leaf.record.kind not in _COMPUTED_KINDS:
            raise TransformError(
                f"{format_path(path)} is no array of numbers but a {leaf.record.kind}, which can only be moved or dropped"
            )
        return leaf.array

    def remove(self, template: Template) -> None:
        """Drop what a pattern matches, also containers without leaves.

        Raises:
            TransformError: if there is nothing.
        """
        empty = [path for path in self._empty if template.match(path) is not None]
        for path in empty:
            del self._empty[path]
        for path in self.present(template) if empty else self.find(template):
            del self.leaves[path]

    def move(self, template: Template, to: Callable[[TreePath, Fields], TreePath]) -> None:
        """Give what a pattern matches other paths, also containers without leaves.

        Raises:
            TransformError: if there is nothing, or two leaves would have one path.
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
        """Let containers be what they were, as far as the ends of two paths are equal."""
        for length in range(len(path) + 1):
            if length and (length > len(new) or path[-length] != new[-length]):
                return
            kind = self._containers.get(path[: len(path) - length])
            if kind is not None:
                self._containers.setdefault(new[: len(new) - length], kind)

    def replace(self, made: Mapping[TreePath, Mapping[TreePath, Leaf]]) -> None:
        """Put leaves in the places of others.

        Args:
            made: by path what is there instead; where that is nothing, it is taken away.

        Raises:
            TransformError: if two leaves would have one path.
        """
        leaves: dict[TreePath, Leaf] = {}
        known = self._known_keys()
        for path, leaf in self.leaves.items():
            for new, put in made.get(path, {path: leaf}).items():
                own = new if path not in made else _with_known_keys(new, known)
                if own in leaves:
                    raise TransformError(
                        f"two leaves would be at {format_path(own)}; drop or rename one of them before"
                    )
                leaves[own] = put
        self.leaves = leaves

    def _known_keys(self) -> Mapping[TreePath, Mapping[str, Key]]:
        """By container the keys in it that are no text, by their text."""
        known: dict[TreePath, dict[str, Key]] = {}
        for path in self.leaves:
            for depth, key in enumerate(path):
                if not isinstance(key, str):
                    known.setdefault(path[:depth], {})[str(key)] = key
        return known

    def add(self, path: TreePath, leaf: Leaf) -> bool:
        """Add a leaf; False where one is at this path, by its text."""
        text = path_text(path)
        if any(path_text(own) == text for own in self.leaves):
            return False
        self.leaves[_with_known_keys(path, self._known_keys())] = leaf
        return True

    def finish(self) -> DerivedTree:
        """See `TransformedTree`.

        Raises:
            TransformError: if a leaf would have others below it.
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
                    aliases[number] = original  # what was tied is tied
        held_by = {number: leaf.held_by for number, leaf in enumerate(leaves) if leaf.held_by is not None}
        values = {
            number: leaf.stored
            for number, leaf in enumerate(leaves)
            if isinstance(leaf, ValueLeaf) and leaf.stored is not None
        }
        return DerivedTree(TreeMetadata(skeleton, tuple(records), aliases, held_by), arrays, values, self.source)

    def _skeleton(self, order: list[TreePath]) -> Skeleton:
        """The containers; appends the paths of the leaves in their order."""
        if list(self.leaves) == [()]:
            order.append(())
            return LEAF
        if () in self.leaves:
            raise _leaf_above((), next(path for path in self.leaves if path))
        root = _Branch({})
        for path in self._paths():
            branch = root
            is_leaf = path in self.leaves
            for depth, key in enumerate(path[:-1] if is_leaf else path):
                below = branch.children.setdefault(key, _Branch({}))
                if below is None:
                    raise _leaf_above(path[: depth + 1], path)
                branch = below
            if is_leaf and branch.children.setdefault(path[-1], None) is not None:
                raise _leaf_above(path, path)
        return self._node(root, (), order)

    def _paths(self) -> Iterator[TreePath]:
        """Leaves in their order, and among them the empty containers where they stood."""
        empty = deque(sorted(self._empty, key=lambda path: self._sequence[path]))
        for path in self.leaves:
            while empty and path in self._sequence and self._sequence[empty[0]] < self._sequence[path]:
                yield empty.popleft()
            yield path
        yield from empty

    def _node(self, branch: _Branch, path: TreePath, order: list[TreePath]) -> Node:
        kind, note = self._containers.get(path, (None, None))
        keys = list(branch.children)
        numbers = {key for key in keys if type(key) is int}
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
        return Node(kind or "dict", tuple(keys), tuple(children), note)


@dataclass(frozen=True, slots=True)
class _Branch:
    """A container: what is below it by key, None for a leaf."""

    children: dict[Key, _Branch | None]


def _leaves_of(derived: DerivedTree) -> dict[TreePath, Leaf]:
    """The leaves of a tree, by path."""
    tree, leaves = derived.tree, dict[TreePath, Leaf]()
    for number, path in enumerate(tree.paths):
        record, held_by = tree.leaves[number], tree.held_by.get(number)
        if isinstance(record, ValueRecord):
            leaves[path] = ValueLeaf(record, held_by, derived.values.get(number))
        else:
            leaves[path] = ArrayLeaf(derived.arrays[tree.aliases.get(number, number)], record, held_by)
    return leaves


def _with_known_keys(path: TreePath, known: Mapping[TreePath, Mapping[str, Key]]) -> TreePath:
    """A path with the keys that are in its containers, where its own have the same text."""
    keys: list[Key] = []
    for key in path:
        keys.append(known.get(tuple(keys), {}).get(key, key) if isinstance(key, str) else key)
    return tuple(keys)


def _leaf_above(above: TreePath, path: TreePath) -> TransformError:
    return TransformError(
        f"{format_path(above)} would be a leaf and have {format_path(path)} in it; rename one of them"
    )


def _nearest(template: Template, paths: Mapping[TreePath, Leaf]) -> str:
    """What there is that is most like a pattern."""
    texts = [path_text(path) for path in paths]
    near = NearNames(texts).nearest(str(template.pattern))
    shown = [near] if near is not None else [text[:_SHOWN] for text in texts[:3]]
    return f"there are {len(paths)} leaves, such as {', '.join(map(repr, shown))}" if shown else "there are no leaves"
