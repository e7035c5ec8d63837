"""Subtrees of a saved tree, and optimizer states in a tree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from ckptcore.errors import TreeMismatchError
from ckptcore.model.metadata import ArrayRecord, TreeMetadata
from ckptcore.model.tree import Attribute, Key, Node, Skeleton, TreePath, format_path, leaf_count
from ckptcore.tree.suggestions import NameSuggestions

_NAMES: Final = frozenset((
    "opt", "opt_state", "opt_states", "optim", "optim_state", "optimizer", "optimizer_state", "optimizer_state_dict",
    "optimizer_states", "optimizer_variables", "optimizers",
))  # fmt: skip
"""Usual names of optimizer states in programs, PyTorch Lightning, Flax, Keras and Megatron."""

_AMBIGUOUS: Final = "opt"
"""A name that models use, too, such as for an optical tower. It counts only with a name of `_ENTRIES` inside it."""

_ENTRIES: Final = frozenset((
    "exp_avg", "exp_avg_sq", "momentum_buffer", "square_avg", "state", "param_groups", "mu", "nu", "trace",
    "learning_rate",
))  # fmt: skip
"""Names inside optimizer states of PyTorch, optax and Keras."""

_DEEPEST: Final = 3
"""Maximum length of searched paths, in keys. Training states have the optimizer near the root."""

_SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class OptimizerParts:
    """The optimizers in a tree.

    Attributes:
        optimizers: the paths of optimizer states, as text for `subtree`.
        others: the paths of the other subtrees with arrays.
        drops: for each state, the pattern of its leaves, for the transform `Drop`.
    """

    optimizers: Sequence[str]
    others: Sequence[str]
    drops: Sequence[str]

    @property
    def transforms(self) -> str:
        """The transforms that drop the optimizer states, as Python code."""
        return f"[{', '.join([f'Drop({pattern!r})' for pattern in self.drops])}]"

    def __str__(self) -> str:
        more = f" and {len(self.optimizers) - _SHOWN} more" if len(self.optimizers) > _SHOWN else ""
        return f"the state of an optimizer in {', '.join(map(repr, self.optimizers[:_SHOWN]))}{more}"


def find_optimizers(tree: TreeMetadata) -> OptimizerParts | None:
    """Return the optimizers in a tree whose states have arrays; None if there are none."""
    has_array = [isinstance(record, ArrayRecord) for record in tree.leaves]
    optimizers: list[TreePath] = []
    others: list[TreePath] = []

    def visit(node: Skeleton, path: TreePath, first: int) -> bool:
        """Return True if an optimizer is at or below a path."""
        if not any(has_array[first : first + leaf_count(node)]):
            return False
        if _is_optimizer(node, path):
            optimizers.append(path)
            return True
        if not isinstance(node, Node) or len(path) == _DEEPEST:
            return False
        children = list(_children(node, path, first))
        have_optimizers = [visit(*child) for child in children]
        if any(have_optimizers):
            others.extend(
                below
                for (child, below, start), holds in zip(children, have_optimizers, strict=True)
                if not holds and isinstance(child, Node) and any(has_array[start : start + leaf_count(child)])
            )
        return any(have_optimizers)

    if not visit(tree.skeleton, (), 0):
        return None
    texts = list(dict.fromkeys(map(_text, optimizers)))
    drops = list(dict.fromkeys(map(_pattern, optimizers)))
    return OptimizerParts(texts, list(map(_text, others)), drops)


def _is_optimizer(node: Skeleton, path: TreePath) -> bool:
    """Return True for a node with the name or the form of an optimizer state. In a name with dots, only the first part
    is compared with the names of states."""
    first, *rest = _name(path).lower().split(".") if path else [""]
    if first in _NAMES and (isinstance(node, Node) or rest):
        return first != _AMBIGUOUS or not _ENTRIES.isdisjoint(rest) or _has_entry(node)
    if not isinstance(node, Node):
        return False
    names = {_name((key,)) for key in node.keys}
    return {"state", "param_groups"} <= names or {"mu", "nu"} <= names  # of PyTorch, and of optax


def _has_entry(node: Skeleton) -> bool:
    """Return True if a name of `_ENTRIES` is in a subtree."""
    if not isinstance(node, Node):
        return False
    names = {part for key in node.keys for part in _name((key,)).split(".")}
    return not _ENTRIES.isdisjoint(names) or any(map(_has_entry, node.children))


def _name(path: TreePath) -> str:
    key = path[-1]
    return key.name if isinstance(key, Attribute) else str(key)


def _children(node: Node, path: TreePath, first: int) -> Iterator[tuple[Skeleton, TreePath, int]]:
    for key, child in zip(node.keys, node.children, strict=True):
        yield child, (*path, key), first
        first += leaf_count(child)


def _pattern(path: TreePath) -> str:
    if not path:
        return "**"
    return f"{_text(path)}{'.' if '.' in _name(path) else '/'}**"


def _text(path: TreePath) -> str:
    """Return a path as text. If the last key has dots, only its first part is used."""
    return "/".join([*map(str, path[:-1]), *[str(key).partition(".")[0] for key in path[-1:]]])


SubtreePath: TypeAlias = str | Sequence[Key]
"""The path of a subtree: its keys, or one text with ``/`` between them. A text also matches the name of an attribute or
the digits of an index, if no str key is equal to it. Empty: the whole tree."""


@dataclass(frozen=True, slots=True)
class Subtree:
    """A part of a tree.

    Attributes:
        tree: the subtree, with relative paths.
        sources: for each leaf of the subtree, the number of the leaf of the whole tree that stores its elements or
            value. Never an alias.
    """

    tree: TreeMetadata
    sources: tuple[int, ...]


def path_keys(path: SubtreePath) -> tuple[Key, ...]:
    """Return the keys of a path. Empty keys of a text are skipped."""
    return tuple([key for key in path.split("/") if key]) if isinstance(path, str) else tuple(path)


def find_subtree(tree: TreeMetadata, path: SubtreePath) -> Subtree:
    """Return the part of a tree below a path.

    Arrays that are tied within the subtree stay tied. An array that is tied to an array outside becomes an array of the
    subtree.

    Args:
        tree: the whole tree.
        path: path of a container or a leaf.

    Raises:
        TreeMismatchError: if the path does not exist.
    """
    part, first = _descend(tree.skeleton, path_keys(path))
    sources = tuple([tree.aliases.get(leaf, leaf) for leaf in range(first, first + leaf_count(part))])
    seen: dict[int, int] = {}
    aliases = {}
    for leaf, source in enumerate(sources):
        original = seen.setdefault(source, leaf)
        if original != leaf:
            aliases[leaf] = original
    held_by = {leaf: tree.held_by[first + leaf] for leaf in range(len(sources)) if first + leaf in tree.held_by}
    return Subtree(TreeMetadata(part, tree.leaves[first : first + len(sources)], aliases, held_by), sources)


def unknown_checkpointable(subtree: SubtreePath, names: Sequence[str]) -> TreeMismatchError:
    """Return the error for a subtree that does not start with the name of a checkpointable."""
    wanted = f"subtree={subtree!r}"
    return TreeMismatchError(
        f"{wanted} does not start with the name of a checkpointable. Expected one of {', '.join(map(repr, names))}",
        [wanted],
    )


def _descend(skeleton: Skeleton, keys: Sequence[Key]) -> tuple[Skeleton, int]:
    """Return the skeleton at a path, and the number of its first leaf."""
    part, first = skeleton, 0
    for depth, key in enumerate(keys):
        number = _child_number(part, key)
        if number is None:
            raise _missing(part, keys, depth)
        assert isinstance(part, Node)  # only containers have children
        first += sum(leaf_count(child) for child in part.children[:number])
        part = part.children[number]
    return part, first


def _child_number(part: Skeleton, wanted: Key) -> int | None:
    if not isinstance(part, Node):
        return None
    for number, key in enumerate(part.keys):
        if type(key) is type(wanted) and key == wanted:
            return number
    if isinstance(wanted, str):
        for number, key in enumerate(part.keys):
            if str(key) == wanted:
                return number
    return None


def _missing(part: Skeleton, keys: Sequence[Key], depth: int) -> TreeMismatchError:
    parent = format_path(tuple(keys[:depth]))
    if isinstance(part, Node):
        names = ", ".join(repr(str(key)) for key in part.keys[:20]) + (", ..." if len(part.keys) > 20 else "")
        content = f"{parent} contains {names}" if names else f"{parent} is empty"
        near = NameSuggestions([str(key) for key in part.keys]).nearest(str(keys[depth]))
        content += f"; did you mean {near!r}?" if near else ""
    else:
        content = f"{parent} is a leaf"
    line = f"{format_path(tuple(keys))} does not exist in the tree: {content}"
    end = "" if line.endswith("?") else "."
    return TreeMismatchError(f"{line}{end} Give an existing subtree, or () for the whole tree", [line])
