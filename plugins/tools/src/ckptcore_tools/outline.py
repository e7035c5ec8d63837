"""Outlines: the tree of a checkpoint as rows for display, with totals for each container.

Names with dots, such as the keys of a PyTorch state dict, are folded: the keys ``layers.0.weight`` and
``layers.0.bias`` become the rows ``weight`` and ``bias`` below a row ``layers.0``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from ckptcore import select
from ckptcore.model import ArrayRecord, Attribute, Key, Node, TreeMetadata
from ckptcore.model.tree import LEAF, Skeleton

_GLOB_CHARACTERS: Final = frozenset("*?[")

_MAX_FOLDS: Final = 30
"""Keys with more dots are not folded: a hostile checkpoint may have thousands."""


@dataclass(frozen=True, slots=True)
class Outline:
    """The rows of a tree, depth first. The first row is the root. Stored as columns, for trees of 100,000 arrays.

    Attributes:
        names: the key of each row, without the parts that its parent rows show.
        depths: number of rows that contain this row.
        stops: position of the first later row that this row does not contain.
        leaves: number of the leaf; -1 for a container, and for a group of keys with a common prefix.
        kinds: kind or type of each container, by row. Groups and leaves have none.
        arrays: number of arrays in each row. An array that shares the bytes of an earlier one is not counted.
        parameters, nbytes: number of elements and bytes of these arrays.
    """

    names: Sequence[str]
    depths: Sequence[int]
    stops: Sequence[int]
    leaves: Sequence[int]
    kinds: dict[int, str]
    arrays: Sequence[int]
    parameters: Sequence[int]
    nbytes: Sequence[int]

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.names)

    def children(self, row: int) -> Iterator[int]:
        """Yield the rows directly below a row."""
        child = row + 1
        while child < self.stops[row]:
            yield child
            child = self.stops[child]

    def rows(self, depth: int | None = None) -> Iterator[int]:
        """Yield the rows that at most `depth` other rows contain. None: all rows."""
        row = 0
        while row < len(self):
            yield row
            row = row + 1 if depth is None or self.depths[row] < depth else self.stops[row]

    def only(self, leaves: Collection[int]) -> Outline:
        """Return the outline of some leaves: their rows, the rows that contain them, and totals of these leaves."""
        before = [0, *itertools.accumulate([leaf in leaves for leaf in self.leaves])]
        is_kept = [row == 0 or before[stop] > before[row] for row, stop in enumerate(self.stops)]
        numbers = [0, *itertools.accumulate(is_kept)]
        rows = list(itertools.compress(range(len(self)), is_kept))
        stops = [numbers[self.stops[row]] for row in rows]
        columns = (self.arrays, self.parameters, self.nbytes)
        totals = [_totals([0 if self.leaves[row] < 0 else column[row] for row in rows], stops) for column in columns]
        return Outline(
            [self.names[row] for row in rows],
            [self.depths[row] for row in rows],
            stops,
            [self.leaves[row] for row in rows],
            {numbers[row]: kind for row, kind in self.kinds.items() if is_kept[row]},
            *totals,
        )


def count_arrays(tree: TreeMetadata) -> int:
    """Return the number of arrays of a tree. An array that shares the bytes of an earlier one is not counted."""
    return sum(isinstance(record, ArrayRecord) for record in tree.leaves) - len(tree.aliases)


def outline_of(tree: TreeMetadata) -> Outline:
    """Return the outline of a tree."""
    rows = _Rows()
    skeleton = tree.skeleton
    _count_leaves(skeleton, rows.counts)
    rows.add("<root>", (skeleton, 0) if isinstance(skeleton, Node) else 0)
    while rows.open:
        rows.continue_last()
    arrays, parameters, nbytes = zip(*_leaf_totals(tree), strict=True) if tree.leaves else ((), (), ())
    columns = (arrays, parameters, nbytes)
    totals = [_totals([0 if leaf < 0 else of[leaf] for leaf in rows.leaves], rows.stops) for of in columns]
    return Outline(rows.names, rows.depths, rows.stops, rows.leaves, rows.kinds, *totals)


def _count_leaves(node: Skeleton, counts: dict[int, int]) -> int:
    """Return the number of leaves. Store the number of leaves of each container in `counts`, by its `id`."""
    if not isinstance(node, Node):
        return 1
    leaves = node.children.count(LEAF)
    if leaves < len(node.children):
        leaves += sum([_count_leaves(child, counts) for child in node.children if child is not LEAF])
    counts[id(node)] = leaves
    return leaves


def _leaf_totals(tree: TreeMetadata) -> Iterator[tuple[int, int, int]]:
    """Yield the arrays, parameters and bytes of each leaf."""
    known: dict[int, tuple[int, int, int]] = {}  # equal arrays share a record, so most are found by identity
    for leaf, record in enumerate(tree.leaves):
        if not isinstance(record, ArrayRecord) or leaf in tree.aliases:
            yield 0, 0, 0
            continue
        totals = known.get(id(record))
        if totals is None:
            totals = known[id(record)] = (1, record.spec.size, record.spec.nbytes)
        yield totals


def leaf_filter(pattern: str) -> Callable[[TreeMetadata], Sequence[int]]:
    """Return a function that returns the leaves of a tree that match a pattern, ascending.

    A pattern with ``*``, ``?`` or ``[`` is one of `ckptcore.select.glob`. Any other text selects the paths that contain
    it, with keys joined by ``/``. An empty pattern selects all leaves.

    Raises:
        ValueError: the pattern is invalid.
    """
    if not _GLOB_CHARACTERS.isdisjoint(pattern):
        selection = select.glob(pattern)
    else:
        selection = select.where(lambda path, leaf: pattern in path)
    return lambda tree: sorted(selection.leaves(select.LeafTable(tree.paths, lambda: tree.leaves)))


def _totals(amounts: Sequence[int], stops: Sequence[int]) -> Sequence[int]:
    """Return the sum of the amounts of each row and the rows that it contains."""
    before = [0, *itertools.accumulate(amounts)]
    return [before[stop] - before[row] for row, stop in enumerate(stops)]


@dataclass(slots=True)
class _Group:
    """Children with their names."""

    names: list[str] = field(default_factory=list)
    contents: list[_Content] = field(default_factory=list)


_Content: TypeAlias = int | tuple[Node, int] | _Group
"""The number of a leaf; a container and the number of its first leaf; or a group of keys with a common prefix."""


class _Rows:
    """Rows under construction. Built without recursion, because names with dots add levels, and the stack is limited.

    Attributes:
        open: rows that have more children: the position of each, and an iterator of the children.
        counts: the number of leaves of each container, by its identity.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.depths: list[int] = []
        self.stops: list[int] = []
        self.leaves: list[int] = []
        self.kinds: dict[int, str] = {}
        self.counts: dict[int, int] = {}
        self.open: list[tuple[int, Iterator[tuple[str, _Content]]]] = []

    def continue_last(self) -> None:
        """Add children of the last open row, until one of them has children."""
        position, children = self.open[-1]
        for name, content in children:
            if self.add(name, content):
                return
        self.open.pop()
        self.stops[position] = len(self.names)

    def add(self, name: str, content: _Content) -> bool:
        """Add a row. Return True if the row has children. A group with one child has the same row as this child."""
        while isinstance(content, _Group) and len(content.names) == 1:
            (inner,), (content,) = content.names, content.contents
            name = f"{name}.{inner}"
        position = len(self.names)
        self.names.append(name)
        self.depths.append(len(self.open))
        self.stops.append(position + 1)
        if isinstance(content, int):
            self.leaves.append(content)
            return False
        self.leaves.append(-1)
        if not isinstance(content, _Group):
            node, _ = content
            self.kinds[position] = node.type or node.kind
            content = _children_of(*content, self.counts)
        self.open.append((position, zip(content.names, content.contents, strict=True)))
        return True


def _children_of(node: Node, first: int, counts: Mapping[int, int]) -> _Group:
    """Return the children of a container, with keys that have dots in groups."""
    groups = {"": _Group()}
    for key, child in zip(node.keys, node.children, strict=True):
        prefix, name = _split(key)
        group = groups.get(prefix) or _add_group(groups, prefix)
        group.names.append(name)
        if isinstance(child, Node):
            group.contents.append((child, first))
            first += counts[id(child)]
        else:
            group.contents.append(first)
            first += 1
    return groups[""]


def _add_group(groups: dict[str, _Group], prefix: str) -> _Group:
    """Add a group, and the groups that contain it."""
    above, _, name = prefix.rpartition(".")
    group = groups[prefix] = _Group()
    outer = groups.get(above) or _add_group(groups, above)
    outer.names.append(name)
    outer.contents.append(group)
    return group


def _split(key: Key) -> tuple[str, str]:
    """Split a key into its groups, joined by dots, and its last part."""
    if isinstance(key, Attribute):
        return "", f".{key.name}"
    if isinstance(key, int | tuple):
        return "", f"[{key!r}]"
    if "." not in key:
        return "", key or "''"
    if ".." in key or key[0] == "." or key[-1] == "." or key.count(".") > _MAX_FOLDS:
        return "", key
    prefix, _, name = key.rpartition(".")
    return prefix, name
